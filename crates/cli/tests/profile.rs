//! `record`, `mount --profile`, `profile`, `build --profile`: what a command reads is brought first
//! at the next mount.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use testkit::{Burgeon, Fault, PATIENCE, Proxy, Rng, Space, WebServer, compare, wait_until};

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

/// What the profile brought, when it is done.
fn brought(burgeon: &Burgeon) -> Value {
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
fn what_a_command_reads_is_brought_first_at_the_next_mount() {
    let space = Space::new("profile");
    let tree = tree(&space);
    let at = space.path("mnt");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    assert!(wait_until(PATIENCE, || profile_of(&burgeon)["state"] == "none"));
    burgeon.fails(&["profile", "show", "sample"], 3, "burgeon record");
    // Something is in the page cache, and everything in the daemon's: a record sees it all the same.
    compare(&tree, &at).unwrap().assert_same();
    let recorded = record(&burgeon, &at, &[17, 3]);
    assert_eq!((&recorded["files"], &recorded["cut_short"]), (&2.into(), &false.into()));
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
    burgeon.fails(&["record", "/", "--", "true"], 1, "is in no mount");
    burgeon.umount(mounted);

    // A host that has nothing.
    let other = Burgeon::with_state(PROGRAM, space.path("other"));
    let other = other.option("--store").option(burgeon.state().join("store"));
    let mounted = other.mount("sample", &at, &["--read-only"]);
    let profile = brought(&other);
    let count = |profile: &Value, name: &str| profile[name].as_u64().unwrap();
    assert!(count(&profile, "brought_bytes") >= 3 * FILE_LEN as u64, "{profile}");
    assert!(count(&profile, "brought_bytes") < FILES / 2 * FILE_LEN as u64, "{profile}");
    assert!(count(&profile, "requests") <= 3, "{profile}");
    assert_eq!(count(&profile, "read_bytes"), 0);
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
    fs::remove_file(burgeon.state().join("images").join(image).join("cache")).unwrap();
    let mounted = burgeon.mount("sample", &at, &["--read-only", "--fill"]);
    let profile = brought(&burgeon);
    assert!(profile["brought_bytes"].as_u64().unwrap() >= 2 * FILE_LEN as u64, "{profile}");
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
    burgeon.ok(&["record", place, "--output", kept, "--", "cat", &reader(&at, &[9])[1]]);
    burgeon.fails(&["profile", "show", "sample"], 3, "has no profile");
    burgeon.umount(mounted);
    // Of another image.
    burgeon.fails(&["mount", "other", place, "--profile", kept], 1, "of another image");
    let mounted = burgeon.mount("sample", &at, &["--profile", kept]);
    brought(&burgeon);
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
