//! Tests with the kernel: seeds are mounted, read, grown into sprouts, and checked by `btrfs
//! check`. Needs root, loop devices and btrfs-progs.

#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "../common/mod.rs"]
mod common;
mod rig;
mod torture;

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::ChecksumKind;
use burgeon_btrfs::SeedOptions;
use common::{Builder, FILE, grow, pattern, write_devices};
use proptest::{
    prelude::{Strategy, any},
    strategy::ValueTree,
    test_runner::TestRunner,
};
use rig::{Rig, btrfs_check, identity, scan};
use testkit::scaled;
use torture::{compare, torture};

const SUBVOLUME: &str = "subvolid=256";

/// A small tree with one file of most kinds.
fn small_tree() -> Builder {
    let mut b = Builder::new();
    let etc = b.dir(0, "etc");
    b.inline(etc, "hostname", b"burgeon\n");
    b.file(etc, "services", &pattern(1, 20_000));
    let usr = b.dir(0, "usr");
    let bin = b.dir(usr, "bin");
    let big = b.file(bin, "big", &pattern(2, 3 << 20));
    b.link(etc, "big-too", big);
    b.symlink(0, "bin", b"usr/bin");
    b.add(0, "empty", common::FILE);
    b
}

fn check_small_tree(at: &Path) {
    assert_eq!(fs::read(at.join("etc/hostname")).unwrap(), b"burgeon\n");
    assert_eq!(fs::read(at.join("etc/services")).unwrap(), pattern(1, 20_000));
    assert_eq!(fs::read(at.join("bin/big")).unwrap(), pattern(2, 3 << 20));
    assert_eq!(fs::metadata(at.join("etc/big-too")).unwrap().nlink(), 2);
    assert_eq!(fs::read(at.join("empty")).unwrap(), b"");
    let names: Vec<_> = fs::read_dir(at).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["etc", "usr", "bin", "empty"], "readdir keeps the order");
}

/// Writes the seed of `builder` to devices and scans them.
fn seed_devices(rig: &mut Rig, builder: &mut Builder, options: &SeedOptions) -> Vec<PathBuf> {
    let (info, template) = builder.write(options).unwrap();
    write_devices(rig.dir.path(), &info, &identity(), template, &builder.data);
    let devices: Vec<_> = ["metadata", "data"].iter().map(|name| rig.attach(name, true)).collect();
    devices.iter().for_each(|device| scan(device));
    devices
}

#[test]
fn a_seed_grows_into_a_sprout() {
    let mut rig = Rig::new();
    let mut builder = small_tree();
    let options = builder.options();
    let seeds = seed_devices(&mut rig, &mut builder, &options);
    btrfs_check(&seeds[0]);

    rig.mount(&seeds[0], libc::MS_RDONLY, SUBVOLUME);
    check_small_tree(&rig.mnt());
    let sprout = rig.sprout(512 << 20);
    rig.add_device(&sprout);
    rig.remount_rw();
    fs::write(rig.mnt().join("etc/hostname"), b"sprout\n").unwrap();
    fs::write(rig.mnt().join("usr/new"), pattern(3, 1 << 20)).unwrap();
    fs::rename(rig.mnt().join("empty"), rig.mnt().join("usr/empty")).unwrap();
    fs::remove_file(rig.mnt().join("etc/big-too")).unwrap();
    rig.unmount();
    btrfs_check(&sprout);

    scan(&sprout);
    rig.mount(&sprout, 0, SUBVOLUME);
    assert_eq!(fs::read(rig.mnt().join("etc/hostname")).unwrap(), b"sprout\n");
    assert_eq!(fs::read(rig.mnt().join("usr/new")).unwrap(), pattern(3, 1 << 20));
    assert_eq!(fs::metadata(rig.mnt().join("bin/big")).unwrap().nlink(), 1);
    assert_eq!(fs::read(rig.mnt().join("etc/services")).unwrap(), pattern(1, 20_000));
    rig.unmount();
}

/// A tree of all kinds of files mounts correctly, and can then be changed and removed: a wrong
/// back reference or count would make the kernel abort.
fn everything_mounts(options: impl Fn(SeedOptions) -> SeedOptions) {
    let mut rig = Rig::new();
    let mut builder = torture();
    let options = options(builder.options());
    let seeds = seed_devices(&mut rig, &mut builder, &options);
    btrfs_check(&seeds[0]);
    rig.mount(&seeds[0], libc::MS_RDONLY, SUBVOLUME);
    compare(&builder, &rig.mnt());
    let sprout = rig.sprout(1 << 30);
    rig.add_device(&sprout);
    rig.remount_rw();
    change_everything(&rig.mnt());
    rig.unmount();
    btrfs_check(&sprout);
    scan(&sprout);
    rig.mount(&sprout, 0, SUBVOLUME);
    for entry in fs::read_dir(rig.mnt()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }
    rig.unmount();
    btrfs_check(&sprout);
}

/// Changes attributes, contents and names of a part of the tree.
fn change_everything(root: &Path) {
    for name in ["names", "files", "shared", "links", "attributes"] {
        let entries: Vec<_> = fs::read_dir(root.join(name)).unwrap().collect();
        for (index, entry) in entries.into_iter().enumerate() {
            let entry = entry.unwrap();
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            if kind.is_file() && index % 3 == 0 {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                std::os::unix::fs::FileExt::write_all_at(&file, b"changed", 2000).unwrap();
            } else if index % 3 == 1 {
                fs::rename(&path, root.join(format!("{name} {index}"))).unwrap();
            } else if kind.is_file() {
                fs::remove_file(&path).unwrap();
            }
        }
    }
}

#[test]
fn everything_mounts_and_can_be_changed() {
    everything_mounts(|options| options);
}

#[test]
fn everything_mounts_with_xxhash64() {
    everything_mounts(|options| SeedOptions { checksum: ChecksumKind::Xxhash64, ..options });
}

#[test]
fn random_trees_pass_btrfs_check_and_mount() {
    let mut runner = TestRunner::deterministic();
    let steps = proptest::collection::vec(grow::step(), 20..200);
    for round in 0..scaled(12, 4) {
        let steps = steps.new_tree(&mut runner).unwrap().current();
        let xxhash = any::<bool>().new_tree(&mut runner).unwrap().current();
        println!("round {round}: xxhash {xxhash}");
        let mut builder = grow::grow(&steps);
        let mut options = builder.options();
        if xxhash {
            options.checksum = ChecksumKind::Xxhash64;
        }
        let mut rig = Rig::new();
        let seeds = seed_devices(&mut rig, &mut builder, &options);
        btrfs_check(&seeds[0]);
        rig.mount(&seeds[0], libc::MS_RDONLY, SUBVOLUME);
        rig.unmount();
    }
}

#[test]
fn a_million_entries_in_one_directory() {
    // The smaller number gives a tree of the same height.
    let entries = scaled(1_000_000, 100_000);
    let mut rig = Rig::new();
    let mut builder = Builder::new();
    let directory = builder.dir(0, "directory");
    (0..entries).for_each(|n| {
        builder.add(directory, format!("entry {n}"), FILE);
    });
    let options = builder.options();
    let seeds = seed_devices(&mut rig, &mut builder, &options);
    rig.mount(&seeds[0], libc::MS_RDONLY, SUBVOLUME);
    let path = rig.mnt().join("directory");
    assert_eq!(fs::read_dir(&path).unwrap().count(), entries);
    for n in (0..entries).step_by(997) {
        let found = fs::symlink_metadata(path.join(format!("entry {n}"))).unwrap();
        assert_eq!(found.ino(), 258 + n as u64);
    }
    let sprout = rig.sprout(1 << 30);
    rig.add_device(&sprout);
    rig.remount_rw();
    fs::write(path.join("one more"), b"text").unwrap();
    (0..entries).step_by(9973).for_each(|n| {
        fs::remove_file(path.join(format!("entry {n}"))).unwrap();
    });
    rig.unmount();
    btrfs_check(&sprout);
}

#[test]
fn a_wrong_byte_is_an_error_in_its_block_only() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Xxhash64] {
        let mut rig = Rig::new();
        let mut builder = Builder::new();
        builder.file(0, "file", &pattern(1, 3 * 4096));
        builder.file(0, "other", &pattern(2, 4096));
        let options = SeedOptions { checksum, ..builder.options() };
        // The data differs from the data that the checksums were computed from.
        let (info, template) = builder.write(&options).unwrap();
        builder.data[4096 + 17] ^= 1;
        write_devices(rig.dir.path(), &info, &identity(), template, &builder.data);
        let seeds = ["metadata", "data"].map(|name| rig.attach(name, true));
        seeds.iter().for_each(|device| scan(device));
        rig.mount(&seeds[0], libc::MS_RDONLY, SUBVOLUME);
        assert_eq!(fs::read(rig.mnt().join("other")).unwrap(), pattern(2, 4096));
        let file = fs::File::open(rig.mnt().join("file")).unwrap();
        let mut block = [0; 4096];
        let mut read = |n: u64| {
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut block, n * 4096)
                .map(|()| block.to_vec())
        };
        assert_eq!(read(1).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(read(0).unwrap(), pattern(1, 3 * 4096)[..4096]);
        assert_eq!(read(2).unwrap(), pattern(1, 3 * 4096)[8192..]);
        drop(file);
        rig.unmount();
    }
}
