//! The host's cache by image and by store: figures, and limits of single ones. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use testkit::{
    Burgeon, OciLayout, PATIENCE, Registry, Rng, Space, drop_caches, kill, skopeo_copy, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 8;
const FILE_LEN: usize = 1 << 20;
const ALL: u64 = FILES * FILE_LEN as u64;
const MIB: u64 = 1 << 20;

fn tree(space: &Space, name: &str, seed: u64) -> PathBuf {
    let tree = space.make_folder(name);
    for number in 0..FILES {
        fs::write(tree.join(format!("f{number}")), Rng::new(seed + number).bytes(FILE_LEN))
            .unwrap();
    }
    tree
}

/// Reads everything from the store or the cache.
fn assert_same(tree: &Path, at: &Path) {
    drop_caches();
    for number in 0..FILES {
        let name = format!("f{number}");
        assert!(fs::read(tree.join(&name)).unwrap() == fs::read(at.join(&name)).unwrap(), "{name}");
    }
}

fn cache(burgeon: &Burgeon, arguments: &[&str]) -> Value {
    let said = burgeon.ok(&[&["cache"], arguments, &["--json"]].concat());
    serde_json::from_str(&said).unwrap()
}

/// Bytes and limit of the part whose `field` is `value`.
fn part(answer: &Value, field: &str, value: &str) -> (u64, Option<u64>) {
    let parts = answer["parts"].as_array().unwrap();
    let Some(part) = parts.iter().find(|part| part[field] == value) else { return (0, None) };
    (part["bytes"].as_u64().unwrap(), part["limit"].as_u64())
}

fn figures(burgeon: &Burgeon, field: &str, value: &str) -> (u64, Option<u64>) {
    part(&cache(burgeon, &["status"]), field, value)
}

#[test]
fn images_and_stores_have_figures_and_limits() {
    let space = Space::new("cache-parts");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let trees = [tree(&space, "one", 1000), tree(&space, "two", 2000)];
    let [at_one, at_two] = ["at-one", "at-two"].map(|name| space.path(name));
    let elsewhere = space.make_folder("elsewhere");
    let store = elsewhere.to_str().unwrap();
    burgeon.build(&trees[0], "one");
    burgeon.ok(&["--store", store, "build", trees[1].to_str().unwrap(), "two"]);
    let none = ["--read-only", "--profile", "none"];
    let one = burgeon.mount("one", &at_one, &none);
    let two = burgeon.mount("two", &at_two, &[&none[..], &["--store", store]].concat());
    let image = |name: &str| figures(&burgeon, "name", name);
    let of_store = || figures(&burgeon, "store", store);

    // A chunk may lie with its padding to whole blocks.
    assert_same(&trees[0], &at_one);
    assert!(wait_until(PATIENCE, || image("one").0 >= ALL), "{:?}", image("one"));
    assert_eq!((image("two"), of_store()), ((0, None), (0, None)));
    assert_same(&trees[1], &at_two);
    assert!(wait_until(PATIENCE, || image("two").0 >= ALL));
    assert_eq!(of_store(), image("two"));
    assert_eq!(cache(&burgeon, &["status"])["unclaimed"], 0);

    // A limit holds at once, for what is here and for what comes, and is kept.
    let resized = cache(&burgeon, &["resize", "--limit", "one=4M"]);
    let (bytes, limit) = part(&resized, "name", "one");
    assert!((2 * MIB..=4 * MIB).contains(&bytes) && limit == Some(4 * MIB), "{resized}");
    assert!(image("two").0 >= ALL);
    assert_same(&trees[0], &at_one);
    assert!(image("one").0 <= 4 * MIB);
    let of_limit = format!("{store}=2M");
    let said = burgeon.ok(&["cache", "resize", "--limit", &of_limit]);
    assert!(said.contains("2.00 MiB") && said.contains("4.00 MiB"), "{said}");
    let is_bounded = || image("one").0 <= 4 * MIB && of_store().0 <= 2 * MIB;
    assert!(is_bounded());
    let said = burgeon.ok(&["cache", "status"]);
    let line = said.lines().find(|line| line.starts_with("one ")).unwrap();
    assert!(
        line.ends_with("4.00 MiB") && said.contains("IMAGE") && said.contains("STORE"),
        "{said}"
    );

    // A new server bounds what its predecessor left.
    cache(&burgeon, &["resize", "--limit", "one=none"]);
    assert_same(&trees[0], &at_one);
    assert!(wait_until(PATIENCE, || image("one").0 >= ALL));
    assert_eq!(image("one").1, None);
    let settings = burgeon.state().join("cache.json");
    let kept = fs::read_to_string(&settings).unwrap();
    let before = cache(&burgeon, &["status"])["cache"]["chunks"].as_u64().unwrap();
    cache(&burgeon, &["resize", "--limit", "one=3M"]);
    let limited = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, kept).unwrap();
    cache(&burgeon, &["resize"]);
    assert_same(&trees[0], &at_one);
    let chunks = || cache(&burgeon, &["status"])["cache"]["chunks"].as_u64().unwrap();
    assert!(wait_until(PATIENCE, || chunks() >= before));
    // Records are written behind: a killed server forgets those of the last second.
    burgeon.umount(one);
    burgeon.umount(two);
    burgeon.ok(&["shutdown"]);
    fs::write(&settings, limited).unwrap();
    let one = burgeon.mount("one", &at_one, &none);
    assert!(wait_until(PATIENCE, || {
        let (bytes, limit) = image("one");
        bytes > 0 && bytes <= 3 * MIB && limit == Some(3 * MIB)
    }));
    assert_same(&trees[0], &at_one);
    assert!(image("one").0 <= 3 * MIB);
    assert_eq!(of_store().1, Some(2 * MIB), "a limit outlives the mounts of its store");
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    assert_same(&trees[0], &at_one);
    assert!(wait_until(PATIENCE, || image("one").1 == Some(3 * MIB) && image("one").0 > 0));
    assert!(image("one").0 <= 3 * MIB);

    burgeon.fails(&["cache", "resize", "--limit", "one"], 2, "IMAGE=SIZE");
    burgeon.fails(&["cache", "resize", "--limit", "nothing=1G"], 3, "nothing");
    burgeon.umount(one);
}

/// Stored layers count for the cache's limit, and go when they are more than half of it: the mount
/// reads on, from the registry. Those of a pulled image stay.
#[test]
fn stored_layers_are_bounded_and_evicted() {
    const LEN: usize = 6 << 20;
    let space = Space::new("cache-layers");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let content = |layer: u64| Rng::new(layer).bytes(LEN);
    for layer in 0..2 {
        layout
            .change(|root| fs::write(root.join(format!("f{layer}")), content(layer)).unwrap())
            .unwrap();
    }
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    push(layout.folder(), &format!("{}/app:1", registry.address()));
    let image = format!("oci://{}/app:1", registry.address());
    let at = space.path("at");
    let mounted = burgeon.mount(&image, &at, &["--read-only", "--profile", "none"]);
    let layers = || cache(&burgeon, &["status"])["cache"]["layers"].as_u64().unwrap();
    let all = 2 * LEN as u64;
    assert!(layers() >= all);
    let of_image = || {
        let shown = cache(&burgeon, &["status"]);
        let parts = shown["parts"].as_array().unwrap().clone();
        let part = parts.into_iter().find(|part| part["name"] == image.as_str());
        part.map_or(0, |part| part["layers"].as_u64().unwrap())
    };
    assert!(of_image() >= all);
    let said = burgeon.ok(&["cache", "status"]);
    assert!(said.contains("LAYERS") && said.contains("app:1"), "{said}");
    // Half of it is not enough for both, but for one.
    let resized = cache(&burgeon, &["resize", "16M"]);
    assert!(resized["cache"]["limit"].as_u64().unwrap() <= 16 * MIB, "{resized}");
    assert!(wait_until(PATIENCE, || layers() <= 8 * MIB));
    assert!(layers() >= LEN as u64);
    assert!((LEN as u64..all).contains(&of_image()), "one of its layers is left");
    // Chunks get what layers leave.
    let chunks = || {
        let limit = cache(&burgeon, &["status"])["cache"]["limit"].as_u64().unwrap();
        limit - layers()
    };
    assert!(wait_until(PATIENCE, || chunks() <= 16 * MIB - layers()), "{}", chunks());
    let evicted = cache(&burgeon, &["evict", "1G"]);
    assert!(evicted["bytes"].as_u64().unwrap() >= LEN as u64, "{evicted}");
    assert_eq!(layers(), 0);
    drop_caches();
    for layer in 0..2 {
        assert!(fs::read(at.join(format!("f{layer}"))).unwrap() == content(layer), "{layer}");
    }
    let said = burgeon.ok(&["cache", "status"]);
    assert!(said.contains("layers     0 B stored"), "{said}");
    burgeon.umount(mounted);

    // It stores them again, and promises that they stay.
    cache_with(&burgeon, &at, &image, |burgeon| {
        let said = burgeon.ok(&["pull", "--eager", &image]);
        assert!(said.contains("needs nothing but this host"), "{said}");
        cache(burgeon, &["evict", "1G"]);
        cache(burgeon, &["resize", "1M"]);
    });
    drop(registry);
    let list: Value = serde_json::from_str(&burgeon.ok(&["list", "--json"])).unwrap();
    let name = list["images"][0]["name"].as_str().unwrap();
    let mounted = burgeon.mount(name, &at, &["--read-only", "--profile", "none"]);
    for layer in 0..2 {
        assert!(fs::read(at.join(format!("f{layer}"))).unwrap() == content(layer), "{layer}");
    }
    burgeon.umount(mounted);
}

/// Does something while the image is mounted: a daemon has the cache.
fn cache_with(burgeon: &Burgeon, at: &Path, image: &str, act: impl FnOnce(&Burgeon)) {
    let mounted = burgeon.mount(image, at, &["--read-only", "--profile", "none"]);
    act(burgeon);
    burgeon.umount(mounted);
}

/// Copies the image of `layout` to a registry.
fn push(layout: &Path, to: &str) {
    skopeo_copy(&[], &format!("oci:{}", layout.display()), &format!("docker://{to}")).unwrap();
}

/// The digest of a layer is enough to name it, and not to read it.
#[test]
fn a_stored_layer_is_given_to_images_of_its_own_registry_alone() {
    let space = Space::new("layer-thief");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout.change(|root| fs::write(root.join("a"), Rng::new(1).bytes(500_000)).unwrap()).unwrap();
    let private = Registry::start(&space.path("private"), None).unwrap();
    push(layout.folder(), &format!("{}/app:1", private.address()));
    let source = format!("oci://{}/app:1", private.address());
    let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
    burgeon.umount(mounted);
    let layers = || fs::read_dir(burgeon.state().join("store/layers")).unwrap().count();
    assert_eq!(layers(), 1);
    // An image of another registry, above the same layer, which that registry does not have.
    layout.change(|root| fs::write(root.join("b"), b"own").unwrap()).unwrap();
    let other = Registry::start(&space.path("other"), None).unwrap();
    push(layout.folder(), &format!("{}/thief:1", other.address()));
    let blobs = walk(&space.path("other/docker/registry/v2/blobs/sha256"));
    let layer = blobs.into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let bytes = fs::read(&layer).unwrap();
    fs::remove_file(&layer).unwrap();
    let thief = format!("oci://{}/thief:1", other.address());
    let at = space.make_folder("at");
    burgeon.fails(&["mount", &thief, at.to_str().unwrap()], 3, "it does not exist (404)");
    burgeon.fails(&["build", &thief, "x"], 3, "it does not exist (404)");
    fs::write(&layer, bytes).unwrap();
    let mounted = burgeon.mount(&thief, &space.path("at"), &["--read-only"]);
    assert!(fs::read(mounted.path().join("a")).unwrap() == Rng::new(1).bytes(500_000));
    burgeon.umount(mounted);
    assert_eq!(layers(), 3, "each registry's own");
}

/// All files below a folder.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}
