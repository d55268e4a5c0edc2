//! OCI images: a mount shows the same tree as `umoci unpack`.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use testkit::{
    Burgeon, Fault, Link, OciLayout, PATIENCE, Proxy, Registry, Rng, Space, Torture, TortureSize,
    compare, skopeo_copy, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// An archive of the files that `fill` puts into a folder, with the paths `names` in that order.
fn tar(space: &Space, label: &str, names: &[&str], fill: impl FnOnce(&Path)) -> PathBuf {
    let folder = space.make_folder(&format!("{label}.tree"));
    fill(&folder);
    let path = space.path(&format!("{label}.tar"));
    let mut tar = Command::new("tar");
    tar.args(["--format=pax", "--no-recursion", "-C"]).arg(&folder).arg("-cf").arg(&path);
    assert!(tar.args(names).status().unwrap().success());
    path
}

/// An image of six layers, with everything that a layer can say of those below it.
fn layered(space: &Space) -> OciLayout {
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let first = |root: &Path| {
        Torture::make(&root.join("tree"), 31, TortureSize::Small).unwrap();
        Torture::forget_privileged_attributes(&root.join("tree")).unwrap();
        // Holes and sockets are in no layer, and umoci reads the former as zeros.
        fs::remove_dir_all(root.join("tree/sparse")).unwrap();
        fs::remove_file(root.join("tree/special/socket")).unwrap();
        for name in ["gone", "opaque/below", "becomes-file", "lib"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        fs::write(root.join("gone/data"), Rng::new(1).bytes(2_000_000)).unwrap();
        fs::write(root.join("opaque/old"), "old").unwrap();
        fs::write(root.join("opaque/both"), "old").unwrap();
        fs::write(root.join("becomes-file/x"), "x").unwrap();
        fs::write(root.join("becomes-folder"), "file").unwrap();
        fs::write(root.join("replaced"), Rng::new(2).bytes(300_000)).unwrap();
        fs::write(root.join("linked"), Rng::new(3).bytes(70_000)).unwrap();
        fs::hard_link(root.join("linked"), root.join("lib/linked")).unwrap();
        symlink("lib", root.join("lib64")).unwrap();
        symlink("/lib", root.join("absolute")).unwrap();
    };
    layout.change(first).unwrap();
    let second = |root: &Path| {
        fs::remove_dir_all(root.join("gone")).unwrap();
        fs::remove_dir_all(root.join("becomes-file")).unwrap();
        fs::write(root.join("becomes-file"), "file").unwrap();
        fs::remove_file(root.join("becomes-folder")).unwrap();
        fs::create_dir(root.join("becomes-folder")).unwrap();
        fs::write(root.join("becomes-folder/x"), "x").unwrap();
        fs::write(root.join("replaced"), Rng::new(4).bytes(200_000)).unwrap();
        fs::set_permissions(root.join("opaque"), fs::Permissions::from_mode(0o1777)).unwrap();
        fs::remove_dir_all(root.join("tree/many")).unwrap();
    };
    layout.change(second).unwrap();
    // Entries that umoci only reads: through symlinks, links to a lower layer, opaque.
    let links = ["lib64/through", "absolute/also", "own", "own2"];
    let third = tar(space, "links", &links, |root| {
        fs::create_dir_all(root.join("lib64")).unwrap();
        fs::create_dir_all(root.join("absolute")).unwrap();
        fs::write(root.join("lib64/through"), "through a symlink").unwrap();
        fs::write(root.join("absolute/also"), "through another").unwrap();
        fs::write(root.join("own"), Rng::new(5).bytes(5000)).unwrap();
        fs::hard_link(root.join("own"), root.join("own2")).unwrap();
    });
    layout.add(&third).unwrap();
    let across = tar(space, "across", &["again"], |root| {
        fs::write(root.join("linked"), "").unwrap();
        fs::hard_link(root.join("linked"), root.join("again")).unwrap();
    });
    relink(&across);
    layout.add(&across).unwrap();
    let opaque = ["opaque", "opaque/both", "opaque/.wh..wh..opq", "opaque/new", ".wh.own"];
    let opaque = tar(space, "opaque", &opaque, |root| {
        fs::create_dir(root.join("opaque")).unwrap();
        for (name, text) in [("both", "new"), ("new", "new"), (".wh..wh..opq", "")] {
            fs::write(root.join("opaque").join(name), text).unwrap();
        }
        fs::write(root.join(".wh.own"), "").unwrap();
    });
    layout.add(&opaque).unwrap();
    layout
}

/// Makes the only entry of an archive, the file `again`, a hard link to `linked`, which is not in
/// the archive.
fn relink(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let mut blocks = bytes.chunks_exact_mut(512);
    let header = blocks.find(|block| block.starts_with(b"again\0")).unwrap();
    header[156] = b'1';
    header[157..163].copy_from_slice(b"linked");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    fs::write(path, bytes).unwrap();
}

#[test]
fn an_image_of_layers_is_what_umoci_unpacks() {
    let space = Space::new("layout");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space);
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let source = format!("oci-layout:{}:latest", layout.folder().display());
    let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    // The same with zstd, and not compressed; and removed files take no room.
    let zstd = format!("oci:{}:z", space.path("zstd").display());
    let from = format!("oci:{}:latest", layout.folder().display());
    skopeo_copy(&["--dest-compress-format", "zstd"], &from, &zstd).unwrap();
    let source = format!("oci-layout:{}:z", space.path("zstd").display());
    burgeon.ok(&["build", &source, "zstd"]);
    let mounted = burgeon.mount("zstd", &space.path("at"), &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
}

/// Copies the image of `layout` to a registry.
fn push(layout: &Path, options: &[&str], to: &str) {
    skopeo_copy(options, &format!("oci:{}", layout.display()), &format!("docker://{to}")).unwrap();
}

/// The names of the images in the store.
fn names(burgeon: &Burgeon) -> Vec<String> {
    let list: serde_json::Value = serde_json::from_str(&burgeon.ok(&["list", "--json"])).unwrap();
    let images = list["images"].as_array().unwrap();
    images.iter().map(|image| image["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn an_image_of_a_registry_is_fetched_once() {
    let space = Space::new("registry");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space);
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let proxy = Proxy::new(registry.address(), 1).unwrap();
    push(layout.folder(), &[], &format!("{}/team/app:1", registry.address()));
    let source = format!("oci://{}/team/app:1", proxy.address());
    // Connections break, bodies end early, the registry is overloaded: nothing of that is seen.
    proxy.spoil(150, &[Fault::Reset, Fault::Truncate, Fault::Status(503), Fault::Status(429)]);
    let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    proxy.spoil(0, &[]);
    // The name is asked about again, the layers are not.
    let [digest] = &names(&burgeon)[..] else { panic!("{:?}", names(&burgeon)) };
    assert!(digest.starts_with("sha256:"), "{digest}");
    let before = proxy.requests();
    let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
    burgeon.umount(mounted);
    assert!((1..=3).contains(&(proxy.requests() - before)), "{}", proxy.requests() - before);
    // Nobody is there any more: a name says nothing then, a digest everything.
    drop((proxy, registry));
    let at = space.make_folder("at");
    let ask = ["mount", &source, at.to_str().unwrap(), "--pull", "always"];
    burgeon.fails(&ask, 5, "by its digest");
    let pinned = format!("{source}@{digest}");
    let mounted = burgeon.mount(&pinned, &space.path("at"), &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
}

/// The stored layers.
fn layers(burgeon: &Burgeon) -> Vec<PathBuf> {
    let folder = burgeon.state().join("store/layers");
    if folder.exists() { files(&folder) } else { Vec::new() }
}

#[test]
fn layers_are_stored_as_they_come_for_all_images_that_have_them() {
    let space = Space::new("stored");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let link = Link::new(registry.address(), Duration::ZERO, 1 << 30).unwrap();
    let at = |tag: &str| format!("oci://{}/app:{tag}", link.address());
    let base = |root: &Path| {
        fs::write(root.join("base"), Rng::new(1).bytes(3_000_000)).unwrap();
        fs::write(root.join("old"), Rng::new(2).bytes(200_000)).unwrap();
    };
    layout.change(base).unwrap();
    let mut unpacked = Vec::new();
    for tag in ["one", "two"] {
        let above = |root: &Path| {
            fs::write(root.join(tag), Rng::new(3).bytes(50_000)).unwrap();
            fs::remove_file(root.join("old")).unwrap_or_default();
        };
        layout.change(above).unwrap();
        push(layout.folder(), &[], &format!("{}/app:{tag}", registry.address()));
        unpacked.push(layout.unpack(&space.path(tag)).unwrap());
    }
    let mounted = burgeon.mount(&at("one"), &space.path("at"), &["--read-only"]);
    burgeon.umount(mounted);
    assert_eq!(layers(&burgeon).len(), 2);
    let before = link.bytes();
    let said = burgeon.ok(&["pull", "--eager", &at("two"), "--as", "second"]);
    assert!(said.contains("second is complete"), "{said}");
    let came = link.bytes() - before;
    assert!(came < 1_000_000, "the lowest layer was fetched again: {came} bytes");
    // Their indexes are made, too: nothing is fetched to put one beside the image.
    let before = link.bytes();
    burgeon.ok(&["index", &at("one"), "--push"]);
    let came = link.bytes() - before;
    assert!(came < 1_000_000, "the image was fetched again: {came} bytes");
    drop((link, registry));
    let names = names(&burgeon);
    let first = names.iter().find(|name| name.ends_with("/index")).unwrap();
    for (name, unpacked) in [first.trim_end_matches("/index"), "second"].into_iter().zip(&unpacked)
    {
        let mounted = burgeon.mount(name, &space.path("at"), &["--read-only"]);
        compare(unpacked, mounted.path()).unwrap().assert_same();
        burgeon.umount(mounted);
    }
    // A damaged one is read where it came from, as long as it is there.
    let damaged = Burgeon::with_state(PROGRAM, space.path("damaged"));
    let source = format!("oci-layout:{}", layout.folder().display());
    let mounted = damaged.mount(&source, &space.path("at"), &["--read-only"]);
    for path in layers(&damaged) {
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    compare(&unpacked[1], mounted.path()).unwrap().assert_same();
    damaged.umount(mounted);
    assert!(damaged.run(&["verify", &self::names(&damaged)[0]]).stdout.contains("DAMAGED"));
    let said = "removed: try again";
    damaged.fails(&["build", &source, "again"], 4, said);
    // Layers that no image needs are removed; the others stay.
    for name in names.iter().filter(|name| *name != "second") {
        burgeon.ok(&["rm", name]);
    }
    burgeon.ok(&["gc"]);
    assert_eq!(layers(&burgeon).len(), 3);
    burgeon.ok(&["verify", "second"]);
    burgeon.ok(&["rm", "second"]);
    burgeon.ok(&["gc"]);
    assert_eq!(layers(&burgeon), Vec::<PathBuf>::new());
}

/// Bytes of the one layer that is coming.
fn came(burgeon: &Burgeon) -> u64 {
    let tmp = fs::read_dir(burgeon.state().join("store/tmp")).into_iter().flatten().flatten();
    let parts = tmp.filter(|entry| entry.file_name().to_string_lossy().starts_with("partial-"));
    parts.filter_map(|part| part.metadata().ok()).map(|part| part.len()).max().unwrap_or(0)
}

#[test]
fn an_interrupted_first_mount_goes_on_where_it_was() {
    let space = Space::new("interrupted");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let base = |root: &Path| fs::write(root.join("base"), Rng::new(1).bytes(500_000)).unwrap();
    layout.change(base).unwrap();
    let large = |root: &Path| fs::write(root.join("large"), Rng::new(2).bytes(30 << 20)).unwrap();
    layout.change(large).unwrap();
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    push(layout.folder(), &[], &format!("{}/app:1", registry.address()));
    let link = Link::new(registry.address(), Duration::ZERO, 8 << 20).unwrap();
    let source = format!("oci://{}/app:1", link.address());
    let at = space.make_folder("at");
    let arguments = ["mount", &source, at.to_str().unwrap(), "--read-only"];
    for (point, signal) in
        [(1 << 20, Signal::KILL), (12 << 20, Signal::INT), (24 << 20, Signal::KILL)]
    {
        // A test that runs in the background of a shell ignores SIGINT, and so would the command.
        let plain = burgeon.command(&arguments);
        let mut mount = Command::new("env");
        mount.arg("--default-signal=INT").arg(plain.get_program()).args(plain.get_args());
        let mut mount = mount.spawn().unwrap();
        assert!(wait_until(PATIENCE, || came(&burgeon) >= point), "{point}: {}", came(&burgeon));
        kill_process(Pid::from_child(&mount), signal).unwrap();
        assert!(!mount.wait().unwrap().success(), "{point}");
    }
    // The mount that ends fetches the rest of the layers, and the part that was lost on the way.
    let mounted = burgeon.mount(&source, &at, &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    let bytes = link.bytes() >> 20;
    assert!(bytes < 31 + 20, "layers were fetched again: {bytes} MiB of 31");
    // Nothing is left for the collector.
    assert_eq!(fs::read_dir(burgeon.state().join("store/tmp")).unwrap().count(), 0);
    let store = burgeon.state().join("store");
    let all = || {
        let mut all = files(&store);
        all.sort();
        all
    };
    let before = all();
    burgeon.ok(&["gc"]);
    assert_eq!(all(), before);
}

#[test]
fn a_layer_that_cannot_be_read_from_the_middle_is_built() {
    let space = Space::new("one-frame");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tar = tar(&space, "large", &["large"], |root| {
        let bytes = [Rng::new(4).bytes(1_000_000), vec![7; 34_000_000]].concat();
        fs::write(root.join("large"), bytes).unwrap();
    });
    let frame = Command::new("zstd").args(["-q", "-c"]).arg(&tar).output().unwrap().stdout;
    let layer = ("application/vnd.oci.image.layer.v1.tar+zstd", frame);
    let folder = space.path("layout");
    OciLayout::by_hand(&folder, None, &[layer], |_| ()).unwrap();
    let source = format!("oci-layout:{}", folder.display());
    burgeon.fails(&["index", &source], 1, "only as a whole");
    let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
    let expected = fs::read(space.path("large.tree/large")).unwrap();
    assert!(fs::read(mounted.path().join("large")).unwrap() == expected);
    burgeon.umount(mounted);
    assert_eq!(layers(&burgeon), Vec::<PathBuf>::new());
    fs::remove_dir_all(&folder).unwrap();
    burgeon.ok(&["verify", &names(&burgeon)[0]]);
}

#[test]
fn an_index_gives_the_image_of_this_machine() {
    let space = Space::new("platforms");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let folder = space.path("layout");
    let mine = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    };
    let mut manifests = Vec::new();
    for architecture in ["s390x", mine, "riscv64"] {
        let tar = tar(&space, architecture, &["for"], |root| {
            fs::write(root.join("for"), architecture).unwrap();
        });
        let layer = ("application/vnd.oci.image.layer.v1.tar", fs::read(tar).unwrap());
        OciLayout::by_hand(&folder, None, &[layer], |_| ()).unwrap();
        let index: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join("index.json")).unwrap()).unwrap();
        let mut manifest = index["manifests"][0].clone();
        manifest["platform"] = serde_json::json!({ "os": "linux", "architecture": architecture });
        manifests.push(manifest);
    }
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": manifests,
        "mediaType": "application/vnd.oci.image.index.v1+json" });
    fs::write(folder.join("index.json"), index.to_string()).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    // The whole index, as bytes that have a digest.
    let at = format!("{}/many", registry.address());
    let multi = space.path("multi");
    OciLayout::index_of(&folder, &multi, &index).unwrap();
    push(&multi, &["--all"], &format!("{at}:1"));
    let check = |source: &str| {
        let mounted = burgeon.mount(source, &space.path("at"), &["--read-only"]);
        assert_eq!(fs::read_to_string(mounted.path().join("for")).unwrap(), mine, "{source}");
        burgeon.umount(mounted);
    };
    check(&format!("oci-layout:{}", multi.display()));
    check(&format!("oci://{at}:1"));
    let names = names(&burgeon);
    let index = names.iter().find_map(|name| name.strip_suffix(&format!("/{mine}"))).unwrap();
    drop(registry);
    check(&format!("oci://{at}@{index}"));
}

#[test]
fn credentials_come_from_where_other_programs_keep_them() {
    let space = Space::new("login");
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout.change(|root| fs::write(root.join("secret"), "text").unwrap()).unwrap();
    let passwords = space.path("passwords");
    let made = Command::new("htpasswd").args(["-Bbn", "user", "hunter2"]).output().unwrap();
    fs::write(&passwords, made.stdout).unwrap();
    let registry = Registry::start(&space.path("registry"), Some(&passwords)).unwrap();
    let host = registry.address().to_string();
    push(layout.folder(), &["--dest-creds=user:hunter2"], &format!("{host}/app:1"));
    let source = format!("oci://{host}/app:1");
    let empty = space.make_folder("empty");
    let burgeon = Burgeon::new(PROGRAM, &space).env("DOCKER_CONFIG", &empty).env("HOME", &empty);
    burgeon.fails(&["build", &source, "app"], 5, "requires a login");
    // As `docker login` and `skopeo login` write them ("user:hunter2" in base 64).
    let auths = format!(r#"{{"auths": {{"{host}": {{"auth": "dXNlcjpodW50ZXIy"}}}}}}"#);
    let docker = space.make_folder("docker");
    fs::write(docker.join("config.json"), &auths).unwrap();
    let podman = space.path("auth.json");
    fs::write(&podman, &auths).unwrap();
    // And a helper, which is asked by its name.
    let helped = space.make_folder("helped");
    fs::write(helped.join("config.json"), r#"{"credsStore": "of-a-test"}"#).unwrap();
    let helper = helped.join("docker-credential-of-a-test");
    let answer = r#"{"ServerURL": "x", "Username": "user", "Secret": "hunter2"}"#;
    fs::write(&helper, format!("#!/bin/sh\ncat > /dev/null\necho '{answer}'\n")).unwrap();
    fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", helped.display(), std::env::var("PATH").unwrap());
    for (name, variables) in [
        ("docker", vec![("DOCKER_CONFIG", docker.to_str().unwrap())]),
        ("podman", vec![("REGISTRY_AUTH_FILE", podman.to_str().unwrap())]),
        ("helper", vec![("DOCKER_CONFIG", helped.to_str().unwrap()), ("PATH", &path)]),
    ] {
        let mut command = burgeon.command(&["build", &source, name]);
        let output = command.envs(variables).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !said.contains("hunter2"), "{name}: {said}");
    }
    let burgeon = burgeon.env("DOCKER_CONFIG", &docker).env("BURGEON_LOG", "debug");
    // Nor does it appear in what a daemon writes that uses it.
    let (at, report) = (space.path("at"), space.path("report.txt"));
    let mounted = burgeon.mount(&source, &at, &["--read-only"]);
    assert_eq!(fs::read(at.join("secret")).unwrap(), b"text");
    burgeon.run(&["doctor", "--report", report.to_str().unwrap()]);
    let report = fs::read_to_string(report).unwrap();
    assert!(report.contains(&host) && report.contains("===== log =====\n"), "{report}");
    for secret in ["hunter2", "dXNlcjpodW50ZXIy"] {
        assert!(!report.contains(secret), "{report}");
    }
    burgeon.umount(mounted);
    let wrong = auths.replace("dXNlcjpodW50ZXIy", "dXNlcjpodW50ZXIz");
    fs::write(docker.join("config.json"), wrong).unwrap();
    burgeon.fails(
        &["build", &source, "again"],
        5,
        "refuses the user or the password: log in again, with docker login",
    );
    // Errors in the files with credentials are told only if a login is needed.
    let open = Registry::start(&space.path("open"), None).unwrap();
    push(layout.folder(), &[], &format!("{}/app:1", open.address()));
    let public = format!("oci://{}/app:1", open.address());
    let config = docker.join("config.json");
    for (text, said) in [
        (
            r#"{"auths": {"r.example": "#,
            format!("{}: the file is damaged (line 1", config.display()),
        ),
        (r#"{"credsStore": "not-there"}"#, "docker-credential-not-there cannot be run".to_owned()),
    ] {
        fs::write(&config, text).unwrap();
        burgeon.fails(&["build", &source, "again"], 1, &said);
        burgeon.ok(&["build", &public, "public"]);
    }
}

/// Every file below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

/// `umoci insert` of Debian 12 makes such layers.
#[test]
fn a_layer_may_lack_the_mark_at_the_end_of_an_archive() {
    let space = Space::new("oci-no-mark");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), Rng::new(9).bytes(100_000)).unwrap();
    let tar = Command::new("tar").arg("-c").arg("-C").arg(&tree).arg("file").output().unwrap();
    let end = tar.stdout.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    let whole = &tar.stdout[..end.next_multiple_of(512)];
    let kind = "application/vnd.oci.image.layer.v1.tar";
    let folder = space.path("layout");
    OciLayout::by_hand(&folder, None, &[(kind, whole.to_vec())], |_| ()).unwrap();
    let at = space.path("at");
    let mounted = burgeon.mount(&format!("oci-layout:{}", folder.display()), &at, &[]);
    assert!(fs::read(at.join("file")).unwrap() == Rng::new(9).bytes(100_000));
    burgeon.umount(mounted);
    // An archive alone has nothing else that tells whether it is whole.
    let alone = space.path("alone.tar");
    fs::write(&alone, whole).unwrap();
    burgeon.fails(&["build", alone.to_str().unwrap(), "alone"], 4, "ends too early");
}

#[test]
fn a_layer_with_a_wrong_digest_is_refused_and_leaves_nothing() {
    let space = Space::new("tampered");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let file = tar(&space, "one", &["file"], |root| {
        fs::write(root.join("file"), Rng::new(9).bytes(100_000)).unwrap();
    });
    let tar = fs::read(&file).unwrap();
    let kind = "application/vnd.oci.image.layer.v1.tar";
    let gzip = "application/vnd.oci.image.layer.v1.tar+gzip";
    let other_id = format!("sha256:{}", "0".repeat(64));
    let folder = space.path("layout");
    let source = format!("oci-layout:{}", folder.display());
    let at = space.make_folder("at");
    let refused = |code, said: &str| {
        burgeon.fails(&["build", &source, "x"], code, said);
        burgeon.fails(&["mount", &source, at.to_str().unwrap()], code, said);
        fs::remove_dir_all(&folder).unwrap();
    };
    // The layer, or the manifest, is another than its digest says.
    for part in ["\0\0", "schemaVersion"] {
        OciLayout::by_hand(&folder, None, &[(kind, tar.clone())], |_| ()).unwrap();
        let mut changed = 0;
        for path in files(&folder.join("blobs")) {
            let mut bytes = fs::read(&path).unwrap();
            let at = bytes.windows(part.len()).position(|window| window == part.as_bytes());
            if let Some(at) = at {
                bytes[at] ^= 1;
                fs::write(path, bytes).unwrap();
                changed += 1;
            }
        }
        assert_eq!(changed, 1);
        refused(4, "does not match its digest");
    }
    let by_hand = |ids: Option<&[&str]>, kind, bytes: &[u8], key: &str, value| {
        let spoil = |manifest: &mut serde_json::Value| {
            if !key.is_empty() {
                manifest["layers"][0][key] = value;
            }
        };
        OciLayout::by_hand(&folder, ids, &[(kind, bytes.to_vec())], spoil).unwrap();
    };
    let none = serde_json::Value::Null;
    by_hand(None, kind, &tar, "size", (tar.len() + 1).into());
    refused(4, "is shorter than the");
    by_hand(None, kind, &tar, "size", (tar.len() - 1).into());
    refused(4, "is longer than the");
    by_hand(None, kind, &tar, "digest", other_id.as_str().into());
    refused(3, "cannot use the layer");
    by_hand(Some(&[&other_id]), kind, &tar, "", none.clone());
    refused(4, "but the image states");
    by_hand(Some(&[]), kind, &tar, "", none.clone());
    refused(4, "its configuration lists 0");
    by_hand(None, gzip, &tar, "", none.clone());
    refused(4, "cannot be decompressed");
    // Of what it says, but damaged before that was said.
    let zstd = format!("{kind}+zstd");
    for (program, kind) in [("gzip", gzip), ("zstd", &zstd)] {
        let mut bytes = Command::new(program).arg("-c").arg(&file).output().unwrap().stdout;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        by_hand(None, kind, &bytes, "", none.clone());
        refused(4, "cannot be decompressed");
    }
    by_hand(None, kind, &tar[..50_000], "", none.clone());
    refused(4, "ends too early");
    by_hand(None, &format!("{gzip}+encrypted"), &tar, "", none);
    refused(4, "--decryption-key");
    burgeon.fails(&["build", &source, "x"], 3, "not an OCI layout");
    assert!(names(&burgeon).is_empty());
    for folder in ["packs", "layers", "tmp"] {
        let folder = burgeon.state().join("store").join(folder);
        assert!(!folder.exists() || files(&folder).is_empty(), "{folder:?}");
    }
}

#[test]
fn a_registry_that_lies_is_not_believed() {
    let space = Space::new("liar");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout.change(|root| fs::write(root.join("a"), Rng::new(1).bytes(500_000)).unwrap()).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let host = registry.address();
    push(layout.folder(), &[], &format!("{host}/app:1"));
    let source = format!("oci://{host}/app:1");
    let blobs = space.path("registry/docker/registry/v2/blobs");
    let largest = files(&blobs).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len());
    let largest = largest.unwrap();
    let whole = fs::read(&largest).unwrap();
    let mut bytes = whole.clone();
    bytes[300_000] ^= 1;
    fs::write(&largest, &bytes).unwrap();
    burgeon.fails(&["build", &source, "x"], 4, "does not match its digest");
    fs::write(&largest, &whole[..400_000]).unwrap();
    burgeon.fails(&["build", &source, "x"], 4, "is shorter than the");
    fs::remove_file(&largest).unwrap();
    burgeon.fails(&["build", &source, "x"], 3, "it does not exist (404)");
    burgeon.fails(&["build", &format!("oci://{host}/none:1"), "x"], 3, "it does not exist (404)");
    fs::write(&largest, &whole).unwrap();
    burgeon.ok(&["build", &source, "x"]);
    assert_eq!(names(&burgeon), ["x"]);
    // Logging in, the manifest and the layers: wherever it breaks off, it goes on.
    for seed in 0..8 {
        let proxy = Proxy::new(host, seed).unwrap();
        proxy.spoil(300, &[Fault::Reset, Fault::Truncate, Fault::Status(503)]);
        burgeon.ok(&["build", &format!("oci://{}/app:1", proxy.address()), "x"]);
    }
}
