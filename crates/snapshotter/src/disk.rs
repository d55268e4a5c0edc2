//! The folder of a snapshotter.
//!
//! ```text
//!   ROOT/                0700: programs with setuid of any image lie below it
//!     lock               locked by the process that serves it
//!     records/ID         a snapshot (record.rs); ID.new while it is written; ID.damaged
//!     snapshots/ID/fs    what the snapshot adds to its parents, as overlayfs has it
//!     snapshots/ID/work  overlayfs's own, of an active snapshot
//!     chains/ID          where a remote layer and all below it are mounted (chains.rs)
//!     indexes/HEX        the index of an image (indexes.rs), by the digest of its manifest
//!     trash/ID           a removed snapshot's folder
//! ```
//!
//! A change is one rename or unlink in `records`. The order makes each moment consistent: a folder
//! is durable before its record, and a record is gone before its folder is.
//!
//! Invariants: a snapshot whose record was written has its folder, also after a power failure, but
//! for a native container, whose folder is made anew when it is committed; a folder without a
//! record goes into the trash when a process opens the root; after an `fsync` that failed nothing
//! more is written. Held by `tests/steps.rs`, which stops at every step.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, OFlags, flock};

use crate::{
    image_index::{INDEXES_MAX, ImageIndex},
    model::{SNAPSHOTS_MAX, Snapshot},
    overlay, record, walk,
};

const RECORDS: &str = "records";
const SNAPSHOTS: &str = "snapshots";
const TRASH: &str = "trash";
const CHAINS: &str = "chains";
const INDEXES: &str = "indexes";
const DAMAGED: &str = ".damaged";

/// The owner and mode of a new snapshot's root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RootAttributes {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mode: u32,
}

impl RootAttributes {
    pub(crate) fn of(folder: &Path) -> Result<Self> {
        let failed = |e| Error::io(format!("cannot look at {}", folder.display()), e);
        let found = folder.symlink_metadata().map_err(failed)?;
        if !found.is_dir() {
            let what = format!("{} is not a directory", folder.display());
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok(Self { uid: found.uid(), gid: found.gid(), mode: found.mode() & 0o7777 })
    }
}

/// The contents of a root.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The snapshots of all readable records.
    pub snapshots: Vec<Snapshot>,
    /// Damaged records, each with its cause.
    pub damaged: Vec<String>,
    /// The indexes that were made here, or tried.
    pub indexes: Vec<ImageIndex>,
    last_id: u64,
}

impl Loaded {
    /// The highest id that was ever found.
    pub fn last_id(&self) -> u64 {
        self.last_id
    }
}

/// An open root.
#[derive(Debug)]
pub(crate) struct Disk {
    root: PathBuf,
    /// An `fsync` failed, so what the disk holds is unknown.
    is_broken: AtomicBool,
    /// For tests: the number of steps until this process seems to die.
    pub(crate) steps_left: AtomicI64,
    /// For tests: the number of steps until one finds no space.
    pub(crate) steps_until_full: AtomicI64,
    /// Folders of removed snapshots that are not in the trash yet.
    undiscarded: Mutex<Vec<u64>>,
    _lock: File,
}

impl Disk {
    /// Opens the root, which is made if it is missing, and puts the leftovers of an earlier process
    /// into the trash.
    pub(crate) fn open(root: &Path) -> Result<(Self, Loaded)> {
        let root = make_root(root)?;
        let lock = take_lock(&root)?;
        let is_broken = AtomicBool::new(false);
        let [steps_left, steps_until_full] = [i64::MAX; 2].map(AtomicI64::new);
        let undiscarded = Mutex::default();
        let disk = Self { root, is_broken, steps_left, steps_until_full, undiscarded, _lock: lock };
        for name in [RECORDS, SNAPSHOTS, TRASH, CHAINS, INDEXES] {
            make_private(&disk.root.join(name))?;
        }
        disk.sync(&disk.root)?;
        let mut loaded = read(&disk.root)?;
        disk.adopt(&mut loaded)?;
        Ok((disk, loaded))
    }

    /// The root itself.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The place of a snapshot's folders.
    pub(crate) fn folder(&self, id: u64) -> PathBuf {
        self.root.join(SNAPSHOTS).join(id.to_string())
    }

    /// The files that a snapshot adds to its parents.
    pub(crate) fn layer(&self, id: u64) -> PathBuf {
        self.folder(id).join("fs")
    }

    /// The folder of the mount points of remote chains.
    pub(crate) fn chains(&self) -> PathBuf {
        self.root.join(CHAINS)
    }

    /// Makes the folders of a snapshot that has no record yet, durably.
    pub(crate) fn make_folder(&self, id: u64, root: RootAttributes, has_work: bool) -> Result<()> {
        let folder = self.folder(id);
        let layer = self.layer(id);
        let failed = |e| Error::io(format!("cannot make {}", folder.display()), e);
        self.step()?;
        let mut private = DirBuilder::new();
        private.mode(0o700).create(&folder).map_err(failed)?;
        self.step()?;
        private.create(&layer).map_err(failed)?;
        chown(&layer, Some(root.uid), Some(root.gid)).map_err(failed)?;
        // After the owner, whose change takes set-user-ID away.
        fs::set_permissions(&layer, fs::Permissions::from_mode(root.mode)).map_err(failed)?;
        if has_work {
            self.step()?;
            DirBuilder::new().mode(0o711).create(folder.join("work")).map_err(failed)?;
        }
        self.sync(&layer)?;
        self.sync(&folder)?;
        self.sync(&self.root.join(SNAPSHOTS))
    }

    /// Writes the record of a snapshot, in place of its earlier one. When this returns, it is
    /// durable.
    pub(crate) fn write(&self, snapshot: &Snapshot) -> Result<()> {
        self.write_in(RECORDS, &snapshot.id.to_string(), &record::encode(snapshot)?)
    }

    /// Writes the record of an index, in place of its earlier one. When this returns, it is
    /// durable.
    pub(crate) fn write_index(&self, index: &ImageIndex) -> Result<()> {
        self.write_in(INDEXES, index.record_name()?, &record::encode_index(index)?)
    }

    /// Writes the file `name` in `folder`, in place of an earlier one, durably.
    fn write_in(&self, folder: &str, name: &str, bytes: &[u8]) -> Result<()> {
        let folder = self.root.join(folder);
        let path = folder.join(name);
        let new = path.with_extension("new");
        let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
        let written = self.write_new(&new, bytes).and_then(|()| {
            self.step()?;
            fs::rename(&new, &path).map_err(failed)
        });
        if let Err(error) = written {
            // It takes space on a disk that may be full. The next start removes it, too.
            let _ = self.step().map(|()| fs::remove_file(&new));
            return Err(error);
        }
        self.sync(&folder)
    }

    fn write_new(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
        self.step()?;
        let flags = OFlags::NOFOLLOW.bits() as i32;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).custom_flags(flags);
        let mut file = options.open(path).map_err(failed)?;
        self.step()?;
        file.write_all(bytes).map_err(failed)?;
        self.sync_step()?;
        self.synced(path, file.sync_all())
    }

    /// Removes the record of a snapshot, durably.
    pub(crate) fn remove_record(&self, id: u64) -> Result<()> {
        self.remove_in(RECORDS, &id.to_string())
    }

    /// Removes the record of an index, durably.
    pub(crate) fn remove_index(&self, index: &ImageIndex) -> Result<()> {
        self.remove_in(INDEXES, index.record_name()?)
    }

    fn remove_in(&self, folder: &str, name: &str) -> Result<()> {
        let folder = self.root.join(folder);
        let path = folder.join(name);
        self.step()?;
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format!("cannot remove {}", path.display()), e))
            }
            _ => self.sync(&folder),
        }
    }

    /// Discards the folder of a snapshot without a record, or has the cleaner do it if that fails.
    pub(crate) fn discard_some_time(&self, id: u64) {
        if let Err(error) = self.discard(id) {
            tracing::warn!(%error, "the files of a removed snapshot stay for now");
            self.undiscarded.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        }
    }

    /// Puts the folder of a snapshot without a record into the trash. A later process does so, too.
    pub(crate) fn discard(&self, id: u64) -> Result<()> {
        self.step()?;
        self.discard_named(&id.to_string())
    }

    fn discard_named(&self, name: &str) -> Result<()> {
        let from = self.root.join(SNAPSHOTS).join(name);
        let failed = |e| Error::io(format!("cannot discard {}", from.display()), e);
        // Of an id that a crash gave twice, the trash may have a folder already.
        for attempt in 0..1000 {
            let to = self.root.join(TRASH).join(format!("{name}-{attempt}"));
            if to.symlink_metadata().is_ok() {
                continue;
            }
            return match fs::rename(&from, to) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other.map_err(failed),
            };
        }
        Err(failed(io::Error::other("the trash has it a thousand times")))
    }

    /// Removes what lies in the trash. Goes on after an error, and returns the first one: a busy
    /// folder is removed another time.
    pub(crate) fn empty_trash(&self) -> Result<()> {
        let undiscarded =
            std::mem::take(&mut *self.undiscarded.lock().unwrap_or_else(PoisonError::into_inner));
        undiscarded.into_iter().for_each(|id| self.discard_some_time(id));
        let trash = self.root.join(TRASH);
        let failed = |e| Error::io(format!("cannot read {}", trash.display()), e);
        let mut first = Ok(());
        for entry in trash.read_dir().map_err(failed)? {
            self.step()?;
            let path = entry.map_err(failed)?.path();
            let removed = walk::remove(&path);
            let failed = |e| Error::io(format!("cannot remove {}", path.display()), e);
            first = first.and(removed.map_err(failed));
        }
        first
    }

    /// Makes the files of a layer durable, which its applier wrote.
    pub(crate) fn sync_layer(&self, id: u64) -> Result<()> {
        self.step()?;
        let path = self.layer(id);
        let file = open_to_sync(&path)?;
        self.synced(&path, rustix::fs::syncfs(file).map_err(io::Error::from))
    }

    fn sync(&self, folder: &Path) -> Result<()> {
        self.sync_step()?;
        self.synced(folder, open_to_sync(folder)?.sync_all())
    }

    fn synced(&self, path: &Path, result: io::Result<()>) -> Result<()> {
        result.map_err(|e| {
            self.is_broken.store(true, Ordering::Relaxed);
            let what = format!(
                "cannot sync {}; nothing more is written until the snapshotter is restarted",
                path.display()
            );
            Error::io(what, e)
        })
    }

    /// True if the snapshot `id` is lost, and its record is kept for whoever repairs it.
    pub(crate) fn is_damaged(&self, id: u64) -> bool {
        self.root.join(RECORDS).join(format!("{id}{DAMAGED}")).exists()
    }

    /// Before each change of the disk that may take space.
    fn step(&self) -> Result<()> {
        self.sync_step()?;
        if self.steps_until_full.fetch_sub(1, Ordering::Relaxed) == 1 {
            let full = io::Error::from(rustix::io::Errno::NOSPC);
            return Err(Error::io("the test fills the disk here", full));
        }
        Ok(())
    }

    /// Before each sync.
    fn sync_step(&self) -> Result<()> {
        if self.is_broken.load(Ordering::Relaxed) {
            let what = format!(
                "an earlier sync in {} failed: check the disk, then restart the snapshotter",
                self.root.display()
            );
            return Err(Error::new(ErrorKind::LocalIo, what));
        }
        if self.steps_left.fetch_sub(1, Ordering::Relaxed) <= 0 {
            return Err(Error::new(ErrorKind::LocalIo, "the test ends this process here"));
        }
        Ok(())
    }

    /// Makes folders and records agree: after a crash, some of both may be without the other.
    fn adopt(&self, loaded: &mut Loaded) -> Result<()> {
        let records = self.root.join(RECORDS);
        let failed = |e| Error::io(format!("cannot read {}", records.display()), e);
        let mut kept: std::collections::HashSet<u64> =
            loaded.snapshots.iter().map(|snapshot| snapshot.id).collect();
        for entry in records.read_dir().map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.ends_with(".new") {
                fs::remove_file(&path).map_err(failed)?;
            } else if let Some(id) = id_of(name.trim_end_matches(DAMAGED)) {
                loaded.last_id = loaded.last_id.max(id);
                // Its folder stays for whoever repairs the record.
                if kept.insert(id) && !name.ends_with(DAMAGED) {
                    fs::rename(&path, records.join(format!("{name}{DAMAGED}"))).map_err(failed)?;
                }
            }
        }
        let folder = self.root.join(SNAPSHOTS);
        let failed = |e| Error::io(format!("cannot read {}", folder.display()), e);
        for entry in folder.read_dir().map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            let id = id_of(&name);
            loaded.last_id = loaded.last_id.max(id.unwrap_or(0));
            if !id.is_some_and(|id| kept.contains(&id)) {
                self.discard_named(&name)?;
            }
        }
        let indexes = self.root.join(INDEXES);
        let failed = |e| Error::io(format!("cannot read {}", indexes.display()), e);
        for entry in indexes.read_dir().map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|extension| extension == "new") {
                fs::remove_file(&path).map_err(failed)?;
            }
        }
        // A removed chain stays mounted until the cleaner comes: another one must not find it.
        let chains = self.chains();
        let failed = |e| Error::io(format!("cannot read {}", chains.display()), e);
        for entry in chains.read_dir().map_err(failed)? {
            let id = id_of(&entry.map_err(failed)?.file_name().to_string_lossy());
            loaded.last_id = loaded.last_id.max(id.unwrap_or(0));
        }
        Ok(())
    }
}

/// Reads all records of a root, without changing anything: also while another process serves it.
pub fn read(root: &Path) -> Result<Loaded> {
    let records = root.join(RECORDS);
    let failed = |e| Error::io(format!("cannot read {}", records.display()), e);
    let mut loaded = Loaded::default();
    let entries = records.read_dir().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            let what = format!(
                "no snapshotter has had the root {}: `burgeon snapshotter` makes it at its start",
                root.display()
            );
            Error::new(ErrorKind::NotFound, what)
        }
        _ => failed(e),
    });
    for entry in entries? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(DAMAGED) {
            loaded.damaged.push(format!("{}: it was damaged at an earlier start", path.display()));
        }
        let Some(id) = id_of(&name) else { continue };
        loaded.last_id = loaded.last_id.max(id);
        match read_one(&path, id) {
            Ok(snapshot) => loaded.snapshots.push(snapshot),
            // Removed meanwhile.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) if e.kind() == ErrorKind::Corrupt => loaded.damaged.push(e.to_string()),
            Err(e) => return Err(e),
        }
        if loaded.snapshots.len() > SNAPSHOTS_MAX {
            let what = format!("{} has more than {SNAPSHOTS_MAX} records", records.display());
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
    }
    loaded.indexes = read_indexes(&root.join(INDEXES))?;
    Ok(loaded)
}

/// The records of indexes. A damaged one is left out: its index stays, like one of a user.
fn read_indexes(folder: &Path) -> Result<Vec<ImageIndex>> {
    let failed = |e| Error::io(format!("cannot read {}", folder.display()), e);
    let mut indexes = Vec::new();
    let entries = match folder.read_dir() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(indexes),
        entries => entries.map_err(failed)?,
    };
    for entry in entries.take(2 * INDEXES_MAX) {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_some() {
            continue;
        }
        match read_bytes(&path).and_then(|bytes| record::decode_index(&bytes)) {
            Ok(index) if index.record_name().is_ok_and(|own| own == name) => indexes.push(index),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Ok(_) => tracing::warn!(path = %path.display(), "it is the record of another index"),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the index of an image stays for good");
            }
        }
    }
    Ok(indexes)
}

fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(record::RECORD_MAX as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn read_one(path: &Path, id: u64) -> Result<Snapshot> {
    let bytes = read_bytes(path)?;
    let wrong =
        |e: Error| Error::with_source(e.kind(), format!("cannot read {}", path.display()), e);
    let snapshot = record::decode(&bytes).map_err(wrong)?;
    if snapshot.id != id {
        let what = format!("it is the record of {}, and has another's name", snapshot.id);
        return Err(wrong(Error::new(ErrorKind::Corrupt, what)));
    }
    Ok(snapshot)
}

/// Opens a folder. A failure of it, as for lack of descriptors, says nothing about the disk.
fn open_to_sync(folder: &Path) -> Result<File> {
    File::open(folder).map_err(|e| Error::io(format!("cannot open {}", folder.display()), e))
}

fn id_of(name: &str) -> Option<u64> {
    let id = name.parse().ok()?;
    (u64::to_string(&id) == name).then_some(id)
}

/// The absolute path of the root, private.
fn make_root(root: &Path) -> Result<PathBuf> {
    let failed = |e| Error::io(format!("cannot make {}", root.display()), e);
    if let Some(parent) = root.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    make_private(root)?;
    let root = root.canonicalize().map_err(failed)?;
    if !overlay::can_hold(&root) {
        let what = format!(
            "{} cannot be the root of snapshots: overlayfs gives : , \\ and \" in a path a meaning",
            root.display()
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(root)
}

/// Makes a folder that only its owner can enter, or makes the existing one so.
fn make_private(folder: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("cannot make {}", folder.display()), e);
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(e)),
        _ => {}
    }
    let found = folder.symlink_metadata().map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    if !found.is_dir() || found.uid() != own {
        let what = format!(
            "{} has to be a directory of the user {own} that runs the snapshotter: move it away",
            folder.display()
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    if found.mode() & 0o7777 != 0o700 {
        tracing::warn!(folder = %folder.display(), "others could enter this directory");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).map_err(failed)?;
    }
    Ok(())
}

fn take_lock(root: &Path) -> Result<File> {
    let path = root.join("lock");
    let failed = |e| Error::io(format!("cannot lock {}", path.display()), e);
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
    let file = options.open(&path).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let what = format!("another snapshotter serves {}", root.display());
            Err(Error::new(ErrorKind::Unavailable, what))
        }
        Err(e) => Err(failed(e.into())),
    }
}
