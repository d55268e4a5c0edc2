//! kill -9 of the serving process costs no I/O error and no wrong byte: the supervisor (this
//! process) keeps `/dev/fuse` and the slots, a successor answers what it finds. Without
//! FUSE_NOTIFY_RESEND, so on every kernel. Needs root.
//!
//! `BURGEON_SEED=n` repeats one run.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    fs::File,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{fs::FileExt, process::CommandExt},
    },
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Pages, Result, TryRead};
use burgeon_frontend::{Connection, LoopDevice, LoopOptions, ServeOptions, Slots, serve};
use common::{Watchdog, block_ok, fill, open_direct, runtime};

const SIZE: u64 = 1 << 40;
const FUSE_FD: i32 = 100;
const SLOTS_FD: i32 = 101;
const READERS: u64 = 8;
const KILLS: u32 = 100;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("serve-never") => child(Misses::Never),
        Some("serve") => child(Misses::Soon),
        _ => {
            let seed = match std::env::var("BURGEON_SEED") {
                Ok(seed) => seed.parse().unwrap(),
                Err(_) => 0x5eed,
            };
            println!("BURGEON_SEED={seed}");
            every_reader_in_flight_gets_its_bytes();
            println!("test every_reader_in_flight_gets_its_bytes ... ok");
            killed_again_and_again_under_load(seed);
            println!("test killed_again_and_again_under_load ... ok");
        }
    }
}

/// What the victim does with a miss.
#[derive(Clone, Copy)]
enum Misses {
    /// Waits for ever.
    Never,
    /// Answers after up to 8 ms.
    Soon,
}

struct Victim(Misses);

impl BlockDevice for Victim {
    fn size(&self) -> u64 {
        SIZE
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<TryRead> {
        if random(offset).is_multiple_of(3) || matches!(self.0, Misses::Never) {
            return Ok(TryRead::Absent);
        }
        fill(offset, buf);
        Ok(TryRead::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match self.0 {
            Misses::Never => std::future::pending().await,
            Misses::Soon => {
                tokio::time::sleep(Duration::from_millis(random(offset) >> 8 & 7)).await;
                fill(offset, buf);
                Ok(())
            }
        }
    }
}

/// The life of the process that is killed.
fn child(misses: Misses) {
    // SAFETY: `Supervisor::start` put these descriptors there, and nobody else uses them.
    let [fuse, slots] = [FUSE_FD, SLOTS_FD].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let runtime = runtime();
    let slots = Arc::new(Slots::from_fd(slots).unwrap());
    let options = ServeOptions::new(runtime.handle().clone());
    let server = serve(fuse, slots, Arc::new(Victim(misses)), &options).unwrap();
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

    fn start(&self, mode: &str) -> Victims {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let fds = [
            (self.connection.device().as_raw_fd(), FUSE_FD),
            (self.slots.fd().as_raw_fd(), SLOTS_FD),
        ];
        // SAFETY: between fork and exec only these async-signal-safe calls are made.
        unsafe {
            command.arg(mode).pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                for (from, to) in fds {
                    if libc::dup2(from, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        Victims(command.spawn().unwrap())
    }
}

/// A serving process; killed at the latest on drop.
struct Victims(Child);

impl Victims {
    /// SIGKILL, and waits until it is gone.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Victims {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn every_reader_in_flight_gets_its_bytes() {
    let supervisor = Supervisor::new();
    let mut first = supervisor.start("serve-never");
    let file = supervisor.connection.open_file().unwrap();
    thread::scope(|scope| {
        let file = &file;
        let readers: Vec<_> =
            (0..READERS).map(|n| scope.spawn(move || read_ok(file, n, 1))).collect();
        // Every request is with the server: in its slots, and nowhere else.
        let deadline = Instant::now() + Duration::from_secs(60);
        while supervisor.slots.unanswered() < READERS as usize {
            assert!(Instant::now() < deadline, "{} came", supervisor.slots.unanswered());
            thread::sleep(Duration::from_millis(1));
        }
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
    let mut server = supervisor.start("serve");
    let options = LoopOptions { name: "burgeon-test/kill", read_only: true, discard: false };
    let file = supervisor.connection.open_file().unwrap();
    let device = LoopDevice::attach(file.as_fd(), options).unwrap();
    drop(file);
    let number = device.number();
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for reader in 0..READERS {
            let (device, stop, reads) = (open_direct(device.path()).unwrap(), &stop, &reads);
            scope.spawn(move || {
                let mut state = random(seed ^ reader << 32);
                while !stop.load(Relaxed) {
                    state = random(state);
                    // Mostly single blocks, some reads that FUSE has to cut.
                    let count = if state.is_multiple_of(16) { 96 } else { 1 + state % 4 };
                    read_ok(&device, state >> 8 & 0xff_ffff, count as usize);
                    reads.fetch_add(1, Relaxed);
                }
            });
        }
        // A failed assertion above must not leave the others reading for ever.
        let _stop = StopOnDrop(&stop);
        let mut state = random(seed);
        for kill in 0..KILLS {
            state = random(state);
            // By progress, not by time: each server is killed in its work, on slow machines, too.
            wait_for(&reads, reads.load(Relaxed) + state % 64);
            server.kill();
            assert_eq!(supervisor.slots.counters().failed_reads.get(), 0, "kill {kill}");
            server = supervisor.start("serve");
        }
        // The last server must be seen to serve.
        wait_for(&reads, reads.load(Relaxed) + 2 * READERS);
    });
    let replayed = supervisor.slots.counters().replayed.get();
    println!("{KILLS} kills, {} reads, {replayed} requests replayed", reads.load(Relaxed));
    assert!(replayed > 0, "no kill met a request in flight: this shows nothing");
    device.detach(Duration::from_secs(60)).unwrap();
    assert!(!std::fs::exists(format!("/sys/block/loop{number}/loop")).unwrap());
    // The connection ends with the mount, and so does the server, in good order.
    let Supervisor { connection, .. } = supervisor;
    let _device = connection.into_device();
    assert!(server.0.wait().unwrap().success());
}

/// Waits until `reads` has reached `count`.
fn wait_for(reads: &AtomicU64, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while reads.load(Relaxed) < count {
        assert!(Instant::now() < deadline, "reads stopped at {}", reads.load(Relaxed));
        thread::sleep(Duration::from_micros(50));
    }
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Reads `count` blocks from block `first` on and checks every byte.
fn read_ok(file: &File, first: u64, count: usize) {
    let mut buffer = Pages::zeroed(count as u64 * BLOCK_SIZE).unwrap();
    file.read_exact_at(buffer.bytes_mut(), first * BLOCK_SIZE).unwrap();
    for (block, bytes) in (first..).zip(buffer.bytes().chunks_exact(BLOCK_SIZE as usize)) {
        assert!(block_ok(bytes, block), "block {block} has wrong bytes");
    }
}

/// SplitMix64.
fn random(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
