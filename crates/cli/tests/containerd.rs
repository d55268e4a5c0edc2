//! Debian's containerd with `burgeon snapshotter`: images and containers as with its own overlayfs.

#![allow(clippy::unwrap_used)]

use std::{fs, process::Command};

use testkit::{Burgeon, PATIENCE, Registry, Space, skopeo_copy, wait_until};

use node::{IMAGE, Node, SCRIPT, image, push_estargz};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// An archive of it.
fn archive(space: &Space) -> String {
    let layout = image(space);
    let archive = space.path("image.tar");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(layout.folder()).arg("-cf").arg(&archive).arg(".");
    assert!(tar.status().unwrap().success());
    archive.display().to_string()
}

#[test]
fn containers_run_change_and_go_as_on_overlayfs() {
    let space = Space::new("containerd");
    let archive = archive(&space);
    let mut node = Node::start(&space, &[]);
    let base = IMAGE.rsplit_once(':').unwrap().0;
    for snapshotter in ["burgeon", "overlayfs"] {
        let import = ["images", "import", "--snapshotter", snapshotter, "--base-name", base];
        node.ctr(&[&import[..], &[&archive]].concat()).unwrap();
    }
    assert_eq!(node.run("burgeon", "first", "cat /second /etc/changed"), "layerchanged");
    // The same script, and the same difference.
    let mut diffs = Vec::new();
    for snapshotter in ["burgeon", "overlayfs"] {
        let options = ["run", "--snapshotter", snapshotter, IMAGE, snapshotter];
        node.ctr(&[&options[..], &["/bin/sh", "-c", SCRIPT]].concat()).unwrap();
        diffs.push(node.diff(snapshotter, snapshotter));
        node.ctr(&["containers", "rm", snapshotter]).unwrap();
    }
    let overlayfs = diffs.pop().unwrap();
    assert!(overlayfs.0.len() > 12, "{overlayfs:?}");
    assert_eq!(diffs[0], overlayfs);
    // A running container does not notice that the snapshotter is killed.
    let detached = ["run", "-d", "--snapshotter", "burgeon", IMAGE, "long"];
    node.ctr(&[&detached[..], &["/bin/sleep", "1000"]].concat()).unwrap();
    node.snapshotter = None;
    let exec = ["tasks", "exec", "--exec-id", "e", "long"];
    let said = node.ctr(&[&exec[..], &["/bin/sh", "-c", "echo kept > /kept; cat /kept"]].concat());
    assert_eq!(said.unwrap(), "kept\n");
    let refused = node.ctr(&["run", "--snapshotter", "burgeon", IMAGE, "none", "/bin/sh"]);
    assert!(refused.is_err());
    node.serve(&[]);
    let list = node.ctr(&["snapshots", "--snapshotter", "burgeon", "ls"]).unwrap();
    assert!(list.contains("long"), "{list}");
    assert_eq!(node.run("burgeon", "other", "cat /second"), "layer");
    node.ctr(&["tasks", "rm", "--force", "long"]).unwrap();
    assert!(node.diff("burgeon", "long").1.contains("kept"));
    // Nothing is left once the image is gone.
    node.ctr(&["containers", "rm", "long"]).unwrap();
    node.ctr(&["images", "rm", "--sync", IMAGE]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    let is_empty = |part: &str| space.path("root").join(part).read_dir().unwrap().next().is_none();
    assert!(wait_until(PATIENCE, || is_empty("trash") && is_empty("snapshots")));
}

#[test]
fn layers_of_trusted_repositories_are_mounted_when_a_container_needs_them() {
    let space = Space::new("containerd-lazy");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let image = format!("{}/team/app:1", registry.address());
    let pushed = push_estargz(&space, &image, "layer", None);
    let config = space.path("burgeon.toml");
    fs::write(&config, "[snapshotter]\ntrust = [\"registry.example/*\"]\n").unwrap();
    let options = ["--containers", "overlay", "--config", config.to_str().unwrap()];
    let mut node = Node::start(&space, &options);
    // Not trusted: local layers, and the reason.
    node.pull(&image).unwrap();
    assert_eq!(node.kinds(), ["local", "local"]);
    let why = node.snapshots()[0]["why_local"].to_string();
    assert!(why.contains("/team/app is not trusted"), "{why}");
    node.ctr(&["images", "rm", "--sync", &image]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    // Trusted, from now on: no layer is fetched, and nothing is mounted.
    let trust = format!("[snapshotter]\ntrust = [\"{}/team/*\"]\n", registry.address());
    fs::write(&config, trust).unwrap();
    node.pull(&image).unwrap();
    assert_eq!(node.kinds(), ["remote", "remote"], "{:?}", node.snapshots());
    assert!(!node.has_fetched(&pushed));
    let chains = || space.path("root/chains").read_dir().unwrap().count();
    assert_eq!(chains(), 0);
    // Containers share one mount, which a kill of the snapshotter does not end.
    let run =
        |node: &Node<'_>, name: &str, script: &str| node.run_in(&image, name, script).unwrap();
    assert_eq!(run(&node, "first", "cat /second /etc/changed"), "layerchanged");
    let detached = ["run", "-d", "--snapshotter", "burgeon", &image, "long"];
    node.ctr(&[&detached[..], &["/bin/sleep", "1000"]].concat()).unwrap();
    assert_eq!(chains(), 1);
    assert!(node.kinds().contains(&"overlay".to_owned()), "{:?}", node.snapshots());
    node.serve(&["--containers", "overlay"]);
    let exec = ["tasks", "exec", "--exec-id", "e", "long"];
    let said = node.ctr(&[&exec[..], &["/bin/sh", "-c", "echo x > /new; cat /etc/owned"]].concat());
    assert_eq!(said.unwrap(), "owned");
    assert_eq!(run(&node, "second", "cat /second"), "layer", "a claimed chain needs no trust");
    // The mount is made again when it is missing, without the registry.
    node.ctr(&["tasks", "rm", "--force", "long"]).unwrap();
    let mount = space.path("root/chains").read_dir().unwrap().next().unwrap().unwrap().path();
    burgeon.ok(&["umount", mount.to_str().unwrap()]);
    drop(registry);
    let diff = node.diff("burgeon", "long");
    assert!(diff.0.iter().any(|line| line.ends_with(" new")), "{diff:?}");
    // Nothing is left once the image is gone.
    node.ctr(&["containers", "rm", "long"]).unwrap();
    node.ctr(&["images", "rm", "--sync", &image]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    assert!(wait_until(PATIENCE, || chains() == 0), "a chain is still mounted");
}

#[test]
fn a_chain_is_mounted_from_another_source_when_one_is_away() {
    let space = Space::new("containerd-sources");
    let _burgeon = Burgeon::new(PROGRAM, &space);
    let registries = ["one", "two"].map(|name| Registry::start(&space.path(name), None).unwrap());
    let [one, two] = [0, 1].map(|it: usize| format!("{}/app:1", registries[it].address()));
    push_estargz(&space, &one, "layer", None);
    let copy = format!("oci:{}", space.path("estargz-layer").display());
    skopeo_copy(&["--preserve-digests"], &copy, &format!("docker://{two}")).unwrap();
    let mut node = Node::start(&space, &["--containers", "overlay", "--trust", "*"]);
    node.pull(&one).unwrap();
    // containerd asks again for a chain that another of its namespaces has.
    node.namespace += "-other";
    node.pull(&two).unwrap();
    assert_eq!(node.kinds(), ["remote", "remote"], "{:?}", node.snapshots());
    for snapshot in node.snapshots() {
        let sources = snapshot["sources"].as_array().unwrap();
        let of = |at: usize| sources[at].as_str().unwrap();
        assert_eq!(sources.len(), 2);
        assert!(of(0).contains(&registries[0].address().to_string()), "{sources:?}");
        assert!(of(1).contains(&registries[1].address().to_string()), "{sources:?}");
    }
    let [first, _second] = registries;
    drop(first);
    let said = node.run_in(&two, "container", "cat /second /etc/changed").unwrap();
    assert_eq!(said, "layerchanged");
    let log = fs::read_to_string(space.path("s.log")).unwrap();
    assert!(log.contains("cannot be mounted from here"), "the first source was tried: {log}");
    node.ctr(&["images", "rm", "--sync", &two]).unwrap();
    node.namespace.truncate(node.namespace.len() - "-other".len());
    node.ctr(&["images", "rm", "--sync", &one]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    let chains = || space.path("root/chains").read_dir().unwrap().count();
    assert!(wait_until(PATIENCE, || chains() == 0), "a chain is still mounted");
}

#[test]
fn a_committed_image_is_pushed_once_its_layers_are_fetched() {
    let space = Space::new("containerd-commit");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let image = format!("{}/team/app:1", registry.address());
    let pushed = push_estargz(&space, &image, "layer", None);
    let mut node = Node::start(&space, &["--containers", "overlay", "--trust", "*"]);
    node.pull(&image).unwrap();
    let options = ["run", "--snapshotter", "burgeon", &image, "container"];
    node.ctr(&[&options[..], &["/bin/sh", "-c", SCRIPT]].concat()).unwrap();
    let committed = format!("{}/team/committed:1", registry.address());
    node.commit("container", &image, &committed).unwrap();
    assert!(!node.has_fetched(&pushed), "a commit needs no remote layer");
    let push = |node: &Node<'_>| node.ctr(&["images", "push", "--plain-http", &committed]);
    let refused = push(&node).unwrap_err();
    assert!(refused.contains("not found"), "{refused}");
    let (root, socket) = (space.path("root"), space.path("c.sock"));
    let namespace = node.namespace.clone();
    let fetch = |image: &str| {
        let words = ["--json", "snapshotter", "fetch", image, "--namespace", &namespace];
        let words = words.map(std::ffi::OsString::from).into_iter();
        let more =
            ["--root".into(), root.clone().into(), "--address".into(), socket.clone().into()];
        let said = burgeon.run(&words.chain(more).collect::<Vec<_>>());
        (said.code, said.stdout + &said.stderr)
    };
    let none = fetch("registry.example/none:1");
    assert!(none.0 == Some(3) && none.1.contains("has no image"), "{none:?}");
    let (code, said) = fetch(&committed);
    assert_eq!(code, Some(0), "{said}");
    for layer in &pushed.layers {
        assert!(said.contains(layer), "{said}");
    }
    assert_eq!(fetch(&committed).1.matches("\"digest\"").count(), 0, "all are there now");
    push(&node).unwrap();
    // The registry has all of it, and overlayfs unpacks the same.
    let copy = format!("oci:{}", space.path("copy").display());
    skopeo_copy(&["--preserve-digests"], &format!("docker://{committed}"), &copy).unwrap();
    node.namespace += "-other";
    let pull = ["images", "pull", "--plain-http", "--snapshotter", "overlayfs", &committed];
    node.ctr(&pull).unwrap();
    let script = "cat /second /etc/changed /moved; test ! -e /etc/removed && test ! -e /old/below";
    let said = node.run_image("overlayfs", &committed, "pulled", script);
    assert_eq!(said, "layerchanged\nmoved");
}

#[test]
fn containerd_takes_the_configuration_of_setup() {
    let space = Space::new("containerd-setup");
    let setup = |options: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args([
            "--config",
            "none",
            "--state-dir",
            "/var/lib/burgeon-test",
            "snapshotter",
            "setup",
        ]);
        command.arg("--prefix").arg(space.folder()).args(options).output().unwrap()
    };
    let etc = space.path("etc");
    let said = setup(&["--trust", "registry.example/team/*"]);
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    assert_eq!(said.status.code(), Some(1), "config.toml is missing: {words}");
    assert!(words.contains("imports = "), "{words}");
    assert!(!etc.exists(), "it writes nothing");
    // It would have no effect.
    let refused = setup(&["--containers", "overlay", "--write"]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && words.contains("ExecStart="), "{words}");
    assert!(!etc.exists());
    let said = setup(&["--trust", "registry.example/team/*", "--write"]);
    assert!(said.stderr.is_empty(), "{said:?}");
    let unit = etc.join("systemd/system/burgeon-snapshotter.service.d/trust.conf");
    assert!(fs::read_to_string(&unit).unwrap().contains("--trust registry.example/team/*\n"));
    // Without the option, trust is taken back.
    setup(&["--write"]);
    let text = fs::read_to_string(&unit).unwrap();
    assert!(text.contains(" --state-dir /var/lib/burgeon-test snapshotter"), "{text}");
    assert!(!text.contains("--trust"), "{text}");
    // Imported as an administrator would, at the path that this folder has.
    let config = etc.join("containerd/config.toml");
    let imports = format!("{}/*.toml", etc.join("containerd/conf.d").display());
    fs::write(&config, format!("version = 2\nimports = [\"{imports}\"]\n")).unwrap();
    let mut dump = Command::new("containerd");
    let dump = dump.arg("--config").arg(&config).args(["config", "dump"]).output().unwrap();
    let dump = String::from_utf8(dump.stdout).unwrap();
    let plugin = dump.split("[proxy_plugins.burgeon]").nth(1).unwrap_or_default();
    assert!(plugin.contains("address = \"/run/burgeon/snapshotter.sock\""), "{dump}");
    for line in ["snapshotter = \"burgeon\"", "disable_snapshot_annotations = false"] {
        assert!(dump.lines().any(|other| other.trim() == line), "{line}: {dump}");
    }
    // A section of CRI in config.toml stays in force, and gets its lines from the administrator.
    let section = "[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"own/pause:1\"\n";
    let imports = "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n";
    fs::write(&config, format!("{imports}{section}")).unwrap();
    let said = setup(&["--write"]);
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(words.contains("below [plugins.\"io.containerd.grpc.v1.cri\".containerd]"), "{words}");
    let text = fs::read_to_string(etc.join("containerd/conf.d/burgeon.toml")).unwrap();
    assert!(!text.contains("cri"), "{text}");
    let lines = "  [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n    snapshotter = \"burgeon\"\n    \
                 disable_snapshot_annotations = false\n";
    fs::write(&config, format!("{imports}{section}{lines}")).unwrap();
    let said = setup(&[]);
    assert!(!String::from_utf8_lossy(&said.stdout).contains("below [plugins"), "{said:?}");
}

#[test]
fn setup_gives_a_cache_a_floor_that_kubelet_would_notice() {
    let space = Space::new("containerd-floor");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let prefix = space.make_folder("prefix");
    let floor = prefix.join("etc/burgeon/config.d/kubelet.toml");
    let config = space.path("config.toml");
    let setup = |keep_free: &str| {
        fs::write(&config, format!("[cache]\nkeep-free = \"{keep_free}\"\n")).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("--config").arg(&config).args(["--state-dir", "/var/lib/burgeon-test"]);
        command.args(["snapshotter", "setup", "--write", "--prefix"]).arg(&prefix);
        let output = command.output().unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(!setup("30%").contains("kubelet.toml") && !floor.exists(), "it has a higher floor");
    assert!(setup("5%").contains("burgeon upgrade"));
    let text = fs::read_to_string(&floor).unwrap();
    assert!(text.contains("\n[cache]\nkeep-free = \"25%\"\n"), "{text}");
    // It is a file of the configuration, and stays.
    let show = ["--json", "config", "show"].map(std::ffi::OsStr::new);
    let shown = Command::new(PROGRAM).arg("--config").arg(&floor).args(show).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("25%"), "{shown:?}");
    assert!(setup("30%").contains("kubelet.toml"));
    // A floor that was set by hand counts more, as that of the tests does, and is a problem.
    let prefix = ["snapshotter", "setup", "--prefix", prefix.to_str().unwrap()];
    let said = burgeon.run(&prefix);
    assert!(
        said.code == Some(1) && said.stdout.contains("cache resize --keep-free 25%"),
        "{said:?}"
    );
    fs::write(burgeon.state().join("cache.json"), r#"{"keep_free":{"percent":25}}"#).unwrap();
    let said = burgeon.run(&prefix);
    assert!(!said.stdout.contains("cache resize"), "{said:?}");
}
