//! System calls that no role needs, refused with `EPERM`.
//!
//! A deny list, not an allow list: libraries change their system calls, and a refusal that shows
//! only under load would be a bug of ours. The kernel does not run the filter for calls that it
//! always allows, so the data path pays nothing.

use std::io;

use burgeon_block::{Error, Result};
use libc::{c_long, sock_filter, sock_fprog};

/// Calls for new programs, other processes, mounts, namespaces, and the kernel itself.
const REFUSED: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_tkill,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    OPEN_TREE_ATTR,
    // A process may keep root as its real user (`user.rs`).
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_unshare,
    libc::SYS_setns,
    // It bypasses paths, and so Landlock.
    libc::SYS_open_by_handle_at,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    // It goes by the real user.
    libc::SYS_ioprio_set,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Calls that make a detached mount.
const MOUNTS: &[c_long] = &[
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
];
const RINGS: &[c_long] =
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
const NETWORK: &[c_long] = &[libc::SYS_socket, libc::SYS_connect];
/// Calls whose first argument is a process: allowed for this one, or for 0 where that means the
/// same.
const PROCESSES: &[c_long] = &[
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_prlimit64,
];
/// As [`PROCESSES`], but 0 is a group of processes.
const SIGNALS: &[c_long] = &[libc::SYS_kill];
/// Commands of `fcntl` that send signals to another process, by the real user: F_SETOWN, F_SETSIG,
/// F_SETOWN_EX.
const OWNERS: &[u32] = &[8, 10, 15];
/// The families of sockets that a resolver and a web client use.
const FAMILIES: &[libc::c_int] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
/// Characters inserted into the terminal would be executed by the user's shell; the last two are as
/// F_SETOWN.
const TERMINAL: &[libc::c_ulong] =
    &[libc::TIOCSTI as libc::c_ulong, TIOCLINUX, FIOSETOWN, SIOCSPGRP];

/// Since Linux 6.15.
const OPEN_TREE_ATTR: c_long = 467;
/// `asm-generic/sockios.h`
const FIOSETOWN: libc::c_ulong = 0x8901;
const SIOCSPGRP: libc::c_ulong = 0x8902;
/// `asm-generic/ioctls.h`
const TIOCLINUX: libc::c_ulong = 0x541c;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;
/// The calls of the x32 interface have their own numbers from here on.
#[cfg(target_arch = "x86_64")]
const X32_FIRST: u32 = 0x4000_0000;

// Offsets in `struct seccomp_data`; both architectures are little-endian.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
#[cfg(target_arch = "x86_64")]
const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
const IF_ANY: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// The calls that some roles need.
#[derive(Clone, Copy)]
pub(crate) struct Allowed {
    pub(crate) network: bool,
    pub(crate) rings: bool,
    pub(crate) mounts: bool,
}

/// Enforces the filter for this thread, and those that it starts later.
pub(crate) fn enter(allowed: Allowed) -> Result<()> {
    let filter = filter(allowed, std::process::id());
    let program = sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, whose length is given.
    let entered =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &program) };
    if entered == 0 {
        return Ok(());
    }
    Err(Error::io("cannot put a seccomp filter in force", io::Error::last_os_error()))
}

/// Each test is followed at once by its result, so that no jump is long.
fn filter(allowed: Allowed, process: u32) -> Vec<sock_filter> {
    let refuse = returns(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
    let mut filter = vec![
        load(ARCHITECTURE_AT),
        jump(IF_EQUAL, ARCHITECTURE, 1, 0),
        returns(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER_AT),
    ];
    #[cfg(target_arch = "x86_64")]
    filter.extend([jump(IF_AT_LEAST, X32_FIRST, 0, 1), refuse]);
    let Allowed { network, rings, mounts } = allowed;
    let by_role = [(network, NETWORK), (rings, RINGS), (mounts, MOUNTS)];
    let refused = by_role.into_iter().filter(|(allowed, _)| !allowed).map(|(_, calls)| calls);
    for call in refused.chain([REFUSED]).flatten() {
        filter.extend([jump(IF_EQUAL, *call as u32, 0, 1), refuse]);
    }
    // Its flags lie in memory, which a filter cannot read; without it, libraries use clone.
    let unknown = returns(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32);
    filter.extend([jump(IF_EQUAL, libc::SYS_clone3 as u32, 0, 1), unknown]);
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    look(&mut filter, libc::SYS_clone, 0, |tests| {
        tests.extend([jump(IF_ANY, namespaces as u32, 0, 1), refuse]);
    });
    for call in PROCESSES {
        look(&mut filter, *call, 0, |tests| {
            tests.extend([jump(IF_EQUAL, process, 2, 0), jump(IF_EQUAL, 0, 1, 0), refuse]);
        });
    }
    for call in SIGNALS {
        look(&mut filter, *call, 0, |tests| {
            tests.extend([jump(IF_EQUAL, process, 1, 0), refuse]);
        });
    }
    look(&mut filter, libc::SYS_fcntl, 1, |tests| {
        for command in OWNERS {
            tests.extend([jump(IF_EQUAL, *command, 0, 1), refuse]);
        }
    });
    look(&mut filter, libc::SYS_ioctl, 1, |tests| {
        for command in TERMINAL {
            tests.extend([jump(IF_EQUAL, *command as u32, 0, 1), refuse]);
        }
    });
    if network {
        look(&mut filter, libc::SYS_socket, 0, |tests| {
            let last = FAMILIES.len() as u8 - 1;
            for (number, family) in (0..).zip(FAMILIES) {
                tests.push(jump(IF_EQUAL, *family as u32, last - number + 1, 0));
            }
            tests.push(refuse);
        });
    }
    filter.push(returns(libc::SECCOMP_RET_ALLOW));
    filter
}

/// Adds `tests` for `call`, on the low half of an argument; they fall through to allow it.
fn look(
    filter: &mut Vec<sock_filter>,
    call: c_long,
    argument: u32,
    tests: impl FnOnce(&mut Vec<sock_filter>),
) {
    let mut looked = vec![load(ARGUMENTS_AT + 8 * argument)];
    tests(&mut looked);
    looked.push(returns(libc::SECCOMP_RET_ALLOW));
    filter.push(jump(IF_EQUAL, call as u32, 0, looked.len() as u8));
    filter.append(&mut looked);
}

fn load(at: u32) -> sock_filter {
    sock_filter { code: LOAD as u16, jt: 0, jf: 0, k: at }
}

fn jump(test: u32, value: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: test as u16, jt, jf, k: value }
}

fn returns(what: u32) -> sock_filter {
    sock_filter { code: RETURN as u16, jt: 0, jf: 0, k: what }
}
