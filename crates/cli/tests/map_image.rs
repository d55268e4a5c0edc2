//! Trees that appear in a mount by cloning are the originals, from an image as from a folder; what
//! is mapped of an image is kept as long as the writes are. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use serde_json::Value;
use testkit::{Burgeon, Mounted, Rng, Space, Torture, TortureSize, compare, drop_caches, kill};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn empty(burgeon: &Burgeon, at: &Path) {
    fs::create_dir_all(at).unwrap();
    burgeon.ok(&["create-empty", text(at), "--writes", "w", "--write-limit", "256M"]);
}

fn collect(burgeon: &Burgeon) -> Value {
    serde_json::from_str(&burgeon.ok(&["gc", "--json"])).unwrap()
}

/// The cache of each image, which may be lost at any time.
fn caches(burgeon: &Burgeon) -> Vec<PathBuf> {
    let folders = fs::read_dir(burgeon.state().join("images")).unwrap().flatten();
    folders.map(|folder| folder.path().join("cache")).filter(|cache| cache.exists()).collect()
}

#[test]
fn a_mapped_image_is_the_original_whatever_becomes_of_its_name() {
    let space = Space::new("map-image");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.path("tree");
    Torture::make(&tree, 3, TortureSize::Small).unwrap();
    burgeon.build(&tree, "app:1");
    let at = space.path("at");
    empty(&burgeon, &at);
    burgeon.ok(&["map", text(&at.join("app")), "--from", "app:1"]);
    burgeon.ok(&["map", text(&at.join("links")), "--from", "app:1:/links"]);
    burgeon.ok(&["map", text(&at.join("acl")), "--from", "app:1:attrs/acl"]);
    let same = || {
        drop_caches();
        compare(&tree, &at.join("app")).unwrap().assert_same();
        compare(&tree.join("links"), &at.join("links")).unwrap();
        assert_eq!(fs::read(at.join("acl")).unwrap(), b"acl");
    };
    same();
    let list = burgeon.ok(&["map", "--list", text(&at)]);
    assert!(list.contains("image app:1:/links"), "{list}");
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    same();

    // The name goes, the data stays; also for a server that has none of it in its cache.
    burgeon.ok(&["rm", "app:1"]);
    assert_eq!(collect(&burgeon)["manifests"], 0);
    same();
    burgeon.ok(&["umount", text(&at)]);
    burgeon.ok(&["shutdown"]);
    assert_eq!(collect(&burgeon)["manifests"], 0);
    caches(&burgeon).iter().for_each(|cache| fs::remove_file(cache).unwrap());
    empty(&burgeon, &at);
    same();
    burgeon.ok(&["umount", text(&at)]);

    burgeon.ok(&["writes", "rm", "w"]);
    let collected = collect(&burgeon);
    assert_eq!(collected["manifests"], 1, "{collected}");
    assert!(collected["packs"].as_u64().unwrap() > 0, "{collected}");
    assert!(caches(&burgeon).len() < 2, "its cache goes, too");
}

#[test]
fn a_mapped_folder_is_the_original() {
    let space = Space::new("map-folder");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (tree, at) = (space.path("tree"), space.path("at"));
    Torture::make(&tree, 5, TortureSize::Small).unwrap();
    empty(&burgeon, &at);
    burgeon.ok(&["map", text(&at.join("tree")), "--from", text(&tree)]);
    drop_caches();
    compare(&tree, &at.join("tree")).unwrap().assert_same();
    burgeon.ok(&["umount", text(&at)]);
}

#[test]
fn an_image_of_another_store_is_found_there_again() {
    let space = Space::new("map-store");
    let (state, store) = (space.path("state"), space.path("store"));
    let burgeon = Burgeon::with_state(PROGRAM, state.clone());
    let tree = space.make_folder("tree");
    let bytes = Rng::new(9).bytes(700_001);
    fs::write(tree.join("data"), &bytes).unwrap();
    burgeon.ok(&["--store", text(&store), "build", text(&tree), "data"]);
    let at = space.path("at");
    empty(&burgeon, &at);
    let mapped = at.join("mapped");
    burgeon.fails(&["map", text(&mapped), "--from", "data"], 3, "neither a path");
    burgeon.ok(&["--store", text(&store), "map", text(&mapped), "--from", "data:data"]);
    // Its own collector knows who needs it.
    burgeon.ok(&["--store", text(&store), "rm", "data"]);
    burgeon.ok(&["--store", text(&store), "gc"]);
    burgeon.ok(&["umount", text(&at)]);
    caches(&burgeon).iter().for_each(|cache| fs::remove_file(cache).unwrap());
    let mounted = burgeon.mount("burgeon-empty", &at, &["--writes", "w"]);
    assert_eq!(fs::read(&mapped).unwrap(), bytes);
    // A store that is away: an error that says so, and good bytes when it is back.
    let away = space.path("away");
    remount(&burgeon, mounted, &at, || fs::rename(&store, &away).unwrap());
    assert!(fs::read(&mapped).is_err());
    let said = burgeon.ok(&["status"]);
    assert!(said.contains("which is mapped") && said.contains(text(&store)), "{said}");
    fs::rename(&away, &store).unwrap();
    assert_eq!(fs::read(&mapped).unwrap(), bytes);
    burgeon.ok(&["umount", text(&at)]);
}

/// Mounts again with nothing in the caches, after `meanwhile`.
fn remount(burgeon: &Burgeon, mounted: Mounted, at: &Path, meanwhile: impl FnOnce()) {
    burgeon.umount(mounted);
    caches(burgeon).iter().for_each(|cache| fs::remove_file(cache).unwrap());
    meanwhile();
    burgeon.ok(&["mount", "burgeon-empty", text(at), "--writes", "w"]);
}

#[test]
fn what_is_in_no_image_leaves_nothing() {
    let space = Space::new("map-none");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    File::create(tree.join("file")).unwrap();
    symlink("file", tree.join("link")).unwrap();
    burgeon.build(&tree, "app:1");
    let at = space.path("at");
    empty(&burgeon, &at);
    for (from, code, message) in [
        ("app:2", 3, "did you mean app:1"),
        ("app:1:/none", 3, "no such path"),
        ("app:1:file/below", 3, "no such path"),
        ("app:1:/link", 1, "neither a file nor"),
        ("no/such", 3, "neither a path"),
    ] {
        burgeon.fails(&["map", text(&at.join("new")), "--from", from], code, message);
    }
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    // A file without data needs no address.
    burgeon.ok(&["map", text(&at.join("new")), "--from", "app:1:/file"]);
    assert_eq!(fs::read(at.join("new")).unwrap(), b"");
    burgeon.ok(&["umount", text(&at)]);
}
