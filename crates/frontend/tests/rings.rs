//! The same device served over io_uring, where the kernel has that; where not, `with_rings` makes
//! a connection without rings, and the same reads come out right. Needs root.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    sync::Arc,
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, Pages};
use burgeon_frontend::{
    Connection, End, FuseServer, LoopDevice, LoopOptions, ServeOptions, Slots, serve,
};
use common::{Computed, Watchdog, block_ok, open_direct, runtime};
use testkit::FuseRings;

const SIZE: u64 = (1 << 40) + (3 << 20);
const READ_ONLY: LoopOptions =
    LoopOptions { name: "burgeon-test/rings", read_only: true, discard: false };

struct Setup {
    slots: Arc<Slots>,
    server: FuseServer,
    file: File,
    number: u32,
    /// True if it is served over rings.
    rings: bool,
    runtime: tokio::runtime::Runtime,
    _watchdog: Watchdog,
    _switch: Option<FuseRings>,
}

fn setup(device: Arc<Computed>, allowed: bool) -> Setup {
    let switch = FuseRings::set(allowed);
    let runtime = runtime();
    let slots = Arc::new(Slots::create().unwrap());
    let connection = Connection::with_rings("burgeon-test").unwrap();
    assert_eq!(connection.has_rings(), allowed && switch.is_some());
    let watchdog = Watchdog::new(&connection);
    let fuse = connection.device().try_clone_to_owned().unwrap();
    let mut options = ServeOptions::new(runtime.handle().clone());
    options.rings = connection.has_rings();
    let server = serve(fuse, slots.clone(), device, &options).unwrap();
    let (file, number) = (connection.open_file().unwrap(), connection.number().unwrap());
    let rings = connection.has_rings();
    Setup { slots, server, file, number, rings, runtime, _watchdog: watchdog, _switch: switch }
}

fn read_blocks(file: &File, first: u64, count: usize) -> io::Result<Pages> {
    let mut buffer = Pages::zeroed(count as u64 * BLOCK_SIZE).unwrap();
    file.read_exact_at(buffer.bytes_mut(), first * BLOCK_SIZE)?;
    Ok(buffer)
}

fn reads_right(file: &File, first: u64, count: usize) {
    let buffer = read_blocks(file, first, count).unwrap();
    for (block, bytes) in (first..).zip(buffer.bytes().chunks_exact(BLOCK_SIZE as usize)) {
        assert!(block_ok(bytes, block), "block {block} has wrong bytes");
    }
}

/// A loop device reads right from every CPU, whether rings are allowed or not, and all of it goes
/// with the last user.
fn a_loop_reads_right_and_leaves_nothing(allowed: bool) {
    let device = Arc::new(Computed::hits(SIZE));
    let setup = setup(device.clone(), allowed);
    assert_eq!(setup.file.metadata().unwrap().len(), SIZE);
    let looped = LoopDevice::attach(&setup.file, READ_ONLY).unwrap();
    drop(setup.file);
    for absent in [false, true] {
        device.set_absent(absent);
        std::thread::scope(|scope| {
            for reader in 0..8u64 {
                let path = looped.path();
                scope.spawn(move || {
                    let file = open_direct(path).unwrap();
                    (0..50).for_each(|n| reads_right(&file, reader * 1_000_003 + n * 977, 1));
                    // More than a request holds, and the end.
                    reads_right(&file, reader * 7, 700);
                    reads_right(&file, SIZE / BLOCK_SIZE - 3, 3);
                });
            }
        });
    }
    let counters = setup.slots.counters();
    assert_eq!(counters.failed_reads.get(), 0);
    let bytes = 8 * 753 * BLOCK_SIZE;
    assert!(counters.hit_bytes.get() >= bytes && counters.miss_bytes.get() >= bytes);
    let number = looped.number();
    let ended = setup.server.ended();
    looped.detach(Duration::from_secs(10)).unwrap();
    assert!(!fs::exists(format!("/sys/block/loop{number}/loop")).unwrap());
    assert_eq!(setup.runtime.block_on(ended), End::Unmounted);
    assert_eq!(setup.server.stop(Duration::ZERO), 0);
}

#[test]
fn a_loop_over_rings_reads_right_and_leaves_nothing() {
    a_loop_reads_right_and_leaves_nothing(true);
}

#[test]
fn a_connection_has_no_rings_if_they_are_not_allowed() {
    a_loop_reads_right_and_leaves_nothing(false);
}

#[test]
fn errors_and_odd_requests_over_rings() {
    let device = Arc::new(Computed::hits(SIZE));
    let Setup { slots, server, file, runtime: _runtime, _watchdog, _switch, .. } =
        setup(device.clone(), true);
    for absent in [false, true] {
        device.set_absent(absent);
        for bad in [Computed::FAILING_BLOCK, Computed::PANICKING_BLOCK] {
            let error = read_blocks(&file, bad, 1).err().unwrap();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
        reads_right(&file, 6, 1);
    }
    assert_eq!(slots.counters().failed_reads.get(), 4);
    let mut odd = [0; 100];
    assert_eq!(file.read_at(&mut odd, 3).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(file.read_at(&mut [0; 4096], SIZE).unwrap(), 0);
    drop(file);
    server.stop(Duration::ZERO);
}

#[test]
fn more_misses_than_entries_wait_for_one() {
    const READERS: u64 = 300;
    let device = Arc::new(Computed::hits(SIZE));
    let Setup { slots, server, file, runtime: _runtime, _watchdog, _switch, .. } =
        setup(device.clone(), true);
    device.set_absent(true);
    device.close_gate();
    std::thread::scope(|scope| {
        let file = &file;
        let readers: Vec<_> =
            (0..READERS).map(|block| scope.spawn(move || reads_right(file, block, 1))).collect();
        device.wait_for_waiting(4);
        device.open_gate();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(slots.counters().misses.get(), READERS);
    drop(file);
    server.stop(Duration::ZERO);
}

#[test]
fn readers_of_a_stopped_server_are_freed_by_an_abort() {
    let device = Arc::new(Computed::hits(SIZE));
    let Setup { server, file, number, rings, runtime: _runtime, _watchdog, _switch, .. } =
        setup(device.clone(), true);
    device.set_absent(true);
    device.close_gate();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_blocks(&file, 1, 1).err().unwrap());
        device.wait_for_waiting(1);
        // Over rings no request lies in a slot, so nothing is left for a successor.
        assert_eq!(server.stop(Duration::ZERO), usize::from(!rings));
        Connection::abort(number).unwrap();
        assert_eq!(reader.join().unwrap().raw_os_error(), Some(libc::ECONNABORTED));
    });
}
