//! Signals for the program of a container, and its end.
//!
//! A terminal sends its signals to all processes of the foreground; these are not passed on, or
//! the program would get them twice.

use std::{io, mem::MaybeUninit, process::Child};

use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions, kill_process, wait},
};

/// Signals that are passed on.
const FORWARDED: [Signal; 8] = [
    Signal::TERM,
    Signal::INT,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::WINCH,
    Signal::ALARM,
];

/// The blocked signals.
pub(crate) struct Signals(libc::sigset_t);

impl Signals {
    /// Blocks them in this thread, and in programs that it starts.
    pub(crate) fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the set before anything reads it; the other calls get
        // valid pointers to it, and a null pointer in place of the old mask.
        let (set, error) = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            let mut set = set.assume_init();
            for signal in FORWARDED {
                libc::sigaddset(&mut set, signal.as_raw());
            }
            libc::sigaddset(&mut set, libc::SIGCHLD);
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            (set, error)
        };
        match error {
            0 => Ok(Self(set)),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Passes signals on to `child` until it ends; reaps all other children as well. Returns the
    /// child's exit code, 128 and the signal's number if a signal ended it.
    pub(crate) fn wait_for(&self, child: &Child) -> io::Result<u8> {
        let child = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let child = child.ok_or(io::ErrorKind::InvalidInput)?;
        loop {
            while let Some((pid, status)) = reap()? {
                if pid == child {
                    let code =
                        status.exit_status().or(status.terminating_signal().map(|s| 128 + s));
                    return Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
                }
            }
            let (signal, is_from_kernel) = self.next()?;
            if let Some(signal) = FORWARDED.into_iter().find(|it| it.as_raw() == signal)
                && !is_from_kernel
            {
                // The child may have just ended.
                let _ = kill_process(child, signal);
            }
        }
    }

    /// Waits for a signal; returns its number, and whether the kernel sent it.
    fn next(&self) -> io::Result<(i32, bool)> {
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        loop {
            // SAFETY: the set was initialised by `block`, and `info` has room for the answer.
            let signal = unsafe { libc::sigwaitinfo(&self.0, info.as_mut_ptr()) };
            if signal >= 0 {
                // SAFETY: the call has filled it.
                let info = unsafe { info.assume_init() };
                return Ok((signal, info.si_code == libc::SI_KERNEL));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Lets all signals through in this thread, so in the program that it executes.
pub(crate) fn unblock_all() -> io::Result<()> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set before the kernel reads it; the old mask is not
    // asked for. Both calls may be made between fork and exec.
    let error = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut())
    };
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// A child that has ended.
fn reap() -> io::Result<Option<(Pid, rustix::process::WaitStatus)>> {
    match wait(WaitOptions::NOHANG) {
        Err(Errno::CHILD) => Ok(None),
        ended => Ok(ended?),
    }
}
