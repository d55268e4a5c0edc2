//! The primitives by which slots and index share memory. `tests/interleavings.rs` compiles both
//! over shuttle's versions of these, which try other orders.

pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Slots of one segment of the table.
pub(crate) const SEGMENT: usize = 1 << 13;
