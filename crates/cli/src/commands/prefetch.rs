//! `burgeon prefetch`: reads files, so that missing data is fetched, verified and cached.
//!
//! ```text
//!   walk ─► pieces of 1 MiB, in the order of the files ─► threads: read, and forget the page cache
//! ```
//! The kernel may read ahead; the daemon still fetches each chunk only once.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use rustix::fs::{Advice, OFlags, fadvise};
use serde_json::json;

use super::Context;
use crate::{data_args, output, progress::Progress};

/// Bytes of one read: four of the largest chunks.
const PIECE: u64 = 1 << 20;
/// Errors before giving up: one damaged file is tolerated, an unreachable source is not.
const FAILURES_MAX: usize = 100;
/// Most files to remember: some 150 bytes each.
const FILES_MAX: usize = 10_000_000;

pub(super) fn prefetch(context: &Context, args: data_args::Prefetch) -> Result<ExitCode> {
    let mut files = Vec::new();
    for path in &args.paths {
        let found = fs::canonicalize(path)
            .map_err(|e| Error::io(format!("cannot fetch {}", path.display()), e))?;
        if !burgeon_daemon::is_burgeon_mount(&found) {
            let shown = path.display();
            let what = format!(
                "cannot fetch {shown}: it is in no mount of Burgeon, or this user may not read \
                 it; `burgeon status` lists the mounts"
            );
            return Err(Error::new(ErrorKind::NotFound, what).into());
        }
    }
    for path in &args.paths {
        collect(path, &mut files)?;
    }
    let total: u64 = files.iter().map(|(_, len)| len).sum();
    let work = Work {
        files,
        next: Mutex::new((0, 0)),
        done: AtomicU64::new(0),
        failed: AtomicUsize::new(0),
        first_error: Mutex::new(None),
        begun: Instant::now(),
        rate: args.rate,
    };
    let progress = Progress::new("prefetch");
    thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads.get()).map(|_| scope.spawn(|| work.run())).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            progress.update(work.done.load(Relaxed), Some(total));
            thread::sleep(Duration::from_millis(50));
        }
    });
    let seconds = progress.finish().as_secs_f64();
    let (files, failed) = (work.files.len(), work.failed.load(Relaxed));
    if let Some(error) = work.first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let what = format!("pieces of files that could not be fetched: {failed}; the first");
        return Err(anyhow::Error::new(error).context(what));
    }
    if context.json {
        output::print_json(&json!({ "files": files, "bytes": total, "seconds": seconds }))?;
    } else {
        let files = output::counted(files as u64, "file");
        println!("fetched {files}, {}, in {seconds:.1} s", output::bytes(total));
    }
    Ok(ExitCode::SUCCESS)
}

/// Collects the files below `path`.
pub(super) fn collect(path: &Path, files: &mut Vec<(PathBuf, u64)>) -> Result<()> {
    let failed = |e| Error::io(format!("cannot fetch {}", path.display()), e);
    let mut folders = Vec::new();
    let mut look = |path: PathBuf, folders: &mut Vec<PathBuf>| -> Result<()> {
        let metadata = fs::symlink_metadata(&path).map_err(failed)?;
        if metadata.is_dir() {
            folders.push(path);
        } else if metadata.is_file() {
            files.push((path, metadata.len()));
        }
        if files.len() > FILES_MAX {
            let message = format!("more than {FILES_MAX} files: name a part of them");
            return Err(Error::new(ErrorKind::Invalid, message).into());
        }
        Ok(())
    };
    look(fs::canonicalize(path).map_err(failed)?, &mut folders)?;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(failed)? {
            look(entry.map_err(failed)?.path(), &mut folders)?;
        }
    }
    Ok(())
}

struct Work {
    files: Vec<(PathBuf, u64)>,
    /// File and offset of the next piece.
    next: Mutex<(usize, u64)>,
    done: AtomicU64,
    failed: AtomicUsize,
    first_error: Mutex<Option<Error>>,
    begun: Instant,
    /// Bytes a second, at most.
    rate: Option<u64>,
}

impl Work {
    fn run(&self) {
        let mut buffer = vec![0; PIECE as usize];
        let mut open: Option<(usize, File)> = None;
        while let Some((index, offset, len)) = self.take() {
            let (path, _) = &self.files[index];
            if let Err(e) = read(&mut open, index, path, offset, &mut buffer[..len as usize]) {
                let failed = self.failed.fetch_add(1, Relaxed) + 1;
                let error = Error::io(format!("{} at {offset}", path.display()), e);
                self.first_error
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(error);
                if failed >= FAILURES_MAX {
                    self.next.lock().unwrap_or_else(PoisonError::into_inner).0 = self.files.len();
                }
            }
            let done = self.done.fetch_add(len, Relaxed) + len;
            if let Some(rate) = self.rate {
                let due = Duration::from_secs_f64(done as f64 / rate as f64);
                thread::sleep(due.saturating_sub(self.begun.elapsed()));
            }
        }
    }

    /// The next piece: file, offset, length.
    fn take(&self) -> Option<(usize, u64, u64)> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let (index, offset) = *next;
            let (_, size) = self.files.get(index)?;
            if offset < *size {
                let len = PIECE.min(size - offset);
                next.1 += len;
                return Some((index, offset, len));
            }
            *next = (index + 1, 0);
        }
    }
}

/// Opens a file found by the walk. Another object may have its name by now, so this follows no
/// symlink and waits for no FIFO.
pub(super) fn open_found(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits() as i32).open(path)
}

/// Reads a piece of a file and drops its pages: only the daemon's cache is to be filled.
fn read(
    open: &mut Option<(usize, File)>,
    index: usize,
    path: &Path,
    offset: u64,
    buffer: &mut [u8],
) -> std::io::Result<()> {
    let file = match open.take() {
        Some((before, file)) if before == index => file,
        _ => open_found(path)?,
    };
    // A truncated file has less to fetch.
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(len) => filled += len,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    // Only a hint: pages that stay cost memory that the kernel can reclaim.
    let len = std::num::NonZeroU64::new(buffer.len() as u64);
    let _ = fadvise(&file, offset, len, Advice::DontNeed);
    *open = Some((index, file));
    Ok(())
}
