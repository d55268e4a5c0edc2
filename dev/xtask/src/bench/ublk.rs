//! Over ublk: needs a kernel that has it, so these parts are for the lab (`make bench-ublk`).
//!
//! ```text
//!   ublk         file systems: ours over ublk ÷ btrfs on a RAM disk; ÷ ours over FUSE + loop
//!                bare devices: computed zeros ÷ rublk's null; what is materialised, and a file in
//!                place, ÷ rublk's loop
//!   ublk-queues  a device of zeros: queues and depths, against what mounts have
//! ```
//!
//! `--rublk` says where that program is (`cargo install rublk`); without it, devices are not
//! compared. The lab's processors are emulated, so nothing but the ratios means anything.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Bench,
    burgeon::Burgeon,
    machine::{Mount, mount, run, wait_until},
    reads::{self, FILE, Target, Way, ratios, take_turns},
    table::{Aim, Table},
};

const PSYNC: &[&str] = &["--ioengine=psync", "--direct=1", "--time_based"];
const PSYNC_2: &[&str] = &["--ioengine=psync", "--direct=1", "--time_based", "--numjobs=2"];
const URING_16: &[&str] = &["--ioengine=io_uring", "--direct=1", "--time_based", "--iodepth=16"];
const URING_64: &[&str] = &["--ioengine=io_uring", "--direct=1", "--time_based", "--iodepth=64"];
const MMAP: &[&str] = &["--ioengine=mmap", "--invalidate=1"];

/// Aims of file systems, against one on a RAM disk. The last one is nothing for a bare device,
/// which would stay in the page cache.
const WAYS: &[Way] = &[
    Way { name: "psync x1", options: PSYNC, aim: 0.95 },
    Way { name: "psync x2", options: PSYNC_2, aim: 0.95 },
    Way { name: "io_uring depth 16", options: URING_16, aim: 1.0 },
    Way { name: "io_uring depth 64", options: URING_64, aim: 1.0 },
    Way { name: "mmap x1", options: MMAP, aim: 0.95 },
];
const DEVICE_WAYS: &[Way] = WAYS.split_at(4).0;

/// Offset of data on a device of ours, in bytes (`docs/format-seed.md`).
const DATA_START: u64 = 1 << 40;

/// Queues, and requests of each, that are compared with the first pair.
const SHAPES: [(u16, u16); 9] =
    [(2, 64), (1, 64), (4, 64), (1, 16), (2, 16), (1, 128), (2, 128), (1, 256), (2, 256)];

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    load_driver()?;
    let (burgeon, tree) = set_up(bench)?;
    file_systems(bench, table, &burgeon, &tree)?;
    match &bench.options.rublk {
        Some(rublk) => devices(bench, table, &burgeon, rublk, &tree.join(FILE)),
        None => {
            table.heading("Bare devices: not compared without --rublk");
            Ok(())
        }
    }
}

pub(super) fn load_driver() -> Result<()> {
    let _ = run("modprobe", &["-q", "ublk_drv"]);
    let there = Path::new("/dev/ublk-control").exists();
    ensure!(there, "this kernel has no ublk: run it in the lab (make bench-ublk)");
    Ok(())
}

/// The images `cached`, `computed`, `zeros` and `file`, and the tree with the data.
fn set_up(bench: &Bench) -> Result<(Burgeon, PathBuf)> {
    let mib = bench.options.file_mib;
    let tree = bench.path("ublk-tree");
    fs::create_dir_all(&tree)?;
    let data = tree.join(FILE);
    reads::random_file(&data, mib)?;
    let burgeon = Burgeon::new(&bench.program, bench.path("ublk-state"));
    burgeon.run(&["build", &tree.to_string_lossy(), "cached"])?;
    burgeon.run(&["build", "--by-reference", &data.to_string_lossy(), "file"])?;
    let size = format!("{mib}M");
    for (what, name) in [("block-number", "computed"), ("zeros", "zeros")] {
        burgeon.run(&["build", "--computed", what, "--size", &size, name])?;
    }
    Ok((burgeon, tree))
}

fn file_systems(bench: &Bench, table: &mut Table, burgeon: &Burgeon, tree: &Path) -> Result<()> {
    let mut targets: Vec<Target> = Vec::new();
    for (image, transport) in [("cached", "ublk"), ("computed", "ublk"), ("cached", "fuse")] {
        let at = bench.path(&format!("ublk-{image}-{transport}"));
        burgeon.mount_over(image, &at, transport)?;
        targets.push(reads::only_file(&at)?.into());
    }
    reads::materialise(&targets[0].path)?;
    let ram = ram_disk(bench, tree)?;
    targets.push(ram.path().join(FILE).into());
    let rates = take_turns(bench, WAYS, &targets)?;
    drop(ram);
    for (what, pair) in [
        ("Materialised data over ublk ÷ btrfs on a RAM disk", (0, 3)),
        ("Computed data over ublk ÷ btrfs on a RAM disk", (1, 3)),
    ] {
        ratios(table, what, WAYS, &rates, pair, |way| Aim::AtLeast(way.aim));
    }
    for (what, pair) in [
        ("Materialised data over ublk ÷ the same over FUSE + loop", (0, 2)),
        ("For comparison: over FUSE + loop ÷ btrfs on a RAM disk", (2, 3)),
    ] {
        ratios(table, what, WAYS, &rates, pair, |_| Aim::None);
    }
    Ok(())
}

/// btrfs on the kernel's own block device in memory.
fn ram_disk(bench: &Bench, tree: &Path) -> Result<Mount> {
    let kib = ((bench.options.file_mib * 5 / 4 + 512) << 10).to_string();
    run("modprobe", &["brd", "rd_nr=1", &format!("rd_size={kib}")])?;
    wait_until("/dev/ram0", || Path::new("/dev/ram0").exists())?;
    run("mkfs.btrfs", &["--quiet", "--rootdir", &tree.to_string_lossy(), "/dev/ram0"])?;
    mount(&["-t", "btrfs", "-o", "ro", "/dev/ram0"], &bench.path("ublk-ram"))
}

/// The devices below mounts of ours beside rublk's, with as many queues and requests.
fn devices(
    bench: &Bench,
    table: &mut Table,
    burgeon: &Burgeon,
    rublk: &Path,
    file: &Path,
) -> Result<()> {
    let file = file.to_string_lossy();
    for (what, image, theirs) in [
        ("Computed zeros ÷ rublk's null, bare devices", "zeros", vec!["null"]),
        ("The cache file ÷ rublk's loop, bare devices", "cached", vec!["loop", "--file", &*file]),
        ("A file in place ÷ rublk's loop, bare devices", "file", vec!["loop", "--file", &*file]),
    ] {
        let at = bench.path(&format!("ublk-device-{image}"));
        burgeon.mount_over(image, &at, "ublk")?;
        let status = burgeon.status()?;
        let mounts = status["mounts"].as_array().context("no mounts")?;
        let is_it = |mount: &&Value| mount["target"] == *at.to_string_lossy();
        let mounted = mounts.iter().find(is_it).context("no mount")?;
        let ours = mounted["device"].as_str().context("no device")?.into();
        let theirs = Rublk::start(rublk, &[&["add"], &theirs[..]].concat())?;
        let size = bench.options.file_mib << 20;
        let targets = [(ours, DATA_START), (theirs.device.clone(), 0)]
            .map(|(path, start)| Target { path, part: Some((start, size)) });
        let rates = take_turns(bench, DEVICE_WAYS, &targets)?;
        ratios(table, what, DEVICE_WAYS, &rates, (0, 1), |_| Aim::AtLeast(1.0));
        burgeon.umount(&at)?;
    }
    Ok(())
}

/// A device of rublk's, which daemonises itself.
struct Rublk {
    program: PathBuf,
    device: PathBuf,
}

impl Rublk {
    /// With two queues of 64, as ours has them on two processors.
    fn start(program: &Path, arguments: &[&str]) -> Result<Self> {
        let before = block_devices();
        let arguments = [arguments, &["--queue", "2", "--depth", "64"]].concat();
        run(&program.to_string_lossy(), &arguments)?;
        let new = || block_devices().into_iter().find(|device| !before.contains(device));
        wait_until("a device of rublk's", || new().is_some())?;
        Ok(Self { program: program.to_path_buf(), device: new().context("no device")? })
    }
}

impl Drop for Rublk {
    fn drop(&mut self) {
        let number = self.device.to_string_lossy().replace("/dev/ublkb", "");
        let _ = run(&self.program.to_string_lossy(), &["del", "--number", &number]);
    }
}

fn block_devices() -> Vec<PathBuf> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| name.starts_with("ublkb"))
        .map(|name| Path::new("/dev").join(name))
        .collect()
}

/// Bare devices of zeros by their shape.
pub(crate) fn measure_queues(bench: &Bench, table: &mut Table) -> Result<()> {
    load_driver()?;
    let program = bench.program.with_file_name("examples/ublk_zeros");
    let devices = SHAPES.map(|shape| Zeros::start(&program, shape));
    let devices = devices.into_iter().collect::<Result<Vec<_>>>()?;
    let targets: Vec<_> = devices.iter().map(|zeros| zeros.device.clone().into()).collect();
    let rates = take_turns(bench, DEVICE_WAYS, &targets)?;
    for (index, (queues, depth)) in SHAPES.into_iter().enumerate().skip(1) {
        let what = format!("{queues} queues of {depth} ÷ {} of {}", SHAPES[0].0, SHAPES[0].1);
        ratios(table, what, DEVICE_WAYS, &rates, (index, 0), |_| Aim::None);
    }
    Ok(())
}

/// `ublk_zeros` with its device; it ends with its input.
struct Zeros {
    process: Child,
    device: PathBuf,
}

impl Zeros {
    fn start(program: &Path, (queues, depth): (u16, u16)) -> Result<Self> {
        let mut command = Command::new(program);
        command.args([queues, depth].map(|n| n.to_string()));
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().with_context(|| {
                format!("cannot run {}: it is an example of burgeon-frontend", program.display())
            })?;
        let mut line = String::new();
        let stdout = process.stdout.take().context("no output")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line.starts_with("/dev/"), "ublk_zeros did not come up");
        Ok(Self { process, device: PathBuf::from(line.trim()) })
    }
}

impl Drop for Zeros {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
