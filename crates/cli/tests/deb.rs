//! The Debian package as it is built: twice the same, and without a complaint of lintian's
//! (`package.rs` installs it). And what the tarball holds.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the package of this program in `folder`, under `mask`.
fn build(folder: &Path, mask: &str) -> PathBuf {
    let script = checkout().join("dist/deb/build");
    let mut command = Command::new("sh");
    command.args(["-c", "umask \"$0\" && exec \"$1\"", mask]).arg(script);
    command.env("DEB_BINARY", PROGRAM).env("DEB_OUT", folder);
    command.env("DPKG_DEB_COMPRESSOR_TYPE", "gzip").env("SOURCE_DATE_EPOCH", "1800000000");
    let output = command.env("DEB_MAINTAINER", "Tester <tester@example.org>").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

#[test]
fn the_package_is_reproducible_and_lintian_accepts_it() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let packages = [build(folders[0].path(), "022"), build(folders[1].path(), "077")];
    let [first, second] = packages.each_ref().map(|path| fs::read(path).unwrap());
    assert!(first == second, "two builds of one program differ");

    // dpkg keeps an administrator's changes of a conffile.
    let mut told = Command::new("dpkg-deb");
    let told = told.arg("--info").arg(&packages[0]).arg("conffiles").output().unwrap();
    let conffiles = String::from_utf8(told.stdout).unwrap();
    assert!(conffiles.lines().any(|line| line == "/etc/burgeon/config.toml"), "{conffiles}");

    let held = Command::new("dpkg-deb").arg("--contents").arg(&packages[0]).output().unwrap();
    let held = String::from_utf8(held.stdout).unwrap();
    for path in [
        "/usr/sbin/mount.burgeon -> ../bin/burgeon",
        "/usr/share/man/man1/burgeon-mount.1.gz",
        "/usr/share/man/man8/mount.burgeon.8.gz",
        "/usr/share/bash-completion/completions/burgeon",
        "/usr/share/zsh/vendor-completions/_burgeon",
        "/usr/share/fish/vendor_completions.d/burgeon.fish",
        "/usr/lib/udev/rules.d/65-burgeon.rules",
        "/usr/lib/ocf/resource.d/burgeon/accelerate",
        "/usr/lib/systemd/system/burgeon.service",
        "/usr/lib/systemd/system/burgeon-metrics.service",
        "/usr/lib/systemd/system/burgeon-snapshotter.service",
        "/usr/lib/systemd/system/burgeon-disks.service",
        "/usr/lib/systemd/system/burgeon-disks.timer",
        "/usr/lib/systemd/system/burgeon-retry@.timer",
        "/usr/lib/sysusers.d/burgeon.conf",
        "/usr/share/doc/burgeon/operations.md",
        "/usr/share/doc/burgeon/SECURITY.md",
        "/usr/share/doc/burgeon/examples/burgeon.rules.yml",
        "/usr/share/doc/burgeon/examples/grafana-dashboard.json",
    ] {
        assert!(held.lines().any(|line| line.ends_with(path)), "{path}: {held}");
    }

    if Command::new("lintian").arg("--version").output().is_err() {
        println!("left out: lintian is not installed");
        return;
    }
    let output =
        Command::new(checkout().join("dist/deb/check")).arg(&packages[0]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
}

/// `make try-tarball` runs its static program.
#[test]
fn the_tarball_is_reproducible_and_holds_all_that_the_package_installs() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let program = folders[0].path().join("program");
    let strip = Command::new("strip").arg("-o").arg(&program).arg(PROGRAM).status();
    assert!(strip.unwrap().success());
    let archives = [("022", &folders[0]), ("077", &folders[1])].map(|(mask, folder)| {
        let mut command = Command::new("sh");
        command.args(["-c", "umask \"$0\" && exec \"$1\"", mask]);
        command.arg(checkout().join("dist/tarball"));
        command.env("TARBALL_BINARY", &program).env("TARBALL_OUT", folder.path());
        let output = command.env("SOURCE_DATE_EPOCH", "1800000000").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut check = Command::new("sha256sum");
        let checked = check.args(["--check", "SHA256SUMS"]).current_dir(folder.path()).output();
        assert!(checked.unwrap().status.success());
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
    });
    let [first, second] = archives.each_ref().map(|path| fs::read(path).unwrap());
    assert!(first == second, "two builds of one program differ");

    let held = Command::new("tar").arg("-tvzf").arg(&archives[0]).output().unwrap();
    let held = String::from_utf8(held.stdout).unwrap();
    let folder = archives[0].file_name().unwrap().to_str().unwrap();
    let folder = folder.strip_suffix(".tar.gz").unwrap();
    for path in [
        "burgeon",
        "mount.burgeon -> burgeon",
        "burgeon.service",
        "burgeon-metrics.service",
        "burgeon-snapshotter.service",
        "burgeon-disks.service",
        "burgeon-disks.timer",
        "burgeon-retry@.timer",
        "65-burgeon.rules",
        "ocf/accelerate",
        "config.toml",
        "burgeon.rules.yml",
        "grafana-dashboard.json",
        "man1/burgeon-mount.1",
        "man8/mount.burgeon.8",
        "completions/burgeon.bash",
        "completions/_burgeon",
        "completions/burgeon.fish",
        "docs/operations.md",
        "README.md",
        "SECURITY.md",
        "LICENSE",
        "CHANGELOG.md",
    ] {
        let path = format!(" {folder}/{path}");
        assert!(held.lines().any(|line| line.ends_with(&path)), "{path}: {held}");
    }
    let foreign = |line: &&str| !line.contains(" 0/0 ");
    assert_eq!(held.lines().find(foreign), None, "all belongs to root");
}

/// needrestart, a Perl program, reads these settings as code.
#[test]
fn needrestart_restarts_no_unit_that_serves_devices() {
    let restarted = "my $file = shift; our %nrconf; do $file; die $@ if $@; for my $unit (@ARGV) {
        print \"$unit\\n\" unless grep { $unit =~ $_ } keys %{$nrconf{override_rc}} }";
    let mut perl = Command::new("perl");
    perl.args(["-e", restarted]).arg(checkout().join("dist/deb/needrestart.conf"));
    let output = perl
        .args(["burgeon.service", "burgeon-0a1b2c3d.service"])
        .args(["burgeon-accelerate-fast-0a1b2c3d.service"])
        .args(["burgeon-metrics.service", "burgeon-snapshotter.service", "other.service"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, "burgeon-metrics.service\nburgeon-snapshotter.service\nother.service\n");
}

/// The package stays while a cache has newer content of a slow device, or serves one.
#[test]
fn accelerated_devices_keep_the_package() {
    let state = tempfile::tempdir().unwrap();
    let cache = state.path().join("accelerate/fast");
    fs::create_dir_all(cache.join("dirty")).unwrap();
    let told = || {
        let script = ". \"$0\"; accelerated \"$1\"";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(checkout().join("dist/deb/states.sh")).arg(state.path());
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(told(), "");
    fs::write(cache.join("dirty/data"), "{}").unwrap();
    assert_eq!(told(), "the cache fast has content of data that its slow device lacks\n");
    fs::remove_file(cache.join("dirty/data")).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "read line", "sh"]).arg(&cache).stdin(Stdio::piped());
    let mut server = command.spawn().unwrap();
    assert_eq!(told(), "the cache fast has attached devices\n");
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(told(), "");
}

/// Removal asks all state directories of root for mounts, wherever a file names them.
#[test]
fn other_state_directories_are_found_by_configuration_and_units() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    let [one, two, three, open, foreign] = ["one", "two", "three", "open", "foreign"].map(at);
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    // In a mount namespace with an /etc of its own; find needs the users.
    let script = r#"
        users=$(cat /etc/passwd); mount -t tmpfs none /etc; echo "$users" > /etc/passwd
        echo 'passwd: files' > /etc/nsswitch.conf
        mkdir -p /etc/burgeon/config.d /etc/systemd/system; cd /etc/systemd/system
        echo "state-dir = \"$2\"" > /etc/burgeon/config.toml
        echo "  state-dir='$3'  # another" > /etc/burgeon/config.d/a.toml
        echo "state-dir = \"$5\"" > /etc/burgeon/config.d/b.toml
        echo 'state-dir = "relative"' > /etc/burgeon/config.d/c.toml
        echo 'state-dir = "/-no/such"' > /etc/burgeon/config.d/d.toml
        printf '# Written by `burgeon mount --persist`\n[Mount]\nOptions=ro,state-dir=%s,_netdev\n' "$4" > ours.mount
        printf '[Mount]\nOptions=state-dir=%s\n' "$6" > other.mount
        . "$1"; states"#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", script, "sh"]).arg(checkout().join("dist/deb/states.sh"));
    let output = command.args([&one, &two, &three, &open, &foreign]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    // A machine may have the default one, and daemons.
    let found = |path: &String| said.lines().any(|line| line == path);
    assert!([&one, &two, &three].into_iter().all(found), "{said}");
    assert!(!found(&open), "others can put theirs there: {said}");
    assert!(!found(&foreign) && !said.contains("relative"), "{said}");
}
