//! Signals to wait for, instead of handlers that run at any moment.

use std::{io, mem::MaybeUninit};

/// Blocks the termination signals, in this thread and all that it starts later.
pub fn block_termination() -> io::Result<TerminationSignals> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set before anything reads it; the other calls get valid
    // pointers to it, and a null pointer in place of the old mask.
    let (set, error) = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        let mut set = set.assume_init();
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&mut set, signal);
        }
        let error = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        (set, error)
    };
    match error {
        0 => Ok(TerminationSignals(set)),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// The blocked signals.
pub struct TerminationSignals(libc::sigset_t);

impl TerminationSignals {
    /// Waits for one of them and returns its number.
    pub fn wait(&self) -> io::Result<i32> {
        let mut signal = 0;
        // SAFETY: both pointers are valid; the set was initialised by `block_termination`.
        match unsafe { libc::sigwait(&self.0, &mut signal) } {
            0 => Ok(signal),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}
