//! Building images.
//!
//! ```text
//!   from_directory: scan ──► DirectoryInput ┐     first the reads of the profile, then the rest
//!   from_tar, from_layers: ─► TarInput       ├──► Assembler ──► packs ──► manifest ──► name
//!   by_reference, computed: chunk table only    ┘
//! ```
//!
//! Invariants: nothing is visible before everything it needs is durable (packs, then manifest,
//! then name); a killed build leaves only files that the collector removes; the same tree,
//! options, store and provenance give the same manifest with any number of threads.

mod assemble;
mod compress;
mod grouping;
mod in_place;
mod meter;
mod nodes;
mod outside;
mod read;
mod reuse;
mod scan;
mod tar;
mod xattrs;

use std::{
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{ChecksumKind, Error, ErrorKind, ObjectStore, Result};
use burgeon_btrfs::{InodeBody, LINK_MAX, Tree, check_tree};
use rustix::fs::StatVfsMountFlags;
use serde::{Deserialize, Serialize};

pub use self::xattrs::{Xattrs, of_link as xattrs_of};
pub use self::{
    assemble::Origin,
    grouping::Grouping,
    outside::{Pattern, by_reference, computed},
    tar::{
        Description, FilePart, Gunzip, Layer, LayerHeaders, LayerLimits, Layers, Listed,
        OnDescribed, OpenLayer, Sha256, describe_layers, first_difference, from_layers, from_tar,
    },
};
use self::{
    assemble::{Assembled, Assembler},
    meter::Meter,
    nodes::Node,
    read::DirectoryInput,
    reuse::Known,
    scan::Scan,
};
use crate::{
    catalog::{self, Added, ImageRecord, Provenance, discard},
    invalid,
    manifest::Manifest,
    pack::write_packs,
    paths::path_of,
    profile::{Profile, profile_object},
};

/// Options of a build.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// zstd level, 1 to 22.
    pub level: i32,
    /// Kind of block checksum, also that of the mounted btrfs.
    pub checksum: ChecksumKind,
    /// Lengths of the chunks of small files.
    pub grouping: Grouping,
    /// Descend into file systems mounted below the directory.
    pub cross_mounts: bool,
    /// Reuse chunks that the store already holds, if `provenance` says that this host has stored
    /// or verified them.
    pub reuse: bool,
    /// This host's records about images; a build adds its own. Without them nothing is reused.
    pub provenance: Option<Provenance>,
    /// Reads to be stored together, first and in this order: the profile of an image of this or a
    /// similar tree. Only directories can be stored in an order other than their own.
    pub profile: Option<Profile>,
    /// Threads for reading, digesting and compressing; `None` means one per processor and two
    /// more that wait for disks.
    pub threads: Option<usize>,
}

/// Default zstd level.
pub const LEVEL_DEFAULT: i32 = 3;

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            level: LEVEL_DEFAULT,
            checksum: ChecksumKind::Crc32c,
            grouping: Grouping::default(),
            cross_mounts: false,
            reuse: true,
            provenance: None,
            profile: None,
            threads: None,
        }
    }
}

/// Progress of a build.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Files done, of any type.
    pub entries: u64,
    /// Total number of files, once known.
    pub entries_total: Option<u64>,
    /// Bytes of files read and compressed, holes included; for an archive, bytes of the archive
    /// read.
    pub bytes: u64,
    /// Total number of bytes, once known.
    pub bytes_total: Option<u64>,
    /// Bytes stored in packs, compressed.
    pub stored_bytes: u64,
}

/// Receives progress, at most ten times a second and at the end, from any thread.
pub type OnProgress<'a> = &'a (dyn Fn(&Progress) + Sync);

/// The result of a build.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BuildReport {
    /// The image, as the store names it now.
    pub image: ImageRecord,
    /// Bytes of chunks stored by this build, compressed.
    pub new_bytes: u64,
    /// Bytes of chunks that earlier images had stored, compressed.
    pub reused_bytes: u64,
    /// Files that changed while they were read, and directories whose entries changed: the image
    /// may hold a mixture of both states.
    pub changed: Vec<PathBuf>,
    /// Mount points below the directory; their contents were left out.
    pub mounts_left_out: Vec<PathBuf>,
    /// Files of an archive whose textual ACL was left out, because it names users or groups
    /// without a number on this host or is of another kind.
    pub acls_left_out: u64,
    /// Rights that this host grants to the files at the place they were read from; `None` for an
    /// archive or layers, which state owners and rights themselves.
    pub honours: Option<Honours>,
}

impl BuildReport {
    fn of(image: ImageRecord) -> Self {
        let (new_bytes, reused_bytes, acls_left_out) = (0, 0, 0);
        let (changed, mounts_left_out) = (Vec::new(), Vec::new());
        let honours = None;
        Self { image, new_bytes, reused_bytes, changed, mounts_left_out, acls_left_out, honours }
    }
}

/// Rights that the mount of the source tree allows. A user who mounts a file system of their own
/// (over FUSE, or from a removable disk) controls its owners and modes; such mounts are therefore
/// `nosuid,nodev`, and an image of their contents gets the same restriction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Honours {
    /// Programs run with the rights that their files grant: set-user-ID, set-group-ID,
    /// capabilities.
    pub suid: bool,
    /// Device nodes can be opened.
    pub dev: bool,
}

impl Honours {
    /// For a tree that consists only of files made by this host.
    pub(crate) const ALL: Self = Self { suid: true, dev: true };

    /// The rights of the mount that contains `file`.
    pub fn of(file: impl AsFd) -> Result<Self> {
        let stat = rustix::fs::fstatvfs(file).map_err(|errno| {
            Error::io("cannot ask for the attributes of the mount that is read", errno.into())
        })?;
        Ok(Self {
            suid: !stat.f_flag.contains(StatVfsMountFlags::NOSUID),
            dev: !stat.f_flag.contains(StatVfsMountFlags::NODEV),
        })
    }
}

/// Builds an image of the directory `path` and publishes it in `store` as `name`, replacing the
/// image of that name.
///
/// Errors: `Invalid` for a bad name, for a path that is not a directory, and for a tree that
/// btrfs cannot hold; a list of the files that this process may not read; errors of the store.
pub fn from_directory(
    store: &impl ObjectStore,
    name: &str,
    path: &Path,
    options: &BuildOptions,
    progress: OnProgress<'_>,
) -> Result<BuildReport> {
    check_options(name, options)?;
    if !path
        .metadata()
        .map_err(|error| Error::io(format!("cannot read {}", path.display()), error))?
        .is_dir()
    {
        return Err(invalid(format!("{} is not a directory", path.display())));
    }
    pool(options)?.install(|| {
        writing(store, |scratch, added| {
            let scan = Scan::read(path, options.cross_mounts)?;
            let known = Known::read(store, options)?;
            let (bytes, entries) = (AtomicU64::new(0), AtomicU64::new(0));
            let data_files = scan.files.len() as u64;
            let others = scan.nodes.len() as u64 - data_files;
            let report = |pending, stored_bytes| {
                progress(&Progress {
                    entries: others + entries.load(Relaxed),
                    entries_total: Some(others + data_files),
                    bytes: bytes.load(Relaxed).saturating_sub(pending),
                    bytes_total: Some(scan.bytes),
                    stored_bytes,
                });
            };
            let meter = Meter::new(&report);
            let first =
                options.profile.as_ref().map(|profile| scan.find(profile)).unwrap_or_default();
            let mut input = DirectoryInput::new(&scan, &first, &bytes, &entries);
            let BuildOptions { level, checksum, grouping, .. } = *options;
            let (known, meter) = (&known, &meter);
            let assembler = Assembler { level, checksum, grouping, known, meter, derived: false };
            let assembled =
                write_packs(store, scratch, added, |packs| assembler.run(&mut input, packs))?;
            let mut changed = input.changed;
            changed.sort();
            changed.dedup();
            let (new_bytes, reused_bytes) = (assembled.new_bytes, assembled.known_bytes);
            let manifest = manifest_of(&scan.nodes, assembled)?;
            let image = publish(store, name, &manifest, options)?;
            if let Some(profile) = &options.profile {
                let profile = profile.translate(&manifest, image.digest()?);
                store.publish(&profile_object(&profile.image)?, &profile.encode()?)?;
            }
            let (mounts_left_out, honours) = (scan.mounts, scan.honours);
            let report = BuildReport { new_bytes, reused_bytes, ..BuildReport::of(image) };
            Ok(BuildReport { changed, mounts_left_out, honours, ..report })
        })
    })
}

fn check_options(name: &str, options: &BuildOptions) -> Result<()> {
    catalog::check_name(name)?;
    if !(1..=22).contains(&options.level) {
        return Err(invalid(format!("zstd has levels 1 to 22, not {}", options.level)));
    }
    Ok(())
}

/// The thread pool of one build.
fn pool(options: &BuildOptions) -> Result<rayon::ThreadPool> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    pool_of(options.threads.unwrap_or(cores + 2))
}

fn pool_of(threads: usize) -> Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map_err(|error| {
        let what = format!("cannot start {threads} threads: does `ulimit -u` allow them?");
        Error::with_source(ErrorKind::Unavailable, what, error)
    })
}

fn manifest_of(nodes: &[Node], assembled: Assembled) -> Result<Manifest> {
    let Assembled { placed, mut manifest, .. } = assembled;
    manifest.tree = nodes::finish(nodes, placed, &manifest.chunk_addresses())?;
    check_fits(&manifest)?;
    if manifest.lacks_checksums() {
        // Map, cache and seed have checksums for all data or for none.
        manifest.block_checksums.fill(0);
        for inode in &mut manifest.tree.inodes {
            inode.nodatasum = matches!(inode.body, InodeBody::Extents { .. });
        }
    }
    Ok(manifest)
}

/// Refuses a tree that no mount could show, before the image has a name.
fn check_fits(manifest: &Manifest) -> Result<()> {
    check_links(&manifest.tree)?;
    check_tree(&manifest.tree).map_err(|error| {
        let what = "btrfs cannot hold this tree, so it could not be mounted (where names have one \
                    hash, CRC-32C, rename some of them)";
        Error::with_source(ErrorKind::Invalid, what, error)
    })
}

/// Refuses a file with more names than btrfs can count, and says which.
fn check_links(tree: &Tree) -> Result<()> {
    let mut names = vec![0u32; tree.inodes.len()];
    tree.dirents.iter().for_each(|dirent| names[dirent.inode as usize] += 1);
    let Some(inode) = names.iter().position(|names| *names > LINK_MAX) else { return Ok(()) };
    let what = format!(
        "{} has {} names (hard links), and btrfs can hold {LINK_MAX} of a file: make some of them \
         copies, or symlinks",
        path_of(tree, inode as u32),
        names[inode]
    );
    Err(Error::new(ErrorKind::UnsupportedFormat, what))
}

/// Builds as a writer of `store`, with a scratch folder. If the build fails, the packs it added
/// are removed, or the error says that they remain.
fn writing<T>(
    store: &impl ObjectStore,
    build: impl FnOnce(&Path, &Added) -> Result<T>,
) -> Result<T> {
    let lease = store.begin_write()?;
    let added = Added::default();
    let built = build(lease.scratch(), &added);
    drop(lease);
    built.map_err(|error| discard(store, added, error))
}

/// Publishes the manifest, then the name.
fn publish(
    store: &impl ObjectStore,
    name: &str,
    manifest: &Manifest,
    options: &BuildOptions,
) -> Result<ImageRecord> {
    let (bytes, digest) = manifest.encode(options.level)?;
    store.publish(&catalog::manifest_object(&digest)?, &bytes)?;
    if let Some(provenance) = &options.provenance {
        provenance.update(&digest, |known| {
            known.made_here = true;
            if !catalog::is_reserved(name) {
                known.built_as.insert(name.to_owned());
            }
        })?;
    }
    let record = ImageRecord::of(name, digest, manifest, bytes.len() as u64);
    catalog::publish_name(store, &record)?;
    Ok(record)
}
