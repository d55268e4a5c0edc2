//! `burgeon pin`: fetches the data of files now, and again whenever the cache was lost.
//!
//! ```text
//!   files ─► their lazy addresses (FIEMAP) ─► daemon: written down, then fetched in the background
//! ```
//! Nothing is read through the mount, so computed data and files of this host cost nothing.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::Result;
use burgeon_block::{ByteRange, Error, ErrorKind};
use burgeon_daemon::{
    extents::addresses,
    protocol::{CACHE_FULL, CacheAnswer, CacheRequest, FillStatus, OVER_LIMIT, Reply, Request},
};
use serde_json::json;

use super::{
    Context,
    map::Mount,
    prefetch::{collect, open_found},
    umount::ask,
};
use crate::{data_args, output, progress::Progress};

/// Interval of progress requests.
const INTERVAL: Duration = Duration::from_millis(200);
/// Most consecutive requests without an answer: 30 s.
const SILENCES_MAX: usize = 150;

pub(super) fn pin(context: &Context, args: data_args::Pin) -> Result<ExitCode> {
    let mut mounts: Vec<(Mount, NewPins)> = Vec::new();
    for path in &args.paths {
        let path = std::path::absolute(path)?;
        let there = match std::fs::canonicalize(&path) {
            Ok(there) => Some(there),
            // A removed file can still be unpinned by its name.
            Err(_) if args.remove => None,
            Err(e) => return Err(Error::io(format!("cannot pin {}", path.display()), e).into()),
        };
        let ancestor = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
        let mount = Mount::of(context, there.as_deref().unwrap_or(ancestor))?;
        let ranges = if args.remove { Vec::new() } else { ranges(&path)? };
        let path = there.unwrap_or(path).display().to_string();
        if args.remove {
            refuse_unpinned(&mount, &path)?;
        }
        let known = mounts.iter().position(|(known, _)| known.id == mount.id);
        let at = known.unwrap_or_else(|| {
            mounts.push((mount, NewPins::default()));
            mounts.len() - 1
        });
        let (mount, new) = &mut mounts[at];
        new.note(mount, &path)?;
        set(mount, path, ranges)?;
    }
    let mut total = 0;
    if !args.remove {
        for (mount, new) in &mounts {
            total += wait(mount, new)?;
        }
    }
    if context.json {
        output::print_json(&json!({ "paths": args.paths, "pinned_bytes": total }))?;
    } else if args.remove {
        for path in &args.paths {
            println!(
                "{} is no longer pinned; its data stays until the cache evicts it",
                path.display()
            );
        }
    } else {
        println!("pinned: {} are local in all, and stay so", output::bytes(total));
    }
    Ok(ExitCode::SUCCESS)
}

/// Paths of a mount that are pinned now, and were not before.
#[derive(Default)]
struct NewPins(Vec<String>);

impl NewPins {
    fn note(&mut self, mount: &Mount, path: &str) -> Result<()> {
        let this = ask(&mount.client)?.mounts.into_iter().find(|status| status.id == mount.id);
        if this.is_none_or(|status| !status.pins.iter().any(|pin| pin == path)) {
            self.0.push(path.to_owned());
        }
        Ok(())
    }

    /// Unpins them: the cache cannot keep the `wanted` bytes of all pins of the mount. Returns the
    /// error for the user.
    fn take_back(&self, mount: &Mount, wanted: u64) -> Result<Error> {
        for path in &self.0 {
            set(mount, path.clone(), Vec::new())?;
        }
        let this = ask(&mount.client)?.mounts.into_iter().find(|status| status.id == mount.id);
        let others = this.and_then(|status| status.pinned).map_or(0, |pinned| pinned.total_bytes);
        let (Reply::Cache(answer), _) = mount.client.call(&Request::Cache(CacheRequest::Show))?
        else {
            return Err(unexpected());
        };
        let more = wanted.saturating_sub(others);
        let what = format!("cannot pin {} more: {}", output::bytes(more), refusal(&answer, more));
        Ok(Error::new(ErrorKind::NoSpace, what))
    }
}

/// Why the cache cannot keep `more` pinned bytes, and the remedy.
fn refusal(answer: &CacheAnswer, more: u64) -> String {
    let (cache, of) = (&answer.cache, |bytes| output::bytes(bytes));
    let most = cache.limit / 5 * 4;
    if cache.free <= cache.floor {
        return format!(
            "{} of the cache's disk are free, and it leaves {} free: free some space, or lower that \
             (`burgeon cache resize --keep-free SIZE`)",
            of(cache.free),
            of(cache.floor)
        );
    }
    if cache.held.saturating_add(more) <= most {
        return "a limit of the image or of its store is smaller (`burgeon cache status` shows it): \
                raise it (`burgeon cache resize --limit IMAGE=SIZE`, or `=none`)"
            .to_owned();
    }
    let least = cache.held.saturating_add(more).saturating_mul(5).div_ceil(4 << 20);
    format!(
        "pins take at most 80 % of the cache's limit of {}, and {} are pinned: set a limit of at \
         least {least}M (`burgeon cache resize {least}M`), or unpin other files",
        of(cache.limit),
        of(cache.held)
    )
}

/// Pins `ranges` of `path`; without ranges, unpins it.
fn set(mount: &Mount, path: String, ranges: Vec<(u64, u64)>) -> Result<()> {
    match mount.client.call(&Request::Pin { id: mount.id, path, ranges })? {
        (Reply::Done, _) => Ok(()),
        _ => Err(unexpected()),
    }
}

fn unexpected() -> anyhow::Error {
    anyhow::anyhow!(
        "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it"
    )
}

/// Refuses to remove a pin that does not exist: pins are known by the path that was pinned.
fn refuse_unpinned(mount: &Mount, path: &str) -> Result<()> {
    let this = ask(&mount.client)?.mounts.into_iter().find(|status| status.id == mount.id);
    let pins = this.map(|status| status.pins).unwrap_or_default();
    if pins.iter().any(|pin| pin == path) {
        return Ok(());
    }
    let others = match pins.as_slice() {
        [] => "nothing is pinned in this mount".to_owned(),
        pins => {
            format!("pinned are {}", pins.iter().take(10).cloned().collect::<Vec<_>>().join(", "))
        }
    };
    Err(Error::new(ErrorKind::NotFound, format!("{path} is not pinned: {others}")).into())
}

/// The lazy addresses of all files at and below `path`; adjacent ranges are joined.
fn ranges(path: &Path) -> Result<Vec<(u64, u64)>> {
    let mut files: Vec<(PathBuf, u64)> = Vec::new();
    collect(path, &mut files)?;
    let mut ranges = Vec::new();
    for (file, _) in &files {
        let failed = |e| Error::io(format!("cannot pin {}", file.display()), e);
        ranges.extend(addresses(&open_found(file).map_err(failed)?)?);
    }
    ranges.sort_by_key(|range| range.start());
    let mut merged: Vec<ByteRange> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end() >= range.start() => {
                *last = ByteRange::new(last.start(), last.end().max(range.end())).unwrap_or(*last);
            }
            _ => merged.push(range),
        }
    }
    Ok(merged.iter().map(|range| (range.start(), range.len())).collect())
}

/// Waits until all pinned data of the mount is local; returns its bytes. If the cache cannot keep
/// it, nothing `new` stays pinned.
fn wait(mount: &Mount, new: &NewPins) -> Result<u64> {
    let progress = Progress::new("pin");
    let mut silent = 0;
    let mut limit = 0;
    let FillStatus { state, total_bytes, done_bytes, .. } = loop {
        let this = ask(&mount.client)?.mounts.into_iter().find(|status| status.id == mount.id);
        limit = this.as_ref().and_then(|status| status.fetch_limit).unwrap_or(limit);
        match this.and_then(|status| status.pinned) {
            Some(pinned) => {
                progress.update(pinned.done_bytes, Some(pinned.total_bytes));
                if pinned.state != "running" {
                    break pinned;
                }
                silent = 0;
            }
            // The server is starting, or cannot tell.
            None if silent < SILENCES_MAX => silent += 1,
            None => {
                let message = "the daemon does not say how far it is: see `burgeon status`";
                return Err(Error::new(ErrorKind::Unavailable, message).into());
            }
        }
        thread::sleep(INTERVAL);
    };
    progress.finish();
    if done_bytes == total_bytes {
        return Ok(total_bytes);
    }
    if state == OVER_LIMIT {
        let message = format!(
            "{} of {} are local: the mount may fetch no more than {} (--fetch-limit); mount it \
             with a higher limit to fetch the rest",
            output::bytes(done_bytes),
            output::bytes(total_bytes),
            output::bytes(limit)
        );
        return Err(Error::new(ErrorKind::OverLimit, message).into());
    }
    if state == CACHE_FULL {
        return Err(new.take_back(mount, total_bytes)?.into());
    }
    let message = format!(
        "{} of {} are local ({state}): `burgeon status` says why; the next mount tries again",
        output::bytes(done_bytes),
        output::bytes(total_bytes)
    );
    Err(Error::new(ErrorKind::Unavailable, message).into())
}
