//! The disk of the snapshotter is full, in containerd 2.x: pods go on, calls say why they fail, and
//! records and mounts agree with it during that time and afterwards.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use testkit::{Burgeon, Mounted, PATIENCE, Registry, Space, skopeo_copy, wait_until};

use node::{
    Node, image,
    pods::{Pods, Version, push_pause},
    push_estargz,
};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Fills the disk below `root` to its last block.
fn fill(root: &Path) -> PathBuf {
    let filler = root.join("filler");
    let mut file = File::create(&filler).unwrap();
    for len in [1 << 20, 4096, 1] {
        let block = vec![0; len];
        while file.write_all(&block).is_ok() {}
    }
    filler
}

/// Names of the snapshots that have a record, without damage.
fn names(node: &Node<'_>) -> BTreeSet<String> {
    node.snapshots().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn pods_go_on_while_the_disk_of_the_snapshotter_is_full() {
    let space = Space::new("snapshotter-full");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = |image: &str| format!("{}/{image}:1", registry.address());
    push_pause(&space, &name("pause"));
    let app = push_estargz(&space, &name("trusted/app"), "app", None);
    let plain = format!("oci:{}", image(&space).folder().display());
    skopeo_copy(&[], &plain, &format!("docker://{}", name("plain"))).unwrap();
    let root = space.make_folder("root");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=32m,mode=700", "full"]).arg(&root);
    assert!(mount.status().unwrap().success());
    let _disk = Mounted::at(&root);
    let trust = format!("{}/trusted/*", registry.address());
    let options = ["--containers", "overlay", "--trust", &trust];
    let mut pods = Pods::start(&space, Version::V2, &name("pause"), &options);
    pods.cri(&["pull", &app.name]).unwrap();
    let pod = pods.run("one", &app.name);
    assert_eq!(pods.exec(&pod, "echo kept > /kept; cat /second /kept").unwrap(), "appkept\n");
    let before = names(&pods.node);
    let mounts = || -> Vec<PathBuf> {
        space.mounts().into_iter().filter(|at| at.starts_with(&root)).collect()
    };
    let mounts_before = mounts();
    let filler = fill(&root);
    // The pod goes on, and its own writes say why they fail.
    let goes_on = |pods: &Pods<'_>| {
        assert_eq!(pods.exec(&pod, "cat /second /kept").unwrap(), "appkept\n");
    };
    goes_on(&pods);
    let refused = pods.exec(&pod, "cat /bin/busybox > /copy").unwrap_err();
    assert!(refused.contains("No space left on device"), "{refused}");
    // Nothing new is made, and each call says why.
    let run = |pods: &Pods<'_>| pods.cri(&["run", "two", &app.name, "/bin/sleep", "100000"]);
    for attempt in 0..2 {
        let pull = |pods: &Pods<'_>| pods.cri(&["pull", &name("plain")]);
        for refused in [run(&pods).unwrap_err(), pull(&pods).unwrap_err()] {
            assert!(refused.contains("No space left on device"), "{attempt}: {refused}");
        }
        goes_on(&pods);
        assert_eq!(names(&pods.node), before);
        assert_eq!(mounts(), mounts_before);
        // A snapshotter that was killed meanwhile comes back.
        pods.node.serve_unprobed(&options);
        goes_on(&pods);
    }
    // A removal needs no space.
    pods.cri(&["remove", &pod.sandbox]).unwrap();
    let is_less = || names(&pods.node).len() < before.len();
    assert!(wait_until(PATIENCE, is_less), "{:?}", names(&pods.node));
    fs::remove_file(filler).unwrap();
    let pod = pods.run("three", &app.name);
    assert_eq!(pods.exec(&pod, "cat /second").unwrap(), "app");
    pods.cri(&["pull", &name("plain")]).unwrap();
    // Nothing is left.
    pods.cri(&["remove", &pod.sandbox]).unwrap();
    for image in [&app.name, &name("plain"), &name("pause")] {
        pods.cri(&["remove-image", image]).unwrap();
    }
    let count = |part: &str| root.join(part).read_dir().unwrap().count();
    let parts = ["records", "snapshots", "chains", "trash"];
    let is_empty = || parts.iter().all(|part| count(part) == 0);
    assert!(wait_until(PATIENCE, is_empty), "{:?}", parts.map(count));
    assert_eq!(space.mounts(), [root.as_path()]);
    burgeon.ok(&["status"]);
}
