//! `burgeon let-go`: a mount gets all of its lazy data in a plain file, and needs no process any
//! more.
//!
//! ```text
//!   room in the cache's disk ─► threads: read the mount's data device, write ─► sync ─► rename
//!                               (superblocks, lazy data: fetched and verified           │
//!                                by the server; zeros elsewhere)                        │
//!   mounts/<id>/plain  ◄── its device can be exchanged ─────────────────────────────────┤
//!   supervisor: sprout reserved before the copy; freeze, exchange the file, thaw        │
//!   images/<digest>/complete/plain, sums  ◄── it cannot, or btrfs knows no checksums ───┘
//!   the next mount of the image begins with it
//! ```
//!
//! The copy is made by the command, so the supervisor never waits for a store. One command at a
//! time copies to a file; a copy that was interrupted is begun again.

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    panic::resume_unwind,
    path::{Path, PathBuf},
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Error, ErrorKind, Pages, Result};
use burgeon_btrfs::{DeviceNo, superblock_offsets};
use burgeon_image::{AddressMap, rename_own};
use rustix::fs::{Advice, FlockOperation, OFlags, RenameFlags, fadvise, flock};

use crate::{
    id::MountId,
    ipc::{
        client::Client,
        protocol::{CacheRequest, Reply, Request},
    },
    state::{
        cache_dir::CacheDir,
        complete,
        files::{self, Lock},
        paths::StateDir,
        prepared::read_info,
        record::{MountRecord, Plain, WritesState, read_record},
        space,
    },
};

/// Bytes of one read.
const PIECE: u64 = 1 << 20;
/// Reads at the same time: the server fetches for each of them.
const THREADS: usize = 8;
/// Interval at which the copy looks for the daemon.
const LOOK: Duration = Duration::from_secs(1);

/// Lets mount `id` go; calls `progress` with the bytes that are copied. If only the next mount of
/// the image can have the copy, returns the reason.
pub fn let_go(
    state: &StateDir,
    client: &Client,
    id: MountId,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Option<String>> {
    let record = read_record(state, id)?;
    if record.plain {
        return Ok(None);
    }
    record.check_copy()?;
    let map = AddressMap::open(&record.attach.seed.join("map"))?;
    let begin = |reserve| match client.call(&Request::BeginLetGo { id, reserve })? {
        (Reply::LetGo { later }, _) => Ok(later),
        _ => Err(unexpected()),
    };
    // Its seed may have been prepared with the checksums of an earlier copy.
    let has_checksums = record.attach.seed == complete::folder(state, &record.digest.0);
    let later = match map.lacks_checksums() && !has_checksums {
        true => Some(NO_CHECKSUMS.to_owned()),
        false => begin(false)?,
    };
    if later.is_some() {
        keep_for_next(state, client, &record, &map, progress)?;
        return Ok(later);
    }
    let writes = match &record.writes {
        WritesState::Sprout(sprout) if sprout.thin => sprout.limit.saturating_sub(sprout.reserved),
        _ => 0,
    };
    make_room(state, client, map.data_range().len(), writes)?;
    // First, because a copy takes long: this fails if the writes' space is not there.
    begin(true)?;
    let (from, superblocks) = data_device(&record)?;
    let path = state.plain_file(id);
    copy(
        state,
        &path,
        &from,
        superblocks.into_iter().chain(pieces(map.data_range())),
        None,
        progress,
    )?;
    match client.call(&Request::LetGo { id })? {
        (Reply::Done, _) => Ok(None),
        _ => Err(unexpected()),
    }
}

const NO_CHECKSUMS: &str = "btrfs has no checksums of this mount's files, because only the tables of contents of its image \
     were known; the next mount has them";

/// Copies the data of the mount to its image, for the next mount.
fn keep_for_next(
    state: &StateDir,
    client: &Client,
    record: &MountRecord,
    map: &AddressMap,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let image = record.digest.0;
    if complete::is_here(state, &image) {
        return Ok(());
    }
    make_room(state, client, map.data_range().len(), 0)?;
    let folder = complete::folder(state, &image);
    files::make_folder(&folder)?;
    let _lock = Lock::try_take(&folder.join("copy.lock"))?.ok_or_else(another)?;
    let (from, _) = data_device(record)?;
    let (plain, sums) = match map.lacks_checksums() {
        true => (Plain::WithChecksums, Some(Sums::create(complete::sums(state, &image), map)?)),
        false => (Plain::Described, None),
    };
    let path = plain.path(state, &image);
    copy(state, &path, &from, pieces(map.data_range()), sums.as_ref(), progress)
}

/// The mount's data device, and the places of its superblocks.
fn data_device(record: &MountRecord) -> Result<(Device, Vec<ByteRange>)> {
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

fn another() -> Error {
    let what = "another `burgeon let-go` copies the same data: wait for it";
    Error::new(ErrorKind::Unavailable, what)
}

/// The checksums of all blocks of an image, in a new file.
struct Sums {
    file: File,
    path: PathBuf,
    start: u64,
    kind: ChecksumKind,
}

impl Sums {
    fn create(path: PathBuf, map: &AddressMap) -> Result<Self> {
        let (data, kind) = (map.data_range(), map.checksum_kind());
        let new = path.with_extension("new");
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let made = files::open(&new, &mut options).and_then(|file| {
            file.set_len(data.len() / BLOCK_SIZE * kind.size() as u64).map(|()| file)
        });
        let failed = |e| Error::io(format!("cannot make {}", new.display()), e);
        Ok(Self { file: made.map_err(failed)?, path, start: data.start(), kind })
    }

    /// Adds those of the blocks of `piece`.
    fn add(&self, piece: ByteRange, bytes: &[u8]) -> Result<()> {
        let size = self.kind.size();
        let mut sums = Vec::with_capacity(bytes.len() / BLOCK_SIZE as usize * size);
        for block in bytes.chunks(BLOCK_SIZE as usize) {
            sums.extend_from_slice(&self.kind.of(block).to_le_bytes()[..size]);
        }
        let at = (piece.start() - self.start) / BLOCK_SIZE * size as u64;
        let failed = |e| Error::io("cannot write the checksums of the mount's data", e);
        self.file.write_all_at(&sums, at).map_err(failed)
    }

    /// All are there.
    fn publish(&self) -> Result<()> {
        let new = self.path.with_extension("new");
        let published = self.file.sync_all().and_then(|()| publish_own(&new, &self.path));
        published.map_err(|e| Error::io(format!("cannot write {}", self.path.display()), e))?;
        files::sync_parent(&self.path)
    }
}

/// Less privileged processes can write to these folders, so no symlink is followed.
fn publish_own(new: &Path, path: &Path) -> io::Result<()> {
    rename_own(new, path, RenameFlags::empty())
}

fn unexpected() -> Error {
    let what = "unexpected answer from the daemon: is it of another version? `burgeon upgrade` \
                replaces it";
    Error::new(ErrorKind::Unavailable, what)
}

/// Makes room for a copy of `data` bytes, and for the bytes that `writes` may still take: the cache
/// evicts down to its floor, if it lies on the same disk.
fn make_room(state: &StateDir, client: &Client, data: u64, writes: u64) -> Result<()> {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if !space::shares_disk(&CacheDir::read(state).folder(state), &state.mounts()) {
        let free = space::free_space(&state.mounts())?;
        if free >= data.saturating_add(writes).saturating_add(space::HOST_LEFT) {
            return Ok(());
        }
        let what = format!(
            "a copy of its data takes {} MiB in the state directory, and its writes may still take {} \
             MiB; {} MiB are free there, of which {} MiB are left to the host: free some space",
            mib(data),
            mib(writes),
            mib(free),
            mib(space::HOST_LEFT)
        );
        return Err(Error::new(ErrorKind::NoSpace, what));
    }
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

/// Copies `pieces` of the mount's data device to the file `path`, and their checksums to `sums`.
fn copy(
    state: &StateDir,
    path: &Path,
    from: &Device,
    pieces: impl Iterator<Item = ByteRange> + Send,
    sums: Option<&Sums>,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let new = path.with_extension("new");
    let failed = |e| Error::io(format!("cannot copy the mount's data to {}", new.display()), e);
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = files::open(&new, &mut options).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(another()),
        Err(e) => return Err(failed(e.into())),
    }
    // Another command may have finished the file between its opening and its lock: then it lies
    // below a mount, and must not be cut off.
    let identity = |it: &fs::Metadata| (it.dev(), it.ino());
    let locked = file.metadata().map_err(failed)?;
    if new.symlink_metadata().ok().as_ref().map(identity) != Some(identity(&locked)) {
        return Err(another());
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
    copy_pieces(state, from, (&file, sums), pieces, progress)
        .inspect_err(|_| drop(files::remove_file(&new)))?;
    file.sync_all().map_err(failed)?;
    // It is read through the loop device from now on, directly.
    let _ = fadvise(&file, 0, None, Advice::DontNeed);
    // The file is of use only with its checksums.
    sums.map_or(Ok(()), Sums::publish)?;
    publish_own(&new, path).map_err(failed)?;
    files::sync_parent(path)
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
        return Err(other_device(&name));
    }
    Ok(Device { file, size, name })
}

fn other_device(name: &str) -> Error {
    let what = format!("{name} is not the device of this mount any more: is it unmounted?");
    Error::new(ErrorKind::NotFound, what)
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
    state: &StateDir,
    from: &Device,
    to: (&File, Option<&Sums>),
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
    let ended = (Mutex::new(false), Condvar::new());
    thread::scope(|scope| {
        // A read of a device whose daemon has died waits for the next one, and cannot be killed.
        scope.spawn(|| keep_daemon(state, &ended));
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        let copied: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
        *ended.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        ended.1.notify_all();
        // Not before, because the scope waits for the other thread, too.
        copied.into_iter().for_each(|thread| thread.unwrap_or_else(|panic| resume_unwind(panic)));
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
        if matches!(Client::connect(state), Ok(None))
            && let Err(error) = Client::connect_or_start(state)
        {
            tracing::warn!(%error, "cannot start the daemon, which serves the data that is copied");
        }
    }
}

fn no_memory() -> Error {
    Error::new(ErrorKind::LocalIo, "no memory for copying the mount's data")
}

fn copy_piece(
    from: &Device,
    (to, sums): (&File, Option<&Sums>),
    piece: ByteRange,
    bytes: &mut [u8],
) -> Result<()> {
    from.file.read_exact_at(bytes, piece.start()).map_err(|e| {
        let what = format!(
            "cannot read {piece} of {}: `burgeon status` shows the store's last error",
            from.name
        );
        Error::io(what, e)
    })?;
    sums.map_or(Ok(()), |sums| sums.add(piece, bytes))?;
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
