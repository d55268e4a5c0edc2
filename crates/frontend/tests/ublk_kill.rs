//! kill -9 of the process that serves a ublk device costs no I/O error and no wrong byte: the
//! driver keeps its requests, those in flight among them, for whoever serves the device next.
//! Needs root and `ublk_drv`, so the lab runs it on Linux 6.12.
//!
//! `BURGEON_SEED=n` repeats one run.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    fs::File,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::{fs::FileExt, process::CommandExt},
    },
    path::PathBuf,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Pages, Result, TryRead};
use burgeon_frontend::{
    End, ServeOptions, Slots,
    ublk::{self, Control},
};
use common::{block_ok, fill, open_direct, runtime};

const SIZE: u64 = 1 << 40;
const SLOTS_FD: i32 = 101;
/// As many as the device takes requests: 2 queues of 64, in the lab.
const WAITING: u64 = 160;
const READERS: u64 = 8;
const KILLS: u32 = 25;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("serve-never") => child(Misses::Never, &arguments[2]),
        Some("serve") => child(Misses::Soon, &arguments[2]),
        _ => {
            let seed = match std::env::var("BURGEON_SEED") {
                Ok(seed) => seed.parse().unwrap(),
                Err(_) => 0x5eed,
            };
            println!("BURGEON_SEED={seed}");
            with_every_tag_in_the_dead_servers_hands();
            println!("test with_every_tag_in_the_dead_servers_hands ... ok");
            killed_again_and_again_under_load(seed);
            println!("test killed_again_and_again_under_load ... ok");
            println!("test result: ok. 2 passed; 0 failed; 0 ignored");
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

struct Victim {
    misses: Misses,
    slots: Arc<Slots>,
}

impl BlockDevice for Victim {
    fn size(&self) -> u64 {
        SIZE
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<TryRead> {
        // The first blocks are read when the device is started.
        let waits = matches!(self.misses, Misses::Never) && offset >= 1 << 20;
        if waits || random(offset).is_multiple_of(3) {
            return Ok(TryRead::Absent);
        }
        fill(offset, buf);
        Ok(TryRead::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        if matches!(self.misses, Misses::Never) && offset >= 1 << 20 {
            // Where the other process sees it.
            self.slots.counters().fetches.add(1);
            std::future::pending().await
        }
        tokio::time::sleep(Duration::from_millis(random(offset) >> 8 & 7)).await;
        fill(offset, buf);
        Ok(())
    }
}

/// The life of the process that is killed.
fn child(misses: Misses, number: &str) {
    // SAFETY: `Supervisor::start` put the descriptor there, and nobody else uses it.
    let slots = unsafe { OwnedFd::from_raw_fd(SLOTS_FD) };
    let runtime = runtime();
    let slots = Arc::new(Slots::from_fd(slots).unwrap());
    let options = ServeOptions::new(runtime.handle().clone());
    let victim = Arc::new(Victim { misses, slots: slots.clone() });
    let server = ublk::serve(number.parse().unwrap(), slots.clone(), victim, &options).unwrap();
    slots.counters().source_errors.add(1);
    assert_eq!(runtime.block_on(server.ended()), End::Unmounted);
}

/// Holds what must survive a server.
struct Supervisor {
    number: u32,
    slots: Slots,
}

impl Supervisor {
    fn new() -> Self {
        let number = Control::open().unwrap().add(SIZE, 7).unwrap().number;
        Self { number, slots: Slots::create().unwrap() }
    }

    /// Starts a server and waits until it serves.
    fn start(&self, mode: &str) -> Server {
        let ready = &self.slots.counters().source_errors;
        let before = ready.get();
        let mut command = Command::new(std::env::current_exe().unwrap());
        let slots = self.slots.fd().as_raw_fd();
        // SAFETY: between fork and exec only these async-signal-safe calls are made.
        unsafe {
            command.arg(mode).arg(self.number.to_string()).pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                match libc::dup2(slots, SLOTS_FD) {
                    SLOTS_FD => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let server = Server(command.spawn().unwrap());
        wait_for(|| ready.get() > before, "the server to be ready");
        server
    }

    fn make_visible(&self, server: &Server) -> PathBuf {
        Control::open().unwrap().start(self.number, server.0.id()).unwrap()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        Control::open().unwrap().remove(self.number).unwrap();
        assert!(!ublk::numbers().contains(&self.number));
    }
}

/// A serving process; killed at the latest on drop.
struct Server(Child);

impl Server {
    /// SIGKILL, and waits until it is gone.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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
    let mut server = supervisor.start("serve");
    let path = supervisor.make_visible(&server);
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut slowest = Duration::ZERO;
    thread::scope(|scope| {
        for reader in 0..READERS {
            let (device, stop, reads) = (open_direct(&path).unwrap(), &stop, &reads);
            scope.spawn(move || {
                let mut state = random(seed ^ reader << 32);
                while !stop.load(Relaxed) {
                    state = random(state);
                    // Mostly single blocks, some reads that the kernel has to cut.
                    let count = if state.is_multiple_of(16) { 96 } else { 1 + state % 4 };
                    read_ok(&device, state >> 8 & 0xff_ffff, count as usize);
                    reads.fetch_add(1, Relaxed);
                }
            });
        }
        // A failed assertion below must not leave the others reading for ever.
        let _stop = StopOnDrop(&stop);
        let mut state = random(seed);
        for kill in 0..KILLS {
            state = random(state);
            // By progress, not by time: each server is killed in its work, on slow machines, too.
            let goal = reads.load(Relaxed) + state % 64;
            wait_for(|| reads.load(Relaxed) >= goal, "reads");
            let begun = Instant::now();
            server.kill();
            assert_eq!(supervisor.slots.counters().failed_reads.get(), 0, "kill {kill}");
            server = supervisor.start("serve");
            slowest = slowest.max(begun.elapsed());
        }
        // The last server must be seen to serve.
        let goal = reads.load(Relaxed) + 2 * READERS;
        wait_for(|| reads.load(Relaxed) >= goal, "reads");
    });
    println!("{KILLS} kills, {} reads, slowest change {slowest:?}", reads.load(Relaxed));
    // The device ends, and so does its server, in good order.
    Control::open().unwrap().stop(supervisor.number).unwrap();
    assert!(server.0.wait().unwrap().success());
}

fn wait_for(condition: impl Fn() -> bool, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "waited for {what} in vain");
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
