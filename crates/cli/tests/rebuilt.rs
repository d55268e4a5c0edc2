//! Images that have most of their content in common share it in the host's cache: what the second
//! one fetches. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use testkit::{Burgeon, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const NONE: [&str; 3] = ["--read-only", "--profile", "none"];

fn cache(burgeon: &Burgeon) -> Value {
    let said = burgeon.ok(&["cache", "status", "--json"]);
    serde_json::from_str::<Value>(&said).unwrap()["cache"].clone()
}

fn fetched(burgeon: &Burgeon) -> u64 {
    let status = burgeon.status();
    let mounts = status["mounts"].as_array().unwrap().iter();
    mounts.map(|mount| mount["reads"]["fetched_bytes"].as_u64().unwrap()).sum()
}

/// Folders of files, by the seed of each.
type Tree = Vec<Vec<(u64, usize)>>;

fn write(space: &Space, name: &str, tree: &Tree) -> PathBuf {
    let root = space.make_folder(name);
    for (folder, files) in tree.iter().enumerate() {
        let folder = root.join(format!("d{folder:02}"));
        fs::create_dir(&folder).unwrap();
        for (number, (seed, len)) in files.iter().enumerate() {
            fs::write(folder.join(format!("f{number:02}")), Rng::new(*seed).bytes(*len)).unwrap();
        }
    }
    root
}

/// Reads all files of the mount, and compares them.
fn assert_same(tree: &Tree, at: &Path) {
    for (folder, files) in tree.iter().enumerate() {
        for (number, (seed, len)) in files.iter().enumerate() {
            let path = at.join(format!("d{folder:02}/f{number:02}"));
            assert!(fs::read(&path).unwrap() == Rng::new(*seed).bytes(*len), "{}", path.display());
        }
    }
}

/// Bytes that a mount of the image `changed` fetches when one of `tree` has been read before.
fn fetches(label: &str, tree: &Tree, changed: &Tree) -> u64 {
    let space = Space::new(label);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let images = [("one", tree), ("two", changed)];
    for (name, tree) in images {
        burgeon.build(&write(&space, name, tree), name);
    }
    let mounts = images.map(|(name, tree)| {
        let mounted = burgeon.mount(name, &space.path(&format!("at-{name}")), &NONE);
        assert_same(tree, mounted.path());
        // Readers do not wait until the data they read is kept.
        let all: u64 = tree.iter().flatten().map(|(_, len)| *len as u64).sum();
        assert!(wait_until(PATIENCE, || cache(&burgeon)["used"].as_u64().unwrap() >= all));
        mounted
    });
    let status = burgeon.status();
    let mut all = status["mounts"].as_array().unwrap().iter();
    let second = all.find(|mount| mount["image"] == "two").unwrap();
    let bytes = second["reads"]["fetched_bytes"].as_u64().unwrap();
    mounts.into_iter().for_each(|mounted| burgeon.umount(mounted));
    bytes
}

/// 30 folders of 50 files of 2 to 40 KiB.
fn small_files() -> Tree {
    let mut rng = Rng::new(7);
    (0..30u64)
        .map(|folder| {
            let mut file = |number| (folder * 100 + number, 2048 + rng.below(38 << 10) as usize);
            (0..50u64).map(&mut file).collect()
        })
        .collect()
}

#[test]
fn a_rebuilt_image_fetches_the_folder_that_has_changed() {
    let tree = small_files();
    let mut changed = tree.clone();
    changed[11].iter_mut().for_each(|(seed, _)| *seed += 100_000);
    let differs: usize = changed[11].iter().map(|(_, len)| len).sum();
    let bytes = fetches("rebuilt-folder", &tree, &changed);
    println!("one folder of {differs} bytes has changed: {bytes} bytes are fetched");
    assert!(bytes <= differs as u64 * 3 / 2, "{bytes} of {differs}");
}

#[test]
fn a_rebuilt_image_with_scattered_changes_shares_the_rest() {
    let tree = small_files();
    let mut changed = tree.clone();
    let (mut all, mut differs) = (0, 0);
    for folder in &mut changed {
        all += folder.iter().map(|(_, len)| *len as u64).sum::<u64>();
        folder[17].0 += 100_000;
        differs += folder[17].1 as u64;
    }
    let bytes = fetches("rebuilt-scattered", &tree, &changed);
    println!("30 files, {differs} bytes of {all}, have changed: {bytes} bytes are fetched");
    assert!(bytes <= 4 * differs, "{bytes} of {differs}");
}

/// 20 files of 1 MiB, of which the last two differ.
#[test]
fn two_images_fetch_what_they_share_once() {
    const LEN: usize = 1 << 20;
    let tree = |own: u64| {
        let seed = |number: u64| if number < 18 { number } else { own + number };
        vec![(0..20).map(|number| (seed(number), LEN)).collect()]
    };
    let trees: [Tree; 2] = [tree(1000), tree(2000)];
    let space = Space::new("cache-shared");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let [one, two] = ["one", "two"];
    for (tree, name) in trees.iter().zip([one, two]) {
        burgeon.build(&write(&space, name, tree), name);
    }
    let first = burgeon.mount(one, &space.path("at-one"), &NONE);
    assert_same(&trees[0], first.path());
    let (all, before) = (20 * LEN as u64, fetched(&burgeon));
    assert!(before >= all, "{before}");
    // Readers do not wait until the data they read is kept.
    assert!(wait_until(PATIENCE, || cache(&burgeon)["used"].as_u64().unwrap() >= all));
    let second = burgeon.mount(two, &space.path("at-two"), &NONE);
    assert_same(&trees[1], second.path());
    let more = fetched(&burgeon) - before;
    let differs = 2 * LEN as u64;
    println!("the second image fetched {more} bytes, of which {differs} differ");
    assert!(more <= differs * 13 / 10, "{more} of {differs}");
    let status = cache(&burgeon);
    let [came, shared] =
        [&status["read"]["fetched"], &status["shared"]].map(|it| it.as_u64().unwrap());
    assert_eq!(came, before + more, "{status}");
    let common = 18 * LEN as u64;
    // Two reads at once may both find a chunk.
    assert!((common * 9 / 10..=common * 11 / 10).contains(&shared), "{shared} of {common}");
    // A server that takes over finds the kept chunks.
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    drop_caches();
    assert_same(&trees[1], second.path());
    [first, second].into_iter().for_each(|mounted| burgeon.umount(mounted));
}
