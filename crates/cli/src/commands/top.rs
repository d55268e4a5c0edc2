//! `burgeon top`: one screen about all mounts, again and again.
//!
//! ```text
//!   status now, minus status before ──► rates; waits of each mount ──► slowest files
//! ```

use std::{
    collections::HashMap,
    io::{self, IsTerminal},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use burgeon_block::Digest;
use burgeon_daemon::{
    Client, MountId,
    log::one_line,
    protocol::{MountStatus, Status},
};
use burgeon_image::Manifest;
use serde_json::json;

use super::{Context, trace};
use crate::output::{self, bytes, duration_us};
use crate::watch_args::Top;

/// The size of a terminal that does not tell its own.
const LINES: usize = 24;
const COLUMNS: usize = 80;

/// Files that are shown.
const FILES_MAX: usize = 5;

/// Lines beside those of mounts and files.
const OTHER_LINES: usize = 7;

/// The counters of one moment.
#[derive(Default)]
struct Look {
    /// Hits, misses and fetched bytes of each mount.
    mounts: HashMap<MountId, (u64, u64, u64)>,
    hit_bytes: u64,
    miss_bytes: u64,
}

impl Look {
    fn at(status: &Status) -> Self {
        let of = |mount: &MountStatus| {
            let reads = &mount.reads;
            (mount.id, (reads.hits, reads.misses, reads.fetched_bytes + reads.background_bytes))
        };
        let read = status.cache.as_ref().map(|cache| cache.read).unwrap_or_default();
        let mounts = status.mounts.iter().map(of).collect();
        Self { mounts, hit_bytes: read.hit, miss_bytes: read.miss }
    }
}

pub(super) fn top(context: &Context, options: &Top) -> Result<ExitCode> {
    let mut before: Option<(Look, Instant)> = None;
    let mut manifests = HashMap::new();
    let mut shown = 0;
    while options.count.is_none_or(|count| shown < count) {
        let found = Client::connect_and_ask(&context.state)?;
        let now = Instant::now();
        let look = found.as_ref().map(|(_, status)| Look::at(status)).unwrap_or_default();
        // The first screen of a person comes at once, without rates.
        let seconds = before.as_ref().map(|(_, at)| now.duration_since(*at).as_secs_f64());
        if seconds.is_some() || options.count.is_none() || found.is_none() {
            let last = before.take().map(|(last, _)| last).unwrap_or_default();
            let rates = Rates { last: &last, now: &look, seconds };
            let files = found
                .as_ref()
                .map(|(client, status)| slowest(context, client, status, &mut manifests));
            show(
                context,
                found.as_ref().map(|(_, status)| status),
                &rates,
                &files.unwrap_or_default(),
            )?;
            shown += 1;
        }
        before = Some((look, now));
        if options.count.is_none_or(|count| shown < count) {
            thread::sleep(Duration::from_secs(options.interval));
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Rates<'a> {
    last: &'a Look,
    now: &'a Look,
    /// Between both; `None` at the first look.
    seconds: Option<f64>,
}

impl Rates<'_> {
    fn of(&self, before: u64, now: u64) -> f64 {
        self.seconds.map_or(0.0, |seconds| now.saturating_sub(before) as f64 / seconds.max(0.001))
    }

    /// Hits, misses and bytes a second of a mount.
    fn mount(&self, id: MountId) -> [f64; 3] {
        let now = self.now.mounts.get(&id).copied().unwrap_or_default();
        let last = self.last.mounts.get(&id).copied().unwrap_or(now);
        [self.of(last.0, now.0), self.of(last.1, now.1), self.of(last.2, now.2)]
    }
}

/// The files with the longest waits that are remembered, over all mounts.
fn slowest(
    context: &Context,
    client: &Client,
    status: &Status,
    manifests: &mut HashMap<Digest, Option<Manifest>>,
) -> Vec<(u64, u64, String)> {
    let mut files = Vec::new();
    manifests.retain(|digest, _| status.mounts.iter().any(|mount| mount.digest.0 == *digest));
    for mount in &status.mounts {
        let digest = mount.digest.0;
        let load = || trace::manifest(context, mount).ok();
        let Some(manifest) = manifests.entry(digest).or_insert_with(load) else { continue };
        let Ok(waits) = trace::ask(client, mount.id, 0) else { continue };
        files.extend(trace::by_file(&trace::located(manifest, &digest, waits, 1)));
    }
    files.sort_by(|a, b| b.cmp(a));
    files.truncate(FILES_MAX);
    files
}

fn show(
    context: &Context,
    status: Option<&Status>,
    rates: &Rates<'_>,
    files: &[(u64, u64, String)],
) -> Result<()> {
    if context.json {
        let mounts: Vec<_> = status.map_or(&[][..], |status| &status.mounts[..]).iter().map(|mount| {
            let [hits, misses, fetched] = rates.mount(mount.id);
            json!({ "target": mount.target, "hits_per_second": hits, "misses_per_second": misses,
                "fetched_bytes_per_second": fetched })
        }).collect();
        return output::print_json(&json!({ "mounts": mounts }));
    }
    let is_screen = io::stdout().is_terminal();
    let (lines, columns) = size();
    let mut text = Vec::new();
    match status {
        None => text.push(format!("burgeon: {}", super::without_daemon::no_daemon(context))),
        Some(status) => {
            describe(status, rates, lines.saturating_sub(OTHER_LINES + files.len()), &mut text)
        }
    }
    if !files.is_empty() {
        text.push(String::new());
        text.push("WAITED      WAITS  FILE".to_owned());
        let row = |(took, waits, file): &(u64, u64, String)| {
            format!("{:>9} {waits:>7}  {}", duration_us(*took as f64), one_line(file))
        };
        text.extend(files.iter().map(row));
    }
    if !is_screen {
        text.iter().for_each(|line| println!("{line}"));
        return Ok(());
    }
    // Home, each line to its end, and the rest of the screen empty.
    let cut = |line: &String| line.chars().take(columns).collect::<String>() + "\u{1b}[K";
    let rows: Vec<_> = text.iter().take(lines.saturating_sub(1)).map(cut).collect();
    println!("\u{1b}[H{}\u{1b}[J", rows.join("\n"));
    Ok(())
}

fn describe(status: &Status, rates: &Rates<'_>, room: usize, text: &mut Vec<String>) {
    let hit = rates.of(rates.last.hit_bytes, rates.now.hit_bytes);
    let miss = rates.of(rates.last.miss_bytes, rates.now.miss_bytes);
    let ratio = if hit + miss > 0.0 {
        format!("{:.0} %", hit * 100.0 / (hit + miss))
    } else {
        "–".to_owned()
    };
    text.push(format!(
        "burgeon {}  mounts {}  local {}/s  waited for {}/s  hits {ratio}",
        status.version,
        status.mounts.len(),
        bytes(hit as u64),
        bytes(miss as u64),
    ));
    if let Some(cache) = &status.cache {
        text.push(format!("cache {} of {}", bytes(cache.used), bytes(cache.limit)));
    }
    text.push(String::new());
    if status.mounts.is_empty() {
        text.push("nothing is mounted".to_owned());
        return;
    }
    text.push("  HITS/S MISSES/S  FETCHED/S      P50      P99 QUEUE WAIT  MOUNT".to_owned());
    let mut mounts: Vec<_> =
        status.mounts.iter().map(|mount| (rates.mount(mount.id), mount)).collect();
    // The busiest first.
    mounts.sort_by(|(a, _), (b, _)| b[1].total_cmp(&a[1]).then(b[0].total_cmp(&a[0])));
    let latency = |us: Option<f64>| us.map_or("–".to_owned(), duration_us);
    for ([hits, misses, fetched], mount) in mounts.iter().take(room.max(1)) {
        let (queue, waiting) =
            mount.cache.as_ref().map_or((0, 0), |cache| (cache.in_flight, cache.waiting_readers));
        let mark = if mount.state == "serving" { "" } else { " NOT SERVED" };
        text.push(format!(
            "{hits:>8.0} {misses:>8.0} {:>10} {:>8} {:>8} {queue:>5} {waiting:>4}  {} {}{mark}",
            bytes(*fetched as u64),
            latency(mount.reads.source_latency.p50_us),
            latency(mount.reads.source_latency.p99_us),
            mount.image,
            output::path(&mount.target),
        ));
    }
    let more = mounts.len().saturating_sub(room.max(1));
    if more > 0 {
        text.push(format!("… and {more} more, less busy"));
    }
}

/// Lines and columns of the terminal.
fn size() -> (usize, usize) {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout());
    let known = size.ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
    known.map_or((LINES, COLUMNS), |size| (size.ws_row.into(), size.ws_col.into()))
}
