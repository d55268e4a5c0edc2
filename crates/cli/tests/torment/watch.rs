//! Looks for threads that wait uninterruptibly, and for nothing else.

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use testkit::processes_with;

use crate::world::{Ledger, World};

/// A thread that is in D state for so long without being scheduled once hangs.
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Watch {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Watch {
    /// Watches the daemon, the commands, and the threads of the load.
    pub(crate) fn start(world: &World) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (ended, ledger) = (Arc::clone(&over), Arc::clone(&world.ledger));
        let state = world.state().to_owned();
        let thread = thread::spawn(move || {
            let mut waits = HashMap::new();
            let mut longest = Duration::ZERO;
            while !ended.load(SeqCst) {
                let processes = processes_with(&state).into_iter().chain([std::process::id()]);
                let tasks = processes.flat_map(tasks);
                longest = longest.max(look(&ledger, &mut waits, tasks));
                thread::sleep(Duration::from_millis(250));
            }
            longest
        });
        Self { over, thread }
    }

    /// Ends; gives the longest wait in D state without progress that was seen.
    pub(crate) fn finish(self) -> Duration {
        self.over.store(true, SeqCst);
        self.thread.join().unwrap_or_default()
    }
}

fn tasks(process: u32) -> Vec<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    tasks.map(|task| task.path()).collect()
}

/// Waits by thread: the number of times that it was scheduled, and since when that has not changed.
type Waits = HashMap<PathBuf, (String, Instant)>;

fn look(ledger: &Ledger, waits: &mut Waits, tasks: impl Iterator<Item = PathBuf>) -> Duration {
    let mut next = Waits::new();
    let mut longest = Duration::ZERO;
    for task in tasks {
        let status = fs::read_to_string(task.join("status")).unwrap_or_default();
        if !status.lines().any(|line| line.starts_with("State:\tD")) {
            continue;
        }
        let switches: String =
            status.lines().filter(|line| line.contains("ctxt_switches")).collect();
        let since = match waits.get(&task) {
            Some((before, since)) if *before == switches => *since,
            _ => Instant::now(),
        };
        longest = longest.max(since.elapsed());
        if since.elapsed() > LIMIT && !ledger.is_stopped() {
            let stack = fs::read_to_string(task.join("stack")).unwrap_or_default();
            ledger.violation(format!("{} hangs in D state: {stack}", task.display()));
        }
        next.insert(task, (switches, since));
    }
    *waits = next;
    longest
}
