//! Prepared images: the files made from an image, once per host, before it can be mounted.
//!
//! ```text
//!   images/<digest>/   seed        the template: metadata nodes under an fsid of zeros
//!                      seed.info   input for superblocks and patching
//!                      map         address ──► chunk, block checksums
//!                      manifest    the image itself, so that named writes need no store for it
//!                      ready.json  written last: marks the others as complete
//!                      cache       the lazy data that has been read
//!                      checksums   recorded for the cache, if the map has none
//!                      doubted     a server has found the map to be damaged
//!                      virtual-<bytes>/   the same without cache, with a virtual area of that size
//! ```
//!
//! Nothing here is synced, because all of it can be made anew: `ready.json` records the boot and
//! the length of each file. The files are made again after another boot, if a length differs, or if
//! a server cannot use them (`prepare/mend.rs`). The files that named writes are based on are
//! linked into their folder and synced there ([`keep`]).

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use burgeon_block::{ByteRange, Digest, Error, ErrorKind, Result};
use burgeon_btrfs::{DeviceNo, Identity, Patcher, SeedInfo, superblock, superblock_offsets};
use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use crate::{
    host::system,
    id::Fsid,
    state::{
        files,
        paths::StateDir,
        space,
        writes::{self, WritesRecord},
    },
};

/// Changes with the format of these files: other versions' files are made anew.
const READY_FORMAT: u32 = 1;

/// Bytes of nodes copied at a time: fits a CPU's second-level cache.
const COPY_LEN: u64 = 1 << 20;

/// Threads that copy. Copying is bound by memory, not by CPUs.
const COPY_THREADS: u64 = 2;

/// The files that are kept with named writes.
pub(crate) const KEPT: [&str; 4] = ["seed", "seed.info", "map", "manifest"];

/// The mark of files that a server has found to be damaged.
const DOUBTED: &str = "doubted";

/// A folder with a mountable image.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub(crate) folder: PathBuf,
    /// The manifest's digest.
    pub(crate) digest: Digest,
}

#[derive(Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct Ready {
    format: u32,
    version: String,
    boot: String,
    /// The store it was prepared from.
    pub(crate) store: Location,
    /// The lengths of the files; earlier versions recorded none, and their files are made anew.
    #[serde(default)]
    lens: BTreeMap<String, u64>,
}

impl Ready {
    /// The record of the files in `folder` as they are now.
    pub(crate) fn now(store: &Location, folder: &Path) -> Self {
        Self {
            format: READY_FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot: system::boot(),
            store: store.clone(),
            lens: Self::lens(folder),
        }
    }

    /// The same record with the present lengths of the files.
    pub(crate) fn with_files(self, folder: &Path) -> Self {
        Self { lens: Self::lens(folder), ..self }
    }

    fn lens(folder: &Path) -> BTreeMap<String, u64> {
        let len = |file: &str| folder.join(file).symlink_metadata().map(|file| file.len()).ok();
        KEPT.iter().filter_map(|file| Some(((*file).to_owned(), len(file)?))).collect()
    }
}

/// True if the image `digest` of `store` can be mounted without asking its store.
pub fn is_prepared(state: &StateDir, store: &Location, digest: &Digest) -> bool {
    is_ready(&state.image(digest), store)
}

/// Marks the files of `folder` as possibly damaged: the next mount has them checked, and made again
/// if they are. A failure costs that only.
pub(crate) fn doubt(folder: &Path) {
    let made = files::open(&folder.join(DOUBTED), File::options().write(true).create(true));
    if let Err(error) = made {
        tracing::warn!(folder = %folder.display(), %error, "cannot mark the map as damaged");
    }
}

/// True if [`doubt`] has marked `folder`. Removes the mark.
pub(crate) fn take_doubt(folder: &Path) -> bool {
    fs::remove_file(folder.join(DOUBTED)).is_ok()
}

/// True if `folder` holds a whole image, prepared since the machine was started.
pub(crate) fn is_ready(folder: &Path, store: &Location) -> bool {
    let ready = files::read_json::<Ready>(&folder.join("ready.json"));
    let now = Ready::now(store, folder);
    // The store does not matter: the digest is the same.
    now.lens.len() == KEPT.len()
        && read_info(folder).is_ok()
        && ready.is_ok_and(|ready| Ready { store: store.clone(), ..ready } == now)
}

/// True if the files in `folder` have their recorded lengths, as far as recorded. Other damage is
/// found when the files are read.
pub(crate) fn is_complete(folder: &Path, record: &WritesRecord) -> bool {
    has_lengths(folder, record) && len_of(&folder.join("manifest")) > 0 && read_info(folder).is_ok()
}

/// True if template and map in `folder` have their recorded lengths, as far as recorded: worth
/// reading, however long a damaged file has become.
pub(crate) fn has_lengths(folder: &Path, record: &WritesRecord) -> bool {
    let len = |file: &str| len_of(&folder.join(file));
    len("seed") == record.template_len
        && (len("map") == record.map_len || (record.map_len == 0 && len("map") > 0))
}

/// The length of the file `path`; 0 if it is missing or not a regular file.
pub(crate) fn len_of(path: &Path) -> u64 {
    let metadata = path.symlink_metadata().ok();
    metadata.filter(fs::Metadata::is_file).map_or(0, |metadata| metadata.len())
}

/// Keeps the files that a mount is based on in `folder`, durably and independent of the image.
pub(crate) fn keep(base: &Prepared, folder: &Path) -> Result<()> {
    KEPT.iter().try_for_each(|file| keep_file(&base.folder, folder, file))?;
    files::sync_parent(&folder.join(KEPT[0]))
}

/// Keeps one `file`, without making its name durable.
pub(crate) fn keep_file(from: &Path, folder: &Path, file: &str) -> Result<()> {
    let to = folder.join(file);
    writes::keep(&from.join(file), &to)?;
    files::open(&to, File::options().read(true))
        .and_then(|file| file.sync_all())
        .map_err(|e| Error::io(format!("cannot sync {}", to.display()), e))
}

/// BLAKE3 and length of a file.
pub(crate) fn digest_file(path: &Path) -> Result<(Digest, u64)> {
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let mut file = files::open(path, File::options().read(true)).map_err(failed)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; COPY_LEN as usize];
    let mut total = 0;
    loop {
        let len = file.read(&mut buffer).map_err(failed)?;
        if len == 0 {
            return Ok((hasher.finalize().into(), total));
        }
        hasher.update(&buffer[..len]);
        total += len as u64;
    }
}

/// Properties of a mount's copy of the seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seed {
    /// Information from which superblocks and patches were made.
    pub(crate) info: SeedInfo,
    /// Bytes of metadata nodes.
    pub(crate) metadata_bytes: u64,
}

/// Makes `to`, a copy of the seed of `base` under the fsid `fsid`, at memory speed. A corrupted
/// node stays corrupted.
pub(crate) fn personalise(base: &Prepared, fsid: Fsid, to: &Path) -> Result<Seed> {
    let info = read_info(&base.folder)?;
    let identity = Identity { fsid: fsid.0 };
    let template = base.folder.join("seed");
    let from = files::open(&template, File::options().read(true))
        .map_err(|e| Error::io(format!("cannot open {}", template.display()), e))?;
    let failed = |e| Error::io(format!("cannot make {}", to.display()), e);
    // A recycled seed of the same writes is there already: it is overwritten in its own blocks.
    let mut options = File::options();
    let file = files::open(to, options.read(true).write(true).create(true).truncate(false));
    let file = file.map_err(failed)?;
    space::forbid_copy_on_write(&file);
    file.set_len(info.metadata_device_size()).map_err(failed)?;
    let patcher = Patcher::new(&info, &identity);
    for nodes in [info.chunk_nodes(), info.metadata_nodes()] {
        copy_nodes(&patcher, nodes, &from, &file).map_err(|e| {
            Error::with_source(e.kind(), format!("cannot copy {}", template.display()), e)
        })?;
    }
    for (mirror, offset) in superblock_offsets(&info, DeviceNo::Metadata).iter().enumerate() {
        if let Some(block) = superblock(&info, &identity, DeviceNo::Metadata, mirror) {
            file.write_all_at(&block, *offset).map_err(failed)?;
        }
    }
    let metadata_bytes = info.chunk_nodes().len() + info.metadata_nodes().len();
    Ok(Seed { info, metadata_bytes })
}

/// The description of the seed in `folder`.
pub(crate) fn read_info(folder: &Path) -> Result<SeedInfo> {
    SeedInfo::from_bytes(&files::read(&folder.join("seed.info"))?)
}

fn copy_nodes(patcher: &Patcher, nodes: ByteRange, from: &File, to: &File) -> Result<()> {
    let pieces = nodes.len().div_ceil(COPY_LEN);
    let copy = |thread: u64| -> Result<()> {
        let mut buffer = vec![0; COPY_LEN as usize];
        for piece in (thread..pieces).step_by(COPY_THREADS as usize) {
            let start = nodes.start() + piece * COPY_LEN;
            let buffer = &mut buffer[..COPY_LEN.min(nodes.end() - start) as usize];
            let failed = |e| Error::io(format!("bytes from {start} on"), e);
            from.read_exact_at(buffer, start).map_err(failed)?;
            patcher.patch(start, buffer)?;
            to.write_all_at(buffer, start).map_err(failed)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..COPY_THREADS.min(pieces)).map(|thread| scope.spawn(move || copy(thread))).collect();
        let mut result = copy(0);
        for other in others {
            let other = other.join().unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::LocalIo, "a copying thread ended early"))
            });
            result = result.and(other);
        }
        result
    })
}
