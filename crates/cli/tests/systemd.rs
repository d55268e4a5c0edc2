//! The systemd unit as it is shipped, on a machine whose first process is systemd: the lab.
//!
//! Installs the program and `dist/burgeon.service` where a user would, with the default state
//! directory, and then acts only as a user and bad luck do.

#![allow(clippy::unwrap_used)]

mod installed;

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
    time::Instant,
};

use testkit::{Fault, Proxy, WebServer, kill, processes_with};

use installed::{
    INSTALLED, STATE, await_that, content, drop_caches, install, output, place, property, run, tree,
};

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

    // The log's fields are fields of the journal, also those of the server in its sandbox.
    let entries = || output("journalctl", &["--unit=burgeon.service", "--output=json"]).stdout;
    let entry_with = |name: &str, pid: &str| {
        let entries = entries();
        let mut all = entries.split(|byte| *byte == b'\n');
        all.any(|line| {
            let entry: serde_json::Value = serde_json::from_slice(line).unwrap_or_default();
            entry[name].is_string() && entry["_PID"] == pid && entry["_TRANSPORT"] == "journal"
        })
    };
    await_that("the supervisor's event has fields", || entry_with("BURGEON_MOUNT", &daemon));
    run("burgeon", &["log", "--level", "debug"]);
    let status: serde_json::Value =
        serde_json::from_str(&run("burgeon", &["status", "--json"])).unwrap();
    let server = status["server_pid"].to_string();
    await_that("the server's event has fields", || entry_with("BURGEON_LEVEL", &server));
    run("burgeon", &["log", "--level", "info"]);

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
    let before = property("burgeon.service", "MainPID");
    // A reload that would fail says so, and changes nothing.
    let other = Path::new("/var/lib/burgeon/mounts/01234567");
    fs::create_dir(other).unwrap();
    fs::write(other.join("mount.json"), "{\"format\":999}").unwrap();
    let refused = output("systemctl", &["reload", "burgeon.service"]);
    fs::remove_dir_all(other).unwrap();
    assert!(!refused.status.success(), "a reload that cannot succeed");
    assert_eq!(property("burgeon.service", "MainPID"), before);
    assert_eq!(property("burgeon.service", "ActiveState"), "active");
    // A reload is an upgrade.
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

/// A line of /etc/fstab, through mount(8) and through the automount unit that systemd makes of it.
#[test]
fn lines_of_fstab_are_mounted() {
    install();
    tree();
    run("burgeon", &["build", "/tmp/tree", "tree"]);
    ["/mnt/e", "/mnt/f"].into_iter().for_each(|at| fs::create_dir_all(at).unwrap());
    let lines = "tree /mnt/e burgeon _netdev,nofail,writes=e,write-limit=256M 0 0\n\
                 tree /mnt/f burgeon _netdev,nofail,ro,x-systemd.automount 0 0\n";
    fs::write("/etc/fstab", lines).unwrap();
    run("systemctl", &["daemon-reload"]);
    run("systemctl", &["start", "mnt-f.automount"]);
    // The first access waits for systemd, which waits for mount(8), which waits for the helper.
    let read = |at: &str, file: u64| {
        let read = output("timeout", &["300", "cat", &format!("{at}/{file}")]);
        assert!(read.status.success() && read.stdout == content(file), "{at}/{file}");
    };
    read("/mnt/f", 1);
    assert_eq!(property("mnt-f.mount", "ActiveState"), "active");
    // The helper mounts onto a waiting automount, without setting it off.
    run("systemctl", &["stop", "mnt-f.mount"]);
    let helper =
        |options: &[&str]| run("/sbin/mount.burgeon", &[&["tree", "/mnt/f"], options].concat());
    let said = helper(&["-v", "-o", "ro"]);
    assert!(said.contains("mounted /mnt/f in "), "{said}");
    read("/mnt/f", 2);
    for _ in 0..2 {
        run("mount", &["-a"]);
        read("/mnt/e", 0);
        read("/mnt/f", 3);
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let count = |at: &str| {
            let of_it = |line: &&str| line.contains(at) && line.contains(" btrfs ");
            mounts.lines().filter(of_it).count()
        };
        assert_eq!((count(" /mnt/e "), count(" /mnt/f ")), (1, 1), "{mounts}");
    }
    assert!(helper(&["-v", "-o", "ro"]).contains("mounted already"));
    // udev looks at all devices again, and says of the writes' one that it is ready: otherwise
    // systemd unmounts what it takes for unplugged.
    run("udevadm", &["trigger", "--subsystem-match=block", "--settle"]);
    let device = device_of_writes("/mnt/e");
    let known = run("udevadm", &["info", "--query=property", "--name", &device]);
    assert!(known.contains("ID_BTRFS_READY=0") && known.contains("SYSTEMD_READY=1"), "{known}");
    let unit = format!("{}.device", run("systemd-escape", &["--path", &device]));
    assert_eq!(property(&unit, "ActiveState"), "active");
    read("/mnt/e", 4);
    run("mount", &["-o", "remount,ro", "/mnt/e"]);
    assert!(fs::write("/mnt/e/new", "").is_err());
    run("mount", &["-o", "remount,rw", "/mnt/e"]);
    fs::write("/mnt/e/new", "").unwrap();
    // The line is the administrator's: no unit is written beside it.
    let refused = output("burgeon", &["mount", "tree", "/mnt/e", "--writes", "e", "--persist"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(5) && said.contains("/etc/fstab"), "{said}");

    run("systemctl", &["stop", "mnt-f.automount"]);
    run("umount", &["/mnt/e"]);
    fs::write("/etc/fstab", "").unwrap();
    run("systemctl", &["daemon-reload"]);
    run("burgeon", &["shutdown", "--unmount"]);
    run("burgeon", &["writes", "rm", "e"]);
}

/// The device that the kernel shows as the source of a writable mount.
fn device_of_writes(at: &str) -> String {
    let source = run("findmnt", &["--noheadings", "--output", "SOURCE", at]);
    source.split('[').next().unwrap().to_owned()
}

#[test]
fn a_persistent_mount_is_a_unit_until_it_is_forgotten() {
    install();
    tree();
    run("burgeon", &["build", "/tmp/tree", "tree", "--store", "/tmp/store"]);
    fs::create_dir_all("/mnt/p-1").unwrap();
    let [unit, path] = ["mnt-p\\x2d1.mount", "/etc/systemd/system/mnt-p\\x2d1.mount"];
    let mount = "mount tree /mnt/p-1/ --store /tmp/store --writes p --write-limit 256M -o noatime --persist";
    let mount: Vec<_> = mount.split(' ').collect();

    // Another's unit stays, and nothing is mounted.
    fs::write(path, "[Mount]\nWhat=tmpfs\nWhere=/mnt/p-1\nType=tmpfs\n").unwrap();
    let refused = output("burgeon", &mount);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(5) && said.contains(path), "{said}");
    assert!(fs::read_to_string(path).unwrap().contains("tmpfs"));
    assert!(!Path::new("/mnt/p-1/0").exists());
    fs::remove_file(path).unwrap();
    run("systemctl", &["daemon-reload"]);

    // So does another file system at the mount point.
    run("mount", &["-t", "tmpfs", "others", "/mnt/p-1"]);
    fs::write("/mnt/p-1/theirs", "").unwrap();
    let refused = output("burgeon", &mount);
    assert!(!refused.status.success() && Path::new("/mnt/p-1/theirs").exists(), "{refused:?}");
    assert!(!Path::new(path).exists());
    run("umount", &["/mnt/p-1"]);

    let said = run("burgeon", &mount);
    assert!(said.contains(unit), "{said}");
    fs::write("/mnt/p-1/written", "kept").unwrap();
    let text = fs::read_to_string(path).unwrap();
    assert_eq!(run("systemctl", &["is-enabled", unit]), "enabled");
    // Once more changes nothing.
    let said = run("burgeon", &mount);
    assert!(said.contains("mounted already"), "{said}");
    assert_eq!(fs::read_to_string(path).unwrap(), text);

    // A mount that fails leaves the unit as it was.
    run("systemctl", &["stop", unit]);
    assert!(!Path::new("/mnt/p-1/0").exists(), "{text}");
    let mistyped: Vec<_> =
        mount.iter().map(|word| if *word == "tree" { "tere" } else { *word }).collect();
    assert!(!output("burgeon", &mistyped).status.success());
    assert_eq!(fs::read_to_string(path).unwrap(), text);

    // systemd mounts it, and no target waits for it.
    run("systemctl", &["start", unit]);
    assert_eq!(fs::read("/mnt/p-1/1").unwrap(), content(1));
    assert_eq!(fs::read_to_string("/mnt/p-1/written").unwrap(), "kept");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.contains("/mnt/p-1 ")).unwrap();
    assert!(line.contains("noatime"), "{line}");
    assert_eq!(property(unit, "Before"), "umount.target");
    assert!(property(unit, "After").contains("burgeon.service"));
    assert!(property("multi-user.target", "Wants").contains("mnt-p"));
    assert!(!property("multi-user.target", "After").contains("mnt-p"));

    let said = run("burgeon", &["umount", "--forget", "/mnt/p-1"]);
    assert!(said.contains("unmounted /mnt/p-1") && said.contains(unit), "{said}");
    assert!(!Path::new(path).exists() && !Path::new("/mnt/p-1/0").exists());
    assert!(!property("multi-user.target", "Wants").contains("mnt-p"));
    let nothing = output("burgeon", &["umount", "--forget", "/mnt/p-1"]);
    assert_eq!(nothing.status.code(), Some(3), "{nothing:?}");
    run("burgeon", &["writes", "rm", "p"]);
    run("burgeon", &["shutdown"]);
}

/// A unit whose store is away fails, and holds nothing up; it is mounted when the store is back.
#[test]
fn a_persistent_mount_without_its_store_fails_and_heals() {
    install();
    tree();
    run("burgeon", &["build", "/tmp/tree", "tree", "--store", "/tmp/store"]);
    fs::create_dir_all("/mnt/q").unwrap();
    let mount = ["mount", "tree", "/mnt/q", "--read-only", "--persist"];
    run("burgeon", &[&mount[..], &["--store", "/tmp/store"]].concat());
    run("systemctl", &["stop", "mnt-q.mount"]);
    run("burgeon", &["shutdown"]);
    fs::rename("/tmp/store", "/tmp/away").unwrap();
    let failed = output("timeout", &["300", "systemctl", "start", "mnt-q.mount"]);
    assert!(!failed.status.success() && failed.status.code() != Some(124), "{failed:?}");
    assert_eq!(property("mnt-q.mount", "ActiveState"), "failed");
    // `reboot` waits for it to mount; here it is started by hand.
    let timer = "burgeon-retry@mnt-q.timer";
    await_that("another attempt is planned", || property(timer, "ActiveState") == "active");
    fs::rename("/tmp/away", "/tmp/store").unwrap();
    run("systemctl", &["start", "mnt-q.mount"]);
    assert_eq!(fs::read("/mnt/q/3").unwrap(), content(3));
    run("burgeon", &["umount", "--forget", "/mnt/q"]);
    assert!(!Path::new("/etc/systemd/system/mnt-q.mount").exists());
    assert_eq!(property(timer, "ActiveState"), "inactive");
    run("burgeon", &["shutdown"]);
}

/// The machine has started anew, so nothing of the image is prepared, and nobody answers yet.
#[test]
fn a_persistent_mount_of_an_unreachable_store_fails_and_heals() {
    install();
    tree();
    run("burgeon", &["build", "/tmp/tree", "tree", "--store", "/tmp/published"]);
    // Not in a `Space`: that has mounts of its own, which systemd does not see.
    let server = WebServer::nginx("/tmp/published".as_ref(), "/tmp/nginx".as_ref()).unwrap();
    let way = Proxy::new(server.address(), 1).unwrap();
    let store = format!("http://{}/", way.address());
    fs::create_dir_all("/mnt/r").unwrap();
    let mount = ["mount", "tree", "/mnt/r", "--read-only", "--persist", "--store", &store];
    run("burgeon", &mount);
    run("systemctl", &["stop", "mnt-r.mount"]);
    run("burgeon", &["shutdown"]);
    fs::remove_dir_all(format!("{STATE}/images")).unwrap();
    way.spoil(1000, &[Fault::Reset]);
    let failed = output("timeout", &["300", "systemctl", "start", "mnt-r.mount"]);
    assert!(!failed.status.success() && failed.status.code() != Some(124), "{failed:?}");
    let timer = "burgeon-retry@mnt-r.timer";
    await_that("another attempt is planned", || property(timer, "ActiveState") == "active");
    way.spoil(0, &[]);
    run("systemctl", &["start", "mnt-r.mount"]);
    assert_eq!(fs::read("/mnt/r/3").unwrap(), content(3));
    run("burgeon", &["umount", "--forget", "/mnt/r"]);
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
