//! Copies data from a mount's device: several threads read, and write.

use std::{
    fs::File,
    io::{Seek, SeekFrom},
    os::unix::fs::{FileExt, OpenOptionsExt},
    panic::resume_unwind,
    path::Path,
    sync::{Condvar, Mutex, PoisonError},
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, Pages, Result};
use burgeon_btrfs::{DeviceNo, superblock_offsets};
use burgeon_image::CHUNK_MAX;
use rustix::fs::OFlags;

use super::{Job, sums::Sums};
use crate::{
    ipc::client::Client,
    state::{paths::StateDir, prepared::read_info, record::MountRecord},
};

/// Bytes of one read.
const PIECE: u64 = 1 << 20;
// A chunk is read twice to compare it.
const _: () = assert!(PIECE >= 2 * CHUNK_MAX as u64);
/// Reads at the same time: the server fetches for each of them.
const THREADS: usize = 8;
/// Interval at which the copy looks for the daemon.
const LOOK: Duration = Duration::from_secs(1);

/// The mount's data device, and the places of its superblocks.
pub(super) fn data_device(record: &MountRecord) -> Result<(Device, Vec<ByteRange>)> {
    let Some(device) = &record.data_device else {
        let what = "the mount is not finished: try again";
        return Err(Error::new(ErrorKind::Unavailable, what));
    };
    let info = read_info(&record.attach.seed)?;
    let superblocks = superblock_offsets(&info, DeviceNo::Data).iter();
    let superblocks = superblocks.filter_map(|at| ByteRange::at(*at, BLOCK_SIZE)).collect();
    let opened = open_device(device, info.data_device_size())?;
    // Only now: before, its number might have been given to another mount in between.
    if !record.is_alive() {
        return Err(other_device(&opened.name));
    }
    Ok((opened, superblocks))
}

/// The data device of a mount.
pub(super) struct Device {
    file: File,
    pub(super) size: u64,
    name: String,
}

/// Opens the device, which must have `size` bytes: a loop's number is used again.
fn open_device(path: &Path, size: u64) -> Result<Device> {
    let name = path.display().to_string();
    let failed = |e| Error::io(format!("cannot open {name}"), e);
    let direct = OFlags::DIRECT.bits() as i32;
    let mut file = File::options().read(true).custom_flags(direct).open(path).map_err(failed)?;
    if file.seek(SeekFrom::End(0)).map_err(failed)? != size {
        return Err(other_device(&name));
    }
    Ok(Device { file, size, name })
}

fn other_device(name: &str) -> Error {
    let what = format!("{name} is not the device of this mount any more: is it unmounted?");
    Error::new(ErrorKind::NotFound, what)
}

impl Device {
    /// Fills `bytes` from `at`; the server fetches and verifies them.
    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(bytes, at).map_err(|e| {
            let what = format!(
                "cannot read {} bytes at {at} of {}: `burgeon status` shows the store's last error",
                bytes.len(),
                self.name
            );
            Error::io(what, e)
        })
    }
}

/// Copies `ranges` of the mount's data device to the file `to`, and their checksums to `sums`.
pub(super) fn copy(
    job: &Job<'_>,
    ranges: impl Iterator<Item = ByteRange> + Send,
    to: &File,
    sums: Option<&Sums>,
) -> Result<()> {
    in_threads(job.state, ranges.flat_map(pieces), |piece: ByteRange, buffer| {
        let bytes = &mut buffer[..piece.len() as usize];
        job.device.read(piece.start(), bytes)?;
        sums.map_or(Ok(()), |sums| sums.add(piece, bytes))?;
        // Ranges that were not written are zeros.
        if bytes.iter().any(|byte| *byte != 0) {
            to.write_all_at(bytes, piece.start())
                .map_err(|e| Error::io("cannot write the copy of the mount's data", e))?;
        }
        job.done(piece.len());
        Ok(())
    })
}

/// `range`, in pieces that begin at multiples of [`PIECE`].
fn pieces(range: ByteRange) -> impl Iterator<Item = ByteRange> + Send {
    let mut at = range.start();
    std::iter::from_fn(move || {
        let end = range.end().min((at / PIECE + 1) * PIECE);
        let piece = ByteRange::new(at, end).filter(|piece| !piece.is_empty())?;
        at = end;
        Some(piece)
    })
}

/// Does `work` with each of `items` in several threads, with a buffer of [`PIECE`] bytes. The first
/// error ends it.
pub(super) fn in_threads<T: Send>(
    state: &StateDir,
    items: impl Iterator<Item = T> + Send,
    work: impl Fn(T, &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    let (items, failed) = (Mutex::new(items), Mutex::new(None));
    let next = || {
        let is_over = failed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if is_over { None } else { items.lock().unwrap_or_else(PoisonError::into_inner).next() }
    };
    let run = || {
        let done = Pages::zeroed(PIECE).ok_or_else(no_memory).and_then(|mut buffer| {
            while let Some(item) = next() {
                work(item, buffer.bytes_mut())?;
            }
            Ok(())
        });
        if let Err(error) = done {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    let ended = (Mutex::new(false), Condvar::new());
    thread::scope(|scope| {
        // A read of a device whose daemon has died waits for the next one, and cannot be killed.
        scope.spawn(|| keep_daemon(state, &ended));
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        let done: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
        *ended.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        ended.1.notify_all();
        // Not before, because the scope waits for the other thread, too.
        done.into_iter().for_each(|thread| thread.unwrap_or_else(|panic| resume_unwind(panic)));
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Starts the daemon again if it has died, until the copy has `ended`.
fn keep_daemon(state: &StateDir, ended: &(Mutex<bool>, Condvar)) {
    loop {
        let waiting = ended.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = ended.1.wait_timeout_while(waiting, LOOK, |ended| !*ended);
        if *waited.unwrap_or_else(PoisonError::into_inner).0 {
            return;
        }
        if let Err(error) = Client::connect_or_start(state) {
            tracing::warn!(%error, "cannot start the daemon, which serves the data that is copied");
        }
    }
}

fn no_memory() -> Error {
    Error::new(ErrorKind::LocalIo, "no memory for copying the mount's data")
}

#[cfg(test)]
mod tests {
    use burgeon_block::ByteRange;

    use super::{PIECE, pieces};

    #[test]
    fn pieces_cover_the_data_once_and_in_order() {
        for (start, len) in [(0, 1), (PIECE - 4096, 8192), (4096, 3 * PIECE), (PIECE, 0)] {
            let range = ByteRange::at(start, len).unwrap();
            let all: Vec<_> = pieces(range).collect();
            assert_eq!(all.iter().map(|piece| piece.len()).sum::<u64>(), len);
            let mut at = start;
            for piece in all {
                assert!(piece.start() == at && piece.len() <= PIECE);
                at = piece.end();
            }
        }
    }
}
