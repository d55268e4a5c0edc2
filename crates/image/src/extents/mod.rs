//! The extent map of a virtual area: which content lies at which of its addresses, for ever.
//!
//! ```text
//!   extents   header │ extent │ extent │ … │ END │ extent │ END │          24 B each, by address
//!                        │ source, offset     └─ mapping │
//!   sources   header │ file │ file │ … │ mapping │ image │ mapping │       what extents point to
//! ```
//!
//! Two local files, only ever appended to. A mapping is its sources, its extents and, once these
//! are durable, an END: so what has an END is there whole, and what has none was never mapped.
//! An extent ends where the next record begins; a record is believed only in its place (its
//! checksum covers map and index), and an address only between two sound records.
//!
//! Invariants, and the tests that hold them:
//! - An address is given once: allocation moves forward, also past what a crash or rot took back
//!   (`simulator`, `tests/extents.rs`).
//! - [`ExtentWriter::map`] returns after the mapping is durable; after a power failure at any
//!   write a mapping is there whole or not at all (`simulator`).
//! - A damaged record or entry is an error for the addresses next to it, never another answer
//!   (`tests/extents.rs`).
//! - Looking up allocates nothing once its source has been seen, takes about as long as three looks
//!   at memory that is in no cache, and a map takes 24 bytes an extent (`examples/extent_map.rs`
//!   prints it).

mod format;
mod index;
mod log;
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

/// Checksums of blocks of local files that a map can give room to: 2^40 of them are a sparse file
/// of 8 TiB, which every file system takes, for 4 PiB of local files.
pub const CHECKSUMS_MAX: u64 = 1 << 40;

/// Where the bytes of an extent come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Source {
    /// They are made up: object `computed/…`.
    Computed(ObjectId),
    /// A local file, as long as it is the one it was when it was mapped.
    File {
        /// `file/…`
        object: ObjectId,
        /// What it was when it was mapped.
        identity: FileIdentity,
    },
    /// The lazy data of the image with this manifest; offset 0 is its first lazy address.
    Image(Digest),
}

/// A piece of content to be mapped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Content {
    /// Where it comes from.
    pub source: Source,
    /// Its first byte there; a multiple of the block size.
    pub offset: u64,
    /// Bytes, at least 1. What pads the last block is zeros of a file, and whatever a computation
    /// goes on with.
    pub len: u64,
}

/// What one call maps: its extents lie one after another, each from a block border.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// What the user calls it: the path it appears at.
    pub label: String,
    /// Where it comes from, for a user to read.
    pub origin: String,
    /// Its content.
    pub extents: Vec<Content>,
}

impl Mapping {
    /// Where each extent begins, in bytes from the beginning of the mapping.
    pub fn positions(&self) -> impl Iterator<Item = u64> {
        self.extents.iter().scan(0u64, |next, content| {
            let at = *next;
            *next = at.saturating_add(blocks_of(content.len).saturating_mul(BLOCK_SIZE));
            Some(at)
        })
    }
}

/// A mapping that was made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MappingInfo {
    /// [`Mapping::label`].
    pub label: String,
    /// [`Mapping::origin`].
    pub origin: String,
    /// Where it lies in the area: whole blocks.
    pub range: ByteRange,
    /// Bytes of content, without what pads blocks.
    pub len: u64,
    /// How many extents it has.
    pub extents: u64,
}

fn blocks_of(len: u64) -> u64 {
    len.div_ceil(BLOCK_SIZE)
}

/// Bytes `blocks` of the area.
fn block_range(start: u64, blocks: u64) -> Result<ByteRange> {
    let start = start.checked_mul(BLOCK_SIZE);
    let len = blocks.checked_mul(BLOCK_SIZE);
    start
        .zip(len)
        .and_then(|(start, len)| ByteRange::at(start, len))
        .ok_or_else(|| crate::corrupt("the extent map names addresses beyond the end of all"))
}

/// Refuses sizes that no virtual area has.
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
