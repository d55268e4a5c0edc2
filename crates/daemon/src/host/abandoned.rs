//! File systems that nobody but the daemon has mounted any more.
//!
//! ```text
//!   mounts of a copied namespace ─► unknown to process 1? ─► in no table of /proc/*/task/*
//!     ─► nor at the next look ─► umount
//! ```
//!
//! Where mounts are private, a copied namespace ([`super::namespace`]) does not follow an umount,
//! and the file system's device stays busy. So the copies of such mounts are unmounted here.
//!
//! Invariants:
//! - No umount is lazy: a file system with an open file stays until the next look.
//! - One look is not enough: processes are not read at one moment, so a process that starts another
//!   one and ends can hide the namespace that both are in.
//! - Nothing is unmounted while there is a namespace that cannot be looked into: one that is bound
//!   to a file, and has no process.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read},
    os::fd::AsFd,
    path::{Path, PathBuf},
    thread,
};

use rustix::{
    mount::{UnmountFlags, unmount},
    process::getuid,
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

use super::{
    mount_namespaces::numbered,
    mountinfo::{self, MountInfo},
};

/// Bytes of a command line that are read: the program's path, and its first argument.
const COMMAND_MAX: u64 = 8 << 10;

/// `st_dev` of file systems.
type Devices = BTreeSet<(u32, u32)>;

/// File systems that the last look found mounted in this namespace alone.
#[derive(Default)]
pub(crate) struct Abandoned(Devices);

/// Unmounts, in the namespace of the calling thread, the file systems that are mounted nowhere
/// else, as in the `last` look, except those that the paths of `needed` lie on.
pub(crate) fn release(last: &mut Abandoned, needed: &dyn Fn() -> Vec<PathBuf>) {
    let before = std::mem::take(last);
    let own = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    // The first process usually has them all, which saves looking at the others.
    let Ok(first) = mountinfo::read(Path::new("/proc/1/mountinfo")) else { return };
    let of_first: Devices = first.iter().map(|mount| mount.device).collect();
    let mut unknown: Vec<_> = reachable(&own)
        .into_iter()
        .filter(|mount| !of_first.contains(&mount.device) && mount.target != Path::new("/"))
        .filter(|mount| !is_of_kernel(&mount.target))
        .collect();
    if unknown.is_empty() {
        return;
    }
    let Some(of_others) = devices_of_others(Path::new("/proc")) else { return };
    let needed = needed();
    unknown.retain(|mount| {
        let is_needed = needed.iter().any(|path| path.starts_with(&mount.target));
        !is_needed && !of_others.contains(&mount.device)
    });
    last.0.extend(unknown.iter().map(|mount| mount.device));
    for mount in unknown.into_iter().rev().filter(|mount| before.0.contains(&mount.device)) {
        if unmount(&mount.target, UnmountFlags::NOFOLLOW).is_ok() {
            let (at, source) = (mount.target.display(), mount.source.display());
            tracing::info!(%at, %source, "unmounted a file system that nobody else has mounted");
        }
    }
}

/// True if the file system at `path` is mounted in this namespace and in no other, but those of
/// Burgeon's daemons; false if that cannot be told.
pub(crate) fn is_mounted_here_alone(path: &Path) -> bool {
    let own = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    let above = reachable(&own).into_iter().filter(|mount| path.starts_with(&mount.target));
    let device = above.max_by_key(|mount| mount.target.components().count());
    let Some(device) = device.map(|mount| mount.device) else { return false };
    let Ok(first) = mountinfo::read(Path::new("/proc/1/mountinfo")) else { return false };
    if first.iter().any(|mount| mount.device == device) {
        return false;
    }
    devices_of_others(Path::new("/proc")).is_some_and(|devices| !devices.contains(&device))
}

/// [`release`] in the namespace of another process, if it is another one and may be entered.
pub(crate) fn release_in(
    process: u32,
    last: &mut Abandoned,
    needed: &(dyn Fn() -> Vec<PathBuf> + Sync),
) {
    let Ok(namespace) = File::open(format!("/proc/{process}/ns/mnt")) else { return };
    let enter = || {
        // SAFETY: only this thread gets its own current directory, and it ends afterwards.
        unsafe { unshare_unsafe(UnshareFlags::FS) }.ok()?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount)).ok()?;
        release(last, needed);
        Some(())
    };
    thread::scope(|scope| {
        scope.spawn(enter);
    });
}

/// True if a process is in another mount namespace than this one; `None` if it is gone.
pub(crate) fn is_elsewhere(process: u32) -> Option<bool> {
    let own = fs::read_link("/proc/self/ns/mnt").ok()?;
    Some(fs::read_link(format!("/proc/{process}/ns/mnt")).ok()? != own)
}

/// The mounts that a path leads to: the last one at each place hides the others.
fn reachable(mounts: &[MountInfo]) -> Vec<&MountInfo> {
    let mut places = BTreeSet::new();
    let mut found: Vec<_> =
        mounts.iter().rev().filter(|mount| places.insert(&mount.target)).collect();
    found.reverse();
    found
}

fn is_of_kernel(place: &Path) -> bool {
    ["/dev", "/proc", "/sys"].iter().any(|folder| place.starts_with(folder))
}

/// The file systems in the mount namespaces of all processes in `proc` but those of Burgeon's
/// daemons, whose copies would keep each other; `None` if there is a namespace that cannot be
/// looked into.
fn devices_of_others(proc: &Path) -> Option<Devices> {
    let (mut devices, mut seen, mut bound) = (Devices::new(), BTreeSet::new(), BTreeSet::new());
    for process in numbered(proc).ok()? {
        if is_daemon(&process) {
            continue;
        }
        // A thread may have a namespace of its own.
        for task in numbered(&process.join("task")).unwrap_or_default() {
            let namespace = match fs::read_link(task.join("ns/mnt")) {
                Ok(namespace) if seen.contains(&namespace) => continue,
                Ok(namespace) => Some(namespace),
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => None,
                // It has ended.
                Err(_) => continue,
            };
            let mounts = mountinfo::read(&task.join("mountinfo")).unwrap_or_default();
            devices.extend(mounts.iter().map(|mount| mount.device));
            let is_namespace = |root: &Path| root.to_string_lossy().starts_with("mnt:[");
            bound.extend(mounts.into_iter().map(|mount| mount.root).filter(|r| is_namespace(r)));
            // Another root hides mounts of the namespace, which the next process may see.
            let sees_all =
                fs::read_link(task.join("root")).is_ok_and(|root| root == Path::new("/"));
            seen.extend(namespace.filter(|_| sees_all));
        }
    }
    bound.is_subset(&seen).then_some(devices)
}

/// True for a process of Burgeon's that no user has started.
///
/// The command line lies in the memory of the process. Another user can put it where a read waits
/// for ever, on a file system of its own, so it is read of processes of this user only.
fn is_daemon(process: &Path) -> bool {
    if user_of(process) != Some(getuid().as_raw()) {
        return false;
    }
    let mut line = Vec::new();
    let file = File::open(process.join("cmdline"));
    let _ = file.and_then(|file| file.take(COMMAND_MAX).read_to_end(&mut line));
    let mut words = line.split(|byte| *byte == 0);
    let is_burgeon = words.next().is_some_and(|word| word.ends_with(b"burgeon"));
    is_burgeon && words.next().is_some_and(|word| word.starts_with(b"__"))
}

/// The real user of a process. (The folder of a process whose memory is secret belongs to root.)
fn user_of(process: &Path) -> Option<u32> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path, sync::mpsc, thread, time::Duration};

    use rustix::{
        fs::{CWD, FileType, Mode, mknodat},
        process::getuid,
    };

    use super::{Devices, devices_of_others, reachable};
    use crate::host::mountinfo;

    /// A process of one thread, whose namespace has the mounts of `devices` and a file that is
    /// bound to the namespace `bound`.
    fn add(proc: &Path, command: &str, namespace: &str, root: &str, devices: &[u32], bound: &str) {
        let number = fs::read_dir(proc).unwrap().count();
        let process = proc.join(number.to_string());
        let task = process.join("task").join(number.to_string());
        fs::create_dir_all(task.join("ns")).unwrap();
        let status = format!("Name:\tx\nUid:\t{}\t1\t2\t3\n", getuid().as_raw());
        fs::write(process.join("status"), status).unwrap();
        fs::write(process.join("cmdline"), command.replace(' ', "\0")).unwrap();
        symlink(namespace, task.join("ns/mnt")).unwrap();
        symlink(root, task.join("root")).unwrap();
        let line = |device| format!("1 1 0:{device} / /mnt rw - ext4 /dev/loop0 rw\n");
        let mounts: String = devices.iter().map(line).collect();
        let mounts = format!("{mounts}1 1 0:4 {bound} /run/bound rw - nsfs nsfs rw\n");
        fs::write(task.join("mountinfo"), mounts).unwrap();
    }

    #[test]
    fn others_are_all_processes_but_daemons() {
        let proc = tempfile::tempdir().unwrap();
        let proc = proc.path();
        let found = || devices_of_others(proc);
        let of =
            |devices: &[u32]| Some(devices.iter().map(|device| (0, *device)).collect::<Devices>());
        add(proc, "sh", "mnt:[1]", "/", &[10], "net:[7]");
        add(proc, "burgeon __serve /state", "mnt:[2]", "/", &[20], "net:[7]");
        assert_eq!(found(), of(&[4, 10]));
        // Not all mounts of a namespace can be seen from below another root.
        add(proc, "burgeon mount image:1 /mnt", "mnt:[3]", "/chroot", &[30], "net:[7]");
        add(proc, "sh", "mnt:[3]", "/", &[30, 31], "net:[7]");
        assert_eq!(found(), of(&[4, 10, 30, 31]));
        add(proc, "sh", "mnt:[4]", "/", &[], "mnt:[5]");
        assert_eq!(found(), None, "nobody can see what is mounted in the namespace 5");
        add(proc, "sh", "mnt:[5]", "/", &[50], "mnt:[4]");
        assert_eq!(found(), of(&[4, 10, 30, 31, 50]));
    }

    /// A FIFO without a writer stands for memory on a file system that does not answer.
    #[test]
    fn the_command_line_of_another_user_is_not_read() {
        let proc = tempfile::tempdir().unwrap();
        add(proc.path(), "sh", "mnt:[1]", "/", &[10], "net:[7]");
        let (status, line) = (proc.path().join("0/status"), proc.path().join("0/cmdline"));
        fs::write(status, format!("Uid:\t{}\t0\t0\t0\n", getuid().as_raw() + 1)).unwrap();
        fs::remove_file(&line).unwrap();
        mknodat(CWD, &line, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let (send, receive) = mpsc::channel();
        let path = proc.path().to_owned();
        thread::spawn(move || send.send(devices_of_others(&path)));
        let found = receive.recv_timeout(Duration::from_secs(60)).expect("it waits for ever");
        assert_eq!(found, Some([(0, 4), (0, 10)].into()));
    }

    #[test]
    fn the_last_mount_at_a_place_hides_the_others() {
        let table = tempfile::NamedTempFile::new().unwrap();
        let line = |id, target| format!("{id} 1 0:1 / {target} rw - ext4 /dev/loop0 rw\n");
        let lines = [line(1, "/"), line(2, "/a"), line(3, "/b"), line(4, "/a")];
        fs::write(table.path(), lines.concat()).unwrap();
        let mounts = mountinfo::read(table.path()).unwrap();
        let ids: Vec<_> = reachable(&mounts).iter().map(|mount| mount.id).collect();
        assert_eq!(ids, [1, 3, 4]);
    }
}
