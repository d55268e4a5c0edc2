//! The kernel tests once more, on older kernels: `dev/lab/run` boots each in an emulator.
//!
//! The tests' programs are the host's own; the guest sees them in the host's root.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::built;

/// The kernels that Burgeon promises to run on, besides the one the tests run on.
const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// Test programs that need a kernel, by package and name. What only this machine has the room or
/// the programs for stays out. Those of the command mount over ublk on 6.12 and over FUSE on 6.1,
/// and make sure of it.
const PROGRAMS: [(&str, &str); 5] = [
    ("burgeon-btrfs", "kernel"),
    ("burgeon-frontend", "btrfs"),
    ("burgeon-frontend", "kill"),
    ("burgeon-frontend", "transport"),
    ("burgeon", "lifecycle"),
];

/// Test programs that need ublk, which of these kernels one has. A plain `cargo test` leaves them
/// out (`test = false`).
const UBLK_PROGRAMS: [(&str, &str); 3] =
    [("burgeon-frontend", "ublk"), ("burgeon-frontend", "ublk_kill"), ("burgeon", "ublk")];
/// Those of this machine that mount, once more: over ublk. Not what is refused (`kernel_refuse`),
/// which is so before there is a transport, and waits for minutes.
const OVER_UBLK_PROGRAMS: [(&str, &str); 9] = [
    ("burgeon-frontend", "virtual_area"),
    ("burgeon", "kernel_tar"),
    ("burgeon", "kernel_corrupt"),
    ("burgeon", "kernel_hostile"),
    ("burgeon", "kernel_kill"),
    ("burgeon", "kill"),
    ("burgeon", "pressure"),
    ("burgeon", "upgrade"),
    ("burgeon", "virtual_area"),
];
const UBLK_KERNEL: &str = "6.12";

/// The test of the systemd unit, and the kernel it runs on: the one of today's stable systemd.
const SYSTEMD: (&str, &str) = ("burgeon", "systemd");
const SYSTEMD_KERNEL: &str = "6.12";

/// The test of a machine of little memory, and such a machine: what it writes lies on the folder
/// that it shares with the host, for the guest's own disk is its memory.
const LOW_MEMORY: (&str, &str) = ("burgeon", "low_memory");
const LOW_MEMORY_KERNEL: &str = "6.12";
const LOW_MEMORY_MB: &str = "384";

/// What the lab needs from Debian, as `dev/need` wants it.
pub(crate) const NEEDS: [&str; 5] = [
    "qemu-system-x86_64=qemu-system-x86",
    "/usr/lib/qemu/virtiofsd=qemu-system-common",
    "busybox=busybox-static",
    "cpio=cpio",
    "depmod=kmod",
];

/// Builds the test programs and returns the runs they make, each with its name.
pub(crate) fn runs(root: &Path, cargo: impl Fn() -> Command) -> Result<Vec<(String, Command)>> {
    let programs = build(root, &PROGRAMS, &cargo)?;
    let ublk = build(root, &UBLK_PROGRAMS, &cargo)?;
    let over_ublk = build(root, &OVER_UBLK_PROGRAMS, &cargo)?;
    let systemd = build(root, &[SYSTEMD], &cargo)?;
    let low_memory = build(root, &[LOW_MEMORY], &cargo)?;
    let mut runs: Vec<_> = KERNELS
        .iter()
        .map(|kernel| (format!("Linux {kernel}"), command(root, kernel, &programs)))
        .collect();
    runs.push((format!("ublk, on Linux {UBLK_KERNEL}"), command(root, UBLK_KERNEL, &ublk)));
    let over_ublk = command(root, UBLK_KERNEL, &over_ublk);
    runs.push((format!("mounts over ublk, on Linux {UBLK_KERNEL}"), over_ublk));
    let mut unit = command(root, SYSTEMD_KERNEL, &systemd);
    unit.env("LAB_INIT", "systemd");
    runs.push((format!("systemd's unit, on Linux {SYSTEMD_KERNEL}"), unit));
    let mut small = command(root, LOW_MEMORY_KERNEL, &low_memory);
    let shared = root.join("target/lab/out");
    small.env("LAB_MEMORY_MB", LOW_MEMORY_MB).env("LAB_OUT", &shared);
    small.env("BURGEON_TEST_DIR", shared.join("low-memory"));
    runs.push((format!("{LOW_MEMORY_MB} MB of memory, on Linux {LOW_MEMORY_KERNEL}"), small));
    Ok(runs)
}

/// Builds the programs as `cargo test` builds them for all crates: choosing crates would choose
/// other features, and compile what they depend on once more.
fn build(
    root: &Path,
    programs: &[(&str, &str)],
    cargo: impl Fn() -> Command,
) -> Result<Vec<PathBuf>> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--locked", "--no-run", "--message-format=json"]);
    for (_, name) in programs {
        command.args(["--test", name]);
    }
    command.current_dir(root);
    built::executables(command, programs)
}

/// The command that runs all `programs` on `kernel`, one after another.
fn command(root: &Path, kernel: &str, programs: &[PathBuf]) -> Command {
    let mut command = Command::new(root.join("dev/lab/run"));
    // Emulation is several times slower than the machine, and the machine may be busy.
    command.env("LAB_TIMEOUT", "3600").arg(kernel);
    // The guest's disk is a tmpfs: what tests write there has to fit into its memory.
    command.env("LAB_MEMORY_MB", "6144");
    let script = r#"
        export BURGEON_TEST_DIR="${BURGEON_TEST_DIR:-/tmp/burgeon-test}"; mkdir -p "$BURGEON_TEST_DIR"
        modprobe -q ublk_drv
        s=0; for p; do "$p" --test-threads=1 || s=1; done; exit $s"#;
    // The folder of tests is the guest's own, unless whoever calls this sets another.
    command.env("LAB_PASS", "BURGEON_TEST_DIR").env_remove("BURGEON_TEST_DIR");
    command.args(["sh", "-c", script]);
    command.arg("lab").args(programs);
    command
}
