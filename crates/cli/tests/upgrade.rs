//! A new program takes mounts over while they are in use, and reads the state of older ones.
//!
//! Named writes of every released version, with the store they were made on, mount and hold what
//! was written. A release adds its own to `fixtures/` and to [`RELEASES`]; none is ever taken out.
//!
//! To make one: build an image `base` of the tree that the test describes, mount it with `--writes
//! kept --write-limit 256M`, make the changes that the test expects, unmount, shut down, and pack
//! `writes` and `store` of the state directory: `tar -S --zstd -cf writes-VERSION.tar.zst writes
//! store`.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

use testkit::{
    Burgeon, PATIENCE, Rng, Space, copy_program, drop_caches, preload, ublk_expected, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const RELEASES: [&str; 1] = ["0.1.0"];

/// The bytes of `dir/large`.
fn large() -> Vec<u8> {
    (0..300_000u64).map(|i| ((i * i / 7 + i) % 251) as u8).collect()
}

#[test]
fn writes_of_every_release_mount() {
    for release in RELEASES {
        let space = Space::new("upgrade");
        let burgeon = Burgeon::new(PROGRAM, &space);
        unpack(release, burgeon.state());
        let at = space.path("at");
        let mounted = burgeon.mount("base", &at, &["--writes", "kept"]);
        assert_eq!(fs::read_to_string(at.join("note")).unwrap(), "written under 0.1.0\n");
        assert_eq!(fs::read(at.join("dir/large")).unwrap(), large());
        let mut clone = large();
        clone[100_000] = b'X';
        assert_eq!(fs::read(at.join("clone")).unwrap(), clone);
        assert!(!at.join("small").exists(), "it was removed");
        assert_eq!(fs::read_link(at.join("link")).unwrap(), Path::new("small"));
        fs::write(at.join("added"), "by this version").unwrap();
        burgeon.umount(mounted);

        // The image's name goes; the writes keep the parts that they need.
        burgeon.ok(&["rm", "base"]);
        burgeon.ok(&["gc"]);
        let mounted = burgeon.mount("base", &at, &["--writes", "kept"]);
        assert_eq!(fs::read_to_string(at.join("added")).unwrap(), "by this version");
        assert_eq!(fs::read(at.join("dir/large")).unwrap(), large());
        burgeon.umount(mounted);
        burgeon.ok(&["shutdown"]);
    }
}

#[test]
fn a_new_program_takes_a_mount_over_without_unmounting() {
    let space = Space::new("replaced");
    let tree = space.make_folder("tree");
    let files: Vec<_> = (0..4).map(|seed| Rng::new(seed).bytes(600_000)).collect();
    for (number, content) in files.iter().enumerate() {
        fs::write(tree.join(number.to_string()), content).unwrap();
    }
    let [old, new] = ["old", "new"].map(|name| space.path(name));
    for program in [&old, &new] {
        copy_program(Path::new(PROGRAM), program);
    }
    let state = space.path("state");
    let before = Burgeon::with_state(old.to_str().unwrap(), state.clone());
    before.build(&tree, "image");
    let at = space.path("at");
    let mounted = before.mount("image", &at, &["--write-limit", "256M"]);
    let read = |number: usize| fs::read(at.join(number.to_string())).unwrap() == files[number];
    assert!(read(0));
    let open = fs::File::create(at.join("open")).unwrap();

    let after = Burgeon::with_state(new.to_str().unwrap(), state);
    let pid = |which: &str| after.status()[which].as_u64().unwrap_or(0) as u32;
    let runs = |which: &str| fs::read_link(format!("/proc/{}/exe", pid(which))).ok();
    assert_eq!(runs("server_pid"), Some(old.clone()));
    fs::remove_file(&old).unwrap();
    // It cannot run any more; the other one clears up its leftovers.
    std::mem::forget(before);
    let said = after.ok(&["upgrade"]);
    assert!(said.contains("mounted: 1"), "{said}");
    assert_eq!(runs("supervisor_pid"), Some(new.clone()));
    assert_eq!(runs("server_pid"), Some(new.clone()));
    drop_caches();
    assert!((0..files.len()).all(read));
    rustix::fs::syncfs(&open).unwrap();
    drop(open);
    let mount = after.status()["mounts"][0].clone();
    let expected = if ublk_expected() { "ublk" } else { "FUSE file + loop" };
    assert_eq!(
        (&mount["reads"]["failed_reads"], &mount["transport"]),
        (&0.into(), &expected.into())
    );
    after.umount(mounted);
}

/// A library to preload: processes that are started as `DIES` end at once.
const DEATH: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void die(void) {
    char line[4096] = {0};
    int fd = open("/proc/self/cmdline", O_RDONLY);
    long len = read(fd, line, sizeof line - 1);
    close(fd);
    const char *who = getenv("DIES");
    if (len > 0 && who && memmem(line, len, who, strlen(who))) _exit(7);
}
"#;

#[test]
fn a_full_disk_replaces_nothing_and_is_named() {
    let space = Space::new("full");
    let disk = space.small_disk("disk", 64 << 20);
    let burgeon = Burgeon::before_state(PROGRAM, disk.path().join("state"));
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), "content").unwrap();
    burgeon.build(&tree, "image");
    let [at, other] = ["at", "other"].map(|name| space.make_folder(name));
    let mounted = burgeon.mount("image", &at, &["--read-only"]);
    let before = burgeon.status()["supervisor_pid"].clone();
    let filler = disk.path().join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    while std::io::Write::write(&mut file, &[1; 4096]).is_ok() {}
    for arguments in [&["upgrade", "--check"][..], &["upgrade"]] {
        let said = burgeon.run(arguments);
        assert_eq!(said.code, Some(6), "{said:?}");
        for part in ["is left as it is", "No space left", "free now: ", "burgeon cache evict"] {
            assert!(said.stderr.contains(part), "{part}: {said:?}");
        }
        assert_eq!(burgeon.status()["supervisor_pid"], before);
    }
    // The image is here: another store would be no remedy.
    let said = burgeon.run(&["mount", "image", other.to_str().unwrap(), "--read-only"]);
    assert_eq!(said.code, Some(6), "{said:?}");
    assert!(said.stderr.contains("free now: ") && !said.stderr.contains("--store"), "{said:?}");
    drop(file);
    fs::remove_file(&filler).unwrap();
    burgeon.ok(&["upgrade"]);
    assert_ne!(burgeon.status()["supervisor_pid"], before);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content");
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
}

#[test]
fn a_program_that_cannot_start_here_replaces_nothing() {
    let space = Space::new("refused");
    let nowhere = Burgeon::before_state(PROGRAM, space.path("none"));
    assert_eq!(nowhere.ok(&["upgrade", "--check"]), "no daemon runs\n");
    assert!(!space.path("none").exists(), "a check makes no state directory");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), "content").unwrap();
    burgeon.build(&tree, "image");
    let at = space.path("at");
    let mounted = burgeon.mount("image", &at, &["--write-limit", "256M"]);
    let processes = || {
        let status = burgeon.status();
        ["supervisor_pid", "server_pid"].map(|name| status[name].as_u64())
    };
    let before = processes();
    let library = preload(&space, DEATH);
    for (dies, message) in [("__supervise", "cannot take over here"), ("__serve", "does not start")]
    {
        let mut upgrade = burgeon.command(&["upgrade"]);
        let output = upgrade.envs(library.clone()).env("DIES", dies).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(message), "{dies}: {said}");
        assert!(said.contains("is left as it is"), "{said}");
        assert_eq!(processes(), before, "{dies}");
    }

    // A mount whose record only another version can read.
    let other = burgeon.state().join("mounts/01234567");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("mount.json"), "{\"format\":999}").unwrap();
    for arguments in [&["upgrade", "--check"][..], &["upgrade"]] {
        let said = burgeon.run(arguments);
        assert!(said.code != Some(0) && said.stderr.contains("mount.json"), "{said:?}");
        assert_eq!(processes(), before);
    }
    // A damaged leftover that nobody uses is cleared up.
    fs::write(other.join("mount.json"), "{").unwrap();

    let said = burgeon.ok(&["upgrade", "--check"]);
    assert!(said.contains("can take over"), "{said}");
    assert_eq!(processes(), before);
    assert!(!burgeon.state().join("run/rehearsal").exists(), "a rehearsal leaves nothing");
    burgeon.ok(&["upgrade"]);
    assert_ne!(processes()[0], before[0]);
    assert!(wait_until(PATIENCE, || !other.exists()), "a leftover stays");

    // Without the supervisor, the old program serves on, and nobody could replace it.
    let supervisor = processes()[0].unwrap().to_string();
    assert!(Command::new("kill").args(["-9", &supervisor]).status().unwrap().success());
    assert!(wait_until(PATIENCE, || !Path::new("/proc").join(&supervisor).exists()));
    for arguments in [&["upgrade", "--check"][..], &["upgrade"]] {
        let said = burgeon.run(arguments);
        assert!(said.code != Some(0) && said.stderr.contains("doctor --repair"), "{said:?}");
    }
    burgeon.ok(&["doctor", "--repair"]);
    burgeon.ok(&["upgrade"]);
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
}

fn unpack(release: &str, state: &Path) {
    fs::create_dir_all(state).unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let archive = fixtures.join(format!("writes-{release}.tar.zst"));
    let status =
        Command::new("tar").args(["--zstd", "-xf"]).arg(archive).arg("-C").arg(state).status();
    assert!(status.unwrap().success(), "cannot unpack the writes of {release}");
}
