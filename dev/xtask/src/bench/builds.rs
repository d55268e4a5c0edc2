//! This program beside another build of it, such as the static one: the same reads in turn.

use std::fs;

use anyhow::{Context, Result};

use super::{
    Bench,
    burgeon::Burgeon,
    reads::{FILE, Target, WAYS, Way, materialise, random_file, ratios, take_turns},
    table::{Aim, Table},
};

/// The other build may be 5 % slower.
const AIM: f64 = 0.95;

/// Reads of stored chunks, which need large buffers, and so the allocator.
const STORED: [Way; 1] = [Way {
    name: "stored, depth 64",
    options: &["--ioengine=io_uring", "--direct=1", "--time_based", "--iodepth=64"],
    aim: AIM,
}];

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let other = bench.options.other.as_ref().context("name the other program by --other")?;
    let other = other.canonicalize().with_context(|| format!("{} is missing", other.display()))?;
    let tree = bench.path("builds-tree");
    fs::create_dir_all(&tree)?;
    random_file(&tree.join(FILE), bench.options.file_mib)?;
    let mut installed = Vec::new();
    let mut targets = Vec::new();
    for (name, program) in [("other", &other), ("ours", &bench.program)] {
        let burgeon = Burgeon::new(program, bench.path(&format!("builds-{name}-state")));
        let at = bench.path(&format!("builds-{name}"));
        burgeon.run(&["build", &tree.to_string_lossy(), "image"])?;
        burgeon.mount("image", &at)?;
        materialise(&at.join(FILE))?;
        targets.push(Target::from(at.join(FILE)));
        installed.push((burgeon, at));
    }
    let rates = take_turns(bench, &WAYS, &targets)?;
    // Without a cache, each read has a chunk of the local store decompressed.
    for (burgeon, _) in &installed {
        burgeon.run(&["cache", "resize", "0"])?;
    }
    let stored = take_turns(bench, &STORED, &targets)?;
    for (burgeon, at) in &installed {
        burgeon.umount(at)?;
    }
    let programs = format!("{} ÷ {}", other.display(), bench.program.display());
    let what = format!("A cached hit: {programs}");
    ratios(table, what, &WAYS, &rates, (0, 1), |_| Aim::AtLeast(AIM));
    let what = format!("A read out of the store, without a cache: {programs}");
    ratios(table, what, &STORED, &stored, (0, 1), |_| Aim::AtLeast(AIM));
    Ok(())
}
