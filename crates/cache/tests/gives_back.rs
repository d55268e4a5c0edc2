//! Space that others take is given back, on each file system. Needs root.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "common/given_back.rs"]
mod given_back;

use given_back::{DISKS, evict_half, give_back};
use testkit::Space;

const SIZE: u64 = 768 << 20;
const ROOM: u64 = 192 << 20;

/// `make bench-cache` measures how quickly.
#[test]
fn space_is_given_back_down_to_the_floor_beside_readers() {
    for (name, mkfs) in DISKS {
        let space = Space::new("gives-back");
        let given = give_back(&space, mkfs, (SIZE, ROOM), 60);
        println!("{name}: {given:?}");
        assert!(given.lacking >= ROOM / 4, "{name}: {given:?}");
        assert!(given.punched >= given.lacking / 8 * 7, "{name}: {given:?}");
        assert!(given.reads > 0, "{name}: {given:?}");
    }
}

/// A caller that asks for room looks afterwards at what is free.
#[test]
fn evicted_space_is_free_when_the_call_returns() {
    for (name, mkfs) in DISKS {
        let space = Space::new("evicts");
        let (freed, free) = evict_half(&space, mkfs, (SIZE, ROOM));
        println!("{name}: {freed} bytes are evicted, {free} are free");
        assert!(freed >= ROOM / 2 && free + (1 << 20) >= freed, "{name}: {free} of {freed}");
    }
}
