//! A store that lies, lacks or goes away: EIO on the blocks concerned and nowhere else, counted
//! by `status`, named by `verify`.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use testkit::{
    AlignedBlock, Burgeon, Comparison, PATIENCE, Pattern, Space, compare, drop_caches, scaled,
    wait_until,
};

const BURGEON: &str = env!("CARGO_BIN_EXE_burgeon");

/// Files of the image; each fills several chunks.
const FILES: u64 = 12;
/// Blocks of a file: 512 KiB.
const BLOCKS: u64 = 128;

struct Damage {
    // Dropped in this order: the daemon ends before its folder goes.
    burgeon: Burgeon,
    space: Space,
    tree: PathBuf,
    store: PathBuf,
}

impl Damage {
    /// An installation with the image `image` of some files that do not compress.
    fn new(label: &str) -> Self {
        let space = Space::new(label);
        let store = space.path("store");
        let burgeon = Burgeon::new(BURGEON, &space).option("--store").option(&store);
        let tree = space.make_folder("tree");
        for seed in 0..FILES {
            Pattern { seed, blocks: BLOCKS }.write(&tree.join(format!("file-{seed}"))).unwrap();
        }
        fs::write(tree.join("inline"), "small enough for the metadata").unwrap();
        burgeon.build(&tree, "image");
        Self { burgeon, space, tree, store }
    }

    fn files(&self, folder: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.store.join(folder)).unwrap();
        let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort_by_key(|path| fs::metadata(path).unwrap().len());
        files
    }

    /// The largest pack.
    fn pack(&self) -> PathBuf {
        self.files("packs").pop().unwrap()
    }

    /// Mounts the image, compares it, and unmounts; gives the number of entries that gave EIO.
    fn unreadable(&self) -> (u64, serde_json::Value) {
        let mounted = self.burgeon.mount("image", &self.space.path("at"), &["--read-only"]);
        let found: Comparison = compare(&self.tree, mounted.path()).unwrap();
        let errors = found.only_io_errors();
        let text = fs::read_to_string(mounted.path().join("inline")).unwrap();
        assert_eq!(text, "small enough for the metadata");
        let reads = self.burgeon.status()["mounts"][0]["reads"].clone();
        self.burgeon.umount(mounted);
        (errors, reads)
    }

    /// `verify` fails and names `file`.
    #[track_caller]
    fn verify_names(&self, file: &Path) {
        let finished = self.burgeon.run(&["verify", "image"]);
        let name = file.file_name().unwrap().to_string_lossy();
        let said = format!("{}{}", finished.stdout, finished.stderr);
        assert!(finished.code != Some(0) && said.contains(&*name), "{name}: {finished:#?}");
    }
}

fn flip_a_bit(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

#[test]
fn a_sound_store_verifies_and_reads_without_an_error() {
    let damage = Damage::new("sound");
    damage.burgeon.ok(&["verify", "image"]);
    let (errors, reads) = damage.unreadable();
    assert_eq!((errors, &reads["failed_reads"]), (0, &0.into()));
}

#[test]
fn a_flipped_bit_in_a_pack_costs_one_chunk() {
    let damage = Damage::new("flipped");
    let pack = damage.pack();
    flip_a_bit(&pack, len(&pack) / 2);
    damage.verify_names(&pack);
    let (errors, reads) = damage.unreadable();
    assert_eq!(errors, 1, "one chunk belongs to one file here");
    assert!(reads["failed_reads"].as_u64() > Some(0), "{reads}");
    assert!(reads["source_corrupt_chunks"].as_u64() > Some(0), "{reads}");
}

#[test]
fn a_truncated_pack_costs_what_was_cut() {
    let damage = Damage::new("truncated");
    let pack = damage.pack();
    let file = OpenOptions::new().write(true).open(&pack).unwrap();
    file.set_len(len(&pack) / 2).unwrap();
    damage.verify_names(&pack);
    let (errors, reads) = damage.unreadable();
    assert!((1..FILES).contains(&errors), "{errors} files unreadable");
    assert!(reads["failed_reads"].as_u64() > Some(0), "{reads}");
}

#[test]
fn a_missing_pack_costs_its_chunks_until_it_is_back() {
    let damage = Damage::new("missing");
    let pack = damage.pack();
    let away = damage.space.path("away");
    fs::rename(&pack, &away).unwrap();
    damage.verify_names(&pack);
    let (errors, reads) = damage.unreadable();
    assert!(errors >= 1, "{errors} files unreadable");
    assert!(reads["failed_reads"].as_u64() > Some(0), "{reads}");
    fs::rename(&away, &pack).unwrap();
    assert_eq!(damage.unreadable().0, 0, "everything is back");
    damage.burgeon.ok(&["verify", "image"]);
}

#[test]
fn swapped_packs_are_no_data() {
    let damage = Damage::new("swapped");
    // A pack of another image, as long as it gets, in the place of ours.
    let other = damage.space.make_folder("other");
    for seed in 100..100 + FILES {
        let path = other.join(format!("file-{seed}"));
        Pattern { seed, blocks: BLOCKS }.write(&path).unwrap();
    }
    let pack = damage.pack();
    damage.burgeon.build(&other, "other");
    let foreign = damage.files("packs").into_iter().filter(|path| *path != pack);
    fs::copy(foreign.max_by_key(|path| len(path)).unwrap(), &pack).unwrap();
    damage.verify_names(&pack);
    let (errors, reads) = damage.unreadable();
    assert!(errors >= 1, "{errors} files unreadable");
    assert!(reads["source_corrupt_chunks"].as_u64() > Some(0), "{reads}");
}

#[test]
fn a_damaged_manifest_is_refused_before_mounting() {
    let damage = Damage::new("manifest");
    let manifest = damage.files("manifests").pop().unwrap();
    let good = fs::read(&manifest).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    let mut later = good.clone();
    later[8..12].copy_from_slice(&[0xff; 4]);
    let bad: [(&str, &[u8]); 5] = [
        ("flipped", &flipped),
        ("later version", &later),
        ("truncated", &good[..good.len() / 2]),
        ("empty", b""),
        ("something else", &[7; 5000]),
    ];
    let at = damage.space.make_folder("at");
    let name = manifest.file_name().unwrap().to_str().unwrap().to_owned();
    for (kind, bytes) in bad {
        fs::write(&manifest, bytes).unwrap();
        for arguments in [&["mount", "image", at.to_str().unwrap()][..], &["verify", "image"]] {
            let finished = damage.burgeon.run(arguments);
            let says = finished.stderr.contains(&name) || finished.stdout.contains(&name);
            assert!(finished.code != Some(0) && says, "{kind}: {arguments:?}: {finished:#?}");
        }
    }
    fs::remove_file(&manifest).unwrap();
    damage.verify_names(&manifest);
    fs::write(&manifest, &good).unwrap();
    assert_eq!(damage.unreadable().0, 0);
}

#[test]
fn a_store_that_goes_away_and_comes_back_is_used_again() {
    let damage = Damage::new("away");
    let mounted = damage.burgeon.mount("image", &damage.space.path("at"), &["--read-only"]);
    let read = |file: &str| Command::new("cat").arg(mounted.path().join(file)).output().unwrap();
    assert!(read("file-0").status.success());
    let away = damage.space.path("store-away");
    fs::rename(&damage.store, &away).unwrap();
    drop_caches();
    assert!(read("file-0").status.success(), "what was read is local");
    // One block by one request: each waits for as long as a store is asked again.
    let file = Pattern::open_direct(&mounted.path().join("file-9")).unwrap();
    let unread = Pattern { seed: 9, blocks: BLOCKS };
    let found = unread.check(&file, 0, &mut AlignedBlock::default());
    assert!(found.is_err(), "what was not read is not");
    drop(file);
    damage.burgeon.ok(&["status"]);
    damage.burgeon.fails(&["list"], 3, "the store");
    assert!(!damage.store.exists(), "no command may put an empty store in its place");
    assert_eq!(fs::read_dir(mounted.path()).unwrap().count() as u64, FILES + 1);
    fs::rename(&away, &damage.store).unwrap();
    drop_caches();
    compare(&damage.tree, mounted.path()).unwrap().assert_same();
    damage.burgeon.umount(mounted);
}

#[test]
fn a_rotten_cache_is_a_miss_and_never_data() {
    let damage = Damage::new("rotten");
    assert_eq!(damage.unreadable().0, 0);
    damage.burgeon.ok(&["shutdown"]);
    for cache in damage.burgeon.arenas() {
        let file = OpenOptions::new().write(true).open(&cache).unwrap();
        // Sixteen places, spread over the data.
        let len = len(&cache);
        for part in 0..16 {
            let from = len / 16 * part;
            if let Ok(at) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(from)) {
                file.write_all_at(&[0xa5; 64], at + 512).unwrap();
            }
        }
    }
    let (errors, reads) = damage.unreadable();
    assert_eq!(errors, 0);
    assert!(reads["cache_corrupt_blocks"].as_u64() > Some(0), "{reads}");
}

/// A way to damage a file.
type Harm = fn(&Path);

/// Kinds of damage: the name of each, and the function that does it.
const DAMAGES: [(&str, Harm); 4] = [
    ("flipped", |path| flip_a_bit(path, 64)),
    ("cut short", |path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(len(path) / 2).unwrap();
    }),
    ("empty", |path| fs::write(path, "").unwrap()),
    ("missing", |path| fs::remove_file(path).unwrap()),
];

impl Damage {
    /// The folder of the image as it was prepared.
    fn prepared(&self) -> PathBuf {
        let mut images = fs::read_dir(self.burgeon.state().join("images")).unwrap();
        images.next().unwrap().unwrap().path()
    }

    /// Reads the first bytes of a file in a process of its own, which may hang; whether that
    /// succeeded.
    fn reads(&self, file: &Path) -> bool {
        let mut child = Command::new("head")
            .args(["-c", "1"])
            .arg(file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let ended = wait_until(PATIENCE, || child.try_wait().unwrap().is_some());
        if !ended {
            // Its reader is released by that, and the test can end.
            self.burgeon.kill_daemon();
        }
        assert!(ended, "a reader of {} hangs", file.display());
        child.wait().unwrap().success()
    }

    fn kill_server(&self) {
        let before = self.burgeon.status()["server_pid"].as_u64().unwrap();
        testkit::kill(u32::try_from(before).unwrap());
        let next = wait_until(PATIENCE, || {
            self.burgeon.status()["server_pid"].as_u64().is_some_and(|pid| pid != before)
        });
        assert!(next, "there is no new server");
    }
}

#[test]
fn a_mount_with_damaged_files_gives_errors_can_be_unmounted_and_is_served_again() {
    let damage = Damage::new("damaged-served");
    for (round, (file, (kind, harm))) in ["map", "seed.info"].into_iter().zip(DAMAGES).enumerate() {
        for options in [&["--read-only"][..], &["--writes", "w", "--write-limit", "256M"]] {
            let at = damage.space.path("at");
            let mounted = damage.burgeon.mount("image", &at, options);
            let folder = match options[0] {
                "--writes" => damage.burgeon.state().join("writes/w"),
                _ => damage.prepared(),
            };
            // Without its store the image cannot be prepared anew.
            let away = damage.space.path("store-away");
            fs::rename(&damage.store, &away).unwrap();
            harm(&folder.join(file));
            damage.kill_server();
            drop_caches();
            let read = damage.reads(&at.join(format!("file-{round}")));
            assert!(!read, "{file} {kind}, {options:?}: data out of nothing");
            assert_eq!(damage.burgeon.status()["mounts"][0]["state"], "failed");
            if round == 1 {
                damage.burgeon.umount(mounted);
                fs::rename(&away, &damage.store).unwrap();
                continue;
            }
            fs::rename(&away, &damage.store).unwrap();
            let back =
                wait_until(PATIENCE, || damage.burgeon.status()["mounts"][0]["state"] == "serving");
            assert!(back, "{file} {kind}, {options:?}: {:#}", damage.burgeon.status());
            drop_caches();
            compare(&damage.tree, mounted.path()).unwrap().assert_same();
            damage.burgeon.umount(mounted);
        }
    }
}

#[test]
fn damaged_files_of_a_prepared_image_are_made_again_by_a_mount() {
    let damage = Damage::new("damaged-prepared");
    let at = damage.space.path("at");
    let named = ["--writes", "w", "--write-limit", "256M"];
    damage.burgeon.umount(damage.burgeon.mount("image", &at, &named));
    for (number, (kind, harm)) in DAMAGES.into_iter().enumerate() {
        let file = ["map", "seed.info"][number % 2];
        let writes = damage.burgeon.state().join("writes/w");
        for (folder, options) in [(damage.prepared(), &["--read-only"][..]), (writes, &named[..2])]
        {
            harm(&folder.join(file));
            let mounted = damage.burgeon.mount("image", &at, options);
            println!("{file} {kind}, {options:?}: mounted");
            drop_caches();
            compare(&damage.tree, mounted.path()).unwrap().assert_same();
            damage.burgeon.umount(mounted);
        }
    }
    for file in ["seed", "map"] {
        let path = damage.prepared().join(file);
        fs::remove_file(&path).unwrap();
        fs::create_dir_all(path.join("in its place")).unwrap();
        let mounted = damage.burgeon.mount("image", &at, &["--read-only"]);
        compare(&damage.tree, mounted.path()).unwrap().assert_same();
        damage.burgeon.umount(mounted);
    }
    // The version of a map, which is unknown then, its header and its sections.
    for offset in [8, 40, 100, 5000] {
        let map = OpenOptions::new().write(true).open(damage.prepared().join("map")).unwrap();
        map.write_all_at(b"junk", offset).unwrap();
        let mounted = damage.burgeon.mount("image", &at, &["--read-only"]);
        compare(&damage.tree, mounted.path()).unwrap().assert_same();
        damage.burgeon.umount(mounted);
    }
}

/// The checksum of a block in a map: reads find it wrong, and nothing else is.
#[test]
fn a_map_with_a_wrong_checksum_is_made_again_by_the_next_mount() {
    let damage = Damage::new("damaged-checksum");
    let at = damage.space.path("at");
    let named = ["--writes", "w", "--write-limit", "256M"];
    damage.burgeon.umount(damage.burgeon.mount("image", &at, &named));
    let writes = damage.burgeon.state().join("writes/w");
    let good = fs::read(writes.join("map")).unwrap();
    // Checksums are at the end of a map. Both names are of one file.
    flip_a_bit(&writes.join("map"), good.len() as u64 - 100);
    for (folder, options) in [(damage.prepared(), &["--read-only"][..]), (writes, &named[..2])] {
        let map = folder.join("map");
        let mounted = damage.burgeon.mount("image", &at, options);
        drop_caches();
        compare(&damage.tree, mounted.path()).unwrap().assert_same();
        damage.burgeon.umount(mounted);
        assert!(fs::read(&map).unwrap() != good);
        let mounted = damage.burgeon.mount("image", &at, options);
        assert!(fs::read(&map).unwrap() == good, "the map was not made again: {options:?}");
        assert!(!folder.join("doubted").exists());
        drop_caches();
        compare(&damage.tree, mounted.path()).unwrap().assert_same();
        damage.burgeon.umount(mounted);
    }
}

#[test]
fn writes_are_mounted_again_after_their_template_was_changed_and_removed() {
    let damage = Damage::new("damaged-template");
    let at = damage.space.path("at");
    let named = ["--writes", "w", "--write-limit", "256M"];
    damage.burgeon.umount(damage.burgeon.mount("image", &at, &named));
    // The prepared image has the same file, and its length is right.
    let template = damage.burgeon.state().join("writes/w/seed");
    flip_a_bit(&template, 5 << 20);
    let found = damage.burgeon.run(&["doctor"]).stdout;
    assert!(found.contains("seed is damaged") && found.contains("remove `seed`"), "{found}");
    assert!(found.contains("nothing that was written is lost"), "{found}");
    fs::remove_file(&template).unwrap();
    let mounted = damage.burgeon.mount("image", &at, &named[..2]);
    drop_caches();
    compare(&damage.tree, mounted.path()).unwrap().assert_same();
    damage.burgeon.umount(mounted);
    assert!(!damage.burgeon.run(&["doctor"]).stdout.contains("is damaged"));
    // Too long to be read, as a hole.
    for file in ["seed", "map"] {
        let path = template.with_file_name(file);
        fs::File::options().write(true).open(path).unwrap().set_len(1 << 42).unwrap();
        let found = damage.burgeon.run(&["doctor"]).stdout;
        assert!(found.contains(&format!("{file} is damaged")), "{found}");
        damage.burgeon.umount(damage.burgeon.mount("image", &at, &named[..2]));
        assert!(!damage.burgeon.run(&["doctor"]).stdout.contains("is damaged"));
    }
}

/// Offset of the superblock of btrfs on each device.
const SUPERBLOCK: u64 = 64 << 10;

/// Makes btrfs force the file system read-only, as after any error of its own; here, a superblock
/// is changed while the file system is frozen.
fn force_read_only(at: &Path, sprout: &Path) {
    let freeze = |option: &str| Command::new("fsfreeze").arg(option).arg(at).status().unwrap();
    assert!(freeze("--freeze").success());
    flip_a_bit(sprout, SUPERBLOCK + 0x200);
    fs::File::open(sprout).unwrap().sync_all().unwrap();
    freeze("--unfreeze");
    flip_a_bit(sprout, SUPERBLOCK + 0x200);
}

#[test]
fn a_mount_that_btrfs_has_forced_read_only_is_named_left_alone_and_mounted_again() {
    let damage = Damage::new("forced");
    let at = damage.space.path("at");
    let options = ["--writes", "w", "--write-limit", "8G", "--transport", "fuse"];
    let mounted = damage.burgeon.mount("image", &at, &options);
    let write = |name: &str| {
        let file = fs::File::create(at.join(name))?;
        file.write_all_at(b"synced", 0)?;
        file.sync_all()
    };
    write("before").unwrap();
    assert_eq!(damage.burgeon.status()["mounts"][0]["forced_read_only"], false);
    force_read_only(&at, &damage.burgeon.state().join("writes/w/sprout"));
    assert_eq!(write("after").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let assert_named = || {
        assert_eq!(damage.burgeon.status()["mounts"][0]["forced_read_only"], true);
        let said = damage.burgeon.ok(&["status"]);
        assert!(said.contains("READ-ONLY") && said.contains("mount it again"), "{said}");
        let found = damage.burgeon.run(&["doctor"]);
        assert_eq!(found.code, Some(1), "{found:#?}");
        let said = found.stdout;
        assert!(said.contains("forced the file system read-only"), "{said}");
        assert!(said.contains("data that was synced before is kept"), "{said}");
    };
    assert_named();

    // The next daemon serves its reads, and would make its sprout larger at once.
    damage.burgeon.kill_daemon();
    let mut folders = fs::read_dir(damage.burgeon.state().join("mounts")).unwrap();
    let record = folders.next().unwrap().unwrap().path().join("mount.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    json["writes"]["reserved"] = (64 << 20).into();
    fs::write(&record, json.to_string()).unwrap();
    damage.burgeon.run(&["doctor", "--repair"]);
    let log = || fs::read_to_string(damage.burgeon.state().join("run/daemon.log")).unwrap();
    let ended = || log().matches("grows no more").count();
    assert!(wait_until(PATIENCE, || ended() > 0), "{}", log());
    let serves = || damage.burgeon.status()["mounts"][0]["state"] == "serving";
    assert!(wait_until(PATIENCE, serves), "{:#}\n{}", damage.burgeon.status(), log());
    drop_caches();
    for seed in 0..FILES {
        let name = format!("file-{seed}");
        let expected = fs::read(damage.tree.join(&name)).unwrap();
        assert!(fs::read(at.join(&name)).unwrap() == expected, "{name}");
    }
    assert_named();
    // Emulated, a step of growth may still be under way when btrfs is forced read-only: both
    // supervisors log the end of growth then.
    assert!((1..=scaled(1, 2)).contains(&ended()), "{}", log());

    damage.burgeon.umount(mounted);
    let mounted = damage.burgeon.mount("image", &at, &["--writes", "w"]);
    assert_eq!(fs::read(at.join("before")).unwrap(), b"synced");
    write("again").unwrap();
    assert_eq!(damage.burgeon.status()["mounts"][0]["forced_read_only"], false);
    damage.burgeon.umount(mounted);
}
