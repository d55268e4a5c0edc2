//! The life of the Debian package on a machine whose first process is systemd: the lab. Installed,
//! upgraded while a mount is read, kept while something is mounted, removed, purged.
//!
//! Only dpkg, systemd and `burgeon` act, as for an administrator. dpkg has a database of its own:
//! that of the host, and the man pages that its triggers look at, are more files than the lab can
//! share.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Instant,
};

use testkit::{PATIENCE, kill, processes_with, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const INSTALLED: &str = "/usr/bin/burgeon";
const STATE: &str = "/var/lib/burgeon";
const AT: &str = "/mnt/package";

fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Runs a command that has to succeed and returns all that it printed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    assert!(output.status.success(), "{program} {arguments:?}: {}", said(&output));
    said(&output)
}

/// dpkg, with a database that knows no other package.
fn try_dpkg(arguments: &[&str]) -> Output {
    let options = ["--admindir=/tmp/packages/dpkg", "--force-depends", "--no-triggers"];
    output("dpkg", &[&options, arguments].concat())
}

fn dpkg(arguments: &[&str]) -> String {
    let begun = Instant::now();
    let output = try_dpkg(arguments);
    println!("{:.1} s: dpkg {}", begun.elapsed().as_secs_f64(), arguments.join(" "));
    // In one line: a summary of many tests shows little more.
    let lines = said(&output).replace('\n', " | ");
    assert!(output.status.success(), "dpkg {arguments:?}: {}: {lines}", output.status);
    said(&output)
}

/// Takes the package away when the test has failed: the tests after it have the same machine.
struct Cleanup;

impl Drop for Cleanup {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        println!("{}", said(&output("journalctl", &["--no-pager", "--lines=80"])));
        output("umount", &["--lazy", AT]);
        output("systemctl", &["stop", "burgeon.service", METRICS, "burgeon-disks.timer"]);
        processes_with(Path::new(STATE)).into_iter().for_each(kill);
        try_dpkg(&["--purge", "burgeon"]);
        let left =
            [INSTALLED, "/usr/sbin/mount.burgeon", "/usr/lib/systemd/system/burgeon.service"];
        left.into_iter().for_each(|path| drop(fs::remove_file(path)));
        output("systemctl", &["daemon-reload"]);
        output("umount", &["--lazy", STATE]);
    }
}

fn burgeon(arguments: &[&str]) -> String {
    run(INSTALLED, arguments)
}

fn property(name: &str) -> String {
    property_of("burgeon.service", name)
}

fn property_of(unit: &str, name: &str) -> String {
    run("systemctl", &["show", "--value", "--property", name, unit]).trim().to_owned()
}

/// The link by which a boot starts the unit of the metrics.
const ENABLED: &str = "/etc/systemd/system/multi-user.target.wants/burgeon-metrics.service";
const METRICS: &str = "burgeon-metrics.service";

/// A file whose bytes no other has.
fn content(file: u8) -> Vec<u8> {
    (0..300_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8 ^ file).collect()
}

/// Reads a file of the mount that was not read before, so that its data comes through the daemon.
fn assert_read(file: u8) {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    assert!(fs::read(format!("{AT}/{file}")).unwrap() == content(file), "file {file}");
}

#[test]
fn a_package_is_installed_upgraded_kept_removed_and_purged() {
    begin();
    let _cleanup = Cleanup;
    let first = build();
    let installed = dpkg(&["--install", first.to_str().unwrap()]);
    assert_eq!(property("LoadState"), "loaded", "{installed}");
    assert_eq!(property("UnitFileState"), "disabled", "the package enables nothing");
    assert_eq!(property("ActiveState"), "inactive", "and starts nothing");
    assert!(!Path::new(STATE).join("run").exists(), "it makes no state");

    fs::create_dir_all(AT).unwrap();
    burgeon(&["build", "/tmp/package-tree", "tree"]);
    burgeon(&["mount", "tree", AT, "--writes", "kept", "--write-limit", "256M"]);
    fs::write(format!("{AT}/written"), "by an administrator").unwrap();
    run("sync", &["--file-system", AT]);
    assert_read(0);
    reload();

    run("systemctl", &["enable", "--now", METRICS]);
    // A user that exists while the unit runs reads the daemon's status as a member of the group.
    let scraped = || fs::read_to_string("/run/burgeon-metrics/burgeon.prom").unwrap_or_default();
    assert!(wait_until(PATIENCE, || scraped().contains("\nburgeon_up 1\n")), "{}", scraped());
    assert_eq!(property_of(METRICS, "SupplementaryGroups"), "burgeon");
    assert_eq!(property_of(METRICS, "DynamicUser"), "yes");
    run("systemctl", &["enable", "--now", "burgeon-disks.timer"]);
    run("systemctl", &["start", "burgeon-disks.service"]);
    assert!(wait_until(PATIENCE, || scraped().contains("\nburgeon_disks_timestamp_seconds ")));
    let second = changed(&first, "2", "true");
    let metrics = property_of(METRICS, "MainPID");
    upgrade_to(&second);
    assert_ne!(property_of(METRICS, "MainPID"), metrics, "it runs the new program");
    assert_eq!(property_of(METRICS, "ActiveState"), "active");
    refuse_an_upgrade(&changed(&first, "3", "printf '#!/bin/sh\\nexit 1\\n' > usr/bin/burgeon"));
    upgrade_to(&second);
    refuse_to_remove();
    remove_and_purge(&first);
}

/// A machine without Burgeon, with a tree to build an image of.
fn begin() {
    let init = fs::read_to_string("/proc/1/comm").unwrap();
    assert_eq!(init.trim(), "systemd", "this test needs the lab with LAB_INIT=systemd");
    // The lab's root is an overlay; state belongs on a plain file system.
    fs::create_dir_all(STATE).unwrap();
    run("mount", &["-t", "tmpfs", "-o", "size=700m,mode=700", "tmpfs", STATE]);
    for folder in ["info", "updates"] {
        fs::create_dir_all(format!("/tmp/packages/dpkg/{folder}")).unwrap();
    }
    fs::write("/tmp/packages/dpkg/status", "").unwrap();
    fs::create_dir_all("/tmp/package-tree").unwrap();
    for file in 0..8 {
        fs::write(format!("/tmp/package-tree/{file}"), content(file)).unwrap();
    }
}

/// Builds the package of the program under test.
fn build() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/deb/build");
    let mut command = Command::new(script);
    command.env("DEB_BINARY", PROGRAM).env("DEB_OUT", "/tmp/packages");
    command.env("DEB_MAINTAINER", "Tester <tester@example.org>");
    command.env("SOURCE_DATE_EPOCH", "1800000000").env("DPKG_DEB_COMPRESSOR_TYPE", "none");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// The package as revision `revision`, with its tree changed by a shell command.
fn changed(package: &Path, revision: &str, change: &str) -> PathBuf {
    let script = r#"
        set -e
        tree=$(mktemp -d /tmp/packages/tree.XXXXXX)
        dpkg-deb --raw-extract "$1" "$tree"
        cd "$tree"
        sed -i "s/^Version: \(.*\)-1$/Version: \1-$2/" DEBIAN/control
        eval "$3"
        dpkg-deb --root-owner-group --build -Znone "$tree" "/tmp/packages/$2.deb"
        rm -r "$tree""#;
    run("sh", &["-c", script, "sh", package.to_str().unwrap(), revision, change]);
    PathBuf::from(format!("/tmp/packages/{revision}.deb"))
}

/// The administrator's configuration holds from the reload of the package's unit on.
fn reload() {
    let level = "[log]\nlevel = \"warn\"\n";
    fs::write("/etc/burgeon/config.d/50-site.toml", level).unwrap();
    let before = property("MainPID");
    run("systemctl", &["reload", "burgeon.service"]);
    let is_another = || property("MainPID") != before && property("ActiveState") == "active";
    assert!(wait_until(PATIENCE, is_another), "a reload is an upgrade");
    let has_level = || said(&output(INSTALLED, &["log"])).contains("level warn");
    assert!(wait_until(PATIENCE, has_level), "{}", said(&output(INSTALLED, &["log"])));
    assert_read(5);
}

/// Installs the package; both processes of the daemon then run its program.
fn upgrade_to(package: &Path) {
    let before = property("MainPID");
    let printed = dpkg(&["--install", package.to_str().unwrap()]);
    assert!(printed.contains("mounted: 1"), "{printed}");
    assert_eq!(property("ActiveState"), "active");
    assert_ne!(property("MainPID"), before);
    let status: serde_json::Value = serde_json::from_str(&burgeon(&["status", "--json"])).unwrap();
    for process in ["supervisor_pid", "server_pid"] {
        let exe = fs::read_link(format!("/proc/{}/exe", status[process])).unwrap();
        assert_eq!(exe, Path::new(INSTALLED), "{process}");
    }
    assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
    assert_read(1);
    assert_eq!(fs::read_to_string(format!("{AT}/written")).unwrap(), "by an administrator");
}

/// A program that does not start replaces nothing: the package is installed, and the old daemon
/// serves.
fn refuse_an_upgrade(package: &Path) {
    let before = property("MainPID");
    let printed = dpkg(&["--install", package.to_str().unwrap()]);
    assert!(printed.contains("was not upgraded"), "{printed}");
    assert_eq!(property("MainPID"), before, "the unit was neither stopped nor restarted");
    assert_read(2);
}

/// While something is mounted, the package stays, with a daemon and without one.
fn refuse_to_remove() {
    let refused = || {
        let output = try_dpkg(&["--remove", "burgeon"]);
        assert!(!output.status.success() && said(&output).contains(AT), "{}", said(&output));
        let state = dpkg(&["--status", "burgeon"]);
        assert!(state.contains(" ok installed\n"), "{state}");
        assert!(Path::new(INSTALLED).exists());
    };
    refused();
    assert_read(3);
    run("systemctl", &["stop", "burgeon.service"]);
    processes_with(Path::new(STATE)).into_iter().for_each(kill);
    refused();
    // Of data in the page cache and of metadata; the next command starts a daemon.
    assert_eq!(fs::read_to_string(format!("{AT}/written")).unwrap(), "by an administrator");
    burgeon(&["umount", AT]);
}

fn remove_and_purge(package: &Path) {
    dpkg(&["--remove", "burgeon"]);
    assert!(!Path::new(INSTALLED).exists());
    assert_eq!(property("LoadState"), "not-found");
    for unit in [METRICS, "burgeon-disks.timer"] {
        assert_eq!(
            property_of(unit, "ActiveState"),
            "inactive",
            "{unit} runs a program that is gone"
        );
    }
    assert!(wait_until(PATIENCE, || processes_with(Path::new(STATE)).is_empty()), "daemons end");
    for part in ["images", "writes/kept", "store"] {
        assert!(Path::new(STATE).join(part).exists(), "remove keeps {part}");
    }

    let (unit, other) = ("/etc/systemd/system/srv-x.mount", "/srv/other");
    fs::create_dir_all(other).unwrap();
    let text = format!(
        "# Written by `burgeon mount --persist`\n[Mount]\nOptions=ro,state-dir={other},fast\n"
    );
    fs::write(unit, text).unwrap();
    let printed = dpkg(&["--purge", "burgeon"]);
    assert!(printed.contains(unit) && printed.contains("directory /srv/other stays"), "{printed}");
    fs::remove_file(unit).unwrap();
    fs::remove_dir(other).unwrap();
    for kept in ["writes/kept", "store"] {
        let path = format!("{STATE}/{kept}");
        assert!(printed.contains(&path) && Path::new(&path).exists(), "{path}: {printed}");
    }
    for gone in ["cache", "cache.json", "cache-dir.json", "images", "run", "mounts", "grants"] {
        assert!(!Path::new(STATE).join(gone).exists(), "purge removes {gone}");
    }
    assert!(!Path::new("/etc/needrestart/conf.d/burgeon.conf").exists());
    assert!(!Path::new("/etc/burgeon/config.toml").exists());
    assert!(fs::symlink_metadata(ENABLED).is_err(), "purge removes links of `systemctl enable`");
    let own = Path::new("/etc/burgeon/config.d/50-site.toml");
    assert!(own.exists(), "purge keeps the administrator's own files");
    fs::remove_file(own).unwrap();

    // The writes need nothing that was purged.
    dpkg(&["--install", package.to_str().unwrap()]);
    burgeon(&["mount", "tree", AT, "--writes", "kept"]);
    assert_read(4);
    assert_eq!(fs::read_to_string(format!("{AT}/written")).unwrap(), "by an administrator");
    burgeon(&["umount", AT]);
    dpkg(&["--purge", "burgeon"]);
    run("umount", &[STATE]);
}
