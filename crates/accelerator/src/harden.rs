//! Keeps supervisor and server alive and responsive when memory is short: the kernel may write
//! dirty pages through them to get memory.

use rustix::mm::{MlockAllFlags, mlockall};

/// `linux/prctl.h`, since Linux 5.6.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Hardens the calling process. What fails is no reason to refuse to serve, and is logged.
pub(crate) fn harden() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!(%error, "the kernel may kill this process when memory is short");
    }
    // SAFETY: PR_SET_IO_FLUSHER takes four integers and touches no memory of this process.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        tracing::warn!("other writers may throttle this process (PR_SET_IO_FLUSHER)");
    }
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(flags) {
        tracing::warn!(%error, "the memory of this process is not locked");
    }
}
