//! Pods on Burgeon, on overlayfs and on stargz-snapshotter, by calls of CRI over a slow network.
//!
//! ```text
//!   registry ──► link: 20 ms, 200 Mbit/s ──► a node that has nothing: pull, container ─► the program is ready
//!                                                                     └─► a second pod of the image: warm
//!
//!   starts  the two of them, for each program
//!   write   the first write to a large file of an image
//!   many    pods of one image on one node: time, memory, page cache
//! ```
//!
//! The programs, the image and the link are those of the part `start`. All contenders take turns in
//! each round, and each ratio is of the same round. The sandbox is made before the clock of a cold
//! pod starts, as a kubelet makes it; a warm pod is measured with its sandbox.

mod cold;
mod first_write;
mod many;
mod node;

use anyhow::{Context, Result, bail};
use testkit::{Registry, busybox_image, go_programs, skopeo_copy};

use self::node::Profile;
use super::{
    Bench,
    burgeon::Burgeon,
    machine::Folder,
    start::{
        Stage,
        oci_images::{NAME, serve_images},
        programs::PROGRAMS,
        stargz::Stargz,
    },
    table::Table,
};

pub(crate) fn measure(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let site = Site::make(bench)?;
    for part in &bench.options.containers {
        match part.as_str() {
            "starts" => cold::measure(&site, table)?,
            "write" => first_write::measure(&site, table)?,
            "many" => many::measure(&site, table)?,
            other => bail!("no part {other:?} of containers: starts, write, many"),
        }
    }
    Ok(())
}

/// The things that all nodes have in common.
struct Site<'a> {
    stage: Stage<'a>,
    registry: Registry,
    /// The image of sandboxes, near to the nodes.
    pause: String,
    /// The folder of the nodes.
    disk: Folder,
    stargz: Stargz,
    /// The command that speaks CRI.
    cri: std::path::PathBuf,
}

impl<'a> Site<'a> {
    fn make(bench: &'a Bench<'a>) -> Result<Self> {
        let disk = bench.options.disk.join(format!("bench-containers-{}", std::process::id()));
        if disk.exists() {
            // Of a run that was killed: the first process of a namespace has always this number.
            std::fs::remove_dir_all(&disk)?;
        }
        let disk = Folder::new(std::path::absolute(disk)?)?;
        let stage = Stage::new(bench)?;
        let registry = serve_images(&stage)?;
        let pause = format!("{}/pause:1", registry.address());
        let set = |settings: &mut serde_json::Value| {
            settings["Cmd"] = serde_json::json!(["/bin/sleep", "100000"]);
        };
        let image = busybox_image(&bench.path("pause"), set)?.replace("oci-layout:", "oci:");
        skopeo_copy(&[], &image, &format!("docker://{pause}"))?;
        let stargz = Stargz::make(bench)?;
        let cri = go_programs("containerd", &["./cri"]).join("cri");
        Ok(Self { stage, registry, pause, disk, stargz, cri })
    }

    /// The profiles of the programs, recorded near the registry.
    fn profiles(&self) -> Result<Vec<Profile>> {
        let bench = self.stage.bench;
        let burgeon = Burgeon::new(&bench.program, bench.path("recorder"));
        let image = format!("oci://{}/{NAME}:estargz", self.registry.address());
        let one = |program: &super::start::programs::Program| {
            let recorded = self.stage.record(program, &burgeon, &image)?;
            let file = bench.path(&format!("profile-{}", program.word()));
            std::fs::rename(recorded, &file)?;
            Profile::of(&burgeon, file)
        };
        let failed = |program: &super::start::programs::Program| {
            one(program).with_context(|| format!("recording {}", program.name))
        };
        PROGRAMS.iter().map(failed).collect()
    }
}
