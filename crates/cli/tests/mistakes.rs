//! Common mistakes, which are answered by the right command, and the exit codes that
//! `docs/cli.md` lists.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    fs::File,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use testkit::{Burgeon, Fault, Proxy, Registry, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

struct Installation {
    burgeon: Burgeon,
    space: Space,
    tree: PathBuf,
    at: PathBuf,
}

// Bindings go in the reverse of their order: the daemon ends before its folder is removed.

/// One with the image `app:1`, a tree and a place to mount at.
fn installation(label: &str) -> Installation {
    let space = Space::new(label);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (tree, at) = (space.make_folder("tree"), space.make_folder("at"));
    fs::write(tree.join("file"), vec![7; 100_000]).unwrap();
    burgeon.build(&tree, "app:1");
    Installation { burgeon, space, tree, at }
}

/// The URL of a store in the place of an image is a common mistake, and may have a password.
#[test]
fn no_error_repeats_a_secret() {
    let Installation { space, tree, at, burgeon } = installation("mistakes-secret");
    let (tree, at) = (tree.to_str().unwrap(), at.to_str().unwrap());
    let (bucket, query) = ("s3://user:PASSWORD@bucket/x", "oci://localhost:1/x?token=PASSWORD");
    let web = "https://localhost:1/x.tar.gz#PASSWORD";
    for line in [
        &["mount", bucket, at][..],
        &["mount", query, at],
        &["mount", web, at],
        &["build", bucket, "name"],
        &["build", tree, bucket],
        &["pull", bucket],
        &["inspect", bucket],
        &["rm", bucket],
        &["cache", "drop", bucket],
        &["profile", "show", bucket],
        &["verify", "app:1", "--store", "https://user:PASSWORD@host/x"],
    ] {
        let finished = burgeon.run(&[line, &["--json"]].concat());
        assert_ne!(finished.code, Some(0), "{line:?}: {finished:#?}");
        let said = format!("{}{}", finished.stdout, finished.stderr);
        assert!(said.contains("burgeon: ") && !said.contains("PASSWORD"), "{line:?}: {said}");
    }
    let mut helper = Command::new(PROGRAM);
    helper.arg0("mount.burgeon").args([bucket, at]).env("BURGEON_STATE_DIR", space.path("state"));
    let output = helper.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && !said.contains("PASSWORD"), "{said}");
}

#[test]
fn a_first_mistake_is_answered_by_what_to_type() {
    let Installation { space, tree, at, burgeon } = installation("mistakes");
    let (tree, at) = (tree.to_str().unwrap(), at.to_str().unwrap());
    let layout = space.path("layout").display().to_string();
    for (image, answer) in [
        ("docker.io/python:3.12", "oci://docker.io/python:3.12"),
        ("docker://docker.io/python:3.12", "oci://docker.io/python:3.12"),
        (tree, &*format!("burgeon build {tree} NAME")),
        ("s3://bucket/images/debian:12", "--store s3://bucket/images"),
        (&*format!("oci:{layout}:1"), &*format!("oci-layout:{layout}:1")),
        ("app", "app:1"),
    ] {
        burgeon.fails(&["mount", image, at], 3, answer);
        burgeon.fails(&["pull", image], 3, answer);
        burgeon.fails(&["inspect", image], 3, answer);
    }
    // A path of the current directory, as it is typed.
    let typed = burgeon.command(&["mount", "./tree", at]).current_dir(space.folder()).output();
    let typed = typed.unwrap();
    assert_eq!(typed.status.code(), Some(3));
    assert_eq!(
        String::from_utf8_lossy(&typed.stderr),
        "burgeon: there is no image \"./tree\": it is a directory: make an image of it first, `burgeon \
         build ./tree NAME`\n"
    );
    for (line, code, answer) in [
        (&["mount", tree, "app:1"][..], 2, format!("burgeon mount app:1 {tree}")),
        (&["build", "new:1", tree], 2, format!("burgeon build {tree} new:1")),
        (&["build", "docker.io/python:3.12", "p"], 3, "oci://docker.io/python:3.12".to_owned()),
        (&["build", "oci:x:1", "p"], 3, "oci-layout:x:1".to_owned()),
        (&["index", "docker.io/python:3.12"], 1, "oci://docker.io/python:3.12".to_owned()),
        (&["push", "oci://r.example/app:1", "app:1"], 2, "burgeon push app:1 oci://".to_owned()),
        (&["prefetch", tree], 3, "in no mount of Burgeon".to_owned()),
    ] {
        burgeon.fails(line, code, &answer);
    }
}

#[test]
fn a_target_outside_any_mount_is_named_as_it_was_typed() {
    let Installation { burgeon, space, tree, .. } = installation("outside");
    let target = space.path("at/mapped");
    let [target, tree] = [&target, &tree].map(|path| path.to_str().unwrap());
    burgeon.fails(&["map", target, "--from", tree], 3, &format!("{target} is in no mount"));
}

#[test]
fn a_level_is_answered_by_the_documented_ones() {
    let Installation { burgeon, space: _space, .. } = installation("levels");
    burgeon.fails(&["list", "--log-level", "foo"], 2, "error, warn, info, debug, off");
    burgeon.ok(&["list", "--log-level", "debug"]);
    // Nobody has typed the option.
    let output = burgeon.command(&["list"]).env("BURGEON_LOG", "foo").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("variable BURGEON_LOG"), "{said}");
    for empty in ["BURGEON_LOG", "BURGEON_CACHE_DIR"] {
        let output = burgeon.command(&["list"]).env(empty, "").output().unwrap();
        assert!(output.status.success(), "{empty}: {output:?}");
    }
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    let Installation { burgeon, .. } = installation("full");
    for option in ["--help", "--version"] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = burgeon.command(&[option]).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{said}");
        assert!(said.contains("cannot write to standard output"), "{said}");
    }
}

#[test]
fn a_source_that_may_never_end_is_refused() {
    let Installation { burgeon, space, .. } = installation("fifo");
    let fifo = space.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let fifo = fifo.to_str().unwrap();
    burgeon.fails(&["build", fifo, "x"], 1, &format!("burgeon build - NAME < {fifo}"));
    burgeon.fails(&["build", "--by-reference", fifo, "x"], 1, "is not a file, block device");
    burgeon.fails(&["build", "/dev/zero", "x"], 1, "it is a character device");
    // A pipe of a shell has a writer.
    let mut shell = Command::new("bash");
    let build = burgeon.command(&["build"]);
    shell.args(["-c", r#"tree=$1; shift; "$@" <(tar -c -C "$tree" .) piped"#, "bash"]);
    shell.arg(space.path("tree")).arg(build.get_program()).args(build.get_args());
    let piped = shell.output().unwrap();
    assert!(piped.status.success(), "{piped:?}");
}

#[test]
fn an_internal_verb_with_other_arguments_starts_nothing() {
    let Installation { burgeon, space, .. } = installation("internal");
    let state = space.path("nowhere");
    let state = state.to_str().unwrap();
    for line in [
        &["__supervise", "--help"][..],
        &["__supervise"],
        &["__supervise", state, "more"],
        &["__serve", "--help"],
        &["__help", "-h"],
        &["__hold"],
        &["__prepare", "--help"],
        &["__read", "--help"],
        &["__probe", "--help"],
    ] {
        let mut command = Command::new(PROGRAM);
        let output = command.args(line).current_dir(space.folder()).stdin(Stdio::null()).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line:?}: {said}");
        assert!(said.contains(&format!("{} is internal", line[0])), "{said}");
    }
    assert!(!space.path("nowhere").exists() && !space.path("--help").exists());
    assert!(burgeon.processes().is_empty());
}

/// Every code of the table, each by the kind that JSON has for it.
#[test]
fn failures_end_with_the_documented_code() {
    let Installation { space, tree, at, burgeon } = installation("codes");
    let (tree, point) = (tree.to_str().unwrap(), at.to_str().unwrap());
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let proxy = Proxy::new(registry.address(), 2).unwrap();
    proxy.spoil(1000, &[Fault::Status(507)]);
    let full = format!("oci://{}/app:1", proxy.address());
    let locked = space.make_folder("locked");
    let lock = File::open(&locked).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let store = burgeon.state().join("store");
    burgeon.build(&space.path("tree"), "strange");
    let strange = store.join("images/strange");
    let record = fs::read_to_string(&strange).unwrap();
    fs::write(&strange, record.replace("\"format\":1", "\"format\":99")).unwrap();
    fs::write(store.join("images/damaged"), "{}").unwrap();
    for (line, code, kind) in [
        (&["list", "--store", tree][..], 0, None),
        (&["build", tree, ".."], 1, Some("invalid")),
        (&[], 2, Some("usage")),
        (&["explode"], 2, Some("usage")),
        (&["mount", "app:1"], 2, Some("usage")),
        (&["mount", point, "app:1"], 2, Some("usage")),
        (&["list", "--store", "ftp://host/x"], 2, Some("usage")),
        (&["list", "--log-level", "foo"], 2, Some("usage")),
        (&["list", "--log-level", "trace"], 2, Some("usage")),
        (&["umount", point], 3, Some("not-found")),
        (&["rm", "none"], 3, Some("not-found")),
        (&["mount", "none", point], 3, Some("not-found")),
        (&["inspect", "damaged"], 4, Some("corrupt")),
        (&["inspect", "strange"], 4, Some("unsupported-format")),
        (&["pull", "oci://localhost:1/app:1"], 5, Some("unavailable")),
        (&["mount", "app:1", locked.to_str().unwrap()], 5, Some("busy")),
        (&["push", "app:1", &full], 6, Some("no-space")),
    ] {
        let finished = burgeon.run(&[line, &["--json"]].concat());
        assert_eq!(finished.code, Some(code), "{line:?}: {finished:#?}");
        let said: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!(said["error"]["kind"].as_str(), kind, "{line:?}: {finished:#?}");
    }
    // Without an argument the usage is said on standard error: nothing was done.
    let bare = Command::new(PROGRAM).output().unwrap();
    assert_eq!(bare.status.code(), Some(2));
    assert!(bare.stdout.is_empty() && String::from_utf8_lossy(&bare.stderr).contains("Usage:"));
    let mut command = Command::new(PROGRAM);
    let state = space.make_folder("nobody");
    std::os::unix::fs::chown(&state, Some(65534), Some(65534)).unwrap();
    command.args(["--json", "mount", "app:1", point, "--state-dir"]).arg(&state);
    let output = command.uid(65534).gid(65534).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
}
