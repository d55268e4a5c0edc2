//! System calls that the program must not make: typing into the caller's terminal.
//!
//! The program inherits the terminal of whoever runs `burgeon run`. `TIOCSTI` puts characters into
//! its input, and `TIOCLINUX` pastes a selection there: the caller's shell would execute them as
//! the caller, outside of the container.
//!
//! Invariant: each number under which `ioctl` can be called is in [`ABIS`], those of other word
//! sizes too; only the low 32 bits of the command count, as for the kernel.

use std::io;

/// Architecture (`AUDIT_ARCH_…`) and number of each `ioctl`.
#[cfg(target_arch = "x86_64")]
const ABIS: &[(u32, u32)] = &[
    (0xc000_003e, 16),
    // x32, and its form of the native number.
    (0xc000_003e, 0x4000_0202),
    (0xc000_003e, 0x4000_0010),
    // i386
    (0x4000_0003, 54),
];
#[cfg(target_arch = "aarch64")]
const ABIS: &[(u32, u32)] = &[(0xc000_00b7, 29), (0x4000_0028, 54)];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the filter of system calls needs the numbers of this architecture");

const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;

/// Offsets in the kernel's `seccomp_data`: the low half of the second argument is on little-endian
/// machines, as all of the above are, the first one.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const COMMAND: u32 = 24;

/// A program of the kernel's packet filter, which it asks about each system call.
pub(crate) struct Filter(Vec<libc::sock_filter>);

impl Filter {
    pub(crate) fn new() -> Self {
        let mut lines = Vec::new();
        for (at, (architecture, number)) in ABIS.iter().enumerate() {
            // Over the lines of the later ones, and the answer.
            let to_command = (ABIS.len() - at) as u8 * 4 - 3;
            lines.extend([
                load(ARCHITECTURE),
                is(*architecture, 0, 2),
                load(NUMBER),
                is(*number, to_command, 0),
            ]);
        }
        lines.extend([
            answer(libc::SECCOMP_RET_ALLOW),
            load(COMMAND),
            is(TIOCSTI, 1, 0),
            is(TIOCLINUX, 0, 1),
            answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            answer(libc::SECCOMP_RET_ALLOW),
        ]);
        Self(lines)
    }

    /// Applies to this thread and all that it starts, for ever. It must not be able to get
    /// privileges. May be called between fork and exec.
    pub(crate) fn install(&self) -> io::Result<()> {
        let program = libc::sock_fprog {
            len: self.0.len() as libc::c_ushort,
            filter: self.0.as_ptr().cast_mut(),
        };
        // SAFETY: `program` and the lines that it points to live until the call returns; the kernel
        // copies them, and writes nothing. The two last arguments are not used.
        let result = unsafe {
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER as libc::c_ulong,
                &raw const program,
                0 as libc::c_ulong,
                0 as libc::c_ulong,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

const fn load(offset: u32) -> libc::sock_filter {
    let code = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    libc::sock_filter { code, jt: 0, jf: 0, k: offset }
}

/// Skips `yes` lines if what was loaded is `value`, else `no`.
const fn is(value: u32, yes: u8, no: u8) -> libc::sock_filter {
    let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    libc::sock_filter { code, jt: yes, jf: no, k: value }
}

const fn answer(action: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: action }
}

#[cfg(test)]
mod tests {
    use super::{Filter, TIOCLINUX, TIOCSTI};

    /// The error of an `ioctl` of no descriptor.
    fn error_of(command: u64) -> Option<i32> {
        // SAFETY: the call has no descriptor, so the kernel does not look at the argument.
        let result = unsafe { libc::syscall(libc::SYS_ioctl, -1, command, 0) };
        assert_eq!(result, -1);
        std::io::Error::last_os_error().raw_os_error()
    }

    #[test]
    fn nothing_is_typed_into_a_terminal_and_all_else_is_allowed() {
        // A filter is one of a thread.
        let thread = std::thread::spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            Filter::new().install().unwrap();
            for command in [TIOCSTI, TIOCLINUX] {
                for high in [0, 1 << 32] {
                    assert_eq!(error_of(u64::from(command) | high), Some(libc::EPERM));
                }
            }
            for command in [0x5401, 0x5413, 0x541b, 0] {
                assert_eq!(error_of(command), Some(libc::EBADF), "{command:x}");
            }
        });
        thread.join().unwrap();
    }
}
