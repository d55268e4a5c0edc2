//! Checks the requirements on this machine: kernel, file systems, devices, privileges, and space.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

use burgeon_frontend::ublk::Control;
use rustix::{
    fs::{Access, Mode, OFlags, access, open},
    io::Errno,
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};

use super::{Finding, Level};
use crate::{
    host::{
        backing_devices,
        system::{self, module_is_there},
    },
    state::{paths::StateDir, space},
};

/// The oldest kernel that everything here was measured on.
const KERNEL_MIN: (u32, u32) = (6, 1);

/// Free bytes below which a warning is due: nothing useful fits.
const FREE_MIN: u64 = 1 << 30;

/// The rule of udev without which systemd takes the devices of writes for unplugged.
const RULE: &str = "65-burgeon.rules";
/// In the order of precedence: the first file of that name hides the others.
const RULE_FOLDERS: [&str; 5] = [
    "etc/udev/rules.d",
    "run/udev/rules.d",
    "usr/local/lib/udev/rules.d",
    "usr/lib/udev/rules.d",
    "lib/udev/rules.d",
];

/// A rule of more bytes than this is not ours.
const RULE_MAX: u64 = 64 << 10;

/// Runs all checks.
pub(super) fn examine(state: &StateDir) -> Vec<Finding> {
    let mut findings = vec![
        kernel(),
        file_system("btrfs", "btrfs"),
        file_system("FUSE", "fuse"),
        device("/dev/fuse", "modprobe fuse, or give the container the device 10:229"),
        device("/dev/loop-control", "modprobe loop, or give the container the device 10:237"),
        device("/dev/btrfs-control", "modprobe btrfs, or give the container the device 10:234"),
        loops(),
        ublk(),
        rings(),
        privileges(),
        memory_lock(),
        place(state),
    ];
    findings.extend(udev(Path::new("/")));
    findings
}

/// Looks for the rule where systemd and udev run, below `root`.
fn udev(root: &Path) -> Option<Finding> {
    let runs = ["run/systemd/system", "run/udev/control"].iter().all(|it| root.join(it).exists());
    if !runs {
        return None;
    }
    let cost = "systemd may unmount a writable mount";
    let rules = RULE_FOLDERS.iter().map(|folder| root.join(folder).join(RULE));
    // A link that leads nowhere, or to /dev/null, hides the rule of another folder, too.
    let Some(rule) = rules.into_iter().find(|rule| rule.symlink_metadata().is_ok()) else {
        return Some(Finding::bad(
            Level::Warning,
            "udev",
            format!("the rule {RULE} is missing"),
            cost,
            "copy 65-burgeon.rules, from the tarball or from dist/ of the sources, to \
             /etc/udev/rules.d, and run `udevadm control --reload`; the \
             package does both",
        ));
    };
    let shown = rule.display();
    Some(match sets_ready(&rule) {
        Ok(true) => Finding::fine("udev", format!("{shown} is there")),
        Ok(false) => Finding::bad(
            Level::Warning,
            "udev",
            format!("{shown} is empty, a mask, or lacks the assignment of SYSTEMD_READY"),
            cost,
            "remove it if the package is installed, or copy 65-burgeon.rules, from the tarball or from dist/ of \
             the sources, over it; then \
             run `udevadm control --reload`",
        ),
        Err(e) => Finding::bad(
            Level::Warning,
            "udev",
            format!("udev cannot read {shown}: {e}"),
            cost,
            "copy 65-burgeon.rules, from the tarball or from dist/ of the sources, to that place, \
             and run `udevadm control --reload`",
        ),
    })
}

/// True if the rule in a file tells systemd that a device is ready. A mask is no file with bytes.
fn sets_ready(rule: &Path) -> io::Result<bool> {
    if !fs::metadata(rule)?.is_file() {
        return Ok(false);
    }
    let mut text = Vec::new();
    File::open(rule)?.take(RULE_MAX).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    Ok(lines.any(|line| line.contains("ENV{SYSTEMD_READY}=\"1\"")))
}

fn kernel() -> Finding {
    let release = system::kernel_release();
    match system::kernel_version() {
        Some(version) if version >= KERNEL_MIN => {
            Finding::fine("kernel", format!("Linux {release}"))
        }
        _ => Finding::bad(
            Level::Problem,
            "kernel",
            format!("Linux {release}"),
            "mounts may fail",
            "Burgeon needs Linux 6.1 or later",
        ),
    }
}

fn file_system(subject: &str, name: &str) -> Finding {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if known.lines().any(|line| line.split_whitespace().last() == Some(name)) {
        return Finding::fine(subject, "known to the kernel");
    }
    if module_is_there(name) {
        return Finding::fine(subject, "a module of the kernel, loaded when it is needed");
    }
    Finding::bad(
        Level::Problem,
        subject,
        "not known to the kernel",
        "nothing can be mounted",
        "use a kernel with it; those of the distributions have it",
    )
}

/// Checks the kernel features that the faster transport needs.
fn ublk() -> Finding {
    let there = fs::metadata("/dev/ublk-control").is_ok();
    if !there && module_is_there("ublk_drv") {
        return Finding::fine("ublk", "a module of the kernel, loaded with the daemon");
    }
    if there && !may_administrate() {
        return Finding::fine("ublk", "known to the kernel");
    }
    match Control::open() {
        Ok(_) => Finding::fine("ublk", "mounts use it"),
        Err(e) => Finding::bad(
            Level::Warning,
            "ublk",
            format!("{e}; mounts go over FUSE and a loop device, which is slower"),
            "reads of lazy data take longer",
            "use a kernel with CONFIG_BLK_DEV_UBLK, 6.5 or later, if speed matters",
        ),
    }
}

fn may_administrate() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

fn device(path: &str, remedy: &str) -> Finding {
    match fs::metadata(path) {
        Ok(_) => Finding::fine(path, "is there"),
        Err(e) => {
            Finding::bad(Level::Problem, path, e.to_string(), "nothing can be mounted", remedy)
        }
    }
}

fn loops() -> Finding {
    let used = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let used = used.filter(|entry| entry.path().join("loop").exists()).count();
    let most = fs::read_to_string("/sys/module/loop/parameters/max_loop")
        .ok()
        .and_then(|text| text.trim().parse::<usize>().ok())
        .unwrap_or(0);
    // Newer kernels make devices on demand, independent of this number unless it was set.
    let found = format!("{used} in use, max_loop={most}");
    let on_demand = fs::metadata("/dev/loop-control").is_ok();
    if on_demand || used + 3 <= most {
        return Finding::fine("loop devices", found);
    }
    Finding::bad(
        Level::Problem,
        "loop devices",
        found,
        "the next mount may fail",
        "detach some (`losetup -a` lists them), or boot with a larger max_loop",
    )
}

/// Its absence is no defect: `mount --fast` then falls back, and says so.
fn rings() -> Finding {
    let found = match system::fuse_rings() {
        Ok(()) => "the kernel allows it: `burgeon mount --fast` uses it".to_owned(),
        Err(reason) => format!("not for `burgeon mount --fast`: {reason}"),
    };
    Finding::fine("FUSE over io_uring", found)
}

fn privileges() -> Finding {
    let lacks = match (may_administrate(), is_first_user_namespace()) {
        (true, true) => return Finding::fine("privileges", "CAP_SYS_ADMIN: may mount"),
        (true, false) => "CAP_SYS_ADMIN is that of a user namespace",
        (false, _) => "CAP_SYS_ADMIN is missing",
    };
    Finding::bad(
        Level::Warning,
        "privileges",
        format!("{lacks}: build, inspect and verify work, mount does not"),
        "nothing can be mounted",
        "run `burgeon mount` as root of the machine",
    )
}

/// False in a container with a user namespace of its own: no btrfs can be mounted there.
fn is_first_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.is_empty() || map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn memory_lock() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let sets = capabilities(None).map(|sets| sets.effective).unwrap_or(CapabilitySet::empty());
    if limit.is_none() || sets.contains(CapabilitySet::IPC_LOCK) {
        return Finding::fine("locked memory", "no limit");
    }
    Finding::bad(
        Level::Warning,
        "locked memory",
        format!(
            "at most {} KiB: the server can stall when memory is short",
            limit.unwrap_or(0) >> 10
        ),
        "readers may wait for seconds",
        "raise the limit (ulimit -l unlimited, or LimitMEMLOCK= of the unit)",
    )
}

fn place(state: &StateDir) -> Finding {
    // The first `burgeon build` or `burgeon mount` makes it, in the nearest folder that is there.
    let there = state.root().ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let shown = match there == state.root() {
        true => there.display().to_string(),
        false => format!("{}, which the first build or mount makes", state.root().display()),
    };
    let nothing = |found: String, remedy| {
        let cost = "nothing can be mounted or built";
        Finding::bad(Level::Problem, "state directory", found, cost, remedy)
    };
    if let Err(e) = backing_devices::refuse_burgeon(there, "the state directory") {
        return nothing(e.to_string(), "take another --state-dir");
    }
    if is_read_only(there) {
        let found = format!("{shown}: {READ_ONLY}");
        return nothing(found, "mount it writable, or use another --state-dir");
    }
    match space::free_space(there) {
        Ok(free) if free < FREE_MIN => Finding::bad(
            Level::Warning,
            "state directory",
            format!("{shown}: only {} MiB free", free >> 20),
            "mounts may fail, the cache keeps little, and data is fetched again",
            "free some space; `burgeon gc` and `burgeon writes list` show what Burgeon keeps",
        ),
        Ok(free) => Finding::fine("state directory", format!("{shown}: {} GiB free", free >> 30)),
        Err(e) => nothing(e.to_string(), "take another --state-dir"),
    }
}

/// The finding about a file system that takes no writes.
pub(super) const READ_ONLY: &str =
    "its file system is read-only (`dmesg` tells whether the kernel made it so after an error)";

/// True if nothing can be written below `folder`. A file system that an error has made read-only
/// may not say so before a file is opened for writing: the lock of a state directory, which costs
/// no write, or one without a name, which leaves nothing.
pub(super) fn is_read_only(folder: &Path) -> bool {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if access(folder, Access::WRITE_OK) == Err(Errno::ROFS) {
        return true;
    }
    match open(folder.join("run/lock"), flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            open(folder, OFlags::TMPFILE | flags, Mode::RUSR).is_err_and(|it| it == Errno::ROFS)
        }
        opened => opened.is_err_and(|errno| errno == Errno::ROFS),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::{Level, RULE, udev};

    #[test]
    fn a_missing_rule_of_udev_is_a_warning_where_systemd_and_udev_run() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("run/systemd/system")).unwrap();
        assert!(udev(root.path()).is_none(), "no udev");
        fs::create_dir_all(at("run/udev")).unwrap();
        fs::write(at("run/udev/control"), "").unwrap();
        let missing = udev(root.path()).unwrap();
        assert!(missing.level == Level::Warning && missing.found.contains(RULE), "{missing:?}");
        let rule =
            fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/65-burgeon.rules"));
        let rule = rule.unwrap();
        fs::create_dir_all(at("usr/lib/udev/rules.d")).unwrap();
        fs::write(at("usr/lib/udev/rules.d").join(RULE), &rule).unwrap();
        assert_eq!(udev(root.path()).unwrap().level, Level::Fine);

        // The administrator's folder hides it, whatever is there.
        fs::create_dir_all(at("etc/udev/rules.d")).unwrap();
        let own = at("etc/udev/rules.d").join(RULE);
        for masked in ["/dev/null", "nowhere"] {
            symlink(masked, &own).unwrap();
            let finding = udev(root.path()).unwrap();
            assert!(finding.level == Level::Warning, "{finding:?}");
            assert!(finding.found.contains("etc/udev/rules.d/65-burgeon.rules"), "{finding:?}");
            fs::remove_file(&own).unwrap();
        }
        let comments: String = rule.lines().map(|line| format!("# {line}\n")).collect();
        for (text, level) in
            [("", Level::Warning), (&comments, Level::Warning), (&rule, Level::Fine)]
        {
            fs::write(&own, text).unwrap();
            assert_eq!(udev(root.path()).unwrap().level, level, "{text}");
        }
    }
}
