use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use burgeon_block::{Digest, Error, ObjectStore, Result};
use burgeon_btrfs::{
    Identity, InodeBody, NodeSink, NodeSource, SeedInfo, SeedOptions, Uuids, check, write_seed,
};
use bytes::Bytes;

use rustix::fs::OFlags;

use crate::{AddressMap, Manifest, ManifestLimits, catalog, invalid, open_own};

/// Nodes in a sparse file, at their addresses.
struct NodeFile {
    file: File,
    path: PathBuf,
}

impl NodeSource for NodeFile {
    fn read(&self, physical: u64, nodes: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(nodes, physical);
        read.map_err(|error| Error::io(format!("cannot read {}", self.path.display()), error))
    }
}

impl NodeSink for NodeFile {
    fn write(&self, physical: u64, nodes: &[u8]) -> Result<()> {
        let written = self.file.write_all_at(nodes, physical);
        written.map_err(|error| Error::io(format!("cannot write {}", self.path.display()), error))
    }
}

/// Options of a preparation, which an image's own description lacks.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Bytes of the virtual area; 0 for none.
    pub virtual_bytes: u64,
    /// The checksums of all blocks, of the manifest's kind, for an image whose description has none
    /// ([`Manifest::lacks_checksums`]): the seed gets them. The map stays as it is.
    pub checksums: Option<File>,
}

/// Creates the files a host needs to mount the image `digest`, in the existing `folder`:
///
/// | file | content |
/// |---|---|
/// | `manifest` | the manifest as stored |
/// | `seed` | template of the metadata device: btrfs nodes at their addresses, fsid zero, sparse |
/// | `seed.info` | input of [`SeedInfo::from_bytes`] |
/// | `map` | input of [`AddressMap::open`] |
///
/// The seed gets what is `wanted`. Calls `bounded` with
/// the memory in bytes that preparation may take, before taking it, and `mapped` when `map`
/// exists, before the seed, which takes longest.
///
/// Replaces existing files. Neither durable nor atomic: the caller marks the folder as complete for
/// this boot, or syncs it. Errors: those of [`catalog::load`]; `Invalid` if btrfs cannot hold the
/// tree, or `wanted` does not fit the image; `Corrupt` if the written seed does not read back as
/// valid; I/O errors.
pub fn prepare(
    store: &impl ObjectStore,
    digest: &Digest,
    folder: &Path,
    wanted: Wanted,
    limits: &ManifestLimits,
    bounded: impl FnOnce(u64),
    mapped: impl FnOnce(),
) -> Result<SeedInfo> {
    let (mut manifest, bytes) = load(store, digest, limits, bounded)?;
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes)
            .map_err(|error| Error::io(format!("cannot write {}", path.display()), error))
    };
    write("manifest", &bytes)?;
    drop(bytes);
    write("map", AddressMap::from_manifest(&manifest)?.bytes())?;
    mapped();
    if let Some(checksums) = &wanted.checksums {
        add_checksums(&mut manifest, checksums)?;
    }
    let info = write_template(&manifest, digest, folder.join("seed"), wanted.virtual_bytes)?;
    write("seed.info", &info.to_bytes())?;
    Ok(info)
}

/// Gives the files of an image that lacks checksums those in `file`.
fn add_checksums(manifest: &mut Manifest, file: &File) -> Result<()> {
    let failed = |error| Error::io("cannot read the checksums of the image's blocks", error);
    let len = file.metadata().map_err(failed)?.len();
    if !manifest.lacks_checksums() || len != manifest.block_checksums.len() as u64 {
        return Err(invalid("the checksums of blocks are not those of this image"));
    }
    file.read_exact_at(&mut manifest.block_checksums, 0).map_err(failed)?;
    for inode in &mut manifest.tree.inodes {
        if matches!(inode.body, InodeBody::Extents { .. }) {
            inode.nodatasum = false;
        }
    }
    Ok(())
}

/// Creates only the file `map` in `folder`, durably: it suffices to read the image's data.
pub fn prepare_map(
    store: &impl ObjectStore,
    digest: &Digest,
    folder: &Path,
    limits: &ManifestLimits,
    bounded: impl FnOnce(u64),
) -> Result<()> {
    let (manifest, _) = load(store, digest, limits, bounded)?;
    AddressMap::from_manifest(&manifest)?.write_to(&folder.join("map"))
}

/// The manifest, and its encoded bytes.
fn load(
    store: &impl ObjectStore,
    digest: &Digest,
    limits: &ManifestLimits,
    bounded: impl FnOnce(u64),
) -> Result<(Manifest, Bytes)> {
    let bytes = catalog::load_bytes(store, digest)?;
    let decode = || -> Result<_> {
        bounded(Manifest::memory_bound(&bytes, limits)?);
        Manifest::decode(&bytes, limits)
    };
    let manifest = decode().map_err(|error| {
        Error::with_source(error.kind(), format!("cannot use the manifest {digest}"), error)
    })?;
    Ok((manifest, bytes))
}

fn write_template(
    manifest: &Manifest,
    digest: &Digest,
    path: PathBuf,
    virtual_bytes: u64,
) -> Result<SeedInfo> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    let file = open_own(&path, &mut options, OFlags::empty())
        .map_err(|error| Error::io(format!("cannot create {}", path.display()), error))?;
    let options = SeedOptions {
        checksum: manifest.checksum,
        virtual_bytes,
        ..SeedOptions::new(manifest.data_range().end(), Uuids::derive(digest))
    };
    let nodes = NodeFile { file, path };
    let info = write_seed(&manifest.tree, &manifest.block_checksums, &options, &nodes)?;
    // The kernel trusts these trees with its own memory: read the written file back and follow
    // every pointer before the kernel does.
    check(&info, &Identity::TEMPLATE, &nodes)?;
    Ok(info)
}
