//! What the flight table and the presence bits share memory with. `tests/interleavings.rs`
//! compiles them over shuttle's versions of these, which try other orders.

pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
