//! What the queues of the server's mounts are locked by. `tests/interleavings.rs` compiles them
//! over shuttle's versions of these, which try other orders.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
