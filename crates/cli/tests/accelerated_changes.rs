//! `burgeon accelerate grow` and `replace`, on devices that are used meanwhile. Needs root.

#![allow(clippy::unwrap_used)]

mod slow;

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
};

use serde_json::Value;
use slow::{Ends, MIB, PROGRAM, Slow, counter, file_of, hash_of, is_dirty, run, server_of, status};
use testkit::{Burgeon, PATIENCE, Space, kill, wait_until};

/// Attaches in write-back, if this kernel can; nothing is written back by itself.
fn attach(burgeon: &Burgeon, slow: &Path, name: &str) -> PathBuf {
    let slow = slow.to_str().unwrap();
    let attach = ["accelerate", "attach", "fast", slow, "--name", name, "--mode", "write-back"];
    let options = ["--policy", "clock", "--sequential-cutoff", "off"];
    let device = burgeon.ok(&[&attach[..], &options].concat()).trim().into();
    burgeon.ok(&["accelerate", "set", name, "dirty-limit=100%", "dirty-age=1000000"]);
    device
}

fn create(burgeon: &Burgeon, cache: &str, options: &[&str]) {
    burgeon.ok(&[&["accelerate", "create", "fast", "--cache", cache], options].concat());
}

/// Ends a writer also if the test fails.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn first(burgeon: &Burgeon) -> Value {
    status(burgeon)["caches"][0].clone()
}

fn read(device: &Path, mib: u64) -> Vec<u8> {
    testkit::drop_caches();
    let mut bytes = vec![0; (mib * MIB) as usize];
    File::open(device).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Cached and dirty blocks stay, and new space is used, on a device that got larger and on a file.
#[test]
fn a_cache_grows_while_it_is_used() {
    let space = Space::new("change-grow");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 48);
    let content: Vec<u8> = (0..48 * MIB).map(|at| (at / 4096 % 251) as u8).collect();
    fs::write(&image, &content).unwrap();
    let below = file_of(&space, "below", 16);
    let cache = Slow::new(&below, &[]);
    create(&burgeon, cache.text(), &["--log-size", "2M"]);
    burgeon.fails(&["accelerate", "grow", "fast"], 1, "are the least");
    burgeon.fails(&["accelerate", "grow", "fast", "--size", "32M"], 1, "leave --size out");
    let device = attach(&burgeon, &image, "change-grow");
    assert!(read(&device, 8) == content[..8 * MIB as usize]);
    let file = OpenOptions::new().write(true).open(&device).unwrap();
    for at in 0..40 {
        file.write_all_at(&[255; 4096], (12 * MIB) + at * 8192).unwrap();
    }
    file.sync_all().unwrap();
    let dirty = first(&burgeon)["devices"][0]["dirty_bytes"].clone();
    let (used, blocks) =
        (first(&burgeon)["used_blocks"].clone(), first(&burgeon)["blocks"].clone());
    burgeon.fails(&["accelerate", "grow", "fast"], 1, "are the least");
    assert_eq!(
        first(&burgeon)["devices"][0]["dirty_bytes"],
        dirty,
        "a refused growth loses blocks"
    );

    // Its device gets larger.
    File::options().write(true).open(&below).unwrap().set_len(64 * MIB).unwrap();
    run(Command::new("losetup").arg("-c").arg(&cache.path));
    burgeon.ok(&["accelerate", "grow", "fast"]);
    let now = first(&burgeon);
    assert_eq!((&now["devices"][0]["dirty_bytes"], &now["used_blocks"]), (&dirty, &used));
    assert!(now["blocks"].as_u64().unwrap() > 3 * blocks.as_u64().unwrap(), "{now}");
    assert!(now["log_bytes"].as_u64().unwrap() > 6 * MIB, "{now}");
    // Cached blocks are still hits.
    let (hits, missed) = (counter(&burgeon, "cache_hit_bytes"), counter(&burgeon, "miss_bytes"));
    assert!(read(&device, 8) == content[..8 * MIB as usize]);
    let hits = counter(&burgeon, "cache_hit_bytes") - hits;
    let missed = counter(&burgeon, "miss_bytes") - missed;
    assert!(hits > 7 * MIB && missed < MIB, "{hits} hits, {missed} missed");
    // The new space takes as much as it has.
    read(&device, 48);
    let used = first(&burgeon)["used_blocks"].as_u64().unwrap();
    assert!(used > 40 * MIB / 4096, "{used}");
    // A server that starts again finds all that is dirty, and all that was stored.
    let die = || {
        let server = server_of(&burgeon).unwrap();
        kill(server);
        assert!(wait_until(PATIENCE, || server_of(&burgeon).is_some_and(|new| new != server)));
    };
    die();
    assert_eq!(first(&burgeon)["devices"][0]["dirty_bytes"], dirty);
    // Its index is stored by a flush.
    read(&device, 48);
    burgeon.ok(&["accelerate", "flush", "change-grow"]);
    die();
    let used = first(&burgeon)["used_blocks"].as_u64().unwrap();
    assert!(used > 40 * MIB / 4096, "{used}");
    drop(file);
    burgeon.ok(&["accelerate", "check", "change-grow"]);
    burgeon.ok(&["accelerate", "detach", "change-grow"]);
    let mut expected = content;
    (0..40).for_each(|at| expected[(12 * MIB + at * 8192) as usize..][..4096].fill(255));
    assert!(fs::read(&image).unwrap() == expected, "the slow device differs");

    // Smaller than it was is refused, and without a served device a growth works, too.
    File::options().write(true).open(&below).unwrap().set_len(96 * MIB).unwrap();
    run(Command::new("losetup").arg("-c").arg(&cache.path));
    burgeon.ok(&["accelerate", "grow", "fast"]);
    File::options().write(true).open(&below).unwrap().set_len(80 * MIB).unwrap();
    run(Command::new("losetup").arg("-c").arg(&cache.path));
    burgeon.fails(&["accelerate", "grow", "fast"], 1, "was made for 100663296");
    let again = ["accelerate", "attach", "fast", image.to_str().unwrap(), "--name", "change-grow"];
    burgeon.fails(&again, 1, "was made for 100663296");
    burgeon.ok(&["accelerate", "destroy", "fast", "--accept-loss"]);
    let file = space.path("file");
    create(&burgeon, file.to_str().unwrap(), &["--size", "8M"]);
    burgeon.fails(&["accelerate", "grow", "fast", "--size", "4M"], 1, "does not shrink");
    burgeon.ok(&["accelerate", "grow", "fast", "--size", "12M"]);
    attach(&burgeon, &image, "change-grow");
    burgeon.fails(&["accelerate", "grow", "fast", "--size", "4M"], 1, "does not shrink");
    burgeon.ok(&["accelerate", "grow", "fast", "--size", "32M"]);
    assert_eq!(fs::metadata(&file).unwrap().len(), 32 * MIB);
    assert!(first(&burgeon)["blocks"].as_u64().unwrap() > 28 * MIB / 4096);
    burgeon.ok(&["accelerate", "detach", "change-grow"]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// A writer goes on while the cache moves, grows and its servers die; each flushed block is there.
#[test]
fn a_cache_moves_to_another_device_under_writes() {
    let space = Space::new("change-move");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 32);
    let [old, new] = ["old", "new"].map(|name| Slow::new(&file_of(&space, name, 48), &[]));
    create(&burgeon, old.text(), &["--log-size", "8M"]);
    let device = attach(&burgeon, &image, "change-move");
    let is_back = first(&burgeon)["devices"][0]["mode"] == "write-back";
    let mode = first(&burgeon)["devices"][0]["mode"].clone();
    let file = OpenOptions::new().read(true).write(true).open(&device).unwrap();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let replace = |to: &str, more: &[&str]| -> Vec<String> {
        let replace = ["accelerate", "replace", "fast", "--cache", to];
        [&replace[..], more].concat().into_iter().map(str::to_owned).collect()
    };
    let last = thread::scope(|scope| {
        let _stops = Stops(&stop);
        let writer = scope.spawn(|| {
            for round in 1u64.. {
                for block in 0..256 {
                    file.write_all_at(&[round as u8; 4096], block * 16_384).unwrap();
                }
                file.sync_all().unwrap();
                written.store(round, SeqCst);
                if stop.load(SeqCst) {
                    return round;
                }
            }
            0
        });
        let goes_on = || {
            let before = written.load(SeqCst);
            assert!(wait_until(PATIENCE, || written.load(SeqCst) > before + 1), "it waits");
        };
        goes_on();
        assert!(!is_back || is_dirty(&burgeon));
        // A device that cannot take it leaves it where it is.
        let small = file_of(&space, "small", 0);
        burgeon.fails(&replace(small.to_str().unwrap(), &[]), 1, "empty");
        burgeon.fails(&replace(old.text(), &[]), 5, "in use");
        burgeon.fails(&replace(image.to_str().unwrap(), &[]), 5, "in use");
        let made = space.path("made");
        let made = made.to_str().unwrap();
        if is_back {
            let without = ["--size", "16M", "--log-size", "0"];
            burgeon.fails(&replace(made, &without), 1, "no log for write-back");
            assert!(!Path::new(made).exists(), "a file is left");
        }
        assert_eq!(first(&burgeon)["devices"][0]["mode"], mode, "the mode is another one");
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&new.path));
        burgeon.fails(&replace(new.text(), &[]), 1, "--force");
        goes_on();
        let lifetime = counter(&burgeon, "written_bytes");
        burgeon.ok(&replace(new.text(), &["--force"]));
        goes_on();
        let now = first(&burgeon);
        assert_eq!((&now["cache"], &now["state"]), (&new.text().into(), &"good".into()));
        assert_eq!(now["devices"][0]["mode"], mode);
        assert!(counter(&burgeon, "written_bytes") > lifetime, "a counter went back");
        // The old one is free, and holds no cache.
        let other = ["accelerate", "create", "other", "--cache", old.text()];
        burgeon.ok(&other);
        burgeon.ok(&["accelerate", "destroy", "other"]);
        let server = server_of(&burgeon).unwrap();
        kill(server);
        assert!(wait_until(PATIENCE, || server_of(&burgeon).is_some_and(|next| next != server)));
        assert_eq!(first(&burgeon)["cache"], new.text());
        goes_on();
        // Once more, to a file.
        burgeon.ok(&replace(made, &["--size", "32M"]));
        goes_on();
        stop.store(true, SeqCst);
        writer.join().unwrap()
    });
    for block in 0..256 {
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, block * 16_384).unwrap();
        assert!(bytes == [last as u8; 4096], "block {block}");
    }
    let seen = hash_of(&device);
    drop(file);
    burgeon.ok(&["accelerate", "check", "change-move"]);
    burgeon.ok(&["accelerate", "detach", "change-move", "--leave-dirty"]);
    // With dirty blocks, and without a server.
    if first(&burgeon)["absent_dirty"][0]["name"] == "change-move" {
        burgeon.fails(&replace(new.text(), &["--force"]), 5, "--offline");
        burgeon.ok(&["accelerate", "flush", "change-move", "--offline"]);
    }
    assert!(hash_of(&image) == seen, "the slow device differs");
    burgeon.ok(&replace(new.text(), &["--force"]));
    attach(&burgeon, &image, "change-move");
    assert_eq!(first(&burgeon)["cache"], new.text());
    assert!(counter(&burgeon, "written_bytes") > 0, "a counter went back");
    burgeon.ok(&["accelerate", "detach", "change-move"]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}
