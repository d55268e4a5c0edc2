//! The first write to a large file of an image: 4 KiB in its middle, durable.
//!
//! An overlayfs copies the file before it writes to it; a mount of the container's own writes the
//! blocks. Over the slow link nothing of the file is here yet; after that all of it is.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use testkit::{OciLayout, Registry, skopeo_copy};

use super::{
    Site,
    node::{Form, Node, path_in},
};
use crate::bench::{
    Bench,
    machine::run,
    median,
    start::stargz::Containerd,
    table::{Aim, Table},
};

const FORMS: [Form; 4] = [Form::Overlayfs, Form::Stargz, Form::Overlay, Form::Native];
const NAME: &str = "large";
const FILE: &str = "large-file";
const SIZE: u64 = 1 << 30;

/// The seconds of one form: the file's data far away, and here.
#[derive(Default)]
struct Writes {
    absent: Vec<f64>,
    local: Vec<f64>,
}

pub(super) fn measure(site: &Site<'_>, table: &mut Table) -> Result<()> {
    let bench = site.stage.bench;
    let registry = serve(bench, &bench.options.start_tree.with_extension("large"))?;
    let mut all = FORMS.map(|_| Writes::default());
    for round in 0..bench.options.rounds {
        for (form, writes) in FORMS.iter().zip(&mut all) {
            eprintln!("  first write, round {}: {}", round + 1, form.name());
            one(site, &registry, *form, writes)
                .with_context(|| format!("the first write on {}", form.name()))?;
        }
    }
    table.heading("The first write to a file of 1 GiB: 4 KiB, durable");
    for (form, writes) in FORMS.iter().zip(&all) {
        if *form != Form::Overlayfs {
            let what = format!("{}: its data is behind the link", form.name());
            table.row(what, median(&writes.absent) * 1000.0, "ms", Aim::None, "");
        }
        let what = format!("{}: its data is here", form.name());
        table.row(what, median(&writes.local) * 1000.0, "ms", Aim::None, "");
    }
    for (form, writes) in FORMS.iter().zip(&all).skip(1) {
        let of = all[0].local.iter().zip(&writes.local).map(|(other, own)| other / own);
        let ratio = median(&of.collect::<Vec<_>>());
        table.row(
            format!("overlayfs ÷ {}, its data is here", form.name()),
            ratio,
            "x",
            Aim::None,
            "",
        );
    }
    Ok(())
}

fn one(site: &Site<'_>, registry: &Registry, form: Form, writes: &mut Writes) -> Result<()> {
    let node = Node::start(site, form, None)?;
    let link = site.stage.link(registry.address())?;
    let (address, tag) = match form {
        // Its data is unpacked before the write, so a link would change nothing.
        Form::Overlayfs => (registry.address(), "gzip"),
        _ => (link.address(), "estargz"),
    };
    let image = format!("{address}/{NAME}:{tag}");
    let pod = |seconds: &str, pulls| -> Result<PathBuf> {
        node.run(seconds, &image, pulls, &["/bin/sleep", seconds])?;
        path_in(seconds, FILE)
    };
    let absent = write(&pod("100001", true)?)?;
    if form != Form::Overlayfs {
        writes.absent.push(absent);
    }
    let second = pod("100002", false)?;
    let bytes = io::copy(&mut File::open(&second)?, &mut io::sink())?;
    ensure!(bytes == SIZE, "the file has {bytes} bytes");
    writes.local.push(write(&second)?);
    Ok(())
}

/// Seconds of a write to a file that nobody has written to.
fn write(path: &Path) -> Result<f64> {
    let begun = Instant::now();
    let file = File::options().write(true).open(path)?;
    file.write_all_at(&[7; 4096], SIZE / 2)?;
    file.sync_all()?;
    Ok(begun.elapsed().as_secs_f64())
}

/// A registry with the image, which is made in the new folder `kept` if it is missing.
fn serve(bench: &Bench<'_>, kept: &Path) -> Result<Registry> {
    if !kept.exists() {
        eprintln!("making an image with a large file, once");
        make(bench, kept)?;
    }
    let served = bench.path("large-registry");
    run("cp", &["-r", &kept.to_string_lossy(), &served.to_string_lossy()])?;
    Registry::start(&served, None)
}

fn make(bench: &Bench<'_>, kept: &Path) -> Result<()> {
    let unfinished = kept.with_extension("large-unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    let tree = bench.path("large-tree");
    fs::create_dir_all(tree.join("bin"))?;
    fs::copy("/bin/busybox", tree.join("bin/busybox"))
        .context("cannot find /bin/busybox: install busybox-static")?;
    std::os::unix::fs::symlink("busybox", tree.join("bin/sleep"))?;
    // It compresses somewhat, as data of programs does, and no two blocks are the same.
    let mut file = BufWriter::new(File::create(tree.join(FILE))?);
    for at in 0..SIZE / 16 {
        writeln!(file, "{:015x}", at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16)?;
    }
    file.into_inner()?.sync_all()?;
    {
        let registry = Registry::start(&unfinished, None)?;
        let place = |tag: &str| format!("{}/{NAME}:{tag}", registry.address());
        let (archive, folder) = (bench.path("large.tar"), bench.path("large-layout"));
        let shown = archive.to_string_lossy();
        run("tar", &["-C", &tree.to_string_lossy(), "-cf", &shown, "."])?;
        let layout = OciLayout::new(&folder)?;
        layout.add(&archive)?;
        fs::remove_file(&archive)?;
        let from = format!("oci:{}:latest", folder.display());
        skopeo_copy(&[], &from, &format!("docker://{}", place("gzip")))?;
        let own = bench.path("large-converting");
        Containerd::start(&own, None)?.convert(&place("gzip"), &place("estargz"))?;
        for folder in [&folder, &own, &tree] {
            fs::remove_dir_all(folder)?;
        }
    }
    Ok(fs::rename(&unfinished, kept)?)
}
