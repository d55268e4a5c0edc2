//! A cache on a fast device in front of slow block devices, in place.
//!
//! ```text
//!   CachedDevice (device)        one slow device: read, write, erase, flush; the order of a write
//!     │  attach, identity      its beginning; what tells it from other devices
//!     │  Marks (marks)     its regions that may be newer than the stored index
//!     │  Streams           recognises sequences, which bypass the cache
//!     │  dirty, upkeep     writes to the log; flushes and tidying
//!     │  Backing (backing) the slow device, and what of it a flush has to make durable
//!     ▼
//!   Store (store)          the cache device, shared by up to 16 slow devices
//!     ├─ Sets (sets, keys) the index: 16-way sets, 4 bytes a block and 4 of check
//!     ├─ Policy (policy)   what is kept: adaptive, clock, fifo, tinylfu
//!     ├─ Log (log, record, recover, write_back, drain, throttle)   dirty blocks
//!     ├─ Overhead (overhead)   bytes beside the blocks, for the counters of the devices
//!     ├─ Locks (locks)     ranges of blocks that one request has to itself
//!     └─ format, layout    the bytes on the device, and their places
//! ```
//!
//! Files and devices are behind [`LocalFile`](burgeon_block::LocalFile) and [`SlowDevice`], so the
//! simulator can crash both. The calls are synchronous: whoever serves them gives each a thread.

mod attach;
mod backing;
mod counters;
mod device;
mod dirty;
mod dirty_ranges;
mod dirty_version;
mod drain;
pub mod format;
mod identity;
mod identity_copies;
pub mod keys;
mod layout;
mod locks;
mod log;
mod log_state;
mod marks;
mod mode;
mod overhead;
pub mod policy;
mod record;
mod records;
mod recover;
pub mod sets;
mod store;
mod streams;
mod throttle;
mod tier;
mod upkeep;
mod write_back;

pub use backing::SlowDevice;
pub use counters::{Cells, Count, Counts};
pub use device::{CachedDevice, DeviceOptions};
pub use dirty_ranges::Dirty;
pub use mode::Mode;
pub use records::create_for;
pub use store::{
    CacheStore, Distrust, Trust, create, create_with, destroy, dirty_in, grow, growth, read_super,
};
pub use throttle::{AtOnce, Load, Moment, Throttle};
pub use tier::HitTier;
pub use write_back::DirtyLimits;
