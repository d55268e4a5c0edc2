//! Pods by calls of CRI, as a kubelet makes them: lazy, equal to those on overlayfs, and alive
//! after the death of each process; nothing is left of them in the end.

#![allow(clippy::unwrap_used)]

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command, time::Duration};

use rustix::fs::{XattrFlags, setxattr};
use testkit::{
    Burgeon, Link, Mounted, OciLayout, PATIENCE, Registry, Rng, Space, compare, drop_caches,
    loop_devices, wait_until,
};

use node::{
    Pushed, SCRIPT, chain_of, image,
    pods::{Pod, Pods, Version, push_pause},
    push_estargz_of,
};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Paths on which runtimes mount something of theirs, in each container.
const MOUNT_POINTS: [&str; 7] =
    ["dev/", "proc/", "sys/", "run/", "etc/hosts", "etc/hostname", "etc/resolv.conf"];

/// The image of other tests, with more kinds of files and a layer that hides some of them.
fn rich_image(space: &Space) -> OciLayout {
    let layout = image(space);
    let find = |root: &Path, words: &[&str]| {
        assert!(Command::new("find").current_dir(root).args(words).status().unwrap().success());
    };
    let more = |root: &Path| {
        let folder = root.join("more");
        fs::create_dir_all(folder.join("hidden/below")).unwrap();
        fs::create_dir(folder.join("empty")).unwrap();
        fs::write(folder.join("large"), Rng::new(1).bytes(8_000_000)).unwrap();
        setxattr(folder.join("large"), "user.kind", b"any\0byte", XattrFlags::empty()).unwrap();
        fs::write(folder.join("hidden/below/file"), "hidden").unwrap();
        for (name, words) in [("program", "4755"), ("secret", "0400")] {
            fs::write(folder.join(name), name).unwrap();
            find(&folder, &[name, "-exec", "chown", "1234:567", "{}", ";"]);
            find(&folder, &[name, "-exec", "chmod", words, "{}", ";"]);
        }
        find(&folder, &["program", "-exec", "setcap", "cap_net_raw+ep", "{}", ";"]);
        let mut fifo = Command::new("mkfifo");
        fifo.args(["-m", "620"]).arg(folder.join("empty/pipe"));
        assert!(fifo.status().unwrap().success());
        fs::hard_link(folder.join("large"), folder.join("linked")).unwrap();
        std::os::unix::fs::symlink("../etc/changed", folder.join("symlink")).unwrap();
        // eStargz has no parts of a second.
        find(root, &[".", "-depth", "-exec", "touch", "-hd", "@1600000000", "{}", "+"]);
    };
    layout.change(more).unwrap();
    let hide = |root: &Path| {
        fs::remove_dir_all(root.join("more/hidden")).unwrap();
        fs::create_dir(root.join("more/hidden")).unwrap();
        fs::write(root.join("more/hidden/new"), "new").unwrap();
        fs::remove_file(root.join("more/secret")).unwrap();
        find(root, &[".", "-depth", "-exec", "touch", "-hd", "@1700000000", "{}", "+"]);
    };
    layout.change(hide).unwrap();
    layout
}

/// Changes without what runtimes made for their own mounts.
fn without_mount_points((lines, data): (Vec<String>, String)) -> (Vec<String>, String) {
    let is_theirs =
        |line: &String| MOUNT_POINTS.iter().any(|path| line.ends_with(&format!(" {path}")));
    (lines.into_iter().filter(|line| !is_theirs(line)).collect(), data)
}

/// Digests of all files that the container sees in its root, read from the disk.
fn sums(pods: &Pods<'_>, pod: &Pod) -> Vec<String> {
    drop_caches();
    let script = "busybox find / -xdev -type f -exec busybox md5sum {} +";
    let said = pods.exec(pod, script).unwrap();
    let mut lines: Vec<_> = said.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Every process dies once, alone and with the others. The container goes on, and has its files as
/// soon as the processes are back.
fn survives(pods: &mut Pods<'_>, burgeon: &Burgeon, pod: &Pod, options: &[&str]) {
    let before = sums(pods, pod);
    assert!(before.iter().any(|line| line.ends_with("/more/large")), "{before:?}");
    let goes_on = |pods: &Pods<'_>| assert_eq!(pods.exec(pod, "echo on").unwrap(), "on\n");
    pods.node.snapshotter = None;
    goes_on(pods);
    pods.node.serve(options);
    assert_eq!(sums(pods, pod), before);
    let server = burgeon.status()["server_pid"].as_u64().unwrap();
    testkit::kill(u32::try_from(server).unwrap());
    assert_eq!(sums(pods, pod), before);
    burgeon.kill_both();
    burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(sums(pods, pod), before);
    pods.restart_containerd();
    goes_on(pods);
    burgeon.kill_both();
    pods.restart_both(options);
    burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(sums(pods, pod), before);
}

/// The way of containerd 2.x with an eStargz image over a slow link, with containers of this form.
fn accepts(form: &str) {
    let space = Space::new(&format!("pods-{form}"));
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let link = Link::new(registry.address(), Duration::from_millis(10), 25 << 20).unwrap();
    let name = |image: &str| format!("{}/{image}:1", link.address());
    push_pause(&space, &name("pause"));
    let app = push_estargz_of(&space, &rich_image(&space), &name("app"), "rich", None);
    let options = ["--containers", form, "--trust", "*"];
    let mut pods = Pods::start(&space, Version::V2, &name("pause"), &options);
    pods.cri(&["pull", &app.name]).unwrap();
    assert_eq!(pods.node.kinds(), ["remote"; 4], "{:?}", pods.node.snapshots());
    let pod = pods.run("one", &app.name);
    assert!(!pods.node.has_fetched(&app), "a layer was fetched");
    assert!(pods.node.kinds().contains(&form.to_owned()), "{:?}", pods.node.snapshots());
    equals_overlayfs(&mut pods, &app, &pod);
    survives(&mut pods, &burgeon, &pod, &options);
    // Nothing is left: no mount, loop device, record or byte.
    pods.cri(&["remove", &pod.sandbox]).unwrap();
    pods.cri(&["remove-image", &app.name]).unwrap();
    pods.cri(&["remove-image", &name("pause")]).unwrap();
    let root = |part: &str| space.path("root").join(part).read_dir().unwrap().count();
    let is_empty = || pods.node.snapshots().is_empty() && root("chains") + root("trash") == 0;
    let is_gone = wait_until(PATIENCE, || is_empty() && root("snapshots") == 0);
    assert!(is_gone, "{:?}, {} chains", pods.node.kinds(), root("chains"));
    assert_eq!(space.mounts(), [] as [&Path; 0]);
    let loops = || loop_devices().into_iter().any(|one| one.backing.starts_with(space.folder()));
    assert!(wait_until(PATIENCE, || !loops()), "{:?}", loop_devices());
    let writes = burgeon.ok(&["--json", "writes", "list"]);
    assert!(writes.contains("\"writes\":[]") || writes.contains("\"writes\": []"), "{writes}");
    // The differences that were made stay for their client as long as their leases.
    let leases = pods.node.ctr(&["leases", "ls", "-q"]).unwrap();
    let ours: Vec<_> = leases.lines().filter(|lease| lease.starts_with("burgeon-diff-")).collect();
    assert_eq!(ours.len(), 1, "{leases}");
    pods.node.ctr(&["leases", "rm", "--sync", ours[0]]).unwrap();
    let content = pods.node.ctr(&["content", "ls", "-q"]).unwrap();
    assert_eq!(content, "", "containerd keeps blobs");
}

/// The tree of a new container and the changes of one are those that overlayfs has.
fn equals_overlayfs(pods: &mut Pods<'_>, app: &Pushed, pod: &Pod) {
    let chain = chain_of(&app.diff_ids);
    let of_pods = std::mem::replace(&mut pods.node.namespace, "reference".to_owned());
    let pull = ["images", "pull", "--plain-http", "--snapshotter", "overlayfs", &app.name];
    pods.node.ctr(&pull).unwrap();
    let original = pods.node.mounted("overlayfs", "original", &chain);
    let options = ["run", "--snapshotter", "overlayfs", &app.name, "changed"];
    pods.node.ctr(&[&options[..], &["/bin/sh", "-c", SCRIPT]].concat()).unwrap();
    let changes = without_mount_points(pods.node.diff("overlayfs", "changed"));
    assert!(changes.0.len() > 12, "{changes:?}");
    let of_reference = std::mem::replace(&mut pods.node.namespace, of_pods);
    let copy = pods.node.mounted("burgeon", "copy", &chain);
    // The root of an overlay has the time of its making.
    let mut touch = Command::new("touch");
    touch.args(["-d", "@1"]).args([original.path(), copy.path()]);
    assert!(touch.status().unwrap().success());
    compare(original.path(), copy.path()).unwrap().assert_same();
    pods.exec(pod, SCRIPT).unwrap();
    assert_eq!(without_mount_points(pods.node.diff("burgeon", &pod.container)), changes);
    let remove = |pods: &Pods<'_>, snapshotter: &str, mounted: Mounted, name: &str| {
        drop(mounted);
        pods.node.ctr(&["snapshots", "--snapshotter", snapshotter, "rm", name]).unwrap();
    };
    remove(pods, "burgeon", copy, "copy");
    let of_pods = std::mem::replace(&mut pods.node.namespace, of_reference);
    remove(pods, "overlayfs", original, "original");
    pods.node.ctr(&["containers", "rm", "changed"]).unwrap();
    pods.node.ctr(&["images", "rm", "--sync", &app.name]).unwrap();
    pods.node.namespace = of_pods;
}

#[test]
fn pods_on_overlay_containers_equal_those_of_overlayfs_and_leave_nothing() {
    accepts("overlay");
}

#[test]
fn pods_on_native_containers_equal_those_of_overlayfs_and_leave_nothing() {
    accepts("native");
}

#[test]
fn a_pod_of_debians_containerd_is_lazy_and_leaves_nothing() {
    let space = Space::new("pods-debian");
    let _burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = |image: &str| format!("{}/{image}:1", registry.address());
    push_pause(&space, &name("pause"));
    let app = push_estargz_of(&space, &image(&space), &name("app"), "small", None);
    let pods = Pods::start(&space, Version::V1, &name("pause"), &["--trust", "*"]);
    pods.cri(&["pull", &app.name]).unwrap();
    let pod = pods.run("one", &app.name);
    assert!(!pods.node.has_fetched(&app), "a layer was fetched");
    assert!(pods.node.kinds().contains(&"overlay".to_owned()), "{:?}", pods.node.snapshots());
    assert_eq!(pods.exec(&pod, "cat /second").unwrap(), "layer");
    pods.cri(&["remove", &pod.sandbox]).unwrap();
    for image in ["app", "pause"] {
        pods.cri(&["remove-image", &name(image)]).unwrap();
    }
    let is_empty = || pods.node.snapshots().is_empty() && space.mounts().is_empty();
    assert!(wait_until(PATIENCE, is_empty), "{:?}", pods.node.snapshots());
}

/// containerd maps the ids of the mounts itself: nothing is copied, and the container owns its
/// files.
#[test]
fn a_container_with_users_of_its_own_owns_the_files_of_its_image() {
    let space = Space::new("pods-users");
    let _burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = |image: &str| format!("{}/{image}:1", registry.address());
    let app = push_estargz_of(&space, &rich_image(&space), &name("app"), "rich", None);
    let options = |form| ["--containers", form, "--trust", "*"];
    let mut pods = Pods::start(&space, Version::V2, &name("pause"), &options("overlay"));
    pods.node.namespace = format!("users-{}", std::process::id());
    pods.node.pull(&app.name).unwrap();
    let owners = "busybox stat -c %u:%g:%a / /etc/owned /more/program /more/large";
    let script = format!("{owners}; echo mine > /new && busybox stat -c %u:%g /new; cat /new");
    // Not by containerd's pipes: two seconds after the end it gives up what they still hold.
    let folder = space.make_folder("said");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let bound = format!("type=bind,src={},dst=/dev/said,options=rbind:rw", folder.display());
    for form in ["overlay", "native"] {
        pods.node.serve(&options(form));
        let maps = ["--remap-labels", "--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"];
        let run = ["run", "--snapshotter", "burgeon"];
        let script = format!("{{ {script}; }} > /dev/said/{form}");
        let words = ["--mount", &bound, &app.name, form, "/bin/sh", "-c", &script];
        pods.node.ctr(&[&run[..], &maps, &words].concat()).unwrap();
        let said = fs::read_to_string(folder.join(form)).unwrap();
        let expected = "0:0:755\n0:0:644\n1234:567:4755\n0:0:644\n0:0\nmine\n";
        assert_eq!(said, expected, "{form}");
        assert!(pods.node.kinds().contains(&form.to_owned()), "{:?}", pods.node.snapshots());
        pods.node.ctr(&["containers", "rm", form]).unwrap();
    }
    assert!(!pods.node.has_fetched(&app), "a layer was fetched");
}
