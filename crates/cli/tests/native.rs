//! Containers with mounts of their own, in Debian's containerd with `burgeon snapshotter`.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use testkit::{Burgeon, PATIENCE, Registry, Space, wait_until};

use node::{Node, SCRIPT, push_estargz};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

#[test]
fn a_native_container_changes_lasts_and_goes_as_on_overlayfs() {
    let space = Space::new("native");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = format!("{}/team/app:1", registry.address());
    push_estargz(&space, &name, "layer", None);
    let options = ["--trust", "*", "--write-limit", "300M"];
    let mut node = Node::start(&space, &options);
    node.pull(&name).unwrap();
    // The same script, and the same difference.
    node.ctr(&["images", "pull", "--plain-http", "--snapshotter", "overlayfs", &name]).unwrap();
    let chains = || space.path("root/chains").read_dir().unwrap().count();
    let mut diffs = Vec::new();
    for snapshotter in ["burgeon", "overlayfs"] {
        let run =
            ["run", "--snapshotter", snapshotter, &name, snapshotter, "/bin/sh", "-c", SCRIPT];
        node.ctr(&run).unwrap();
        if snapshotter == "burgeon" {
            assert_eq!(chains(), 1, "no mount of the chain is needed");
        }
        diffs.push(node.diff(snapshotter, snapshotter));
    }
    assert!(diffs[1].0.len() > 12, "{diffs:?}");
    assert_eq!(diffs[0], diffs[1]);
    let native = |node: &Node<'_>| -> Vec<Value> {
        node.snapshots().into_iter().filter(|one| one["kind"] == "native").collect()
    };
    assert_eq!(native(&node).len(), 1, "{:?}", node.snapshots());
    let at = space.path(&format!("root/chains/{}", native(&node)[0]["id"]));
    // It has its limit, and its use is known without a walk.
    let usage = |node: &Node<'_>| -> u64 {
        let shown = node.ctr(&["snapshots", "--snapshotter", "burgeon", "usage", "-b", "burgeon"]);
        let shown = shown.unwrap();
        let line = shown.lines().find(|line| line.starts_with("burgeon")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let before = usage(&node);
    std::fs::write(at.join("large"), vec![1; 20 << 20]).unwrap();
    rustix::fs::syncfs(std::fs::File::open(&at).unwrap()).unwrap();
    let more = usage(&node) - before;
    assert!((20 << 20..22 << 20).contains(&more), "{more}");
    let full = std::fs::write(at.join("larger"), vec![1; 400 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    std::fs::remove_file(at.join("larger")).unwrap();
    // Without a command or systemd, the snapshotter alone starts a dead daemon again.
    burgeon.kill_both();
    assert!(wait_until(PATIENCE, || burgeon.run(&["health"]).code == Some(0)));
    // A killed server forgets chunks that it has just cached: this fetches them again, while the
    // registry is there.
    testkit::drop_caches();
    let (lines, _) = node.diff("burgeon", "burgeon");
    assert!(diffs[1].0.iter().all(|line| lines.contains(line)), "{lines:?}");
    let view = |node: &Node<'_>, name: &str| {
        let target = space.make_folder("view");
        let mounts =
            ["snapshots", "--snapshotter", "burgeon", "mounts", target.to_str().unwrap(), name];
        node.ctr(&mounts).unwrap()
    };
    // As after a reboot, with the registry away: mounted again with its writes.
    burgeon.ok(&["umount", at.to_str().unwrap()]);
    node.serve(&options);
    drop(registry);
    assert!(view(&node, "burgeon").contains(at.to_str().unwrap()));
    assert_eq!(std::fs::read(at.join("etc/changed")).unwrap(), b"changed\n");
    assert_eq!(std::fs::metadata(at.join("large")).unwrap().len(), 20 << 20);
    let diff = node.diff("burgeon", "burgeon");
    let is_not_large = |line: &&String| !line.ends_with(" large");
    let lines: Vec<_> = diff.0.iter().filter(is_not_large).cloned().collect();
    assert_eq!(lines, diffs[1].0);
    let commit = |node: &Node<'_>, words: &[&str]| {
        node.ctr(&[&["snapshots", "--snapshotter", "burgeon"], words].concat()).unwrap()
    };
    // A commit holds what it changed; the snapshot above it is overlayfs's, and has it as well.
    commit(&node, &["commit", "layer", "burgeon"]);
    assert!(wait_until(PATIENCE, || native(&node).is_empty() && !at.exists()));
    let layer = node
        .snapshots()
        .into_iter()
        .find(|one| one["state"] == "committed" && one["kind"] == "overlay");
    let layer = space.path(&format!("root/snapshots/{}/fs", layer.unwrap()["id"]));
    assert!(layer.join("etc/changed").exists() && !layer.join("second").exists());
    assert!(!layer.join("bin").exists(), "nothing else was copied");
    commit(&node, &["prepare", "child", "layer"]);
    let mounted = space.make_folder("child");
    let script = commit(&node, &["mounts", mounted.to_str().unwrap(), "child"]);
    assert!(std::process::Command::new("sh").args(["-c", &script]).status().unwrap().success());
    let read = |name: &str| std::fs::read(mounted.join(name)).ok();
    let found = ["second", "etc/changed", "etc/removed", "moved", "old/x", "old/below"].map(read);
    let unmounted = std::process::Command::new("umount").arg(&mounted).status().unwrap();
    assert!(unmounted.success());
    let expected = [Some("layer"), Some("changed\n"), None, Some("moved"), Some("x\n"), None];
    assert_eq!(found, expected.map(|text| text.map(|text| text.as_bytes().to_vec())));
    // Nothing is left: no mount, no writes, no record.
    commit(&node, &["rm", "child"]);
    commit(&node, &["rm", "layer"]);
    for container in ["burgeon", "overlayfs"] {
        node.ctr(&["containers", "rm", container]).unwrap();
    }
    node.ctr(&["images", "rm", "--sync", &name]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    assert!(wait_until(PATIENCE, || chains() == 0), "a chain is still mounted");
    let writes: Value = serde_json::from_str(&burgeon.ok(&["--json", "writes", "list"])).unwrap();
    assert_eq!(writes["writes"], Value::Array(Vec::new()));
}
