//! Waits for the fill of a mount, because chunks in the cache may be cloned.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::daemon::Daemon;

/// Interval of looking at it.
const LOOK: Duration = Duration::from_millis(200);
/// A fill that gets nothing for so long has a store that does not answer: the copy says why.
const STALLED: Duration = Duration::from_secs(10);

/// Waits until the mount is not being filled; calls `progress` with the bytes that are here.
pub(super) fn wait(daemon: &mut Daemon<'_>, progress: &(dyn Fn(u64) + Sync)) {
    let (mut last, mut since) = (0, Instant::now());
    while let Some(bytes) = filled(daemon) {
        if bytes > last {
            (last, since) = (bytes, Instant::now());
            progress(bytes);
        }
        if since.elapsed() > STALLED {
            return;
        }
        thread::sleep(LOOK);
    }
}

/// Bytes that its fill has fetched, if it runs.
fn filled(daemon: &mut Daemon<'_>) -> Option<u64> {
    daemon.mount()?.fill.filter(|fill| fill.state == "running").map(|fill| fill.done_bytes)
}
