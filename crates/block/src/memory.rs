//! Bounds the memory for preparing one image, whatever its input claims.
//!
//! ```text
//!   bound = FIXED + min(promised, RATIO × input)  ≤ MAX
//!
//!   input      bytes of the archive, manifest or table as they are stored
//!   promised   the need of a sound input of that content: 512 bytes an entry, 4 × its names, …
//!   taken      bytes that the readers hold
//! ```
//!
//! Every reader of untrusted input counts its memory on one meter before it allocates. Invariants:
//! `taken` never exceeds the bound, and content compressed to almost nothing raises the bound by
//! almost nothing: 700 KB of zstd cannot claim four million files.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{Error, ErrorKind, Result};

/// Memory for the tables of any input: 64 MiB. Data in flight and a decoder's window take the rest
/// of 256 MiB.
const FIXED: u64 = 64 << 20;
/// Bytes of memory that one stored byte can account for. An entry of an archive, which takes about
/// 400 bytes of memory, is rarely stored in fewer than five.
const RATIO: u64 = 128;
/// The highest bound for any input: 8 GiB, some 20 million files.
const MAX: u64 = 8 << 30;

/// Bytes promised for an entry, and for each byte of its names.
const PER_ENTRY: u64 = 512;
const PER_NAME_BYTE: u64 = 4;
/// Bytes of data per promised byte: chunk tables and block checksums.
const DATA_PER_BYTE: u64 = 256;

/// Bytes of headers that describe others which any input may have, and for each byte of it. Those
/// of a sound archive take one KiB an entry; a tree of empty files alone is stored in three bytes
/// an entry by xz.
const HEADERS: u64 = 64 << 20;
const HEADERS_RATIO: u64 = 512;

/// Data in flight and a decoder's window, in bytes, which are not counted: 192 MiB.
const UNCOUNTED: u64 = 192 << 20;

/// Called with the bytes that a preparation may take in all.
static WATCH: OnceLock<fn(u64)> = OnceLock::new();
/// The highest bound reported.
static TOLD: AtomicU64 = AtomicU64::new(0);

/// Calls `watch` with the memory that a preparation may take in all, now and whenever that has
/// grown by a sixteenth. Only the first call in a process has an effect.
pub fn watch_bound(watch: fn(u64)) {
    let _ = WATCH.set(watch);
    tell(FIXED);
}

fn tell(bound: u64) {
    let Some(watch) = WATCH.get() else { return };
    let bound = bound.saturating_add(UNCOUNTED);
    let told = TOLD.load(Relaxed);
    // The meter counts each entry of an archive; the limit need not follow every one.
    if bound > told + told / 16 && TOLD.fetch_max(bound, Relaxed) < bound {
        watch(TOLD.load(Relaxed));
    }
}

/// Counts the memory of one preparation. All of its readers share it.
#[derive(Debug, Default)]
pub struct MemoryMeter {
    input: AtomicU64,
    promised: AtomicU64,
    taken: AtomicU64,
    headers: AtomicU64,
}

impl MemoryMeter {
    /// A meter without input.
    pub fn new() -> Self {
        Self::default()
    }

    /// A meter for an input of `len` stored bytes, all of which are here.
    pub fn of_input(len: u64) -> Self {
        let meter = Self::new();
        meter.input(len);
        meter
    }

    /// Counts more `bytes` of the input, as they are stored.
    pub fn input(&self, bytes: u64) {
        add(&self.input, bytes);
        tell(self.bound());
    }

    /// Counts more entries of the content, with `name_bytes` in their names.
    pub fn entries(&self, count: u64, name_bytes: u64) {
        let names = name_bytes.saturating_mul(PER_NAME_BYTE);
        self.promise(count.saturating_mul(PER_ENTRY).saturating_add(names));
    }

    /// Counts more `bytes` of data, which lie outside memory.
    pub fn data(&self, bytes: u64) {
        self.promise(bytes / DATA_PER_BYTE);
    }

    /// Counts more `bytes` of memory that the content accounts for.
    pub fn promise(&self, bytes: u64) {
        add(&self.promised, bytes);
        tell(self.bound());
    }

    /// Takes `bytes`. Beyond the bound it takes nothing: `Invalid`.
    pub fn take(&self, bytes: u64) -> Result<()> {
        let taken = add(&self.taken, bytes);
        let bound = self.bound();
        if taken <= bound {
            return Ok(());
        }
        self.give_back(bytes);
        let what = format!(
            "the input needs more than {} MiB of memory, the bound for its size and its number of \
             entries: if you trust it, unpack it, and build from the folder",
            bound >> 20
        );
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Counts `bytes` of headers that describe others: they take time, and no memory. `Invalid`
    /// beyond what the input accounts for.
    pub fn headers(&self, bytes: u64) -> Result<()> {
        let most = self.input.load(Relaxed).saturating_mul(HEADERS_RATIO).saturating_add(HEADERS);
        if bytes == 0 || add(&self.headers, bytes) <= most {
            return Ok(());
        }
        let what = format!(
            "the archive has more than {} MiB of extended headers, the bound for its size: if you \
             trust it, unpack it, and build from the folder",
            most >> 20
        );
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Returns `bytes` that were taken.
    pub fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Relaxed);
    }

    /// The bytes that may be taken now.
    pub fn bound(&self) -> u64 {
        let by_input = self.input.load(Relaxed).saturating_mul(RATIO);
        FIXED.saturating_add(self.promised.load(Relaxed).min(by_input)).min(MAX)
    }
}

/// Adds with saturation; returns the sum.
fn add(counter: &AtomicU64, more: u64) -> u64 {
    let sum = |value: u64| Some(value.saturating_add(more));
    counter.fetch_update(Relaxed, Relaxed, sum).map_or(u64::MAX, |value| value.saturating_add(more))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_grows_with_the_content_and_no_faster_than_the_input() {
        let meter = MemoryMeter::new();
        meter.take(FIXED).unwrap();
        assert_eq!(meter.take(1).unwrap_err().kind(), ErrorKind::Invalid);
        meter.entries(1000, 10_000);
        assert_eq!(meter.bound(), FIXED, "nothing has come");
        meter.input(100);
        assert_eq!(meter.bound(), FIXED + 100 * RATIO);
        meter.input(1 << 20);
        assert_eq!(meter.bound(), FIXED + 1000 * 512 + 10_000 * 4);
        meter.take(512_000).unwrap();
        meter.take(40_001).unwrap_err();
        meter.give_back(1);
        meter.take(40_001).unwrap();
    }

    #[test]
    fn the_bound_of_headers_grows_with_the_input() {
        let meter = MemoryMeter::new();
        meter.headers(HEADERS).unwrap();
        meter.headers(0).unwrap();
        assert_eq!(meter.headers(1).unwrap_err().kind(), ErrorKind::Invalid);
        meter.input(1);
        meter.headers(HEADERS_RATIO - 1).unwrap();
        meter.headers(u64::MAX).unwrap_err();
        MemoryMeter::of_input(u64::MAX).headers(u64::MAX).unwrap();
    }

    #[test]
    fn no_number_wraps() {
        let meter = MemoryMeter::of_input(u64::MAX);
        meter.entries(u64::MAX, u64::MAX);
        assert_eq!(meter.bound(), MAX);
        meter.take(u64::MAX).unwrap_err();
    }
}
