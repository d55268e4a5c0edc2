//! A device that is written to, over FUSE and a loop device, for real. Over ublk: `tests/ublk.rs`.
//! Needs root.

#![allow(clippy::unwrap_used)]

#[path = "common/changes.rs"]
mod changes;
mod common;
mod scratch;

use std::{
    fs::OpenOptions,
    os::{fd::AsRawFd, unix::fs::FileExt},
    sync::Arc,
    time::Duration,
};

use burgeon_block::BLOCK_SIZE;
use burgeon_frontend::{
    Connection, End, LoopDevice, LoopOptions, ServeOptions, Slots, remove_unused_loops, serve,
    serve_writable,
};
use changes::change_at_random;
use common::{Computed, Watchdog, runtime};
use scratch::Scratch;
use testkit::FuseRings;

const SIZE: u64 = 16 << 20;
const WRITABLE: LoopOptions =
    LoopOptions { name: "burgeon-test/writes", read_only: false, discard: true };

fn a_loop_is_written_to(connection: Connection) {
    let (runtime, slots) = (runtime(), Arc::new(Slots::create().unwrap()));
    let _watchdog = Watchdog::new(&connection);
    let truth = tempfile::tempfile().unwrap();
    truth.set_len(SIZE).unwrap();
    let device = Arc::new(Scratch::new(truth));
    let mut options = ServeOptions::new(runtime.handle().clone());
    options.rings = connection.has_rings();
    let fuse = connection.device().try_clone_to_owned().unwrap();
    let server = serve_writable(fuse, slots.clone(), device.clone(), &options).unwrap();
    let file = connection.open_file().unwrap();
    // From here on the file alone keeps the file system alive.
    drop(connection);
    let looped = LoopDevice::attach(&file, WRITABLE).unwrap();
    drop(file);
    change_at_random(looped.path(), &device, 0x5eed, true);
    let counters = slots.counters();
    assert!(counters.hits.get() > 0 && counters.misses.get() > 0);
    assert_eq!(counters.failed_reads.get(), 0);
    let ended = server.ended();
    looped.detach(Duration::from_secs(60)).unwrap();
    remove_unused_loops().unwrap();
    assert_eq!(runtime.block_on(ended), End::Unmounted);
    assert_eq!(server.stop(Duration::ZERO), 0);
}

#[test]
fn a_loop_over_the_fuse_file_is_written_to() {
    a_loop_is_written_to(Connection::writable("burgeon-test").unwrap());
}

#[test]
fn a_loop_over_rings_is_written_to() {
    let switch = FuseRings::set(true);
    let connection = Connection::writable_with_rings("burgeon-test").unwrap();
    assert_eq!(connection.has_rings(), switch.is_some());
    a_loop_is_written_to(connection);
}

#[test]
fn a_read_only_device_refuses_what_the_kernel_sends() {
    let (runtime, slots) = (runtime(), Arc::new(Slots::create().unwrap()));
    let connection = Connection::new("burgeon-test").unwrap();
    let _watchdog = Watchdog::new(&connection);
    let options = ServeOptions::new(runtime.handle().clone());
    let fuse = connection.device().try_clone_to_owned().unwrap();
    let server = serve(fuse, slots, Arc::new(Computed::hits(SIZE)), &options).unwrap();
    let path = format!("/proc/self/fd/{}", connection.mount().as_raw_fd());
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let refused = file.write_at(&[1; BLOCK_SIZE as usize], 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let refused = rustix::fs::fallocate(&file, punch, 0, BLOCK_SIZE).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::ROFS);
    file.sync_all().unwrap();
    drop(file);
    assert_eq!(server.stop(Duration::ZERO), 0);
}
