//! `burgeon run`: the image's program in namespaces of its own, and nothing left afterwards.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    process::{Child, Command, Stdio},
};

use serde_json::json;
use testkit::{Burgeon, PATIENCE, Space, busybox_image, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// An image with a user, a folder, variables and a volume.
fn image(space: &Space) -> String {
    let change = |config: &mut serde_json::Value| {
        config["User"] = "www".into();
        config["WorkingDir"] = "/srv".into();
        config["Env"] = json!(["PATH=/bin", "GREETING=hello there"]);
        config["Cmd"] = json!(["sh", "-c", "echo the command of the image"]);
        config["Volumes"] = json!({ "/data": {} });
    };
    busybox_image(&space.path("layout"), change).unwrap()
}

/// Starts `burgeon run` with pipes, and waits until the program has written the line `ready`.
fn start(burgeon: &Burgeon, line: &[&str]) -> Child {
    let mut command = burgeon.command(line);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    // Byte by byte, so that nothing of later output is lost.
    let out = child.stdout.as_mut().unwrap();
    let mut byte = [0];
    while !said.ends_with("ready\n") {
        assert_eq!(out.read(&mut byte).unwrap(), 1, "it ended: {said}");
        said.push(char::from(byte[0]));
    }
    child
}

fn no_mount(burgeon: &Burgeon) -> bool {
    burgeon.status()["mounts"].as_array().unwrap().is_empty()
}

#[test]
fn the_program_has_the_settings_of_the_image_and_namespaces_of_its_own() {
    let space = Space::new("run");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = image(&space);
    assert_eq!(burgeon.ok(&["run", &image]), "the command of the image\n");
    let run = |options: &[&str], script: &str| {
        let line = [&["run", &*image][..], options, &["--", "sh", "-c", script]].concat();
        let finished = burgeon.run(&line);
        assert_eq!(finished.stderr, "", "{script}");
        (finished.code, finished.stdout)
    };
    let script = "id -u; id -g; id -G; pwd; echo $GREETING $HOME; hostname; exit 7";
    let expected = "33\n34\n34 50\n/srv\nhello there /srv\nburgeon\n";
    assert_eq!(run(&[], script), (Some(7), expected.to_owned()));
    let options = ["--user", "0:50", "--workdir", "/new/dir", "--env", "GREETING=bye"];
    let options = [&options[..], &["--hostname", "other"]].concat();
    let script = "id -u; id -g; pwd; echo $GREETING $HOME; hostname; kill -9 $$";
    let expected = "0\n50\n/new/dir\nbye /root\nother\n";
    assert_eq!(run(&options, script), (Some(137), expected.to_owned()));
    // Process 1 cannot be looked into, devices cannot be made, nothing of the host is there.
    let root = ["--user", "0", "--network", "none"];
    let script = "cat /proc/1/environ 2> /dev/null || echo hidden; \
                  mknod /tmp/disk b 7 0 2> /dev/null || echo no devices; \
                  mount -t tmpfs none /tmp 2> /dev/null || echo no mounts; \
                  cat /proc/keys /proc/timer_list | wc -c; \
                  echo x 2> /dev/null > /proc/sys/kernel/hostname || echo read-only; \
                  ls /sys/class/net; ls / | tr '\\n' ' '; ls /proc/self/fd | tr '\\n' ' '";
    let expected = "hidden\nno devices\nno mounts\n0\nread-only\nlo\n\
                    bin data dev etc proc run srv sys tmp 0 1 2 3 ";
    assert_eq!(run(&root, script).1, expected);
    let mounts = run(&["--user", "0"], "cat /proc/self/mountinfo").1;
    assert!(!mounts.contains(space.path("").to_str().unwrap()), "{mounts}");
    // Standard input reaches the program.
    let line = ["run", &image, "--", "sh", "-c", "echo ready; cat"];
    let mut child = start(&burgeon, &line);
    child.stdin.take().unwrap().write_all(b"through\n").unwrap();
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((said.as_str(), child.wait().unwrap().code()), ("through\n", Some(0)));
    assert_eq!(burgeon.run(&["run", &image, "--", "/none"]).code, Some(127));
    assert_eq!(burgeon.run(&["run", &image, "--", "/etc/passwd"]).code, Some(126));
    burgeon.fails(&["run", &image, "--user", "nobody"], 3, "no user \"nobody\"");
    assert!(no_mount(&burgeon));
}

#[test]
fn writes_are_kept_under_a_name_and_a_read_only_root_has_writable_volumes() {
    let space = Space::new("run-writes");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = image(&space);
    let run = |options: &[&str], script: &str| {
        burgeon.run(&[&["run", &*image][..], options, &["--", "sh", "-c", script]].concat())
    };
    assert_eq!(run(&["--writes", "w"], "echo kept > /tmp/file").code, Some(0));
    assert_eq!(run(&["--writes", "w"], "cat /tmp/file").stdout, "kept\n");
    assert_ne!(run(&[], "cat /tmp/file").code, Some(0));
    let script = "echo x 2> /dev/null > /tmp/file || echo refused; echo x > /data/file; ls /data";
    let read_only = ["--read-only", "--user", "0"];
    assert_eq!(run(&read_only, script).stdout, "refused\nfile\n");
    assert!(no_mount(&burgeon));
}

#[test]
fn signals_reach_the_program_and_its_death_or_that_of_the_command_leaves_nothing() {
    let space = Space::new("run-signals");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = image(&space);
    let script = "trap 'echo got it; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let mut child = start(&burgeon, &["run", &image, "--", "sh", "-c", script]);
    // Process 1 is no file of the host, which a program of the image could change.
    let next = |pid: u32, verb: &str| -> u32 {
        let all = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let is = |pid: &u32| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline"));
            line.is_ok_and(|line| line.contains(verb))
        };
        all.split_whitespace().map(|pid| pid.parse().unwrap()).find(is).unwrap()
    };
    let first = next(next(child.id(), "__contain"), "__init");
    let program = fs::read_link(format!("/proc/{first}/exe")).unwrap();
    assert!(program.starts_with("/memfd:burgeon (deleted)"), "{}", program.display());
    let term = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(term.unwrap().success());
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!((said.as_str(), child.wait().unwrap().code()), ("got it\n", Some(9)));
    assert!(no_mount(&burgeon));
    // The command is killed: its container and its mount end.
    let mark = format!("sleep 98{}", std::process::id());
    let script = format!("trap '' TERM HUP; {mark} & echo ready; {mark}");
    let mut child = start(&burgeon, &["run", &image, "--", "sh", "-c", &script]);
    let sleepers = || {
        let lines = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            Some(String::from_utf8_lossy(&line).replace('\0', " "))
        });
        lines.filter(|line| line.contains(&mark)).count()
    };
    assert!(wait_until(PATIENCE, || sleepers() >= 3), "{}", sleepers());
    kill(child.id());
    child.wait().unwrap();
    assert!(wait_until(PATIENCE, || sleepers() == 0), "{} processes are left", sleepers());
    assert!(wait_until(PATIENCE, || no_mount(&burgeon)), "{:#}", burgeon.status());
}
