//! Remote layers as this host can mount them: of trusted repositories, with tables of contents; or
//! of images whose layers were all read here, and that have an index here.
//!
//! ```text
//!   claim    repository trusted? ─► documents of the image (kept, or read by the child) ─► chain ID, layer
//!            digest, tables of contents ─► oci://REPOSITORY@DIGEST#chain=…
//!            layers verified?    ─► kept documents ─► chain ID, layer digest, index ─► checked oci://…
//!   mount    burgeon mount REFERENCE chains/ID --read-only, with --checked if it is verified
//!   unmount  burgeon umount --lazy chains/ID
//! ```
//!
//! Mounting is the work of a command of its own, as a user would type it: it may be killed when it
//! takes too long, and a failure of it is none of the snapshotter's.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read, Seek},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_daemon::{Client, extents, writes};
use burgeon_oci::{DiffIdCheck, OciImage, Source};
use burgeon_snapshotter::{
    IndexMade, IndexPolicy, matches,
    remote::{LayerChain, Layers},
    repository,
};
use burgeon_source::registry::OciDigest;

use super::{
    super::{Context, HOSTS_DIR, oci_image},
    chain_source::ChainSource,
    default_hosts, index,
};
use crate::{
    config::{Config, SnapshotterConfig},
    global,
};

/// The longest mount of a chain: the tables of contents of all its layers are fetched.
const MOUNT_TIME: Duration = Duration::from_secs(60);
/// The longest time in which an index is made or removed.
const INDEX_TIME: Duration = Duration::from_secs(60 * 60);
/// Interval between the first looks at a command.
const LOOK: Duration = Duration::from_millis(10);
/// The same of one that takes long.
const LOOKS_MAX: Duration = Duration::from_secs(1);
/// Most bytes of a command's error that are passed on.
const SAID_MAX: u64 = 4096;

#[derive(Debug)]
pub(super) struct OwnLayers {
    context: Context,
    trust: Vec<String>,
    /// Begins the names of the writes of native containers: other roots have others.
    prefix: String,
    /// The limit of the writes of each native container.
    write_limit: Option<u64>,
    /// containerd's content store.
    content: PathBuf,
}

impl OwnLayers {
    /// Claims chains of repositories that match one of `trust`, for the snapshots in `root`.
    pub(super) fn new(
        context: Context,
        root: &Path,
        trust: Vec<String>,
        write_limit: Option<u64>,
        content: PathBuf,
    ) -> Self {
        let digest = burgeon_block::Digest::of(root.as_os_str().as_encoded_bytes()).to_string();
        let prefix = format!("snapshot-{}-", &digest[..8]);
        Self { context, trust, prefix, write_limit, content }
    }

    /// True if a pattern of the command line, or of the configuration as it is now, matches.
    fn trusts(&self, repository: &str) -> bool {
        let is_in = |patterns: &[String]| patterns.iter().any(|it| matches(it, repository));
        if is_in(&self.trust) {
            return true;
        }
        self.settings().trust.is_some_and(|trust| is_in(&trust.value))
    }

    /// The name of the writes of snapshot `id`.
    fn writes_of(&self, id: u64) -> String {
        format!("{}{id}", self.prefix)
    }

    /// The section of the configuration as it is now.
    fn settings(&self) -> SnapshotterConfig {
        Config::examine(self.context.config.place.as_deref()).0.snapshotter
    }

    /// Runs a command of this program; its output, of [`SAID_MAX`] bytes at most.
    fn run(&self, arguments: &[&OsStr], limit: Duration) -> Result<String> {
        let shown = |argument: &&OsStr| match argument.is_empty() {
            true => "''".to_owned(),
            false => argument.to_string_lossy().into_owned(),
        };
        let shown = arguments.iter().map(shown).collect::<Vec<_>>().join(" ");
        let failed = |e| Error::io(format!("cannot run `burgeon {shown}`"), e);
        // Files, not pipes, which a child of the command could hold open.
        let file = || {
            let file = rustix::fs::memfd_create("said", rustix::fs::MemfdFlags::CLOEXEC);
            file.map(File::from).map_err(|e| failed(e.into()))
        };
        let (output, said) = (file()?, file()?);
        // A command of the background dies if this end is closed.
        let (_ours, theirs) = UnixStream::pair().map_err(failed)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg("--state-dir").arg(self.context.state.root()).args(arguments);
        command.env_remove("NOTIFY_SOCKET");
        // The command reads layers from the hosts that the claim has read from.
        command.envs(default_hosts(&self.context).map(|folder| (HOSTS_DIR, folder)));
        if let Some(place) = &self.context.config.place {
            command.env(global::CONFIG, place);
        }
        command.stdin(OwnedFd::from(theirs)).stdout(output.try_clone().map_err(failed)?);
        let mut child =
            command.stderr(said.try_clone().map_err(failed)?).spawn().map_err(failed)?;
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                break status;
            }
            if begun.elapsed() >= limit {
                let _ = child.kill();
                let _ = child.wait();
                let what = format!("`burgeon {shown}` took more than {} s", limit.as_secs());
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            thread::sleep((begun.elapsed() / 16).clamp(LOOK, LOOKS_MAX));
        };
        let read = |mut from: File| -> io::Result<String> {
            let mut words = Vec::new();
            from.rewind()?;
            from.take(SAID_MAX).read_to_end(&mut words)?;
            Ok(String::from_utf8_lossy(&words).into_owned())
        };
        if status.success() {
            return read(output).map_err(failed);
        }
        let words = read(said).map_err(failed)?;
        let what = format!("{} (`burgeon {shown}`)", words.trim().replace('\n', "; "));
        Err(Error::new(ErrorKind::Unavailable, what))
    }
}

impl OwnLayers {
    /// A claim without trust: all layers of the image unpack to what it states, and it has an index
    /// here, which was made from the same bytes.
    fn claim_verified(&self, text: &str, image: &OciImage, chain: &str) -> Result<String, String> {
        match self.context.unpackings().judge(image, image.layers.len()) {
            DiffIdCheck::Verified => {}
            DiffIdCheck::Unread(layer) => {
                return Err(format!("the layer {layer} was not read here"));
            }
            DiffIdCheck::Differs(why) => return Err(why),
        }
        let indexed = oci_image::checked(&self.context, text).map_err(|e| e.to_string())?;
        match indexed.is_some() {
            true => {
                let chain = Some(chain);
                Ok(ChainSource { image: text, chain, is_verified: true }.to_string())
            }
            false => Err("the image has no index here".to_owned()),
        }
    }
}

impl Layers for OwnLayers {
    fn claim(&self, wanted: &LayerChain) -> Result<String, String> {
        let repository = repository(&wanted.image);
        let wrong = |e: Error| e.to_string();
        let digest: OciDigest = wanted.manifest.parse().map_err(wrong)?;
        let text = format!("oci://{repository}@{digest}");
        let kept = self.context.documents().image(&digest);
        let not_verified = match &kept {
            Some(image) => {
                check_top(image, wanted)?;
                let unpackings = self.context.unpackings();
                if let DiffIdCheck::Differs(why) = unpackings.judge(image, image.layers.len()) {
                    return Err(why);
                }
                match self.claim_verified(&text, image, &wanted.chain) {
                    Ok(source) => return Ok(source),
                    Err(why) => why,
                }
            }
            None => "the image was not read here".to_owned(),
        };
        if !self.trusts(repository) {
            return Err(format!(
                "{repository} is not trusted (snapshotter.trust of the configuration, or `burgeon \
                 snapshotter --trust {repository}`), and \
                 {not_verified} (`burgeon index {text}`)"
            ));
        }
        let image = match kept {
            Some(image) => image,
            None => {
                let invalid =
                    || Error::new(ErrorKind::Invalid, format!("{text} is not an OCI image"));
                let source = Source::parse(&text).unwrap_or_else(|| Err(invalid()));
                let source = source.map_err(wrong)?;
                index::documents(&self.context, &text, &source, &digest).map_err(wrong)?
            }
        };
        // Its documents may have come just now: the layers may be known from another image.
        let unpackings = self.context.unpackings();
        if let DiffIdCheck::Differs(why) = unpackings.judge(&image, image.layers.len()) {
            return Err(why);
        }
        check_top(&image, wanted)?;
        check_tocs(&image)?;
        let chain = Some(wanted.chain.as_str());
        Ok(ChainSource { image: &text, chain, is_verified: false }.to_string())
    }

    fn refused(&self, source: &str) -> Option<String> {
        refused(&self.context, source)
    }

    fn mount(&self, source: &str, at: &Path) -> Result<()> {
        // As in unpacked layers: containers need both, and nobody else enters the root above.
        let mut arguments = ["mount", "--read-only", "--suid", "--dev"].map(OsStr::new).to_vec();
        let source = ChainSource::parse(source).to_mount();
        arguments.extend(source.iter().map(OsStr::new).chain([at.as_os_str()]));
        self.run(&arguments, MOUNT_TIME).map(drop)
    }

    fn mount_native(&self, source: &str, at: &Path, id: u64) -> Result<()> {
        let writes = self.writes_of(id);
        let mut arguments = ["mount", "--suid", "--dev", "--writes"].map(OsStr::new).to_vec();
        arguments.push(OsStr::new(&writes));
        let limit = self.write_limit.map(|limit| limit.to_string());
        if let Some(limit) = &limit {
            arguments.extend([OsStr::new("--write-limit"), OsStr::new(limit)]);
        }
        let source = ChainSource::parse(source).to_mount();
        arguments.extend(source.iter().map(OsStr::new).chain([at.as_os_str()]));
        self.run(&arguments, MOUNT_TIME).map(drop)
    }

    fn remove_writes(&self, id: u64) -> Result<()> {
        let name = self.writes_of(id);
        match writes::find(&self.context.state, &name) {
            Ok(None) => Ok(()),
            _ => match writes::remove(&self.context.state, &name) {
                Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
                removed => removed,
            },
        }
    }

    fn image_at(&self, at: &Path) -> Result<Option<String>> {
        let Some((_, status)) = Client::connect_and_ask(&self.context.state)? else {
            return Ok(None);
        };
        let found = status.mounts.iter().find(|mount| mount.target == at);
        Ok(found.map(|mount| mount.digest.0.to_string()))
    }

    fn have_same_extents(&self, one: &File, other: &File) -> bool {
        let all = |file| extents::places(file).ok().flatten();
        all(one).is_some_and(|places| Some(places) == all(other))
    }

    fn serve(&self) -> Result<()> {
        Client::connect_or_start(&self.context.state).map(drop)
    }

    fn unmount(&self, at: &Path) -> Result<()> {
        let arguments = ["umount", "--lazy"].map(OsStr::new);
        self.run(&[&arguments[..], &[at.as_os_str()]].concat(), MOUNT_TIME).map(drop)
    }

    fn index_policy(&self) -> Result<IndexPolicy> {
        let (config, problems) = Config::examine(self.context.config.place.as_deref());
        // The line that cannot be read may be the one that forbids indexes, or keeps them.
        if let Some(problem) = problems.first() {
            return Err(Error::new(ErrorKind::Invalid, problem.to_string()));
        }
        let settings = config.snapshotter;
        let is_on = settings.index.is_none_or(|index| index.value);
        let kept = settings.index_kept.map_or(SnapshotterConfig::INDEX_KEPT, |kept| kept.value);
        Ok(IndexPolicy { is_on, kept })
    }

    fn has_index(&self, image: &str, manifest: &str) -> bool {
        let text = text_of(image, manifest);
        text.and_then(|text| oci_image::checked(&self.context, &text)).is_ok_and(|it| it.is_some())
    }

    fn make_index(&self, image: &str, manifest: &str) -> Result<IndexMade> {
        let settings = self.settings();
        let min = settings.index_min.map_or(SnapshotterConfig::INDEX_MIN, |min| min.value);
        let max = settings.index_max.map_or(SnapshotterConfig::INDEX_MAX, |max| max.value);
        let words = [text_of(image, manifest)?, "--min".into(), min.to_string(), "--max".into()];
        let mut arguments = INDEX.map(OsStr::new).to_vec();
        arguments.extend(words.iter().map(OsStr::new));
        let max = max.to_string();
        arguments.extend([OsStr::new(&max), OsStr::new("--content"), self.content.as_os_str()]);
        index::understand(&self.run(&arguments, INDEX_TIME)?)
    }

    fn remove_index(&self, image: &str, manifest: &str) -> Result<()> {
        let text = text_of(image, manifest)?;
        let arguments = [&INDEX[..], &[&text, "--remove"]].concat();
        let arguments: Vec<_> = arguments.into_iter().map(OsStr::new).collect();
        self.run(&arguments, INDEX_TIME).map(drop)
    }
}

/// The command of the background, on this host's own store.
const INDEX: [&str; 4] = ["--store", "", "snapshotter", "index"];

/// The image, as Burgeon names it.
fn text_of(image: &str, manifest: &str) -> Result<String> {
    let digest: OciDigest = manifest.parse()?;
    Ok(format!("oci://{}@{digest}", repository(image)))
}

/// Why nothing more may be made above the chain of this source: one of its layers unpacks to
/// another digest than its image states.
pub(super) fn refused(context: &Context, source: &str) -> Option<String> {
    let ChainSource { image: text, chain, .. } = ChainSource::parse(source);
    let digest = Source::parse(text)?.ok()?.pinned()?.clone();
    let Some(image) = context.documents().image(&digest) else {
        // Without its documents nobody can tell whether it has one of the layers that differ.
        return context.unpackings().has_differing().then(|| {
            format!(
                "the documents of {text} are gone, and this host knows layers that are not what an image states: \
                 `burgeon snapshotter verify` reads them again"
            )
        });
    };
    let chain = Some(chain?);
    let top = image.layers.iter().position(|layer| layer.chain_id.as_deref() == chain)?;
    match context.unpackings().judge(&image, top + 1) {
        DiffIdCheck::Differs(why) => Some(format!("{why} ({text})")),
        DiffIdCheck::Verified | DiffIdCheck::Unread(_) => None,
    }
}

/// The image has the chain, and its topmost layer is the one that containerd would fetch.
fn check_top(image: &OciImage, wanted: &LayerChain) -> Result<(), String> {
    let has = |chain: &Option<String>| chain.as_ref() == Some(&wanted.chain);
    let top = image.layers.iter().position(|layer| has(&layer.chain_id));
    let top = top.ok_or_else(|| format!("{} has no chain {}", image.digest, wanted.chain))?;
    match image.layers[top].digest == wanted.layer {
        true => Ok(()),
        false => Err(format!("layer {top} of {} is not {}", image.digest, wanted.layer)),
    }
}

/// All layers of the image can be read lazily: containerd would unpack a local one above remote
/// ones, so the pull would have to mount these first, and to wait for their registry.
fn check_tocs(image: &OciImage) -> Result<(), String> {
    match image.layers.iter().find(|layer| !layer.has_toc) {
        Some(layer) => Err(format!("the layer {} has no table of contents", layer.digest)),
        None => Ok(()),
    }
}
