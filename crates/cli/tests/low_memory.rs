//! A machine whose memory is used up: dirty pages, cold reads and commits go on, also when the
//! server is killed in the middle of a commit.
//!
//! ```text
//!   memory   ├─ kernel, programs ─┤──────────── hog (tmpfs) ────────────┤─ LEFT ─┤
//!   reader     blocks of a lazy file that is longer than LEFT, in no order, checked
//!   writer     a file of dirty pages, then syncfs ─┐ a round each
//!   killer     kill -9 of the server ◄─────────────┘ as soon as that has begun
//! ```
//!
//! It is meant for a machine of 384 MB, which `cargo xtask test` makes in the lab; on a larger one
//! the hog takes no more than it would there, and the test shows the same order of events.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Write,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use testkit::{AlignedBlock, Burgeon, PATIENCE, Pattern, Rng, Space, drop_caches, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Memory that the hog leaves: less than the lazy file has.
const LEFT: u64 = 40 << 20;
/// Most memory that the hog takes.
const HOG_MAX: u64 = 320 << 20;
/// 48 MiB of lazy data.
const COLD: Pattern = Pattern { seed: 384, blocks: 12_288 };
/// Rounds of the writer, each with a kill; 8 MiB each.
const ROUNDS: u64 = 4;
const DIRTY_BLOCKS: u64 = 2048;

fn dirty(round: u64) -> Pattern {
    Pattern { seed: round, blocks: DIRTY_BLOCKS }
}

/// Bytes that the kernel could still give to programs.
fn available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Reads until told to stop.
struct Reader {
    stop: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    thread: thread::JoinHandle<()>,
}

impl Reader {
    fn start(path: PathBuf) -> Self {
        let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop_here, reads_here) = (stop.clone(), reads.clone());
        let thread = thread::spawn(move || {
            let file = File::open(path).unwrap();
            let (mut rng, mut buffer) = (Rng::new(1), AlignedBlock::default());
            while !stop_here.load(SeqCst) {
                COLD.check(&file, rng.below(COLD.blocks), &mut buffer).unwrap();
                reads_here.fetch_add(1, SeqCst);
            }
        });
        Self { stop, reads, thread }
    }

    /// Waits for a few more reads.
    fn goes_on(&self) {
        let goal = self.reads.load(SeqCst) + 50;
        let went_on =
            wait_until(PATIENCE, || self.reads.load(SeqCst) >= goal || self.thread.is_finished());
        assert!(went_on && !self.thread.is_finished(), "the reader hangs or has failed");
    }

    fn finish(self) {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap();
    }
}

#[test]
fn a_server_killed_in_commits_on_a_full_machine_loses_nothing() {
    let space = Space::new("low-memory");
    let tree = space.make_folder("tree");
    COLD.write(&tree.join("cold")).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "image");
    fs::remove_file(tree.join("cold")).unwrap();
    let at = space.path("at");
    // Over FUSE on every kernel: that is the way with more memory of its own.
    let named = ["--writes", "w", "--write-limit", "300M", "--transport", "fuse"];
    let mounted = burgeon.mount("image", &at, &named);
    let supervisor = burgeon.status()["supervisor_pid"].clone();
    drop_caches();

    let disk = space.small_disk("hog", HOG_MAX);
    let mut hog = File::create(disk.path().join("hog")).unwrap();
    let mut taken = 0;
    while available() > LEFT && hog.write_all(&[1; 1 << 20]).is_ok() {
        taken += 1;
    }
    println!("the hog takes {taken} MiB and leaves {} MiB", available() >> 20);

    let reader = Reader::start(at.join("cold"));
    let (commits, rounds) = mpsc::sync_channel::<()>(0);
    let committed = Arc::new(AtomicU64::new(0));
    let writer = thread::spawn({
        let (at, committed) = (at.clone(), committed.clone());
        move || {
            for round in 0..ROUNDS {
                let file = File::create(at.join(format!("dirty-{round}"))).unwrap();
                for block in 0..DIRTY_BLOCKS {
                    (&file).write_all(&dirty(round).block(block)).unwrap();
                }
                commits.send(()).unwrap();
                rustix::fs::syncfs(&file).unwrap();
                committed.fetch_add(1, SeqCst);
            }
        }
    });
    let mut in_commits = 0;
    for round in 0..ROUNDS {
        reader.goes_on();
        let server = burgeon.status()["server_pid"].as_u64().unwrap();
        rounds.recv_timeout(PATIENCE).expect("the writer hangs or has failed");
        // It is not waited for: the commit goes on meanwhile.
        let server_pid = Pid::from_raw(server as i32).unwrap();
        kill_process(server_pid, Signal::KILL).unwrap();
        in_commits += u64::from(committed.load(SeqCst) == round);
        let back = wait_until(PATIENCE, || {
            burgeon.status()["server_pid"].as_u64().is_some_and(|pid| pid != server)
        });
        assert!(back, "no new server in round {round}: {:#}", burgeon.status());
    }
    assert!(wait_until(PATIENCE, || writer.is_finished()), "the writer hangs");
    writer.join().unwrap();
    reader.goes_on();
    reader.finish();
    println!("{in_commits} of {ROUNDS} kills came before the commit was done");
    assert!(in_commits > 0, "no kill came in a commit: this shows nothing");

    let status = burgeon.status();
    assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
    // Nobody but this test has killed it: not the kernel for its memory.
    assert_eq!(status["server_restarts"], ROUNDS, "{status:#}");
    assert_eq!(status["supervisor_pid"], supervisor, "{status:#}");
    drop(hog);
    drop(disk);
    burgeon.umount(mounted);
    let mounted = burgeon.mount("image", &at, &named);
    let mut buffer = AlignedBlock::default();
    for round in 0..ROUNDS {
        let file = Pattern::open_direct(&at.join(format!("dirty-{round}"))).unwrap();
        for block in 0..DIRTY_BLOCKS {
            dirty(round).check(&file, block, &mut buffer).unwrap();
        }
    }
    burgeon.umount(mounted);
}
