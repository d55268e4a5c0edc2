//! Servers to be killed, and the load that must not notice: what the tests of both transports
//! share.
//!
//! ```text
//!   test = supervisor ── starts itself again ──► server of a `Victim`   ◄── SIGKILL, by progress
//!      └── READERS threads: random blocks, every byte checked, counted
//! ```
//!
//! `BURGEON_SEED=n` repeats one run.

#![allow(dead_code)] // each test program uses a part

use std::{
    fs::File,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::{fs::FileExt, process::CommandExt},
    },
    path::Path,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Now, Pages, Result, Shape};
use burgeon_frontend::Slots;

use crate::common::{block_ok, fill, open_direct};

pub(crate) const SIZE: u64 = 1 << 40;
pub(crate) const READERS: u64 = 8;

/// Below this everything is served at once, for what the kernel reads of a new device.
const PROMPT: u64 = 1 << 20;

pub(crate) fn seed() -> u64 {
    let seed = std::env::var("BURGEON_SEED").map_or(0x5eed, |seed| seed.parse().unwrap());
    println!("BURGEON_SEED={seed}");
    seed
}

/// A victim's reaction to a miss.
#[derive(Clone, Copy)]
pub(crate) enum Misses {
    /// Waits for ever, and counts a fetch where the test sees it.
    Never,
    /// Answers after up to 8 ms.
    Soon,
}

/// The device of a server that will be killed.
pub(crate) struct Victim {
    pub(crate) misses: Misses,
    pub(crate) slots: Arc<Slots>,
}

impl Victim {
    fn waits(&self, offset: u64) -> bool {
        matches!(self.misses, Misses::Never) && offset >= PROMPT
    }
}

impl BlockDevice for Victim {
    fn shape(&self) -> Shape {
        Shape::read_only(SIZE)
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        if self.waits(offset) || random(offset).is_multiple_of(3) {
            return Ok(Now::Absent);
        }
        fill(offset, buf);
        Ok(Now::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        if self.waits(offset) {
            self.slots.counters().fetches.add(1);
            std::future::pending().await
        }
        tokio::time::sleep(Duration::from_millis(random(offset) >> 8 & 7)).await;
        fill(offset, buf);
        Ok(())
    }
}

/// A serving process; killed at the latest on drop.
pub(crate) struct Server(Child);

impl Server {
    /// Starts this program again with `arguments`; the descriptors get the numbers beside them.
    pub(crate) fn start<const N: usize>(
        arguments: &[&str],
        descriptors: [(BorrowedFd<'_>, RawFd); N],
    ) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let descriptors = descriptors.map(|(from, to)| (from.as_raw_fd(), to));
        // SAFETY: between fork and exec only these async-signal-safe calls are made.
        unsafe {
            command.args(arguments).pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                for (from, to) in descriptors {
                    if libc::dup2(from, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        Self(command.spawn().unwrap())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// SIGKILL, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Waits until it has ended by itself, in good order.
    pub(crate) fn await_end(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The descriptor `number` of a server, where [`Server::start`] put it.
pub(crate) fn inherited(number: RawFd) -> OwnedFd {
    // SAFETY: nothing else in this process uses that number, which the test chose.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Reads `device` with all readers while servers are killed, `kills` of them, each in its work;
/// then sees that the last one serves, and returns it.
pub(crate) fn kill_under_load(
    device: &Path,
    slots: &Slots,
    seed: u64,
    kills: u32,
    start: impl Fn() -> Server,
    mut server: Server,
) -> Server {
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut slowest = Duration::ZERO;
    thread::scope(|scope| {
        for reader in 0..READERS {
            let (device, stop, reads) = (open_direct(device).unwrap(), &stop, &reads);
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
        for kill in 0..kills {
            state = random(state);
            // By progress, not by time: each server is killed in its work, on slow machines, too.
            let goal = reads.load(Relaxed) + state % 64;
            wait_for(|| reads.load(Relaxed) >= goal, "reads");
            let begun = Instant::now();
            server.kill();
            assert_eq!(slots.counters().failed_reads.get(), 0, "kill {kill}");
            server = start();
            slowest = slowest.max(begun.elapsed());
        }
        let goal = reads.load(Relaxed) + 2 * READERS;
        wait_for(|| reads.load(Relaxed) >= goal, "reads");
    });
    println!("{kills} kills, {} reads, slowest change {slowest:?}", reads.load(Relaxed));
    server
}

pub(crate) fn wait_for(condition: impl Fn() -> bool, what: &str) {
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
pub(crate) fn read_ok(file: &File, first: u64, count: usize) {
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
