//! Where the layers of an ordinary image are, on this host.

use std::{fs::File, os::unix::fs::FileExt, path::PathBuf};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use bytes::Bytes;

use crate::{
    Access, blocking,
    registry::{Name, Registry},
};

/// Longest origin, in bytes.
pub(super) const ORIGIN_MAX: u64 = 8 << 10;

/// A place that has layers, by their digests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LayersAt {
    /// A folder, by the OCI image layout; absolute.
    Layout(PathBuf),
    /// A repository of a registry; which image of it is named does not matter.
    Registry(Name),
}

/// The same, with what it takes to read there.
pub(super) enum Blobs {
    Layout(PathBuf),
    Registry(Registry),
}

impl LayersAt {
    /// As [`Self::to_text`] writes it.
    pub fn parse(text: &str) -> Result<Self> {
        let text = text.trim_end();
        match (text.strip_prefix("oci-layout:"), Name::parse(text)) {
            (Some(folder), _) if folder.starts_with('/') => Ok(Self::Layout(folder.into())),
            (None, Some(name)) => name.map(Self::Registry),
            _ => {
                let what = "where the layers of the image are is damaged in the store: mount it \
                            from where they are, by its name there";
                Err(Error::new(ErrorKind::Corrupt, what))
            }
        }
    }

    /// As a line, or `Invalid` for a folder whose name is not UTF-8.
    pub fn to_text(&self) -> Result<String> {
        let folder = match self {
            Self::Registry(name) => return Ok(format!("{name}\n")),
            Self::Layout(folder) => folder,
        };
        match folder.to_str() {
            Some(folder) if !folder.contains('\n') => Ok(format!("oci-layout:{folder}\n")),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!("{} cannot be written down: rename it", folder.display()),
            )),
        }
    }
}

impl Blobs {
    /// What is there, to be read with what `access` holds. Nothing is asked yet.
    pub(super) fn open(at: LayersAt, access: &Access) -> Result<Self> {
        Ok(match at {
            LayersAt::Layout(folder) => Self::Layout(folder),
            LayersAt::Registry(name) => Self::Registry(Registry::open(&name, access)?),
        })
    }

    /// Bytes of the layer with this SHA-256, as they are stored.
    pub(super) async fn read(&self, digest: &[u8; 32], range: ByteRange) -> Result<Bytes> {
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let folder = match self {
            Self::Registry(registry) => {
                return registry.blob_range(&format!("sha256:{hex}").parse()?, range).await;
            }
            Self::Layout(folder) => folder,
        };
        let path = folder.join("blobs/sha256").join(hex);
        let read = move || {
            let failed = |error| {
                let what = format!("cannot read the layer {}", path.display());
                // Folders come back, as disks and shares do.
                Error::with_source(ErrorKind::Unavailable, what, error)
            };
            let file = File::open(&path).map_err(failed)?;
            let mut bytes = vec![0; range.len() as usize];
            file.read_exact_at(&mut bytes, range.start()).map_err(failed)?;
            Ok(bytes.into())
        };
        blocking(read).await
    }
}
