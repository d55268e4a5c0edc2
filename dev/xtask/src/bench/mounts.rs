//! Time to mount and to list the root folder, by number of files and by bytes of data.

use std::{fs, io::BufWriter, path::PathBuf, process::Stdio};

use anyhow::{Context, Result, ensure};

use super::{
    Bench,
    burgeon::Burgeon,
    machine::timed,
    median,
    table::{Aim, Table},
    trees::{equal_files, small_files},
};

/// Later mounts of one image that are measured.
const LATER: usize = 5;

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    table.heading("Mount and first listing (daemon running, image in a local store)");
    let (mut first_of, mut later_of) = (Vec::new(), Vec::new());
    for files in &bench.options.files {
        let name = format!("files-{files}");
        let seconds = build(bench, &name, |out| small_files(out, *files))?;
        let (first, later) = mount_times(bench, &name)?;
        let (first_aim, later_aim) = match files {
            1_000_000 => (Aim::AtMost(3000.0), Aim::AtMost(1000.0)),
            100_000 => (Aim::None, Aim::AtMost(150.0)),
            _ => (Aim::None, Aim::None),
        };
        let note = format!("image built from tar in {seconds:.1} s");
        table.row(format!("{files} files, first mount on this host"), first, "ms", first_aim, note);
        table.row(format!("{files} files, later mounts"), later, "ms", later_aim, "");
        first_of.push(first);
        later_of.push(later);
    }
    table.heading("Growth with bytes of data: 1,000 files of 1 MiB against 1,000 of 4 KiB");
    build(bench, "little", |out| equal_files(out, 1000, 4096))?;
    build(bench, "much", |out| equal_files(out, 1000, 1 << 20))?;
    let (little, much) = (mount_times(bench, "little")?, mount_times(bench, "much")?);
    table.row("first mount, 1000 MiB ÷ 4 MiB", much.0 / little.0, "x", Aim::AtMost(1.25), "");
    table.row("later mounts, 1000 MiB ÷ 4 MiB", much.1 / little.1, "x", Aim::AtMost(1.25), "");
    Ok(())
}

fn store(bench: &Bench) -> PathBuf {
    bench.path("mounts-store")
}

/// Builds an image from a stream; gives the seconds it took.
fn build(
    bench: &Bench,
    name: &str,
    write: impl FnOnce(&mut BufWriter<std::process::ChildStdin>) -> std::io::Result<()>,
) -> Result<f64> {
    let burgeon = Burgeon::with_store(&bench.program, bench.path("mounts-build"), store(bench));
    let (seconds, ()) = timed(|| {
        let mut command = burgeon.command(&["build", "-", name]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().context("cannot run burgeon build")?;
        let mut out = BufWriter::with_capacity(1 << 20, child.stdin.take().context("no stdin")?);
        let written = write(&mut out).and_then(|()| std::io::Write::flush(&mut out));
        drop(out);
        ensure!(child.wait()?.success(), "burgeon build failed");
        Ok(written?)
    })?;
    Ok(seconds)
}

/// Milliseconds of the first and (median) of later mounts with a listing, in a fresh state
/// directory whose daemon runs already.
pub(super) fn mount_times(bench: &Bench, image: &str) -> Result<(f64, f64)> {
    let mut first = Vec::new();
    let mut later = Vec::new();
    for round in 0..bench.options.rounds {
        let state = bench.path(&format!("mounts-state-{image}-{round}"));
        let burgeon = Burgeon::with_store(&bench.program, state.clone(), store(bench));
        let at = bench.path("mounts-point");
        start_daemon(bench, &burgeon)?;
        first.push(mount_and_list(&burgeon, image, &at)?);
        burgeon.umount(&at)?;
        for _ in 0..LATER {
            later.push(mount_and_list(&burgeon, image, &at)?);
            burgeon.umount(&at)?;
        }
        drop(burgeon);
        fs::remove_dir_all(&state)?;
    }
    Ok((median(&first), median(&later)))
}

/// A mount of something else starts the daemon.
fn start_daemon(bench: &Bench, burgeon: &Burgeon) -> Result<()> {
    let tree = bench.path("mounts-other-tree");
    fs::create_dir_all(&tree)?;
    fs::write(tree.join("file"), "other")?;
    burgeon.run(&["build", &tree.to_string_lossy(), "other", "--replace"])?;
    let at = bench.path("mounts-other");
    burgeon.mount("other", &at)?;
    burgeon.umount(&at)
}

fn mount_and_list(burgeon: &Burgeon, image: &str, at: &std::path::Path) -> Result<f64> {
    let (seconds, ()) = timed(|| {
        burgeon.mount(image, at)?;
        for entry in fs::read_dir(at)? {
            entry?.metadata()?;
        }
        Ok(())
    })?;
    Ok(seconds * 1000.0)
}
