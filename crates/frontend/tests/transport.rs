//! A computed device, served over FUSE, under a loop device, read by the kernel for real. Needs
//! root.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom},
    os::unix::fs::FileExt,
    sync::Arc,
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, Pages};
use burgeon_frontend::{
    Connection, End, FuseServer, LoopDevice, LoopOptions, ServeOptions, Slots, serve,
};
use common::{Computed, Watchdog, block_ok, open_direct, runtime};

const SIZE: u64 = (1 << 40) + (3 << 20);
const READ_ONLY: LoopOptions =
    LoopOptions { name: "burgeon-test/transport", read_only: true, discard: false };

struct Setup {
    slots: Arc<Slots>,
    server: FuseServer,
    file: File,
    runtime: tokio::runtime::Runtime,
    watchdog: Watchdog,
}

fn setup(device: Arc<Computed>) -> Setup {
    setup_with(device, |_| {})
}

fn setup_with(device: Arc<Computed>, change: fn(&mut ServeOptions)) -> Setup {
    let runtime = runtime();
    let slots = Arc::new(Slots::create().unwrap());
    let connection = Connection::new("burgeon-test").unwrap();
    let watchdog = Watchdog::new(&connection);
    let fuse = connection.device().try_clone_to_owned().unwrap();
    let mut options = ServeOptions::new(runtime.handle().clone());
    change(&mut options);
    let server = serve(fuse, slots.clone(), device, &options).unwrap();
    let file = connection.open_file().unwrap();
    Setup { slots, server, file, runtime, watchdog }
}

fn read_blocks(file: &File, first: u64, count: usize) -> io::Result<Pages> {
    let mut buffer = Pages::zeroed(count as u64 * BLOCK_SIZE).unwrap();
    file.read_exact_at(buffer.bytes_mut(), first * BLOCK_SIZE)?;
    Ok(buffer)
}

#[test]
fn a_loop_on_the_fuse_file_reads_right_and_leaves_nothing() {
    let Setup { slots, server, file, runtime, watchdog: _watchdog } =
        setup(Arc::new(Computed::hits(SIZE)));
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    let device = LoopDevice::attach(&file, READ_ONLY).unwrap();
    drop(file);
    assert!(device.is_direct().unwrap());
    assert!(LoopDevice::names().unwrap().contains(&(device.number(), READ_ONLY.name.into())));

    let reader = open_direct(device.path()).unwrap();
    let last = SIZE / BLOCK_SIZE - 1;
    for first in [0, 1, 12_345, 1 << 28, last] {
        let buffer = read_blocks(&reader, first, 1).unwrap();
        assert!(block_ok(buffer.bytes(), first), "block {first}");
    }
    let many = read_blocks(&reader, 7, 1024).unwrap();
    for (index, block) in many.bytes().chunks_exact(4096).enumerate() {
        assert!(block_ok(block, 7 + index as u64), "block {index} of many");
    }
    assert!(slots.counters().hit_bytes.get() >= 1029 * BLOCK_SIZE);
    assert_eq!(slots.counters().failed_reads.get(), 0);

    drop(reader);
    let number = device.number();
    let ended = server.ended();
    device.detach(Duration::from_secs(60)).unwrap();
    assert!(!fs::exists(format!("/sys/block/loop{number}/loop")).unwrap());
    assert_eq!(runtime.block_on(ended), End::Unmounted);
    assert_eq!(server.stop(Duration::ZERO), 0);
}

#[test]
fn a_detached_loop_in_use_goes_with_its_last_user() {
    let Setup { server, file, runtime, watchdog: _watchdog, .. } =
        setup(Arc::new(Computed::hits(SIZE)));
    let device = LoopDevice::attach(&file, READ_ONLY).unwrap();
    drop(file);
    let number = device.number();
    let reader = open_direct(device.path()).unwrap();
    let error = device.detach(Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("still in use"), "{error}");
    assert!(block_ok(read_blocks(&reader, 9, 1).unwrap().bytes(), 9));
    drop(reader);
    LoopDevice::wait_until_free(number, Duration::from_secs(60)).unwrap();
    assert_eq!(runtime.block_on(server.ended()), End::Unmounted);
}

#[test]
fn misses_errors_and_odd_requests() {
    let device = Arc::new(Computed::hits(SIZE));
    let Setup { slots, server, file, runtime: _runtime, watchdog: _watchdog } =
        setup(device.clone());
    device.set_absent(true);
    assert!(block_ok(read_blocks(&file, 5, 1).unwrap().bytes(), 5));
    let counters = slots.counters();
    assert_eq!((counters.misses.get(), counters.miss_latency.snapshot().count()), (1, 1));

    // An error and a panic, on both paths, each reach the reader as EIO, and serving goes on.
    for absent in [false, true] {
        device.set_absent(absent);
        for bad in [Computed::FAILING_BLOCK, Computed::PANICKING_BLOCK] {
            let error = read_blocks(&file, bad, 1).err().unwrap();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
    }
    assert_eq!(counters.failed_reads.get(), 4);

    let mut odd = [0; 100];
    assert_eq!(file.read_at(&mut odd, 3).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(file.read_at(&mut [0; 4096], SIZE).unwrap(), 0);
    assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert!(block_ok(read_blocks(&file, 6, 1).unwrap().bytes(), 6));
    drop(file);
    assert_eq!(server.stop(Duration::ZERO), 0);
}

#[test]
fn a_server_in_the_same_process_takes_over_what_was_stopped() {
    let device = Arc::new(Computed::hits(SIZE));
    let runtime = runtime();
    let slots = Arc::new(Slots::create().unwrap());
    let connection = Connection::new("burgeon-test").unwrap();
    let _watchdog = Watchdog::new(&connection);
    let options = ServeOptions::new(runtime.handle().clone());
    let start = |device: &Arc<Computed>| {
        let fuse = connection.device().try_clone_to_owned().unwrap();
        serve(fuse, slots.clone(), device.clone(), &options).unwrap()
    };
    let first = start(&device);
    let file = connection.open_file().unwrap();
    device.set_absent(true);
    device.close_gate();
    std::thread::scope(|scope| {
        let file = &file;
        let readers: Vec<_> = (0..32)
            .map(|block| scope.spawn(move || read_blocks(file, block, 1).unwrap()))
            .collect();
        device.wait_for_waiting(32);
        // Half a stop: nothing is answered, nothing is lost.
        assert_eq!(first.stop(Duration::from_millis(1)), 32);
        let fresh = Arc::new(Computed::hits(SIZE));
        let second = start(&fresh);
        for (block, reader) in (0..).zip(readers) {
            assert!(block_ok(reader.join().unwrap().bytes(), block), "block {block}");
        }
        assert_eq!(slots.counters().replayed.get(), 32);
        assert_eq!(second.stop(Duration::from_secs(60)), 0);
    });
}

#[test]
fn more_requests_than_slots_wait_for_one() {
    const READERS: u64 = 700;
    let device = Arc::new(Computed::hits(SIZE));
    let Setup { slots, server, file, runtime: _runtime, watchdog: _watchdog } =
        setup(device.clone());
    device.set_absent(true);
    device.close_gate();
    std::thread::scope(|scope| {
        let file = &file;
        let readers: Vec<_> = (0..READERS)
            .map(|block| scope.spawn(move || read_blocks(file, block, 1).unwrap()))
            .collect();
        device.wait_for_waiting(slots.slot_count());
        assert_eq!(slots.unanswered(), slots.slot_count());
        device.open_gate();
        for (block, reader) in (0..).zip(readers) {
            assert!(block_ok(reader.join().unwrap().bytes(), block), "block {block}");
        }
    });
    assert_eq!(slots.counters().misses.get(), READERS);
    assert_eq!(slots.unanswered(), 0);
    drop(file);
    server.stop(Duration::ZERO);
}

#[test]
fn misses_take_no_more_memory_than_allowed() {
    let device = Arc::new(Computed::hits(SIZE));
    let Setup { slots, server, file, runtime: _runtime, watchdog: _watchdog } =
        setup_with(device.clone(), |options| options.miss_bytes_max = 512 << 10);
    device.set_absent(true);
    // Eight reads of 1 MiB: at least 32 requests, of which two fit at once.
    std::thread::scope(|scope| {
        for reader in 0..8 {
            let file = &file;
            scope.spawn(move || {
                let buffer = read_blocks(file, reader * 256, 256).unwrap();
                for (block, bytes) in (reader * 256..).zip(buffer.bytes().chunks_exact(4096)) {
                    assert!(block_ok(bytes, block), "block {block}");
                }
            });
        }
    });
    assert_eq!(slots.counters().miss_bytes.get(), 8 << 20);
    assert!((1..=2).contains(&device.inside_max()), "{} at once", device.inside_max());
    drop(file);
    server.stop(Duration::ZERO);
}

#[test]
fn a_request_that_outlives_32_servers_is_given_up() {
    let runtime = runtime();
    let slots = Arc::new(Slots::create().unwrap());
    let connection = Connection::new("burgeon-test").unwrap();
    let _watchdog = Watchdog::new(&connection);
    let device = Arc::new(Computed::hits(SIZE));
    let options = ServeOptions::new(runtime.handle().clone());
    let start = || {
        let fuse = connection.device().try_clone_to_owned().unwrap();
        serve(fuse, slots.clone(), device.clone(), &options).unwrap()
    };
    let mut server = start();
    let file = connection.open_file().unwrap();
    device.set_absent(true);
    device.close_gate();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_blocks(&file, 1, 1).err().unwrap());
        for attempt in 1..=33 {
            device.wait_for_waiting(attempt);
            assert_eq!(server.stop(Duration::ZERO), 1, "attempt {attempt}");
            server = start();
        }
        assert_eq!(reader.join().unwrap().raw_os_error(), Some(libc::EIO));
    });
    assert_eq!((slots.unanswered(), slots.counters().failed_reads.get()), (0, 1));
    drop(file);
}

#[test]
fn an_aborted_connection_frees_its_readers() {
    let device = Arc::new(Computed::hits(SIZE));
    let runtime = runtime();
    let connection = Connection::new("burgeon-test").unwrap();
    let fuse = connection.device().try_clone_to_owned().unwrap();
    let options = ServeOptions::new(runtime.handle().clone());
    let slots = Arc::new(Slots::create().unwrap());
    let server = serve(fuse, slots, device.clone(), &options).unwrap();
    let file = connection.open_file().unwrap();
    device.set_absent(true);
    device.close_gate();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_blocks(&file, 1, 1).err().unwrap());
        device.wait_for_waiting(1);
        Connection::abort(connection.number().unwrap()).unwrap();
        assert_eq!(reader.join().unwrap().raw_os_error(), Some(libc::ECONNABORTED));
    });
    assert_eq!(runtime.block_on(server.ended()), End::Unmounted);
}

#[test]
fn a_loop_grows_and_changes_its_file() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let options = LoopOptions { name: "burgeon-test/grow", read_only: false, discard: false };
    let device = LoopDevice::attach(&file, options).unwrap();
    let size = || File::open(device.path()).unwrap().seek(SeekFrom::End(0)).unwrap();
    assert_eq!(size(), 1 << 20);
    file.set_len(2 << 20).unwrap();
    device.grow().unwrap();
    assert_eq!(size(), 2 << 20);
    device.detach(Duration::from_secs(60)).unwrap();

    let [one, two] = [1, 2].map(|byte| {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[byte; 8192], 0).unwrap();
        file
    });
    let device = LoopDevice::attach(&one, READ_ONLY).unwrap();
    let reader = open_direct(device.path()).unwrap();
    assert_eq!(read_blocks(&reader, 1, 1).unwrap().bytes(), [1; 4096]);
    device.change_file(&two).unwrap();
    assert_eq!(read_blocks(&reader, 1, 1).unwrap().bytes(), [2; 4096]);
    drop(reader);
    device.detach(Duration::from_secs(60)).unwrap();
}

#[test]
fn a_missing_capability_is_named() {
    use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
    // Capabilities belong to the thread, and this one ends with the test.
    let all = capabilities(None).unwrap();
    let effective = all.effective.difference(CapabilitySet::SYS_ADMIN);
    set_capabilities(None, CapabilitySets { effective, ..all }).unwrap();
    let error = Connection::new("burgeon-test").err().unwrap();
    assert!(error.to_string().contains("CAP_SYS_ADMIN is missing"), "{error}");
}
