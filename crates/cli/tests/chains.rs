//! The first layers of an OCI image, by number and by chain ID; and its kept configuration.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command, time::Duration};

use serde_json::Value;
use testkit::{Burgeon, Link, OciLayout, Proxy, Registry, Rng, Space, compare, skopeo_copy};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// An image of three layers; the second one removes and changes files of the first.
fn layered(space: &Space) -> OciLayout {
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout
        .change(|root| {
            fs::write(root.join("one"), "of the first layer").unwrap();
            fs::write(root.join("gone"), vec![1; 300_000]).unwrap();
            fs::write(root.join("changed"), "old").unwrap();
        })
        .unwrap();
    layout
        .change(|root| {
            fs::remove_file(root.join("gone")).unwrap();
            fs::write(root.join("changed"), "new").unwrap();
        })
        .unwrap();
    layout.change(|root| fs::write(root.join("three"), vec![3; 100_000]).unwrap()).unwrap();
    let image = format!("{}:latest", layout.folder().display());
    let mut umoci = Command::new("umoci");
    umoci.args(["config", "--image", &image, "--config.user", "7:8", "--config.env", "A=b c"]);
    umoci.args(["--config.cmd", "run", "--config.cmd", "it", "--config.workingdir", "/srv"]);
    assert!(umoci.status().unwrap().success());
    layout
}

fn inspect(burgeon: &Burgeon, image: &str) -> Value {
    let document: Value = serde_json::from_str(&burgeon.ok(&["inspect", image, "--json"])).unwrap();
    document["oci"].clone()
}

/// The digests of the layers' unpacked bytes, by other programs.
fn diff_ids(layout: &Path) -> Vec<String> {
    let read = |digest: &Value| -> Value {
        let hex = digest.as_str().unwrap().trim_start_matches("sha256:");
        let bytes = fs::read(layout.join("blobs/sha256").join(hex)).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    };
    let index: Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let manifest = read(&index["manifests"][0]["digest"]);
    let layers = manifest["layers"].as_array().unwrap().iter().map(|layer| {
        let hex = layer["digest"].as_str().unwrap().trim_start_matches("sha256:").to_owned();
        let path = layout.join("blobs/sha256").join(hex);
        let shell = format!("zcat < {} | sha256sum", path.display());
        let sum = Command::new("sh").args(["-c", &shell]).output().unwrap();
        format!("sha256:{}", String::from_utf8(sum.stdout).unwrap().split(' ').next().unwrap())
    });
    layers.collect()
}

fn sha256(text: &str) -> String {
    use sha2::{Digest, Sha256};
    let hex: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

#[test]
fn the_first_layers_of_an_image_mount_by_number_and_by_chain_id() {
    let space = Space::new("chains");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let proxy = Proxy::new(registry.address(), 1).unwrap();
    let from = format!("oci:{}", layout.folder().display());
    skopeo_copy(&[], &from, &format!("docker://{}/app:1", registry.address())).unwrap();
    let image = format!("oci://{}/app:1", proxy.address());
    let ids = diff_ids(layout.folder());
    let two = sha256(&format!("{} {}", ids[0], ids[1]));
    let three = sha256(&format!("{two} {}", ids[2]));
    // Nothing was mounted before: a chain ID is enough.
    let at = space.path("at");
    let mounted = burgeon.mount(&format!("{image}#chain={two}"), &at, &["--read-only"]);
    let names = |at: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&at), ["changed", "one"]);
    assert_eq!(fs::read_to_string(at.join("changed")).unwrap(), "new");
    assert_eq!(burgeon.status()["mounts"][0]["image"], format!("{image}#chain={two}"));
    burgeon.umount(mounted);
    let mounted = burgeon.mount(&format!("{image}#layers=1"), &at, &["--read-only"]);
    assert_eq!(names(&at), ["changed", "gone", "one"]);
    assert_eq!(fs::read_to_string(at.join("changed")).unwrap(), "old");
    assert_eq!(fs::read(at.join("gone")).unwrap(), vec![1; 300_000]);
    burgeon.umount(mounted);
    // All layers are the image itself.
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    for part in ["#layers=3".to_owned(), format!("#chain={three}"), String::new()] {
        let mounted = burgeon.mount(&format!("{image}{part}"), &at, &["--read-only"]);
        compare(&unpacked, mounted.path()).unwrap().assert_same();
        burgeon.umount(mounted);
    }
    let shown = inspect(&burgeon, &image);
    let digest = shown[0]["digest"].as_str().unwrap().to_owned();
    assert_eq!(shown[0]["chain_id"], three);
    let chains: Vec<&Value> =
        shown[0]["layers"].as_array().unwrap().iter().map(|layer| &layer["chain_id"]).collect();
    assert_eq!(chains, [&ids[0], &two, &three]);
    let shown = inspect(&burgeon, &format!("{image}#layers=1"));
    assert_eq!(
        (&shown[0]["layers_used"], &shown[0]["chain_id"]),
        (&1.into(), &ids[0].clone().into())
    );
    for (part, code, why) in [
        (format!("#chain={}", ids[2]), 3, "has the chain ID"),
        ("#layers=4".to_owned(), 3, "has 3 layers, not 4"),
        ("#layers=0".to_owned(), 1, "number of layers is invalid"),
    ] {
        burgeon.fails(&["mount", &format!("{image}{part}"), at.to_str().unwrap()], code, why);
    }
    burgeon.fails(&["index", &format!("{image}#layers=1")], 1, "an index is one of a whole image");
    // Mounted once, a part of a pinned image needs no registry.
    drop((proxy, registry));
    let pinned = format!("{image}@{digest}#chain={two}");
    let mounted = burgeon.mount(&pinned, &at, &["--read-only"]);
    assert_eq!(names(&at), ["changed", "one"]);
    burgeon.umount(mounted);
}

/// The tables of contents of a part are those of its layers; no layer is fetched.
#[test]
fn the_first_layers_of_an_image_with_tables_of_contents_are_read_lazily() {
    let space = Space::new("chains-lazy");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let data = Rng::new(1).bytes(4_000_000);
    layout.change(|root| fs::write(root.join("large"), &data).unwrap()).unwrap();
    layout.change(|root| fs::write(root.join("large"), "small now").unwrap()).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let link = Link::new(registry.address(), Duration::ZERO, 1 << 30).unwrap();
    let from = format!("oci:{}", layout.folder().display());
    let to = format!("docker://{}/app:1", registry.address());
    skopeo_copy(&["--dest-compress-format", "zstd:chunked"], &from, &to).unwrap();
    let image = format!("oci://{}/app:1", link.address());
    let at = space.path("at");
    let part = format!("{image}#layers=1");
    let (mounted, said) = burgeon.mount_and_listen(&part, &at, &["--read-only"]);
    assert!(said.contains("listed"), "{said}");
    assert!(link.bytes() < 500_000, "{} bytes came", link.bytes());
    assert!(fs::read(at.join("large")).unwrap() == data);
    burgeon.umount(mounted);
    let mounted = burgeon.mount(&image, &at, &["--read-only"]);
    assert_eq!(fs::read_to_string(at.join("large")).unwrap(), "small now");
    burgeon.umount(mounted);
    // Each is removed by its own reference.
    burgeon.ok(&["rm", &part]);
    assert_eq!(inspect(&burgeon, &image)[0]["layers_used"], 2);
    burgeon.fails(&["inspect", &part], 3, "there is no image");
}

#[test]
fn the_configuration_of_an_image_is_kept_as_long_as_the_image() {
    let space = Space::new("kept-configuration");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space);
    let image = format!("oci-layout:{}:latest", layout.folder().display());
    burgeon.umount(burgeon.mount(&image, &space.path("at"), &["--read-only"]));
    let config = &inspect(&burgeon, &image)[0]["config"]["config"];
    assert_eq!(config["Cmd"], serde_json::json!(["run", "it"]));
    let text = burgeon.ok(&["inspect", &image]);
    for line in ["command     \"run\" \"it\"", "user        7:8", "variable    A=b c"] {
        assert!(text.lines().any(|it| it == line), "no {line:?} in {text}");
    }
    // The layout is not read again; garbage collection keeps what an image needs.
    fs::remove_dir_all(layout.folder()).unwrap();
    burgeon.ok(&["gc"]);
    assert_eq!(inspect(&burgeon, &image)[0]["config"]["config"]["User"], "7:8");
    let folder = burgeon.state().join("documents");
    let count = || fs::read_dir(&folder).unwrap().count();
    assert_eq!(count(), 2);
    // A damaged document is ignored.
    for file in fs::read_dir(&folder).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("\"run\"", "\"rob\"")).unwrap();
    }
    assert_eq!(inspect(&burgeon, &image), serde_json::json!([]));
    burgeon.ok(&["rm", &image]);
    burgeon.ok(&["gc"]);
    assert_eq!(count(), 0);
}
