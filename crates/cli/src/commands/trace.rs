//! `burgeon trace`: which reads of a mount had to wait, and for what.
//!
//! ```text
//!   server: the last 256 waits of each mount ──► addresses ──► files, by the image's manifest
//! ```
//!
//! The process that waited is unknown: a read of lazy data comes from the kernel's own threads,
//! which read for whoever needs the page.

use std::{
    collections::BTreeMap,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use burgeon_block::ByteRange;
use burgeon_daemon::{
    Client, MountId,
    log::one_line,
    protocol::{MountStatus, Reply, Request, WaitStatus},
};
use burgeon_image::{Manifest, ManifestLimits, Profile, catalog};
use burgeon_source::{Access, Store};
use chrono::DateTime;
use serde_json::{Value, json};

use super::{Context, record, umount::mount_of};
use crate::output::{self, counted, duration_us};
use crate::watch_args::Trace;

/// Time between two questions while it follows.
const PAUSE: Duration = Duration::from_millis(200);

/// A wait, and the file that its first byte belongs to.
pub(super) struct Located {
    wait: WaitStatus,
    file: Option<(String, u64)>,
}

impl Located {
    fn file(&self) -> &str {
        self.file.as_ref().map_or("(no file)", |(file, _)| file)
    }

    fn document(&self) -> Value {
        let mut document = serde_json::to_value(&self.wait).unwrap_or_default();
        document["file"] = self.file.as_ref().map(|(file, _)| file.as_str()).into();
        document["offset"] = self.file.as_ref().map(|(_, offset)| *offset).into();
        document["process"] = Value::Null;
        document
    }

    fn print(&self) {
        let wait = &self.wait;
        let ended = i64::try_from(wait.ended_unix_us).unwrap_or(i64::MAX);
        let ended = DateTime::from_timestamp_micros(ended).unwrap_or_default();
        let took = duration_us(wait.took_us as f64);
        let offset = self.file.as_ref().map_or(wait.address, |(_, offset)| *offset);
        let object = wait.object.as_deref().unwrap_or("a virtual area");
        let mut end = String::new();
        if wait.failed_tries > 0 {
            end.push_str(&format!("  failed tries: {}", wait.failed_tries));
        }
        end.extend(wait.error.iter().map(|error| format!("  ERROR {error}")));
        println!(
            "{}  {took:>8}  {:<6}  {} +{offset} ({} bytes)  {object}{end}",
            ended.format("%H:%M:%S%.3f"),
            wait.tier,
            one_line(self.file()),
            wait.len,
        );
    }
}

pub(super) fn trace(context: &Context, options: &Trace) -> Result<ExitCode> {
    let (client, mount) = mount_of(context, &options.mount, &options.mount)?;
    let digest = mount.digest.0;
    let manifest = manifest(context, &mount)?;
    let locate = |waits: Vec<WaitStatus>| located(&manifest, &digest, waits, options.threshold);
    let streams = options.top.is_none() && !options.summary && !context.json;
    let mut all = Vec::new();
    match options.follow {
        None => all = locate(ask(&client, mount.id, 0)?),
        Some(seconds) => {
            let end = Instant::now() + Duration::from_secs(seconds);
            let mut last = ask(&client, mount.id, 0)?.last().map_or(0, |wait| wait.number);
            while Instant::now() < end {
                thread::sleep(PAUSE);
                let mut new = ask(&client, mount.id, last)?;
                if new.is_empty() {
                    // A new server counts from 1 again.
                    let highest = ask(&client, mount.id, 0)?.last().map_or(0, |it| it.number);
                    if highest >= last {
                        continue;
                    }
                    new = ask(&client, mount.id, 0)?;
                }
                last = new.last().map_or(last, |wait| wait.number);
                let new = locate(new);
                if streams {
                    new.iter().for_each(Located::print);
                }
                all.extend(new);
            }
        }
    }
    if context.json {
        let waits: Vec<_> = all.iter().map(Located::document).collect();
        output::print_json(
            &json!({ "waits": waits, "files": files(&all), "summary": sums(&all) }),
        )?;
    } else if options.top.is_some() {
        print_files(&all);
    } else if options.summary {
        print_summary(&all);
    } else if options.follow.is_none() {
        all.iter().for_each(Located::print);
        if all.is_empty() {
            println!(
                "no read waited for {} ms or longer, or failed, as far as is remembered",
                options.threshold
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The manifest of the mount's image.
pub(super) fn manifest(context: &Context, mount: &MountStatus) -> Result<Manifest> {
    let digest = mount.digest.0;
    if let Some(manifest) = record::manifest_here(context, &digest) {
        return Ok(manifest);
    }
    let store = Store::open(&mount.store, &Access::from_env())?;
    Ok(catalog::load(&store, &digest, &ManifestLimits::default())?)
}

pub(super) fn ask(client: &Client, id: MountId, after: u64) -> Result<Vec<WaitStatus>> {
    match client.call(&Request::Waits { id, after })?.0 {
        Reply::Waits { waits } => Ok(waits),
        _ => anyhow::bail!("the daemon is of another version: `burgeon upgrade` replaces it"),
    }
}

/// Finds the files of the waits that are long enough, and of those that ended in an error.
pub(super) fn located(
    manifest: &Manifest,
    image: &burgeon_block::Digest,
    waits: Vec<WaitStatus>,
    threshold_ms: u64,
) -> Vec<Located> {
    let is_long = |wait: &WaitStatus| wait.took_us >= threshold_ms.saturating_mul(1000);
    let waits: Vec<_> =
        waits.into_iter().filter(|wait| is_long(wait) || wait.error.is_some()).collect();
    if waits.is_empty() {
        return Vec::new();
    }
    let ranges = waits.iter().filter_map(|wait| ByteRange::at(wait.address, wait.len));
    let found = Profile::of(manifest, *image, &ranges.collect::<Vec<_>>());
    let file = |wait: &WaitStatus| {
        let end = wait.address.saturating_add(wait.len);
        let reads = found.reads.iter().filter(|read| {
            let addresses = read.addresses();
            addresses.start() < end && addresses.end() > wait.address
        });
        let first = reads.min_by_key(|read| read.address)?;
        let path = found.files.get(first.file as usize)?;
        let skip = wait.address.saturating_sub(first.address);
        Some((String::from_utf8_lossy(path).into_owned(), first.offset + skip))
    };
    waits.into_iter().map(|wait| Located { file: file(&wait), wait }).collect()
}

/// Microseconds, waits and name of each file, the most time first.
pub(super) fn by_file(all: &[Located]) -> Vec<(u64, u64, String)> {
    let mut files: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for located in all {
        let (took, waits) = files.entry(located.file()).or_default();
        *took = took.saturating_add(located.wait.took_us);
        *waits += 1;
    }
    let rows = files.into_iter().map(|(file, (took, waits))| (took, waits, file.to_owned()));
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|a, b| b.cmp(a));
    rows
}

/// The same as documents.
fn files(all: &[Located]) -> Vec<Value> {
    let document = |(took, waits, file)| json!({ "file": file, "waits": waits, "took_us": took });
    by_file(all).into_iter().map(document).collect()
}

fn print_files(all: &[Located]) {
    let mut rows = vec![["TIME", "WAITS", "FILE"].map(str::to_owned).to_vec()];
    let row = |(took, waits, file): (u64, u64, String)| {
        vec![duration_us(took as f64), waits.to_string(), one_line(&file)]
    };
    rows.extend(by_file(all).into_iter().map(row));
    output::table(&rows);
}

/// The numbers of all waits.
fn sums(all: &[Located]) -> Value {
    let waits = || all.iter().map(|located| &located.wait);
    let took = waits().fold(0u64, |sum, wait| sum.saturating_add(wait.took_us));
    json!({
        "waits": all.len(),
        "took_us": took,
        "longest_us": waits().map(|wait| wait.took_us).max().unwrap_or(0),
        "from_source": waits().filter(|wait| wait.tier == "source").count(),
        "failed_tries": waits().fold(0u64, |sum, wait| sum.saturating_add(wait.failed_tries)),
        "errors": waits().filter(|wait| wait.error.is_some()).count(),
    })
}

fn print_summary(all: &[Located]) {
    let sums = sums(all);
    let number = |key: &str| sums[key].as_u64().unwrap_or(0);
    println!(
        "{}, {} in sum, the longest {}; for a fetch: {}; failed tries: {}; errors: {}",
        counted(number("waits"), "wait"),
        duration_us(number("took_us") as f64),
        duration_us(number("longest_us") as f64),
        number("from_source"),
        number("failed_tries"),
        number("errors"),
    );
}
