//! A memory cgroup of the daemon's own.
//!
//! A server in the cgroup of its applications waits for writeback in reclaim, and that writeback
//! waits for the server. So the daemon leaves the cgroup it was started in, both in the unified
//! hierarchy and in a version 1 memory hierarchy, if there is one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use crate::host::mountinfo;

/// Attempts to remove a cgroup, and the pause between them: two seconds in total.
const LEAVE_TRIES: u32 = 200;
const LEAVE_PAUSE: Duration = Duration::from_millis(10);

/// The cgroups that were made; [`Self::leave`] removes them.
#[derive(Debug, Default)]
pub(crate) struct OwnCgroup {
    made: Vec<(PathBuf, PathBuf)>,
}

impl OwnCgroup {
    /// Moves this process into cgroups called `burgeon-<tag>` at the top of every hierarchy that
    /// accounts memory. Also returns the failures, in sentences.
    pub(crate) fn enter(tag: &str) -> (Self, Vec<String>) {
        let mut own = Self::default();
        let mut missing = Vec::new();
        if std::env::var_os("NOTIFY_SOCKET").is_some() {
            // systemd has made one for the unit, and loses track of a process that leaves it.
            return (own, missing);
        }
        for top in hierarchies() {
            let path = top.join(format!("burgeon-{tag}"));
            match enter_one(&path) {
                Ok(()) => own.made.push((top, path)),
                Err(e) => missing.push(format!(
                    "the daemon shares the memory cgroup of the process that started it ({}: {e})",
                    path.display()
                )),
            }
        }
        (own, missing)
    }

    /// Moves this process to the top and removes the cgroups.
    pub(crate) fn leave(&self) {
        for (top, path) in &self.made {
            // Best effort at exit: an empty cgroup costs nothing and is reused.
            let _ = fs::write(top.join("cgroup.procs"), "0");
            // A server that has just ended stays in it for a moment.
            for _ in 0..LEAVE_TRIES {
                match fs::remove_dir(path) {
                    Err(e) if e.kind() == io::ErrorKind::ResourceBusy => thread::sleep(LEAVE_PAUSE),
                    _ => break,
                }
            }
        }
    }
}

/// Removes the cgroups of a daemon that was killed; false if there are none, or processes in them.
pub(crate) fn remove_leftovers(tag: &str) -> bool {
    let removed = |top: PathBuf| fs::remove_dir(top.join(format!("burgeon-{tag}"))).is_ok();
    hierarchies().into_iter().map(removed).fold(false, |any, removed| any | removed)
}

fn enter_one(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    fs::write(path.join("cgroup.procs"), "0")
}

/// The hierarchies that account memory: the unified one if it has the controller, and version 1's.
fn hierarchies() -> Vec<PathBuf> {
    let Ok(mounts) = mountinfo::read(Path::new("/proc/self/mountinfo")) else { return Vec::new() };
    let mut tops: Vec<PathBuf> = Vec::new();
    for mount in mounts {
        let accounts_memory = match mount.fs_type.as_str() {
            "cgroup" => mount.super_options.split(',').any(|option| option == "memory"),
            "cgroup2" => fs::read_to_string(mount.target.join("cgroup.controllers"))
                .is_ok_and(|list| list.split_whitespace().any(|name| name == "memory")),
            _ => false,
        };
        if accounts_memory && !tops.contains(&mount.target) {
            tops.push(mount.target);
        }
    }
    tops
}
