//! The bound of a preparation is reported as it grows. A process has only one watcher, so this is
//! a program of its own.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burgeon_block::{MemoryMeter, watch_bound};

#[test]
fn the_bound_is_told_as_it_grows() {
    static LAST: AtomicU64 = AtomicU64::new(0);
    static CALLS: AtomicU64 = AtomicU64::new(0);
    const UNCOUNTED: u64 = 192 << 20;
    watch_bound(|bound| {
        LAST.fetch_max(bound, Relaxed);
        CALLS.fetch_add(1, Relaxed);
    });
    assert_eq!(LAST.load(Relaxed), 256 << 20, "what any input may take");
    let meter = MemoryMeter::of_input(1 << 30);
    for _ in 0..1 << 20 {
        meter.entries(1, 10);
    }
    let (told, needed) = (LAST.load(Relaxed), meter.bound() + UNCOUNTED);
    assert!(told <= needed && told + told / 16 >= needed, "{told} of {needed}");
    assert!(CALLS.load(Relaxed) < 100, "{CALLS:?}");
}
