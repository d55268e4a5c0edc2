//! What a virtual area costs a mount: time to mount and grow a sprout, and kernel memory (slabs),
//! by its size. Needs root.
//!
//! `cargo run --release -p burgeon-frontend --example virtual_area`

#![allow(clippy::unwrap_used, reason = "an example")]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/seed/mod.rs"]
mod seed;

use std::{
    fs::{self, File},
    sync::Arc,
    time::{Duration, Instant},
};

use burgeon_btrfs::{Options, SUBVOLUME};
use burgeon_frontend::{
    Connection, LoopDevice, LoopOptions, ServeOptions, Slots,
    btrfs_mount::{Btrfs, forget},
    serve,
};
use common::runtime;
use seed::{LazyData, Seed};

const ROUNDS: usize = 5;
const PIB: u64 = 1 << 50;

fn main() {
    println!("{:>12} {:>8} {:>12} {:>14}", "area", "chunks", "mount ms", "kernel KiB");
    for bytes in [0, PIB, 16 * PIB, 256 * PIB, 4096 * PIB, 7168 * PIB] {
        let rounds: Vec<_> = (0..ROUNDS).map(|_| round(bytes)).collect();
        let chunks = bytes.div_ceil((256 << 40) - (128 << 10));
        let mut times: Vec<_> = rounds.iter().map(|(time, _)| time.as_millis()).collect();
        let mut memory: Vec<_> = rounds.iter().map(|(_, memory)| *memory).collect();
        times.sort_unstable();
        memory.sort_unstable();
        let (time, memory) = (times[ROUNDS / 2], memory[ROUNDS / 2]);
        println!("{:>8} PiB {chunks:>8} {time:>12} {memory:>14}", bytes / PIB);
    }
}

/// Mounts once: how long it took, and how much the kernel's slabs grew, in KiB.
fn round(virtual_bytes: u64) -> (Duration, i64) {
    let folder = tempfile::tempdir().unwrap();
    let seed = Seed::write_with(folder.path(), |options| Options { virtual_bytes, ..options });
    let runtime = runtime();
    let slots = Arc::new(Slots::create().unwrap());
    let connection = Connection::new("burgeon-example").unwrap();
    let fuse = connection.device().try_clone_to_owned().unwrap();
    let options = ServeOptions::new(runtime.handle().clone());
    let server = serve(fuse, slots, Arc::new(LazyData::of(&seed)), &options).unwrap();
    let attach = |file: &File, read_only| {
        let options = LoopOptions { name: "burgeon-example", read_only, discard: false };
        LoopDevice::attach(file, options).unwrap()
    };
    let data = attach(&connection.open_file().unwrap(), true);
    let metadata = attach(&File::open(folder.path().join("metadata")).unwrap(), true);
    let path = folder.path().join("sprout");
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(256 << 20).unwrap();
    let sprout = attach(&file, false);
    let before = slab_kib();
    let begun = Instant::now();
    let mount =
        Btrfs::mount_new_sprout(&[metadata.path(), data.path()], sprout.path(), SUBVOLUME).unwrap();
    let time = begun.elapsed();
    let memory = slab_kib() - before;
    drop(mount);
    for device in [sprout, metadata, data] {
        forget(device.path()).unwrap();
        device.detach(Duration::from_secs(20)).unwrap();
    }
    server.stop(Duration::ZERO);
    (time, memory)
}

fn slab_kib() -> i64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("Slab:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
