//! Images: contents, building, lookup, verification and removal.
//!
//! ```text
//!   directory, tar, reference ──build──► packs/<digest>      compressed, content-addressed chunks
//!                                        manifests/<digest>  attributes, chunk table, checksums
//!                                        images/<name>       a name for a manifest
//!   recorded reads ─────────────────────► profiles/<digest>   reads to prefetch first
//!   manifest ──prepare──► local files: seed (btrfs metadata) + map (address ──► chunk, checksums)
//! ```
//!
//! Invariants: the manifest describes the image completely, and its BLAKE3 digest is the image's
//! identity; a decoded manifest is consistent ([`Manifest::decode`] checks the rules), so later
//! code does not check again; a name appears after everything it needs. The formats are specified
//! in `docs/format.md`.

pub mod builder;
pub mod catalog;
mod chunk;
mod columns;
mod container;
pub mod extents;
mod inspect;
mod manifest;
mod map;
mod mapped;
mod objects;
mod own_file;
mod pack;
mod paths;
mod prepare;
mod profile;

pub use burgeon_btrfs::{DATA_START, Inode, InodeBody};
pub use chunk::{Chunk, Codec, decode_chunk};
pub use extents::{Content, Extent, ExtentMap, ExtentSource, ExtentWriter, Mapping, MappingInfo};
pub use inspect::MapLine;
pub use manifest::{ChunkEntry, Manifest, ManifestLimits};
pub use map::AddressMap;
pub use own_file::{open_own, remove_own, rename_own};
pub use paths::Paths;
pub use prepare::{Wanted, prepare, prepare_map};
pub use profile::{
    PROFILE_MAX, Profile, ProfileRead, READS_MAX, list_profiles, load_profile, profile_object,
    publish_profile, remove_profile,
};

use burgeon_block::{Error, ErrorKind};

/// Most raw bytes of a chunk, the unit of fetching, compression and digests: 256 KiB. Small
/// enough that a 4 KiB read does not wait long, large enough for zstd to find redundancy.
pub const CHUNK_MAX: u32 = 256 << 10;

/// Largest regular file, in bytes, that is stored in the metadata instead of in a chunk: btrfs's
/// own default for inline extents.
pub const INLINE_MAX: u32 = 2048;

/// Longest value of an extended attribute including its name, in bytes: a btrfs xattr must fit in
/// one 16 KiB leaf (header 101, item 25, directory item 30 bytes).
pub const XATTR_MAX: usize = 16384 - 101 - 25 - 30;

/// Longest file, in bytes, holes included: the limit of the VFS, less a block.
pub(crate) const FILE_MAX: u64 = i64::MAX as u64 - burgeon_block::BLOCK_SIZE;

fn corrupt(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, what)
}
