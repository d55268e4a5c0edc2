//! The primitives by which the single-flight table and the table of places share memory.
//! `tests/interleavings.rs` compiles both over shuttle's versions of these, which try other
//! orders.

pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
