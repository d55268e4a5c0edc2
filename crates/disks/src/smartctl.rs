//! Runs smartctl of smartmontools: with a time limit, bounded output and an environment of ours.
//!
//! Invariant: a smartctl that hangs, prints without end or leaves children costs at most
//! [`Smartctl::time`] and [`REPORT_MAX`] bytes. Held by the tests in `tests/smartctl.rs`.

use std::{
    env,
    io::{ErrorKind as IoKind, Read},
    os::{
        fd::AsFd,
        unix::{fs::PermissionsExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, kill_process_group},
};

use crate::report::{DriveReport, REPORT_MAX};

/// Directories of smartctl besides those of PATH, which often lacks them without root.
const SYSTEM: &str = "/usr/local/sbin:/usr/sbin:/sbin";
/// The PATH that smartctl gets.
const CHILD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Time for a killed process to go; one that waits for a disk in the kernel may stay for long.
const GOING: Duration = Duration::from_secs(1);

/// The program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Smartctl {
    /// The program's absolute path.
    pub program: PathBuf,
    /// The longest time of one call.
    pub time: Duration,
}

impl Smartctl {
    /// Finds the program.
    pub fn find() -> Option<Self> {
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = env::split_paths(&path).chain(env::split_paths(SYSTEM));
        // A relative directory would depend on where the caller is.
        let programs = folders.filter(|folder| folder.is_absolute()).map(|f| f.join("smartctl"));
        let can_run = |path: &PathBuf| {
            path.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
        };
        let program = programs.into_iter().find(can_run)?;
        Some(Self { program, time: Duration::from_secs(20) })
    }

    /// Asks the drive `device`. A sleeping disk is not woken.
    pub fn ask(&self, device: &Path) -> Result<DriveReport> {
        let shown = self.program.display();
        let failed = |e| Error::io(format!("cannot run {shown}"), e);
        let mut child = Command::new(&self.program)
            .args(["--json=c", "--nocheck=standby", "--info", "--attributes"])
            .args(["--log=error", "--log=devstat", "--log=ssd"])
            .arg(device)
            .env_clear()
            .env("PATH", CHILD_PATH)
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // So that its children can be ended with it.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let output = self.output(&mut child);
        end(&mut child);
        // Its exit code also tells of failing disks: the output says whether it has worked.
        DriveReport::parse(&output?).map_err(|e| {
            Error::with_source(e.kind(), format!("{shown} of {}", device.display()), e)
        })
    }

    /// All of the output, until its end.
    fn output(&self, child: &mut Child) -> Result<Vec<u8>> {
        let shown = self.program.display();
        let failed = |e| Error::io(format!("cannot read the output of {shown}"), e);
        let mut pipe = child.stdout.take().ok_or_else(|| {
            Error::new(ErrorKind::LocalIo, format!("{shown} has no standard output"))
        })?;
        rustix::io::ioctl_fionbio(&pipe, true).map_err(|e| failed(e.into()))?;
        let end = Instant::now() + self.time;
        let mut output = Vec::new();
        let mut buffer = [0; 16 << 10];
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => return Ok(output),
                Ok(count) => output.extend_from_slice(&buffer[..count]),
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) if e.kind() == IoKind::WouldBlock => wait(&pipe, end),
                Err(e) => return Err(failed(e)),
            }
            if output.len() > REPORT_MAX {
                let what = format!("{shown} printed more than {REPORT_MAX} bytes, and was ended");
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
            if Instant::now() >= end {
                let what = format!(
                    "{shown} did not end within {} s, and was ended: does the disk answer?",
                    self.time.as_secs()
                );
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        }
    }
}

/// Waits until there is output, or until `end`.
fn wait(pipe: impl AsFd, end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let _ = poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&left));
}

/// Ends the process and its children, and takes its exit code if it goes in time.
fn end(child: &mut Child) {
    let end = Instant::now() + GOING;
    // Not waited for yet, so the number is still its own.
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}
