//! ext4, XFS and btrfs on an accelerated device, verified by fio, by the checkers, and byte by
//! byte: its server dies, both processes die, the power is cut. Needs root.
//!
//! A power cut is a copy of both files while the server is stopped: what the disks have at that
//! moment. `ROUNDS` is the number of deaths and of cuts.

#![allow(clippy::unwrap_used)]

mod slow;

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
};

use slow::{
    Ends, PROGRAM, await_writes, content, file_of, mount, replace_server, run, server_of, status,
};
use testkit::{Burgeon, Fio, Mounted, PATIENCE, Space, kill, processes_with, wait_until};

fn rounds() -> u64 {
    std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}

#[test]
fn an_ext4_is_verified() {
    verified("verify-ext4", &["mkfs.ext4", "-q", "-F"], &["e2fsck", "-fn"]);
}

#[test]
fn an_xfs_is_verified() {
    verified("verify-xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n", "-f"]);
}

#[test]
fn a_btrfs_is_verified() {
    verified("verify-btrfs", &["mkfs.btrfs", "-q", "-f"], &["btrfs", "check", "-q"]);
}

/// Durable files, and the slow device and the cache device.
type Cut = (u64, PathBuf, PathBuf);

/// A device of one cache, and the file system on it.
struct Machine<'a> {
    burgeon: Burgeon,
    name: String,
    slow: PathBuf,
    at: PathBuf,
    check: &'a [&'a str],
}

fn verified(name: &str, mkfs: &[&str], check: &[&str]) {
    let space = Space::new(name);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let slow = file_of(&space, "slow", 384);
    run(Command::new(mkfs[0]).args(&mkfs[1..]).arg(&slow));
    let (name, at) = (name.to_owned(), space.make_folder("mnt"));
    let machine = Machine { burgeon, name, slow, at, check };
    let ends = Ends(&machine.burgeon);
    let cache = space.path("cache");
    let create = ["accelerate", "create", "fast", "--cache", cache.to_str().unwrap()];
    machine.burgeon.ok(&[&create[..], &["--size", "48M", "--log-size", "12M"]].concat());
    let mounted = mount(&machine.attach(), &machine.at);
    machine.run_fio(&space);
    let (synced, cuts) = machine.cut_while_writing(&space, mounted);
    machine.attach();
    machine.ends_clean(synced);
    machine.burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
    // Each cut is another machine, with copies of both disks.
    for (number, (synced, slow, cache)) in cuts.into_iter().enumerate() {
        let space = Space::new(&format!("{}-{number}", machine.name));
        let burgeon = Burgeon::new(PROGRAM, &space);
        let folder = burgeon.state().join("accelerate/fast");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("device"), format!("{}\n", cache.display())).unwrap();
        let cut =
            Machine { burgeon, slow, name: machine.name.clone(), at: machine.at.clone(), check };
        let ends = Ends(&cut.burgeon);
        cut.attach();
        cut.ends_clean(synced);
        cut.burgeon.ok(&["accelerate", "destroy", "fast"]);
        drop(ends);
    }
}

/// Writes file `number` durably.
fn write(at: &Path, number: u64) -> io::Result<()> {
    let path = at.join(format!("file-{number}"));
    fs::write(&path, content(number, 7))?;
    File::open(path)?.sync_all()
}

impl Machine<'_> {
    /// Attaches it in write-back, if this kernel can, with dirty blocks that stay for a while.
    fn attach(&self) -> PathBuf {
        let slow = self.slow.to_str().unwrap();
        let attach = ["accelerate", "attach", "fast", slow, "--name", &self.name];
        // After a death of all processes, the claims on both devices end a moment later.
        let attached = || self.burgeon.run(&[&attach[..], &["--mode", "write-back"]].concat());
        assert!(wait_until(PATIENCE, || attached().code == Some(0)), "cannot attach");
        self.burgeon.ok(&["accelerate", "set", &self.name, "dirty-limit=60%", "dirty-age=5"]);
        fs::read_link(Path::new("/dev/burgeon").join(&self.name)).unwrap()
    }

    /// fio reads each block back that it wrote, while servers die.
    fn run_fio(&self, space: &Space) {
        let options = [
            "--rw=randrw",
            "--rwmixwrite=70",
            "--bsrange=512-32k",
            "--size=24m",
            "--ioengine=psync",
            "--fsync=16",
            "--verify=crc32c",
            "--verify_backlog=64",
            "--verify_fatal=1",
            "--randrepeat=0",
        ];
        for round in 0..rounds() {
            let file = self.at.join(format!("fio-{round}"));
            let running = Fio::new(&file, &options).start(&space.make_folder("fio")).unwrap();
            await_writes(&self.burgeon);
            replace_server(&self.burgeon);
            Fio::finish(running).unwrap();
            fs::remove_file(file).unwrap();
        }
    }

    /// Cuts the power while files are written, each durably, and at last kills both processes.
    /// Returns the number of durable files, and that of each cut with the copies of both disks.
    fn cut_while_writing(&self, space: &Space, mounted: Mounted) -> (u64, Vec<Cut>) {
        let synced = AtomicU64::new(0);
        let cuts = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 0.. {
                    // It fails once all processes are dead.
                    if write(&self.at, number).is_err() {
                        return;
                    }
                    synced.store(number + 1, SeqCst);
                }
            });
            let goes_on = || {
                let before = synced.load(SeqCst);
                let more = || synced.load(SeqCst) > before + 5 || writer.is_finished();
                assert!(wait_until(PATIENCE, more), "nothing is written");
            };
            let mut cuts = Vec::new();
            for round in 0..rounds() {
                goes_on();
                let server = server_of(&self.burgeon).unwrap().to_string();
                let count = synced.load(SeqCst);
                run(Command::new("kill").args(["-STOP", &server]));
                let copy = |from: &Path, what: &str| {
                    let to = space.path(&format!("{what}-{round}"));
                    let how = ["--reflink=auto", "--sparse=always"];
                    run(Command::new("cp").args(how).arg(from).arg(&to));
                    to
                };
                let both = (copy(&self.slow, "slow"), copy(&space.path("cache"), "cache"));
                run(Command::new("kill").args(["-CONT", &server]));
                cuts.push((count, both.0, both.1));
            }
            goes_on();
            let server = server_of(&self.burgeon).unwrap();
            // Stopped first, so that the server is not without its supervisor for a moment.
            run(Command::new("kill").args(["-STOP", &server.to_string()]));
            let supervisor = processes_with(&self.burgeon.state().join("accelerate"));
            supervisor.into_iter().chain([server]).for_each(kill);
            cuts
        });
        drop(mounted);
        (synced.load(SeqCst), cuts)
    }

    /// Mounts and unmounts once; then every durable file is there, and the checker finds nothing,
    /// also without the cache.
    fn ends_clean(&self, synced: u64) {
        let device = fs::read_link(Path::new("/dev/burgeon").join(&self.name)).unwrap();
        let read = |device: &Path| {
            let mounted = mount(device, &self.at);
            for number in 0..synced {
                let bytes = fs::read(self.at.join(format!("file-{number}"))).unwrap();
                assert!(bytes == content(number, 7), "file {number} of {synced}");
            }
            drop(mounted);
        };
        assert!(synced > 5);
        read(&device);
        self.burgeon.ok(&["accelerate", "check", &self.name]);
        self.burgeon.ok(&["accelerate", "detach", &self.name]);
        assert_eq!(status(&self.burgeon)["caches"][0]["state"], "idle");
        run(Command::new(self.check[0]).args(&self.check[1..]).arg(&self.slow));
        let slow = slow::Slow::new(&self.slow, &[]);
        read(&slow.path);
    }
}
