//! An image of an archive is that of the tree in it.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use testkit::{Burgeon, Space, Torture, TortureSize, compare, scaled};

const BURGEON: &str = env!("CARGO_BIN_EXE_burgeon");

#[test]
fn a_tar_gives_the_same_tree_as_its_folder() {
    let space = Space::new("tar");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = space.path("tree");
    Torture::make(&tree, 21, TortureSize::Small).unwrap();
    Torture::forget_privileged_attributes(&tree).unwrap();
    // Sockets, second names of fifos and holes cannot be in a plain tar.
    std::fs::remove_file(tree.join("special/socket")).unwrap();
    std::fs::remove_file(tree.join("special/fifo-again")).unwrap();
    std::fs::remove_dir_all(tree.join("sparse")).unwrap();
    let formats = [
        ("tar", "--no-auto-compress"),
        ("tar.zst", "--zstd"),
        ("tar.gz", "--gzip"),
        ("tar.xz", "--xz"),
    ];
    for &(suffix, option) in &formats[..scaled(4, 1)] {
        let archive = space.path(&format!("tree.{suffix}"));
        let mut tar = Command::new("tar");
        tar.args(["--format=pax", "--xattrs", "--acls", "--xattrs-include=*", option]);
        let done = tar.arg("-cf").arg(&archive).arg("-C").arg(&tree).arg(".").status().unwrap();
        assert!(done.success());
        burgeon.build(&archive, suffix);
        let mounted = burgeon.mount(suffix, &space.path("at"), &["--read-only"]);
        compare(&tree, mounted.path()).unwrap().assert_same();
        burgeon.umount(mounted);
    }
}
