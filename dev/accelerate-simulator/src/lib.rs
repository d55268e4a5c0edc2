//! A simulated machine for `burgeon-accelerate`: a cache device and two slow devices, with a
//! volatile cache each, and a model that knows what every sector may contain.
//!
//! ```text
//!   operations by seed: read, write, erase, flush, tidy, kill, cut the power, stop, foreign write,
//!                       change the mode or the policy, grow, replace the cache device, faults of
//!                       either device
//!                                     │
//!   Model (what a sector may hold) ──compare── CachedDevice ──► Disk  (slow: two)
//!                                                 └─ Store ──► Disk  (the cache device)
//! ```
//!
//! Fault model. A disk keeps what was synced. Of what was written after that, a power failure keeps
//! any subset of 512-byte sectors. Reads, writes and syncs fail, and a failing write may be half
//! done. A lying disk has synced nothing. The cache device may be full or dead for good. Memory is
//! good.
//!
//! The promise. A read returns the newest content that a write has returned for, or an error; after
//! a failed write, the old or the new content, and from then on the same. A power failure takes
//! nothing that was flushed. An error only while a device gives reason. After a clean stop, and
//! after the death of the process, the slow device alone holds all of that.
//!
//! One seed is one run. `dev/buggy-accelerate-simulator` compiles this over a copy with bugs, and
//! asserts that each is found.

mod change;
mod crashes;
mod disk;
mod model;
mod run;

pub use crashes::{
    crash_at_every_write, crash_while_growing, crash_while_replacing, crash_while_tidying,
    die_at_every_write,
};
pub use run::{Report, simulate};
