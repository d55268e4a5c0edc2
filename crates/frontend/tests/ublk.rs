//! A ublk device: right bytes, misses in parallel, errors, sizes, and nothing left behind.
//! Needs root and `ublk_drv`, so the lab runs it on Linux 6.12.

#![allow(clippy::unwrap_used)]

#[path = "common/changes.rs"]
mod changes;
mod common;
mod scratch;

use std::{fs::File, io, os::unix::fs::FileExt, path::PathBuf, sync::Arc, thread};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Pages, Shape};
use burgeon_frontend::{
    End, ServeOptions, Slots,
    ublk::{self, Control, Driver, Queues},
};
use changes::change_at_random;
use common::{Computed, Removed, block_ok, open_direct, runtime};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use scratch::Scratch;
use tokio::runtime::Runtime;

const SIZE: u64 = 1 << 40;
const OWNER: u64 = 0x7465_7374_0000_0000;

/// A started device with its server in this process.
struct Served {
    number: u32,
    path: PathBuf,
    slots: Arc<Slots>,
    device: Arc<Computed>,
    server: Option<ublk::UblkServer>,
    runtime: Runtime,
}

impl Served {
    fn new(size: u64) -> Self {
        let (runtime, slots) = (runtime(), Arc::new(Slots::create().unwrap()));
        let device = Arc::new(Computed::hits(size));
        let mut control = Control::open().unwrap();
        let number = control.add(&Shape::read_only(size), OWNER, Queues::default()).unwrap().number;
        let options = ServeOptions::new(runtime.handle().clone());
        let server = ublk::serve(number, slots.clone(), device.clone(), &options).unwrap();
        let path = control.start(number, std::process::id()).unwrap();
        Self { number, path, slots, device, server: Some(server), runtime }
    }

    fn open(&self) -> File {
        open_direct(&self.path).unwrap()
    }

    fn serve_again(&mut self) {
        let options = ServeOptions::new(self.runtime.handle().clone());
        let device = self.device.clone();
        self.server = Some(ublk::serve(self.number, self.slots.clone(), device, &options).unwrap());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let ended = self.server.as_ref().map(|server| server.ended());
        Control::open().unwrap().stop(self.number).unwrap();
        if let Some(ended) = ended {
            assert_eq!(self.runtime.block_on(ended), End::Unmounted);
        }
        drop(self.server.take());
        Control::open().unwrap().remove(self.number).unwrap();
        assert!(!ublk::numbers().contains(&self.number));
        assert!(!self.path.exists(), "{:?} is left", self.path);
    }
}

fn read(file: &File, block: u64, count: usize) -> io::Result<()> {
    let mut buffer = Pages::zeroed(count as u64 * BLOCK_SIZE).unwrap();
    file.read_exact_at(buffer.bytes_mut(), block * BLOCK_SIZE)?;
    for (n, bytes) in buffer.bytes().chunks_exact(BLOCK_SIZE as usize).enumerate() {
        assert!(block_ok(bytes, block + n as u64), "block {} has wrong bytes", block + n as u64);
    }
    Ok(())
}

#[test]
fn every_byte_is_right_hit_or_miss_small_or_large() {
    let served = Served::new(SIZE);
    let file = served.open();
    for absent in [false, true] {
        served.device.set_absent(absent);
        for (block, count) in [(0, 1), (1, 1), (77, 3), (1 << 20, 64), (12_345, 700)] {
            read(&file, block, count).unwrap();
        }
        read(&file, SIZE / BLOCK_SIZE - 2, 2).unwrap();
    }
    let counters = served.slots.counters();
    assert!(counters.hits.get() > 5 && counters.misses.get() > 5);
    assert_eq!(counters.failed_reads.get(), 0);
}

#[test]
fn the_device_is_read_only_with_blocks_of_4_kib_up_to_4_eib() {
    let served = Served::new(4 << 60);
    let queue = PathBuf::from(format!("/sys/block/ublkb{}", served.number));
    let value = |name| std::fs::read_to_string(queue.join(name)).unwrap().trim().to_owned();
    assert_eq!(value("ro"), "1");
    assert_eq!(value("size"), ((4u64 << 60) / 512).to_string());
    assert_eq!(value("queue/logical_block_size"), "4096");
    assert_eq!(value("queue/discard_max_bytes"), "0");
    // Some kernels let it be opened for writing, none lets it be written.
    let writable = std::fs::OpenOptions::new().write(true).open(&served.path);
    assert!(writable.is_err() || writable.unwrap().write_at(&[0; 4096], 0).is_err());
    read(&served.open(), (4 << 60) / BLOCK_SIZE - 1, 1).unwrap();
}

#[test]
fn misses_wait_side_by_side_and_hits_pass_them() {
    const READERS: usize = 16;
    let served = Served::new(SIZE);
    served.device.close_gate();
    served.device.set_absent(true);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS as u64)
            .map(|n| {
                let file = served.open();
                scope.spawn(move || read(&file, 1000 * n, 2).unwrap())
            })
            .collect();
        served.device.wait_for_waiting(READERS);
        served.device.set_absent(false);
        read(&served.open(), 5, 1).unwrap();
        assert!(readers.iter().all(|reader| !reader.is_finished()));
        served.device.open_gate();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(served.device.inside_max(), READERS);
}

#[test]
fn errors_and_panics_are_eio_and_the_device_lives_on() {
    let served = Served::new(SIZE);
    let file = served.open();
    for absent in [false, true] {
        served.device.set_absent(absent);
        for block in [Computed::FAILING_BLOCK, Computed::PANICKING_BLOCK] {
            let error = read(&file, block, 1).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
        }
        read(&file, 9, 1).unwrap();
    }
    assert_eq!(served.slots.counters().failed_reads.get(), 4);
}

#[test]
fn a_server_that_leaves_leaves_its_requests_to_the_next() {
    let mut served = Served::new(SIZE);
    served.device.close_gate();
    served.device.set_absent(true);
    let file = served.open();
    let reader = thread::spawn(move || read(&file, 4711, 2).unwrap());
    served.device.wait_for_waiting(1);
    drop(served.server.take());
    served.device.open_gate();
    served.serve_again();
    reader.join().unwrap();
    read(&served.open(), 1, 1).unwrap();
    assert_eq!(served.slots.counters().failed_reads.get(), 0);
}

#[test]
fn a_server_takes_a_device_over_with_the_rights_that_it_had_once() {
    let mut served = Served::new(SIZE);
    drop(served.server.take());
    let (number, slots, device) = (served.number, served.slots.clone(), served.device.clone());
    let mut options = ServeOptions::new(served.runtime.handle().clone());
    let driver = Arc::new(Driver::confined().unwrap());
    // The threads of its queues inherit the capabilities of this thread.
    let thread = thread::spawn(move || {
        let none = CapabilitySet::empty();
        let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
        set_capabilities(None, sets).unwrap();
        let refused = ublk::serve(number, slots.clone(), device.clone(), &options);
        let refused = refused.err().unwrap();
        let cause = refused.cause::<io::Error>().and_then(io::Error::raw_os_error);
        assert_eq!(cause, Some(libc::EPERM), "{refused}");
        options.driver = driver;
        ublk::serve(number, slots, device, &options).unwrap()
    });
    served.server = Some(thread.join().unwrap());
    let device = Control::open().unwrap().device(number).unwrap().unwrap();
    assert_eq!(device.opener, Some(std::process::id()));
    read(&served.open(), 4711, 2).unwrap();
    assert_eq!(served.slots.counters().failed_reads.get(), 0);
}

#[test]
fn a_device_is_known_until_it_is_removed() {
    let mut control = Control::open().unwrap();
    let added = control.add(&Shape::read_only(SIZE), OWNER, Queues::default()).unwrap();
    assert!(ublk::numbers().contains(&added.number));
    assert_eq!(control.device(added.number).unwrap(), Some(added));
    assert_eq!((added.owner, added.started), (OWNER, false));
    control.remove(added.number).unwrap();
    control.remove(added.number).unwrap();
    assert_eq!(control.device(added.number).unwrap(), None);
    assert!(!ublk::numbers().contains(&added.number));
}

#[test]
fn a_device_of_another_size_is_not_served() {
    let mut control = Control::open().unwrap();
    let added = control.add(&Shape::read_only(SIZE), OWNER, Queues::default()).unwrap();
    let (runtime, slots) = (runtime(), Arc::new(Slots::create().unwrap()));
    let options = ServeOptions::new(runtime.handle().clone());
    let other = Arc::new(Computed::hits(SIZE / 2));
    let refused = ublk::serve(added.number, slots, other, &options);
    control.remove(added.number).unwrap();
    assert_eq!(refused.err().unwrap().kind(), burgeon_block::ErrorKind::Invalid);
}

#[test]
fn a_buffered_reader_gets_the_same_bytes() {
    let served = Served::new(SIZE);
    read(&File::open(&served.path).unwrap(), 321, 9).unwrap();
}

#[test]
fn a_device_is_written_to() {
    let (runtime, slots) = (runtime(), Arc::new(Slots::create().unwrap()));
    let truth = tempfile::tempfile().unwrap();
    truth.set_len(16 << 20).unwrap();
    let device = Arc::new(Scratch::new(truth));
    let mut control = Control::open().unwrap();
    let number = control.add(&device.shape(), OWNER, Queues::default()).unwrap().number;
    let removed = Removed(number);
    let options = ServeOptions::new(runtime.handle().clone());
    let server = ublk::serve_writable(number, slots.clone(), device.clone(), &options).unwrap();
    let path = control.start(number, std::process::id()).unwrap();
    change_at_random(&path, &device, 0x5eed, true);
    let counters = slots.counters();
    assert!(counters.hits.get() > 0 && counters.misses.get() > 0);
    assert_eq!(counters.failed_reads.get(), 0);
    drop((server, removed));
}
