//! The extent map of a virtual area: the permanent assignment of content to its addresses.
//!
//! ```text
//!   extents   header │ extent │ extent │ … │ END │ extent │ END │          24 B each, by address
//!                        │ source, offset     └─ mapping │
//!   sources   header │ file │ file │ … │ mapping │ image │ mapping │       targets of extents
//! ```
//!
//! Two local files that only grow. A mapping consists of its sources, its extents and, once these
//! are durable, an END: a mapping with an END is complete, one without was never made. An extent
//! ends where the next record begins. A record is valid only at its own position (its checksum
//! covers the map's id and that position), and an address is resolved only between two valid
//! records.
//!
//! Invariants, and the tests that check them:
//! - An address is allocated once: allocation moves forward, also past the remains of a crash or
//!   of rot (`simulator`, `tests/extents.rs`).
//! - [`ExtentWriter::map`] returns after the mapping is durable; after a power failure at any
//!   write, a mapping is complete or absent (`simulator`).
//! - A damaged record or entry is an error for the addresses next to it, never a different answer
//!   (`tests/extents.rs`).
//! - A lookup allocates nothing once its source has been parsed and takes about as long as three
//!   uncached memory accesses; a map takes 24 bytes per extent (`examples/extent_map.rs` measures
//!   both).

mod format;
mod log;
mod lookup;
mod reader;
mod writer;

use burgeon_block::{
    BLOCK_SIZE, ByteRange, Digest, Error, ErrorKind, FileIdentity, ObjectId, Result,
};

pub use log::{FileLog, LogFile, LogView};
pub use reader::{Extent, ExtentMap};
pub use writer::ExtentWriter;

use crate::invalid;

/// Largest virtual area, in bytes: 7 EiB. The VFS ends at 8 EiB.
pub const AREA_MAX: u64 = 7 << 60;

/// Most checksums of blocks of local files that a map can hold: 2^40 are a sparse file of 8 TiB,
/// which every file system supports, for 4 PiB of local files.
pub const CHECKSUMS_MAX: u64 = 1 << 40;

/// The source of an extent's bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExtentSource {
    /// Computed: object `computed/…`.
    Computed(ObjectId),
    /// A local file; valid only while its identity is unchanged.
    File {
        /// `file/…`
        object: ObjectId,
        /// Its identity when it was mapped.
        identity: FileIdentity,
    },
    /// The lazy data of the image with this manifest; offset 0 is its first lazy address.
    Image(Digest),
}

/// A piece of content to map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Content {
    /// Its source.
    pub source: ExtentSource,
    /// Offset of its first byte in the source; a multiple of the block size.
    pub offset: u64,
    /// Length in bytes, at least 1. The padding of the last block is zeros for a file, and the
    /// continued pattern for computed content.
    pub len: u64,
}

/// The argument of one call: its extents lie one after another, each starting at a block border.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The user's name for it: the path it appears at.
    pub label: String,
    /// A description of its origin for users.
    pub origin: String,
    /// Its content.
    pub extents: Vec<Content>,
}

impl Mapping {
    /// Position of each extent, in bytes from the beginning of the mapping.
    pub fn positions(&self) -> impl Iterator<Item = u64> {
        self.extents.iter().scan(0u64, |next, content| {
            let at = *next;
            *next = at.saturating_add(blocks_of(content.len).saturating_mul(BLOCK_SIZE));
            Some(at)
        })
    }
}

/// An existing mapping.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MappingInfo {
    /// [`Mapping::label`].
    pub label: String,
    /// [`Mapping::origin`].
    pub origin: String,
    /// Its range in the area: whole blocks.
    pub range: ByteRange,
    /// Bytes of content, without padding of blocks.
    pub len: u64,
    /// Number of extents.
    pub extents: u64,
}

fn blocks_of(len: u64) -> u64 {
    len.div_ceil(BLOCK_SIZE)
}

/// The byte range of `blocks` blocks of the area from block `start`.
fn block_range(start: u64, blocks: u64) -> Result<ByteRange> {
    let start = start.checked_mul(BLOCK_SIZE);
    let len = blocks.checked_mul(BLOCK_SIZE);
    start
        .zip(len)
        .and_then(|(start, len)| ByteRange::at(start, len))
        .ok_or_else(|| crate::corrupt("the extent map names addresses beyond the end of all"))
}

/// Refuses sizes that no virtual area can have.
fn check_size(size: u64) -> Result<()> {
    if size > 0 && size <= AREA_MAX && size.is_multiple_of(BLOCK_SIZE) {
        return Ok(());
    }
    Err(invalid(format!(
        "a virtual area of {size} bytes: it has to be whole blocks of {BLOCK_SIZE}, at most {AREA_MAX} bytes"
    )))
}

fn unmapped(offset: u64) -> Error {
    Error::new(
        ErrorKind::Unmapped,
        format!("nothing is mapped at byte {offset} of the virtual area"),
    )
}
