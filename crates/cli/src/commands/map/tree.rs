//! Makes a tree from any origin: several threads fill a folder next to the target, and the
//! complete tree is moved to the target.
//!
//! ```text
//!   folders ─► files, symlinks, nodes (threads) ─► further names ─► folders' attributes, leaves first
//! ```
//! Invariant (held by `tests/paths.rs`): nothing is made, changed or removed outside that folder,
//! whatever replaces it meanwhile.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    os::{fd::AsFd, unix::ffi::OsStrExt},
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
use burgeon_source::beneath::{link_to, open_beneath};
use rustix::{
    fs::{
        AtFlags, Dir, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, Uid,
        XattrFlags, chmodat, chownat, fchmod, fchown, fremovexattr, fsetxattr, fstat, futimens,
        linkat, lsetxattr, mkdirat, mknodat, openat, renameat_with, statat, symlinkat, unlinkat,
        utimensat,
    },
    io::Errno,
};

use super::{Mapped, Target, exists};

/// Most entries of a tree: some 200 bytes of memory each.
pub(super) const ENTRIES_MAX: usize = 10_000_000;

/// Flags that open a newly made folder.
const FOLDER: OFlags =
    OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::RDONLY);

pub(super) use burgeon_image::builder::Xattrs;

/// A name to make.
pub(super) struct TreeEntry {
    /// Relative to the root. The root is the first entry and has an empty path.
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    /// Type and permissions.
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    /// Seconds and nanoseconds.
    pub(super) modified: (i64, u32),
    /// The origin's key to the rest of the entry.
    pub(super) key: u64,
}

/// The type of an entry.
pub(super) enum Kind {
    Folder,
    /// A file of this many bytes.
    File(u64),
    Symlink(PathBuf),
    /// A device with this number, a fifo or a socket.
    Node(u64),
    /// Another name of the entry with this index, which comes before.
    Link(usize),
}

/// The source of a tree.
pub(super) trait Origin: Sync {
    /// Number of threads that make the tree.
    fn threads(&self) -> usize;
    /// Fills the new `file` with the content of `entry`.
    fn fill(&self, entry: &TreeEntry, file: &File) -> Result<()>;
    /// The extended attributes of `entry`.
    fn xattrs(&self, entry: &TreeEntry) -> Result<Xattrs>;
}

/// Makes `entries` at `target`. The first entry is a folder.
pub(super) fn make(target: &Target, entries: &[TreeEntry], origin: &impl Origin) -> Result<Mapped> {
    // Files are made with their own modes, in a folder that nobody else can enter.
    rustix::process::umask(Mode::empty());
    let staging = Staging::make(target)?;
    let made = staging.fill(entries, origin).and_then(|mapped| {
        staging.put_into_place()?;
        Ok(mapped)
    });
    if made.is_err() {
        // If even this fails, the next attempt names the leftovers.
        let _ = staging.remove();
    }
    made
}

/// A hidden folder next to the target, closed to other users. The owner of the parent folder can
/// replace it, so everything is made below the opened descriptor.
struct Staging<'a> {
    target: &'a Target,
    name: OsString,
    root: File,
}

impl<'a> Staging<'a> {
    fn make(target: &'a Target) -> Result<Self> {
        let mut name = OsString::from(".");
        name.push(&target.name);
        name.push(format!(".burgeon-{}", std::process::id()));
        let failed = |e: Errno| {
            let path = target.path.parent().unwrap_or(&target.path);
            Error::io(format!("cannot make a folder in {}", path.display()), e.into())
        };
        mkdirat(&target.folder, &name, Mode::RWXU).map_err(failed)?;
        let root: File =
            openat(&target.folder, &name, FOLDER, Mode::empty()).map_err(failed)?.into();
        let staging = Self { target, name, root };
        let stat = fstat(&staging.root).map_err(failed)?;
        if stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o077 == 0 {
            return Ok(staging);
        }
        Err(staging.replaced().into())
    }

    fn fill(&self, entries: &[TreeEntry], origin: &impl Origin) -> Result<Mapped> {
        let shown = |entry: &TreeEntry| self.target.shown(&entry.path);
        forget_acls(&self.root).map_err(cannot_make(&self.target.path))?;
        // Files in these folders inherit `nodatasum`, so that the area can be cloned to them.
        make_nodatasum(&self.root)?;
        let folders = || entries.iter().filter(|entry| matches!(entry.kind, Kind::Folder));
        for folder in folders().skip(1) {
            mkdirat(&self.root, &folder.path, Mode::RWXU)
                .map_err(|e| cannot_make(&shown(folder))(e.into()))?;
        }
        let mapped = self.make_others(entries, origin)?;
        for entry in entries {
            if let Kind::Link(first) = entry.kind
                && let Some(first) = entries.get(first)
            {
                linkat(&self.root, &first.path, &self.root, &entry.path, AtFlags::empty())
                    .map_err(|e| cannot_make(&shown(entry))(e.into()))?;
            }
        }
        // Last, since making files changes their times.
        let folders: Vec<_> = folders().collect();
        for folder in folders.iter().rev() {
            let path = shown(folder);
            let name =
                if folder.path.as_os_str().is_empty() { Path::new(".") } else { &folder.path };
            let file =
                open_beneath(&self.root, name, OFlags::DIRECTORY).map_err(cannot_make(&path))?;
            let file = File::from(file);
            end_nodatasum(&file)?;
            dress(&file, folder, origin, &path)?;
        }
        Ok(mapped)
    }

    /// Gives the tree its name.
    fn put_into_place(&self) -> Result<()> {
        let Target { path, folder, name } = self.target;
        if !self.is_called(&self.name)? {
            return Err(self.replaced().into());
        }
        let rename = |from: &OsStr, to: &OsStr| {
            renameat_with(folder, from, folder, to, RenameFlags::NOREPLACE)
        };
        rename(&self.name, name).map_err(|errno| match errno {
            Errno::EXIST => exists(path),
            Errno::NOENT => self.replaced(),
            errno => Error::io(format!("cannot name {}", path.display()), errno.into()),
        })?;
        if self.is_called(name)? {
            return Ok(());
        }
        // Replaced between the two calls: give it its name back, or leave it where its owner has
        // put it.
        let _ = rename(name, &self.name);
        Err(self.replaced().into())
    }

    /// True if the opened folder still has this name.
    fn is_called(&self, name: &OsStr) -> Result<bool> {
        let cannot = |e: Errno| {
            let path = self.target.path.with_file_name(name);
            Error::io(format!("cannot look at {}", path.display()), e.into())
        };
        let own = fstat(&self.root).map_err(cannot)?;
        match statat(&self.target.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(cannot(errno).into()),
        }
    }

    fn replaced(&self) -> Error {
        let folder = self.target.path.parent().unwrap_or(&self.target.path);
        let message = format!(
            "cannot make {}: another user has replaced {} in {}, where others can write",
            self.target.path.display(),
            self.name.display(),
            folder.display()
        );
        Error::new(ErrorKind::Unavailable, message)
    }

    /// Removes the opened folder. A different object under its name stays.
    fn remove(&self) -> std::io::Result<()> {
        remove_all_in(&self.root)?;
        Ok(unlinkat(&self.target.folder, &self.name, AtFlags::REMOVEDIR)?)
    }
}

/// Removes everything in `folder`, at any depth.
fn remove_all_in(folder: &File) -> std::io::Result<()> {
    // Not by recursion: a folder's path may have 2,000 parts.
    let mut open = vec![(folder.try_clone()?, OsString::new())];
    while let Some((at, _)) = open.last() {
        let mut below = None;
        // From the start each time: names that were removed are gone.
        let listed = openat(at, ".", FOLDER, Mode::empty())?;
        for name in Dir::read_from(&listed)? {
            let name = name?;
            let name = name.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            match unlinkat(at, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => {
                    below = Some(OsStr::from_bytes(name.to_bytes()).to_owned());
                    break;
                }
                removed => removed?,
            }
        }
        match below {
            Some(name) => {
                let folder = openat(at, &name, FOLDER, Mode::empty())?;
                open.push((folder.into(), name));
            }
            None => {
                let emptied = open.pop().map(|(_, name)| name);
                if let (Some((above, _)), Some(name)) = (open.last(), emptied) {
                    unlinkat(above, &name, AtFlags::REMOVEDIR)?;
                }
            }
        }
    }
    Ok(())
}

impl Staging<'_> {
    /// Makes all entries except folders and links.
    fn make_others(&self, entries: &[TreeEntry], origin: &impl Origin) -> Result<Mapped> {
        let next = AtomicUsize::new(0);
        let failure = Mutex::new(None);
        let work = || {
            let mut mapped = Mapped::default();
            while let Some(entry) = entries.get(next.fetch_add(1, Relaxed)) {
                match self.make_one(entry, origin) {
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

    fn make_one(&self, entry: &TreeEntry, origin: &impl Origin) -> Result<Mapped> {
        let (root, name) = (&self.root, &*entry.path);
        let path = self.target.shown(name);
        let failed = |errno: Errno| cannot_make(&path)(errno.into());
        match &entry.kind {
            Kind::Folder | Kind::Link(_) => return Ok(Mapped::default()),
            Kind::File(size) => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = openat(root, name, flags, Mode::from(entry.mode)).map_err(failed)?;
                let file = File::from(file);
                origin.fill(entry, &file)?;
                finish(&file, entry, origin, &path)?;
                return Ok(Mapped { files: 1, bytes: *size });
            }
            Kind::Symlink(to) => symlinkat(to, root, name).map_err(failed)?,
            Kind::Node(number) => {
                let (kind, mode) = (FileType::from_raw_mode(entry.mode), Mode::from(entry.mode));
                mknodat(root, name, kind, mode, *number).map_err(failed)?;
            }
        }
        let (uid, gid) = (Uid::from_raw(entry.owner.0), Gid::from_raw(entry.owner.1));
        chownat(root, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        if let Kind::Node(_) = entry.kind {
            // Only symlinks lack a mode; changing the owner may have changed it.
            chmodat(root, name, Mode::from(entry.mode), AtFlags::empty()).map_err(failed)?;
        }
        // Linux before 6.13 has no lsetxattrat.
        let link = link_to(root).join(name);
        for (attribute, value) in origin.xattrs(entry)? {
            lsetxattr(&link, OsStr::from_bytes(&attribute), &value, XattrFlags::empty())
                .map_err(|e| no_xattr(&path, &attribute, e))?;
        }
        utimensat(root, name, &times(entry), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        Ok(Mapped::default())
    }
}

/// Gives the new `file`, which has its mode, the other attributes of `entry`.
fn finish(file: &File, entry: &TreeEntry, origin: &impl Origin, path: &Path) -> Result<()> {
    // Each change of an inode is a transaction, and most files need only one.
    let ours = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    if entry.owner != ours {
        return dress(file, entry, origin, path);
    }
    set_rest(file, entry, origin, path)
}

/// Gives `file` the attributes of `entry`.
pub(super) fn dress(
    file: &File,
    entry: &TreeEntry,
    origin: &impl Origin,
    path: &Path,
) -> Result<()> {
    let (uid, gid) = entry.owner;
    fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
        .and_then(|()| fchmod(file, Mode::from(entry.mode)))
        .map_err(|e| cannot_make(path)(e.into()))?;
    set_rest(file, entry, origin, path)
}

fn set_rest(file: &File, entry: &TreeEntry, origin: &impl Origin, path: &Path) -> Result<()> {
    // After owner and mode, since changing these changes capabilities and ACLs.
    for (name, value) in origin.xattrs(entry)? {
        fsetxattr(file, OsStr::from_bytes(&name), &value, XattrFlags::empty())
            .map_err(|e| no_xattr(path, &name, e))?;
    }
    Ok(futimens(file.as_fd(), &times(entry)).map_err(|e| cannot_make(path)(e.into()))?)
}

fn times(entry: &TreeEntry) -> Timestamps {
    let (tv_sec, nanoseconds) = entry.modified;
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let last_modification = Timespec { tv_sec, tv_nsec: nanoseconds.into() };
    Timestamps { last_access: omit, last_modification }
}

/// Removes the ACLs that the new `file` or folder has inherited and would pass on.
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

pub(super) fn cannot_make(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |e| Error::io(format!("cannot make {}", path.display()), e)
}

/// Refuses a tree of more than [`ENTRIES_MAX`] entries.
pub(super) fn check_count(entries: &[TreeEntry], shown: impl std::fmt::Display) -> Result<()> {
    if entries.len() < ENTRIES_MAX {
        return Ok(());
    }
    let message = format!("{shown} has more than {ENTRIES_MAX} files: map its folders one by one");
    Err(Error::new(ErrorKind::Invalid, message).into())
}
