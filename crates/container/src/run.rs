//! A program in namespaces of its own, without a runtime.
//!
//! ```text
//!   burgeon run (mounts, waits) ──► burgeon __contain: new namespaces
//!                                      └──► burgeon __init, process 1 of them: the root, /proc, /dev, …
//!                                             └──► the program, with the image's user and 13 capabilities
//!   signals go down, the exit code comes up
//! ```
//!
//! Each process is killed with its parent, and the death of process 1 kills all processes of its
//! namespace. So `kill -9` of `burgeon run` leaves no process of the container. The mount is in a
//! namespace that only these processes have, so the kernel then unmounts it as well.
//!
//! Invariants: process 1 leaves the host's tree before it resolves a path of the image; the
//! program has no descriptor but the standard streams; it can neither inspect process 1 nor open
//! its program (`dumpable`, and capabilities that the program lacks), which is a sealed copy in
//! memory, and no file of the host.

mod filter;
mod init;
mod signals;
mod tree;

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    process::{Command, ExitCode},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_oci::ImageSettings;
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    mount::{MountPropagationFlags, mount_change},
    pipe::{PipeFlags, pipe_with},
    process::{Signal, getpid, getppid, set_parent_process_death_signal},
    thread::{UnshareFlags, unshare_unsafe},
};
use serde::{Deserialize, Serialize};

use self::signals::Signals;
use crate::{
    process::ContainerProcess,
    spec::{ContainerOptions, Network, volumes},
};

/// The internal verbs of the processes.
pub const CONTAIN: &str = "__contain";
/// Process 1 of the namespaces.
pub const INIT: &str = "__init";

/// Exit code of a container that could not be set up, as for other programs that run containers.
const NOT_RUN: u8 = 125;

/// The container, as process 1 gets it.
#[derive(Serialize, Deserialize)]
struct Job {
    process: ContainerProcess,
    options: ContainerOptions,
    /// Paths that are empty and writable.
    volumes: Vec<String>,
}

/// Moves this process, which has one thread, into a mount namespace of its own: a mount made there
/// ends with the processes that are in it.
pub fn leave_mount_namespace() -> Result<()> {
    unshare(UnshareFlags::NEWNS)?;
    stop_propagation()
}

/// Runs `process` with the mount at `root`; returns its exit code, 128 and the signal's number if
/// a signal ended it.
pub fn run(
    process: ContainerProcess,
    settings: &ImageSettings,
    options: ContainerOptions,
    root: &Path,
) -> Result<u8> {
    let volumes = match options.read_only {
        true => volumes(settings).cloned().collect(),
        false => Vec::new(),
    };
    let failed = |error: io::Error| Error::io("cannot start a container", error);
    let job = serde_json::to_vec(&Job { process, options, volumes });
    let job = job.map_err(|error| failed(error.into()))?;
    // Not an argument: variables of the environment may be secrets. Both processes inherit it.
    let memory = memfd_create("burgeon-container", MemfdFlags::empty());
    let mut memory = File::from(memory.map_err(|errno| failed(errno.into()))?);
    memory.write_all(&job).map_err(failed)?;
    let signals = Signals::block().map_err(failed)?;
    let mut command = this_program(CONTAIN);
    command.arg(memory.as_raw_fd().to_string());
    command.arg(getpid().as_raw_nonzero().to_string()).arg(root);
    let child = command.spawn().map_err(failed)?;
    signals.wait_for(&child).map_err(failed)
}

/// The main function of `burgeon __contain MEMORY PARENT ROOT`.
pub fn contain(arguments: &[OsString]) -> ExitCode {
    let [memory, parent, root] = arguments else { return ExitCode::from(2) };
    exit(with_namespaces(memory, parent, root))
}

fn with_namespaces(memory: &OsString, parent: &OsString, root: &OsString) -> Result<u8> {
    let failed = |error: io::Error| Error::io("cannot start a container", error);
    die_with_parent()?;
    let now = getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if now.is_none_or(|now| parent.to_str() != Some(&now)) {
        // The parent died before the kernel knew what to do then.
        return Ok(NOT_RUN);
    }
    let job = read_job(memory)?;
    let mut namespaces = UnshareFlags::NEWNS
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWPID
        | UnshareFlags::NEWCGROUP;
    if job.options.network == Network::None {
        namespaces |= UnshareFlags::NEWNET;
    }
    unshare(namespaces)?;
    stop_propagation()?;
    let signals = Signals::block().map_err(failed)?;
    // The child inherits the reading end, and sees by it whether this process lives.
    let (read, write) = pipe_with(PipeFlags::empty()).map_err(|errno| failed(errno.into()))?;
    rustix::io::fcntl_setfd(&write, rustix::io::FdFlags::CLOEXEC)
        .map_err(|errno| failed(errno.into()))?;
    let program = sealed_copy().map_err(failed)?;
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.arg0("burgeon").arg(INIT).arg(memory).arg(read.as_raw_fd().to_string()).arg(root);
    let child = command.spawn().map_err(failed)?;
    drop(read);
    let code = signals.wait_for(&child).map_err(failed);
    drop::<OwnedFd>(write);
    code
}

/// The main function of `burgeon __init MEMORY PIPE ROOT`.
pub fn init(arguments: &[OsString]) -> ExitCode {
    let [memory, pipe, root] = arguments else { return ExitCode::from(2) };
    exit(init::main(memory, pipe, root.as_ref()))
}

fn exit(code: Result<u8>) -> ExitCode {
    match code {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("burgeon: {error}");
            ExitCode::from(NOT_RUN)
        }
    }
}

/// This very program as `verb`, even if its file has been replaced.
fn this_program(verb: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("burgeon").arg(verb);
    command
}

/// A copy of this very program in memory, which nobody can change. Programs of the image can
/// execute the program of process 1 and reach its file by `/proc/PID/exe`: that must not be the
/// host's.
fn sealed_copy() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made = match memfd_create("burgeon", flags | MemfdFlags::EXEC) {
        // A kernel before 6.3, where all of them are executable.
        Err(rustix::io::Errno::INVAL) => memfd_create("burgeon", flags),
        made => made,
    };
    let mut copy = File::from(made?);
    io::copy(&mut File::open("/proc/self/exe")?, &mut copy)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&copy, seals)?;
    Ok(copy)
}

fn die_with_parent() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|errno| Error::io("cannot bind a container to its command", errno.into()))
}

fn unshare(flags: UnshareFlags) -> Result<()> {
    // SAFETY: the flags contain none that separates the descriptors of threads.
    unsafe { unshare_unsafe(flags) }.map_err(|errno| {
        let what = "cannot make namespaces for a container: are there too many \
                    (/proc/sys/user/max_*_namespaces)?";
        Error::io(what, errno.into())
    })
}

/// Keeps mounts of this namespace from others; unmounts of others still come here.
fn stop_propagation() -> Result<()> {
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", flags)
        .map_err(|errno| Error::io("cannot separate the mounts of a container", errno.into()))
}

fn read_job(memory: &OsString) -> Result<Job> {
    let failed = |error: io::Error| Error::io("cannot read the container's settings", error);
    let path = Path::new("/proc/self/fd").join(memory);
    let mut bytes = Vec::new();
    File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(failed)?;
    serde_json::from_slice(&bytes).map_err(|error| failed(error.into()))
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, what)
}
