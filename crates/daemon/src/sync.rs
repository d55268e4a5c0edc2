//! The locks of the queues in `server/tasks.rs`. `tests/interleavings.rs` compiles those queues
//! with shuttle's versions of these locks, which try other orders.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
