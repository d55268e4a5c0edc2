//! The same tree as OCI images, in a registry: on the first mount, and by their indexes.
//!
//! ```text
//!   tree ──► umoci: gzip ─┬─────────────────────────────────► registry ──► burgeon index --push
//!                         ├──► skopeo: zstd:chunked ────────►
//!                         └──► containerd: eStargz ─────────►
//! ```
//!
//! The images are made once, and kept beside the tree. The minimum of a format is the data that
//! passes the link when nothing but the profile is fetched: the manifests, the index, and the parts
//! of the layer that hold the data that the program reads.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testkit::{OciLayout, Registry, skopeo_copy};

use super::{
    Image, Program, Stage, Start, Starts, bound, lazy_aim, mib,
    stargz::{Containerd, Stargz},
};
use crate::bench::{
    burgeon::Burgeon,
    machine::run,
    table::{Aim, Table},
};

/// The image's name in the registry.
pub(in crate::bench) const NAME: &str = "tree";

/// A format of layers, and its tag.
struct Format {
    name: &'static str,
    tag: &'static str,
    /// The bound for a start with a profile.
    aim: Aim,
    /// True if it has a table of contents, by which its first mount is lazy.
    listed: bool,
}

const FORMATS: [Format; 3] = [
    Format { name: "gzip", tag: "gzip", aim: Aim::None, listed: false },
    Format { name: "zstd:chunked", tag: "zstd", aim: Aim::AtMost(1.2), listed: true },
    Format { name: "eStargz", tag: "estargz", aim: Aim::None, listed: true },
];

pub(super) struct OciImages<'a> {
    stage: &'a Stage<'a>,
    registry: Registry,
    /// An installation near to the registry.
    publisher: Burgeon,
    /// Another one, which has no index.
    reader: Burgeon,
    /// The digest of each format's index.
    indexes: Vec<String>,
    /// The place of the gzip layer in the registry.
    layer: String,
    stargz: Stargz,
    /// The chain id of the eStargz image.
    chain: String,
}

impl<'a> OciImages<'a> {
    pub(super) fn make(stage: &'a Stage<'a>) -> Result<Self> {
        let registry = serve_images(stage)?;
        let publisher = Burgeon::new(&stage.bench.program, stage.bench.path("start-publisher"));
        let reader = Burgeon::new(&stage.bench.program, stage.bench.path("start-reader"));
        let mut indexes = Vec::new();
        for format in &FORMATS {
            let image = format!("oci://{}/{NAME}:{}", registry.address(), format.tag);
            let made = publisher.run(&["index", &image, "--push", "--json"])?;
            let made: Value = serde_json::from_str(&made)?;
            indexes.push(made["index"].as_str().context("no index was made")?.to_owned());
        }
        let document = |path: &str| -> Result<Value> {
            let url = format!("http://{}/v2/{NAME}/{path}", registry.address());
            let accept = "Accept: application/vnd.oci.image.manifest.v1+json";
            Ok(serde_json::from_str(&run("curl", &["-sSf", "-H", accept, &url])?)?)
        };
        let digest = |value: &Value| value.as_str().map(str::to_owned).context("no digest");
        let layer = digest(&document("manifests/gzip")?["layers"][0]["digest"])?;
        let config = digest(&document("manifests/estargz")?["config"]["digest"])?;
        let chain = digest(&document(&format!("blobs/{config}"))?["rootfs"]["diff_ids"][0])?;
        let layer = format!("v2/{NAME}/blobs/{layer}");
        let stargz = Stargz::make(stage.bench)?;
        Ok(Self { stage, registry, publisher, reader, indexes, layer, stargz, chain })
    }

    /// Of a program that reads `share` of the image.
    pub(super) fn measure(&self, program: &Program, share: f64, table: &mut Table) -> Result<()> {
        let record = |by, label| move |format| self.record(program, format, by, label);
        let profiles = (0..FORMATS.len()).map(record(&self.publisher, "indexed"));
        let profiles = profiles.collect::<Result<Vec<_>>>()?;
        let of_tables = (0..FORMATS.len()).map(record(&self.reader, "listed"));
        let of_tables = of_tables.collect::<Result<Vec<_>>>()?;
        let [mut unpacked, mut first_mount, mut stargz] = [(); 3].map(|()| Starts::default());
        let mut lazy = FORMATS.map(|_| Starts::default());
        let mut led = FORMATS.map(|_| Starts::default());
        // Without an index, by the table of contents; without and with a profile.
        let mut listed = FORMATS.map(|_| [(); 2].map(|()| Starts::default()));
        for _ in 0..self.stage.bench.options.rounds {
            let server = self.registry.address();
            unpacked.0.push(self.stage.unpack(program, server, &self.layer, "gzip -dc")?);
            first_mount.0.push(self.mount(Some(program), 0, &["--profile", "none"])?);
            for (format, profile) in profiles.iter().enumerate() {
                lazy[format].0.push(self.indexed(Some(program), format, "none")?);
                led[format].0.push(self.indexed(Some(program), format, profile)?);
                let profiles = ["none", of_tables[format].as_str()];
                for (starts, profile) in listed[format].iter_mut().zip(profiles) {
                    if FORMATS[format].listed {
                        let options = ["--profile", profile];
                        starts.0.push(self.mount(Some(program), format, &options)?);
                    }
                }
            }
            let link = self.stage.link(server)?;
            let image = (&*format!("{NAME}:estargz"), &*self.chain);
            stargz.0.push(self.stargz.start(self.stage, program, &link, image)?);
        }
        table.heading(format!("The same of OCI images: {}", program.name));
        unpacked.row(table, "gzip, download and unpack");
        first_mount.row(table, "gzip, first mount");
        let ratio = first_mount.seconds() / unpacked.seconds();
        table.row("gzip, first mount ÷ download and unpack", ratio, "x", Aim::AtMost(1.0), "");
        for (format, profile) in profiles.iter().enumerate() {
            let Format { name, aim, listed: is_listed, .. } = FORMATS[format];
            if is_listed {
                let [alone, led] = &listed[format];
                alone.row(table, &format!("{name}, first mount, no profile"));
                led.row(table, &format!("{name}, first mount, profile"));
                let ratio = alone.seconds() / unpacked.seconds();
                let what = format!("{name}, first mount ÷ download and unpack");
                table.row(what, ratio, "x", lazy_aim(share), "");
            }
            let needed = self.indexed(None, format, profile)?.bytes;
            let note = format!("{:.1} MiB needed", mib(needed));
            lazy[format].row(table, &format!("{name}, indexed, no profile"));
            led[format].row(table, &format!("{name}, indexed, profile"));
            if name == "eStargz" {
                stargz.row(table, "eStargz, stargz-snapshotter");
            }
            table.row(format!("{name}, bound"), bound(needed), "s", Aim::None, note);
            let ratio = lazy[format].seconds() / unpacked.seconds();
            let what = format!("{name}, no profile ÷ download and unpack");
            table.row(what, ratio, "x", lazy_aim(share), "");
            let ratio = led[format].seconds() / bound(needed);
            table.row(format!("{name}, profile ÷ bound"), ratio, "x", aim, "");
        }
        Ok(())
    }

    /// The start from an image of a format with its index.
    fn indexed(&self, program: Option<&Program>, format: usize, profile: &str) -> Result<Start> {
        let options = ["--index", &self.indexes[format], "--profile", profile];
        self.mount(program, format, &options)
    }

    fn mount(&self, program: Option<&Program>, format: usize, options: &[&str]) -> Result<Start> {
        let link = self.stage.link(self.registry.address())?;
        let name = format!("oci://{}/{NAME}:{}", link.address(), FORMATS[format].tag);
        self.stage.mount(program, &link, &Image { store: None, name, options })
    }

    /// The profile of one start from an image of the installation `by`.
    fn record(
        &self,
        program: &Program,
        format: usize,
        by: &Burgeon,
        label: &str,
    ) -> Result<String> {
        let name = format!("oci://{}/{NAME}:{}", self.registry.address(), FORMATS[format].tag);
        let recorded = self.stage.record(program, by, &name)?;
        let kept = self.stage.bench.path(&format!("{label}-{}", FORMATS[format].tag));
        fs::rename(recorded, &kept)?;
        Ok(kept.to_string_lossy().into_owned())
    }
}

/// A registry with the images, which are made if they are missing.
pub(in crate::bench) fn serve_images(stage: &Stage<'_>) -> Result<Registry> {
    if !stage.images.exists() {
        make_images(stage, &stage.images)?;
    }
    let served = stage.bench.path("registry");
    run("cp", &["-r", &stage.images.to_string_lossy(), &served.to_string_lossy()])?;
    Registry::start(&served, None)
}

/// Makes the images of a registry in the new folder `images`.
fn make_images(stage: &Stage<'_>, images: &Path) -> Result<()> {
    eprintln!("making images, once");
    let unfinished = images.with_extension("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    {
        let registry = Registry::start(&unfinished, None)?;
        let place = |tag: &str| format!("{}/{NAME}:{tag}", registry.address());
        let (archive, folder) = (stage.bench.path("tree.tar"), stage.bench.path("layout"));
        let shown = archive.to_string_lossy();
        // Not padded: skopeo leaves out padding of what it makes zstd:chunked, and its
        // configuration says what there was with it.
        run("tar", &["-C", &stage.tree.to_string_lossy(), "-b1", "-cf", &shown, "."])?;
        let layout = OciLayout::new(&folder)?;
        layout.add(&archive)?;
        fs::remove_file(&archive)?;
        let from = format!("oci:{}:latest", folder.display());
        skopeo_copy(&[], &from, &format!("docker://{}", place("gzip")))?;
        let chunked: PathBuf = stage.bench.path("chunked");
        let to = format!("oci:{}:latest", chunked.display());
        skopeo_copy(&["--dest-compress-format", "zstd:chunked"], &from, &to)?;
        skopeo_copy(&[], &to, &format!("docker://{}", place("zstd")))?;
        let own = stage.bench.path("converting");
        Containerd::start(&own, None)?.convert(&place("gzip"), &place("estargz"))?;
        for folder in [&folder, &chunked, &own] {
            fs::remove_dir_all(folder)?;
        }
    }
    ensure!(!images.exists(), "{images:?} was made by somebody else meanwhile");
    Ok(fs::rename(&unfinished, images)?)
}
