//! The state of the machine outside of the test: loop devices and processes.

use std::{
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// A loop device in use.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoopDevice {
    /// Such as `loop3`.
    pub name: String,
    /// The path of its file, as the kernel shows it.
    pub backing: PathBuf,
}

/// All loop devices in use, other people's too.
pub fn loop_devices() -> Vec<LoopDevice> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mut used: Vec<_> = devices
        .filter_map(|device| {
            let backing = fs::read(device.path().join("loop/backing_file")).ok()?;
            let backing = backing.strip_suffix(b"\n").unwrap_or(&backing);
            let name = device.file_name().into_string().ok()?;
            Some(LoopDevice { name, backing: std::ffi::OsStr::from_bytes(backing).into() })
        })
        .collect();
    used.sort();
    used
}

/// The ublk devices of this machine, such as `ublkc0`, other people's too.
pub fn ublk_devices() -> Vec<String> {
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// True if mounts are to go over ublk here. The lab's kernels are known; elsewhere it is asked
/// whether the driver runs.
pub fn ublk_expected() -> bool {
    match std::env::var("LAB_KERNEL").as_deref() {
        Ok("6.12") => true,
        Ok("6.1") => false,
        _ => Path::new("/dev/ublk-control").exists(),
    }
}

/// A number of repetitions, or a size: `here`, or `emulated` on the machines of the lab, which are
/// many times slower. The test must show the same with both.
pub fn scaled<T>(here: T, emulated: T) -> T {
    match std::env::var_os("LAB_KERNEL") {
        None => here,
        Some(_) => emulated,
    }
}

/// Ids of the processes, other than this one, whose command line holds `needle`.
pub fn processes_with(needle: &Path) -> Vec<u32> {
    let needle = needle.as_os_str().as_bytes();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| *id != std::process::id())
        .filter(|id| {
            let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            line.windows(needle.len()).any(|window| window == needle)
        })
        .collect()
}

/// Kills process `id` with SIGKILL and waits until all its threads are gone, and with them its
/// locks and sockets; it is no error if it has gone before.
pub fn kill(id: u32) {
    use rustix::{
        event::{PollFd, PollFlags, Timespec, poll},
        io::Errno,
        process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
    };
    let kill = || {
        let pid = i32::try_from(id).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        pidfd_send_signal(&process, Signal::KILL)?;
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience))
    };
    match kill() {
        Ok(0) => panic!("process {id} does not die"),
        // The number of a process that is gone may still be that of a group: then it is invalid.
        Ok(_) | Err(Errno::SRCH | Errno::INVAL) => {}
        Err(errno) => panic!("cannot kill process {id}: {errno}"),
    }
}

/// Puts a copy of the program `from` at `to`, to be run from there. Another process writes it: a
/// file that this one has open for writing is, for a moment, open in each child that a test beside
/// this one starts, and could not be run ("Text file busy").
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("--").args([from, to]).status().expect("cp runs");
    assert!(status.success(), "cannot copy {} to {}", from.display(), to.display());
}

/// Limit for an event that must come: on a busy machine everything takes many times as long, and a
/// test that passes never waits so long. No figure of Burgeon depends on it.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `condition` holds, at most `limit`; says whether it does.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command};

    use super::processes_with;

    #[test]
    fn a_process_is_found_by_its_command_line() {
        let needle = Path::new("34271.5");
        let mut child = Command::new("sleep").arg(needle).spawn().unwrap();
        let found = super::wait_until(std::time::Duration::from_secs(10), || {
            processes_with(needle).contains(&child.id())
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found);
    }
}
