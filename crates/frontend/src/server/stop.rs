//! Gets a thread out of a blocking `read` of `/dev/fuse` without losing a request.
//!
//! Polling before each read would cost a system call a request and wake every thread for each
//! one; a blocking read wakes one. So stopping interrupts the read with a signal. A read that has
//! taken a request is not interruptible, so none is lost. The signal may come just before the
//! read begins: it is sent again until the thread has left.

use std::{
    io, mem,
    os::unix::thread::JoinHandleExt,
    ptr,
    thread::{self, JoinHandle},
    time::Duration,
};

/// Ignored unless handled, so an unexpected one does no harm.
const SIGNAL: i32 = libc::SIGURG;

extern "C" fn ignore(_signal: i32) {}

/// Gives the signal a handler that does nothing: then it interrupts system calls.
pub(super) fn make_reads_interruptible() -> io::Result<()> {
    // SAFETY: all zeros is a valid `sigaction`: no flags (so no SA_RESTART), an empty mask. The
    // handler does nothing, so it is safe at any time.
    let result = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(i32) as usize;
        libc::sigaction(SIGNAL, &action, ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Unblocks the signal for the calling thread, which may have inherited a mask with it.
pub(super) fn accept_interrupts() {
    // SAFETY: a `sigset_t` on the stack, initialised by `sigemptyset`; only this thread's mask
    // changes. With these arguments none of the calls fails.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, SIGNAL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
    }
}

/// Interrupts the thread's read, if it is in one.
pub(super) fn interrupt(thread: &JoinHandle<()>) {
    // SAFETY: the thread is not joined yet, so its handle is valid even if it has ended.
    unsafe { libc::pthread_kill(thread.as_pthread_t() as libc::pthread_t, SIGNAL) };
}

/// Interrupts the thread's reads until it has ended. The thread must be leaving.
pub(super) fn interrupt_until_finished(thread: &JoinHandle<()>) {
    while !thread.is_finished() {
        interrupt(thread);
        thread::sleep(Duration::from_micros(200));
    }
}
