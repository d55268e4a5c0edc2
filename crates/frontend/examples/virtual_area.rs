//! Costs of a mount's virtual area, by its size (time to mount with a new sprout, and kernel memory
//! in slabs), the speed of clones from it by several threads, and random reads of a clone from a
//! small and a large area. Needs root.
//!
//! `cargo run --release -p burgeon-frontend --example virtual_area [CLONES [ROUNDS]]`

#![allow(clippy::unwrap_used, reason = "an example")]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/seed/mod.rs"]
mod seed;

use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::FileExt,
    },
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{ByteRange, Pages};
use burgeon_btrfs::{SUBVOLUME, SeedOptions, VIRTUAL_FILE};
use burgeon_frontend::{
    Connection, FuseServer, LoopDevice, LoopOptions, ServeOptions, Slots,
    btrfs_mount::{Btrfs, MountAccess, forget},
    reflink::{clone_blocks, make_nodatasum},
    serve,
};
use common::{open_direct, runtime};
use seed::{LazyData, Seed};
use tempfile::TempDir;

const READS: u64 = 20_000;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const PIB: u64 = 1 << 50;
const CHUNK: u64 = 256 * TIB - (128 << 10);

fn main() {
    let number = |place, default| {
        std::env::args().nth(place).map_or(default, |text| text.parse().expect("a number"))
    };
    let (clones, rounds) = (number(1, 100_000), number(2, 9) as usize);
    println!("mount with a new sprout; the middle of {rounds} rounds, and the least time");
    println!(
        "{:>12} {:>8} {:>10} {:>10} {:>10} {:>12}",
        "area", "chunks", "least ms", "middle ms", "CPU ms", "slab KiB"
    );
    for bytes in [0, PIB, 16 * PIB, 256 * PIB, 4096 * PIB, 7168 * PIB] {
        let costs: Vec<_> =
            (0..rounds).map(|_| Mounted::new(bytes, CHUNK)).map(Costs::of).collect();
        let sorted = |value: fn(&Costs) -> i64| {
            let mut values: Vec<_> = costs.iter().map(value).collect();
            values.sort_unstable();
            values
        };
        let (times, middle) = (sorted(|costs| costs.ms), rounds / 2);
        let (cpu, slab) = (sorted(|costs| costs.cpu_ms), sorted(|costs| costs.slab_kib));
        println!(
            "{:>8} PiB {:>8} {:>10} {:>10} {:>10} {:>12}",
            bytes / PIB,
            bytes.div_ceil(CHUNK),
            times[0],
            times[middle],
            cpu[middle],
            slab[middle]
        );
    }

    println!("\n{clones} files of 64 KiB cloned, a second, by threads");
    println!("{:>12} {:>14} {:>8} {:>8} {:>8}", "area", "extents of", "1", "2", "4");
    let extents = [(64 * TIB, GIB, "1 GiB"), (PIB, 128 * TIB, "128 TiB"), (PIB, CHUNK, "a chunk")];
    for (bytes, extent, name) in extents {
        let rates = [1, 2, 4].map(|threads| Mounted::new(bytes, extent).clones(clones, threads));
        let [one, two, four] = rates.map(|rate| format!("{rate:.0}"));
        println!("{:>8} TiB {name:>14} {one:>8} {two:>8} {four:>8}", bytes / TIB);
    }

    println!("\n4 KiB random direct reads of a cloned 5 GiB file, a second, by one thread");
    for bytes in [275 * GIB, 4096 * PIB] {
        println!("{:>12} GiB {:>8.0}", bytes / GIB, Mounted::new(bytes, CHUNK).random_reads());
    }
}

/// Costs of a mount.
#[derive(Clone, Copy)]
struct Costs {
    ms: i64,
    /// Of the mounting thread, which other programs do not make longer.
    cpu_ms: i64,
    slab_kib: i64,
}

impl Costs {
    fn of(mounted: Mounted) -> Self {
        mounted.costs
    }
}

/// A sprout on a seed with a virtual area, detached.
struct Mounted {
    costs: Costs,
    mount: Option<Btrfs>,
    devices: Vec<LoopDevice>,
    server: Option<FuseServer>,
    _runtime: tokio::runtime::Runtime,
    _folder: TempDir,
}

impl Mounted {
    fn new(virtual_bytes: u64, virtual_extent_max: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let seed = Seed::write_with(folder.path(), |options| SeedOptions {
            virtual_bytes,
            virtual_extent_max,
            ..options
        });
        // Dirty pages would be written out during the mount.
        File::open(folder.path().join("metadata")).unwrap().sync_all().unwrap();
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
        file.set_len(4 * GIB).unwrap();
        let sprout = attach(&file, false);
        let (slab, cpu) = (slab_kib(), cpu_ms());
        let begun = Instant::now();
        let seeds = [metadata.path(), data.path()];
        let mount = Btrfs::mount_new_sprout(&seeds, sprout.path(), SUBVOLUME).unwrap();
        Self {
            costs: Costs {
                ms: begun.elapsed().as_millis() as i64,
                cpu_ms: cpu_ms() - cpu,
                slab_kib: slab_kib() - slab,
            },
            mount: Some(mount),
            devices: vec![sprout, metadata, data],
            server: Some(server),
            _runtime: runtime,
            _folder: folder,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        let mount = self.mount.as_ref().unwrap().as_fd().as_raw_fd();
        PathBuf::from(format!("/proc/self/fd/{mount}/{name}"))
    }

    fn area(&self) -> File {
        let top = Btrfs::mount(self.devices[0].path(), 5, MountAccess::Writable).unwrap();
        let top = top.open_root().unwrap();
        File::open(format!("/proc/self/fd/{}/{VIRTUAL_FILE}", top.as_raw_fd())).unwrap()
    }

    /// Files a second, each thread in a folder of its own.
    fn clones(&self, clones: u64, threads: u64) -> f64 {
        let area = self.area();
        let begun = Instant::now();
        thread::scope(|scope| {
            for thread in 0..threads {
                let area = &area;
                scope.spawn(move || {
                    let folder = self.path(&format!("thread-{thread}"));
                    fs::create_dir(&folder).unwrap();
                    make_nodatasum(&File::open(&folder).unwrap()).unwrap();
                    for file in (thread..clones).step_by(threads as usize) {
                        let new = File::create_new(folder.join(file.to_string())).unwrap();
                        let range = ByteRange::at(file << 16, 1 << 16).unwrap();
                        clone_blocks(area, range, &new, 0).unwrap();
                    }
                });
            }
        });
        clones as f64 / begun.elapsed().as_secs_f64()
    }

    fn random_reads(&self) -> f64 {
        let file = File::create_new(self.path("file")).unwrap();
        make_nodatasum(&file).unwrap();
        let area = self.area();
        let end = area.metadata().unwrap().len();
        let len = 5 * GIB;
        clone_blocks(&area, ByteRange::at(end - len, len).unwrap(), &file, 0).unwrap();
        let file = open_direct(&self.path("file")).unwrap();
        let mut buffer = Pages::zeroed(4096).unwrap();
        let begun = Instant::now();
        for read in 0..READS {
            let block = read.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (len / 4096);
            file.read_exact_at(buffer.bytes_mut(), block * 4096).unwrap();
        }
        READS as f64 / begun.elapsed().as_secs_f64()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.mount = None;
        for device in self.devices.drain(..) {
            forget(device.path()).unwrap();
            device.detach(Duration::from_secs(60)).unwrap();
        }
        if let Some(server) = self.server.take() {
            server.stop(Duration::ZERO);
        }
    }
}

/// CPU time of this thread so far.
fn cpu_ms() -> i64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanoseconds: i64 = text.split_whitespace().next().unwrap().parse().unwrap();
    nanoseconds / 1_000_000
}

fn slab_kib() -> i64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("Slab:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
