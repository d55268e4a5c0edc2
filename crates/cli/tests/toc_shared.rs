//! Images that are known by tables of contents (TOC) alone share what they have in common in the
//! host's cache: what the next version of one fetches. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::{Value, json};
use testkit::{
    Burgeon, Estargz, Link, OciLayout, PATIENCE, Registry, Rng, Space, drop_caches, skopeo_copy,
    wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const NONE: [&str; 3] = ["--read-only", "--profile", "none"];
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Folders of files: seed and length of each.
type Tree = Vec<Vec<(u64, usize)>>;

fn len(files: &[(u64, usize)]) -> u64 {
    files.iter().map(|(_, len)| *len as u64).sum()
}

/// 40 folders of 60 files of 2 to 40 KiB, and a file of 5 MB in every tenth.
fn tree() -> Tree {
    let mut rng = Rng::new(7);
    (0..40u64)
        .map(|folder| {
            let mut file = |number| (folder * 100 + number, 2048 + rng.below(38 << 10) as usize);
            let mut files: Vec<_> = (0..60).map(&mut file).collect();
            if folder % 10 == 5 {
                files[30].1 = 5_000_000;
            }
            files
        })
        .collect()
}

fn path(folder: usize, number: usize) -> String {
    format!("d{folder:02}/f{number:02}")
}

/// The layout of an eStargz image of `tree`, whose big files are cut every 4 MiB.
fn estargz(space: &Space, name: &str, tree: &Tree) -> PathBuf {
    let root = space.make_folder(&format!("{name}-tree"));
    let mut paths = Vec::new();
    for (folder, files) in tree.iter().enumerate() {
        fs::create_dir(root.join(format!("d{folder:02}"))).unwrap();
        for (number, (seed, len)) in files.iter().enumerate() {
            paths.push(path(folder, number));
            fs::write(root.join(path(folder, number)), Rng::new(*seed).bytes(*len)).unwrap();
        }
    }
    let mut tar = Command::new("tar");
    let tar = tar.args(["--format=pax", "--mtime=@1600000000", "-c", "-C"]).arg(&root).args(paths);
    let output = tar.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let layer = Estargz::new(&output.stdout, 4 << 20, |_| ()).unwrap();
    let annotate = |manifest: &mut Value| {
        let toc = json!({ "containerd.io/snapshot/stargz/toc.digest": layer.digest });
        manifest["layers"][0]["annotations"] = toc;
    };
    let layout = space.path(&format!("{name}-layout"));
    OciLayout::by_hand(&layout, None, &[(GZIP, layer.blob.clone())], annotate).unwrap();
    layout
}

fn assert_same(tree: &Tree, at: &Path) {
    for (folder, files) in tree.iter().enumerate() {
        for (number, (seed, len)) in files.iter().enumerate() {
            let name = path(folder, number);
            assert!(fs::read(at.join(&name)).unwrap() == Rng::new(*seed).bytes(*len), "{name}");
        }
    }
}

fn cache(burgeon: &Burgeon) -> Value {
    let said = burgeon.ok(&["cache", "status", "--json"]);
    serde_json::from_str::<Value>(&said).unwrap()["cache"].clone()
}

/// True if no fetch is in flight: readers do not wait until the data they read is kept.
fn is_idle(burgeon: &Burgeon) -> bool {
    let status = burgeon.status();
    let mounts = status["mounts"].as_array().unwrap();
    mounts.iter().all(|mount| mount["cache"]["in_flight"] == 0)
}

/// Reads all of `tree`, and then each of the `versions`, on a host of its own, from a registry.
/// Returns for each of these the bytes that came while its files were read, headers included.
fn fetches(label: &str, tree: &Tree, versions: &[(&str, &Tree)]) -> Vec<u64> {
    let space = Space::new(label);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let link = Link::new(registry.address(), Duration::ZERO, 1 << 30).unwrap();
    let push = |name: &str, tree: &Tree| {
        let from = format!("oci:{}", estargz(&space, name, tree).display());
        skopeo_copy(&[], &from, &format!("docker://{}/app:{name}", registry.address())).unwrap();
    };
    let all: u64 = tree.iter().map(|files| len(files)).sum();
    push("first", tree);
    let read = |version: &(&str, &Tree)| {
        let (name, changed) = version;
        push(name, changed);
        let burgeon = Burgeon::with_state(PROGRAM, space.path(&format!("{name}-host")));
        let image = |name: &str| format!("oci://{}/app:{name}", link.address());
        let first = burgeon.mount(&image("first"), &space.path(&format!("{name}-at-1")), &NONE);
        assert_same(tree, first.path());
        assert!(wait_until(PATIENCE, || is_idle(&burgeon)));
        let second = burgeon.mount(&image(name), &space.path(&format!("{name}-at-2")), &NONE);
        // The table is a file of the image, too. It always differs, and the kernel may read it
        // ahead.
        fs::read(second.path().join("stargz.index.json")).unwrap();
        assert!(wait_until(PATIENCE, || is_idle(&burgeon)));
        let before = link.bytes();
        assert_same(changed, second.path());
        assert!(wait_until(PATIENCE, || is_idle(&burgeon)));
        let bytes = link.bytes() - before;
        // Then it is all here, and its reads are verified: no byte comes any more.
        drop_caches();
        assert_same(changed, second.path());
        assert_eq!(link.bytes(), before + bytes);
        let status = cache(&burgeon);
        let shared = status["shared"].as_u64().unwrap();
        assert!((all / 2..=all * 11 / 10).contains(&shared), "{status}");
        [first, second].into_iter().for_each(|mounted| burgeon.umount(mounted));
        bytes
    };
    versions.iter().map(read).collect()
}

#[test]
fn the_next_version_of_an_image_fetches_what_differs() {
    let tree = tree();
    let change = |files: &mut [(u64, usize)]| files.iter_mut().for_each(|file| file.0 += 100_000);
    let all: u64 = tree.iter().map(|files| len(files)).sum();
    println!("{all} bytes in {} files", tree.iter().flatten().count());
    // One file of many, in the middle.
    let mut one_file = tree.clone();
    change(&mut one_file[25][30..31]);
    // A tenth of the image: four folders, of which the files have other lengths, too.
    let mut folders = tree.clone();
    folders[20..24].iter_mut().for_each(|files| change(files));
    folders[21].truncate(50);
    let versions = [("file", &one_file), ("folders", &folders)];
    let differs = [len(&one_file[25][30..31]), folders[20..24].iter().map(|it| len(it)).sum()];
    let came = fetches("toc-shared", &tree, &versions);
    for (((name, _), differs), came) in versions.iter().zip(differs).zip(came) {
        let ratio = came as f64 / differs as f64;
        println!("{name}: {differs} bytes differ, {came} bytes came: {ratio:.2} times as many");
        assert!(came <= differs * 13 / 10, "{name}: {came} of {differs}");
    }
}
