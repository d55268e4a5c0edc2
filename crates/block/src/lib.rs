//! The vocabulary of Burgeon: ranges, digests, block checksums, errors, counters, and the seams
//! between crates.
//!
//! ```text
//!   frontend ──► BlockDevice    the kernel's reads: try_read (a hit, no wait) or read (a miss)
//!            ──► WritableDevice its writes, erasures and flushes
//!   volume   ──► BlockSource    reads a range of an object, wherever it is
//!            ──► LocalFile      the cache's file; tests crash and corrupt it
//!   image    ──► ObjectStore    a source that can be published to
//! ```
//!
//! Invariants: this crate performs no I/O, and no other crate redefines one of its types.

mod checksum;
mod counters;
mod device;
mod digest;
mod error;
mod memory;
mod object;
mod pages;
mod range;
mod range_set;
mod seams;

pub use checksum::{ChecksumKind, crc32c, crc32c_append};
pub use counters::{Counter, Counters, Histogram, HistogramSnapshot};
pub use device::{BlockDevice, Erase, FileRange, Now, Shape, Verdict, WritableDevice, WriteCache};
pub use digest::Digest;
pub use error::{Error, ErrorKind, Result};
pub use memory::{MemoryMeter, watch_bound};
pub use object::{ObjectId, ObjectKind};
pub use pages::Pages;
pub use range::ByteRange;
pub use range_set::RangeSet;
pub use seams::{
    BlockSource, Collecting, FileIdentity, Lease, LocalFile, ObjectStore, read_or_zeros,
};

/// A block: the unit of checksums, of caching and of addresses. 4 KiB, as btrfs's sector.
pub const BLOCK_SIZE: u64 = 4096;
