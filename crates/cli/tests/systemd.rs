//! The systemd unit as it is shipped, on a machine whose first process is systemd: the lab.
//!
//! Installs the program and `dist/burgeon.service` where a user would, with the default state
//! directory, and then acts only as a user and bad luck do.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::Instant,
};

use testkit::{PATIENCE, copy_program, kill, processes_with, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const INSTALLED: &str = "/usr/local/bin/burgeon";
const INSTALLED_UNIT: &str = "/etc/systemd/system/burgeon.service";
const STATE: &str = "/var/lib/burgeon";
const UNIT: &str = include_str!("../../../dist/burgeon.service");

fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

/// Runs a command that has to succeed and returns its output.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}{errors}");
    text.trim().to_owned()
}

fn property(unit: &str, name: &str) -> String {
    run("systemctl", &["show", "--value", "--property", name, unit])
}

/// Waits for `good`, which depends on other processes alone.
fn await_that(what: &str, good: impl FnMut() -> bool) {
    assert!(wait_until(PATIENCE, good), "still not so: {what}");
}

fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// Bytes that compress badly and differ from file to file.
fn content(file: u64) -> Vec<u8> {
    let mut state = file + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..600_000).map(|_| next()).collect()
}

#[test]
fn the_unit_keeps_mounts_alive() {
    install();
    tree();
    fs::create_dir_all("/mnt/a").unwrap();
    run("burgeon", &["build", "/tmp/tree", "tree"]);
    // A session that ends takes its processes along, but not the daemon it started.
    run(
        "systemd-run",
        &[
            "--quiet",
            "--wait",
            "--pipe",
            "--collect",
            "burgeon",
            "mount",
            "tree",
            "/mnt/a",
            "--writes",
            "w",
            "--write-limit",
            "256M",
        ],
    );
    assert_eq!(property("burgeon.service", "ActiveState"), "active");
    assert_eq!(property("burgeon.service", "KillMode"), "process");
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).unwrap();
    let daemon = property("burgeon.service", "MainPID");
    assert_eq!(namespace(&daemon), namespace("1"), "the unit's restrictions let it know that one");
    fs::write("/mnt/a/written", "before").unwrap();
    assert_eq!(fs::read("/mnt/a/0").unwrap(), content(0));

    // The supervisor dies: systemd starts another, which takes over the mounts of the first.
    let first = property("burgeon.service", "MainPID");
    run("kill", &["-KILL", &first]);
    await_that("systemd starts the daemon again", || {
        let now = property("burgeon.service", "MainPID");
        now != first && now != "0" && property("burgeon.service", "ActiveState") == "active"
    });
    drop_caches();
    await_that("data that was never read can be read", || {
        fs::read("/mnt/a/1").is_ok_and(|bytes| bytes == content(1))
    });
    assert_eq!(fs::read_to_string("/mnt/a/written").unwrap(), "before");

    // An administrator stops the unit: the mount stays, and is served until it is unmounted.
    run("systemctl", &["stop", "burgeon.service"]);
    assert_eq!(property("burgeon.service", "ActiveState"), "inactive");
    drop_caches();
    assert_eq!(fs::read("/mnt/a/2").unwrap(), content(2));
    run("umount", &["/mnt/a"]);
    await_that("the server ends with its last mount", || {
        processes_with(Path::new(STATE)).is_empty()
    });
    run("burgeon", &["mount", "tree", "/mnt/a", "--writes", "w"]);
    run("systemctl", &["restart", "burgeon.service"]);
    drop_caches();
    assert_eq!(fs::read_to_string("/mnt/a/written").unwrap(), "before");
    assert_eq!(fs::read("/mnt/a/7").unwrap(), content(7));
    run("burgeon", &["umount", "/mnt/a"]);

    // A unit that is just ending is waited for.
    run("burgeon", &["shutdown"]);
    run("burgeon", &["mount", "tree", "/mnt/a", "--writes", "w"]);
    assert_eq!(fs::read_to_string("/mnt/a/written").unwrap(), "before");
    run("burgeon", &["umount", "/mnt/a"]);
    run("burgeon", &["shutdown"]);
}

#[test]
fn an_upgrade_keeps_the_unit_and_its_mounts() {
    install();
    tree();
    run("burgeon", &["build", "/tmp/tree", "tree"]);
    fs::create_dir_all("/mnt/b").unwrap();
    run("burgeon", &["mount", "tree", "/mnt/b", "--write-limit", "256M"]);
    upgrades(&["burgeon"], "burgeon.service", INSTALLED, "/mnt/b");
    // A reload is an upgrade.
    let before = property("burgeon.service", "MainPID");
    run("systemctl", &["reload", "burgeon.service"]);
    await_that("another supervisor runs", || {
        let now = property("burgeon.service", "MainPID");
        now != before && now != "0" && property("burgeon.service", "ActiveState") == "active"
    });
    drop_caches();
    await_that("data is served", || fs::read("/mnt/b/4").is_ok_and(|bytes| bytes == content(4)));
    run("burgeon", &["umount", "/mnt/b"]);
    run("burgeon", &["shutdown"]);
}

/// If no unit is installed for the state directory, `mount` makes one for its own program.
#[test]
fn an_upgrade_keeps_a_unit_that_was_made_for_a_mount() {
    install();
    tree();
    let [program, other] = ["/usr/local/bin/another", "/usr/local/bin/elsewhere"];
    [program, other].into_iter().for_each(place);
    fs::create_dir_all("/mnt/c").unwrap();
    let of_state = |program| [program, "--state-dir", "/tmp/state"];
    let ours = |arguments: &[&str]| run(program, &[&of_state(program)[1..], arguments].concat());
    ours(&["build", "/tmp/tree", "tree"]);
    ours(&["mount", "tree", "/mnt/c", "--write-limit", "256M"]);
    let units = "list-units --plain --no-legend --state=active burgeon-*.service";
    let units = run("systemctl", &units.split(' ').collect::<Vec<_>>());
    let unit = units.split(' ').next().unwrap();
    // systemd knows the program by its path, and starts no other.
    let refused = output(other, &[&of_state(other)[1..], &["upgrade"]].concat());
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains(program), "{said}");
    assert_eq!(fs::read("/mnt/c/5").unwrap(), content(5));
    upgrades(&of_state(program), unit, program, "/mnt/c");
    ours(&["umount", "/mnt/c"]);
    ours(&["shutdown"]);
}

/// systemd keeps the descriptors while nobody serves. By default it would give a unit up after five
/// starts in ten seconds.
#[test]
fn readers_wait_for_the_unit_however_often_its_processes_are_killed() {
    // An hour, for an emulated machine does not start anything five times in ten seconds.
    fs::create_dir_all("/etc/systemd/system.conf.d").unwrap();
    let default = "[Manager]\nDefaultStartLimitIntervalSec=1h\n";
    fs::write("/etc/systemd/system.conf.d/limit.conf", default).unwrap();
    run("systemctl", &["daemon-reexec"]);
    await_that("systemd answers", || output("systemctl", &["daemon-reload"]).status.success());
    install();
    tree();
    run("burgeon", &["build", "/tmp/tree", "tree"]);
    fs::create_dir_all("/mnt/d").unwrap();
    // Over ublk the driver keeps the readers waiting.
    run("burgeon", &["mount", "tree", "/mnt/d", "--read-only", "--transport", "fuse"]);

    // systemd cannot start the program, however often it tries.
    let away = "/usr/local/bin/away";
    fs::rename(INSTALLED, away).unwrap();
    kill_unit();
    drop_caches();
    let waiting = [1, 2].map(reader);
    let starts = || property("burgeon.service", "NRestarts").parse::<u32>().unwrap();
    let before = starts();
    await_that("more starts have failed than the default allows", || starts() > before + 6);
    await_that("readers wait", || waiting.iter().all(|(_, cat)| waits(cat)));
    assert_no_holder();
    fs::rename(away, INSTALLED).unwrap();
    waiting.into_iter().for_each(assert_read);

    let begun = Instant::now();
    for round in 3..8 {
        kill_unit();
        drop_caches();
        assert_read(reader(round));
        assert_no_holder();
    }
    println!("five kills, each with a reader, in {:.1} s", begun.elapsed().as_secs_f64());
    await_that("the unit is active", || property("burgeon.service", "ActiveState") == "active");
    let status: serde_json::Value =
        serde_json::from_str(&run("burgeon", &["status", "--json"])).unwrap();
    assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
    run("burgeon", &["umount", "/mnt/d"]);
    run("burgeon", &["shutdown"]);
}

/// Kills supervisor and server, the supervisor first, or it would start another server.
fn kill_unit() {
    let all = processes_with(Path::new(STATE));
    let supervisor: u32 = property("burgeon.service", "MainPID").parse().unwrap();
    assert!(all.len() >= 2 && all.contains(&supervisor), "{supervisor}: {all:?}");
    kill(supervisor);
    all.into_iter().for_each(kill);
}

/// A program that reads a file, and the file's number.
fn reader(file: u64) -> (u64, Child) {
    let mut cat = Command::new("cat");
    cat.arg(format!("/mnt/d/{file}")).stdout(Stdio::piped()).stderr(Stdio::piped());
    (file, cat.spawn().unwrap())
}

fn assert_read((file, cat): (u64, Child)) {
    let output = cat.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == content(file), "file {file}: {said}");
}

/// True if the program sleeps in the kernel, where no signal wakes it.
fn waits(program: &Child) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/stat", program.id())).unwrap_or_default();
    status.rsplit(')').next().is_some_and(|rest| rest.starts_with(" D"))
}

/// The process that holds descriptors without systemd does not run.
fn assert_no_holder() {
    for process in processes_with(Path::new(STATE)) {
        let line = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        assert!(!line.contains("__hold"), "{line}");
    }
}

/// Puts the program in place anew and upgrades to it, while `at` is in use.
fn upgrades(command: &[&str], unit: &str, program: &str, at: &str) {
    let burgeon = |verb: &[&str]| run(command[0], &[&command[1..], verb].concat());
    let processes = || {
        let status: serde_json::Value =
            serde_json::from_str(&burgeon(&["status", "--json"])).unwrap();
        ["supervisor_pid", "server_pid"].map(|which| status[which].to_string())
    };
    let runs = |pid: &String| fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let old = processes();
    assert_eq!(property(unit, "MainPID"), old[0]);
    assert_eq!(fs::read(format!("{at}/2")).unwrap(), content(2));
    let mut open = File::create(format!("{at}/open")).unwrap();

    place(program);
    assert!(old.iter().all(|pid| runs(pid) != Path::new(program)), "it has been replaced");
    let said = burgeon(&["upgrade"]);
    assert!(said.contains("mounted: 1"), "{said}");
    let new = processes();
    assert!(new.iter().all(|pid| runs(pid) == Path::new(program)), "{old:?} {new:?}");
    assert_eq!(property(unit, "MainPID"), new[0]);
    assert_eq!(property(unit, "ActiveState"), "active");
    drop_caches();
    assert_eq!(fs::read(format!("{at}/3")).unwrap(), content(3));
    open.write_all(b"goes on").and_then(|()| open.sync_all()).unwrap();
    let status: serde_json::Value = serde_json::from_str(&burgeon(&["status", "--json"])).unwrap();
    assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
}

/// The image mounted in the tests.
fn tree() {
    fs::create_dir_all("/tmp/tree").unwrap();
    (0..8).for_each(|n| fs::write(format!("/tmp/tree/{n}"), content(n)).unwrap());
}

/// Puts the program at `path`, as a new file: the present one may be running. At no time is
/// there none: a unit that is ending runs it, too.
fn place(path: &str) {
    let new = format!("{path}.new");
    copy_program(Path::new(PROGRAM), Path::new(&new));
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, path).unwrap();
}

/// Does the same as `make install`, once.
fn install() {
    let init = fs::read_to_string("/proc/1/comm").unwrap();
    assert_eq!(init.trim(), "systemd", "this test needs the lab with LAB_INIT=systemd");
    place(INSTALLED);
    if Path::new(INSTALLED_UNIT).exists() {
        return;
    }
    // The lab's root is an overlay; state belongs on a plain file system.
    fs::create_dir_all(STATE).unwrap();
    run("mount", &["-t", "tmpfs", "-o", "size=700m", "tmpfs", STATE]);
    fs::write(INSTALLED_UNIT, UNIT).unwrap();
    run("systemctl", &["daemon-reload"]);
}
