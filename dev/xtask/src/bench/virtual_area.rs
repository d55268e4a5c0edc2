//! Mounts with and without a virtual area, and the time to map a tree into one. The part of btrfs
//! alone, with clones by threads and reads of a clone: `cargo run --release -p burgeon-frontend
//! --example virtual_area`; lookups in the map: `-p burgeon-image --example extent_map`.

use std::{
    fs::{self, File},
    path::Path,
};

use anyhow::{Context, Result};
use rustix::fs::{FallocateFlags, fallocate};

use super::{
    Bench,
    burgeon::Burgeon,
    machine::timed,
    median,
    table::{Aim, Table},
};

/// Mounts of each kind a round; they take turns.
const MOUNTS: usize = 5;
const FOLDER: u64 = 1000;
/// The smallest files that are mapped: all cost but that of data, and a million of them are 4 GiB
/// of memory.
const FILE_LEN: u64 = 4096;

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    mounts(bench, table)?;
    table.heading("Mapping a tree of local files of 4 KiB into a mount (thin writes)");
    for files in &bench.options.files {
        let seconds = map_tree(bench, *files)?;
        let aim = if *files == 1_000_000 { Aim::AtMost(60.0) } else { Aim::None };
        let note = format!("{:.0} files a second", *files as f64 / seconds);
        table.row(format!("{files} files"), seconds, "s", aim, note);
    }
    Ok(())
}

fn mounts(bench: &Bench, table: &mut Table) -> Result<()> {
    table.heading("Writable mounts with and without a virtual area (daemon running)");
    let burgeon = Burgeon::new(&bench.program, bench.path("virtual-mounts"));
    let tree = bench.path("virtual-tree");
    fs::create_dir_all(&tree)?;
    fs::write(tree.join("file"), "one")?;
    burgeon.run(&["build", &tree.to_string_lossy(), "one"])?;
    let kinds: [&[&str]; 3] = [&[], &["--virtual", "16P"], &["--virtual", "4E"]];
    let mut times = kinds.map(|_| Vec::new());
    for round in 0..=bench.options.rounds * MOUNTS {
        for (kind, times) in kinds.iter().zip(&mut times) {
            let (seconds, at) = timed(|| mount(bench, &burgeon, "one", kind))?;
            burgeon.umount(&at)?;
            // The first one prepares the image.
            if round > 0 {
                times.push(seconds * 1000.0);
            }
        }
    }
    let [without, small, large] = times.map(|times| median(&times));
    table.row("without", without, "ms", Aim::None, "");
    table.row("with 16 PiB", small, "ms", Aim::None, "");
    table.row("with 4 EiB", large, "ms", Aim::None, "");
    table.row("4 EiB costs", large - without, "ms", Aim::AtMost(100.0), "");
    Ok(())
}

fn mount(
    bench: &Bench,
    burgeon: &Burgeon,
    image: &str,
    options: &[&str],
) -> Result<std::path::PathBuf> {
    let at = bench.path("virtual-point");
    fs::create_dir_all(&at)?;
    let place = at.to_string_lossy();
    burgeon.run(&[&["mount", image, &place, "--write-limit", "256M"], options].concat())?;
    Ok(at)
}

fn map_tree(bench: &Bench, files: u64) -> Result<f64> {
    let tree = bench.path("virtual-files");
    make_tree(&tree, files).context("cannot make a tree to be mapped")?;
    let burgeon = Burgeon::new(&bench.program, bench.path("virtual-map"));
    let at = bench.path("virtual-point");
    fs::create_dir_all(&at)?;
    let name = files.to_string();
    let limit = ["--thin", "--write-limit", "8G"];
    let empty = ["create-empty", &at.to_string_lossy(), "--writes", &name];
    // Thin writes are for `mount` only; the empty image is there once it was made.
    burgeon.run(&[&empty[..], &["--write-limit", "256M"]].concat())?;
    burgeon.umount(&at)?;
    burgeon.run(&["writes", "rm", &name])?;
    let place = at.to_string_lossy();
    burgeon.run(&[&["mount", "burgeon-empty", &place, "--virtual", "16P"], &limit[..]].concat())?;
    let (from, target) = (tree.to_string_lossy(), at.join("tree"));
    let map = ["map", &target.to_string_lossy(), "--from", &from];
    let (seconds, _) = timed(|| burgeon.run(&map))?;
    burgeon.umount(&at)?;
    drop(burgeon);
    fs::remove_dir_all(&tree)?;
    fs::remove_dir_all(bench.path("virtual-map"))?;
    Ok(seconds)
}

/// Files without holes, which would not be mapped; their content is not read.
fn make_tree(tree: &Path, files: u64) -> std::io::Result<()> {
    fs::create_dir(tree)?;
    for file in 0..files {
        let folder = tree.join((file / FOLDER).to_string());
        if file % FOLDER == 0 {
            fs::create_dir(&folder)?;
        }
        let file = File::create_new(folder.join(file.to_string()))?;
        fallocate(&file, FallocateFlags::empty(), 0, FILE_LEN)?;
    }
    Ok(())
}
