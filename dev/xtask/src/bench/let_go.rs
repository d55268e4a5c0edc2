//! `burgeon let-go` on file systems that share blocks: by reflink, beside a copy in the same round;
//! and reads afterwards, beside btrfs on a loop device on a file of the same file system.
//!
//! ```text
//!   scratch btrfs, XFS ─┬─ state, cache in it        ──► let-go clones
//!    (a file of --disk) ├─ state, cache on another one ─► let-go copies
//!                       └─ btrfs in a file             ──► reads without a server
//! ```

use std::{
    fs::{self, File},
    path::Path,
    process,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Bench,
    burgeon::Burgeon,
    machine::{Folder, Mount, mount, run, timed},
    median, peers,
    reads::{AIM_LET_GO, FILE, Target, WAYS, materialise, random_file, ratios, take_turns},
    table::{Aim, Table},
};

const FILE_SYSTEMS: [(&str, &[&str]); 2] =
    [("btrfs", &["mkfs.btrfs", "--quiet"]), ("XFS", &["mkfs.xfs", "-q"])];

/// Bytes that are taken by a clone, of those that a copy takes.
const AIM_BYTES: f64 = 0.05;

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    for (name, mkfs) in FILE_SYSTEMS {
        on(bench, table, name, mkfs).with_context(|| format!("on {name}"))?;
    }
    Ok(())
}

/// A scratch file system.
fn disk(folder: &Path, at: &Path, mib: u64, mkfs: &[&str]) -> Result<Mount> {
    let name = at.file_name().context("no name")?.to_string_lossy();
    let file = folder.join(format!("{name}.img"));
    File::create(&file)?.set_len(mib << 20)?;
    let file = file.display().to_string();
    run(mkfs[0], &[&mkfs[1..], &[&file]].concat())?;
    mount(&["-o", "loop", &file], at)
}

fn on(bench: &Bench, table: &mut Table, name: &str, mkfs: &[&str]) -> Result<()> {
    let mib = bench.options.file_mib;
    let folder = bench.options.disk.join(format!("bench-let-go-{}", process::id()));
    let folder = Folder::new(std::path::absolute(folder)?)?;
    let tree = bench.path("let-go-tree");
    fs::create_dir_all(&tree)?;
    random_file(&tree.join(FILE), mib)?;
    let store = bench.path("let-go-store");
    let at = bench.path("let-go-at");
    let disk_at = bench.path("let-go-disk");
    let scratch = disk(folder.path(), &disk_at, 5 * mib + 1024, mkfs)?;
    let elsewhere = disk(folder.path(), &bench.path("let-go-cache"), 2 * mib + 1024, mkfs)?;
    let cache = elsewhere.path().join("cache");
    fs::create_dir(&cache)?;
    let state = |name: &str| scratch.path().join(name);
    let clones = Burgeon::with_store(&bench.program, state("clones"), store.clone());
    let copies = Burgeon::with_store(&bench.program, state("copies"), store).cache_dir(&cache);
    clones.run(&["build", &tree.to_string_lossy(), "image", "--replace"])?;
    let mut taken = [Vec::new(), Vec::new()];
    for round in 0..bench.options.rounds {
        // Each is the first one in every other round.
        for which in [round % 2, 1 - round % 2] {
            let burgeon = [&clones, &copies][which];
            burgeon.mount_over("image", &at, "fuse")?;
            burgeon.run(&["cache", "resize", "--keep-free", "0"])?;
            materialise(&at.join(FILE))?;
            let before = used(scratch.path())?;
            let (seconds, said) =
                timed(|| burgeon.run(&["let-go", &at.to_string_lossy(), "--json"]))?;
            let bytes = used(scratch.path())?.saturating_sub(before);
            let said: Value = serde_json::from_str(&said)?;
            let cloned = said["let_go"][0]["cloned"].as_u64().context("no figure")?;
            ensure!(cloned == [mib << 20, 0][which], "{said}");
            taken[which].push((seconds, bytes as f64));
            burgeon.umount(&at)?;
        }
    }
    drop(copies);
    let of = |which: usize, part: fn(&(f64, f64)) -> f64| -> Vec<f64> {
        taken[which].iter().map(part).collect()
    };
    let ratio = |part: fn(&(f64, f64)) -> f64| {
        let pairs = of(0, part).into_iter().zip(of(1, part));
        median(&pairs.map(|(cloned, copied)| cloned / copied).collect::<Vec<_>>())
    };
    let medians = |part: fn(&(f64, f64)) -> f64| [0, 1].map(|which| median(&of(which, part)));
    table.heading(format!("let-go of {mib} MiB in the cache on {name}, by reflink ÷ by copy"));
    let [cloned, copied] = medians(|taken| taken.0);
    let note = format!("{cloned:.2} s ÷ {copied:.2} s");
    table.row("time", ratio(|taken| taken.0), "x", Aim::None, note);
    let [cloned, copied] = medians(|taken| taken.1 / f64::from(1 << 20));
    let note = format!("{cloned:.1} MiB ÷ {copied:.1} MiB");
    table.row("bytes taken on the disk", ratio(|taken| taken.1), "x", Aim::AtMost(AIM_BYTES), note);

    clones.mount_over("image", &at, "fuse")?;
    materialise(&at.join(FILE))?;
    clones.run(&["let-go", &at.to_string_lossy()])?;
    let plain = peers::plain_loop(scratch.path(), &bench.path("let-go-loop"), &tree, mib)?;
    let targets = [at.join(FILE), plain.file(FILE)].map(Target::from);
    let rates = take_turns(bench, &WAYS, &targets)?;
    drop(plain);
    clones.umount(&at)?;
    let what =
        format!("Reads of a mount let go by reflink on {name} ÷ btrfs on a loop on the same");
    ratios(table, what, &WAYS, &rates, (0, 1), |_| Aim::AtLeast(AIM_LET_GO));
    Ok(())
}

/// Bytes that are taken on a file system, when all is written.
fn used(at: &Path) -> Result<u64> {
    run("sync", &["-f", &at.to_string_lossy()])?;
    let at = at.display().to_string();
    let said = run("stat", &["-f", "--format=%b %f %S", &at])?;
    let numbers: Vec<u64> = said.split_whitespace().filter_map(|it| it.parse().ok()).collect();
    let [blocks, free, size] = numbers[..] else { anyhow::bail!("stat says {said:?}") };
    Ok((blocks - free) * size)
}
