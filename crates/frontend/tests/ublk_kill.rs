//! kill -9 of the process that serves a ublk device costs no I/O error and no wrong byte: the
//! driver keeps its requests, those in flight among them, for the next server of the device.
//! Needs root and `ublk_drv`, so the lab runs it on Linux 6.12.

#![allow(clippy::unwrap_used)]

mod common;
mod victims;

use std::{
    fs::File,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{ErrorKind, Shape};
use burgeon_frontend::{
    End, ServeOptions, Slots,
    ublk::{self, Control, Queues},
};
use common::{open_direct, runtime};
use victims::{Misses, SIZE, Server, Victim, inherited, kill_under_load, read_ok, wait_for};

const SLOTS_FD: i32 = 101;
/// More than the device takes requests: 2 queues of 64, in the lab.
const WAITING: u64 = 160;
const KILLS: u32 = 25;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("serve-never") => child(Misses::Never, &arguments[2]),
        Some("serve") => child(Misses::Soon, &arguments[2]),
        _ => {
            let seed = victims::seed();
            with_every_tag_in_the_dead_servers_hands();
            println!("test with_every_tag_in_the_dead_servers_hands ... ok");
            killed_again_and_again_under_load(seed);
            println!("test killed_again_and_again_under_load ... ok");
            a_device_whose_server_has_died_is_not_started();
            println!("test a_device_whose_server_has_died_is_not_started ... ok");
            println!("test result: ok. 3 passed; 0 failed; 0 ignored");
        }
    }
}

/// The life of the process that is killed.
fn child(misses: Misses, number: &str) {
    let runtime = runtime();
    let slots = Arc::new(Slots::from_fd(inherited(SLOTS_FD)).unwrap());
    let options = ServeOptions::new(runtime.handle().clone());
    let victim = Arc::new(Victim { misses, slots: slots.clone() });
    let server = ublk::serve(number.parse().unwrap(), slots.clone(), victim, &options).unwrap();
    slots.counters().source_errors.add(1);
    assert_eq!(runtime.block_on(server.ended()), End::Unmounted);
}

/// Holds the state that must survive a server.
struct Supervisor {
    number: u32,
    slots: Slots,
}

impl Supervisor {
    fn new() -> Self {
        let number = Control::open()
            .unwrap()
            .add(&Shape::read_only(SIZE), 7, Queues::default())
            .unwrap()
            .number;
        Self { number, slots: Slots::create().unwrap() }
    }

    /// Starts a server and waits until it serves.
    fn start(&self, mode: &str) -> Server {
        let ready = &self.slots.counters().source_errors;
        let before = ready.get();
        let server =
            Server::start(&[mode, &self.number.to_string()], [(self.slots.fd(), SLOTS_FD)]);
        wait_for(|| ready.get() > before, "the server to be ready");
        server
    }

    fn make_visible(&self, server: &Server) -> PathBuf {
        Control::open().unwrap().start(self.number, server.id()).unwrap()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        Control::open().unwrap().remove(self.number).unwrap();
        assert!(!ublk::numbers().contains(&self.number));
    }
}

/// Every request that the device takes waits in the server when it dies.
fn with_every_tag_in_the_dead_servers_hands() {
    let supervisor = Supervisor::new();
    let mut first = supervisor.start("serve-never");
    let device = open_direct(&supervisor.make_visible(&first)).unwrap();
    thread::scope(|scope| {
        let device = &device;
        let readers: Vec<_> =
            (0..WAITING).map(|n| scope.spawn(move || read_ok(device, 1000 + 100 * n, 1))).collect();
        // It does not grow any more: the rest waits for tags, in the kernel.
        let fetches = &supervisor.slots.counters().fetches;
        let mut last = (fetches.get(), Instant::now());
        while last.1.elapsed() < Duration::from_secs(2) {
            if fetches.get() > last.0 {
                last = (fetches.get(), Instant::now());
            }
            thread::sleep(Duration::from_millis(10));
        }
        println!("{} of {WAITING} readers are with the server", last.0);
        first.kill();
        let begun = Instant::now();
        let _second = supervisor.start("serve");
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        println!("answered {} ms after the kill", begun.elapsed().as_millis());
        assert_eq!(supervisor.slots.counters().failed_reads.get(), 0);
    });
}

fn killed_again_and_again_under_load(seed: u64) {
    let supervisor = Supervisor::new();
    let server = supervisor.start("serve");
    let path = supervisor.make_visible(&server);
    let start = || supervisor.start("serve");
    let server = kill_under_load(&path, &supervisor.slots, seed, KILLS, start, server);
    // The device ends, and so does its server, in good order.
    Control::open().unwrap().stop(supervisor.number).unwrap();
    server.await_end();
}

/// Nobody could read it, and on Linux 6.12 nobody could take it over.
fn a_device_whose_server_has_died_is_not_started() {
    let supervisor = Supervisor::new();
    let mut server = supervisor.start("serve");
    server.kill();
    // The kernel closes its files after its end.
    let device = format!("/dev/ublkc{}", supervisor.number);
    wait_for(|| File::open(&device).is_ok(), "the end of the server's files");
    let started = Control::open().unwrap().start(supervisor.number, server.id());
    assert_eq!(started.unwrap_err().kind(), ErrorKind::Unavailable);
}
