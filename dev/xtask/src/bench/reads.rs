//! 4 KiB random reads of local data, on our btrfs and on those of others.
//!
//! Direct I/O for psync and io_uring; mmap goes through the page cache, which is dropped before
//! each run, and each block is read once. All files lie in memory, so that what is measured is
//! the way to them.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::Value;

use super::{
    Bench,
    burgeon::Burgeon,
    machine::run,
    median, peers,
    table::{Aim, Table},
};

/// A way to read: its name, fio's options, and the aim against a device without a server.
pub(super) struct Way {
    pub(super) name: &'static str,
    pub(super) options: &'static [&'static str],
    pub(super) aim: f64,
}

/// The thing read: a file, or a part of a device.
pub(super) struct Target {
    pub(super) path: PathBuf,
    /// Offset and length in bytes.
    pub(super) part: Option<(u64, u64)>,
}

impl From<PathBuf> for Target {
    fn from(path: PathBuf) -> Self {
        Self { path, part: None }
    }
}

pub(super) const WAYS: [Way; 4] = [
    Way {
        name: "psync x1",
        options: &["--ioengine=psync", "--direct=1", "--time_based"],
        aim: 0.7,
    },
    Way {
        name: "psync x4",
        options: &["--ioengine=psync", "--direct=1", "--time_based", "--numjobs=4"],
        aim: 1.0,
    },
    Way {
        name: "io_uring depth 64",
        options: &["--ioengine=io_uring", "--direct=1", "--time_based", "--iodepth=64"],
        aim: 0.9,
    },
    // Not time-based: it ends when every block has been read, before any is read from memory.
    Way { name: "mmap x1", options: &["--ioengine=mmap", "--invalidate=1"], aim: 0.7 },
];

/// Of a cached hit against the computed source.
const AIM_COMPUTED: f64 = 0.9;
/// Against qemu-storage-daemon.
const AIM_QEMU: f64 = 2.0;

pub(super) const FILE: &str = "data";

/// Of a mount that was let go, against a device without a server.
pub(super) const AIM_LET_GO: f64 = 0.95;

/// Index of the mount that was let go.
const LET_GO: usize = 5;
/// Index of the target with `--fast`, if there is one.
const FAST: usize = 6;

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let mib = bench.options.file_mib;
    let tree = bench.path("reads-tree");
    fs::create_dir_all(&tree)?;
    let data = tree.join(FILE);
    random_file(&data, mib)?;

    let burgeon = Burgeon::new(&bench.program, bench.path("reads-state"));
    burgeon.run(&["build", &tree.to_string_lossy(), "cached"])?;
    let size = format!("{mib}M");
    burgeon.run(&["build", "--computed", "block-number", "--size", &size, "computed"])?;
    burgeon.run(&["build", "--by-reference", &data.to_string_lossy(), "file"])?;
    let images = ["cached", "computed", "file"];
    for image in images {
        burgeon.mount(image, &bench.path(&format!("reads-{image}")))?;
    }
    let ours = images.map(|image| only_file(&bench.path(&format!("reads-{image}"))));
    let [cached, computed, file] = ours;
    let (cached, computed, file) = (cached?, computed?, file?);
    materialise(&cached)?;
    let let_go = bench.path("reads-let-go");
    burgeon.mount_over("cached", &let_go, "fuse")?;
    burgeon.run(&["cache", "resize", "--keep-free", "0"])?;
    burgeon.run(&["let-go", &let_go.to_string_lossy()])?;
    let plain = peers::plain_loop(bench.scratch.path(), &bench.path("loop"), &tree, mib)?;
    let qemu = peers::qemu(bench, &tree, mib)?;

    let mut targets =
        vec![cached, computed, file, plain.file(FILE), qemu.file(FILE), let_go.join(FILE)];
    let fast = bench.path("reads-fast");
    let is_fast = burgeon.mount_fast("cached", &fast)?;
    if is_fast {
        targets.push(fast.join(FILE));
    }
    let targets: Vec<_> = targets.into_iter().map(Target::from).collect();
    let rates = take_turns(bench, &WAYS, &targets)?;
    drop((plain, qemu));
    if is_fast {
        burgeon.umount(&fast)?;
    }
    burgeon.umount(&let_go)?;
    for image in images {
        burgeon.umount(&bench.path(&format!("reads-{image}")))?;
    }
    rows(table, &rates);
    Ok(())
}

/// `rates[way][target][round]`: reads a second.
pub(super) fn take_turns(
    bench: &Bench,
    ways: &[Way],
    targets: &[Target],
) -> Result<Vec<Vec<Vec<f64>>>> {
    let mut rates = vec![vec![Vec::new(); targets.len()]; ways.len()];
    for _ in 0..bench.options.rounds {
        for (way, rates) in ways.iter().zip(&mut rates) {
            for (target, rates) in targets.iter().zip(rates) {
                rates.push(fio(target, way, bench.options.seconds)?);
            }
        }
    }
    Ok(rates)
}

/// One target's rates by another's, a row a way. Round by round: neighbours in time saw the same
/// machine.
pub(super) fn ratios(
    table: &mut Table,
    what: impl Into<String>,
    ways: &[Way],
    rates: &[Vec<Vec<f64>>],
    (ours, theirs): (usize, usize),
    aim: impl Fn(&Way) -> Aim,
) {
    table.heading(what);
    for (way, rates) in ways.iter().zip(rates) {
        let pairs = rates[ours].iter().zip(&rates[theirs]);
        let pairs: Vec<f64> = pairs.map(|(ours, theirs)| ours / theirs).collect();
        let (least, most) =
            pairs.iter().fold((f64::MAX, 0.0f64), |(a, b), r| (a.min(*r), b.max(*r)));
        let medians = format!("{:.0} ÷ {:.0}", median(&rates[ours]), median(&rates[theirs]));
        let note = format!("{medians}, rounds from {least:.2} to {most:.2}");
        table.row(way.name, median(&pairs), "x", aim(way), note);
    }
}

fn rows(table: &mut Table, rates: &[Vec<Vec<f64>>]) {
    table.heading("4 KiB random reads of materialised data, a second");
    for (way, rates) in WAYS.iter().zip(rates) {
        let rate = |target: usize| format!("{:.0}", median(&rates[target]));
        let note = format!(
            "computed {}, file source {}, loop on tmpfs {}, qemu {}",
            rate(1),
            rate(2),
            rate(3),
            rate(4)
        );
        table.row(format!("{}, cached", way.name), median(&rates[0]), "IOPS", Aim::None, note);
    }
    let peers: [(&str, usize, Option<f64>); 4] = [
        ("computed source", 1, Some(AIM_COMPUTED)),
        ("btrfs on a direct-I/O loop on tmpfs", 3, None),
        ("qemu-storage-daemon's FUSE export + loop", 4, Some(AIM_QEMU)),
        ("O_DIRECT file source", 2, Some(f64::NAN)),
    ];
    for (name, peer, aim) in peers {
        let what = format!("A cached hit ÷ {name}");
        ratios(table, what, &WAYS, rates, (0, peer), |way| match aim {
            Some(aim) if aim.is_nan() => Aim::None,
            Some(aim) => Aim::AtLeast(aim),
            None => Aim::AtLeast(way.aim),
        });
    }
    let what = format!("A mount that was let go ÷ {}", peers[1].0);
    ratios(table, what, &WAYS, rates, (LET_GO, 3), |_| Aim::AtLeast(AIM_LET_GO));
    if rates[0].len() <= FAST {
        table.heading("mount --fast: not allowed by this kernel (`burgeon doctor` says why)");
        return;
    }
    for (name, peer) in [("the default mode", 0), (peers[1].0, 3), (peers[2].0, 4)] {
        let what = format!("A cached hit with --fast ÷ {name}");
        ratios(table, what, &WAYS, rates, (FAST, peer), |_| Aim::None);
    }
}

fn fio(target: &Target, way: &Way, seconds: u32) -> Result<f64> {
    let fixed = [
        "--name=read",
        "--readonly",
        "--rw=randread",
        "--bs=4k",
        "--ramp_time=300ms",
        "--group_reporting",
        "--randrepeat=0",
        "--output-format=json",
    ];
    let runtime = format!("--runtime={seconds}");
    let file = target.path.display();
    let name = format!("--filename={file}");
    let part = target.part.map(|(at, len)| [format!("--offset={at}"), format!("--size={len}")]);
    let part: Vec<&str> = part.iter().flatten().map(String::as_str).collect();
    let arguments = [&fixed[..], way.options, &part, &[&runtime, &name]].concat();
    let text = run("fio", &arguments).with_context(|| format!("{} of {file}", way.name))?;
    let json: Value = serde_json::from_str(text.trim_start_matches(|c| c != '{'))?;
    json["jobs"][0]["read"]["iops"].as_f64().with_context(|| format!("fio said {text}"))
}

/// Reads everything once, so that it is local.
pub(super) fn materialise(file: &Path) -> Result<()> {
    run("dd", &[&format!("if={}", file.display()), "of=/dev/null", "bs=4M", "status=none"])?;
    Ok(())
}

/// The one regular file of a small tree: a computed image chooses its own name.
pub(super) fn only_file(folder: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            return Ok(entry.path());
        }
    }
    anyhow::bail!("no file in {}", folder.display())
}

/// `mib` MiB that neither compress nor repeat.
pub(super) fn random_file(path: &Path, mib: u64) -> Result<()> {
    let mut file = File::create(path)?;
    let mut state = 1u64;
    let mut buffer = vec![0u8; 1 << 20];
    for _ in 0..mib {
        for part in buffer.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            part.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&buffer)?;
    }
    Ok(())
}
