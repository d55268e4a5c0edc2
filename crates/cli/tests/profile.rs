//! `record`, `mount --profile`, `profile`, `build --profile`: data that a command reads is
//! prefetched at the next mount.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use testkit::{
    Burgeon, Fault, Link, OciLayout, PATIENCE, Proxy, Registry, Rng, Space, WebServer, compare,
    skopeo_copy, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
/// Files of 200,000 bytes: each has a chunk of its own, or shares one with a neighbour.
const FILES: u64 = 24;
const FILE_LEN: usize = 200_000;

fn tree(space: &Space) -> PathBuf {
    let root = space.make_folder("tree");
    for number in 0..FILES {
        fs::write(root.join(format!("f{number:02}")), Rng::new(number).bytes(FILE_LEN)).unwrap();
    }
    root
}

/// Reads files in the mount `at`, as a program that is recorded.
fn reader(at: &Path, numbers: &[u64]) -> Vec<String> {
    let files = numbers.iter().map(|number| at.join(format!("f{number:02}")).display().to_string());
    ["cat".to_owned()].into_iter().chain(files).collect()
}

fn record(burgeon: &Burgeon, at: &Path, numbers: &[u64]) -> Value {
    let mut arguments = vec!["--json", "record", at.to_str().unwrap(), "--"];
    let command = reader(at, numbers);
    arguments.extend(command.iter().map(String::as_str));
    serde_json::from_str(&burgeon.ok(&arguments)).unwrap()
}

fn profile_of(burgeon: &Burgeon) -> Value {
    burgeon.status()["mounts"][0]["profile"].clone()
}

/// The profile's status, when all of it has been prefetched.
fn prefetched(burgeon: &Burgeon) -> Value {
    assert!(
        wait_until(PATIENCE, || profile_of(burgeon)["state"] == "done"),
        "{}",
        burgeon.status()
    );
    profile_of(burgeon)
}

fn paths(shown: &str) -> Vec<String> {
    shown.lines().skip(1).filter_map(|line| Some(line.rsplit_once(' ')?.1.to_owned())).collect()
}

#[test]
fn the_reads_of_a_command_are_prefetched_at_the_next_mount() {
    let space = Space::new("profile");
    let tree = tree(&space);
    let at = space.path("mnt");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    assert!(wait_until(PATIENCE, || profile_of(&burgeon)["state"] == "none"));
    burgeon.fails(&["profile", "show", "sample"], 3, "burgeon record");
    // Something is in the page cache, and everything in the daemon's: a record sees it all the
    // same.
    compare(&tree, &at).unwrap().assert_same();
    let recorded = record(&burgeon, &at, &[17, 3]);
    assert_eq!((&recorded["files"], &recorded["cut_short"]), (&2.into(), &false.into()));
    assert_eq!(profile_of(&burgeon)["state"], "recorded");
    let shown = burgeon.ok(&["profile", "show", "sample"]);
    assert_eq!(paths(&shown), ["/f17", "/f03"]);
    // Later runs are merged in, and theirs comes first.
    record(&burgeon, &at, &[5, 3]);
    let shown = burgeon.ok(&["profile", "show", "sample"]);
    assert_eq!(paths(&shown), ["/f05", "/f03", "/f17"]);
    assert!(burgeon.ok(&["profile", "list"]).contains("sample"));
    // The command's exit code is ours, and a command that reads nothing is no reason to fail.
    let finished = burgeon.run(&["record", at.to_str().unwrap(), "--", "sh", "-c", "exit 7"]);
    assert_eq!(finished.code, Some(7), "{finished:?}");
    burgeon.fails(&["record", "/", "--", "true"], 3, "is in no mount");
    burgeon.umount(mounted);

    // A host that has nothing.
    let other = Burgeon::with_state(PROGRAM, space.path("other"));
    let other = other.option("--store").option(burgeon.state().join("store"));
    let mounted = other.mount("sample", &at, &["--read-only"]);
    let profile = prefetched(&other);
    let count = |profile: &Value, name: &str| profile[name].as_u64().unwrap();
    assert!(count(&profile, "prefetched_bytes") >= 3 * FILE_LEN as u64, "{profile}");
    assert!(count(&profile, "prefetched_bytes") < FILES / 2 * FILE_LEN as u64, "{profile}");
    assert!(count(&profile, "requests") <= 3, "{profile}");
    assert_eq!(count(&profile, "read_bytes"), 0);
    // It began to come before there was a mount.
    let log = fs::read_to_string(other.state().join("run/daemon.log")).unwrap();
    let line = |what| log.lines().position(|line| line.contains(what));
    let (warmed, made) =
        (line("prefetching the profile while").unwrap(), line("info: mounted").unwrap());
    assert!(warmed < made, "{log}");
    let misses = || other.status()["mounts"][0]["reads"]["misses"].as_u64().unwrap();
    let before = misses();
    assert_eq!(fs::read(at.join("f05")).unwrap(), Rng::new(5).bytes(FILE_LEN));
    assert_eq!(misses(), before, "all of it was local");
    let read = count(&profile_of(&other), "read_bytes");
    assert!((FILE_LEN as u64..2 * FILE_LEN as u64).contains(&read), "{read}");
    assert!(other.ok(&["status"]).contains("were read"));
    compare(&tree, &at).unwrap().assert_same();
    other.umount(mounted);
    for option in ["none", "/nonsense"] {
        let options = ["mount", "sample", at.to_str().unwrap(), "--read-only", "--profile", option];
        match option {
            "none" => other.ok(&options).clear(),
            _ => other.fails(&options, 3, "there is no profile"),
        }
        if option == "none" {
            assert!(other.status()["mounts"][0]["profile"].is_null());
            other.ok(&["umount", at.to_str().unwrap()]);
        }
    }
    other.ok(&["profile", "rm", "sample"]);
    other.fails(&["profile", "rm", "sample"], 3, "has no profile");
    burgeon.fails(&["profile", "show", "sample"], 3, "has no profile");
}

#[test]
fn a_store_that_is_only_read_leaves_the_profile_to_this_host() {
    let space = Space::new("profile-web");
    let tree = tree(&space);
    let at = space.path("mnt");
    let store = space.path("files");
    let builder = Burgeon::with_state(PROGRAM, space.path("builder")).option("--store");
    builder.option(&store).build(&tree, "sample");
    let web = WebServer::nginx(&store, &space.path("nginx")).unwrap();
    let proxy = Proxy::new(web.address(), 5).unwrap();
    let url = format!("http://{}", proxy.address());
    let burgeon = Burgeon::new(PROGRAM, &space).option("--store").option(&url);
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    let recorded = record(&burgeon, &at, &[20, 2]);
    assert!(recorded["not_in_store"].as_str().unwrap().contains("only be read"), "{recorded}");
    burgeon.umount(mounted);
    let image = recorded["image"].as_str().unwrap();
    assert!(burgeon.state().join("profiles").join(image).exists());
    // Cold again.
    burgeon.ok(&["shutdown"]);
    burgeon.lose_cache();
    let mounted = burgeon.mount("sample", &at, &["--read-only", "--fill"]);
    let profile = prefetched(&burgeon);
    assert!(profile["prefetched_bytes"].as_u64().unwrap() >= 2 * FILE_LEN as u64, "{profile}");
    let filled = || burgeon.status()["mounts"][0]["fill"]["state"] == "done";
    assert!(wait_until(PATIENCE, filled), "{}", burgeon.status());
    assert!(burgeon.ok(&["status"]).contains("complete"));
    let log = fs::read_to_string(burgeon.state().join("run/daemon.log")).unwrap_or_default();
    assert!(log.is_empty() || log.contains("is complete"), "{log}");
    // All is here: the store may go away.
    drop(web);
    compare(&tree, &at).unwrap().assert_same();
    burgeon.umount(mounted);
}

#[test]
fn a_profile_that_cannot_be_used_hinders_nobody() {
    let space = Space::new("profile-bad");
    let tree = tree(&space);
    let at = space.path("mnt");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let small = space.make_folder("small");
    fs::write(small.join("file"), "small").unwrap();
    burgeon.build(&small, "other");
    let mounted = burgeon.mount("sample", &at, &[]);
    let file = space.path("recorded");
    let (place, kept) = (at.to_str().unwrap(), file.to_str().unwrap());
    // It goes into the file that was named, through a link of the user's, and into no other.
    let (link, neighbour) = (space.path("link.profile"), space.path("link.new"));
    std::os::unix::fs::symlink(&file, &link).unwrap();
    fs::write(&neighbour, "the user's").unwrap();
    let output = link.to_str().unwrap();
    burgeon.ok(&["record", place, "--output", output, "--", "cat", &reader(&at, &[9])[1]]);
    assert!(link.is_symlink() && fs::read_to_string(neighbour).unwrap() == "the user's");
    burgeon.fails(&["profile", "show", "sample"], 3, "has no profile");
    burgeon.umount(mounted);
    // Of another image.
    burgeon.fails(&["mount", "other", place, "--profile", kept], 1, "of another image");
    let mounted = burgeon.mount("sample", &at, &["--profile", kept]);
    prefetched(&burgeon);
    burgeon.umount(mounted);
    // An image that is built by it has it.
    burgeon.ok(&["build", tree.to_str().unwrap(), "ordered", "--profile", kept]);
    assert_eq!(paths(&burgeon.ok(&["profile", "show", "ordered"])), ["/f09"]);
    let archive = space.path("x.tar");
    fs::write(&archive, [0; 1024]).unwrap();
    let archive = archive.to_str().unwrap();
    burgeon.fails(&["build", archive, "x", "--profile", kept], 1, "unpack the archive");
    // Damaged in the store.
    let profiles = burgeon.state().join("store/profiles");
    let name = fs::read_dir(&profiles).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&name).unwrap();
    bytes[100] ^= 1;
    fs::write(&name, bytes).unwrap();
    let mounted = burgeon.mount("ordered", &at, &[]);
    assert!(wait_until(PATIENCE, || profile_of(&burgeon)["state"] == "unusable"));
    assert!(burgeon.ok(&["status"]).contains("burgeon profile rm"));
    compare(&tree, &at).unwrap().assert_same();
    burgeon.umount(mounted);
}

#[test]
fn the_source_s_faults_are_borne_while_a_profile_is_followed() {
    let space = Space::new("profile-faults");
    let tree = tree(&space);
    let at = space.path("mnt");
    let store = space.path("files");
    let builder = Burgeon::with_state(PROGRAM, space.path("builder")).option("--store");
    let builder = builder.option(&store);
    builder.build(&tree, "sample");
    let mounted = builder.mount("sample", &at, &["--read-only"]);
    record(&builder, &at, &(0..FILES).rev().collect::<Vec<_>>());
    builder.umount(mounted);
    let web = WebServer::nginx(&store, &space.path("nginx")).unwrap();
    let proxy = Proxy::new(web.address(), 7).unwrap();
    let url = format!("http://{}", proxy.address());
    let burgeon = Burgeon::new(PROGRAM, &space).option("--store").option(&url);
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    proxy.spoil(
        300,
        &[
            Fault::Reset,
            Fault::Truncate,
            Fault::Status(503),
            Fault::OtherBytes,
            Fault::FlipBit,
            Fault::ShortRange,
        ],
    );
    compare(&tree, &at).unwrap().assert_same();
    proxy.spoil(0, &[]);
    burgeon.umount(mounted);
}

#[test]
fn a_mount_that_is_not_made_after_all_leaves_nothing_open() {
    let space = Space::new("profile-cool");
    let tree = tree(&space);
    let at = space.make_folder("mnt");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    // It fails when its data has begun to come.
    let mount = ["mount", "sample", at.to_str().unwrap(), "--write-limit", "900T", "--reserve"];
    burgeon.fails(&mount, 6, "cannot reserve");
    let log = fs::read_to_string(burgeon.state().join("run/daemon.log")).unwrap();
    assert!(log.contains("prefetching the profile while"), "{log}");
    let open_maps = || {
        let folders =
            burgeon.processes().into_iter().map(|id| fs::read_dir(format!("/proc/{id}/fd")));
        let files = folders.flatten().flatten().flatten();
        let paths = files.filter_map(|file| fs::read_link(file.path()).ok());
        paths.filter(|path| path.ends_with("map")).count()
    };
    assert!(wait_until(PATIENCE, || open_maps() == 0));
}

#[test]
fn a_profile_of_an_oci_image_is_prefetched_from_its_layers() {
    const LEN: usize = 1 << 20;
    let space = Space::new("profile-oci");
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let fill = |root: &Path| {
        for number in 0..FILES {
            fs::write(root.join(format!("f{number:02}")), Rng::new(number).bytes(LEN)).unwrap();
        }
    };
    layout.change(fill).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let link = Link::new(registry.address(), Duration::ZERO, 1 << 30).unwrap();
    let from = format!("oci:{}:latest", layout.folder().display());
    let at = space.path("mnt");
    // Each format has parts of its own length: only the needed ones are fetched.
    for (format, tag) in [("gzip", "gzip"), ("zstd:chunked", "zstd")] {
        let to = format!("docker://{}/app:{tag}", registry.address());
        let copy = format!("oci:{}:{tag}", space.path(tag).display());
        skopeo_copy(&["--dest-compress-format", format], &from, &copy).unwrap();
        skopeo_copy(&[], &copy, &to).unwrap();
        let burgeon = Burgeon::with_state(PROGRAM, space.path(&format!("state-{tag}")));
        let source = format!("oci://{}/app:{tag}", link.address());
        let made: Value = serde_json::from_str(&burgeon.ok(&["index", &source, "--json"])).unwrap();
        let mounted = burgeon.mount(&source, &at, &["--read-only"]);
        let recorded = record(&burgeon, &at, &[20, 3]);
        assert_eq!(recorded["not_in_store"], Value::Null, "{recorded}");
        burgeon.umount(mounted);
        let name = format!("{}/index", made["image"].as_str().unwrap());
        let mut shown = paths(&burgeon.ok(&["profile", "show", &name]));
        shown.dedup();
        assert_eq!(shown, ["/f20", "/f03"]);
        // Cold again.
        burgeon.ok(&["shutdown"]);
        burgeon.lose_cache();
        let before = link.bytes();
        let mounted = burgeon.mount(&source, &at, &["--read-only"]);
        let profile = prefetched(&burgeon);
        let fetched = link.bytes() - before;
        // Two files, and the rest of their parts.
        let most = 12 * LEN as u64;
        assert!((2 * LEN as u64..most).contains(&fetched), "{tag}: {fetched} for {profile}");
        let misses = || burgeon.status()["mounts"][0]["reads"]["misses"].as_u64().unwrap();
        let (link_before, misses_before) = (link.bytes(), misses());
        for number in [3, 20] {
            let bytes = fs::read(at.join(format!("f{number:02}"))).unwrap();
            assert!(bytes == Rng::new(number).bytes(LEN), "{tag}, f{number:02}");
        }
        assert_eq!((link.bytes(), misses()), (link_before, misses_before), "all was local");
        burgeon.umount(mounted);
    }
    // A host that has the index and the profile from elsewhere.
    let publisher = Burgeon::with_state(PROGRAM, space.path("publisher"));
    let source = format!("oci-layout:{}:latest", layout.folder().display());
    let made = publisher.ok(&["index", &source, "--push", "--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    let mounted = publisher.mount(&source, &at, &["--read-only"]);
    let file = space.path("recorded");
    let (place, kept) = (at.to_str().unwrap(), file.to_str().unwrap());
    publisher.ok(&["record", place, "--output", kept, "--", "cat", &reader(&at, &[9])[1]]);
    publisher.umount(mounted);
    let other = Burgeon::with_state(PROGRAM, space.path("other"));
    let index = made["index"].as_str().unwrap();
    let mounted = other.mount(&source, &at, &["--read-only", "--index", index, "--profile", kept]);
    assert!(prefetched(&other)["prefetched_bytes"].as_u64().unwrap() >= LEN as u64);
    let misses = || other.status()["mounts"][0]["reads"]["misses"].as_u64().unwrap();
    let before = misses();
    assert!(fs::read(at.join("f09")).unwrap() == Rng::new(9).bytes(LEN));
    assert_eq!(misses(), before, "all of it was local");
    other.umount(mounted);
}
