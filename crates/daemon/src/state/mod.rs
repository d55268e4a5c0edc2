//! The contents of the state directory: records, locks, prepared images, writes, pins, roots.
//!
//! `paths` draws the directory.
//!
//! Invariants: a record is published whole and is durable before the call returns (`files`); every
//! process takes the lock that a record names before it changes it.

pub(crate) mod access;
pub(crate) mod attributes;
pub(crate) mod built;
pub(crate) mod cache;
pub(crate) mod cache_dir;
pub(crate) mod checksums;
pub(crate) mod complete;
pub(crate) mod directory_identity;
pub(crate) mod files;
pub(crate) mod gc;
pub(crate) mod grants;
pub(crate) mod images;
pub(crate) mod known_digests;
pub(crate) mod layers;
pub(crate) mod loans;
pub(crate) mod paths;
pub(crate) mod pins;
pub(crate) mod prepared;
pub(crate) mod profile;
pub(crate) mod record;
pub(crate) mod recycled_seed;
pub mod roots;
pub(crate) mod space;
pub(crate) mod totals;
pub mod writes;
