//! Tries on this very process everything that a sandbox must prevent.
//!
//! Harmless everywhere: nothing is changed, and opened files are closed unread. Each attempt goes
//! as far as the permission check and no further.

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    net::{SocketAddr, TcpStream},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::{Command, Stdio},
};

use io_uring::{IoUring, opcode, squeue::Entry, types::Fd};
use rustix::thread::{CapabilitySet, capabilities};

/// A file that only root may read.
const SECRET: &str = "/etc/shadow";
/// A device that only root may open. Opening it does nothing.
const DEVICE: &str = "/dev/loop-control";
/// An address without a listener.
const ADDRESS: ([u8; 4], u16) = ([127, 0, 0, 1], 1);

/// A process that enters a sandbox with this variable in its environment reports its abilities.
const VARIABLE: &str = "BURGEON_PROBE";

/// An attempt: its name, and a function that returns true if it was allowed.
type Attempt = (&'static str, fn() -> bool);

/// The attempts that this process is allowed, preceded by `landlock` if that guards its files.
pub fn allowed(guarded: bool) -> Vec<&'static str> {
    let done = attempts().iter().filter(|(_, attempt)| attempt()).map(|(name, _)| *name);
    guarded.then_some("landlock").into_iter().chain(done).collect()
}

/// Prints [`allowed`] with the verb of this process, if the environment asks for it. So tests see
/// the sandboxes of processes that commands and the daemon start.
pub(crate) fn report(guarded: bool) {
    if std::env::var_os(VARIABLE).is_some() {
        let verb = std::env::args().nth(1).unwrap_or_default();
        let line = format!("probe: {verb}: {}\n", allowed(guarded).join(", "));
        // In one write, because other processes write to the same log.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// All attempts, in this order.
fn attempts() -> &'static [Attempt] {
    &[
        ("execve", || {
            let mut command = Command::new("/proc/self/exe");
            let command = command.args(["__probe", "no-role"]);
            command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
        }),
        ("ptrace", || {
            // SAFETY: no process has the number 0; the kernel reports that only after the
            // permission check.
            let attached = unsafe { libc::ptrace(libc::PTRACE_ATTACH, 0, 0, 0) };
            attached == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
        }),
        ("mount", || {
            let name = c"burgeon-probe".as_ptr();
            // SAFETY: the strings end with a zero. There is no file system of that name; the kernel
            // reports that only after the permission check.
            let mounted = unsafe { libc::mount(name, c"/".as_ptr(), name, 0, std::ptr::null()) };
            mounted == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ENODEV)
        }),
        ("connect", || match TcpStream::connect(SocketAddr::from(ADDRESS)) {
            Ok(_) => true,
            Err(e) => e.kind() == io::ErrorKind::ConnectionRefused,
        }),
        ("read", || File::open(SECRET).is_ok()),
        ("write", || OpenOptions::new().append(true).open(SECRET).is_ok()),
        ("device", || OpenOptions::new().read(true).write(true).open(DEVICE).is_ok()),
        ("administer", || {
            capabilities(None).is_ok_and(|had| had.effective.contains(CapabilitySet::SYS_ADMIN))
        }),
        ("root", || {
            // SAFETY: a plain system call of three numbers, for this thread. Who is root stays so.
            let became = unsafe { libc::syscall(libc::SYS_setresuid, -1, 0, -1) } == 0;
            became || rustix::process::geteuid().is_root()
        }),
        ("io_uring", || IoUring::new(4).is_ok()),
        ("io_uring connect", || {
            // SAFETY: a plain system call; its result is checked.
            let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) };
            if socket < 0 {
                return false;
            }
            // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
            let socket = unsafe { OwnedFd::from_raw_fd(socket) };
            let (address, port) = ADDRESS;
            let address = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address) },
                sin_zero: [0; 8],
            };
            let len = size_of::<libc::sockaddr_in>() as u32;
            let connect =
                opcode::Connect::new(Fd(socket.as_raw_fd()), (&raw const address).cast(), len);
            let done = through_ring(connect.build());
            done.is_some_and(|result| result == 0 || result == -libc::ECONNREFUSED)
        }),
        ("io_uring read", || {
            let path = CString::new(SECRET).unwrap_or_default();
            let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), path.as_ptr());
            let opened = through_ring(open.flags(libc::O_RDONLY | libc::O_CLOEXEC).build());
            let Some(file) = opened.filter(|result| *result >= 0) else { return false };
            // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
            drop(unsafe { OwnedFd::from_raw_fd(file) });
            true
        }),
    ]
}

/// The kernel's result for `entry`, whose memory outlives this call; `None` without a ring.
fn through_ring(entry: Entry) -> Option<i32> {
    let mut ring = IoUring::new(4).ok()?;
    // SAFETY: the entry's memory lives until its completion, which this function awaits.
    unsafe { ring.submission().push(&entry) }.ok()?;
    ring.submit_and_wait(1).ok()?;
    ring.completion().next().map(|done| done.result())
}
