//! The examples do what they say. Needs root.

#![allow(clippy::unwrap_used)]

use std::{path::Path, process::Command};

use testkit::{Burgeon, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

#[test]
fn exabytes_appear_and_stay() {
    let space = Space::new("exabytes");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let at = space.make_folder("at");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/exabytes.sh");
    let mut command = Command::new("bash");
    command.arg(script).arg(&at).env("BURGEON", PROGRAM).env("BURGEON_STATE_DIR", burgeon.state());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{text}");
    for line in ["120 GiB appeared", "server killed: all bytes", "mounted again: all bytes"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(burgeon.ok(&["writes", "list"]).contains("no "), "it cleans up");
}
