//! Parses and checks indexes, manifests and configurations.
//!
//! ```text
//!   index ──► manifest of this machine's platform ──► configuration: diff ID of each layer
//!                                                └──► layers: digest, size, compression
//! ```
//!
//! The documents are the types of `oci-spec`, which own every string. Their memory is bounded by
//! the length of a document, which is checked before it is read: 4 MiB of the smallest descriptors
//! take less than 128 MiB (`tests/hostile.rs`, `no_document_takes_much_memory`). Lists of referrers
//! are read entry by entry instead, because a registry may send many pages of them; documents that
//! are changed stay JSON values, which keep the fields of others.

use std::fmt;

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use burgeon_layer::LayerCodec;
use burgeon_source::registry::{ARTIFACT_TYPE, DOCUMENT_MAX, MANIFEST_TYPE, OciDigest};
use oci_spec::image::{Arch, Descriptor, ImageIndex, ImageManifest, MediaType, Os};
use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
    },
};
use serde_json::Value;

/// Most layers of an image: four times as many as container runtimes can mount.
const LAYERS_MAX: usize = 512;

/// Most characters of a document that a message quotes.
const SHOWN_MAX: usize = 200;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Checked values of a descriptor.
pub(crate) trait DescriptorExt {
    /// The digest, if it is one that blobs are checked by.
    fn sha256(&self) -> Result<OciDigest>;
    /// The size, if it is within the limit for documents.
    fn document_size(&self) -> Result<u64>;
    /// The size, if it is at most `max`.
    fn size_below(&self, max: u64) -> Result<u64>;
    /// The tag in the index of a layout.
    fn tag(&self) -> Option<&str>;
}

impl DescriptorExt for Descriptor {
    fn sha256(&self) -> Result<OciDigest> {
        parse_digest(self.digest().as_ref())
    }

    fn document_size(&self) -> Result<u64> {
        self.size_below(DOCUMENT_MAX)
    }

    fn size_below(&self, max: u64) -> Result<u64> {
        let (digest, size) = (self.digest(), self.size());
        if size <= max {
            return Ok(size);
        }
        Err(corrupt(format!(
            "the image states {size} bytes for {digest}, above the limit of {max}"
        )))
    }

    fn tag(&self) -> Option<&str> {
        annotation(self, "org.opencontainers.image.ref.name")
    }
}

fn annotation<'a>(descriptor: &'a Descriptor, name: &str) -> Option<&'a str> {
    descriptor.annotations().as_ref()?.get(name).map(String::as_str)
}

/// An index or a manifest.
pub(crate) enum Document {
    /// Images for several platforms, or with several names.
    Index(ImageIndex),
    /// An image.
    Manifest(Manifest),
    /// A Burgeon image, which the crate `source` reads.
    Ours,
}

/// An image.
pub(crate) struct Manifest {
    pub(crate) media_type: String,
    pub(crate) config: Descriptor,
    /// Lowest layer first.
    pub(crate) layers: Vec<Layer>,
}

/// A layer of an image.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) digest: OciDigest,
    pub(crate) size: u64,
    pub(crate) compression: Compression,
    /// Its TOC.
    pub(crate) toc: Option<TocPlace>,
}

/// The TOC of a layer, as given in the image's manifest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TocPlace {
    /// eStargz: the footer of the layer gives its offset.
    Stargz {
        /// Digest of the TOC.
        digest: OciDigest,
    },
    /// zstd:chunked.
    Chunked {
        /// Digest of the compressed TOC.
        digest: OciDigest,
        /// Range of the compressed TOC in the layer.
        stored: ByteRange,
        /// Decompressed length in bytes.
        len: u64,
    },
}

/// Compression of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// The same as a `LayerCodec`.
    pub(crate) fn codec(self) -> LayerCodec {
        match self {
            Self::None => LayerCodec::Plain,
            Self::Gzip => LayerCodec::Gzip,
            Self::Zstd => LayerCodec::Zstd,
        }
    }
}

impl Document {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        // The kind of document decides which type it is parsed as.
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Fields {
            schema_version: u32,
            artifact_type: Option<String>,
            manifests: Option<IgnoredAny>,
            config: Option<IgnoredAny>,
            layers: Option<IgnoredAny>,
        }
        let fields: Fields = json(bytes, "index or manifest")?;
        if fields.schema_version != 2 {
            return Err(unsupported(format!(
                "the image's index or manifest has version {}: only version 2 is known",
                fields.schema_version
            )));
        }
        if fields.artifact_type.as_deref() == Some(ARTIFACT_TYPE) {
            return Ok(Self::Ours);
        }
        match (fields.manifests, fields.config, fields.layers) {
            (Some(_), None, None) => Ok(Self::Index(json(bytes, "index")?)),
            (None, Some(_), Some(_)) => Manifest::of(&json(bytes, "manifest")?).map(Self::Manifest),
            _ => Err(corrupt("the document is neither an OCI index nor an image manifest")),
        }
    }
}

impl Manifest {
    fn of(manifest: &ImageManifest) -> Result<Self> {
        let (config, kind) = (manifest.config(), manifest.artifact_type());
        let of_image = [
            "application/vnd.oci.image.config.v1+json",
            "application/vnd.docker.container.image.v1+json",
        ];
        if kind.is_some() || !of_image.contains(&config.media_type().as_ref()) {
            let kind = kind.as_ref().unwrap_or(config.media_type()).as_ref();
            return Err(unsupported(format!(
                "this is not a container image, but an artifact of type {kind:?}"
            )));
        }
        let layers = manifest.layers();
        if layers.len() > LAYERS_MAX {
            let what = format!("the image has {} layers: at most {LAYERS_MAX}", layers.len());
            return Err(corrupt(what));
        }
        let media_type = manifest.media_type().as_ref().map_or(MANIFEST_TYPE, MediaType::as_ref);
        Ok(Self {
            media_type: media_type.to_owned(),
            config: config.clone(),
            layers: layers.iter().map(Layer::of).collect::<Result<_>>()?,
        })
    }
}

/// The location and digest of the layer's TOC, if the annotations give them.
fn toc(descriptor: &Descriptor, compression: Compression) -> Option<TocPlace> {
    match compression {
        Compression::None => None,
        Compression::Gzip => {
            let digest = annotation(descriptor, "containerd.io/snapshot/stargz/toc.digest")?;
            Some(TocPlace::Stargz { digest: digest.parse().ok()? })
        }
        Compression::Zstd => {
            // Newer programs write the longer prefix.
            let value = |name: &str| {
                let names = ["io.github.containers", "io.containers"];
                let mut names = names.map(|by| format!("{by}.zstd-chunked.{name}")).into_iter();
                names.find_map(|name| annotation(descriptor, &name))
            };
            let digest = value("manifest-checksum")?.parse().ok()?;
            let at = value("manifest-position")?.split(':').map(|part| part.parse().ok());
            // Offset, length, decompressed length, and type of the TOC.
            let [offset, stored, len, 1] = at.collect::<Option<Vec<u64>>>()?[..] else {
                return None;
            };
            Some(TocPlace::Chunked { digest, stored: ByteRange::at(offset, stored)?, len })
        }
    }
}

impl Layer {
    fn of(descriptor: &Descriptor) -> Result<Self> {
        let digest = descriptor.sha256()?;
        let kind = descriptor.media_type().as_ref();
        let compression = match kind {
            "application/vnd.oci.image.layer.v1.tar"
            | "application/vnd.docker.image.rootfs.diff.tar" => Compression::None,
            "application/vnd.oci.image.layer.v1.tar+gzip"
            | "application/vnd.docker.image.rootfs.diff.tar.gzip" => Compression::Gzip,
            "application/vnd.oci.image.layer.v1.tar+zstd"
            | "application/vnd.docker.image.rootfs.diff.tar.zstd" => Compression::Zstd,
            _ => {
                let why = if kind.ends_with("+encrypted") {
                    "is encrypted: copy the image with skopeo --decryption-key, and use the copy"
                } else if kind.contains("nondistributable") || kind.contains("foreign") {
                    "is a foreign layer, which registries do not store: ask the publisher for an \
                     image without foreign layers"
                } else {
                    "has an unknown media type"
                };
                let kind: String = kind.chars().take(120).collect();
                return Err(unsupported(format!("the layer {digest} {why} ({kind:?})")));
            }
        };
        let toc = toc(descriptor, compression);
        Ok(Self { digest, size: descriptor.size(), compression, toc })
    }
}

/// Parses the manifest of a referrer that is an index.
pub(crate) fn index_artifact(bytes: &[u8]) -> Result<ImageManifest> {
    json(bytes, "index")
}

/// The tag of the list of referrers, for registries without the referrers API.
pub(crate) fn referrers_tag(image: &OciDigest) -> String {
    format!("sha256-{}", image.hex())
}

/// True if `tag` is that of a list of referrers.
pub(crate) fn is_referrers_tag(tag: &str) -> bool {
    let digest = tag.strip_prefix("sha256-").map(|digits| format!("sha256:{digits}"));
    digest.is_some_and(|digest| digest.parse::<OciDigest>().is_ok())
}

/// The entries of a list of referrers, of any type.
pub(crate) fn referrer_entries(bytes: &[u8]) -> Result<Vec<Value>> {
    #[derive(Deserialize)]
    struct Any {
        manifests: Vec<Value>,
    }
    let any: Any = json(bytes, "list of referrers")?;
    Ok(any.manifests)
}

/// The digests of at most `max` referrers of type `kind` in a list. Entries are parsed one by one:
/// a whole parsed list takes many times its length in memory.
pub(crate) fn referrer_digests(bytes: &[u8], kind: &str, max: usize) -> Result<Vec<OciDigest>> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    json.deserialize_map(ListReader { kind, max }).map_err(|error| {
        let what = "the image's list of referrers is invalid";
        Error::with_source(ErrorKind::Corrupt, what, error)
    })
}

#[derive(Clone, Copy)]
struct ListReader<'a> {
    kind: &'a str,
    max: usize,
}

impl<'de> Visitor<'de> for ListReader<'_> {
    type Value = Vec<OciDigest>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of manifests")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "manifests" => found = Some(map.next_value_seed(self)?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        found.ok_or_else(|| A::Error::missing_field("manifests"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut found = Vec::new();
        while let Some(entry) = entries.next_element::<Value>()? {
            let digest = Some(&entry).filter(|entry| entry["artifactType"] == self.kind);
            let digest = digest.and_then(|entry| entry["digest"].as_str()?.parse().ok());
            found.extend(digest.filter(|_| found.len() < self.max));
        }
        Ok(found)
    }
}

impl<'de> DeserializeSeed<'de> for ListReader<'_> {
    type Value = Vec<OciDigest>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_seq(self)
    }
}

/// The diff ID (digest of the unpacked bytes) of each layer, if the configuration gives them. It
/// need not be a whole configuration of the specification, whose other fields are of no use here.
pub(crate) fn diff_ids(config: &[u8], layers: usize) -> Result<Vec<Option<OciDigest>>> {
    #[derive(Deserialize)]
    struct Config {
        rootfs: Option<RootFs>,
    }
    #[derive(Deserialize)]
    struct RootFs {
        diff_ids: Vec<String>,
    }
    let config: Config = json(config, "configuration")?;
    let Some(rootfs) = config.rootfs else { return Ok(vec![None; layers]) };
    if rootfs.diff_ids.len() != layers {
        let what = format!(
            "the image has {layers} layers, but its configuration lists {}",
            rootfs.diff_ids.len()
        );
        return Err(corrupt(what));
    }
    rootfs.diff_ids.iter().map(|id| parse_digest(id).map(Some)).collect()
}

/// The image for this machine in an index.
pub(crate) fn for_this_machine(index: &ImageIndex) -> Result<&Descriptor> {
    choose(index.manifests(), architecture())
}

/// This machine's architecture by its OCI name.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn choose<'a>(manifests: &'a [Descriptor], architecture: &str) -> Result<&'a Descriptor> {
    let architecture = Arch::from(architecture);
    let suits = |descriptor: &&Descriptor| {
        descriptor.platform().as_ref().is_some_and(|platform| {
            // Higher variants need features that not every machine of the architecture has.
            let plain = matches!(platform.variant().as_deref(), None | Some("" | "v1" | "v8"));
            *platform.os() == Os::Linux && *platform.architecture() == architecture && plain
        })
    };
    // An index of one image may omit the platform.
    let only = || manifests.first().filter(|one| manifests.len() == 1 && one.platform().is_none());
    manifests.iter().find(suits).or_else(only).ok_or_else(|| {
        let there = manifests.iter().filter_map(|descriptor| descriptor.platform().as_ref());
        let there: Vec<_> = there
            .take(20)
            .map(|platform| shown(&format!("{}/{}", platform.os(), platform.architecture())))
            .collect();
        let what = format!(
            "the OCI index has no image for linux/{architecture}, only for {}",
            there.join(", ")
        );
        Error::new(ErrorKind::NotFound, what)
    })
}

/// A digest that a document states.
fn parse_digest(text: &str) -> Result<OciDigest> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(100).collect();
        match text.starts_with("sha512:") {
            true => unsupported(format!(
                "the image has the digest {shown:?}, and only those of SHA-256 are supported: copy the \
                 image with digests of SHA-256"
            )),
            false => corrupt(format!(
                "the image has {shown:?} for a digest, which is sha256: and 64 hexadecimal digits"
            )),
        }
    })
}

fn json<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T> {
    // The error of a type can quote the document.
    serde_json::from_slice(bytes).map_err(|error| {
        corrupt(format!("the image's {what} is invalid: {}", shown(&error.to_string())))
    })
}

/// Text of a document, for a message: its beginning, without control characters.
fn shown(text: &str) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().take(SHOWN_MAX).map(escaped).collect()
}

fn corrupt(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

fn unsupported(what: String) -> Error {
    Error::new(ErrorKind::UnsupportedFormat, what)
}

#[cfg(test)]
mod tests {
    use burgeon_block::ErrorKind;
    use serde_json::{Value, json};

    use super::{Compression, Descriptor, Document, OciDigest, choose, diff_ids};

    fn descriptor(kind: &str) -> Value {
        json!({ "mediaType": kind, "digest": OciDigest::of(b"x").to_string(), "size": 1 })
    }

    fn manifest(config: &str, layers: Vec<Value>) -> Value {
        json!({ "schemaVersion": 2, "config": descriptor(config), "layers": layers })
    }

    const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

    fn refused(document: &Value) -> (ErrorKind, String) {
        match Document::parse(document.to_string().as_bytes()) {
            Ok(_) => panic!("taken: {document}"),
            Err(error) => (error.kind(), error.to_string()),
        }
    }

    #[test]
    fn known_layer_types_are_accepted_and_others_named() {
        let layers =
            ["", "+gzip", "+zstd"].map(|end| descriptor(&format!("{LAYER}{end}"))).to_vec();
        let bytes = manifest(CONFIG, layers).to_string();
        let Document::Manifest(parsed) = Document::parse(bytes.as_bytes()).unwrap() else {
            panic!()
        };
        let kinds: Vec<_> = parsed.layers.iter().map(|layer| layer.compression).collect();
        assert_eq!(kinds, [Compression::None, Compression::Gzip, Compression::Zstd]);
        for (kind, said) in [
            ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "--decryption-key"),
            ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", "foreign"),
            ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "foreign"),
            ("application/x-squashfs", "unknown media type"),
        ] {
            let (error, text) = refused(&manifest(CONFIG, vec![descriptor(kind)]));
            assert!(error == ErrorKind::UnsupportedFormat && text.contains(said), "{text}");
        }
    }

    #[test]
    fn other_documents_are_refused() {
        let many = vec![descriptor(LAYER); 513];
        let mut both = manifest(CONFIG, vec![]);
        both["manifests"] = json!([]);
        let mut old = manifest(CONFIG, vec![]);
        old["schemaVersion"] = json!(1);
        let mut digest = manifest(CONFIG, vec![descriptor(LAYER)]);
        digest["layers"][0]["digest"] = json!("sha256:../../etc/passwd");
        let mut other_digest = manifest(CONFIG, vec![descriptor(LAYER)]);
        other_digest["layers"][0]["digest"] = json!("md5:0123");
        for (document, said) in [
            (manifest("application/vnd.cncf.helm.config.v1+json", vec![]), "helm"),
            (manifest(CONFIG, many), "513 layers"),
            (both, "neither"),
            (old, "version 1"),
            (digest, "is invalid"),
            (other_digest, "hexadecimal digits"),
            (json!({ "schemaVersion": 2 }), "neither"),
            (json!([]), "is invalid"),
        ] {
            let (_, text) = refused(&document);
            assert!(text.contains(said), "{text}");
        }
    }

    #[test]
    fn a_message_quotes_little_of_a_document_and_no_control_characters() {
        let mut document = manifest(CONFIG, vec![descriptor(LAYER)]);
        document["layers"][0]["digest"] = json!(format!("sha256:\u{1b}[2J{}", "x".repeat(10_000)));
        let (_, text) = refused(&document);
        assert!(text.len() < 300 && !text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn the_image_for_this_machine_is_chosen() {
        let entry = |architecture: &str, os: &str, variant: Option<&str>| {
            let mut entry = descriptor("");
            entry["platform"] =
                json!({ "architecture": architecture, "os": os, "variant": variant });
            serde_json::from_value::<Descriptor>(entry).unwrap()
        };
        let all = [
            entry("unknown", "unknown", None),
            entry("amd64", "windows", None),
            entry("amd64", "linux", Some("v3")),
            entry("amd64", "linux", None),
            entry("arm64", "linux", Some("v8")),
        ];
        assert!(std::ptr::eq(choose(&all, "amd64").unwrap(), &all[3]));
        assert!(std::ptr::eq(choose(&all, "arm64").unwrap(), &all[4]));
        let error = choose(&all, "riscv64").unwrap_err();
        assert!(error.to_string().contains("linux/riscv64, only for"), "{error}");
        let plain: Descriptor = serde_json::from_value(descriptor("")).unwrap();
        assert!(choose(std::slice::from_ref(&plain), "amd64").is_ok());
        assert!(choose(&[plain.clone(), plain], "amd64").is_err());
    }

    #[test]
    fn layers_and_configuration_agree() {
        let id = OciDigest::of(b"y").to_string();
        let config = json!({ "rootfs": { "type": "layers", "diff_ids": [id] } }).to_string();
        assert_eq!(diff_ids(config.as_bytes(), 1).unwrap(), [Some(OciDigest::of(b"y"))]);
        assert!(diff_ids(config.as_bytes(), 2).is_err());
        assert_eq!(diff_ids(b"{}", 2).unwrap(), [None, None]);
    }
}
