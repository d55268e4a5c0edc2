//! A simulated machine for the data path: a disk that forgets and rots, a source that lies, a
//! clock that jumps, and a model that knows every byte.
//!
//! ```text
//!               operations by seed: read, drop a reader, prefetch, profile, fill, rot, fill the disk,
//!               break the source, evict, sync, kill, cut the power, swap the image, …
//!                                              │
//!   Oracle (every expected byte) ──compare── Volume ──► FaultySource   counts what it did wrong
//!                                              └──► Cache ──► Disk    lives through crashes
//! ```
//!
//! Fault model. A disk keeps what was synced. Of what was written after that, a power failure
//! keeps any subset of 512-byte sectors, may keep a block allocated and full of old garbage, and
//! bits rot at any time; reads and writes fail, and a failing write may be half done. A source
//! answers late, never, with an error, with too little, with wrong or with old bytes. Two images
//! share chunks and a cache, and the checksums of one may be wrong; [`simulate_shared`] has three
//! of them at once. Memory and the clock are good.
//!
//! The promise. Every read gives the right bytes or an error; an error only while the source
//! gives reason; within a bounded time; when the faults stop, everything can be filled and is then
//! served without the source; and the counters match the events exactly.
//!
//! A simulator that finds nothing proves nothing: `dev/buggy-simulator` compiles it over a copy
//! of the volume that has bugs and asserts that each is found. One seed is one run: the same
//! seed, the same run.

mod area;
mod disk;
mod exhaustive;
mod extents;
mod model;
mod records;
mod run;
mod shared;
mod source;
mod world;

pub use area::simulate_mapped_file;
pub use disk::{Crash, Disk, SimFile};
pub use exhaustive::{Exhausted, crash_at_every_write};
pub use extents::{MapBug, map_through_power_failures};
pub use model::Model;
pub use records::{Folder, Step, publish_survives};
pub use run::{Report, simulate};
pub use shared::{SharedReport, simulate_shared};
pub use source::{FaultySource, Mood};

/// Number of seeds that the tests run, unless `SIMULATION_SEEDS` sets another.
pub fn seeds(default: u64) -> u64 {
    std::env::var("SIMULATION_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
