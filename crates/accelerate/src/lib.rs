//! A cache on a fast device in front of slow block devices, in place.
//!
//! ```text
//!   Cached (device)        one slow device: read, write, erase, flush; the order of a write
//!     │  Marks (marks)     its regions that may be newer than the stored index
//!     │  Streams           recognises sequences, which go round the cache
//!     ▼
//!   Store (store)          the cache device, shared by up to 16 slow devices
//!     ├─ Sets (sets, keys) the index: 16-way sets, 4 bytes a block and 4 of check
//!     ├─ Policy (policy)   what is kept: adaptive, clock, fifo, tinylfu
//!     ├─ Locks (locks)     ranges of blocks that one request has to itself
//!     └─ format            the bytes on the device
//! ```
//!
//! Files and devices are behind [`LocalFile`](burgeon_block::LocalFile) and [`SlowDevice`], so the
//! simulator can crash both. The calls are synchronous: whoever serves them gives each a thread.

mod counters;
mod device;
pub mod format;
pub mod keys;
mod locks;
mod marks;
pub mod policy;
pub mod sets;
mod store;
mod streams;

pub use counters::{Cells, Count, Counts};
pub use device::{Cached, Mode, Options, SlowDevice};
pub use store::{Distrust, Store, Trust, create, destroy, read_super};
