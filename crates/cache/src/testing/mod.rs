//! Stores and disks for the tests of this crate and of those that use it.

mod disk;
mod memory;

pub use disk::CrashingDisk;
pub use memory::{Fault, MemoryStore};
