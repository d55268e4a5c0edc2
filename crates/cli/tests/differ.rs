//! Differences of containers by our differ, in containerd 2.x: byte for byte those of containerd's
//! own differ, without reading what did not change; and nothing is left of one that fails.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use rustix::{
    fs::{XattrFlags, setxattr},
    mount::{MountFlags, mount},
};
use testkit::{
    Burgeon, Mounted, OciLayout, PATIENCE, Registry, Rng, Space, compare, go_programs, wait_until,
};

use node::{Node, Pushed, SCRIPT, image, pods::PACKAGES, push_estargz_of, without_plugins};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

/// Changes that a differ may get wrong, after those of `SCRIPT`. `cp -p` makes a file anew that is
/// equal to the one of the image, and `chown` touches a large one without changing it.
const MORE: &str = "cd /more; busybox chown 0:0 large only-chowned; busybox chmod 4711 program; \
    busybox cp -p equal /tmp-equal; rm equal; busybox mv /tmp-equal equal; \
    rm typed; mkdir typed; echo x > typed/x; rm -r folder; echo file > folder; \
    mkdir -p deep/$N/$N/$N; echo x > deep/$N/$N/$N/x; echo x > $N$N; echo x > 'ä ö'; \
    ln -s /$N/$N/$N link; ln large third; ln new-link-target 2> /dev/null; rm removed-link; \
    rm -r gone; mkdir gone; mkdir gone/kept; busybox truncate -s 3000000 sparse; \
    busybox touch -d '1965-01-01 00:00:00' old-time; echo x >> appended; echo y > same-size; \
    busybox mknod device c 1 7; busybox mkfifo fifo; mkdir empty-new; busybox mv moved-folder renamed";

/// A name of 60 bytes.
const NAME: &str = "a-name-of-sixty-bytes-which-makes-a-path-too-long-for-ustar-";

fn script() -> String {
    format!("{SCRIPT}; N={NAME}; {MORE}; true")
}

/// The image of other tests, and files for all of it.
fn rich_image(space: &Space) -> OciLayout {
    let layout = image(space);
    let more = |root: &Path| {
        let more = root.join("more");
        for folder in ["folder/below", "gone/kept/below", "moved-folder/below", "untouched"] {
            fs::create_dir_all(more.join(folder)).unwrap();
        }
        for name in ["large", "untouched/large", "only-chowned"] {
            fs::write(more.join(name), Rng::new(name.len() as u64).bytes(4_000_000)).unwrap();
        }
        for name in [
            "equal",
            "typed",
            "program",
            "appended",
            "same-size",
            "removed-link",
            "gone/x",
            "gone/kept/y",
            "moved-folder/below/z",
        ] {
            fs::write(more.join(name), "x\n").unwrap();
        }
        fs::hard_link(more.join("large"), more.join("linked")).unwrap();
        fs::hard_link(more.join("untouched/large"), more.join("untouched/linked")).unwrap();
        fs::hard_link(more.join("same-size"), more.join("untouched/other-link")).unwrap();
        fs::hard_link(more.join("removed-link"), more.join("untouched/kept-link")).unwrap();
        setxattr(more.join("large"), "user.kind", b"any\0byte", XattrFlags::empty()).unwrap();
        let run = |program: &str, words: &[&str]| {
            assert!(
                Command::new(program).current_dir(root).args(words).status().unwrap().success()
            );
        };
        run("setcap", &["cap_net_raw+ep", "more/program"]);
        // eStargz has no parts of a second.
        run("find", &[".", "-depth", "-exec", "touch", "-hd", "@1600000000", "{}", "+"]);
    };
    layout.change(more).unwrap();
    layout
}

/// The configuration of a containerd 2.x whose differs are these.
fn configure(space: &Space, differs: &str) {
    let folder = space.folder().display();
    let plugins = [
        "io.containerd.grpc.v1.cri",
        "io.containerd.cri.v1.images",
        "io.containerd.cri.v1.runtime",
    ];
    let text = without_plugins(space, 3, &plugins);
    let differs = format!(
        r#"[proxy_plugins.burgeon-diff]
  type = "diff"
  address = "{folder}/s.sock"
[plugins."io.containerd.service.v1.diff-service"]
  default = [{differs}]
"#
    );
    fs::write(space.path("containerd.toml"), text + &differs).unwrap();
}

const OURS: &str = "\"burgeon-diff\", \"walking\"";
const THEIRS: &str = "\"walking\"";

fn start<'a>(space: &'a Space, options: &[&str]) -> Node<'a> {
    configure(space, OURS);
    let programs = go_programs("containerd", &PACKAGES);
    let namespace = format!("differ-{}", space.folder().file_name().unwrap().to_str().unwrap());
    Node::configured(space, namespace, space.path("containerd.toml"), Some(programs), options)
}

/// Has the other differs from now on.
fn restart(node: &mut Node<'_>, differs: &str) {
    configure(node.space, differs);
    node.start_containerd();
}

/// The archive of a container's changes, unpacked.
fn archive(node: &Node<'_>, media_type: &str, epoch: Option<&str>) -> Vec<u8> {
    let packed = node.space.path("diff");
    let mut diff = node.ctr_command(&["snapshots", "--snapshotter", "burgeon", "diff"]);
    diff.args(["--media-type", media_type, "burgeon"]);
    diff.envs(epoch.map(|epoch| ("SOURCE_DATE_EPOCH", epoch)));
    diff.stdout(fs::File::create(&packed).unwrap());
    assert!(diff.status().unwrap().success(), "{}", log(node));
    let unpack = |program: &str| Command::new(program).arg("-dc").arg(&packed).output().unwrap();
    match media_type {
        GZIP => unpack("gzip").stdout,
        ZSTD => unpack("zstd").stdout,
        _ => fs::read(packed).unwrap(),
    }
}

fn log(node: &Node<'_>) -> String {
    fs::read_to_string(node.space.path("s.log")).unwrap()
}

/// Differences that our differ has written.
fn written(node: &Node<'_>) -> usize {
    log(node).matches("wrote a difference").count()
}

/// The entries of an archive, with their times.
fn listed(node: &Node<'_>, archive: &[u8]) -> String {
    let path = node.space.path("listed.tar");
    fs::write(&path, archive).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--full-time", "--numeric-owner", "-tvf"]).arg(&path);
    String::from_utf8_lossy(&tar.output().unwrap().stdout).into_owned()
}

/// Bytes of the image that are not local.
fn absent(burgeon: &Burgeon) -> u64 {
    let status = burgeon.status();
    let mounts = status["mounts"].as_array().unwrap().iter();
    let of = |mount: &serde_json::Value, key: &str| mount[key].as_u64().unwrap();
    mounts.map(|mount| of(mount, "data_bytes") - of(mount, "materialised_bytes")).min().unwrap()
}

fn push(space: &Space, registry: &Registry) -> Pushed {
    let name = format!("{}/team/app:1", registry.address());
    push_estargz_of(space, &rich_image(space), &name, "rich", None)
}

/// The changes of a container of this form are those that containerd's differ finds in it, and cost
/// no fetch.
fn equals_containerds(form: &str) {
    let space = Space::new(&format!("differ-{form}"));
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let app = push(&space, &registry);
    let mut node = start(&space, &["--containers", form, "--trust", "*"]);
    node.pull(&app.name).unwrap();
    let run = |node: &Node<'_>, snapshotter: &str| {
        let words = ["run", "--snapshotter", snapshotter, &app.name, snapshotter];
        node.ctr(&[&words[..], &["/bin/sh", "-c", &script()]].concat()).unwrap();
    };
    run(&node, "burgeon");
    assert!(node.kinds().contains(&form.to_owned()), "{:?}", node.snapshots());
    // A file with a new name is read. Overlayfs has copied the one whose owner was set, and so
    // fetched it.
    let ours = archive(&node, PLAIN, None);
    let before = absent(&burgeon);
    let untouched = if form == "native" { 2 } else { 1 };
    assert!(before >= untouched * 4_000_000, "a difference fetched data of the image: {before}");
    for media_type in [GZIP, ZSTD, GZIP] {
        assert!(archive(&node, media_type, None) == ours, "{media_type}");
    }
    let bounded = archive(&node, GZIP, Some("1610000000"));
    assert!(bounded != ours);
    restart(&mut node, THEIRS);
    let theirs = archive(&node, GZIP, None);
    if ours != theirs {
        let [ours, theirs] = [&ours, &theirs].map(|archive| listed(&node, archive));
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(lines(&ours), lines(&theirs));
    }
    assert!(ours == theirs, "the archives differ in what tar does not show");
    assert!(archive(&node, GZIP, Some("1610000000")) == bounded, "the latest time counts");
    assert!(absent(&burgeon) < before - 3_000_000, "containerd's differ reads the image");
    assert_eq!(written(&node), 5);
    // The same script on overlayfs, but for the times of new files.
    restart(&mut node, OURS);
    node.ctr(&["images", "pull", "--plain-http", "--snapshotter", "overlayfs", &app.name]).unwrap();
    run(&node, "overlayfs");
    let entries = node.diff("overlayfs", "overlayfs").0;
    assert!(entries.len() > 40, "{entries:?}");
    assert_eq!(written(&node), 5, "a snapshot of overlayfs is not ours");
    // A native container's files keep their names together, and overlayfs takes them apart: the
    // others of a changed or linked file come along.
    let is_linked =
        |line: &&String| ["more/linked", "more/untouched/"].iter().any(|it| line.contains(it));
    let own = node.diff("burgeon", "burgeon").0;
    let (linked, own): (Vec<_>, Vec<_>) = own.iter().partition(is_linked);
    assert_eq!(linked.len(), if form == "native" { 3 } else { 0 }, "{linked:?}");
    assert_eq!(own, entries.iter().collect::<Vec<_>>());
}

#[test]
fn an_overlay_containers_changes_are_those_of_containerds_differ_and_cost_no_fetch() {
    equals_containerds("overlay");
}

#[test]
fn a_native_containers_changes_are_those_of_containerds_differ_and_cost_no_fetch() {
    equals_containerds("native");
}

/// A difference of a large file that is being written.
fn begun(node: &Node<'_>) -> Child {
    let words = ["snapshots", "--snapshotter", "burgeon", "diff", "large"];
    let mut command = node.ctr_command(&words);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    assert!(wait_until(PATIENCE, || is_written(node)), "{}", log(node));
    child
}

/// True if the content store has an unfinished blob of ours.
fn is_written(node: &Node<'_>) -> bool {
    node.ctr(&["content", "active"]).is_ok_and(|said| said.contains("burgeon-diff"))
}

#[test]
fn nothing_is_left_of_a_difference_that_fails() {
    let space = Space::new("differ-fails");
    let _burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let app = push(&space, &registry);
    // A small disk for containerd.
    let root = space.make_folder("containerd");
    mount("small", &root, "tmpfs", MountFlags::empty(), Some(c"size=64m")).unwrap();
    let _disk = Mounted::at(&root);
    let mut node = start(&space, &["--containers", "overlay", "--trust", "*"]);
    node.pull(&app.name).unwrap();
    let run = |node: &Node<'_>, name: &str, script: &str| {
        let words = ["run", "--snapshotter", "burgeon", &app.name, name, "/bin/sh", "-c", script];
        node.ctr(&words).unwrap();
    };
    run(&node, "small", "echo x > /new");
    run(&node, "large", "busybox dd if=/dev/urandom of=/large bs=1M count=150");
    let diff = |node: &Node<'_>, words: &[&str]| {
        let diff = ["snapshots", "--snapshotter", "burgeon", "diff"];
        node.ctr(&[&diff[..], words].concat()).map(drop)
    };
    let blobs = |node: &Node<'_>| node.ctr(&["content", "ls", "-q"]).unwrap();
    let before = blobs(&node);
    // The content store refuses it.
    let label = format!("too-long={}", "x".repeat(5000));
    let refused = diff(&node, &["--label", &label, "small"]).unwrap_err();
    assert!(refused.contains("label key and value length"), "{refused}");
    assert!(!is_written(&node));
    // The disk is full.
    let refused = diff(&node, &["large"]).unwrap_err();
    assert!(refused.contains("no space left"), "{refused}");
    assert!(!is_written(&node));
    // The client is gone.
    let mut child = begun(&node);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(wait_until(PATIENCE, || !is_written(&node)), "{}", log(&node));
    assert!(wait_until(PATIENCE, || log(&node).contains("it was cancelled")), "{}", log(&node));
    assert_eq!(blobs(&node), before);
    let has_lease = || node.ctr(&["leases", "ls"]).unwrap().contains("burgeon-diff-");
    assert!(wait_until(PATIENCE, || !has_lease()), "a lease is left");
    // containerd dies: a lease keeps what it has, and ends.
    let mut child = begun(&node);
    node.start_containerd();
    assert!(!child.wait().unwrap().success());
    let failed = || log(&node).matches("a difference failed").count() == 4;
    assert!(wait_until(PATIENCE, failed), "{}", log(&node));
    let leases = node.ctr(&["leases", "ls"]).unwrap();
    assert!(leases.contains("containerd.io/gc.expire="), "{leases}");
    for lease in leases.split_whitespace().filter(|word| word.starts_with("burgeon-diff-")) {
        node.ctr(&["leases", "rm", "--sync", lease]).unwrap();
    }
    assert!(wait_until(PATIENCE, || !is_written(&node)));
    assert_eq!(written(&node), 0);
    diff(&node, &["small"]).unwrap();
    assert_eq!(written(&node), 1);
    // A form of a layer that the kernel alone understands.
    let snapshots = space.path("root/snapshots").read_dir().unwrap();
    let mut files = snapshots.map(|entry| entry.unwrap().path().join("fs/new"));
    let file = files.find(|path| path.exists()).expect("the file of the small container");
    let folder = file.with_file_name("dev");
    let opaque = c"trusted.overlay.opaque";
    setxattr(&folder, opaque, b"x", XattrFlags::empty()).unwrap();
    diff(&node, &["small"]).unwrap();
    assert_eq!(written(&node), 1);
    rustix::fs::removexattr(&folder, opaque).unwrap();
    // Without our content store, or without us, containerd's own differ is used, or the error says
    // what is missing.
    node.serve(&["--containers", "overlay", "--containerd", "/nonexistent/c.sock"]);
    diff(&node, &["small"]).unwrap();
    assert_eq!(written(&node), 0);
    assert!(log(&node).contains("containerd's own differ is used"), "{}", log(&node));
    let other = space.path("other.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&other).unwrap();
    node.serve(&["--containers", "overlay", "--containerd", other.to_str().unwrap()]);
    diff(&node, &["small"]).unwrap();
    let process = format!("it is of process {}", std::process::id());
    assert!(log(&node).contains(&process), "{}", log(&node));
    node.snapshotter = None;
    let refused = diff(&node, &["small"]).unwrap_err();
    assert!(refused.contains("navailable") || refused.contains("connection refused"), "{refused}");
}

#[test]
fn a_committed_container_is_the_same_on_another_node() {
    let space = Space::new("differ-commit");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let app = push(&space, &registry);
    let node = start(&space, &["--containers", "native", "--trust", "*"]);
    node.pull(&app.name).unwrap();
    let words = ["run", "--snapshotter", "burgeon", &app.name, "one", "/bin/sh", "-c"];
    // Without what layers of containerd cannot hold: holes, old times, attributes of users.
    let script = format!("{SCRIPT}; cd /more; rm -r gone; mkdir gone; rm typed; mkdir typed; true");
    node.ctr(&[&words[..], &[&script]].concat()).unwrap();
    let native = node.snapshots().into_iter().find(|one| one["kind"] == "native").unwrap();
    let container = space.path(&format!("root/chains/{}", native["id"]));
    // Layers have no parts of a second.
    let mut whole = Command::new("find");
    whole.arg(&container).args(["-xdev", "-newermt", "@1650000000", "-depth"]);
    whole.args(["-exec", "touch", "-hd", "@1700000000", "{}", "+"]);
    assert!(whole.status().unwrap().success());
    let committed = format!("{}/team/committed:1", registry.address());
    node.commit("one", &app.name, &committed).unwrap();
    assert_eq!(written(&node), 1, "{}", log(&node));
    assert!(!node.has_fetched(&app), "a commit needs no remote layer");
    let (root, socket) = (space.path("root"), space.path("c.sock"));
    let mut fetch = vec!["--json", "snapshotter", "fetch", &committed];
    fetch.extend(["--namespace", &node.namespace]);
    fetch.extend(["--root", root.to_str().unwrap(), "--address", socket.to_str().unwrap()]);
    burgeon.ok(&fetch);
    node.ctr(&["images", "push", "--plain-http", &committed]).unwrap();
    // Another node unpacks it, by containerd's own differ.
    let space = Space::new("differ-commit-other");
    let _burgeon = Burgeon::new(PROGRAM, &space);
    let mut other = start(&space, &[]);
    other.pull(&committed).unwrap();
    let kinds = other.kinds();
    assert!(kinds.iter().all(|kind| kind == "local"), "{kinds:?}");
    let top = other.snapshots().into_iter().max_by_key(|one| one["id"].as_u64()).unwrap();
    let copy =
        other.mounted("burgeon", "copy", top["name"].as_str().unwrap().rsplit('/').next().unwrap());
    let mut touch = Command::new("touch");
    touch.args(["-d", "@1"]).args([container.as_path(), copy.path()]);
    assert!(touch.status().unwrap().success());
    compare(&container, copy.path()).unwrap().assert_same();
    // The transfer service unpacks for other snapshotters also while none of ours serves.
    other.snapshotter = None;
    let pull = ["images", "pull", "--plain-http", "--snapshotter", "overlayfs", &app.name];
    other.ctr(&pull).unwrap();
}
