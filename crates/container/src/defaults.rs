//! The environment that containerd gives to a container by default.

/// A file system of every container.
pub(crate) struct FileSystem {
    pub(crate) target: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) source: &'static str,
    pub(crate) options: &'static [&'static str],
}

/// In the order of mounting. The one of control groups comes only with their second version.
pub(crate) const FILE_SYSTEMS: [FileSystem; 8] = [
    FileSystem {
        target: "/proc",
        kind: "proc",
        source: "proc",
        options: &["nosuid", "noexec", "nodev"],
    },
    FileSystem {
        target: "/dev",
        kind: "tmpfs",
        source: "tmpfs",
        options: &["nosuid", "strictatime", "mode=755", "size=65536k"],
    },
    FileSystem {
        target: "/dev/pts",
        kind: "devpts",
        source: "devpts",
        options: &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
    },
    FileSystem {
        target: "/dev/shm",
        kind: "tmpfs",
        source: "shm",
        options: &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
    },
    FileSystem {
        target: "/dev/mqueue",
        kind: "mqueue",
        source: "mqueue",
        options: &["nosuid", "noexec", "nodev"],
    },
    FileSystem {
        target: "/sys",
        kind: "sysfs",
        source: "sysfs",
        options: &["nosuid", "noexec", "nodev", "ro"],
    },
    FileSystem {
        target: "/sys/fs/cgroup",
        kind: "cgroup2",
        source: "cgroup",
        options: &["nosuid", "noexec", "nodev", "relatime", "ro"],
    },
    FileSystem {
        target: "/run",
        kind: "tmpfs",
        source: "tmpfs",
        options: &["nosuid", "strictatime", "mode=755", "size=65536k"],
    },
];

/// Paths that show or change this machine, in a container of root: hidden.
pub(crate) const MASKED: [&str; 11] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// Paths that may be read.
pub(crate) const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Capabilities by name and number (`linux/capability.h`).
pub(crate) const CAPABILITIES: [(&str, u32); 14] = [
    ("CAP_CHOWN", 0),
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_FOWNER", 3),
    ("CAP_FSETID", 4),
    ("CAP_KILL", 5),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
    ("CAP_SETPCAP", 8),
    ("CAP_NET_BIND_SERVICE", 10),
    ("CAP_NET_RAW", 13),
    ("CAP_SYS_CHROOT", 18),
    (MKNOD, 27),
    ("CAP_AUDIT_WRITE", 29),
    ("CAP_SETFCAP", 31),
];

/// Harmless only with a filter of devices: else root in the container could make the node of a
/// disk of this machine.
pub(crate) const MKNOD: &str = "CAP_MKNOD";

/// Files of this machine that a container in its network needs.
pub(crate) const NETWORK_FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// True if this machine has the second version of control groups, and no other, in the usual place.
pub(crate) fn has_cgroup2() -> bool {
    const CGROUP2: u64 = 0x6367_7270;
    rustix::fs::statfs("/sys/fs/cgroup").is_ok_and(|stat| stat.f_type as u64 == CGROUP2)
}
