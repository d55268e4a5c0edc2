//! Makes a tree, wherever it comes from: in a folder beside its place, by several threads, and moved
//! there when it is complete.
//!
//! ```text
//!   folders ─► files, symlinks, nodes (threads) ─► further names ─► folders' attributes, leaves first
//! ```

use std::{
    ffi::OsStr,
    fs::{self, File},
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, OpenOptionsExt, lchown, symlink},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::reflink::{end_nodatasum, make_nodatasum};
use rustix::{
    fs::{
        AtFlags, CWD, FileType, Gid, Mode, RenameFlags, Timespec, Timestamps, Uid, XattrFlags,
        fchmod, fchown, fremovexattr, fsetxattr, futimens, lsetxattr, mknodat, renameat_with,
        utimensat,
    },
    io::Errno,
};

use super::{Mapped, Target, exists};

/// Entries of a tree: some 200 bytes of memory each.
pub(super) const ENTRIES_MAX: usize = 10_000_000;

pub(super) use burgeon_image::build::Xattrs;

/// A name to be made.
pub(super) struct Entry {
    /// Relative to the root, which is the first entry and has an empty one.
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    /// Type and permissions.
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    /// Seconds and nanoseconds.
    pub(super) modified: (i64, u32),
    /// Where its origin finds the rest of it.
    pub(super) key: u64,
}

/// What an entry is.
pub(super) enum Kind {
    Folder,
    /// Of so many bytes.
    File(u64),
    Symlink(PathBuf),
    /// A device with this number, a fifo or a socket.
    Node(u64),
    /// Another name of the entry with this index, which comes before.
    Link(usize),
}

/// Where a tree comes from.
pub(super) trait Origin: Sync {
    /// Threads that make it.
    fn threads(&self) -> usize;
    /// Gives `file`, which is new, the content of `entry`.
    fn fill(&self, entry: &Entry, file: &File) -> Result<()>;
    /// The extended attributes of `entry`.
    fn xattrs(&self, entry: &Entry) -> Result<Xattrs>;
}

/// Makes `entries`, of which the first is a folder, at `target`.
pub(super) fn make(target: &Target, entries: &[Entry], origin: &impl Origin) -> Result<Mapped> {
    // Files are made with their own modes, in a folder that nobody else can enter.
    rustix::process::umask(Mode::empty());
    let name = target.path.file_name().unwrap_or_default().to_string_lossy();
    let staging = target.folder.join(format!(".{name}.burgeon-{}", std::process::id()));
    fs::DirBuilder::new().mode(0o700).create(&staging).map_err(|e| {
        Error::io(format!("cannot make a folder in {}", target.folder.display()), e)
    })?;
    let made = make_in(&staging, entries, origin).and_then(|mapped| {
        renameat_with(CWD, &staging, CWD, &target.path, RenameFlags::NOREPLACE).map_err(
            |errno| match errno {
                Errno::EXIST => exists(&target.path),
                errno => Error::io(format!("cannot name {}", target.path.display()), errno.into()),
            },
        )?;
        Ok(mapped)
    });
    if made.is_err() {
        // What cannot be removed either is named by the next attempt.
        let _ = fs::remove_dir_all(&staging);
    }
    made
}

fn make_in(staging: &Path, entries: &[Entry], origin: &impl Origin) -> Result<Mapped> {
    let root = open(staging)?;
    forget_acls(&root).map_err(cannot_make(staging))?;
    // What is made in these folders inherits that it has no checksums, to be cloned to.
    make_nodatasum(&root)?;
    let folders = || entries.iter().filter(|entry| matches!(entry.kind, Kind::Folder));
    for folder in folders().skip(1) {
        let path = staging.join(&folder.path);
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(cannot_make(&path))?;
    }
    let mapped = make_others(staging, entries, origin)?;
    for entry in entries {
        if let Kind::Link(first) = entry.kind
            && let Some(first) = entries.get(first)
        {
            let path = staging.join(&entry.path);
            fs::hard_link(staging.join(&first.path), &path).map_err(cannot_make(&path))?;
        }
    }
    // Last, since making files changes their times.
    let folders: Vec<_> = folders().collect();
    for folder in folders.iter().rev() {
        let path = staging.join(&folder.path);
        let file = open(&path)?;
        end_nodatasum(&file)?;
        dress(&file, folder, origin, &path)?;
    }
    Ok(mapped)
}

/// Makes all but folders and further names.
fn make_others(staging: &Path, entries: &[Entry], origin: &impl Origin) -> Result<Mapped> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        let mut mapped = Mapped::default();
        while let Some(entry) = entries.get(next.fetch_add(1, Relaxed)) {
            match make_one(staging, entry, origin) {
                Ok(one) => mapped += one,
                Err(error) => {
                    next.store(entries.len(), Relaxed);
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
            }
        }
        mapped
    };
    let mapped = thread::scope(|scope| {
        let others: Vec<_> = (1..origin.threads()).map(|_| scope.spawn(work)).collect();
        let mut mapped = work();
        for other in others {
            match other.join() {
                Ok(more) => mapped += more,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        mapped
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(mapped),
    }
}

fn make_one(staging: &Path, entry: &Entry, origin: &impl Origin) -> Result<Mapped> {
    let path = staging.join(&entry.path);
    let failed = cannot_make(&path);
    match &entry.kind {
        Kind::Folder | Kind::Link(_) => return Ok(Mapped::default()),
        Kind::File(size) => {
            let mut options = File::options();
            let new = options.write(true).create_new(true).mode(entry.mode & 0o7777);
            let file = new.open(&path).map_err(failed)?;
            origin.fill(entry, &file)?;
            finish(&file, entry, origin, &path)?;
            return Ok(Mapped { files: 1, bytes: *size });
        }
        Kind::Symlink(to) => symlink(to, &path).map_err(&failed)?,
        Kind::Node(number) => {
            let (kind, mode) = (FileType::from_raw_mode(entry.mode), Mode::from(entry.mode));
            mknodat(CWD, &path, kind, mode, *number).map_err(|e| failed(e.into()))?;
        }
    }
    let (uid, gid) = entry.owner;
    lchown(&path, Some(uid), Some(gid)).map_err(&failed)?;
    if let Kind::Node(_) = entry.kind {
        // Only symlinks lack a mode; changing the owner may have changed it.
        rustix::fs::chmod(&path, Mode::from(entry.mode)).map_err(|e| failed(e.into()))?;
    }
    for (name, value) in origin.xattrs(entry)? {
        lsetxattr(&path, OsStr::from_bytes(&name), &value, XattrFlags::empty())
            .map_err(|e| no_xattr(&path, &name, e))?;
    }
    utimensat(CWD, &path, &times(entry), AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|e| failed(e.into()))?;
    Ok(Mapped::default())
}

/// Gives `file`, which was made with its mode, the other attributes of `entry`.
fn finish(file: &File, entry: &Entry, origin: &impl Origin, path: &Path) -> Result<()> {
    // Each change of an inode is a transaction's, and most files need but one.
    let ours = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    if entry.owner != ours {
        return dress(file, entry, origin, path);
    }
    set_rest(file, entry, origin, path)
}

/// Gives `file` the attributes of `entry`.
pub(super) fn dress(file: &File, entry: &Entry, origin: &impl Origin, path: &Path) -> Result<()> {
    let (uid, gid) = entry.owner;
    fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
        .and_then(|()| fchmod(file, Mode::from(entry.mode)))
        .map_err(|e| cannot_make(path)(e.into()))?;
    set_rest(file, entry, origin, path)
}

fn set_rest(file: &File, entry: &Entry, origin: &impl Origin, path: &Path) -> Result<()> {
    // After the owner and the mode, whose changes change capabilities and ACLs.
    for (name, value) in origin.xattrs(entry)? {
        fsetxattr(file, OsStr::from_bytes(&name), &value, XattrFlags::empty())
            .map_err(|e| no_xattr(path, &name, e))?;
    }
    Ok(futimens(file.as_fd(), &times(entry)).map_err(|e| cannot_make(path)(e.into()))?)
}

fn times(entry: &Entry) -> Timestamps {
    let (tv_sec, nanoseconds) = entry.modified;
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let last_modification = Timespec { tv_sec, tv_nsec: nanoseconds.into() };
    Timestamps { last_access: omit, last_modification }
}

/// Takes away the ACLs that the new `file` or folder has inherited, and would hand on.
pub(super) fn forget_acls(file: &File) -> std::io::Result<()> {
    for name in ["system.posix_acl_default", "system.posix_acl_access"] {
        match fremovexattr(file, name) {
            Ok(()) | Err(Errno::NODATA | Errno::NOTSUP | Errno::ACCESS) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn no_xattr(path: &Path, name: &[u8], errno: Errno) -> Error {
    let name = String::from_utf8_lossy(name);
    Error::io(format!("cannot set the attribute {name} of {}", path.display()), errno.into())
}

fn open(folder: &Path) -> Result<File> {
    Ok(File::open(folder).map_err(cannot_make(folder))?)
}

pub(super) fn cannot_make(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |e| Error::io(format!("cannot make {}", path.display()), e)
}

/// Refuses a tree of more than [`ENTRIES_MAX`] entries.
pub(super) fn check_count(entries: &[Entry], shown: impl std::fmt::Display) -> Result<()> {
    if entries.len() < ENTRIES_MAX {
        return Ok(());
    }
    let message = format!("{shown} has more than {ENTRIES_MAX} files: map its folders one by one");
    Err(Error::new(ErrorKind::Invalid, message).into())
}
