//! The tormented system: a store behind a spoilt network, a daemon on a small disk, three mounts;
//! and the ledger of all that happened.

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use testkit::{Burgeon, Finished, Mounted, PATIENCE, Pattern, Proxy, Space, WebServer, wait_until};

use crate::{load::Load, say};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// The disk of the state directory.
const DISK: u64 = 2 << 30;

/// Events that a violation names: about three deeds.
const EVENTS_MAX: usize = 12;

/// Lines of the daemon's log that a violation shows.
const LOG_LINES: usize = 5;

/// The deeds whose errors are nobody's fault are over by now.
#[derive(Default)]
pub(crate) struct Excuse {
    now: AtomicBool,
    /// When the last excuse ended, in microseconds of the ledger's clock.
    ended_us: AtomicU64,
}

/// All that happened. Shared by everything that runs.
pub(crate) struct Ledger {
    begun: Instant,
    stopped: AtomicBool,
    violations: Mutex<Vec<String>>,
    counts: Mutex<BTreeMap<String, u64>>,
    /// The actions, and their times in microseconds: the newest [`EVENTS_MAX`].
    events: Mutex<VecDeque<(u64, String)>>,
    /// Messages of the daemon, for the report of a violation.
    log: PathBuf,
    /// Longest wait of a read without an excuse.
    slowest_us: AtomicU64,
}

impl Ledger {
    pub(crate) fn now_us(&self) -> u64 {
        self.begun.elapsed().as_micros() as u64
    }

    /// Ends the run. The words explain it without another run.
    pub(crate) fn violation(&self, words: String) {
        let mut words = format!("after {} ms: {words}", self.now_us() / 1000);
        let mut violations = lock(&self.violations);
        // Those that follow have the same reason.
        if violations.is_empty() {
            words.push_str(&self.circumstances());
        }
        say(&format!("torment: violation {words}"));
        violations.push(words);
        drop(violations);
        self.stop();
    }

    /// Something is done that may explain an error.
    pub(crate) fn event(&self, words: String) {
        let mut events = lock(&self.events);
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back((self.now_us(), words));
    }

    /// The last actions, and the last messages of the daemon.
    fn circumstances(&self) -> String {
        let now = self.now_us();
        let events = lock(&self.events);
        let last: Vec<_> = events
            .iter()
            .rev()
            .map(|(at, words)| format!("{words} {} ms ago", (now - at) / 1000))
            .collect();
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let mut said: Vec<_> = log.lines().rev().take(LOG_LINES).collect();
        said.reverse();
        format!("\n  before: {}\n  the daemon said:\n    {}", last.join(", "), said.join("\n    "))
    }

    pub(crate) fn count(&self, what: &str) {
        *lock(&self.counts).entry(what.to_owned()).or_default() += 1;
    }

    pub(crate) fn slow(&self, us: u64) {
        self.slowest_us.fetch_max(us, SeqCst);
    }

    pub(crate) fn stop(&self) {
        self.stopped.store(true, SeqCst);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(SeqCst)
    }

    pub(crate) fn is_clean(&self) -> bool {
        !self.is_stopped()
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        lock(&self.violations).clone()
    }

    pub(crate) fn report(&self) -> String {
        let counts = lock(&self.counts);
        let counts: Vec<_> = counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
        let slowest = Duration::from_micros(self.slowest_us.load(SeqCst));
        format!("{}; slowest read without an excuse {slowest:?}", counts.join(", "))
    }
}

/// One mount, and how its load is kept off it while it is changed.
pub(crate) struct Place {
    pub(crate) image: &'static str,
    pub(crate) at: PathBuf,
    pub(crate) options: &'static [&'static str],
    pub(crate) pattern: Pattern,
    pub(crate) writable: bool,
    /// The load holds it for reading during each operation, an umount for writing. Counts mounts.
    pub(crate) gate: RwLock<u64>,
    pub(crate) excuse: Excuse,
    /// When the newest read that was right began, in microseconds of the ledger's clock.
    pub(crate) newest_good_us: AtomicU64,
}

impl Place {
    /// Errors have a reason from now on.
    pub(crate) fn excuse(&self) {
        self.excuse.now.store(true, SeqCst);
    }

    /// They have none any more.
    pub(crate) fn end_excuse(&self, ledger: &Ledger) {
        self.excuse.ended_us.store(ledger.now_us(), SeqCst);
        self.excuse.now.store(false, SeqCst);
    }

    /// True if an error of an operation that began at `began_us` has an excuse.
    pub(crate) fn is_excused(&self, began_us: u64) -> bool {
        self.excuse.now.load(SeqCst) || self.excuse.ended_us.load(SeqCst) >= began_us
    }
}

/// Everything. Fields are dropped in their order: mounts before the daemon before its disk.
pub(crate) struct World {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) places: Vec<Arc<Place>>,
    pub(crate) burgeon: Burgeon,
    pub(crate) proxy: Proxy,
    _web: WebServer,
    pub(crate) disk: Mounted,
    pub(crate) space: Space,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let space = Space::new("torment");
        let disk = space.small_disk("disk", DISK);
        let store = space.path("files/images");
        let builder =
            Burgeon::with_state(PROGRAM, space.path("builder")).option("--store").option(&store);
        let pattern = |image, blocks| {
            let tree = space.make_folder(&format!("tree-{image}"));
            let pattern = Pattern { seed, blocks };
            pattern.write(&tree.join("pattern")).unwrap();
            fs::write(tree.join("small"), image).unwrap();
            builder.build(&tree, image);
            fs::remove_dir_all(tree).unwrap();
            pattern
        };
        let patterns = [pattern("large", 4096), pattern("little", 1024)];
        drop(builder);
        let web = WebServer::nginx(&space.path("files"), &space.path("nginx")).unwrap();
        let proxy = Proxy::new(web.address(), seed).unwrap();
        let url = format!("http://{}/images", proxy.address());
        let burgeon =
            Burgeon::with_state(PROGRAM, disk.path().join("state")).option("--store").option(url);
        let place = |image, name: &str, options, pattern, writable| {
            Arc::new(Place {
                image,
                at: space.make_folder(name),
                options,
                pattern,
                writable,
                gate: RwLock::new(0),
                excuse: Excuse::default(),
                newest_good_us: AtomicU64::new(0),
            })
        };
        let places = vec![
            place("large", "plain", &["--write-limit", "256M"], patterns[0], true),
            place(
                "large",
                "kept",
                &["--write-limit", "256M", "--writes", "kept"],
                patterns[0],
                true,
            ),
            place("little", "read-only", &["--read-only"], patterns[1], false),
        ];
        let ledger = Arc::new(Ledger {
            begun: Instant::now(),
            stopped: AtomicBool::new(false),
            violations: Mutex::default(),
            counts: Mutex::default(),
            events: Mutex::default(),
            log: burgeon.state().join("run/daemon.log"),
            slowest_us: AtomicU64::new(0),
        });
        let world = Self { ledger, places, burgeon, proxy, _web: web, disk, space };
        for place in &world.places {
            assert!(world.mount(place), "{:?}", world.ledger.violations());
        }
        world
    }

    /// Starts readers and writers.
    pub(crate) fn load(&self) -> Load {
        Load::start(&self.ledger, &self.places)
    }

    /// Runs a command that must end within its bound; `None` if it does not.
    pub(crate) fn run(&self, arguments: &[&str]) -> Option<Finished> {
        let outputs = ["out", "err"].map(|name| self.space.path(name));
        let [out, err] = &outputs;
        let file = |path: &Path| fs::File::create(path).unwrap();
        let mut command = self.burgeon.command(arguments);
        let mut child =
            command.stdout(file(out)).stderr(file(err)).stdin(Stdio::null()).spawn().unwrap();
        let mut status = None;
        let ended = wait_until(PATIENCE, || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        if !ended {
            let id = child.id();
            let at = read(Path::new(&format!("/proc/{id}/stack")));
            self.ledger.violation(format!("burgeon {arguments:?} does not end: {at}{}", read(err)));
            let _ = child.kill();
            return None;
        }
        let code = status.and_then(|status| status.code());
        Some(Finished { code, stdout: read(out), stderr: read(err) })
    }

    /// Runs a command that must succeed.
    pub(crate) fn ok(&self, arguments: &[&str]) -> bool {
        self.ends_with(&[0], arguments)
    }

    /// Runs a command that must end with one of these exit codes.
    pub(crate) fn ends_with(&self, codes: &[i32], arguments: &[&str]) -> bool {
        let Some(finished) = self.run(arguments) else { return false };
        let good = finished.code.is_some_and(|code| codes.contains(&code));
        if !good {
            let used = self.disk_usage();
            self.ledger.violation(format!("burgeon {arguments:?}: {finished:#?}\n{used}"));
        }
        good
    }

    /// Contents of the state directory's disk, for an error that names it as full.
    fn disk_usage(&self) -> String {
        let said = |program: &str, options: &[&str]| {
            let output = Command::new(program).args(options).arg(self.disk.path()).output();
            output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default()
        };
        said("df", &["-k"]) + &said("du", &["-ak", "--threshold=1M"])
    }

    /// Mounts `place`, and lets its load begin.
    pub(crate) fn mount(&self, place: &Place) -> bool {
        let mut gate = place.gate.write().unwrap_or_else(PoisonError::into_inner);
        *gate += 1;
        let at = place.at.display().to_string();
        let mut arguments = vec!["mount", place.image, &at];
        arguments.extend(place.options);
        self.ok(&arguments)
    }

    /// Unmounts and mounts again, with its load held off.
    pub(crate) fn remount(&self, place: &Place) -> bool {
        self.remount_after(place, || ())
    }

    /// The same, with something done in between.
    pub(crate) fn remount_after(&self, place: &Place, between: impl FnOnce()) -> bool {
        let mut gate = place.gate.write().unwrap_or_else(PoisonError::into_inner);
        *gate += 1;
        let at = place.at.display().to_string();
        self.ledger.event(format!("{at} mounted anew"));
        let mut arguments = vec!["mount", place.image, &at];
        arguments.extend(place.options);
        let unmounted = self.ok(&["umount", &at]);
        between();
        unmounted && self.ok(&arguments)
    }

    /// A process of the daemon, by its name in `status`, once there is one.
    pub(crate) fn process(&self, which: &str) -> Option<u32> {
        let mut id = None;
        let there = wait_until(PATIENCE, || {
            let text = self.run(&["status", "--json"]).map(|f| f.stdout).unwrap_or_default();
            let status: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
            id = status[which].as_u64().and_then(|id| u32::try_from(id).ok());
            id.is_some() || self.ledger.is_stopped()
        });
        if !there {
            self.ledger.violation(format!("status names no {which}"));
        }
        id
    }

    /// Waits until something right was read from each place by a read that began from now on. One
    /// that began before may be an answer of a server that has died since, and says nothing of the
    /// next one: if the supervisor were killed now, both would be dead, which costs errors.
    pub(crate) fn await_reads(&self, after: &str) {
        let since_us = self.ledger.now_us();
        let is_served = |place: &Arc<Place>| place.newest_good_us.load(SeqCst) > since_us;
        let served =
            wait_until(PATIENCE, || self.places.iter().all(is_served) || self.ledger.is_stopped());
        if !served {
            let waiting = self.places.iter().find(|place| !is_served(place));
            let name = waiting.map(|place| place.at.display().to_string());
            let status = self.run(&["status"]).map(|f| f.stdout + &f.stderr);
            self.ledger.violation(format!("after {after}, {name:?} reads nothing: {status:#?}"));
        }
    }

    /// The folder of the state directory.
    pub(crate) fn state(&self) -> &Path {
        self.burgeon.state()
    }

    /// Unmounts everything. Dropping the rest shows that nothing is left.
    pub(crate) fn end(self) {
        for place in &self.places {
            self.burgeon.ok(&["umount", &place.at.display().to_string()]);
        }
        self.burgeon.ok(&["shutdown"]);
        let left = fs::read_dir(self.state().join("mounts")).unwrap().count();
        assert_eq!(left, 0, "folders of mounts are left in {}", self.state().display());
        let _ = &self.disk;
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
