//! Building an image against making a squashfs and an EROFS of the same tree.
//!
//! The same zstd level and the same number of threads. A mkfs.erofs without zstd (Debian 12's)
//! runs with lz4hc, on one thread: all it has.

use std::{fs, path::Path, thread};

use anyhow::Result;

use super::{
    Bench,
    burgeon::Burgeon,
    machine::{run, timed},
    median,
    table::{Aim, Table},
};

/// The level that `burgeon build` uses.
const LEVEL: &str = "3";

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let tree = bench.tree.to_string_lossy().into_owned();
    let (bytes, files) = warm(&bench.tree)?;
    let threads = thread::available_parallelism().map_or(1, |n| n.get()).to_string();
    let erofs_codec = erofs_codec();
    let (mut ours, mut squash, mut erofs) = (Vec::new(), Vec::new(), Vec::new());
    let (mut our_size, mut squash_size, mut erofs_size) = (0, 0, 0);
    for round in 0..bench.options.rounds {
        let store = bench.path(&format!("build-store-{round}"));
        let burgeon = Burgeon::with_store(&bench.program, bench.path("build-state"), store.clone());
        ours.push(timed(|| burgeon.run(&["build", &tree, "tree"]))?.0);
        our_size = tree_size(&store)?.0;
        fs::remove_dir_all(&store)?;

        let image = bench.path("build.squashfs").to_string_lossy().into_owned();
        let options = ["-comp", "zstd", "-Xcompression-level", LEVEL, "-processors", &threads];
        let quiet = ["-quiet", "-no-progress", "-noappend"];
        let arguments = [&[tree.as_str(), &image][..], &options, &quiet].concat();
        squash.push(timed(|| run("mksquashfs", &arguments))?.0);
        squash_size = fs::metadata(&image)?.len();
        fs::remove_file(&image)?;

        let image = bench.path("build.erofs").to_string_lossy().into_owned();
        let codec = format!("-z{erofs_codec}");
        erofs.push(timed(|| run("mkfs.erofs", &["--quiet", &codec, "-C65536", &image, &tree]))?.0);
        erofs_size = fs::metadata(&image)?.len();
        fs::remove_file(&image)?;
    }
    let mib = |size: u64| size as f64 / f64::from(1 << 20);
    table.heading(format!(
        "Building, {files} files, {:.0} MiB, {threads} threads, zstd {LEVEL}",
        mib(bytes)
    ));
    let (ours, squash, erofs) = (median(&ours), median(&squash), median(&erofs));
    table.row("build", mib(bytes) / ours, "MiB/s", Aim::None, format!("{ours:.2} s"));
    let seconds = format!("mksquashfs {squash:.2} s");
    table.row("throughput ÷ mksquashfs", squash / ours, "x", Aim::AtLeast(2.0), seconds);
    let seconds = format!("mkfs.erofs, {erofs_codec} {erofs:.2} s");
    table.row("throughput ÷ mkfs.erofs", erofs / ours, "x", Aim::AtLeast(2.0), seconds);
    let sizes = format!("{:.1} of {:.1} MiB", mib(our_size), mib(squash_size));
    let ratio = our_size as f64 / squash_size as f64;
    table.row("image size ÷ squashfs", ratio, "x", Aim::AtMost(1.05), sizes);
    let ratio = our_size as f64 / erofs_size as f64;
    table.row("image size ÷ EROFS", ratio, "x", Aim::None, format!("{:.1} MiB", mib(erofs_size)));
    Ok(())
}

fn erofs_codec() -> String {
    let help = std::process::Command::new("mkfs.erofs").arg("--help").output();
    let help = help.map(|o| [o.stdout, o.stderr].concat()).unwrap_or_default();
    if String::from_utf8_lossy(&help).contains("zstd") {
        format!("zstd,{LEVEL}")
    } else {
        "lz4hc".into()
    }
}

/// Reads the whole tree once, so that nobody pays for the disk.
fn warm(tree: &Path) -> Result<(u64, u64)> {
    run(
        "sh",
        &["-c", "find \"$0\" -xdev -type f -exec cat {} + > /dev/null", &tree.to_string_lossy()],
    )?;
    tree_size(tree)
}

/// Bytes and number of the files below `folder`.
fn tree_size(folder: &Path) -> Result<(u64, u64)> {
    let (mut bytes, mut files) = (0, 0);
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            let below = tree_size(&entry.path())?;
            (bytes, files) = (bytes + below.0, files + below.1);
        } else if metadata.is_file() {
            (bytes, files) = (bytes + metadata.len(), files + 1);
        }
    }
    Ok((bytes, files))
}
