//! Background work: fetches that no reader waits for.
//!
//! ```text
//!   reader ─────────────────────────────► its own permits: background work never takes them
//!   profile.rs      a profile, in order ──► runs ──┐ half as much in flight while readers fetch
//!   read_ahead.rs   behind a reader ──────► runs ──┤
//!   on_request.rs   a range, once ────────► chunks ┼─► background permits
//!   fill.rs         everything ───────────► chunks ┘ begins nothing while readers wait, for 1 s
//!
//!   volume, fetch/ ──► work.rs   a reader waits, a chunk is fetched for it; a range was read, or
//!                                prefetched: all that background work is told
//!   background work ──► volume   is the chunk resident, may it be kept; join or start its fetch
//! ```
//!
//! Invariants:
//! - Background work takes background permits, which leave some for readers; read-ahead and
//!   requests wait for none (`tests/profile.rs`, `tests/fill.rs`, `tests/read_ahead.rs`).
//! - It is a hint: a fetch that fails here is left to the readers, and no read fails or waits
//!   because of it, except for a chunk that both want.
//! - A mount's fetch limit holds for all that is fetched for the mount (`tests/fill.rs`).
//! - Dropping a handle ([`Fill`], [`ProfilePrefetch`]) begins no fetch any more; those in flight
//!   end.
//! - What it is told costs a hit no lock and no allocation (`tests/no_allocation.rs`).

mod block_bits;
mod fill;
mod on_request;
pub(crate) mod prefetched;
mod profile;
mod read_ahead;
mod request_window;
mod work;

pub(crate) use self::work::BackgroundWork;
pub use self::{
    fill::{Fill, FillProgress, FillState},
    prefetched::PrefetchedBytes,
    profile::{ProfilePrefetch, ProfileProgress, ProfileState},
};
