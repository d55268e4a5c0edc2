//! Layers that are stored beside the host's cache, which end at its floor. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use serde_json::Value;
use testkit::{
    Burgeon, Mounted, OciLayout, PATIENCE, Registry, Rng, Space, drop_caches, skopeo_copy,
    wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const MIB: u64 = 1 << 20;
/// Layers of the image, and bytes of each.
const LAYERS: u64 = 2;
const LAYER_LEN: u64 = 24 * MIB;
/// Room above the floor, which chunks fill.
const ROOM: u64 = 72 * MIB;
/// Bytes of a disk for the journal, records and the file system's own blocks.
const OWN: u64 = 3 * MIB;

fn status_of_cache(burgeon: &Burgeon) -> Value {
    serde_json::from_str(&burgeon.ok(&["cache", "status", "--json"])).unwrap()
}

fn shown(burgeon: &Burgeon, field: &str) -> u64 {
    status_of_cache(burgeon)["cache"][field].as_u64().unwrap()
}

fn free(folder: &Path) -> u64 {
    let disk = statvfs(folder).unwrap();
    disk.f_bavail * disk.f_frsize
}

/// The bytes of the file of this layer.
fn content(image: u64, layer: u64) -> Vec<u8> {
    Rng::new(100 * image + layer).bytes(LAYER_LEN as usize)
}

/// Pushes an image of [`LAYERS`] layers, and returns its reference.
fn push(space: &Space, registry: &Registry, image: u64) -> String {
    let layout = OciLayout::new(&space.path(&format!("layout-{image}"))).unwrap();
    for layer in 0..LAYERS {
        let write = |root: &Path| {
            fs::write(root.join(format!("f{layer}")), content(image, layer)).unwrap();
        };
        layout.change(write).unwrap();
    }
    let name = format!("{}/app:{image}", registry.address());
    let from = format!("oci:{}", layout.folder().display());
    skopeo_copy(&[], &from, &format!("docker://{name}")).unwrap();
    format!("oci://{name}")
}

fn assert_same(at: &Path, image: u64) {
    drop_caches();
    for layer in 0..LAYERS {
        let read = fs::read(at.join(format!("f{layer}"))).unwrap();
        assert!(read == content(image, layer), "image {image}, layer {layer}");
    }
}

/// Mounts an image, and returns the notes of the command.
fn mount(burgeon: &Burgeon, image: &str, at: &Path) -> (Mounted, String) {
    fs::create_dir_all(at).unwrap();
    let options = ["--read-only", "--profile", "none"];
    let done = burgeon.run(&[&["mount", image, at.to_str().unwrap()], &options[..]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
    (Mounted::at(at), done.stderr)
}

/// While chunks are read and layers stored, free space stays above the floor; without room, layers
/// are not stored, and every byte is read from the registry.
#[test]
fn layers_take_no_space_below_the_floor() {
    let space = Space::new("cache-layers-floor");
    let folder = space.make_folder("disk");
    let disk = space.disk(&folder, 512 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, folder.join("state"));
    let tree = space.make_folder("tree");
    for number in 0..ROOM / MIB {
        fs::write(tree.join(format!("f{number}")), Rng::new(number).bytes(MIB as usize)).unwrap();
    }
    let store = space.path("store");
    let from = store.to_str().unwrap();
    burgeon.ok(&["--store", from, "build", tree.to_str().unwrap(), "chunks"]);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let images = [0, 1].map(|image| push(&space, &registry, image));
    let [at_chunks, at, other] = ["chunks", "at", "other"].map(|name| space.path(name));

    let options = ["--read-only", "--profile", "none"];
    let chunks = burgeon.mount("chunks", &at_chunks, &[&options[..], &["--store", from]].concat());
    // As users have it: the testkit's own settings have no floor.
    burgeon.ok(&["cache", "resize", "--keep-free", "25%"]);
    let floor = shown(&burgeon, "floor");
    let hog = File::create(folder.join("hog")).unwrap();
    fallocate(&hog, FallocateFlags::empty(), 0, free(&folder) - floor - ROOM).unwrap();
    let read_chunks = || {
        for number in 0..ROOM / MIB {
            let read = fs::read(at_chunks.join(format!("f{number}"))).unwrap();
            assert!(read == Rng::new(number).bytes(MIB as usize), "{number}");
        }
    };
    read_chunks();
    assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= ROOM / 8 * 7));
    let before = shown(&burgeon, "evicted");
    let (least, ends) = (AtomicU64::new(u64::MAX), AtomicBool::new(false));
    let mounted = thread::scope(|scope| {
        // A reader admits chunks all the time.
        scope.spawn(|| {
            while !ends.load(Relaxed) {
                drop_caches();
                read_chunks();
            }
        });
        scope.spawn(|| {
            while !ends.load(Relaxed) {
                least.fetch_min(free(&folder), Relaxed);
                thread::yield_now();
            }
        });
        let (mounted, said) = mount(&burgeon, &images[0], &at);
        ends.store(true, Relaxed);
        assert!(!said.contains("not stored"), "{said}");
        mounted
    });
    let least = least.into_inner();
    println!("the least that was free: {least}; the floor: {floor}");
    assert!(least + OWN >= floor, "{least} bytes were free, and {floor} should be");
    assert!(shown(&burgeon, "layers") >= LAYERS * LAYER_LEN);
    assert!(shown(&burgeon, "evicted") > before, "chunks gave way");
    assert_same(&at, 0);

    // Others take all of it, and nothing is left to be evicted.
    let hog = File::create(folder.join("second hog")).unwrap();
    let all = free(&folder) - 8 * MIB;
    fallocate(&hog, FallocateFlags::empty(), 0, all).unwrap();
    let gave_way = || shown(&burgeon, "used") == 0 && shown(&burgeon, "layers") == 0;
    assert!(wait_until(PATIENCE, gave_way), "{}", status_of_cache(&burgeon));
    assert!(free(&folder) < floor);
    let layers = || fs::read_dir(burgeon.state().join("store/layers")).unwrap().count();
    let (second, said) = mount(&burgeon, &images[1], &other);
    assert!(said.contains("2 layers not stored"), "{said}");
    assert_eq!(layers(), 0);
    assert_same(&other, 1);
    assert_same(&at, 0);
    burgeon.fails(&["pull", "--eager", &images[1]], 6, "less free space than Burgeon leaves");
    assert_eq!(layers(), 0);
    // With room again, a pull stores them all.
    fs::remove_file(folder.join("second hog")).unwrap();
    drop(hog);
    burgeon.ok(&["pull", "--eager", &images[1]]);
    assert_eq!(layers() as u64, LAYERS);
    assert!(free(&folder) + OWN >= floor);
    [chunks, mounted, second].into_iter().for_each(|mounted| burgeon.umount(mounted));
    burgeon.ok(&["shutdown"]);
    drop(disk);
}

/// `let-go` makes room for its copy, also with layers if chunks are not enough.
#[test]
fn a_mount_is_let_go_in_the_room_of_evicted_layers() {
    let space = Space::new("cache-layers-let-go");
    let folder = space.make_folder("disk");
    let disk = space.disk(&folder, 512 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, folder.join("state"));
    let (tree, store) = (space.make_folder("tree"), space.path("store"));
    let from = store.to_str().unwrap();
    let bytes = Rng::new(7).bytes(40 * MIB as usize);
    fs::write(tree.join("f"), &bytes).unwrap();
    burgeon.ok(&["--store", from, "build", tree.to_str().unwrap(), "chunks"]);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let image = push(&space, &registry, 0);
    let (other, at) = (space.path("other"), space.path("at"));
    let (layered, _) = mount(&burgeon, &image, &other);
    let options = ["--read-only", "--profile", "none", "--transport", "fuse", "--store", from];
    let mounted = burgeon.mount("chunks", &at, &options);
    assert!(shown(&burgeon, "layers") >= LAYERS * LAYER_LEN);
    let floor = 24 * MIB;
    burgeon.ok(&["cache", "resize", "--keep-free", &floor.to_string()]);
    // 30 MiB are lacking, which is more than one layer.
    let hog = File::create(folder.join("hog")).unwrap();
    fallocate(&hog, FallocateFlags::empty(), 0, free(&folder) - floor - 10 * MIB).unwrap();
    burgeon.ok(&["let-go", at.to_str().unwrap()]);
    assert_eq!(shown(&burgeon, "layers"), 0);
    drop_caches();
    assert!(fs::read(at.join("f")).unwrap() == bytes);
    assert_same(&other, 0);
    [layered, mounted].into_iter().for_each(|mounted| burgeon.umount(mounted));
    burgeon.ok(&["shutdown"]);
    drop(disk);
}
