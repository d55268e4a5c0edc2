//! A mounted image is the tree it was built from, entry by entry, and stock tools agree.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use testkit::{
    Burgeon, Space, Torture, TortureSize, bind_mount, btrfs_check, compare, debian_root,
    drop_caches, scaled,
};

const BURGEON: &str = env!("CARGO_BIN_EXE_burgeon");

#[test]
fn a_torture_tree_is_mounted_as_it_was() {
    let space = Space::new("torture");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = space.path("tree");
    Torture::make(&tree, 11, TortureSize::Full).unwrap();
    burgeon.build(&tree, "torture:1");
    let mounted = burgeon.mount("torture:1", &space.path("ro"), &["--read-only"]);
    btrfs_check(mounted.path()).unwrap();
    compare(&tree, mounted.path()).unwrap().assert_same();
    // Once more from Burgeon's cache, past the kernel's caches.
    drop_caches();
    compare(&tree, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    let writable = burgeon.mount("torture:1", &space.path("rw"), &["--write-limit", "512M"]);
    compare(&tree, writable.path()).unwrap().assert_same();
    burgeon.umount(writable);
}

#[test]
fn small_torture_trees_of_many_seeds_are_mounted_as_they_were() {
    let space = Space::new("torture-small");
    let burgeon = Burgeon::new(BURGEON, &space);
    for seed in 100..scaled(106, 103) {
        let tree = space.path(&format!("tree-{seed}"));
        Torture::make(&tree, seed, TortureSize::Small).unwrap();
        let name = format!("torture:{seed}");
        burgeon.build(&tree, &name);
        let mounted = burgeon.mount(&name, &space.path("at"), &["--read-only"]);
        btrfs_check(mounted.path()).unwrap_or_else(|error| panic!("seed {seed}: {error:#}"));
        let found = compare(&tree, mounted.path()).unwrap();
        assert!(found.differences == 0, "seed {seed}: {found}");
        burgeon.umount(mounted);
    }
}

#[test]
fn a_debian_root_is_equal_and_its_programs_run() {
    let space = Space::new("debian");
    let burgeon = Burgeon::new(BURGEON, &space);
    let root = debian_root().unwrap();
    // Nearly half of it are downloads of apt, which take their share of the time.
    let (hidden, empty) = (["var/cache/apt", "var/lib/apt/lists"], space.make_folder("empty"));
    let hidden = scaled(&[][..], &hidden).iter().map(|folder| root.join(folder));
    let _hidden: Vec<_> = hidden.map(|folder| bind_mount(&empty, &folder)).collect();
    burgeon.build(&root, "debian:12");
    let mounted = burgeon.mount("debian:12", &space.path("at"), &["--write-limit", "512M"]);
    let at = mounted.path();
    for (script, expected) in [
        ("cat /etc/debian_version", "12."),
        ("dpkg --list | grep -c ^ii", ""),
        ("perl -e 'print 6 * 7'", "42"),
        ("ls -l /bin/ | wc -l; apt-get --version | head -1", "apt"),
        ("echo new > /root/new && cat /root/new", "new"),
    ] {
        let output =
            Command::new("chroot").arg(at).args(["/bin/sh", "-ec", script]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains(expected), "{script}: {output:?}");
    }
    let reads = &burgeon.status()["mounts"][0];
    let (data, local) = (&reads["data_bytes"], &reads["materialised_bytes"]);
    assert!(local.as_u64().unwrap() * 2 < data.as_u64().unwrap(), "lazily: {reads}");
    btrfs_check(at).unwrap();
    burgeon.umount(mounted);
    let pristine = burgeon.mount("debian:12", &space.path("at"), &["--read-only"]);
    btrfs_check(pristine.path()).unwrap();
    compare(&root, pristine.path()).unwrap().assert_same();
    burgeon.umount(pristine);
}

#[test]
fn sixty_five_thousand_links_and_names_in_one_folder() {
    let space = Space::new("links");
    // In memory, where making them is fast. btrfs ends at 65,535 links.
    let disk = space.small_disk("disk", 200 << 20);
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = disk.path().join("tree");
    std::fs::create_dir_all(tree.join("elsewhere")).unwrap();
    let first = tree.join("first");
    std::fs::write(&first, "one file").unwrap();
    // Checking takes the square of it.
    for number in 0..scaled(65_000, 16_000) {
        let folder = if number % 7 == 0 { tree.join("elsewhere") } else { tree.clone() };
        std::fs::hard_link(&first, folder.join(format!("link-{number}"))).unwrap();
    }
    burgeon.build(&tree, "links");
    let mounted = burgeon.mount("links", &space.path("at"), &["--read-only"]);
    compare(&tree, mounted.path()).unwrap().assert_same();
    btrfs_check(mounted.path()).unwrap();
    burgeon.umount(mounted);
}
