//! The documents of OCI images that this host keeps: indexes, manifests and configurations.
//!
//! ```text
//!   <state directory>/documents/<hex of SHA-256>     one document
//!   digest of an image or index ─► manifest of this machine's platform ─► configuration
//! ```
//!
//! A store holds images without their settings, and one tree may belong to several OCI images. So
//! the documents lie beside the records of tags, by their own digests, and an image is found from
//! the digest that its reference resolved to.
//!
//! Invariants: a document that does not match its name is ignored, as if it were missing; its loss
//! costs a request, and no trust. All documents of an image have at most `KEPT_MAX` bytes.

use std::{
    collections::HashSet,
    fs,
    io::{self, Read, Write},
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_image::open_own;
use burgeon_source::registry::OciDigest;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    chain::chain_ids,
    document::{DescriptorExt, Document, Manifest, diff_ids, for_this_machine},
    settings::ImageSettings,
};

/// Most bytes of the documents of one image. A process hands them over in one message of 4 MiB,
/// in which quotes and line breaks take two bytes.
const KEPT_MAX: usize = 3 << 19;
/// Largest nesting depth of indexes, as for resolving them.
const INDEXES_MAX: usize = 4;

/// The folder of kept documents.
#[derive(Clone, Debug)]
pub struct Documents {
    folder: PathBuf,
}

/// The facts about an OCI image that its documents state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OciImage {
    /// Digest of its manifest.
    pub digest: String,
    /// Digest of its configuration.
    pub config_digest: String,
    /// Lowest layer first.
    pub layers: Vec<OciLayer>,
    /// The configuration as the image has it.
    pub config: Value,
}

/// A layer of an OCI image.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OciLayer {
    /// Digest of the compressed layer.
    pub digest: String,
    /// Compressed size in bytes.
    pub size: u64,
    /// True if the manifest gives a table of contents for it, so that it can be read lazily.
    pub has_toc: bool,
    /// Digest of the unpacked layer, as the configuration states it.
    pub diff_id: Option<String>,
    /// Chain ID of the layers up to this one.
    pub chain_id: Option<String>,
}

impl OciImage {
    /// The facts in a manifest with the digest `digest`, and in its configuration.
    pub(crate) fn of(digest: &OciDigest, manifest: &Manifest, config: &[u8]) -> Result<Self> {
        let ids = diff_ids(config, manifest.layers.len())?;
        let chains = chain_ids(&ids);
        let text = |id: Option<OciDigest>| id.map(|id| id.to_string());
        let layers = manifest.layers.iter().zip(ids.into_iter().zip(chains));
        let layers = layers.map(|(layer, (diff_id, chain_id))| OciLayer {
            digest: layer.digest.to_string(),
            size: layer.size,
            has_toc: layer.toc.is_some(),
            diff_id: text(diff_id),
            chain_id: text(chain_id),
        });
        Ok(Self {
            digest: digest.to_string(),
            config_digest: manifest.config.sha256()?.to_string(),
            layers: layers.collect(),
            config: serde_json::from_slice(config).map_err(|error| {
                let what = "the image's configuration is invalid";
                Error::with_source(ErrorKind::Corrupt, what, error)
            })?,
        })
    }

    /// The settings for its programs.
    pub fn settings(&self) -> Result<ImageSettings> {
        ImageSettings::of(&self.config)
    }
}

/// The documents of an image as text, for the process that keeps them. `None` if they are too
/// large, or no text.
pub(crate) fn to_keep(documents: &[&[u8]]) -> Option<Vec<String>> {
    let bytes: usize = documents.iter().map(|document| document.len()).sum();
    let texts = documents.iter().map(|document| String::from_utf8(document.to_vec()).ok());
    texts.collect::<Option<_>>().filter(|_| bytes <= KEPT_MAX)
}

impl Documents {
    /// The documents in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Keeps documents, each by its digest.
    pub fn keep(&self, documents: &[String]) -> Result<()> {
        let failed = |error| {
            Error::io(format!("cannot keep a document in {}", self.folder.display()), error)
        };
        for document in documents {
            let digest = OciDigest::of(document.as_bytes());
            if self.read(&digest).is_some() {
                continue;
            }
            match fs::DirBuilder::new().mode(0o700).create(&self.folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed(error));
                }
                _ => {}
            }
            let mut file = tempfile::NamedTempFile::new_in(&self.folder).map_err(failed)?;
            file.write_all(document.as_bytes()).map_err(failed)?;
            let path = self.folder.join(digest.hex());
            file.persist(path).map_err(|error| failed(error.error))?;
        }
        Ok(())
    }

    fn read(&self, digest: &OciDigest) -> Option<Vec<u8>> {
        let mut options = fs::OpenOptions::new();
        let path = self.folder.join(digest.hex());
        let file = open_own(&path, options.read(true), OFlags::NONBLOCK).ok()?;
        let mut bytes = Vec::new();
        file.take(KEPT_MAX as u64 + 1).read_to_end(&mut bytes).ok()?;
        (OciDigest::of(&bytes) == *digest).then_some(bytes)
    }

    /// The OCI image that the digest of an image or index means on this machine, if its documents
    /// are kept.
    pub fn image(&self, digest: &OciDigest) -> Option<OciImage> {
        self.chain(digest).1
    }

    /// The documents from `digest` to the configuration, as far as they are kept, and the image.
    fn chain(&self, digest: &OciDigest) -> (Vec<OciDigest>, Option<OciImage>) {
        let mut seen = vec![digest.clone()];
        let mut find = || {
            let mut digest = digest.clone();
            for _ in 0..INDEXES_MAX {
                match Document::parse(&self.read(&digest)?).ok()? {
                    Document::Index(index) => {
                        digest = for_this_machine(&index).ok()?.sha256().ok()?
                    }
                    Document::Manifest(manifest) => {
                        let config = manifest.config.sha256().ok()?;
                        seen.push(config.clone());
                        return OciImage::of(&digest, &manifest, &self.read(&config)?).ok();
                    }
                    Document::Ours => return None,
                }
                seen.push(digest.clone());
            }
            None
        };
        let image = find();
        (seen, image)
    }

    /// Removes the documents that no image or index in `needed` refers to.
    pub fn prune<'a>(&self, needed: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let failed = |error| Error::io(format!("cannot list {}", self.folder.display()), error);
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed)?,
        };
        let needed = needed.into_iter().filter_map(|digest| digest.parse().ok());
        let needed: HashSet<String> = needed
            .flat_map(|digest| self.chain(&digest).0)
            .map(|digest| digest.hex().to_owned())
            .collect();
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str());
            if name.is_some_and(|name| needed.contains(name)) {
                continue;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::io(format!("cannot remove {}", path.display()), error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burgeon_source::registry::OciDigest;
    use serde_json::{Value, json};

    use super::{Documents, KEPT_MAX, to_keep};
    use crate::document::architecture;

    fn descriptor(kind: &str, of: &str) -> Value {
        let kind = format!("application/vnd.oci.image.{kind}");
        json!({ "mediaType": kind, "digest": OciDigest::of(of.as_bytes()).to_string(), "size": of.len() })
    }

    #[test]
    fn an_image_is_found_from_its_index_and_ignored_if_any_document_is_damaged() {
        let temp = tempfile::tempdir().unwrap();
        let documents = Documents::new(temp.path().join("documents"));
        let ids = [OciDigest::of(b"1"), OciDigest::of(b"2")].map(|id| id.to_string());
        let config = json!({ "config": { "Cmd": ["sh"] }, "rootfs": { "diff_ids": ids } });
        let config = config.to_string();
        let layers = ["a", "b"].map(|layer| descriptor("layer.v1.tar", layer));
        let manifest = json!({
            "schemaVersion": 2, "config": descriptor("config.v1+json", &config), "layers": layers,
        });
        let manifest = manifest.to_string();
        let mut entry = descriptor("manifest.v1+json", &manifest);
        entry["platform"] = json!({ "os": "linux", "architecture": architecture() });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] }).to_string();
        let of_index = OciDigest::of(index.as_bytes());
        assert!(documents.image(&of_index).is_none(), "nothing is kept yet");
        documents.keep(&[index.clone(), manifest.clone(), config.clone()]).unwrap();
        let image = documents.image(&of_index).unwrap();
        assert_eq!(image.digest, OciDigest::of(manifest.as_bytes()).to_string());
        assert_eq!(image.config["config"]["Cmd"][0], "sh");
        let of_layers: Vec<_> = image.layers.iter().map(|it| it.diff_id.clone().unwrap()).collect();
        assert_eq!(of_layers, ids);
        // An image in use keeps all that it needs, whichever of its digests is known.
        documents.keep(&["{}".to_owned()]).unwrap();
        let count = || std::fs::read_dir(&documents.folder).unwrap().count();
        assert_eq!(count(), 4);
        documents.prune([&*of_index.to_string(), "sha256:no", "url:x"]).unwrap();
        assert!(documents.image(&of_index).is_some() && count() == 3);
        documents.prune([&*image.digest]).unwrap();
        assert!(documents.image(&of_index).is_none() && count() == 2);
        assert!(documents.image(&image.digest.parse().unwrap()).is_some());
        let path = documents.folder.join(OciDigest::of(config.as_bytes()).hex());
        std::fs::write(&path, config.replace("sh", "rm")).unwrap();
        assert!(documents.image(&image.digest.parse().unwrap()).is_none(), "it was changed");
        // The next image with that configuration repairs it.
        documents.keep(&[config]).unwrap();
        assert!(documents.image(&image.digest.parse().unwrap()).is_some());
        documents.prune([]).unwrap();
        assert_eq!(count(), 0);
    }

    #[test]
    fn documents_that_are_too_large_or_no_text_are_not_kept() {
        assert_eq!(to_keep(&[b"{}", b"[]"]).unwrap(), ["{}", "[]"]);
        assert!(to_keep(&[b"\"\xff\""]).is_none());
        let half = vec![b' '; KEPT_MAX / 2];
        assert!(to_keep(&[&half, &half]).is_some() && to_keep(&[&half, &half, b" "]).is_none());
    }
}
