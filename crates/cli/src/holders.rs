//! Finds the users of a file system, for "target is busy" and for a mount that outlives its
//! umount.
//!
//! ```text
//!   /proc/*/task/*/mountinfo                          ─► mounts of it in other namespaces
//!   nsfs in these (`unshare --mount=FILE`)            ─► in namespaces that no process is in
//!   /proc/*/{cwd,root,exe,map_files/*,task/*/fd/*}    ─► processes that have something of it open
//! ```
//!
//! Invariant: no file system other than btrfs is asked anything: a FUSE or network file system may
//! never answer (`crates/cli/tests/holders.rs`).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
};

use burgeon_daemon::{
    Fsid, mount_namespaces,
    mountinfo::{self, MountInfo},
};
use rustix::{
    fs::{AtFlags, CWD, StatxFlags, statvfs, statx},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

/// Most holders in a message.
const NAMED_MAX: usize = 5;

/// A sentence with the obstacles to unmounting `target`, as far as this process may see.
pub(crate) fn describe(target: &Path) -> String {
    let mut holders = mounted_below(target);
    if let Some(number) = Number::of(target) {
        holders.extend(processes(number));
    }
    if holders.is_empty() {
        return "something that this user cannot see uses it".to_owned();
    }
    format!("in use by {}", list(holders))
}

/// The users of the btrfs `fsid`, which is mounted nowhere in this namespace; `None` if this
/// process sees none.
pub(crate) fn of(fsid: Fsid) -> Option<String> {
    let mut holders: Vec<_> = elsewhere(fsid).iter().map(ToString::to_string).collect();
    holders.extend(processes(Number::from(fsid)));
    (!holders.is_empty()).then(|| list(holders))
}

/// The users of those of `all` that are mounted in no namespace at all, as after a lazy umount.
/// Nothing for a user who does not see all namespaces.
pub(crate) fn of_unmounted(all: impl IntoIterator<Item = Fsid>) -> HashMap<Fsid, String> {
    if !rustix::process::geteuid().is_root() {
        return HashMap::new();
    }
    let own = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    let mut others = None;
    let is_unmounted = |fsid: &Fsid| {
        let is_of_it = is_of(*fsid);
        !own.iter().any(&is_of_it) && {
            let others: &Vec<_> = others.get_or_insert_with(other_namespaces);
            !others.iter().flat_map(|(_, mounts)| mounts).any(is_of_it)
        }
    };
    let unmounted = all.into_iter().filter(is_unmounted);
    let held = unmounted.filter_map(|fsid| {
        let holders = processes(Number::from(fsid));
        (!holders.is_empty()).then(|| (fsid, list(holders)))
    });
    held.collect()
}

fn list(mut holders: Vec<String>) -> String {
    let more = holders.len().saturating_sub(NAMED_MAX);
    holders.truncate(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", holders.join(", "))
}

/// A mount in another mount namespace.
pub(crate) struct Elsewhere {
    /// The target as seen by processes of that namespace.
    pub(crate) target: PathBuf,
    namespace: String,
}

impl std::fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the mount {} in {}", self.target.display(), self.namespace)
    }
}

/// The mounts of the btrfs `fsid` in other mount namespaces. A namespace is named after its first
/// process or thread, or else after the file that it is bound to.
pub(crate) fn elsewhere(fsid: Fsid) -> Vec<Elsewhere> {
    let is_of_it = is_of(fsid);
    let mut found = Vec::new();
    for (namespace, mounts) in other_namespaces() {
        let of_it = mounts.into_iter().filter(&is_of_it);
        found.extend(
            of_it.map(|mount| Elsewhere { target: mount.target, namespace: namespace.clone() }),
        );
    }
    found
}

/// A test for mounts of the btrfs `fsid`. It opens none of them: an open file would make somebody
/// else's umount fail.
pub(crate) fn is_of(fsid: Fsid) -> impl Fn(&MountInfo) -> bool {
    let devices = fs::read_dir(format!("/sys/fs/btrfs/{fsid}/devices"));
    let devices: Vec<_> =
        devices.into_iter().flatten().flatten().map(|device| device.file_name()).collect();
    move |mount| {
        // btrfs calls `/dev/mapper/x` `dm-0`.
        let source = || fs::canonicalize(&mount.source).unwrap_or_else(|_| mount.source.clone());
        mount.fs_type == "btrfs"
            && source().file_name().is_some_and(|name| devices.iter().any(|d| d == name))
    }
}

/// The other mount namespaces, under names for users, with their mounts.
fn other_namespaces() -> Vec<(String, Vec<MountInfo>)> {
    let name = fs::read_link("/proc/thread-self/ns/mnt").unwrap_or_default();
    let mut seen = BTreeSet::from([name]);
    let own = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    let mut bound = bound_in(Path::new("/"), &own);
    let mut found = Vec::new();
    for other in mount_namespaces::others() {
        let mounts = mountinfo::read(&other.task.join("mountinfo")).unwrap_or_default();
        bound.extend(bound_in(&other.task.join("root"), &mounts));
        let whose = if other.is_of_a_thread() { "a thread of " } else { "" };
        let process = other.process;
        let shown = format!("the namespace of {whose}{} (process {process})", name_of(process));
        found.push((shown, mounts));
        seen.insert(other.name);
    }
    for (namespace, file, shown) in bound {
        if !seen.contains(&namespace)
            && let Some(mounts) = mounts_in(&file)
        {
            seen.insert(namespace);
            let shown = format!("the namespace that is bound to {}", shown.display());
            found.push((shown, mounts));
        }
    }
    found
}

/// The mount namespaces that files among `mounts` keep alive: each one's name, the file's path
/// through `root`, and the file's path in that namespace.
fn bound_in(root: &Path, mounts: &[MountInfo]) -> Vec<(PathBuf, PathBuf, PathBuf)> {
    let bound = mounts.iter().filter(|mount| {
        mount.fs_type == "nsfs" && mount.root.to_str().is_some_and(|root| root.starts_with("mnt:["))
    });
    let entry = |mount: &MountInfo| {
        let within = mount.target.strip_prefix("/").unwrap_or(&mount.target);
        (mount.root.clone(), root.join(within), mount.target.clone())
    };
    bound.map(entry).collect()
}

/// The mounts of the namespace bound to `file`; `None` if this process may not enter it.
fn mounts_in(file: &Path) -> Option<Vec<MountInfo>> {
    let namespace = fs::File::open(file).ok()?;
    let ((tell, entered), (end, ended)) = (mpsc::channel(), mpsc::channel::<()>());
    let enter = move || -> Option<()> {
        // SAFETY: only this thread gets its own current directory, and it ends after reading.
        unsafe { unshare_unsafe(UnshareFlags::FS) }.ok()?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount)).ok()?;
        tell.send(rustix::thread::gettid()).ok()?;
        // The namespace may have no procfs, so the thread outside reads, then hangs up.
        let _ = ended.recv();
        Some(())
    };
    thread::scope(|scope| {
        scope.spawn(enter);
        let thread = entered.recv().ok()?;
        let path = format!("/proc/self/task/{}/mountinfo", thread.as_raw_nonzero());
        let mounts = mountinfo::read(Path::new(&path));
        drop(end);
        mounts.ok()
    })
}

fn mounted_below(target: &Path) -> Vec<String> {
    let mounts = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    mounts
        .iter()
        .filter(|mount| mount.target != target && mount.target.starts_with(target))
        .map(|mount| format!("the mount {}", mount.target.display()))
        .collect()
}

/// The part of `statvfs`'s file system id that is common to all subvolumes of a btrfs. It follows
/// from the fsid.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Number(u32);

impl Number {
    fn of(path: &Path) -> Option<Self> {
        statvfs(path).ok().map(|stat| Self(stat.f_fsid as u32))
    }
}

impl From<Fsid> for Number {
    fn from(fsid: Fsid) -> Self {
        let word = |at: usize| {
            let bytes = fsid.0.iter().skip(at).take(4);
            bytes.fold(0, |word: u32, byte| word << 8 | u32::from(*byte))
        };
        // Same as in `btrfs_statfs`; the other half contains the subvolume.
        Self(word(0) ^ word(8))
    }
}

fn process_ids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut ids: Vec<_> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    ids
}

fn name_of(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// Processes with an open file, a mapping or a folder of the file system.
fn processes(number: Number) -> Vec<String> {
    let own = std::process::id();
    let others = process_ids().into_iter().filter(|id| *id != own);
    others
        .filter_map(|id| {
            let how = how_it_holds(&PathBuf::from(format!("/proc/{id}")), number)?;
            Some(format!("{} (process {id}, {how})", name_of(id)))
        })
        .collect()
}

/// False if `path`, a link of `/proc`, surely leads to another file system than a btrfs, by the
/// `types` of the mounts that its process sees. Asks the kernel alone.
fn may_be_btrfs(path: &Path, types: &BTreeMap<u64, String>) -> bool {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let Ok(stat) = statx(CWD, path, flags, StatxFlags::MNT_ID) else { return false };
    match types.get(&stat.stx_mnt_id) {
        Some(fs_type) => fs_type == "btrfs",
        // A detached mount. A FUSE or network file system has a queue under the number of its
        // files, a btrfs none: its subvolumes have numbers of their own.
        None => {
            let queue = format!("/sys/class/bdi/{}:{}", stat.stx_dev_major, stat.stx_dev_minor);
            !Path::new(&queue).exists()
        }
    }
}

fn how_it_holds(process: &Path, number: Number) -> Option<&'static str> {
    let mounts = mountinfo::read(&process.join("mountinfo")).unwrap_or_default();
    let types: BTreeMap<_, _> = mounts.into_iter().map(|mount| (mount.id, mount.fs_type)).collect();
    let on_it = |path: &Path| may_be_btrfs(path, &types) && Number::of(path) == Some(number);
    let any_in = |folder: &Path| {
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        files.map(|file| file.path()).any(|path| on_it(&path))
    };
    if on_it(&process.join("cwd")) {
        return Some("its working directory");
    }
    if on_it(&process.join("root")) {
        return Some("its root");
    }
    if on_it(&process.join("exe")) {
        return Some("its program");
    }
    // Threads may have open files of their own.
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    if threads.map(|thread| thread.path().join("fd")).any(|folder| any_in(&folder)) {
        return Some("an open file");
    }
    any_in(&process.join("map_files")).then_some("a mapped file")
}
