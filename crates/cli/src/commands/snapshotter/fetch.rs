//! `burgeon snapshotter fetch`: puts the layers of an image into containerd's content store.
//!
//! ```text
//!   ctr images, content get ──► manifest ──► layers that the content store lacks
//!   the snapshotter's records ─► repositories that have them ──► burgeon __read ── pipe ──► ctr content ingest
//! ```
//!
//! A remote layer was never fetched, so an image with it cannot be pushed, saved or converted. The
//! child reads the blob in its sandbox and compares it with its digest; containerd compares again,
//! and takes nothing that differs.

use std::{
    collections::BTreeSet,
    io::Read,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_oci::Source;
use burgeon_snapshotter::repository;
use burgeon_source::registry::{DOCUMENT_MAX, OciDigest};
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::json;

use super::{
    super::{Context, reading},
    chain_source::ChainSource,
};
use crate::output;

/// The longest list of containerd's images or blobs, in bytes.
const LIST_MAX: u64 = 64 << 20;

/// Options of `fetch`.
#[derive(clap::Args, Debug)]
pub(super) struct Fetch {
    /// The image, as containerd names it
    image: String,
    /// Namespace of containerd
    #[arg(long, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    namespace: String,
    /// Socket of containerd
    #[arg(
        long,
        value_name = "PATH",
        env = "CONTAINERD_ADDRESS",
        default_value = "/run/containerd/containerd.sock"
    )]
    address: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    #[serde(default)]
    layers: Vec<Descriptor>,
    /// Of an index.
    #[serde(default)]
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Descriptor {
    #[serde(deserialize_with = "digest")]
    digest: OciDigest,
    size: u64,
}

fn digest<'de, D: Deserializer<'de>>(from: D) -> Result<OciDigest, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

pub(super) fn fetch(context: &Context, root: &Path, args: &Fetch) -> Result<ExitCode> {
    // `ctr` would try for 10 s.
    std::os::unix::net::UnixStream::connect(&args.address).map_err(|e| {
        let shown = args.address.display();
        Error::io(format!("cannot reach containerd at {shown}: is it there (--address)?"), e)
    })?;
    let containerd = Containerd(args, AtomicU64::new(0));
    let has = containerd.blobs()?;
    let layers = containerd.layers(&has)?;
    let missing: Vec<_> =
        layers.iter().filter(|it| !has.contains(&it.digest.to_string())).collect();
    let places = if missing.is_empty() { Vec::new() } else { places(context, root, &args.image)? };
    let mut shown = Vec::new();
    for layer in &missing {
        let fetched = fetch_one(context, &containerd, layer, &places);
        let from = fetched.as_ref().ok();
        let why = fetched.as_ref().err().map(ToString::to_string);
        if !context.json {
            let size = output::bytes(layer.size);
            match (from, &why) {
                (Some(from), _) => println!("{}: {size} from {from}", layer.digest),
                (None, why) => println!("{}: {}", layer.digest, why.as_deref().unwrap_or_default()),
            }
        }
        shown.push(json!({
            "digest": layer.digest.to_string(), "size": layer.size, "from": from, "why": why,
        }));
    }
    let is_whole = shown.iter().all(|one| one["why"].is_null());
    if context.json {
        output::print_json(
            &json!({ "image": args.image, "layers": layers.len(), "fetched": shown }),
        )?;
    } else if missing.is_empty() {
        println!("containerd has all {} layers of {}", layers.len(), args.image);
    }
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// An image in a registry, by its digest.
struct Place {
    text: String,
    source: Source,
    /// The layers that its documents name; `None` if nobody knows.
    layers: Option<BTreeSet<String>>,
}

/// The images that layers were mounted from, and the repository of `image` itself.
fn places(context: &Context, root: &Path, image: &str) -> Result<Vec<Place>> {
    let loaded = burgeon_snapshotter::read(root)?;
    let sources = loaded.snapshots.iter().filter_map(|one| one.remote.as_ref());
    let texts: BTreeSet<&str> = sources
        .flat_map(|remote| &remote.sources)
        .map(|source| ChainSource::parse(source).image)
        .collect();
    let of_records = texts.into_iter().map(str::to_owned);
    let own = format!("oci://{}", repository(image));
    let all = of_records.chain([own]).filter_map(|text| {
        let source = Source::parse(&text)?.ok()?;
        let kept = source.pinned().and_then(|digest| context.documents().image(digest));
        let layers = kept.map(|image| image.layers.into_iter().map(|it| it.digest).collect());
        Some(Place { text, source, layers })
    });
    Ok(all.collect())
}

/// Fetches a layer from the first repository that has it; returns that.
fn fetch_one(
    context: &Context,
    containerd: &Containerd<'_>,
    layer: &Descriptor,
    places: &[Place],
) -> burgeon_block::Result<String> {
    let what = format!("no known repository has the layer {}", layer.digest);
    let mut last = Error::new(ErrorKind::NotFound, what);
    let digest = layer.digest.to_string();
    let may_have =
        |place: &&Place| place.layers.as_ref().is_none_or(|layers| layers.contains(&digest));
    for place in places.iter().filter(may_have) {
        let (ingest, pipe) = containerd.ingest(layer)?;
        let (text, source) = (&place.text, &place.source);
        let read = reading::blob(context, text, source, (&layer.digest, layer.size), &pipe);
        drop(pipe);
        match read.and_then(|()| ingest.end()) {
            Ok(()) => return Ok(repository_of(text).to_owned()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn repository_of(text: &str) -> &str {
    text.split_once('@').map_or(text, |(repository, _)| repository)
}

/// containerd, by its command `ctr`; and the number of blobs that it was given so far.
struct Containerd<'a>(&'a Fetch, AtomicU64);

/// A running `ctr`, which ends with this value.
struct Ctr(Child);

impl Ctr {
    /// Waits until it has ended well.
    fn end(mut self) -> burgeon_block::Result<()> {
        let failed = |e| Error::io("cannot wait for ctr", e);
        let mut said = String::new();
        if let Some(stderr) = self.0.stderr.take() {
            let _ = stderr.take(4096).read_to_string(&mut said);
        }
        match self.0.wait().map_err(failed)?.success() {
            true => Ok(()),
            false => {
                let what = format!("ctr failed: {}", said.trim().replace('\n', "; "));
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }
}

impl Drop for Ctr {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Containerd<'_> {
    fn ctr(&self, words: &[&str]) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(&self.0.address).arg("--namespace").arg(&self.0.namespace);
        command.args(words);
        command
    }

    /// The output of a command, at most `most` bytes.
    fn output(&self, words: &[&str], most: u64) -> burgeon_block::Result<Vec<u8>> {
        let shown = words[..2].join(" ");
        let failed = |e| Error::io("cannot run ctr, a command of containerd: add it to PATH", e);
        let mut command = self.ctr(words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Ctr(command.spawn().map_err(failed)?);
        let mut said = Vec::new();
        if let Some(stdout) = child.0.stdout.take() {
            stdout.take(most + 1).read_to_end(&mut said).map_err(failed)?;
        }
        if said.len() as u64 > most {
            let what = format!("`ctr {shown}` prints more than {most} bytes");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        child.end().map(|()| said)
    }

    /// The digests of all blobs of the namespace.
    fn blobs(&self) -> burgeon_block::Result<BTreeSet<String>> {
        let said = self.output(&["content", "ls", "--quiet"], LIST_MAX)?;
        Ok(String::from_utf8_lossy(&said).lines().map(|line| line.trim().to_owned()).collect())
    }

    /// The layers of the image, of an index those of each manifest that is here.
    fn layers(&self, has: &BTreeSet<String>) -> burgeon_block::Result<Vec<Descriptor>> {
        let image = &self.0.image;
        let said = self.output(&["images", "ls", &format!("name=={image}")], LIST_MAX)?;
        let said = String::from_utf8_lossy(&said).into_owned();
        // REF TYPE DIGEST SIZE …
        let line = said.lines().find(|line| line.split_whitespace().next() == Some(image));
        let digest = line.and_then(|line| line.split_whitespace().nth(2));
        let missing = || {
            let space = &self.0.namespace;
            let what = format!(
                "containerd has no image {image} in the namespace {space}: `ctr -n {space} images ls`"
            );
            Error::new(ErrorKind::NotFound, what)
        };
        let top = self.manifest(digest.ok_or_else(missing)?)?;
        if top.manifests.is_empty() {
            return Ok(top.layers);
        }
        let mut layers = Vec::new();
        for one in top.manifests.iter().map(|one| one.digest.to_string()) {
            if has.contains(&one) {
                layers.extend(self.manifest(&one)?.layers);
            }
        }
        Ok(layers)
    }

    fn manifest(&self, digest: &str) -> burgeon_block::Result<Manifest> {
        let said = self.output(&["content", "get", digest], DOCUMENT_MAX)?;
        serde_json::from_slice(&said).map_err(|e| {
            Error::with_source(ErrorKind::Corrupt, format!("{digest} is not a manifest"), e)
        })
    }

    /// Starts writing a blob; the pipe takes its bytes.
    fn ingest(&self, layer: &Descriptor) -> burgeon_block::Result<(Ctr, OwnedFd)> {
        let failed = |e| Error::io("cannot run ctr, a command of containerd: add it to PATH", e);
        let (reader, writer) = std::io::pipe().map_err(failed)?;
        let (digest, size) = (layer.digest.to_string(), layer.size.to_string());
        // Of this attempt alone: the next one must not go on behind bytes of another source.
        let attempt = self.1.fetch_add(1, Relaxed);
        let key = format!("burgeon-{}-{}-{attempt}", layer.digest.hex(), std::process::id());
        let words = ["content", "ingest", "--expected-digest", &digest, "--expected-size", &size];
        let mut command = self.ctr(&words);
        command.arg(&key).stdin(reader).stdout(Stdio::null()).stderr(Stdio::piped());
        Ok((Ctr(command.spawn().map_err(failed)?), writer.into()))
    }
}
