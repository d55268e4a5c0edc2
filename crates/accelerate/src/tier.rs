//! The places from which reads are answered.

/// The place in which a block was found, the fastest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum HitTier {
    /// The memory of the cache's server.
    Memory,
    /// The cache device.
    Cache,
    /// The slow device.
    Slow,
}
