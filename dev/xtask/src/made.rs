//! Objects that one run of the tests makes on this machine, and its leftovers.
//!
//! ```text
//!   target/tmp/run-<pid>/   every test's folder, so every backing file and mount point
//!        ▲                   given to the tests as BURGEON_TEST_DIR
//!        └── loop devices, mounts and processes that name it are this run's; all others are not
//! ```
//!
//! Invariant: a second run beside this one is neither blamed nor touched
//! (`tests::only_what_names_the_folder_is_found`).

use std::{
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use testkit::{LoopDevice, PATIENCE, loop_devices, wait_until};

/// The variable that tells tests where to put their folders.
pub(crate) const TEST_DIR: &str = "BURGEON_TEST_DIR";

/// One run's folder.
pub(crate) struct Made {
    pub(crate) folder: PathBuf,
}

impl Made {
    /// Makes the folder.
    pub(crate) fn begin(root: &Path) -> Result<Self> {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or("target".into(), PathBuf::from);
        let folder = root.join(target).join(format!("tmp/run-{}", process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self { folder: fs::canonicalize(folder)? })
    }

    /// Loop devices, mounts, processes and files of this run.
    pub(crate) fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let loops: Vec<_> =
            loop_devices().into_iter().filter(|l| l.backing.starts_with(&self.folder)).collect();
        left.extend(loops.iter().map(|l| format!("{} with {}", l.name, l.backing.display())));
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let ours = |line: &&str| {
            let source = line.split(' ').next().unwrap_or_default();
            line.contains(&escaped(&self.folder))
                || loops.iter().any(|l| source.strip_prefix("/dev/") == Some(&l.name))
        };
        left.extend(mounts.lines().filter(ours).map(|line| format!("mount {line}")));
        let processes = self.processes();
        left.extend(processes.iter().map(|(id, line)| format!("process {id} ({line})")));
        let files = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        left.extend(files.map(|file| format!("file {}", file.path().display())));
        left
    }

    /// Processes, other than this one, whose command line or environment names the folder.
    fn processes(&self) -> Vec<(u32, String)> {
        let needle = self.folder.as_os_str().as_bytes();
        let names = |file: PathBuf| {
            let bytes = fs::read(file).unwrap_or_default();
            bytes.windows(needle.len()).any(|window| window == needle).then_some(())
        };
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            if id == process::id() {
                continue;
            }
            let folder = entry.path();
            if names(folder.join("cmdline")).or_else(|| names(folder.join("environ"))).is_some() {
                let line = fs::read(folder.join("cmdline")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                found.push((id, line));
            }
        }
        found
    }

    /// Ends the processes that are left, and removes loop devices and files.
    pub(crate) fn end(&self) {
        let gone = || {
            let processes = self.processes();
            for (id, _) in &processes {
                let id = i32::try_from(*id).ok().and_then(Pid::from_raw);
                let _ = id.map(|id| kill_process(id, Signal::KILL));
            }
            processes.is_empty()
        };
        // Tests mount in namespaces of their own, which end with them; loop devices may stay.
        wait_until(PATIENCE, gone);
        let ours = |device: &LoopDevice| device.backing.starts_with(&self.folder);
        for device in loop_devices().into_iter().filter(ours) {
            let path = Path::new("/dev").join(device.name);
            let _ = Command::new("losetup").arg("--detach").arg(path).output();
        }
        self.remove();
    }

    /// Removes the folder and whatever is in it.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A path as the kernel's tables of mounts show it.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace('\\', r"\134").replace(' ', r"\040")
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        process::{Command, Stdio},
    };

    use testkit::{PATIENCE, Space, wait_until};

    use super::Made;

    #[test]
    fn only_what_names_the_folder_is_found() {
        let space = Space::new("made");
        let mine = Made { folder: space.make_folder("run 1") };
        let other = Made { folder: space.make_folder("run 2") };
        let mut child = Command::new("sleep").arg("1000").env("X", &mine.folder).spawn().unwrap();
        fs::write(mine.folder.join("file"), "").unwrap();
        let found = wait_until(PATIENCE, || mine.left().len() == 2);
        let left = (mine.left(), other.left());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found, "{left:?}");
        assert!(left.1.is_empty(), "{left:?}");
        fs::remove_file(mine.folder.join("file")).unwrap();
        assert!(wait_until(PATIENCE, || mine.left().is_empty()), "{:?}", mine.left());
    }

    #[test]
    fn leftovers_are_ended_and_removed() {
        let space = Space::new("made-end");
        let made = Made { folder: space.make_folder("run") };
        let mut cat = Command::new("cat");
        let mut child = cat.env("X", &made.folder).stdin(Stdio::piped()).spawn().unwrap();
        fs::write(made.folder.join("file"), "").unwrap();
        assert!(wait_until(PATIENCE, || made.left().len() == 2), "{:?}", made.left());
        made.end();
        assert!(!made.folder.exists());
        assert!(!child.wait().unwrap().success());
    }
}
