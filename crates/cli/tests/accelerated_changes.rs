//! `burgeon accelerate grow` and `replace`, on devices that are used meanwhile. Needs root.

#![allow(clippy::unwrap_used)]

mod slow;

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::{fs::FileExt, net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
    time::Duration,
};

use serde_json::Value;
use slow::{Ends, MIB, PROGRAM, Slow, counter, file_of, hash_of, is_dirty, run, server_of, status};
use testkit::{Burgeon, PATIENCE, Space, kill, processes_with, wait_until};

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

/// Ends a writer also if the test fails. Then its device may have nobody who answers it: without
/// processes, the kernel fails the write that it waits for.
struct Stops<'a>(&'a AtomicBool, &'a Burgeon);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
        if thread::panicking() {
            let servers = serving(self.1);
            let folder = self.1.state().join("accelerate");
            processes_with(&folder).into_iter().chain(servers).for_each(kill);
        }
    }
}

/// The server: a child of the supervisor, also while it answers nothing yet.
fn serving(burgeon: &Burgeon) -> Vec<u32> {
    let supervisors = processes_with(&burgeon.state().join("accelerate"));
    let children = supervisors
        .iter()
        .map(|id| fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default());
    let all = children.collect::<Vec<_>>().join(" ");
    let is_server = |id: &u32| {
        fs::read_to_string(format!("/proc/{id}/cmdline")).is_ok_and(|it| it.contains("-serve"))
    };
    all.split_whitespace().filter_map(|id| id.parse().ok()).filter(is_server).collect()
}

/// The path of the cache's device, as the state directory has it.
fn recorded(burgeon: &Burgeon) -> String {
    let text = fs::read_to_string(burgeon.state().join("accelerate/fast/device")).unwrap();
    text.lines().next().unwrap().to_owned()
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
        let _stops = Stops(&stop, &burgeon);
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
        assert!(wait_until(PATIENCE, || writer.is_finished()), "the writer waits for its device");
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

/// The server that moves the cache dies within that. The command tells the truth, at once and for
/// good: a move that failed is not made later, to a file that has been removed.
#[test]
fn a_replacement_whose_server_dies_is_made_or_undone() {
    let space = Space::new("change-death");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 16);
    let cache = Slow::new(&file_of(&space, "first", 16), &[]);
    create(&burgeon, cache.text(), &[]);
    let device = attach(&burgeon, &image, "change-death");
    let mode = first(&burgeon)["devices"][0]["mode"].clone();
    let file = OpenOptions::new().read(true).write(true).open(&device).unwrap();
    let mut now = cache.text().to_owned();
    let mut outcomes = (0, 0);
    for round in 0..8u8 {
        file.write_all_at(&[round + 1; 8192], u64::from(round) * 8192).unwrap();
        file.sync_all().unwrap();
        let made = space.path(&format!("made-{round}")).to_str().unwrap().to_owned();
        let replace = ["accelerate", "replace", "fast", "--cache", &made, "--size", "16M"];
        let former = serving(&burgeon);
        let mut command = burgeon.command(&replace).spawn().unwrap();
        // The next one, a little later each time.
        let is_next = |id: &u32| !former.contains(id);
        let mut done = None;
        assert!(wait_until(PATIENCE, || {
            let next = serving(&burgeon).into_iter().find(is_next);
            next.into_iter().for_each(|next| {
                thread::sleep(Duration::from_micros(u64::from(round) * 700));
                kill(next);
            });
            done = command.try_wait().unwrap();
            next.is_some() || done.is_some()
        }));
        let is_done = match done {
            Some(done) => done.success(),
            None => command.wait().unwrap().success(),
        };
        if is_done {
            now = made.clone();
        }
        assert_eq!(recorded(&burgeon), now, "round {round}, {is_done}");
        assert_eq!(Path::new(&made).exists(), is_done, "round {round}");
        // Nothing comes later.
        thread::sleep(Duration::from_millis(1500));
        assert_eq!(recorded(&burgeon), now, "round {round}, {is_done}");
        assert!(!burgeon.state().join("accelerate/fast/replacing").exists());
        assert!(wait_until(PATIENCE, || !serving(&burgeon).is_empty()));
        let status = first(&burgeon);
        assert_eq!((&status["cache"], &status["state"]), (&now.as_str().into(), &"good".into()));
        assert_eq!(status["devices"][0]["mode"], mode, "round {round}");
        for earlier in 0..=round {
            let mut bytes = [0; 8192];
            file.read_exact_at(&mut bytes, u64::from(earlier) * 8192).unwrap();
            assert!(bytes == [earlier + 1; 8192], "round {round}: block {earlier}");
        }
        outcomes = (outcomes.0 + u8::from(is_done), outcomes.1 + u8::from(!is_done));
    }
    println!("{} made, {} undone", outcomes.0, outcomes.1);
    drop(file);
    burgeon.ok(&["accelerate", "detach", "change-death"]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// The modes go back if the replacement fails, or is not asked for any more.
#[test]
fn a_replacement_that_ends_early_leaves_modes_and_device() {
    let space = Space::new("change-early");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let slow = Slow::new(&file_of(&space, "slow", 128), &[]);
    let [old, new] = ["old", "new"].map(|name| Slow::new(&file_of(&space, name, 300), &[]));
    create(&burgeon, old.text(), &["--log-size", "64M"]);
    let device = attach(&burgeon, &slow.path, "change-early");
    let mode = first(&burgeon)["devices"][0]["mode"].clone();
    let file = OpenOptions::new().read(true).write(true).open(&device).unwrap();
    file.write_all_at(&[1; 8192], 0).unwrap();
    let replace = ["accelerate", "replace", "fast", "--cache", new.text()];
    // Its record cannot be written: what was begun is undone, and not tried again.
    let obstacle = burgeon.state().join("accelerate/fast/device.new~");
    fs::create_dir(&obstacle).unwrap();
    burgeon.fails(&replace, 1, "cannot write");
    assert!(!burgeon.state().join("accelerate/fast/replacing").exists());
    let is_as_before = || {
        let status = first(&burgeon);
        assert_eq!((recorded(&burgeon).as_str(), &status["state"]), (old.text(), &"good".into()));
        status["devices"][0]["mode"] == mode
    };
    assert!(is_as_before());
    let server = server_of(&burgeon).unwrap();
    kill(server);
    assert!(wait_until(PATIENCE, || server_of(&burgeon).is_some_and(|next| next != server)));
    assert!(is_as_before());
    fs::remove_dir(&obstacle).unwrap();

    // As the first question of a replacement leaves it.
    let drain = || {
        file.write_all_at(&[2; 8192], 0).unwrap();
        let question = serde_json::json!({
            "do": "write-back", "name": "change-early", "before": null, "ends": true
        });
        ask(&burgeon, "serve.sock", &question);
        assert_eq!(first(&burgeon)["devices"][0]["mode"], "write-through");
    };
    drain();
    let missing = space.path("missing");
    let question = |to: &str| serde_json::json!({ "do": "replace", "cache": to, "log_size": null });
    let answer = ask(&burgeon, "supervise.sock", &question(missing.to_str().unwrap()));
    assert!(answer.contains("cannot open"), "{answer}");
    assert!(is_as_before(), "a failed replacement leaves a device in write-through");
    // A command that is interrupted after its first question, because much is dirty.
    if mode == "write-back" {
        for block in 0..12_000 {
            file.write_all_at(&[3; 4096], block * 8192).unwrap();
        }
        file.sync_all().unwrap();
        let answer = ask(&burgeon, "supervise.sock", &question(new.text()));
        // A slow device that is fast has written all back within the question.
        match answer.contains("\"is_replaced\":false") {
            true => assert!(wait_until(PATIENCE, is_as_before), "it stays in write-through"),
            false => assert_eq!(recorded(&burgeon), new.text(), "{answer}"),
        }
    }
    drop(file);
    burgeon.ok(&["accelerate", "check", "change-early"]);
    burgeon.ok(&["accelerate", "detach", "change-early"]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// Asks a process of the cache as the command does.
fn ask(burgeon: &Burgeon, socket: &str, question: &Value) -> String {
    let path = burgeon.state().join("accelerate/fast").join(socket);
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    writeln!(stream, "{question}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
