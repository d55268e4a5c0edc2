//! Cold starts of real programs over a network: time to ready, bytes, requests.
//!
//! ```text
//!   nginx, registry ──► link: 20 ms, 200 Mbit/s ──► download and unpack ─┐
//!                                              └──► mount ───────────────┴─► chroot: the program ─► ready
//!
//!   ours        an image of ours in a store behind nginx: plain, and built by the program's profile
//!   OCI images  the same tree as other people's images in a registry: gzip, zstd:chunked, eStargz
//!   stargz      containerd and stargz-snapshotter with that eStargz image
//! ```
//!
//! One Debian tree with all of the programs, so that each reads a small part of it. Everything but
//! the page cache of the served files is cold: a new state directory each time, whose daemon runs
//! (on a tiny image) before the clock starts. The bound is the link's own time for what it has to
//! carry at least, and a round trip.

pub(super) mod oci_images;
mod ours;
pub(super) mod programs;
pub(super) mod stargz;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testkit::Link;

use self::{
    oci_images::OciImages,
    ours::Ours,
    programs::{PROGRAMS, Program, chroot, prepare, run_to_ready, start},
};
use super::{
    Bench,
    burgeon::Burgeon,
    machine::{run, tmpfs, wait_until},
    median,
    table::{Aim, Table},
};

const LATENCY: Duration = Duration::from_millis(20);
const BYTES_PER_SECOND: u64 = 200_000_000 / 8;

pub(crate) fn measure(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let stage = Stage::new(bench)?;
    let ours = Ours::make(&stage)?;
    let oci_images = OciImages::make(&stage)?;
    for program in &PROGRAMS {
        let failed = || format!("starting {}", program.name);
        let share = ours.measure(program, table).with_context(failed)?;
        oci_images.measure(program, share, table).with_context(failed)?;
    }
    Ok(())
}

/// The environment of all measurements.
pub(super) struct Stage<'a> {
    pub(super) bench: &'a Bench<'a>,
    tree: PathBuf,
    /// A folder beside the tree, where its images stay.
    images: PathBuf,
}

/// One measured start.
struct Start {
    seconds: f64,
    /// Of these, until it was mounted.
    mounted: f64,
    bytes: u64,
    requests: u64,
}

/// Starts of one kind.
#[derive(Default)]
struct Starts(Vec<Start>);

impl Starts {
    fn seconds(&self) -> f64 {
        median(&self.0.iter().map(|start| start.seconds).collect::<Vec<_>>())
    }

    fn row(&self, table: &mut Table, what: &str) {
        let Some(last) = self.0.last() else { return };
        let mount = match last.mounted {
            0.0 => String::new(),
            mounted => format!("; mounted after {mounted:.2} s"),
        };
        let note = format!("{:.1} MiB, {} requests{mount}", mib(last.bytes), last.requests);
        table.row(what, self.seconds(), "s", Aim::None, note);
    }
}

pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Aim for a start without a profile that reads `share` of the image, as a part of download and
/// unpack.
fn lazy_aim(share: f64) -> Aim {
    if share < 0.1 { Aim::AtMost(0.3) } else { Aim::None }
}

/// Seconds that the link needs for `bytes`, and a round trip.
fn bound(bytes: u64) -> f64 {
    bytes as f64 / BYTES_PER_SECOND as f64 + LATENCY.as_secs_f64()
}

/// An image, as a host that has nothing mounts it.
struct Image<'a> {
    /// The store it is in; else its name says where it is.
    store: Option<PathBuf>,
    name: String,
    options: &'a [&'a str],
}

impl<'a> Stage<'a> {
    /// Makes the tree if it is missing; images of an earlier one go.
    pub(super) fn new(bench: &'a Bench<'a>) -> Result<Self> {
        let (tree, was_there) = programs::tree(&bench.options.start_tree)?;
        let images = tree.with_extension("images");
        if !was_there && images.exists() {
            fs::remove_dir_all(&images)?;
        }
        Ok(Self { bench, tree, images })
    }
}

impl Stage<'_> {
    pub(super) fn link(&self, server: SocketAddr) -> Result<Link> {
        Ok(Link::new(server, LATENCY, BYTES_PER_SECOND)?)
    }

    /// The start from an archive at `path` of a server, which `decompress` decompresses.
    fn unpack(
        &self,
        program: &Program,
        server: SocketAddr,
        path: &str,
        decompress: &str,
    ) -> Result<Start> {
        let link = self.link(server)?;
        let at = self.bench.path("unpacked");
        let memory = tmpfs(&at)?;
        let begun = Instant::now();
        let url = format!("http://{}/{path}", link.address());
        let unpack = format!("curl -sSf {url} | {decompress} | tar -x -C {at:?}");
        run("sh", &["-c", &unpack])?;
        let seconds = start(program, &at, begun)?;
        drop(memory);
        Ok(Start { seconds, mounted: 0.0, bytes: link.bytes(), requests: link.requests() })
    }

    /// A daemon of an installation that has nothing but a tiny image, and that image's mount.
    pub(super) fn new_host(&self, state: &Path) -> Result<Burgeon> {
        let _ = fs::remove_dir_all(state);
        let near = Burgeon::with_store(&self.bench.program, state.into(), self.tiny()?);
        near.mount("tiny", &self.bench.path("tiny-at"))?;
        Ok(near)
    }

    /// A store with an image that costs nothing, made once.
    fn tiny(&self) -> Result<PathBuf> {
        let store = self.bench.path("tiny-store");
        if !store.exists() {
            let tiny = self.bench.path("tiny");
            fs::create_dir_all(&tiny)?;
            fs::write(tiny.join("file"), "tiny")?;
            let state = self.bench.path("tiny-state");
            let builder = Burgeon::with_store(&self.bench.program, state, store.clone());
            builder.run(&["build", &tiny.to_string_lossy(), "tiny"])?;
        }
        Ok(store)
    }

    /// The start from a mount on a host that has nothing, or only the mount, and what passed the
    /// link until its profile had been prefetched, if it has one.
    fn mount(&self, program: Option<&Program>, link: &Link, image: &Image<'_>) -> Result<Start> {
        let state = self.bench.path("start-state");
        let near = self.new_host(&state)?;
        let burgeon = match &image.store {
            Some(store) => Burgeon::with_store(&self.bench.program, state, store.clone()),
            None => Burgeon::new(&self.bench.program, state),
        };
        let at = self.bench.path("start-at");
        fs::create_dir_all(&at)?;
        let shown = at.to_string_lossy().into_owned();
        let writes = program.map_or(&["--read-only"][..], Program::writes);
        let begun = Instant::now();
        burgeon.run(&[&["mount", &image.name, &shown][..], image.options, writes].concat())?;
        let mounted = begun.elapsed().as_secs_f64();
        let mut seconds = mounted;
        if let Some(program) = program {
            seconds = start(program, &at, begun)?;
        }
        let profile = || -> Result<Value> {
            let status = burgeon.status()?;
            let mut mounts = status["mounts"].as_array().into_iter().flatten();
            let mount = mounts.find(|mount| mount["target"] == *shown);
            Ok(mount.map_or(Value::Null, |mount| mount["profile"].clone()))
        };
        wait_until("the profile", || {
            profile().is_ok_and(|profile| profile.is_null() || profile["state"] == "done")
        })?;
        let start = Start { seconds, mounted, bytes: link.bytes(), requests: link.requests() };
        burgeon.umount(&at)?;
        near.umount(&self.bench.path("tiny-at"))?;
        Ok(start)
    }

    /// The profile of one start, from a mount of `image` by an installation that is near to it.
    pub(super) fn record(
        &self,
        program: &Program,
        burgeon: &Burgeon,
        image: &str,
    ) -> Result<PathBuf> {
        let file = self.bench.path("recorded");
        let _ = fs::remove_file(&file);
        let at = self.bench.path("record-at");
        fs::create_dir_all(&at)?;
        let shown = at.to_string_lossy().into_owned();
        burgeon.run(&["mount", image, &shown, "--write-limit", "512M", "--profile", "none"])?;
        {
            let _proc = prepare(&at)?;
            let output = file.to_string_lossy().into_owned();
            let mut arguments = vec!["record", &shown, "--output", &output, "--"];
            let inner = chroot(program, &at);
            arguments.extend(inner.iter().map(String::as_str));
            run_to_ready(&mut burgeon.command(&arguments), program)?;
        }
        burgeon.umount(&at)?;
        ensure!(file.exists(), "nothing was recorded");
        Ok(file)
    }

    /// Seconds of a start from memory.
    fn warm(&self, program: &Program) -> Result<f64> {
        let at = self.bench.path("warm");
        let _memory = tmpfs(&at)?;
        run("cp", &["-a", &format!("{}/.", self.tree.display()), &at.to_string_lossy()])?;
        start(program, &at, Instant::now())?;
        start(program, &at, Instant::now())
    }
}
