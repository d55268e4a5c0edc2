//! A root of its own for a process that serves: empty but for what it needs.
//!
//! ```text
//!   host                                        the process
//!   /                                           /                   an empty file system, read-only
//!   ├─ etc, usr, run, proc, sys, …              ├─ etc, usr, …      copies of the mounts, read-only
//!   ├─ var/lib/burgeon   of root, mode 0700     ├─ var/lib/burgeon  an idmapped copy: of USER
//!   ├─ ssd/cache         of root                ├─ ssd/cache        the same, if the cache is there
//!   └─ home, srv, …                             └─ (nothing)
//! ```
//!
//! On the disk everything stays root's: the copy shows files of uid 0 as files of [`USER`], and
//! stores what USER makes as files of uid 0. So the process can be another user without any change
//! to the state directory, and earlier versions and commands find in it what they expect.
//!
//! Mounts that come later are not in it. Those that go would stay in it, so it has only single
//! mounts that the process needs, and none of Burgeon's: whoever holds the last reference to a file
//! system waits for its last requests, which nobody but this process answers. For the same reason
//! another process takes the host's mounts off ([`fork::detached`]).
//!
//! [`attempt`] tries everything in a copy of the process first: whatever fails there (the file
//! system or the kernel cannot map, the unit lacks a capability) leaves this process as it was.
//! A failure in [`enter`] after that ends the process: it has left the host's root, and is not yet
//! in its own.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, symlink},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::btrfs_mount::set_mount_attributes;
use rustix::{
    fs::{Access, AtFlags, CWD, Mode, OFlags, ResolveFlags, accessat, openat2},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
        OpenTreeFlags, UnmountFlags, fsconfig_create, fsmount, fsopen, move_mount, open_tree,
        unmount,
    },
    process::{chdir, pivot_root, umask},
};

use crate::host::{
    backing_devices, fork,
    mountinfo::{self, MountInfo},
    namespace,
};

/// The effective user and group of a server. Above all numbers that distributions, `/etc/subuid`
/// and systemd's containers give out (to 1,879,048,191), and below those that systemd keeps for
/// foreign images (from 2,147,352,576). It owns no file, and no account has it.
pub(crate) const USER: u32 = 2_071_294_567;

/// Limit for the host's mounts to come off, and the interval of looking.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_micros(200);

/// `linux/mount.h`
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

/// Folders that come as a whole, because files in them are replaced by renaming: Landlock guards
/// what is in them.
const WHOLE: [&str; 5] = ["/etc", "/proc", "/run", "/sys", "/usr"];

/// The contents of the root.
#[derive(Clone, Copy)]
pub(crate) struct Contents<'a> {
    /// Folders for [`USER`] in one tree, parents first.
    pub(crate) own: &'a [&'a Path],
    /// One more such folder, outside of that tree.
    pub(crate) elsewhere: Option<&'a Path>,
    /// Other paths of the host: each is there, too, if it exists.
    pub(crate) others: &'a [&'a Path],
}

/// Tries [`enter`] in a copy of this process; the error is the reason why it cannot be done here.
pub(crate) fn attempt(contents: Contents<'_>) -> Result<()> {
    let there: Vec<&Path> = contents.others.iter().copied().filter(|path| path.exists()).collect();
    let own: Vec<&Path> = contents.own.iter().copied().chain(contents.elsewhere).collect();
    fork::in_a_copy(|| {
        enter(contents)?;
        as_user(&own, &there)
    })
}

/// Becomes [`USER`], as far as it takes to see whether that user can work in the `own` folders, and
/// sees the `others`, some of which are symlinks.
fn as_user(own: &[&Path], others: &[&Path]) -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io("cannot become another user", e.into());
    let (user, group) =
        (rustix::process::Uid::from_raw(USER), rustix::process::Gid::from_raw(USER));
    rustix::thread::set_thread_groups(&[]).map_err(failed)?;
    rustix::thread::set_thread_res_gid(group, group, group).map_err(failed)?;
    rustix::thread::set_thread_res_uid(user, user, user).map_err(failed)?;
    let rights = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    own.iter().filter(|folder| folder.exists()).try_for_each(|folder| {
        accessat(CWD, *folder, rights, AtFlags::EACCESS).map_err(|e| {
            Error::io(format!("another user cannot use {}", folder.display()), e.into())
        })
    })?;
    match others.iter().find(|path| !path.exists()) {
        Some(path) => {
            let what = format!("another user does not see {}", path.display());
            Err(Error::new(ErrorKind::NotFound, what))
        }
        None => Ok(()),
    }
}

/// Enters the root. The process must have one thread.
pub(crate) fn enter(Contents { own, elsewhere, others }: Contents<'_>) -> Result<()> {
    let failed = |e: io::Error| Error::io("cannot make a root for the server", e);
    let users = fork::user_namespace(USER).map_err(|e| {
        Error::io("cannot make a user namespace (CAP_SETUID, user.max_user_namespaces)", e)
    })?;
    let mut mounts = mountinfo::read(Path::new("/proc/self/mountinfo"))?;
    mounts.retain(|mount| !backing_devices::is_burgeon_device(&mount.source));
    let mut places = Vec::new();
    let mapped = |path: &Path| {
        let copy = copy_of_real(path).map_err(failed)?;
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        set(&copy, MOUNT_ATTR_IDMAP | u64::from(flags.bits()), Some(&users)).map_err(|e| {
            let what = "the file system does not show files as another user's (an idmapped mount)";
            Error::io(format!("{}: {what}", path.display()), e)
        })?;
        Ok::<_, Error>((path.to_path_buf(), RootItem::Folder(copy)))
    };
    for path in mounts_of(own, &mounts) {
        places.push(mapped(path)?);
    }
    for path in &included(others, elsewhere, &mounts) {
        if let Some(place) = place(path).map_err(failed)? {
            places.push((path.clone(), place));
        }
    }
    // Last: it may be below one of the others.
    if let Some(path) = elsewhere {
        places.push(mapped(path)?);
    }
    namespace::enter(MountPropagationFlags::PRIVATE)?;
    let root = empty().map_err(failed)?;
    let over = own.first().copied().unwrap_or(Path::new("/"));
    move_mount(&root, "", CWD, over, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .and_then(|()| chdir(over))
        .map_err(|e| failed(e.into()))?;
    // Another user walks these folders.
    let masked = umask(Mode::from_raw_mode(0o022));
    let put = places.into_iter().try_for_each(|(path, place)| {
        put(&path, place).map_err(|e| {
            Error::io(format!("cannot put {} into the process's own root", path.display()), e)
        })
    });
    umask(masked);
    put?;
    set(&root, u64::from(MountAttrFlags::MOUNT_ATTR_RDONLY.bits()), None).map_err(failed)?;
    // The old root lies over the new one then, and is taken off.
    pivot_root(".", ".").map_err(|e| failed(e.into()))?;
    fork::detached(|| unmount(".", UnmountFlags::DETACH).is_ok()).map_err(failed)?;
    chdir("/").map_err(|e| failed(e.into()))?;
    // It is off before the process that does it has ended.
    let is_alone = || {
        let mounts = mountinfo::read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        mounts.iter().filter(|mount| mount.target == Path::new("/")).count() == 1
    };
    let begun = Instant::now();
    while !is_alone() {
        if begun.elapsed() > PATIENCE {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// The mounts on which the `own` folders lie, from the first of these folders on.
fn mounts_of<'a>(own: &[&'a Path], mounts: &'a [MountInfo]) -> Vec<&'a Path> {
    let Some(first) = own.first() else { return Vec::new() };
    let is_between = |target: &Path| {
        target.starts_with(first) && target != *first && own.iter().any(|it| it.starts_with(target))
    };
    let below = mounts.iter().map(|mount| &*mount.target);
    let below: BTreeSet<&Path> = below.filter(|target| is_between(target)).collect();
    std::iter::once(*first).chain(below).collect()
}

/// Something that is put into the root.
enum RootItem {
    Folder(OwnedFd),
    File(OwnedFd),
    Link(PathBuf),
}

/// The paths of the root, parents first: those of [`WHOLE`], what is at `others` outside of them,
/// the mounts on the way, and those below a folder of `/etc`, such as single certificates in a
/// container.
fn included(others: &[&Path], elsewhere: Option<&Path>, mounts: &[MountInfo]) -> BTreeSet<PathBuf> {
    let mounts: BTreeSet<&Path> = mounts.iter().map(|it| &*it.target).collect();
    let whole = |path: &Path| WHOLE.iter().any(|folder| path.starts_with(folder));
    let mut included: BTreeSet<PathBuf> = WHOLE.map(PathBuf::from).into();
    // A link on most machines, by whose name sockets of resolvers are known.
    included.extend(Some(PathBuf::from("/var/run")).filter(|path| path.is_symlink()));
    let on_the_way = |path: &Path| {
        let above = path.ancestors().filter(|it| whole(it) && mounts.contains(*it));
        above.map(Path::to_owned).collect::<Vec<_>>()
    };
    // The folder itself is put there apart.
    included.extend(elsewhere.and_then(Path::parent).into_iter().flat_map(on_the_way));
    for path in others {
        if !whole(path) {
            included.insert(path.to_path_buf());
        }
        included.extend(on_the_way(path));
        let below = mounts.iter().filter(|it| path.starts_with("/etc") && it.starts_with(path));
        included.extend(below.map(|it| it.to_path_buf()));
    }
    included
}

/// The item of the root for `path`; `None` if nothing is there, or a FIFO or a socket.
fn place(path: &Path) -> io::Result<Option<RootItem>> {
    let kind = match path.symlink_metadata() {
        Ok(metadata) => metadata.file_type(),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    if kind.is_symlink() {
        return Ok(Some(RootItem::Link(fs::read_link(path)?)));
    }
    if kind.is_fifo() || kind.is_socket() {
        return Ok(None);
    }
    let copy = copy_of(path)?;
    // Programs stay executable: libraries of the resolver are loaded later.
    let flags = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    set(&copy, u64::from(flags.bits()), None)?;
    Ok(Some(if kind.is_dir() { RootItem::Folder(copy) } else { RootItem::File(copy) }))
}

/// Puts `place` at `path` below the working directory.
fn put(path: &Path, place: RootItem) -> io::Result<()> {
    let path = Path::new(".").join(path.strip_prefix("/").unwrap_or(path));
    let folders = |path: &Path| fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
    if let Some(parent) = path.parent() {
        folders(parent)?;
    }
    let copy = match place {
        RootItem::Link(target) => return symlink(target, &path),
        RootItem::Folder(copy) => {
            folders(&path)?;
            copy
        }
        RootItem::File(copy) => {
            if !path.exists() {
                fs::write(&path, "")?;
            }
            copy
        }
    };
    Ok(move_mount(&copy, "", CWD, &path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// A detached copy of the mount at `path` alone.
fn copy_of(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    Ok(open_tree(CWD, path, flags)?)
}

/// The same for a folder whose path has been checked: it has no symlink in it.
fn copy_of_real(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(folder, "", flags)?)
}

/// A detached, empty file system.
fn empty() -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "mode", "0755")?;
    fsconfig_create(&context)?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

/// Sets attributes of `mount`, with `users`, who map its files. What is mounted below its original
/// later does not come along.
fn set(mount: &OwnedFd, attributes: u64, users: Option<&OwnedFd>) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: users.map_or(0, |users| users.as_raw_fd() as u64),
    };
    set_mount_attributes(mount.as_fd(), &attributes)
}
