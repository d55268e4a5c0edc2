//! The memory that a start takes, in proportion to its chunks. The example `restart` measures
//! 1 TiB.

#![allow(clippy::unwrap_used)] // helpers of tests

#[path = "common/full.rs"]
mod full;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use burgeon_cache::{Amount, Cache, CacheSettings, ChunkStore as _, policy::Forecast};

/// The system's allocator, which knows how much is in use, and the most that was.
struct Measured;

static USED: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    let used = USED.fetch_add(bytes, Relaxed) + bytes;
    MOST.fetch_max(used, Relaxed);
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Measured {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Measured = Measured;

const CHUNKS: u32 = 1 << 18;

/// 200 MB for 4 Mi chunks.
const EACH: usize = 200_000_000 / (4 << 20);
/// Buffers, and first segments of tables.
const FIXED: usize = 2 << 20;

#[test]
fn a_start_takes_less_than_48_bytes_of_memory_a_chunk() {
    let dir = tempfile::tempdir().unwrap();
    full::make(dir.path(), CHUNKS).unwrap();
    let settings = CacheSettings {
        limit: Some(Amount::Bytes(1 << 40)),
        keep_free: Amount::Bytes(0),
        ..CacheSettings::default()
    };
    let before = USED.load(Relaxed);
    MOST.store(before, Relaxed);
    let policy = Box::new(Forecast::new(1 << 40, 1));
    let cache = Cache::open(dir.path(), settings, policy).unwrap();
    let most = MOST.load(Relaxed) - before;
    assert_eq!(cache.report().chunks, u64::from(CHUNKS));
    assert!((0..CHUNKS).all(|n| cache.find(&full::key(n)).is_some()));
    let allowed = EACH * CHUNKS as usize + FIXED;
    assert!(most < allowed, "{most} bytes for {CHUNKS} chunks; at most {allowed}");
}
