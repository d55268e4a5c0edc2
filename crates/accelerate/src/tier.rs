//! The places from which reads are answered.

/// Where a block was, the fastest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Tier {
    /// The memory of the cache's server.
    Memory,
    /// The cache device.
    Cache,
    /// The slow device.
    Slow,
}
