//! Names of images: the right to give them, and the trust in them.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use testkit::{Burgeon, OciLayout, Registry, Rng, Space, skopeo_copy};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn tree(space: &Space, name: &str, seed: u64) -> PathBuf {
    let folder = space.make_folder(name);
    fs::write(folder.join("data"), Rng::new(seed).bytes(100_000)).unwrap();
    folder
}

fn said(burgeon: &Burgeon, arguments: &[&str]) -> Value {
    serde_json::from_str(&burgeon.ok(&[arguments, &["--json"]].concat())).unwrap()
}

/// The digest of the image that has exactly the name `name` in the own store.
fn digest_of(burgeon: &Burgeon, name: &str) -> Option<String> {
    let record = fs::read(burgeon.state().join("store/images").join(escaped(name))).ok()?;
    let record: Value = serde_json::from_slice(&record).unwrap();
    Some(record["manifest"].as_str().unwrap().to_owned())
}

fn escaped(name: &str) -> String {
    name.replace(':', "%3a").replace('/', "%2f")
}

/// Pushes `tree` to `at` as an artifact whose author has named it `name`.
fn push_forged(space: &Space, host: &str, tree: &Path, name: &str, at: &str) {
    let label = at.replace(':', "-");
    let maker = Burgeon::with_state(PROGRAM, space.path(&format!("maker-{label}")));
    maker.build(tree, "x");
    maker.ok(&["push", "x", &format!("oci://{host}/staging:1")]);
    let layout = space.path(&format!("layout-{label}"));
    let from = format!("docker://{host}/staging:1");
    skopeo_copy(&[], &from, &format!("oci:{}:1", layout.display())).unwrap();
    let read = |digest: &Value| {
        let hex = digest.as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
        fs::read(layout.join("blobs/sha256").join(hex)).unwrap()
    };
    let index: Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let manifest: Value = serde_json::from_slice(&read(&index["manifests"][0]["digest"])).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let blobs: Vec<(&str, Vec<u8>)> = layers
        .iter()
        .map(|layer| {
            let object = layer["annotations"]["vnd.burgeon.object"].as_str().unwrap();
            let bytes = read(&layer["digest"]);
            let bytes = match object.starts_with("images/") {
                true => {
                    let mut record: Value = serde_json::from_slice(&bytes).unwrap();
                    record["name"] = name.into();
                    record.to_string().into_bytes()
                }
                false => bytes,
            };
            (layer["mediaType"].as_str().unwrap(), bytes)
        })
        .collect();
    let forged = space.path(&format!("forged-{label}"));
    let forge = |made: &mut Value| {
        made["artifactType"] = manifest["artifactType"].clone();
        made["mediaType"] = manifest["mediaType"].clone();
        for (layer, real) in made["layers"].as_array_mut().unwrap().iter_mut().zip(layers) {
            layer["annotations"] = real["annotations"].clone();
            let object = real["annotations"]["vnd.burgeon.object"].as_str().unwrap();
            if object.starts_with("images/") {
                let object = format!("images/{}", escaped(name));
                layer["annotations"]["vnd.burgeon.object"] = object.into();
            }
        }
    };
    OciLayout::by_hand(&forged, None, &blobs, forge).unwrap();
    let to = format!("docker://{host}/{at}");
    skopeo_copy(&[], &format!("oci:{}", forged.display()), &to).unwrap();
}

/// An OCI image in a folder: its source, and its digest.
fn oci_image(space: &Space) -> (String, String) {
    let layout = OciLayout::new(&space.path("oci-image")).unwrap();
    let fill = |root: &Path| fs::write(root.join("data"), Rng::new(7).bytes(100_000)).unwrap();
    layout.change(fill).unwrap();
    let index = fs::read(layout.folder().join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    (format!("oci-layout:{}", layout.folder().display()), digest)
}

#[test]
fn a_pull_takes_its_name_from_the_command_line() {
    let space = Space::new("names-pull");
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let host = registry.address().to_string();
    let (own, evil) = (tree(&space, "own", 1), tree(&space, "evil", 2));
    let user = Burgeon::with_state(PROGRAM, space.path("user"));
    user.build(&own, "debian:12");
    let mine = digest_of(&user, "debian:12").unwrap();
    let fake = format!("sha256:{}", "1".repeat(64));
    push_forged(&space, &host, &evil, "debian:12", "evil:1");
    push_forged(&space, &host, &evil, &fake, "evil:2");
    for tag in ["1", "2"] {
        let at = format!("oci://{host}/evil:{tag}");
        let pulled = said(&user, &["pull", "--eager", &at]);
        assert_eq!(pulled["image"], json!(format!("evil:{tag}")), "{pulled}");
        let lazily = said(&user, &["pull", &at]);
        assert_eq!(lazily["image"], json!(at), "{lazily}");
    }
    assert_eq!(digest_of(&user, "debian:12").unwrap(), mine);
    assert_eq!(digest_of(&user, &fake), None);
    // A name that this command has not given is replaced only with the user's consent.
    let at = format!("oci://{host}/evil:1");
    let taken = ["pull", "--eager", &at, "--as", "debian:12"];
    user.fails(&taken, 1, "--replace");
    assert_eq!(digest_of(&user, "debian:12").unwrap(), mine);
    user.ok(&[&taken[..], &["--replace"]].concat());
    assert_ne!(digest_of(&user, "debian:12").unwrap(), mine);
    // A build takes a name from an image that a build has named, and from no other.
    let own = own.to_str().unwrap();
    user.fails(&["build", own, "debian:12"], 1, "--replace");
    user.ok(&["build", own, "debian:12", "--replace"]);
    let evil_path = evil.to_str().unwrap();
    assert!(user.ok(&["build", evil_path, "debian:12"]).contains(&mine[..16]));
    // With the same reference, the user asks for the newer version of the tag.
    let pulled = digest_of(&user, "evil:1").unwrap();
    push_forged(&space, &host, &tree(&space, "newer", 3), "x", "newer:1");
    let (from, to) = (format!("docker://{host}/newer:1"), format!("docker://{host}/evil:1"));
    skopeo_copy(&[], &from, &to).unwrap();
    user.ok(&["pull", "--eager", &at]);
    assert_ne!(digest_of(&user, "evil:1").unwrap(), pulled);
    let pinned = said(&user, &["pull", &format!("oci://{host}/evil:2")])["store"].clone();
    let pinned = pinned.as_str().unwrap();
    user.fails(&["pull", "--eager", pinned], 1, "--as NAME");
}

#[test]
fn names_that_are_no_names_are_refused_and_say_why() {
    let space = Space::new("names-given");
    let tree = tree(&space, "tree", 1);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree.to_str().unwrap();
    burgeon.ok(&["build", tree, "app"]);
    for (name, why) in [
        ("sha256:abc", "are reserved for"),
        ("url:abc", "are reserved for"),
        ("app/index", "are reserved for"),
        ("app/contents", "are reserved for"),
        ("burgeon-empty", "create-empty"),
        ("..", "relative path"),
        ("a/../b", "relative path"),
        ("/abs", "absolute path"),
        ("oci://r.example/x", "a location"),
    ] {
        burgeon.fails(&["build", tree, name], 1, why);
        burgeon.fails(&["pull", "--eager", "app", "--as", name], 1, why);
    }
}

/// A folder or bucket that is shared: anybody may have given the name there.
#[test]
fn a_digest_is_believed_where_this_host_has_checked_it() {
    let space = Space::new("names-digest");
    let (source, digest) = oci_image(&space);
    let evil = tree(&space, "evil", 2);
    let store = space.path("store").display().to_string();
    let with_store = |state: &str| {
        Burgeon::with_state(PROGRAM, space.path(state)).option("--store").option(&store)
    };
    let other = with_store("other");
    other.build(&evil, "evil");
    let names = space.path("store/images");
    let record = fs::read(names.join("evil")).unwrap();
    let mut record: Value = serde_json::from_slice(&record).unwrap();
    for name in [&digest, &format!("{digest}/index"), &format!("{digest}/contents")] {
        record["name"] = json!(name);
        fs::write(names.join(escaped(name)), record.to_string()).unwrap();
    }
    let user = with_store("user");
    let at = space.make_folder("at");
    user.fails(&["mount", &digest, at.to_str().unwrap()], 1, "has not checked");
    user.fails(&["pull", "--eager", &digest], 1, "has not checked");
    let pinned = format!("{source}@{digest}");
    let mounted = user.mount(&pinned, &at, &["--read-only"]);
    let data = fs::read(mounted.path().join("data")).unwrap();
    assert!(data == Rng::new(7).bytes(100_000), "the files of another image");
    user.umount(mounted);
    // From now on it is known, also by its digest, until somebody changes it.
    let mounted = user.mount(&digest, &at, &["--read-only"]);
    user.umount(mounted);
    record["name"] = json!(digest);
    fs::write(names.join(escaped(&digest)), record.to_string()).unwrap();
    user.fails(&["mount", &digest, at.to_str().unwrap()], 1, "has not checked");
    let mounted = user.mount(&pinned, &at, &["--read-only"]);
    assert!(fs::read(mounted.path().join("data")).unwrap() == data);
    user.umount(mounted);
}

#[test]
fn images_are_spoken_of_by_what_was_typed() {
    let space = Space::new("names-typed");
    let (source, digest) = oci_image(&space);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 1), "team/app:7");
    let at = space.make_folder("at");
    let typed = format!("{source}:latest");
    let mounted = burgeon.mount(&typed, &at, &["--read-only"]);
    let status = burgeon.status()["mounts"][0].clone();
    assert_eq!(status["image"], typed);
    // Its layer is stored, so that there is nothing to fetch.
    assert!(status["data_bytes"].as_u64().unwrap() > 100_000, "{status}");
    assert_eq!(status["materialised_bytes"], status["data_bytes"], "{status}");
    assert!(burgeon.ok(&["status"]).contains(&digest), "the form that is mounted is told, too");
    burgeon.umount(mounted);
    let listed = burgeon.ok(&["list"]);
    assert!(listed.contains(&typed) && !listed.contains("sha256:"), "{listed}");
    assert!(listed.contains("team/app:7"), "{listed}");
    // The size is that of the stored layer, not of its unpacked content.
    let image = |name: &str| {
        let all = said(&burgeon, &["list"])["images"].as_array().unwrap().clone();
        all.into_iter().find(|image| image["name"] == name).unwrap()
    };
    let stored = image(&digest)["on_disk_bytes"].as_u64().unwrap();
    let layers = fs::read_dir(burgeon.state().join("store/layers")).unwrap();
    let layers: u64 = layers.map(|layer| layer.unwrap().metadata().unwrap().len()).sum();
    let manifest = image(&digest)["manifest_bytes"].as_u64().unwrap();
    assert!(layers > 100_000 && stored >= layers + manifest, "{stored}, {layers}");
    assert!(stored < layers + manifest + 10_000, "{stored}, {layers}");
    // By the reference, its end, digests and their beginnings.
    let manifest = image("team/app:7")["manifest"].as_str().unwrap().to_owned();
    for app in ["team/app:7", &manifest, &manifest[..16], &manifest[..8]] {
        assert_eq!(said(&burgeon, &["inspect", app])["image"]["name"], "team/app:7", "{app}");
        burgeon.ok(&["verify", app]);
    }
    let hex = digest.strip_prefix("sha256:").unwrap();
    for name in [&typed, "oci-image:latest", &digest, &digest[..16], &hex[..12]] {
        assert_eq!(said(&burgeon, &["inspect", name])["image"]["name"], digest, "{name}");
    }
    let mounted = burgeon.mount(&hex[..12], &at, &["--read-only"]);
    burgeon.umount(mounted);
    burgeon.fails(&["inspect", "oci-image:1"], 3, "there is no image");
    burgeon.fails(&["inspect", &manifest[..3]], 3, "there is no image");
    // A name removed by one reference stays by another.
    let other = format!("{source}@{digest}");
    let mounted = burgeon.mount(&other, &at, &["--read-only"]);
    burgeon.umount(mounted);
    burgeon.fails(&["rm", &hex[..12]], 1, &other);
    burgeon.ok(&["rm", &other]);
    assert!(burgeon.ok(&["list"]).contains(&typed));
    burgeon.ok(&["rm", "oci-image:latest"]);
    burgeon.ok(&["rm", &manifest[..12]]);
    assert!(burgeon.ok(&["list"]).contains("no images"), "{}", burgeon.ok(&["list"]));
    burgeon.ok(&["gc"]);
    assert_eq!(fs::read_dir(burgeon.state().join("provenance")).unwrap().count(), 0);
}
