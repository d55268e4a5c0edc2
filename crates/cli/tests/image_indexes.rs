//! Images that containerd has unpacked get an index in the background, and are lazy at their next
//! pull: in Debian's containerd, with `burgeon snapshotter`.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::ErrorKind,
    net::{Ipv4Addr, TcpListener},
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::Stdio,
    thread,
};

use serde_json::Value;
use testkit::{Burgeon, OciLayout, PATIENCE, Registry, Space, skopeo_copy, wait_until};

use node::{Node, image};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The digests of the layers of a layout's only image.
fn layers(layout: &OciLayout) -> Vec<String> {
    let index = read(&layout.folder().join("index.json"));
    let hex = |digest: &Value| digest.as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
    let manifest = layout.folder().join("blobs/sha256").join(hex(&index["manifests"][0]["digest"]));
    read(&manifest)["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| hex(&layer["digest"]))
        .collect()
}

/// The files below `folder` that are named by one of these digests, or in a folder that is.
fn files_of(folder: &Path, digests: &[String]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_one = |path: &Path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            digests.contains(&name)
        };
        match path.is_dir() {
            true => found.extend(files_of(&path, digests)),
            false if is_one(&path) || is_one(folder) => found.push(path),
            false => {}
        }
    }
    found
}

struct Set {
    config: PathBuf,
}

impl Set {
    fn configure(&self, lines: &str) {
        let new = self.config.with_extension("new");
        fs::write(&new, format!("[snapshotter]\n{lines}\n")).unwrap();
        fs::rename(new, &self.config).unwrap();
    }
}

fn indexes(burgeon: &Burgeon, space: &Space) -> Vec<Value> {
    let root = space.path("root");
    let words = ["--json", "snapshotter", "status", "--root", root.to_str().unwrap()];
    let shown: Value = serde_json::from_str(&burgeon.ok(&words)).unwrap();
    shown["indexes"].as_array().unwrap().clone()
}

#[test]
fn a_plain_image_is_lazy_at_its_second_pull() {
    let space = Space::new("image-indexes");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = format!("{}/team/app:1", registry.address());
    let layout = image(&space);
    let from = format!("oci:{}", layout.folder().display());
    skopeo_copy(&["--preserve-digests"], &from, &format!("docker://{name}")).unwrap();
    let set = Set { config: space.path("burgeon.toml") };
    set.configure("index = false");
    let content = space.path("containerd/io.containerd.content.v1.content");
    let options = [
        "--containers",
        "overlay",
        "--config",
        set.config.to_str().unwrap(),
        "--content-store",
        content.to_str().unwrap(),
    ];
    let mut node = Node::start(&space, &options);
    let is_empty = |node: &Node<'_>| wait_until(PATIENCE, || node.snapshots().is_empty());
    let remove = |node: &Node<'_>| {
        node.ctr(&["images", "rm", "--sync", &name]).unwrap();
        assert!(is_empty(node), "{:?}", node.snapshots());
    };
    node.pull(&name).unwrap();
    assert_eq!(node.kinds(), ["local", "local"]);
    // A limit is told. The next change is when another image goes.
    set.configure("index-min = \"1G\"");
    let again = |node: &Node<'_>| {
        let snapshots = |words: &[&str]| {
            node.ctr(&[&["snapshots", "--snapshotter", "burgeon"][..], words].concat()).unwrap();
        };
        snapshots(&["prepare", "key"]);
        let label = format!("containerd.io/snapshot/cri.manifest-digest=sha256:{:064}", 1);
        snapshots(&["label", "key", &label]);
        snapshots(&["rm", "key"]);
    };
    again(&node);
    let state = |is: &str| {
        let has = || indexes(&burgeon, &space).iter().any(|index| index["state"] == is);
        assert!(wait_until(PATIENCE, has), "{is}: {:?}", indexes(&burgeon, &space));
        indexes(&burgeon, &space).remove(0)
    };
    let why = state("left-out")["why"].to_string();
    assert!(why.contains("index-min"), "{why}");
    // Another process looks at the limits anew. The layers come from containerd: the registry has
    // lost them for a while.
    let layers = layers(&layout);
    let lost = files_of(&space.path("registry"), &layers);
    assert!(lost.len() >= layers.len(), "{lost:?}");
    let data: Vec<_> = lost.iter().map(|path| fs::read(path).unwrap()).collect();
    lost.iter().for_each(|path| fs::remove_file(path).unwrap());
    set.configure("index-min = 0");
    node.serve(&options);
    again(&node);
    let made = state("made");
    assert!(made["image"] == name.as_str() && made["bytes"].as_u64().unwrap() > 0, "{made}");
    for (path, data) in lost.iter().zip(data) {
        fs::write(path, data).unwrap();
    }
    // It outlives the image, and makes the next pull lazy, without trust.
    remove(&node);
    let is_unused = || indexes(&burgeon, &space)[0]["used"] == false;
    assert!(wait_until(PATIENCE, is_unused));
    node.pull(&name).unwrap();
    assert_eq!(node.kinds(), ["remote", "remote"], "{:?}", node.snapshots());
    assert!(wait_until(PATIENCE, || indexes(&burgeon, &space)[0]["used"] == true));
    let fetched = node.ctr(&["content", "ls", "-q"]).unwrap();
    assert!(layers.iter().all(|layer| !fetched.contains(layer)), "{fetched}");
    assert_eq!(node.run_in(&name, "first", "cat /second /etc/changed").unwrap(), "layerchanged");
    let root = space.path("root");
    let verified = burgeon.ok(&["snapshotter", "verify", "--root", root.to_str().unwrap()]);
    assert!(verified.ends_with(": verified\n"), "{verified}");
    // Without room it goes with the image, and nothing of it is left in the store; but not while
    // the configuration cannot be read.
    set.configure("index-min = 0\nindex-kept = 0\nindex-max = \"many\"");
    remove(&node);
    let log = || fs::read_to_string(space.path("s.log")).unwrap_or_default();
    let is_told =
        || log().lines().any(|line| line.contains("put off") && line.contains("index-max"));
    assert!(wait_until(PATIENCE, is_told), "{}", log());
    assert_eq!(indexes(&burgeon, &space)[0]["state"], "made");
    set.configure("index-min = 0\nindex-kept = 0");
    again(&node);
    assert!(wait_until(PATIENCE, || indexes(&burgeon, &space).is_empty()));
    for part in ["derived", "origins", "manifests", "images"] {
        let left = || fs::read_dir(space.path("state/store").join(part)).unwrap().count();
        assert_eq!(left(), 0, "{part}");
    }
    // Without containerd's content store the layers are fetched once more.
    let elsewhere = [&options[..4], &["--content-store", "/nonexistent"]].concat();
    node.serve(&elsewhere);
    node.pull(&name).unwrap();
    assert!(node.kinds().iter().all(|kind| kind == "local"), "{:?}", node.snapshots());
    state("made");
    remove(&node);
    assert!(wait_until(PATIENCE, || indexes(&burgeon, &space).is_empty()));
}

#[test]
fn an_index_is_made_at_the_lowest_priority_and_ends_with_the_snapshotter() {
    let space = Space::new("image-indexes-killed");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&space.make_folder("tree"), "sample");
    // A registry that never answers.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let image = format!("oci://{address}/app@sha256:{:064}", 1);
    let words = ["snapshotter", "index", &image];
    // Of nobody who waits for it.
    let typed = burgeon.command(&words).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&typed.stderr).into_owned();
    assert!(!typed.status.success() && said.contains("burgeon index"), "{said}");
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let mut command = burgeon.command(&words);
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    // The thread that has started it ends once it is at work.
    listener.set_nonblocking(true).unwrap();
    let parent = thread::spawn(move || {
        let mut child = command.spawn().unwrap();
        let mut connection = None;
        let asks = || {
            connection = listener.accept().ok();
            connection.is_some() || child.try_wait().unwrap().is_some()
        };
        assert!(wait_until(PATIENCE, asks) && connection.is_some(), "it asks no registry");
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let nice = stat.rsplit(')').next().unwrap().split_whitespace().nth(16).unwrap().to_owned();
        (child, nice, connection.unwrap().0)
    });
    let (mut child, nice, mut asked) = parent.join().unwrap();
    assert_eq!(nice, "19");
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    // The process that reads the registry ends with it.
    asked.set_nonblocking(false).unwrap();
    asked.set_read_timeout(Some(PATIENCE)).unwrap();
    match std::io::copy(&mut asked, &mut std::io::sink()) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
        _ => {}
    }
}
