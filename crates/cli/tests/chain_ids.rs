//! Chain IDs are promises about the bytes of layers: images that break them, and images that were
//! verified, in Debian's containerd with `burgeon snapshotter`.

#![allow(clippy::unwrap_used)]

use std::fs;

use serde_json::Value;
use testkit::{Burgeon, PATIENCE, Registry, Space, wait_until};

use node::{Node, push_estargz, push_meddled};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

#[test]
fn an_image_that_states_diff_ids_of_others_is_refused_once_that_is_known() {
    let space = Space::new("chain-ids");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = |repository: &str| format!("{}/{repository}:1", registry.address());
    let base = push_estargz(&space, &name("library/base"), "layer", None);
    let forged = push_estargz(&space, &name("team/forged"), "forged", Some(&base.diff_ids));
    // Their first layers are equal if both were made within one second.
    let at = usize::from(forged.layers[0] == base.layers[0]);
    assert_ne!(forged.layers[at], base.layers[at]);
    let mut node = Node::start(&space, &[]);
    // Without trust nothing is claimed, so containerd unpacks the layer and finds the other digest.
    let said = node.pull(&forged.name).unwrap_err();
    assert!(said.contains("wrong diff id"), "{said}");
    assert!(!node.kinds().contains(&"remote".to_owned()), "{:?}", node.snapshots());
    node.ctr(&["images", "rm", "--sync", &forged.name]).ok();
    // Its publisher is trusted: nobody notices until the layers are read.
    let trust = format!("{}/team/*", registry.address());
    node.serve(&["--containers", "overlay", "--trust", &trust]);
    node.pull(&forged.name).unwrap();
    let remote = || node.kinds().iter().filter(|kind| *kind == "remote").count();
    assert_eq!(remote(), 2, "{:?}", node.snapshots());
    assert_eq!(node.run_in(&forged.name, "first", "cat /second").unwrap(), "forged");
    let detached = ["run", "-d", "--snapshotter", "burgeon", &forged.name, "long", "/bin/sleep"];
    node.ctr(&[&detached[..], &["1000"]].concat()).unwrap();
    let root = space.path("root");
    let of_root =
        |verb: &str| burgeon.run(&["snapshotter", verb, "--root", root.to_str().unwrap()]);
    let verified = of_root("verify");
    assert_eq!(verified.code, Some(1), "{verified:?}");
    for part in [&forged.reference(), ": differs: ", &forged.layers[at], &base.diff_ids[at]] {
        assert!(verified.stdout.contains(part), "{part}: {verified:?}");
    }
    // Nothing more is made on it, also for images that state the same rightly.
    node.pull(&base.name).unwrap();
    for image in [&forged, &base] {
        let refused = node.run_in(&image.name, "second", "cat /second").unwrap_err();
        assert!(refused.contains(&forged.layers[at]), "{refused}");
        assert!(refused.contains("above it: test-"), "{refused}");
    }
    let shown = of_root("status");
    assert_eq!(shown.code, Some(1), "{shown:?}");
    let mut lines = shown.stdout.lines().filter(|line| line.contains(": refused: "));
    let is_it = |line: &str| line.contains(&base.diff_ids[at]) && line.ends_with("/long");
    assert!(lines.any(is_it), "{shown:?}");
    let log = fs::read_to_string(space.path("s.log")).unwrap();
    let events = log.lines().filter(|line| line.contains("not what its image states"));
    assert_eq!(events.count(), 1, "{log}");
    let metrics = burgeon.ok(&["metrics"]);
    let differing = format!("\nburgeon_differing_layers {}\n", 2 - at);
    assert!(metrics.contains(&differing), "{metrics}");
    // The container that runs goes on.
    let exec = ["tasks", "exec", "--exec-id", "e", "long", "cat", "/second"];
    assert_eq!(node.ctr(&exec).unwrap(), "forged");
    // Its publisher is known now, trusted or not.
    node.ctr(&["tasks", "rm", "--force", "long"]).unwrap();
    node.ctr(&["containers", "rm", "long"]).unwrap();
    for image in [&base, &forged] {
        node.ctr(&["images", "rm", "--sync", &image.name]).unwrap();
    }
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    let said = node.pull(&forged.name).unwrap_err();
    assert!(said.contains("wrong diff id"), "{said}");
    // containerd may collect what the failed pull left under the hands of this one, but only once.
    node.pull(&base.name).or_else(|_| node.pull(&base.name)).unwrap();
    assert_eq!(node.run_in(&base.name, "third", "cat /second").unwrap(), "layer");
}

#[test]
fn an_image_whose_table_of_contents_lies_is_refused_once_that_is_known() {
    let space = Space::new("chain-ids-listed");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = |repository: &str| format!("{}/team/{repository}:1", registry.address());
    let honest = push_estargz(&space, &name("honest"), "layer", None);
    // Its diff IDs are right. The table has a file of root's that anybody may run as root.
    let lying = push_meddled(&space, &name("lying"), "lying", |toc| {
        let mut entries = toc["entries"].as_array_mut().unwrap().iter_mut();
        if let Some(file) = entries.find(|entry| entry["name"] == "second") {
            file["mode"] = 0o4755.into();
        }
    });
    let mut node = Node::start(&space, &[]);
    let trust = format!("{}/team/*", registry.address());
    node.serve(&["--containers", "overlay", "--trust", &trust]);
    for image in [&honest, &lying] {
        node.pull(&image.name).unwrap();
    }
    assert!(node.kinds().iter().all(|kind| kind == "remote"), "{:?}", node.snapshots());
    let said = node.run_in(&lying.name, "first", "test -u /second && echo it is").unwrap();
    assert_eq!(said, "it is\n", "a table is believed");
    let root = space.path("root");
    let verify = ["snapshotter", "verify", "--root", root.to_str().unwrap()];
    // Their layers are known, and the tables are not: of one that is right, nothing is recorded.
    for image in [&honest, &lying] {
        burgeon.ok(&["index", &image.reference()]);
    }
    for _ in 0..2 {
        let verified = burgeon.run(&verify);
        assert_eq!(verified.code, Some(1), "{verified:?}");
        let is_honest = format!("{}: verified\n", honest.reference());
        assert!(verified.stdout.contains(&is_honest), "{verified:?}");
        let lie = format!("{}: differs: the table of contents of the layer ", lying.reference());
        for part in [&lie, &lying.layers[1], "another mode of \"second\" than in the layer"] {
            assert!(verified.stdout.contains(part), "{part}: {verified:?}");
        }
    }
    let refused = node.run_in(&lying.name, "second", "true").unwrap_err();
    assert!(refused.contains("table of contents"), "{refused}");
    assert_eq!(node.run_in(&honest.name, "third", "cat /second").unwrap(), "layer");
    let metrics = burgeon.ok(&["metrics"]);
    assert!(metrics.contains("\nburgeon_differing_layers 1\n"), "{metrics}");
    // Later it is unpacked, with the files that it has.
    node.ctr(&["images", "rm", "--sync", &lying.name]).unwrap();
    let is_gone =
        || node.kinds().iter().all(|kind| kind == "remote") && node.snapshots().len() == 2;
    assert!(wait_until(PATIENCE, is_gone), "{:?}", node.snapshots());
    node.pull(&lying.name).unwrap();
    let said = node.run_in(&lying.name, "fourth", "test -u /second || cat /second").unwrap();
    assert_eq!(said, "lying");
}

#[test]
fn an_image_whose_layers_were_read_here_is_lazy_without_trust() {
    let space = Space::new("chain-ids-verified");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = format!("{}/library/base:1", registry.address());
    let image = push_estargz(&space, &name, "layer", None);
    let node = Node::start(&space, &[]);
    // The table of contents alone is no ground for it.
    burgeon.ok(&["pull", &image.reference()]);
    node.pull(&name).unwrap();
    assert_eq!(node.kinds(), ["local", "local"]);
    let why = node.snapshots()[0]["why_local"].to_string();
    assert!(why.contains("was not read here") && why.contains("burgeon index oci://"), "{why}");
    node.ctr(&["images", "rm", "--sync", &name]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    burgeon.ok(&["index", &image.reference()]);
    let records = space.path("state/unpacked");
    assert_eq!(records.read_dir().unwrap().count(), 2);
    node.pull(&name).unwrap();
    assert_eq!(node.kinds(), ["remote", "remote"], "{:?}", node.snapshots());
    assert!(!node.has_fetched(&image));
    assert_eq!(node.run_in(&name, "first", "cat /second /etc/changed").unwrap(), "layerchanged");
    let source = |one: &Value| one["sources"][0].as_str().map(str::to_owned);
    let sources: Vec<_> = node.snapshots().iter().filter_map(source).collect();
    assert_eq!(sources.len(), 2);
    assert!(sources.iter().all(|source| source.starts_with("checked oci://")), "{sources:?}");
    let root = space.path("root");
    let verified = burgeon.ok(&["snapshotter", "verify", "--root", root.to_str().unwrap()]);
    assert_eq!(verified, format!("{}: verified\n", image.reference()));
}
