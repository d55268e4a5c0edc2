//! A hit is answered without allocating: an allocation can wait for the very writes that wait for
//! the answer. Needs root.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, Pages};
use burgeon_frontend::{Connection, ServeOptions, Slots, serve};
use common::{Computed, Watchdog, block_ok, runtime};
use testkit::FuseRings;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: the caller keeps to the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_hit_allocates_nothing() {
    // One after the other: both count the allocations of the whole process.
    a_hit_over(Connection::new("burgeon-test").unwrap());
    let _switch = FuseRings::set(true);
    a_hit_over(Connection::with_rings("burgeon-test").unwrap());
}

fn a_hit_over(connection: Connection) {
    let runtime = runtime();
    let slots = Arc::new(Slots::create().unwrap());
    let _watchdog = Watchdog::new(&connection);
    let fuse = connection.device().try_clone_to_owned().unwrap();
    let mut options = ServeOptions::new(runtime.handle().clone());
    options.rings = connection.has_rings();
    let server = serve(fuse, slots.clone(), Arc::new(Computed::hits(1 << 40)), &options).unwrap();
    let file = connection.open_file().unwrap();
    let mut buffer = Pages::zeroed(64 * BLOCK_SIZE).unwrap();
    let mut read = |block: u64, count: usize| {
        let bytes = &mut buffer.bytes_mut()[..count * BLOCK_SIZE as usize];
        file.read_exact_at(bytes, block * BLOCK_SIZE).unwrap();
        assert!(block_ok(&bytes[..BLOCK_SIZE as usize], block));
    };
    // Work that is done once, such as starting threads, may allocate.
    (0..100).for_each(|block| read(block, 1));
    // A thread that starts late may, too, so one quiet round is enough: if hits allocated, there
    // would be none.
    let quiet = (1..=20).find(|_| {
        let before = ALLOCATIONS.load(SeqCst);
        (0..2000).for_each(|block| read(block * 1000, 1 + block as usize % 64));
        ALLOCATIONS.load(SeqCst) == before
    });
    let rounds = quiet.expect("hits allocate: no round of 2000 was without");
    assert_eq!(slots.counters().hits.get(), 100 + 2000 * rounds);
    drop(file);
    server.stop(Duration::ZERO);
}
