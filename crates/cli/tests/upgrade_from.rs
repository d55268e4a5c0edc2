//! Mounts of an earlier program are taken over while they are in use: over FUSE, writable and not,
//! with named writes, and with data that nobody has read yet. Needs root, and an earlier program in
//! `BURGEON_EARLIER`: `cargo xtask upgrade-from COMMIT` builds one, and runs this.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use testkit::{Burgeon, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 8;
const FUSE: [&str; 2] = ["--transport", "fuse"];

fn content(number: u64) -> Vec<u8> {
    Rng::new(number).bytes(700_000)
}

fn assert_same(at: &Path) {
    drop_caches();
    for number in 0..FILES {
        assert!(fs::read(at.join(number.to_string())).unwrap() == content(number), "{number}");
    }
}

#[test]
fn mounts_of_an_earlier_program_go_on() {
    let earlier = std::env::var("BURGEON_EARLIER").expect("`cargo xtask upgrade-from` names it");
    let space = Space::new("upgrade-from");
    let tree = space.make_folder("tree");
    (0..FILES)
        .for_each(|number| fs::write(tree.join(number.to_string()), content(number)).unwrap());
    let old = Burgeon::with_state(&earlier, space.path("state"));
    old.build(&tree, "image");
    let [lower, upper, kept]: [PathBuf; 3] = ["lower", "upper", "kept"].map(|at| space.path(at));
    let read_only = old.mount("image", &lower, &[&FUSE[..], &["--read-only"]].concat());
    let own = old.mount("image", &upper, &[&FUSE[..], &["--write-limit", "256M"]].concat());
    let named = [&FUSE[..], &["--writes", "kept", "--write-limit", "256M"]].concat();
    let with_name = old.mount("image", &kept, &named);
    for at in [&upper, &kept] {
        fs::write(at.join("before"), b"written under the earlier program").unwrap();
    }
    assert!(fs::read(lower.join("0")).unwrap() == content(0));

    let new = Burgeon::with_state(PROGRAM, space.path("state"));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Relaxed) || rounds == 0 {
                assert_same(&lower);
                rounds += 1;
            }
        });
        let writer = scope.spawn(|| {
            let mut lines = 0u32;
            while !done.load(Relaxed) || lines == 0 {
                fs::write(upper.join("log"), lines.to_string()).unwrap();
                lines += 1;
            }
        });
        let said = new.ok(&["upgrade"]);
        assert!(said.contains("mounted: 3"), "{said}");
        done.store(true, Relaxed);
        reader.join().unwrap();
        writer.join().unwrap();
    });
    std::mem::forget(old);
    let runs = |which: &str| {
        let pid = new.status()[which].as_u64().unwrap_or(0);
        fs::read_link(format!("/proc/{pid}/exe")).ok() == Some(PROGRAM.into())
    };
    assert!(wait_until(PATIENCE, || runs("supervisor_pid") && runs("server_pid")));
    for at in [&lower, &upper, &kept] {
        assert_same(at);
    }
    let status = new.status();
    let mounts = status["mounts"].as_array().unwrap();
    assert_eq!(mounts.len(), 3);
    for mount in mounts {
        assert_eq!(
            (&mount["state"], &mount["reads"]["failed_reads"]),
            (&"serving".into(), &0.into())
        );
    }
    // The records of the earlier program serve a server of this one, too, when it is started again.
    kill(status["server_pid"].as_u64().unwrap() as u32);
    for at in [&lower, &upper, &kept] {
        assert_same(at);
    }
    fs::write(kept.join("after"), b"written under this program").unwrap();
    for mounted in [read_only, own, with_name] {
        new.umount(mounted);
    }
    let again = new.mount("image", &kept, &named);
    assert_same(&kept);
    let read = |name: &str| fs::read_to_string(kept.join(name)).unwrap();
    assert_eq!(read("before"), "written under the earlier program");
    assert_eq!(read("after"), "written under this program");
    new.umount(again);
}
