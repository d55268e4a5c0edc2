//! Process 1 of a container: makes its root, starts the program, reaps orphans.

use std::{
    ffi::OsString,
    fs::{File, create_dir_all},
    io,
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
};

use burgeon_block::{Error, Result};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{Gid, Mode, Uid},
    process::{DumpableBehavior, set_dumpable_behavior},
    system::sethostname,
    thread::{
        CapabilitySet, CapabilitySets, remove_capability_from_bounding_set, set_capabilities,
        set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    },
};

use super::{
    NOT_RUN, die_with_parent,
    filter::Filter,
    invalid, read_job,
    signals::{Signals, unblock_all},
    tree,
};
use crate::{
    defaults::{CAPABILITIES, MKNOD},
    process::ContainerProcess,
};

/// Exit codes of a program that cannot be started, as in shells.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// Runs the container; returns the program's exit code.
pub(crate) fn main(memory: &OsString, pipe: &OsString, root: &Path) -> Result<u8> {
    let failed = |what: &str, error: io::Error| Error::io(format!("cannot {what}"), error);
    die_with_parent()?;
    if !parent_lives(pipe)? {
        return Ok(NOT_RUN);
    }
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|errno| failed("hide process 1 of the container", errno.into()))?;
    let job = read_job(memory)?;
    let signals = Signals::block().map_err(|error| failed("block signals", error))?;
    sethostname(job.options.hostname.as_bytes())
        .map_err(|errno| failed("set the container's host name", errno.into()))?;
    rustix::process::umask(Mode::empty());
    tree::enter(root, &job.options)?;
    tree::fill(&job.volumes, job.options.read_only)?;
    rustix::process::umask(Mode::from_bits_truncate(0o022));
    // From here on no value of this process has a descriptor but the standard streams.
    // SAFETY: `File` and `OwnedFd` values of above have been dropped, and no other thread exists.
    if unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) } != 0 {
        return Err(failed("close descriptors", io::Error::last_os_error()));
    }
    start(&job.process, &signals)
}

/// True if the process at the other end of the inherited pipe has not died meanwhile.
fn parent_lives(pipe: &OsString) -> Result<bool> {
    let failed = |error: io::Error| Error::io("cannot look after the container's parent", error);
    let pipe = File::open(Path::new("/proc/self/fd").join(pipe)).map_err(failed)?;
    let mut polled = [PollFd::new(&pipe, PollFlags::IN)];
    poll(&mut polled, Some(&Default::default())).map_err(|errno| failed(errno.into()))?;
    Ok(!polled[0].revents().contains(PollFlags::HUP))
}

fn start(process: &ContainerProcess, signals: &Signals) -> Result<u8> {
    let [program, arguments @ ..] = &process.args[..] else {
        return Err(invalid("the container has no command"));
    };
    // As other runtimes do; if it fails, the start names the folder.
    let _ = create_dir_all(&process.cwd);
    let mut command = Command::new(program);
    command.args(arguments).env_clear().current_dir(&process.cwd);
    command.envs(process.env.iter().filter_map(|variable| variable.split_once('=')));
    let groups: Vec<Gid> = process.user.groups.iter().map(|id| Gid::from_raw(*id)).collect();
    let (uid, gid) = (Uid::from_raw(process.user.uid), Gid::from_raw(process.user.gid));
    let kept = CAPABILITIES.iter().filter(|(name, _)| *name != MKNOD);
    let kept = kept.fold(0u64, |set, (_, number)| set | 1 << number);
    let filter = Filter::new();
    // SAFETY: the closure only makes system calls; it neither allocates nor takes locks, which
    // another thread could have held.
    unsafe {
        command.pre_exec(move || {
            unblock_all()?;
            take_identity(uid, gid, &groups, kept)?;
            filter.install()
        });
    }
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let code = match error.kind() {
                io::ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_EXECUTABLE,
            };
            let (program, cwd) = (program.escape_debug(), process.cwd.escape_debug());
            eprintln!("burgeon: cannot run {program} in {cwd} of the image: {error}");
            return Ok(code);
        }
    };
    signals.wait_for(&child).map_err(|error| Error::io("cannot wait for the program", error))
}

/// Becomes the program's user, with the capabilities `kept` at most.
fn take_identity(uid: Uid, gid: Gid, groups: &[Gid], kept: u64) -> rustix::io::Result<()> {
    for number in 0..64 {
        if kept & (1 << number) == 0 {
            match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number))
            {
                // The kernel has no more capabilities.
                Err(rustix::io::Errno::INVAL) => break,
                removed => removed?,
            }
        }
    }
    set_thread_groups(groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    // The kernel has taken all from another user than root.
    let kept = match uid.is_root() {
        true => CapabilitySet::from_bits_retain(kept),
        false => CapabilitySet::empty(),
    };
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?;
    set_no_new_privs(true)
}
