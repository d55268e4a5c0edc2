//! `burgeon let-go`: a mount gets all of its lazy data in a plain file, and needs no process any
//! more.
//!
//! ```text
//!   room in the cache's disk ─► threads: read the mount's data device, write ─► sync ─► rename
//!                               (superblocks, lazy data: fetched and verified       mounts/<id>/plain
//!                                by the server; zeros elsewhere)                       │
//!   supervisor: reserve the sprout, freeze, exchange the file, thaw  ◄── LetGo ────────┘
//! ```
//!
//! The copy is made by the command, so the supervisor never waits for a store. One command at a
//! time copies for a mount; a copy that was interrupted is begun again.

use std::{
    fs::File,
    io::{Seek, SeekFrom},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, Pages, Result};
use burgeon_btrfs::{DeviceNo, superblock_offsets};
use burgeon_image::AddressMap;
use rustix::fs::{Advice, FlockOperation, OFlags, fadvise, flock};

use crate::{
    id::MountId,
    ipc::{
        client::Client,
        protocol::{CacheRequest, Reply, Request},
    },
    state::{
        files,
        paths::StateDir,
        prepared::read_info,
        record::{WritesState, read_record},
    },
};

/// Bytes of one read.
const PIECE: u64 = 1 << 20;
/// Reads at the same time: the server fetches for each of them.
const THREADS: usize = 8;

/// Lets mount `id` go; calls `progress` with the bytes that are copied.
pub fn let_go(
    state: &StateDir,
    client: &Client,
    id: MountId,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let record = read_record(state, id)?;
    if record.plain {
        return Ok(());
    }
    record.check_let_go()?;
    let map = AddressMap::open(&record.attach.seed.join("map"))?;
    if map.lacks_checksums() {
        let what = "the kernel could not verify a copy of it: only the table of contents of this \
                    image is known, which has no checksum of each block. Once all of its data is \
                    local, the next mount has them";
        return Err(Error::new(ErrorKind::Unavailable, what));
    }
    let Some(device) = &record.data_device else {
        let what = "the mount is not finished: try again";
        return Err(Error::new(ErrorKind::Unavailable, what));
    };
    let writes = match &record.writes {
        WritesState::Sprout(sprout) if sprout.thin => sprout.limit.saturating_sub(sprout.reserved),
        _ => 0,
    };
    make_room(client, map.data_range().len(), writes)?;
    let info = read_info(&record.attach.seed)?;
    let from = open_device(device, info.data_device_size())?;
    let superblocks = superblock_offsets(&info, DeviceNo::Data).iter();
    let superblocks = superblocks.filter_map(|at| ByteRange::at(*at, BLOCK_SIZE));
    copy(state, id, &from, superblocks.chain(pieces(map.data_range())), progress)?;
    match client.call(&Request::LetGo { id })? {
        (Reply::Done, _) => Ok(()),
        _ => Err(unexpected()),
    }
}

fn unexpected() -> Error {
    let what = "unexpected answer from the daemon: is it of another version? `burgeon upgrade` \
                replaces it";
    Error::new(ErrorKind::Unavailable, what)
}

/// Makes room on the disk of the cache, above its floor: for a copy of `data` bytes, and for the
/// bytes that `writes` may still take.
fn make_room(client: &Client, data: u64, writes: u64) -> Result<()> {
    let ask = |request| match client.call(&Request::Cache(request))? {
        (Reply::Cache(answer), _) => Ok(answer.cache),
        _ => Err(unexpected()),
    };
    let mut cache = ask(CacheRequest::Show)?;
    let wanted = data.saturating_add(writes).saturating_add(cache.floor);
    if cache.free < wanted {
        cache = ask(CacheRequest::Evict { bytes: wanted - cache.free })?;
    }
    if cache.free >= wanted {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let what = format!(
        "a copy of its data takes {} MiB, and its writes may still take {} MiB; {} MiB are free, of \
         which {} MiB, the cache's floor, stay free: free some space, or lower the floor (`burgeon \
         cache resize --keep-free`)",
        mib(data),
        mib(writes),
        mib(cache.free),
        mib(cache.floor)
    );
    Err(Error::new(ErrorKind::NoSpace, what))
}

/// Copies the mount's data device to the mount's plain file.
fn copy(
    state: &StateDir,
    id: MountId,
    from: &Device,
    pieces: impl Iterator<Item = ByteRange> + Send,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let path = state.plain_file(id);
    let new = path.with_extension("new");
    let failed = |e| Error::io(format!("cannot copy the mount's data to {}", new.display()), e);
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = files::open(&new, &mut options).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let what = "another `burgeon let-go` copies the data of this mount: wait for it";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        Err(e) => return Err(failed(e.into())),
    }
    file.set_len(0).and_then(|()| file.set_len(from.size)).map_err(|e| {
        let what = format!(
            "cannot make {}, a sparse file of {} GiB (some file systems have none so large: XFS and \
             btrfs have)",
            new.display(),
            from.size >> 30
        );
        Error::io(what, e)
    })?;
    copy_pieces(from, &file, pieces, progress).inspect_err(|_| drop(files::remove_file(&new)))?;
    file.sync_all().map_err(failed)?;
    // It is read through the loop device from now on, directly.
    let _ = fadvise(&file, 0, None, Advice::DontNeed);
    std::fs::rename(&new, &path).map_err(failed)?;
    files::sync_parent(&path)
}

/// The data device of a mount.
struct Device {
    file: File,
    size: u64,
    name: String,
}

/// Opens the device, which must have `size` bytes: a loop's number is used again.
fn open_device(path: &Path, size: u64) -> Result<Device> {
    let name = path.display().to_string();
    let failed = |e| Error::io(format!("cannot open {name}"), e);
    let direct = OFlags::DIRECT.bits() as i32;
    let mut file = File::options().read(true).custom_flags(direct).open(path).map_err(failed)?;
    if file.seek(SeekFrom::End(0)).map_err(failed)? != size {
        let what = format!("{name} is not the device of this mount any more: is it unmounted?");
        return Err(Error::new(ErrorKind::NotFound, what));
    }
    Ok(Device { file, size, name })
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

fn copy_pieces(
    from: &Device,
    to: &File,
    pieces: impl Iterator<Item = ByteRange> + Send,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let pieces = Mutex::new(pieces);
    let (done, failed) = (AtomicU64::new(0), Mutex::new(None));
    let next = || {
        let is_over = failed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if is_over { None } else { pieces.lock().unwrap_or_else(PoisonError::into_inner).next() }
    };
    let work = || {
        let copied = Pages::zeroed(PIECE).ok_or_else(no_memory).and_then(|mut buffer| {
            while let Some(piece) = next() {
                let bytes = &mut buffer.bytes_mut()[..piece.len() as usize];
                copy_piece(from, to, piece, bytes)?;
                progress(done.fetch_add(piece.len(), Relaxed) + piece.len());
            }
            Ok(())
        });
        if let Err(error) = copied {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    thread::scope(|scope| {
        (0..THREADS).for_each(|_| drop(scope.spawn(work)));
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn no_memory() -> Error {
    Error::new(ErrorKind::LocalIo, "no memory for copying the mount's data")
}

fn copy_piece(from: &Device, to: &File, piece: ByteRange, bytes: &mut [u8]) -> Result<()> {
    from.file.read_exact_at(bytes, piece.start()).map_err(|e| {
        let what = format!(
            "cannot read {piece} of {}: `burgeon status` shows the store's last error",
            from.name
        );
        Error::io(what, e)
    })?;
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    to.write_all_at(bytes, piece.start())
        .map_err(|e| Error::io("cannot write the copy of the mount's data", e))
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
