//! A benchmark that is killed leaves nothing that works on.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

use testkit::{PATIENCE, Space, kill, processes_with, wait_until};

#[test]
fn a_killed_benchmark_takes_its_daemons_with_it() {
    let space = Space::new("bench");
    let seconds = format!("86400.{}", std::process::id());
    // In the place of `burgeon`: starts what stays in a session of its own, and does not come back.
    let program = space.path("burgeon");
    let script = format!("#!/bin/sh\nsetsid sleep {seconds} < /dev/null &\nsleep 1000\n");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let daemons = || processes_with(Path::new(&seconds));
    for signal in ["-KILL", "-TERM", "-INT"] {
        // A test that runs in the background of a shell ignores SIGINT, and so would what it
        // starts.
        let mut bench = Command::new("env")
            .args(["--default-signal=INT", env!("CARGO_BIN_EXE_xtask")])
            .args(["bench", "--only=memory", "--burgeon"])
            .arg(&program)
            .env("TMPDIR", space.folder())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let started = wait_until(PATIENCE, || !daemons().is_empty());
        Command::new("kill").arg(signal).arg(bench.id().to_string()).status().unwrap();
        let ended = bench.wait().unwrap();
        let gone = wait_until(PATIENCE, || daemons().is_empty());
        daemons().into_iter().for_each(kill);
        assert!(started, "{signal}: the benchmark did not come so far: {ended}");
        assert!(gone, "{signal}: a daemon is left");
    }
    // The folder of the last one stays, empty, until the next benchmark.
    let folders = fs::read_dir(space.folder()).unwrap().flatten();
    let folders: Vec<_> = folders.filter(|entry| entry.path().is_dir()).collect();
    assert!(folders.len() <= 1, "{folders:?}");
    assert!(folders.iter().all(|folder| fs::read_dir(folder.path()).unwrap().next().is_none()));
}
