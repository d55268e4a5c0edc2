//! Slow devices for tests of `burgeon accelerate`, and file systems on them whose server dies.

// Each program uses a part of it.
#![allow(dead_code)]

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
};

use serde_json::Value;
use testkit::{Burgeon, Mounted, PATIENCE, Rng, Space, kill, processes_with, wait_until};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
pub(crate) const MIB: u64 = 1 << 20;

/// A loop device on a file, made by losetup: a slow device of the tests.
pub(crate) struct Slow {
    pub(crate) path: PathBuf,
}

impl Slow {
    pub(crate) fn new(file: &Path, options: &[&str]) -> Self {
        let path = run(Command::new("losetup").args(["-f", "--show"]).args(options).arg(file));
        Self { path: path.trim().into() }
    }

    pub(crate) fn text(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

/// Ends all supervisors of an installation with the test, whatever becomes of it.
pub(crate) struct Ends<'a>(pub(crate) &'a Burgeon);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let folder = self.0.state().join("accelerate");
            processes_with(&folder).into_iter().for_each(kill);
        }
    }
}

#[track_caller]
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(output.status.success(), "{command:?}: {err}");
    String::from_utf8(out).unwrap()
}

pub(crate) fn file_of(space: &Space, name: &str, mib: u64) -> PathBuf {
    let path = space.path(name);
    File::create(&path).unwrap().set_len(mib * MIB).unwrap();
    path
}

pub(crate) fn status(burgeon: &Burgeon) -> Value {
    serde_json::from_str(&burgeon.ok(&["--json", "accelerate", "status"])).unwrap()
}

pub(crate) fn server_of(burgeon: &Burgeon) -> Option<u32> {
    status(burgeon)["caches"][0]["pid"].as_u64().map(|pid| pid as u32)
}

/// Kills supervisor and server of the first cache, as the death of their machine does.
pub(crate) fn kill_all(burgeon: &Burgeon) {
    let server = server_of(burgeon).unwrap();
    // Stopped first, so that the server is not without its supervisor for a moment.
    run(Command::new("kill").args(["-STOP", &server.to_string()]));
    let supervisor = processes_with(&burgeon.state().join("accelerate"));
    supervisor.into_iter().chain([server]).for_each(kill);
}

/// Kills the server of the first cache, and waits for the next one.
pub(crate) fn replace_server(burgeon: &Burgeon) {
    let server = server_of(burgeon).unwrap();
    kill(server);
    let is_new = || server_of(burgeon).is_some_and(|new| new != server);
    assert!(wait_until(PATIENCE, is_new), "no new server");
}

/// Waits until a MiB more was written to the first device.
pub(crate) fn await_writes(burgeon: &Burgeon) {
    let written = counter(burgeon, "written_bytes");
    let goes_on = || counter(burgeon, "written_bytes") > written + MIB;
    assert!(wait_until(PATIENCE, goes_on), "nothing is written any more");
}

pub(crate) fn counter(burgeon: &Burgeon, name: &str) -> u64 {
    status(burgeon)["caches"][0]["devices"][0]["counters"][name].as_u64().unwrap()
}

/// True if the first device has content that the cache alone has.
pub(crate) fn is_dirty(burgeon: &Burgeon) -> bool {
    status(burgeon)["caches"][0]["devices"][0]["dirty_bytes"].as_u64().unwrap() > 0
}

pub(crate) fn hash_of(path: &Path) -> u64 {
    let mut hash = 0u64;
    let (file, mut bytes) = (File::open(path).unwrap(), vec![0; MIB as usize]);
    for at in 0.. {
        let len = file.read_at(&mut bytes, at * MIB).unwrap();
        if len == 0 {
            return hash;
        }
        for word in bytes[..len].chunks(8) {
            let word = word.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        }
    }
    hash
}

/// The bytes of file `number` in version `version`.
pub(crate) fn content(number: u64, version: u64) -> Vec<u8> {
    Rng::new(number << 32 | version).bytes(40_000 + (number as usize * 7919) % 90_000)
}

/// Writes files, each durably, and some of them again; returns the last version of each.
pub(crate) fn write_files(at: &Path, stop: &AtomicBool) -> Vec<u64> {
    let mut versions = Vec::new();
    for round in 0.. {
        for number in 0..60 {
            if round > 0 && (number + round) % 3 != 0 {
                continue;
            }
            let path = at.join(format!("file-{number}"));
            fs::write(&path, content(number, round)).unwrap();
            File::open(&path).unwrap().sync_all().unwrap();
            if round == 0 { versions.push(0) } else { versions[number as usize] = round }
        }
        if stop.load(SeqCst) {
            break;
        }
    }
    versions
}

pub(crate) fn read_files(at: &Path, versions: &[u64]) {
    for (number, version) in versions.iter().enumerate() {
        let bytes = fs::read(at.join(format!("file-{number}"))).unwrap();
        assert!(bytes == content(number as u64, *version), "file {number}");
    }
}

/// A file system on a device, on which its server dies again and again, and then without it.
pub(crate) fn survives_its_server(label: &str, mode: &str, mkfs: &[&str], check: &[&str]) {
    let space = Space::new(label);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    // The smallest XFS has 300 MiB.
    let mib = if mkfs[0] == "mkfs.xfs" { 384 } else { testkit::scaled(384, 96) };
    let image = file_of(&space, "slow", mib);
    run(Command::new(mkfs[0]).args(&mkfs[1..]).arg(&image));
    let slow = Slow::new(&image, &[]);
    let cache = space.path("cache");
    let cache = cache.to_str().unwrap();
    burgeon.ok(&["accelerate", "create", "fast", "--cache", cache, "--size", "48M"]);
    let name = format!("{label}-{}", std::process::id());
    let attach = ["accelerate", "attach", "fast", slow.text(), "--name", &name, "--mode", mode];
    let device = PathBuf::from(burgeon.ok(&attach).trim());
    assert_eq!(fs::read_link(Path::new("/dev/burgeon").join(&name)).unwrap(), device);
    let transport = if testkit::ublk_expected() { "ublk" } else { "fuse" };
    assert_eq!(status(&burgeon)["caches"][0]["devices"][0]["transport"], transport);
    let at = space.make_folder("mnt");
    let stop = AtomicBool::new(false);
    let mounted = mount(&device, &at);
    let versions = thread::scope(|scope| {
        let writer = scope.spawn(|| write_files(&at, &stop));
        let mut deaths = 0;
        while deaths < 4 && !writer.is_finished() {
            await_writes(&burgeon);
            replace_server(&burgeon);
            deaths += 1;
        }
        stop.store(true, SeqCst);
        writer.join().unwrap()
    });
    testkit::drop_caches();
    read_files(&at, &versions);
    drop(mounted);
    burgeon.ok(&["accelerate", "check", &name]);
    burgeon.ok(&["accelerate", "flush", &name]);
    assert!(!is_dirty(&burgeon), "a flush leaves dirty blocks");
    let seen = hash_of(&device);
    // In use, it stays.
    let mounted = mount(&device, &at);
    burgeon.fails(&["accelerate", "detach", &name], 5, "unmount");
    drop(mounted);
    let before = hash_of(&device);
    burgeon.ok(&["accelerate", "detach", &name]);
    assert!(seen != 0 && hash_of(&slow.path) == before, "the slow device differs");
    run(Command::new(check[0]).args(&check[1..]).arg(&slow.path));
    let mounted = mount(&slow.path, &at);
    read_files(&at, &versions);
    drop(mounted);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

pub(crate) fn mount(device: &Path, at: &Path) -> Mounted {
    run(Command::new("mount").arg(device).arg(at));
    Mounted::at(at)
}
