//! kill -9 of the serving process costs no I/O error and no wrong byte: the supervisor (this
//! process) keeps `/dev/fuse` and the slots, a successor answers what it finds. Without
//! FUSE_NOTIFY_RESEND, so on every kernel. Needs root.

#![allow(clippy::unwrap_used)]

mod common;
mod victims;

use std::{os::fd::AsFd, sync::Arc, thread, time::Duration};

use burgeon_frontend::{Connection, LoopDevice, LoopOptions, ServeOptions, Slots, serve};
use common::{Watchdog, runtime};
use testkit::scaled;
use victims::{Misses, READERS, Server, Victim, inherited, kill_under_load, read_ok, wait_for};

const FUSE_FD: i32 = 100;
const SLOTS_FD: i32 = 101;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("serve-never") => child(Misses::Never),
        Some("serve") => child(Misses::Soon),
        _ => {
            let seed = victims::seed();
            every_reader_in_flight_gets_its_bytes();
            println!("test every_reader_in_flight_gets_its_bytes ... ok");
            killed_again_and_again_under_load(seed);
            println!("test killed_again_and_again_under_load ... ok");
            println!("test result: ok. 2 passed; 0 failed; 0 ignored");
        }
    }
}

/// The life of the process that is killed.
fn child(misses: Misses) {
    let runtime = runtime();
    let slots = Arc::new(Slots::from_fd(inherited(SLOTS_FD)).unwrap());
    let options = ServeOptions::new(runtime.handle().clone());
    let victim = Arc::new(Victim { misses, slots: slots.clone() });
    let server = serve(inherited(FUSE_FD), slots, victim, &options).unwrap();
    runtime.block_on(server.ended());
}

/// Holds what must survive a server.
struct Supervisor {
    connection: Connection,
    slots: Slots,
    _watchdog: Watchdog,
}

impl Supervisor {
    fn new() -> Self {
        let connection = Connection::new("burgeon-test").unwrap();
        let watchdog = Watchdog::new(&connection);
        Self { connection, slots: Slots::create().unwrap(), _watchdog: watchdog }
    }

    fn start(&self, mode: &str) -> Server {
        let descriptors = [(self.connection.device(), FUSE_FD), (self.slots.fd(), SLOTS_FD)];
        Server::start(&[mode], descriptors)
    }
}

fn every_reader_in_flight_gets_its_bytes() {
    let supervisor = Supervisor::new();
    let mut first = supervisor.start("serve-never");
    let file = supervisor.connection.open_file().unwrap();
    // A slot is emptied after its reply: that of the open may still count.
    wait_for(|| supervisor.slots.unanswered() == 0, "the end of what opening takes");
    thread::scope(|scope| {
        let file = &file;
        let readers: Vec<_> =
            (0..READERS).map(|n| scope.spawn(move || read_ok(file, 1000 + n, 1))).collect();
        // Every request is with the server: in its slots, and nowhere else.
        wait_for(|| supervisor.slots.unanswered() == READERS as usize, "all requests");
        first.kill();
        assert_eq!(supervisor.slots.unanswered(), READERS as usize);
        let _second = supervisor.start("serve");
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(supervisor.slots.counters().replayed.get(), READERS);
        assert_eq!(supervisor.slots.counters().failed_reads.get(), 0);
    });
}

fn killed_again_and_again_under_load(seed: u64) {
    let supervisor = Supervisor::new();
    let server = supervisor.start("serve");
    let options = LoopOptions { name: "burgeon-test/kill", read_only: true, discard: false };
    let file = supervisor.connection.open_file().unwrap();
    let device = LoopDevice::attach(file.as_fd(), options).unwrap();
    drop(file);
    let number = device.number();
    let start = || supervisor.start("serve");
    let server =
        kill_under_load(device.path(), &supervisor.slots, seed, scaled(100, 25), start, server);
    let replayed = supervisor.slots.counters().replayed.get();
    println!("{replayed} requests replayed");
    assert!(replayed > 0, "no kill met a request in flight: this shows nothing");
    device.detach(Duration::from_secs(60)).unwrap();
    assert!(!std::fs::exists(format!("/sys/block/loop{number}/loop")).unwrap());
    // The connection ends with the mount, and so does the server, in good order.
    let Supervisor { connection, .. } = supervisor;
    let _device = connection.into_device();
    server.await_end();
}
