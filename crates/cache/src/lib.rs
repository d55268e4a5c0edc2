//! The host's bounded store of chunks, keyed by content.
//!
//! ```text
//!   key ──► find ──► Place ──► read ──► bytes, not verified ──► the caller verifies them
//!             │ no: a miss                │ wrong, also when the whole chunk is hashed again
//!             ▼                           ▼
//!           (fetch, verify) ──► admit   doubt: the key is forgotten
//! ```
//!
//! The crate knows neither address maps nor readers nor counters of mounts. It trusts nobody
//! below: what it reads back may be anything, and verification stays in front of it.
//!
//! Invariants:
//! - A key is found after its bytes were written, never before.
//! - A stale [`Place`] is harmless: it reads as zeros or not at all, or its bytes fail the
//!   caller's verification.
//! - A failing file system costs no reader more than a miss.

mod admin;
mod admission;
mod arena;
mod cache;
pub mod checkpoint;
pub mod disk;
mod gate;
mod hold;
mod index;
pub mod journal;
mod key;
mod lending;
mod load;
mod memory_fifo;
mod owners;
mod persist;
pub mod policy;
mod report;
mod reuse;
mod scrub;
mod settings;
mod shared;
mod slots;
mod store;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod upkeep;

pub use arena::name as arena_name;
pub use cache::Cache;
pub use key::{ChunkKey, Domain, KeyKind};
pub use lending::{ArenaRange, LentRange};
pub use owners::{ChunkOwner, OwnedBytes, Scope};
pub use persist::is_own_name;
pub use report::CacheReport;
pub use reuse::HitPermille;
pub use settings::{Amount, CacheSettings};
pub use store::{CHUNK_LEN_MAX, CacheState, ChunkStore, Here, Hold, Place, Why};
