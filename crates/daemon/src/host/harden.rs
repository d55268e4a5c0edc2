//! Keeps the daemon alive and responsive when memory is short.
//!
//! Measured on machines of 384 to 512 MB with a dirty sprout and cold reads: a plain server's
//! slowest request took 15 s and an unprotected one was killed; with locked memory,
//! `PR_SET_IO_FLUSHER` and a score of -1000 the slowest took 1.5 s. A server in its readers' memory
//! cgroup deadlocks with them, so the daemon has one of its own (see `cgroup`).

use std::fs;

use rustix::{
    mm::{MlockAllFlags, mlockall},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

/// Stacks of the threads that prepare an image: 8 MiB per CPU.
const STACK_BYTES: u64 = 8 << 20;

/// Hardens the calling process; returns the measures that failed, in sentences. None of them is a
/// reason to refuse to serve.
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

/// True if memory stays lockable without CAP_IPC_LOCK: with locked memory, a limit would make
/// allocations fail.
pub(crate) fn can_lock_without_capability() -> bool {
    getrlimit(Resource::Memlock).current.is_none()
}

/// Lifts the limits inherited from the shell that started the daemon: it may open as many
/// descriptors as the kernel allows, and a file that would become too large is an error.
fn lift_limits() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Mounts need two to four descriptors each: a lower limit allows fewer mounts.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    // The server locks its memory, and drops the capability that overrides this limit.
    let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
    report_file_limit();
}

/// Makes a write beyond the limit of a file's size (`ulimit -f`) an error, which the program can
/// name and clean up after; by default it would end the process. Processes that this one starts
/// inherit that.
pub fn report_file_limit() {
    // SAFETY: the signal is ignored, so it runs no code of this process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Forbids core dumps of this process and its children: they would have credentials and the data of
/// all mounts. One byte, because the kernel ignores a limit of zero if a program takes the dumps.
pub fn forbid_core_dumps() {
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(1), maximum: Some(1) });
}

/// Bounds the memory of the calling process at twice `bytes`, the amount that its readers account
/// for: a backstop for memory that they do not count. Only private writable memory counts, because
/// allocators and threads reserve addresses for each CPU; it includes stacks, which are added.
pub(crate) fn bound_memory(bytes: u64) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let limit = Some(bytes.saturating_mul(2).saturating_add(cpus.saturating_mul(STACK_BYTES)));
    let maximum = getrlimit(Resource::Data).maximum;
    // The administrator's own limit may be lower, and stays.
    let current = limit.min(maximum.or(limit));
    let _ = setrlimit(Resource::Data, Rlimit { current, maximum });
}

/// The same for a process that reads archives, layers and documents of unknown contents.
pub(crate) fn bound_memory_of_readers() {
    burgeon_block::watch_bound(bound_memory);
}

/// Ends the process if a thread panics: a supervisor without one of its threads would leave its
/// work undone, and its successor takes everything over.
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
    // SAFETY: PR_SET_IO_FLUSHER takes four integers and touches no memory of this process.
    unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) == 0 }
}
