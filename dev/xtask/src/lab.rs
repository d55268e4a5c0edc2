//! The kernel tests once more, on older kernels: `dev/lab/run` boots each in an emulator.
//!
//! ```text
//!   6.1    no ublk: mounts go over FUSE and a loop device; an older btrfs reads what we write
//!   6.12   ublk: devices, deaths and recovery; whatever mounts here does so over ublk there
//!   6.12   with systemd and udev; with reboots; with 384 MB of memory
//! ```
//!
//! The tests' programs are the host's own; the guest sees them in the host's root. Mounts over
//! FUSE are tested on 6.1, on the kernel of the tests themselves, and on 6.12 by `transport`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Result;

use crate::built;

/// The variable with the seconds after which a guest is ended.
pub(crate) const LIMIT: &str = "LAB_TIMEOUT";

/// The longest that a list may take. Emulation is several times slower than the machine, and the
/// machine may be busy: on an idle one no list takes a third of it.
pub(crate) const LONGEST: Duration = Duration::from_secs(1800);

/// A test program: its package and its name.
type Program = (&'static str, &'static str);

/// Programs that run in one boot, one after another.
struct List {
    name: &'static str,
    kernel: &'static str,
    programs: &'static [Program],
    /// The guest's memory, which is its disk, too.
    memory_mb: &'static str,
    /// True if systemd is its first process and starts udev, as on a real machine.
    systemd: bool,
    /// The size of the disk with the root's changes, which outlive reboots; none by default.
    disk_mb: Option<&'static str>,
}

/// Tests that `make test` runs in the lab, which the host cannot run, because there is no ublk,
/// no reboot, no systemd and no lack of memory.
///
/// Two lists run side by side; whichever ends first is followed by the next. So the longest come
/// first.
const LISTS: [List; 6] = [
    List {
        name: "systemd and udev, on Linux 6.12",
        // The package first: the program that `systemd` installs would hide it.
        programs: &[
            ("burgeon", "package"),
            ("burgeon", "systemd"),
            ("burgeon", "udev"),
            ("burgeon", "accelerated_units"),
            ("burgeon", "ssh_codes"),
        ],
        systemd: true,
        ..LIST
    },
    List {
        name: "devices over ublk, on Linux 6.12",
        programs: &[
            // A plain `cargo test` leaves out those that need ublk (`test = false`).
            ("burgeon-frontend", "ublk"),
            ("burgeon-frontend", "ublk_kill"),
            ("burgeon-frontend", "btrfs"),
            ("burgeon-frontend", "virtual_area"),
            ("burgeon", "ublk"),
            ("burgeon", "accelerated_ublk"),
        ],
        ..LIST
    },
    List {
        name: "deaths over ublk, on Linux 6.12",
        programs: &[("burgeon", "kill"), ("burgeon", "kernel_kill"), ("burgeon", "upgrade")],
        ..LIST
    },
    List {
        name: "reboots, on Linux 6.12",
        programs: &[("burgeon", "reboot")],
        memory_mb: "3072",
        systemd: true,
        disk_mb: Some("8192"),
        ..LIST
    },
    List {
        name: "over FUSE, on Linux 6.1",
        kernel: "6.1",
        programs: &[
            ("burgeon-btrfs", "kernel"),
            ("burgeon-frontend", "btrfs"),
            ("burgeon-frontend", "kill"),
            ("burgeon-frontend", "transport"),
            ("burgeon-frontend", "writes"),
        ],
        ..LIST
    },
    List {
        name: "384 MB of memory, on Linux 6.12",
        programs: &[LOW_MEMORY],
        memory_mb: "384",
        ..LIST
    },
];

/// Tests that `cargo xtask kernels`, a part of `make soak`, runs as well: those which the host
/// runs, too, over FUSE and on its own kernel; and power cuts, which take long. Tests of the
/// command make sure that they mount over ublk, or over FUSE. Left out are those that need the room
/// or the programs of this machine, and those that depend on no kernel and no transport.
const LONG_LISTS: [List; 6] = [
    List {
        name: "writes and refusals over ublk, on Linux 6.12",
        programs: &[
            ("burgeon", "kernel_equal"),
            ("burgeon", "kernel_refuse"),
            ("burgeon", "kernel_writes"),
            ("burgeon", "writes"),
        ],
        ..LIST
    },
    List {
        name: "mounts over ublk, on Linux 6.12",
        programs: &[
            ("burgeon-btrfs", "kernel"),
            ("burgeon-frontend", "transport"),
            ("burgeon", "kernel_corrupt"),
            ("burgeon", "kernel_hostile"),
            ("burgeon", "kernel_tar"),
            ("burgeon", "attributes"),
            ("burgeon", "namespace"),
            ("burgeon", "virtual_area"),
        ],
        ..LIST
    },
    List {
        name: "commands over ublk, on Linux 6.12",
        programs: &[("burgeon", "lifecycle"), ("burgeon", "kill_calls"), ("burgeon", "pressure")],
        ..LIST
    },
    List {
        name: "power cuts below an accelerated device, on Linux 6.12",
        programs: &[("burgeon", "power_cuts")],
        ..LIST
    },
    List {
        name: "accelerated devices over ublk, on Linux 6.12",
        programs: &[
            ("burgeon", "accelerated"),
            ("burgeon", "accelerated_changes"),
            ("burgeon", "accelerated_sectors"),
            ("burgeon", "written_back"),
        ],
        ..LIST
    },
    List {
        name: "commands over FUSE, on Linux 6.1",
        kernel: "6.1",
        programs: &[("burgeon", "lifecycle")],
        ..LIST
    },
];

const LIST: List = List {
    name: "",
    kernel: "6.12",
    programs: &[],
    memory_mb: "6144",
    systemd: false,
    disk_mb: None,
};

/// Its output lies in the folder that the guest shares with the host.
const LOW_MEMORY: Program = ("burgeon", "low_memory");

/// Debian packages for the lab, in the form of `dev/need`.
pub(crate) const NEEDS: [&str; 5] = [
    "qemu-system-x86_64=qemu-system-x86",
    "/usr/lib/qemu/virtiofsd=qemu-system-common",
    "busybox=busybox-static",
    "cpio=cpio",
    "depmod=kmod",
];

/// Which lists are run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lists {
    /// Those of `make test`.
    Short,
    /// The others.
    Long,
}

/// Builds the test programs and returns the runs they make, each with its name.
pub(crate) fn runs(
    root: &Path,
    lists: Lists,
    cargo: impl Fn() -> Command,
) -> Result<Vec<(String, Command)>> {
    let lists: &[List] = match lists {
        Lists::Short => &LISTS,
        Lists::Long => &LONG_LISTS,
    };
    let all: Vec<Program> = lists.iter().flat_map(|list| list.programs).copied().collect();
    let mut built = build(root, &all, cargo)?.into_iter();
    let runs = lists.iter().map(|list| {
        let programs: Vec<_> = built.by_ref().take(list.programs.len()).collect();
        (list.name.to_owned(), command(root, list, &programs))
    });
    Ok(runs.collect())
}

/// Builds the programs as `cargo test` builds them for all crates: choosing crates would choose
/// other features, and compile what they depend on once more.
fn build(root: &Path, programs: &[Program], cargo: impl Fn() -> Command) -> Result<Vec<PathBuf>> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--locked", "--no-run", "--message-format=json"]);
    for (_, name) in programs {
        command.args(["--test", name]);
    }
    command.current_dir(root);
    built::executables(command, programs)
}

/// Runs a list once more if the guest's kernel has panicked or hung while it booted, or if a test
/// failed and a program has got a fault of the processor. The emulator breaks one now and then, in
/// other places each time; a fault of our own comes again.
const ONCE_MORE: &str = r#"
    "$@" && exit
    status=$?
    [ "$status" = 86 ] || exit "$status"
    echo "lab: running the list once more, after the fault above"
    exec "$@""#;

/// The kernel's words for a program that a fault of the processor has ended.
const FAULTS: &str = "segfault at|general protection fault|trap invalid opcode|trap stack segment";

/// The command that runs all `programs` of a list, one after another.
fn command(root: &Path, list: &List, programs: &[PathBuf]) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", ONCE_MORE, "lab"]).arg(root.join("dev/lab/run"));
    command.env(LIMIT, LONGEST.as_secs().to_string()).arg(list.kernel);
    command.env("LAB_MEMORY_MB", list.memory_mb);
    if list.systemd {
        command.env("LAB_INIT", "systemd").env("LAB_UDEV", "1");
    }
    command.envs(list.disk_mb.map(|size| ("LAB_DISK_MB", size)));
    let script = r#"
        export BURGEON_TEST_DIR="${BURGEON_TEST_DIR:-$TMPDIR/burgeon-test}"; mkdir -p "$BURGEON_TEST_DIR"
        modprobe -q ublk_drv
        s=0
        for p; do
            t=$SECONDS; "$p" --test-threads=1 || { s=1; dmesg | tail -n 60; }
            echo "-- $((SECONDS - t)) s: ${p##*/}"
        done
        [ $s = 0 ] || ! dmesg | grep -E "$FAULTS" || s=86
        exit $s"#;
    // The folder of tests is the guest's own, in its memory, unless memory is short.
    command.env("LAB_PASS", "BURGEON_TEST_DIR FAULTS CUTS").env_remove("BURGEON_TEST_DIR");
    command.env("FAULTS", FAULTS);
    if list.programs.contains(&LOW_MEMORY) {
        // A path with spaces, which the kernel's command line would take apart.
        let shared = root.join("target/lab/shared with the guest");
        let own = shared.join(format!("low-memory-{}", std::process::id()));
        command.env("LAB_OUT", &shared).env("BURGEON_TEST_DIR", own);
    }
    command.args(["bash", "-c", script]);
    command.arg("lab").args(programs);
    command
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::ONCE_MORE;
    use crate::outcome::AGAIN;

    /// Output and exit status of a guest that says `x` and ends with these statuses in turn.
    fn ends(statuses: &str) -> (String, Option<i32>) {
        let script = r#"
            echo x
            read -r status rest < "$0"
            echo "$rest" > "$0"
            exit "$status""#;
        let left = std::env::temp_dir().join(format!("lab-once-more-{}", std::process::id()));
        std::fs::write(&left, format!("{statuses}\n")).unwrap();
        let mut command = Command::new("bash");
        command.args(["-c", ONCE_MORE, "lab", "bash", "-c", script]).arg(&left);
        let output = command.output().unwrap();
        std::fs::remove_file(left).unwrap();
        (String::from_utf8(output.stdout).unwrap().matches("x\n").collect(), output.status.code())
    }

    #[test]
    fn a_guest_whose_kernel_has_panicked_runs_once_more() {
        assert!(ONCE_MORE.contains(&format!("echo \"{AGAIN}, ")));
        assert_eq!(ends("0 9"), ("x\n".to_owned(), Some(0)));
        assert_eq!(ends("1 9"), ("x\n".to_owned(), Some(1)));
        assert_eq!(ends("86 0"), ("x\nx\n".to_owned(), Some(0)));
        assert_eq!(ends("86 86 0"), ("x\nx\n".to_owned(), Some(86)));
    }
}
