//! Many pods of one image on a node: the time and the memory of each, and the page cache that they
//! share.
//!
//! The memory is that of processes, as `Pss` counts it: a page that several have mapped counts in
//! parts. Page cache is shared if data that one pod has read is in memory for another one.

use std::{fs, io, time::Instant};

use anyhow::{Context, Result, ensure};

use super::{
    Site,
    node::{Form, Job, Node, path_in},
};
use crate::bench::{
    machine::run,
    start::{mib, oci_images::NAME},
    table::{Aim, Table},
};

const FORMS: [Form; 4] = [Form::Overlayfs, Form::Stargz, Form::Overlay, Form::Native];
/// A file of the image that the pods' program does not read.
const UNREAD: &str = "usr/lib/jvm/java-17-openjdk-amd64/lib/modules";
/// Room on the disk for each native container, and the part of the disk that they may take
/// together.
const NATIVE_ROOM: u64 = 256 << 20;
const NATIVE_SHARE: u64 = 10;

/// Bytes of memory that processes take.
#[derive(Default)]
struct Memory {
    all: u64,
    /// Of these, pages of files.
    files: u64,
}

impl Memory {
    /// Of all processes of these programs.
    fn of(programs: &[&str]) -> Self {
        let mut sum = Self::default();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let program = fs::read_link(entry.path().join("exe")).unwrap_or_default();
            let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !programs.iter().any(|it| name.starts_with(it)) {
                continue;
            }
            let text = fs::read_to_string(entry.path().join("smaps_rollup")).unwrap_or_default();
            let field = |name: &str| -> u64 {
                let line = text.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
            };
            sum.all += field("Pss:") << 10;
            sum.files += field("Pss_File:") << 10;
        }
        sum
    }
}

/// The figures of one form, each for one pod.
struct Figures {
    form: Form,
    count: usize,
    made: f64,
    removed: f64,
    /// Of the pods' own processes.
    pods: Memory,
    /// Bytes that the processes of the snapshotter took more than with one pod.
    service: u64,
    /// Part of a file in memory for one pod after another one has read it.
    shared: f64,
}

pub(super) fn measure(site: &Site<'_>, table: &mut Table) -> Result<()> {
    let count = site.stage.bench.options.pods;
    let figures = FORMS.iter().map(|form| {
        eprintln!("  {count} pods: {}", form.name());
        of_form(site, *form, count).with_context(|| format!("pods on {}", form.name()))
    });
    let figures = figures.collect::<Result<Vec<_>>>()?;
    table.heading("Many pods of one image, python3 in each: figures of one pod");
    for it in &figures {
        let note = format!("{} pods; {:.2} s to remove one", it.count, it.removed);
        table.row(format!("{}: time to start", it.form.name()), it.made, "s", Aim::None, note);
    }
    for it in &figures {
        let note = format!(
            "of it {:.2} MiB of files; the snapshotter's processes: {:.2} MiB more",
            mib(it.pods.files) / it.count as f64,
            mib(it.service) / it.count as f64
        );
        let memory = mib(it.pods.all) / it.count as f64;
        table.row(format!("{}: memory", it.form.name()), memory, "MiB", Aim::None, note);
    }
    for it in &figures {
        let what = format!("{}: page cache shared with another pod", it.form.name());
        table.row(what, it.shared * 100.0, "%", Aim::None, "");
    }
    Ok(())
}

fn of_form(site: &Site<'_>, form: Form, count: usize) -> Result<Figures> {
    let count = if form == Form::Native { count.min(natives(site)?) } else { count };
    let node = Node::start(site, form, None)?;
    let tag = if form == Form::Overlayfs { "gzip" } else { "estargz" };
    let image = format!("{}/{NAME}:{tag}", site.registry.address());
    let script = "import time; print('is ready', flush=True); time.sleep(1e6)";
    let pod = |name: &str, pulls| {
        let command = ["python3", "-c", script, name];
        node.pod(name, &image, pulls, &Job { user: "root", command: &command, ready: "is ready" })
    };
    let service = || Memory::of(&["burgeon", "stargz"]).all;
    let first = pod("many-first", true)?;
    let before = service();
    let begun = Instant::now();
    let pods = (0..count).map(|at| pod(&format!("many-{at}."), false));
    let pods = pods.collect::<Result<Vec<_>>>()?;
    let made = begun.elapsed().as_secs_f64() / count as f64;
    // With the first pod, as before.
    let after = service();
    node.remove(&first)?;
    if form == Form::Native {
        let natives = node.kinds()?.iter().filter(|kind| *kind == "native").count();
        ensure!(natives >= count, "{natives} of {count} containers are native");
    }
    let service = after.saturating_sub(before);
    let memory = Memory::of(&["python3"]);
    let shared = shared(["many-0.", if count > 1 { "many-1." } else { "many-0." }])?;
    let begun = Instant::now();
    pods.iter().try_for_each(|pod| node.remove(pod))?;
    let removed = begun.elapsed().as_secs_f64() / count as f64;
    Ok(Figures { form, count, made, removed, pods: memory, service, shared })
}

/// Number of native containers that the disk has room for.
fn natives(site: &Site<'_>) -> Result<usize> {
    let disk = rustix::fs::statvfs(site.disk.path())?;
    let room = disk.f_blocks / NATIVE_SHARE / (NATIVE_ROOM / disk.f_frsize);
    let free = disk.f_bavail / 2 / (NATIVE_ROOM / disk.f_frsize);
    // One less, for the pod that pulls.
    Ok(usize::try_from(room.min(free))?.saturating_sub(1).max(1))
}

/// The part of a file that is in memory for the pod of one name after that of another has read it.
fn shared([reader, other]: [&str; 2]) -> Result<f64> {
    let (read, seen) = (path_in(reader, UNREAD)?, path_in(other, UNREAD)?);
    let read_all =
        || -> Result<u64> { Ok(io::copy(&mut fs::File::open(&read)?, &mut io::sink())?) };
    // Fetched by the first time, which may take so long that the machine lets pages go meanwhile.
    read_all()?;
    let bytes = read_all()?;
    let options = ["--bytes", "--raw", "--noheadings", "--output", "RES"];
    let said = run("fincore", &[&options[..], &[&seen.to_string_lossy()]].concat())?;
    let resident: u64 = said.trim().parse().with_context(|| format!("fincore says {said:?}"))?;
    // Whole pages: a file's last one is not full.
    Ok((resident as f64 / bytes as f64).min(1.0))
}
