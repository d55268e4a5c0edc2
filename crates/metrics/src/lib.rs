//! Metrics: lifetime totals of a host's reads, and their names, units and text for Prometheus.
//!
//! ```text
//!   counters of a mount ──► values ──► totals: by store and mount, durable ──┐
//!   (shared memory)                                                         ▼
//!   the daemon's present state ──────────────────────────────────────► snapshot ──► exposition
//!   counters of disks ──────────────────────────────────────────────────► disks ──────┘
//!                                                        families: every name, type and unit
//! ```
//!
//! Invariants: a total never goes down, whatever is restarted or killed, and saturates instead of
//! wrapping (`totals`); integers are printed as integers, seconds with all nine decimals
//! (`format`); the number of series is bounded (`families`), and no two have the same labels.

mod disks;
mod exposition;
mod families;
mod format;
mod label;
mod snapshot;
mod totals;
mod values;

pub use disks::{DISKS_MAX, DiskNow, Disks};
pub use exposition::render;
pub use families::FAMILIES;
pub use format::{Family, FamilyKind};
pub use snapshot::{CacheNow, MOUNTS_MAX, MetricsSnapshot, MountNow};
pub use totals::{OTHER_STORES, STORES_MAX, TOTALS_MAX, Totals};
pub use values::{BOUNDS, CacheValues, ReadTier, Values};
