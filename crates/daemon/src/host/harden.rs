//! What keeps the daemon alive and quick when memory is short.
//!
//! Measured on machines of 384 to 512 MB with a dirty sprout and cold reads: a plain server's
//! slowest request took 15 s and an unprotected one was killed; with locked memory,
//! `PR_SET_IO_FLUSHER` and a score of -1000 the slowest took 1.5 s. A server in its readers'
//! memory cgroup deadlocks with them, so the daemon has one of its own (see `cgroup`).

use std::fs;

use rustix::{
    mm::{MlockAllFlags, mlockall},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

/// Stacks of the threads that prepare an image, for each CPU: 8 MiB.
const STACK_BYTES: u64 = 8 << 20;

/// Hardens the calling process; returns what could not be had, in sentences. Nothing here is
/// worth refusing to serve for.
pub(crate) fn harden(lock_memory: bool) -> Vec<String> {
    let mut missing = Vec::new();
    lift_limits();
    if let Err(e) = fs::write("/proc/self/oom_score_adj", "-1000") {
        missing.push(format!(
            "the kernel may kill the daemon when memory is short (oom_score_adj: {e})"
        ));
    }
    if !set_io_flusher() {
        let e = std::io::Error::last_os_error();
        missing
            .push(format!("the daemon may be throttled by other writers (PR_SET_IO_FLUSHER: {e})"));
    }
    if lock_memory {
        let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
        if let Err(e) = mlockall(flags) {
            missing.push(format!("the daemon's memory is not locked (mlockall: {e})"));
        }
    }
    missing
}

/// Whether memory stays lockable without CAP_IPC_LOCK: with locked memory, a limit would make
/// allocations fail.
pub(crate) fn can_lock_without_capability() -> bool {
    getrlimit(Resource::Memlock).current.is_none()
}

/// The limits of the shell that happened to start the daemon are not its own: it may hold as many
/// descriptors as the kernel lets it, and a file that would become too large is an error.
fn lift_limits() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Mounts need two to four descriptors each; with fewer than that there are fewer mounts.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    // The server locks its memory, and gives up the capability that would ignore this limit.
    let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
    // SAFETY: the signal is ignored, so no code of ours runs when it comes.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Bounds the memory of the calling process at twice `bytes`, which is what its readers count: a
/// backstop for memory that they do not count. Only private memory that can be written counts, because
/// allocators and threads reserve addresses for each CPU; stacks are among it, and are added.
pub(crate) fn bound_memory(bytes: u64) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let limit = Some(bytes.saturating_mul(2).saturating_add(cpus.saturating_mul(STACK_BYTES)));
    let maximum = getrlimit(Resource::Data).maximum;
    // The administrator's own limit may be lower, and stays.
    let current = limit.min(maximum.or(limit));
    let _ = setrlimit(Resource::Data, Rlimit { current, maximum });
}

/// The same for a process that reads archives, layers and documents, as its readers find out what they
/// hold.
pub(crate) fn bound_memory_of_readers() {
    burgeon_block::watch_bound(bound_memory);
}

/// A supervisor that has lost one of its threads would be there and leave its work undone: it ends,
/// and the next one takes everything over.
pub(crate) fn end_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
}

/// `linux/prctl.h`, since Linux 5.6.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Writes of this process are part of writeback: the kernel must not make them wait for it.
fn set_io_flusher() -> bool {
    // SAFETY: PR_SET_IO_FLUSHER takes four integers and touches no memory of ours.
    unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) == 0 }
}
