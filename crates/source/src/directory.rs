//! A store that is a folder.
//!
//! ```text
//!   packs/ manifests/ images/ roots/    objects; each appears by rename, whole
//!   tmp/<writer>/                        scratch of a writer; tmp/<writer>/lock is flocked by it
//!   tmp/<writer>.part                    an object being written, under a shared lock of `lock`
//!   lock                                 shared: a writer begins or publishes; exclusive: collect
//! ```
//!
//! Invariants: an object exists whole or not at all, also after a power loss (fsync, rename, fsync
//! of the folder); leftovers of a killed writer lie in `tmp/` until the next collector removes
//! them, and a live writer's flock protects its files from it. Nothing is published, listed or
//! removed through a symlink in the place of one of these folders: others may write to a shared
//! store, and a process with more rights would write or remove for them elsewhere. Held by the
//! tests below.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use burgeon_block::{
    BlockSource, ByteRange, Collecting, Error, ErrorKind, Lease, ObjectId, ObjectStore, Result,
};
use bytes::Bytes;
use rustix::{
    fs::{FlockOperation, OFlags},
    io::Errno,
};

use crate::{
    check_len,
    opening::{Manner, not_a_file, open_checked, opened_now, with_opened},
    own_folder::{OwnFolder, doing},
    too_short,
};

/// Time that a partial object waits to be resumed, and a layer to be used by an image: a week.
const PARTIAL_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Longest list of an image's layers: 512 layers of 80 bytes fit.
const HELD_MAX: u64 = 64 << 10;

/// A folder of objects. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Directory {
    root: Arc<Path>,
}

/// Distinguishes the temporary files of one process.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl Directory {
    /// The store in the existing folder `root`.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        match opened_now(&root, Manner::Folder) {
            Ok(_) => Ok(Self { root: root.into() }),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Err(Error::new(
                ErrorKind::Invalid,
                format!("the store {} is not a directory", root.display()),
            )),
            Err(error) => Err(doing("open the store", &root)(error)),
        }
    }

    /// The store in `root`, which is made if missing.
    pub fn create(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(doing("make the store", &root))?;
        Self::open(root)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of `object`.
    pub fn path_of(&self, object: &ObjectId) -> PathBuf {
        self.root.join(object.as_str())
    }

    /// The bytes of `range` of `object`. Blocks on the disk.
    pub fn read_now(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let path = self.path_of(object);
        self.read_opened(&path, opened_now(&path, Manner::Stored), object, range)
    }

    fn read_opened(
        &self,
        path: &Path,
        opened: io::Result<File>,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<Bytes> {
        let len = check_len(object, range)?;
        let file = opened.map_err(|error| self.cannot_read(path, error))?;
        let mut buf = vec![0; len];
        match file.read_exact_at(&mut buf, range.start()) {
            Ok(()) => Ok(buf.into()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(too_short(object, range))
            }
            Err(error) => Err(self.cannot_read(path, error)),
        }
    }

    /// Bytes of killed writers that the next collection removes. 0 while a writer is active: they
    /// cannot be told apart then.
    pub fn stale_bytes(&self) -> Result<u64> {
        let (path, tmp) = (self.root.join("lock"), self.root.join("tmp"));
        let _held = match lock_file(&path, FlockOperation::NonBlockingLockExclusive) {
            Ok(held) => held,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) => return Err(doing("lock", &path)(error)),
        };
        let found = OwnFolder::open(&tmp)?.each("look at", stale)?;
        Ok(found.into_iter().flatten().sum())
    }

    /// A store whose folder is gone (unmounted?) may come back; a single missing object will not.
    fn cannot_read(&self, path: &Path, error: io::Error) -> Error {
        let what = format!("cannot read {}", path.display());
        // A store of images whose data is elsewhere has no packs.
        let is_there = |part: &&str| opened_now(&self.root.join(part), Manner::Folder).is_ok();
        let is_store = || ["packs", "manifests"].iter().any(is_there);
        let gone = error.kind() == io::ErrorKind::NotFound && !is_store();
        if gone || error.kind() == io::ErrorKind::StaleNetworkFileHandle {
            let what = format!("{what}: the store {} does not exist", self.root.display());
            return Error::with_source(ErrorKind::Unavailable, what, error);
        }
        if error.kind() == io::ErrorKind::InvalidData {
            return Error::with_source(ErrorKind::Corrupt, what, error);
        }
        match Error::io(what.clone(), io::Error::from(error.kind())).kind() {
            // The store's disk failed, not a local file: a retry may help.
            ErrorKind::LocalIo => Error::with_source(ErrorKind::Unavailable, what, error),
            kind => Error::with_source(kind, what, error),
        }
    }

    fn temporary(&self) -> Result<PathBuf> {
        let tmp = self.make_tmp()?;
        let boot = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let number = NEXT.fetch_add(1, Relaxed);
        let process = std::process::id();
        Ok(tmp.join(format!("{process}-{number}-{:x}{:08x}", boot.tv_sec, boot.tv_nsec)))
    }

    /// The folder of unpublished files.
    fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    /// The same, which is made if missing.
    pub(crate) fn make_tmp(&self) -> Result<PathBuf> {
        let tmp = self.tmp();
        fs::create_dir_all(&tmp).map_err(doing("make", &tmp))?;
        OwnFolder::open(&tmp)?;
        Ok(tmp)
    }

    /// Removes leftovers of killed writers without waiting for the collector. Partial objects, and
    /// whole layers of images that were not completed, stay for a week. Best effort.
    pub fn sweep(&self) {
        let Ok(_alone) = self.lock(FlockOperation::NonBlockingLockExclusive) else { return };
        let mut is_written = false;
        let Ok(tmp) = OwnFolder::open(&self.tmp()) else { return };
        for name in tmp.names().unwrap_or_default() {
            let (path, partial) =
                (tmp.reach(&name), name.as_encoded_bytes().starts_with(b"partial-"));
            if !partial || fs::symlink_metadata(&path).is_ok_and(|file| is_old(&file)) {
                is_written |= !matches!(remove_stale(&path), Ok(Some(_)));
            }
        }
        // A writer may use a stored layer, and records that only when it has all of them.
        if !is_written {
            let _ = self.sweep_layers();
        }
    }

    /// Removes old layers that no image uses; on an error, the users are unknown and none is
    /// removed.
    fn sweep_layers(&self) -> Result<()> {
        let of = |object: &ObjectId| fs::metadata(self.path_of(object));
        let mut old = self.list("layers")?;
        old.retain(|layer| of(layer).is_ok_and(|file| is_old(&file)));
        if old.is_empty() {
            return Ok(());
        }
        let mut needed = HashSet::new();
        for list in self.list("held")? {
            let text = self.get(&list, HELD_MAX)?;
            needed.extend(String::from_utf8_lossy(&text).lines().map(str::to_owned));
        }
        old.iter().filter(|layer| !needed.contains(layer.as_str())).try_for_each(|l| self.remove(l))
    }

    /// Keeps writers away, and does `with` to each leftover: it returns the bytes of a dead
    /// writer's. `verb` is for errors.
    fn collecting(
        &self,
        verb: &str,
        with: impl Fn(&Path) -> io::Result<Option<u64>>,
    ) -> Result<Collecting> {
        let held = self.lock(FlockOperation::LockExclusive)?;
        let tmp = self.tmp();
        // The owner of a partial object is a writer that also has a folder: count that.
        let found = OwnFolder::open(&tmp)?
            .each(verb, |path| Ok(with(path)?.ok_or_else(|| path.is_dir())))?;
        let writers = found.iter().filter(|found| **found == Err(true)).count();
        let stale_bytes = found.iter().filter_map(|found| found.ok()).sum();
        Ok(Collecting { lease: Lease::new(tmp, Box::new(held)), writers, stale_bytes })
    }

    /// Takes the store's lock; blocks while another process holds it.
    pub(crate) fn lock(&self, operation: FlockOperation) -> Result<File> {
        let path = self.root.join("lock");
        lock_file(&path, operation).map_err(doing("lock", &path))
    }

    /// Makes the rename of `from` to `object` durable.
    fn rename(&self, from: &Path, object: &ObjectId) -> Result<()> {
        let to = self.path_of(object);
        let folder = to.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).map_err(doing("make", folder))?;
        let (own, name) = (OwnFolder::open(folder)?, to.file_name().unwrap_or_default());
        fs::rename(from, own.reach(name)).map_err(doing("publish", &to))?;
        sync_dir(folder)?;
        if folder != &*self.root {
            sync_dir(&self.root)?;
        }
        Ok(())
    }

    /// Publishes the output of `write`, through a temporary file.
    fn publish_with(
        &self,
        object: &ObjectId,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<()> {
        let _shared = self.lock(FlockOperation::LockShared)?;
        let path = self.temporary()?.with_extension("part");
        let result = (|| {
            let mut file = File::create_new(&path)?;
            write(&mut file)?;
            file.sync_all()
        })();
        let result =
            result.map_err(doing("write", &path)).and_then(|()| self.rename(&path, object));
        if result.is_err() {
            // Best effort: the next collector removes it otherwise.
            let _ = fs::remove_file(&path);
        }
        result
    }
}

impl BlockSource for Directory {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let (this, path, object) = (self.clone(), self.path_of(object), object.clone());
        let read = move |path: &Path, opened| this.read_opened(path, opened, &object, range);
        with_opened(path, Manner::Stored, read).await
    }
}

impl ObjectStore for Directory {
    fn publish_file(&self, object: &ObjectId, from: &Path) -> Result<()> {
        let mut file = open_checked(from, Manner::Stored).map_err(doing("open", from))?;
        let same = file.metadata().and_then(|of| Ok(of.dev() == fs::metadata(&self.root)?.dev()));
        if same.map_err(doing("examine", from))? {
            file.sync_all().map_err(doing("write", from))?;
            return self.rename(from, object);
        }
        self.publish_with(object, |to| io::copy(&mut file, to).map(drop))?;
        fs::remove_file(from).map_err(doing("remove", from))
    }

    fn publish(&self, object: &ObjectId, bytes: &[u8]) -> Result<()> {
        self.publish_with(object, |file| file.write_all(bytes))
    }

    fn get(&self, object: &ObjectId, len_max: u64) -> Result<Bytes> {
        let path = self.path_of(object);
        let cannot = |error| self.cannot_read(&path, error);
        let file = opened_now(&path, Manner::Stored).map_err(cannot)?;
        let len = file.metadata().map_err(cannot)?.len();
        if len > len_max {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{} has {len} bytes, more than the {len_max} allowed", path.display()),
            ));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0).map_err(cannot)?;
        Ok(bytes.into())
    }

    fn len(&self, object: &ObjectId) -> Result<Option<u64>> {
        let path = self.path_of(object);
        match fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(doing("examine", &path)(error)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectId>> {
        let folder = self.root.join(prefix);
        let mut names = Vec::new();
        for name in OwnFolder::open(&folder)?.names()? {
            // No object has a name that is not UTF-8.
            if let Some(name) = name.to_str() {
                names.push(ObjectId::new(format!("{}/{name}", prefix.trim_end_matches('/')))?);
            }
        }
        names.sort();
        Ok(names)
    }

    fn remove(&self, object: &ObjectId) -> Result<()> {
        let path = self.path_of(object);
        let folder = path.parent().unwrap_or(&self.root);
        let name = path.file_name().unwrap_or_default();
        match fs::remove_file(OwnFolder::open(folder)?.reach(name)) {
            Ok(()) => sync_dir(folder),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(doing("remove", &path)(error)),
        }
    }

    fn begin_write(&self) -> Result<Lease> {
        self.sweep();
        let _shared = self.lock(FlockOperation::LockShared)?;
        let scratch = self.temporary()?;
        fs::create_dir(&scratch).map_err(doing("make", &scratch))?;
        let path = scratch.join("lock");
        let held = lock_file(&path, FlockOperation::LockExclusive).map_err(doing("lock", &path))?;
        Ok(Lease::new(scratch.clone(), Box::new(Scratch { folder: scratch, _held: held })))
    }

    fn begin_collect(&self) -> Result<Collecting> {
        self.collecting("remove", remove_stale)
    }

    fn begin_count(&self) -> Result<Collecting> {
        self.collecting("look at", stale)
    }
}

/// A writer's folder and the lock that shows it is alive.
struct Scratch {
    folder: PathBuf,
    _held: File,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Best effort: the next collector removes it otherwise.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// True if the file was not written to for [`PARTIAL_AGE`].
fn is_old(file: &fs::Metadata) -> bool {
    file.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > PARTIAL_AGE))
}

/// Removes a dead writer's leftovers and returns their bytes; `None` if the writer lives.
fn remove_stale(path: &Path) -> io::Result<Option<u64>> {
    let bytes = stale(path)?;
    if bytes.is_some() {
        if fs::symlink_metadata(path)?.is_dir() {
            fs::remove_dir_all(path)?;
        } else {
            fs::remove_file(path)?;
        }
    }
    Ok(bytes)
}

/// The bytes of a dead writer's leftovers in `path`; `None` if the writer lives. Call under the
/// store's lock, so that no writer begins meanwhile.
fn stale(path: &Path) -> io::Result<Option<u64>> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_dir() && !metadata.is_file() {
        // A FIFO or a symlink, for instance: a writer makes none.
        return Ok(Some(0));
    }
    let lock = if metadata.is_dir() { path.join("lock") } else { path.to_owned() };
    match lock_file(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(error) => return Err(error),
    }
    if !metadata.is_dir() {
        return Ok(Some(metadata.len()));
    }
    let mut bytes = 0;
    for entry in fs::read_dir(path)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(Some(bytes))
}

fn lock_file(path: &Path, operation: FlockOperation) -> io::Result<File> {
    let file = open_own_file(path, File::options().create(true).truncate(false).write(true))?;
    loop {
        match rustix::fs::flock(&file, operation) {
            Err(Errno::INTR) => {}
            result => return result.map(|()| file).map_err(io::Error::from),
        }
    }
}

/// Opens a file of the store to write it. Neither a FIFO nor a device blocks: others may have put
/// them there. Nor is a symlink followed, which may lead to a file that only this process may
/// write.
pub(crate) fn open_own_file(path: &Path, options: &mut fs::OpenOptions) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let opened = options.custom_flags(flags.bits() as i32).open(path);
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NXIO | Errno::LOOP | Errno::ISDIR) => not_a_file(Manner::Stored),
        _ => error,
    })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_a_file(Manner::Stored)) }
}

fn sync_dir(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(doing("write", folder))
}

#[cfg(test)]
mod tests;
