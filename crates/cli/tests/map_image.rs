//! Trees that appear in a mount by cloning are the originals, from an image as from a folder; what
//! is mapped of an image is kept as long as the writes are. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
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
    burgeon.lose_cache();
    empty(&burgeon, &at);
    same();
    burgeon.ok(&["umount", text(&at)]);

    burgeon.ok(&["writes", "rm", "w"]);
    let collected = collect(&burgeon);
    assert_eq!(collected["manifests"], 1, "{collected}");
    assert!(collected["packs"].as_u64().unwrap() > 0, "{collected}");
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
fn a_default_acl_of_the_folder_is_not_handed_on_to_what_is_mapped() {
    let space = Space::new("map-acl");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (tree, at) = (space.make_folder("tree"), space.path("at"));
    let setfacl = |acl: &str, path: &Path| {
        let set = Command::new("setfacl").args(["-m", acl]).arg(path).status().unwrap();
        assert!(set.success());
    };
    // With ACLs of their own, and without.
    for (name, mode) in [("plain", 0o640), ("open", 0o666), ("set", 0o4755), ("own", 0o600)] {
        fs::write(tree.join(name), Rng::new(mode).bytes(5000)).unwrap();
        fs::set_permissions(tree.join(name), Permissions::from_mode(mode as u32)).unwrap();
    }
    fs::write(tree.join("small"), "below a block").unwrap();
    symlink("plain", tree.join("link")).unwrap();
    for folder in ["bare", "own-default", "own-default/below"] {
        fs::create_dir(tree.join(folder)).unwrap();
        fs::write(tree.join(folder).join("file"), Rng::new(9).bytes(9000)).unwrap();
    }
    setfacl("u:1234:rw,g:56:r", &tree.join("own"));
    setfacl("d:u:77:rwx", &tree.join("own-default"));
    burgeon.build(&tree, "app");
    empty(&burgeon, &at);
    let shared = at.join("shared");
    fs::create_dir(&shared).unwrap();
    setfacl("d:u:4321:rwx,d:g:99:rx,d:o::-", &shared);
    let same = |from: &Path, made: &Path| {
        let listed = |path: &Path| {
            let listed = Command::new("getfacl").args(["-Rnp"]).arg(".").current_dir(path).output();
            let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
            // In the order of the folder, which is another's.
            let mut listed: Vec<_> = listed.split("\n\n").map(str::to_owned).collect();
            listed.sort();
            listed
        };
        assert_eq!(listed(made), listed(from));
        compare(from, made).unwrap().assert_same();
    };
    for (name, from) in [("of-host", text(&tree)), ("of-image", "app")] {
        burgeon.ok(&["map", text(&shared.join(name)), "--from", from]);
        same(&tree, &shared.join(name));
    }
    // Files by themselves, in a folder that has inherited the default ACL.
    let alone = shared.join("alone");
    fs::create_dir(&alone).unwrap();
    for name in ["plain", "open", "set", "own", "small"] {
        for (kind, from) in [("host", tree.join(name)), ("image", format!("app:{name}").into())] {
            let made = alone.join(format!("{kind}-{name}"));
            burgeon.ok(&["map", text(&made), "--from", text(&from)]);
            let facts = |path: &Path| {
                let acl = Command::new("getfacl").args(["-ncp"]).arg(path).output().unwrap();
                let mode = path.metadata().unwrap().permissions().mode();
                (mode, String::from_utf8(acl.stdout).unwrap())
            };
            assert_eq!(facts(&made), facts(&tree.join(name)), "{kind} {name}");
            assert!(facts(&made).1.contains("user::"), "getfacl is there");
        }
    }
    let zeros = shared.join("zeros");
    burgeon.ok(&["map", text(&zeros), "--computed", "zeros", "--size", "5000"]);
    assert_eq!(zeros.metadata().unwrap().permissions().mode() & 0o7777, 0o644);
    assert_eq!(
        rustix::fs::getxattr(&zeros, "system.posix_acl_access", &mut [0u8; 64]),
        NO_ATTRIBUTE
    );
    burgeon.ok(&["umount", text(&at)]);
}

const NO_ATTRIBUTE: Result<usize, rustix::io::Errno> = Err(rustix::io::Errno::NODATA);

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
    // Its own collector knows the mount that needs it.
    burgeon.ok(&["--store", text(&store), "rm", "data"]);
    burgeon.ok(&["--store", text(&store), "gc"]);
    burgeon.ok(&["umount", text(&at)]);
    burgeon.lose_cache();
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
    burgeon.lose_cache();
    meanwhile();
    burgeon.ok(&["mount", "burgeon-empty", text(at), "--writes", "w"]);
}

#[test]
fn a_mapping_from_no_image_leaves_nothing() {
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
