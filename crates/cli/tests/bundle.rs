//! OCI runtime bundles of mounted images, run by other people's runtimes.

#![allow(clippy::unwrap_used)]

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use serde_json::Value;
use testkit::{Burgeon, Space, busybox_image};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Runs the bundle `dir` with `runtime`; its exit code and standard output.
fn run(runtime: &str, space: &Space, dir: &Path) -> (Option<i32>, String) {
    let root = space.path(&format!("{runtime}-state"));
    let id = format!("{}-{}", runtime, std::process::id());
    // crun refuses a machine that has both versions of control groups: it sees only the second.
    let script = "mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh", runtime]);
    if runtime == "crun" {
        command.arg("--cgroup-manager=disabled");
    }
    command.arg("--root").arg(&root).args(["run", "-b"]).arg(dir).arg(&id);
    let output = command.output().unwrap_or_else(|e| panic!("install {runtime}: {e}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.is_empty(), "{runtime}: {errors}");
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_bundle_runs_with_runc_and_crun_as_the_image_says() {
    let space = Space::new("bundle");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = busybox_image(&space.path("layout"), |config| {
        config["User"] = "www".into();
        config["WorkingDir"] = "/srv".into();
        config["Env"] = serde_json::json!(["PATH=/bin", "GREETING=hello there"]);
        config["Entrypoint"] = serde_json::json!(["/bin/sh", "-c"]);
        config["StopSignal"] = "SIGQUIT".into();
    })
    .unwrap();
    let script = "id -u; id -g; id -G; pwd; echo $GREETING $HOME; cat /proc/1/cmdline | tr '\\0' ' '; \
                  cat /proc/keys /proc/timer_list | wc -c; echo kept > /tmp/file; exit 7";
    for runtime in ["runc", "crun"] {
        let dir = space.path(runtime);
        let at = dir.to_str().unwrap();
        burgeon.ok(&["bundle", &image, at, "--", script]);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir), 0o700);
        assert_eq!(mode(&dir.join("config.json")), 0o600);
        let (code, said) = run(runtime, &space, &dir);
        let expected = "33\n34\n34 50\n/srv\nhello there /srv\n/bin/sh -c";
        assert!(said.starts_with(expected) && said.ends_with("exit 7 0\n"), "{runtime}: {said}");
        assert_eq!(code, Some(7), "{runtime}");
        assert_eq!(fs::read_to_string(dir.join("rootfs/tmp/file")).unwrap(), "kept\n");
        let config: Value =
            serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["annotations"]["org.opencontainers.image.stopSignal"], "SIGQUIT");
        burgeon.ok(&["umount", dir.join("rootfs").to_str().unwrap()]);
    }
}

#[test]
fn a_bundle_that_cannot_be_made_leaves_no_mount() {
    let space = Space::new("no-bundle");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = busybox_image(&space.path("layout"), |config| {
        config["User"] = "nobody-here".into();
        config["Cmd"] = serde_json::json!(["sh"]);
    })
    .unwrap();
    let dir = space.path("dir");
    let at = dir.to_str().unwrap();
    burgeon.fails(&["bundle", &image, at], 3, "no user \"nobody-here\" in its /etc/passwd");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    burgeon.fails(&["bundle", "debian:12", at], 1, "is not an OCI image");
    burgeon.fails(&["bundle", &image, at, "--user", "0", "--env", "X"], 1, "is not a variable");
    // A folder of another user, or behind a symlink, is refused; an own one becomes private.
    let foreign = space.make_folder("foreign");
    std::os::unix::fs::chown(&foreign, Some(65534), None).unwrap();
    burgeon.fails(&["bundle", &image, foreign.to_str().unwrap()], 1, "belongs to another user");
    let link = space.path("link");
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    assert_ne!(burgeon.run(&["bundle", &image, link.to_str().unwrap()]).code, Some(0));
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    burgeon.ok(&["bundle", &image, at, "--user", "0", "--read-only"]);
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    burgeon.fails(&["bundle", &image, at], 1, "is not empty");
    burgeon.ok(&["umount", dir.join("rootfs").to_str().unwrap()]);
}
