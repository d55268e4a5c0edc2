//! `burgeon demo` shows the main job and leaves nothing behind, also when it is interrupted.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use testkit::{PATIENCE, Rng, Space, loop_devices, processes_with, wait_until};

/// A demonstration of a small tree that has begun.
fn begin(space: &Space, options: &[&str]) -> Child {
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(4).bytes(3_000_000)).unwrap();
    let mut demo = Command::new(env!("CARGO_BIN_EXE_burgeon"));
    demo.args(["demo", "--tree"]).arg(&tree).args(options);
    demo.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn nothing_is_left_of(demo: u32) {
    let folder = PathBuf::from(format!("/var/tmp/burgeon-demo-{demo}"));
    assert!(!folder.exists());
    let gone = wait_until(PATIENCE, || {
        let loops = loop_devices();
        processes_with(&folder).is_empty() && !loops.iter().any(|l| l.backing.starts_with(&folder))
    });
    assert!(gone, "{:?}", processes_with(&folder));
}

#[test]
fn with_json_standard_output_is_one_document() {
    let space = Space::new("demo");
    // It needs no other state directory than its own.
    let state = space.path("state");
    let demo = begin(&space, &["--json", "--state-dir", &state.to_string_lossy()]);
    let id = demo.id();
    let output = demo.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["demo"], "done");
    assert!(String::from_utf8(output.stderr).unwrap().contains("reflink"));
    assert!(!state.exists());
    nothing_is_left_of(id);
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    for until in ["build", "mount it", "a second time"] {
        let space = Space::new("demo-interrupted");
        let mut demo = begin(&space, &[]);
        let mut said = BufReader::new(demo.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(said.any(|line| line.contains(until)), "{until:?} was not said");
        kill_process(Pid::from_child(&demo), Signal::INT).unwrap();
        let id = demo.id();
        // It may have come to its end first, while this process waited for a processor.
        let ended = said.any(|line| line.contains("Everything is cleaned up"));
        let output = demo.wait_with_output().unwrap();
        let code = output.status.code();
        assert!(code == Some(130) || ended && code == Some(0), "{until}: {output:?}");
        nothing_is_left_of(id);
    }
}
