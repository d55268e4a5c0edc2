//! Everything that has to hold, one step after another, with one line at the end.
//!
//! ```text
//!   fmt ─► clippy ─► compile ─┬─► cargo test ────────────────────────────────────┬─► cargo deny ─► fuzzers ─► nothing left behind
//!                             └─► older kernels, compiling fuzzers, budget ──────┤                                 │
//!                                   "test result" lines, added up ───────────────┴─────────────────────────────────┴─► "N passed, N failed"
//! ```
//!
//! The tests of this host wait for disks, deaths and time limits; an emulated guest keeps one
//! processor busy. So they run in two lanes, and the lane that ends first takes what is left of the
//! other. The fuzzers are compiled there, too, and then share two lanes. A failed step does not
//! stop the ones after it. A step whose tool is not installed is named as left out; it counts
//! neither way. What hangs is killed, and what has not begun when the time is up fails: who waits
//! for the summary waits for a bounded time.

use std::{
    iter,
    path::Path,
    process::Command,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    budget,
    cargo::{cargo, works},
    fuzz::{FUZZ, Fuzzers},
    lab::{self, Lists},
    made::{Made, TEST_DIR},
    outcome::{Errors, Outcome, Patience, Tally, watch},
    programs::QUICK,
};

/// Duration of each fuzz target in a bounded run, in seconds, unless asked otherwise.
const FUZZ_SECONDS: u32 = 12;

/// Time for everything, in minutes, unless asked otherwise. `.ci/run` gives what is left of its
/// own.
const MINUTES: u64 = 50;

/// Time for which a test may be silent. The slowest say something each minute on an idle machine.
const SILENCE: Duration = Duration::from_secs(720);

/// Number of the slowest test programs, and of the lab's slowest tests, named at the end.
const SLOWEST: usize = 20;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seconds that each fuzz target runs.
    #[arg(long, default_value_t = FUZZ_SECONDS)]
    fuzz_seconds: u32,
    /// Minutes after which nothing new begins, and what runs is killed: what is left counts as
    /// failed.
    #[arg(long, default_value_t = MINUTES)]
    minutes: u64,
    /// Leave the older kernels out: for a quick run, never in CI.
    #[arg(long)]
    no_lab: bool,
    /// Arguments for `cargo test`, such as a crate or a test's name.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs all steps; an error when any failed.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let made = Made::begin(root)?;
    let mut steps = Steps::new(root, &made);
    steps.until = Some(steps.begun + Duration::from_secs(60 * options.minutes));
    steps.lints();
    // To run them is to compile them, later.
    if !Fuzzers::are_installed() {
        steps.lints_of_fuzzers();
    }
    steps.tests_in_lanes(&options.arguments, options.no_lab)?;
    steps.licences();
    steps.fuzz(options.fuzz_seconds)?;
    let left = made.left();
    left.iter().for_each(|left| println!("left behind: {left}"));
    steps.count("nothing left behind", left.is_empty());
    made.remove();
    steps.finish()
}

/// Runs the tests that need neither root nor a mount; an error when any failed.
pub(crate) fn run_quick(root: &Path) -> Result<()> {
    let made = Made::begin(root)?;
    let mut steps = Steps::new(root, &made);
    steps.lints();
    steps.lints_of_fuzzers();
    let mut arguments = vec!["--lib".to_owned(), "--bins".to_owned()];
    arguments.extend(QUICK.iter().flat_map(|name| ["--test".to_owned(), (*name).to_owned()]));
    steps.compile(&arguments);
    let tests = steps.tests(&arguments)?;
    steps.add(tests.watch(true)?);
    made.remove();
    steps.finish()
}

/// Runs the kernel tests on older kernels that take too long for [`run`]; an error when any failed.
pub(crate) fn run_kernels(root: &Path) -> Result<()> {
    let made = Made::begin(root)?;
    let mut steps = Steps::new(root, &made);
    testkit::debian_root().context("guests have no network, and need a Debian root")?;
    let runs = steps.lab(Lists::Long);
    steps.in_two_lanes("older kernels, in two lanes", None, runs.into_iter())?;
    made.remove();
    steps.finish()
}

/// A command of a lane.
struct Run {
    name: String,
    command: Command,
    errors: Errors,
    /// It has no tests of its own, and counts as one.
    is_check: bool,
    /// Time for which it may be silent.
    silence: Duration,
    /// Nothing waits for it longer.
    until: Option<Instant>,
}

impl Run {
    /// Runs it. Its output is shown as it comes, or when it has ended.
    fn watch(self, live: bool) -> Result<Outcome> {
        let Self { name, mut command, errors, is_check, silence, until } = self;
        let mut text = String::new();
        if let Some(until) = until {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                println!("== {name}: no time left");
                return Ok(Outcome::not_begun(&name));
            }
            command.env(lab::LIMIT, left.min(lab::LONGEST).as_secs().to_string());
        }
        let patience = Patience { silence, until };
        let mut outcome = watch(&name, command, errors, patience, |line| match live {
            true => println!("{line}"),
            false => text.extend([line, "\n"]),
        })?;
        print!("{text}");
        if is_check {
            outcome.tally = Tally { passed: outcome.good.into(), failed: (!outcome.good).into() };
            outcome.failed = if outcome.good { Vec::new() } else { vec![name.clone()] };
        }
        Ok(outcome)
    }
}

struct Steps<'a> {
    root: &'a Path,
    made: &'a Made,
    begun: Instant,
    /// When nothing new begins.
    until: Option<Instant>,
    /// Duration of each step.
    took: Vec<(String, Duration)>,
    /// Duration of each test program.
    ran: Vec<(String, Duration)>,
    /// Duration of each test of the lab.
    tests: Vec<(String, Duration)>,
    total: Tally,
    failed: Vec<String>,
    /// Output of failed tests, cut: the end of a log shows why they failed.
    said: Vec<String>,
    left_out: Vec<String>,
}

impl<'a> Steps<'a> {
    fn new(root: &'a Path, made: &'a Made) -> Self {
        Self {
            root,
            made,
            begun: Instant::now(),
            until: None,
            took: Vec::new(),
            ran: Vec::new(),
            tests: Vec::new(),
            total: Tally::default(),
            failed: Vec::new(),
            said: Vec::new(),
            left_out: Vec::new(),
        }
    }

    fn run(&mut self, name: &str, mut command: Command) {
        println!("== {name}");
        let started = Instant::now();
        let good = command.current_dir(self.root).status().is_ok_and(|status| status.success());
        self.took(name, started);
        self.count(name, good);
    }

    fn took(&mut self, name: &str, started: Instant) {
        let took = started.elapsed();
        println!("== {name}: {} s", took.as_secs());
        self.took.push((name.to_owned(), took));
    }

    fn lints(&mut self) {
        self.run("format", cargo(&["fmt", "--all", "--check"]));
        let manifest = format!("{FUZZ}/Cargo.toml");
        let format = ["fmt", "--manifest-path", &manifest, "--check"];
        self.run("format of the fuzz targets", cargo(&format));
        let lints = ["clippy", "--workspace", "--all-targets", "--locked", "--", "--deny=warnings"];
        self.run("lints", cargo(&lints));
    }

    /// The fuzz targets are a workspace of their own: the lints of the others do not reach them,
    /// and a type that got another name would be missed until somebody compiles them to run.
    fn lints_of_fuzzers(&mut self) {
        let manifest = format!("{FUZZ}/Cargo.toml");
        let lints = ["clippy", "--manifest-path", &manifest, "--locked", "--", "--deny=warnings"];
        let mut command = cargo(&lints);
        // Nothing is linked. Any file in the place of the fuzzing engine spares its C++ compiler.
        command.env("CUSTOM_LIBFUZZER_PATH", self.root.join(&manifest));
        self.run("lints of the fuzz targets", command);
    }

    fn count(&mut self, name: &str, good: bool) {
        if good {
            self.total.passed += 1;
        } else {
            self.total.failed += 1;
            self.failed.push(name.to_owned());
        }
    }

    /// Compiles the tests, so that the time of running them is their own.
    fn compile(&mut self, arguments: &[String]) {
        let mut command = cargo(&["test", "--workspace", "--locked", "--no-run"]);
        command.args(arguments);
        self.run("compiling", command);
    }

    /// The tests of this host.
    fn tests(&self, arguments: &[String]) -> Result<Run> {
        let mut command = cargo(&["test", "--workspace", "--locked", "--no-fail-fast"]);
        command.args(arguments).current_dir(self.root);
        command.env(TEST_DIR, &self.made.folder);
        if !is_root() {
            // Programs that mount need root; cargo itself does not.
            let runner = format!("CARGO_TARGET_{}_RUNNER", triple()?);
            command.env(runner, "sudo --preserve-env");
        }
        Ok(Run {
            name: "tests".into(),
            command,
            errors: Errors::Along,
            is_check: false,
            silence: SILENCE,
            until: self.until,
        })
    }

    /// The tests of this host, those of the older kernels, and the budget of a hit.
    fn tests_in_lanes(&mut self, arguments: &[String], no_lab: bool) -> Result<()> {
        self.compile(arguments);
        let tests = self.tests(arguments)?;
        let lab = if no_lab { self.leave_out_lab() } else { self.lab(Lists::Short) };
        // Guests have no network, so they would fail without it.
        if let Err(error) = testkit::debian_root() {
            println!("{error:#}");
            self.count("a Debian root for the tests", false);
        }
        let mut need = Command::new(self.root.join("dev/need"));
        need.args(budget::NEEDS);
        self.run("what counting needs", need);
        // By this link, because compiling the tests may have replaced the file.
        let mut command = Command::new("/proc/self/exe");
        command.arg("budget").current_dir(self.root);
        let name = "instructions of a hit".to_owned();
        let until = self.until;
        let (errors, is_check, silence) = (Errors::Along, true, SILENCE);
        let budget = Run { name, command, errors, is_check, silence, until };
        // A part that waits for nothing follows the guest that takes longest.
        let mut rest = lab;
        rest.splice(rest.len().min(1)..rest.len().min(1), self.fuzz_build());
        let rest = rest.into_iter().chain([budget]);
        self.in_two_lanes("all of these, in two lanes", Some(tests), rest)
    }

    /// Runs `first`, whose output is shown as it comes, and beside it one after another of `rest`;
    /// the lane that ends first takes what is left. All together are `what`.
    fn in_two_lanes(
        &mut self,
        what: &str,
        first: Option<Run>,
        rest: impl Iterator<Item = Run> + Send,
    ) -> Result<()> {
        let queue = Mutex::new(rest);
        let next = || queue.lock().ok()?.next();
        let live = first.is_some();
        let started = Instant::now();
        let lanes = thread::scope(|scope| {
            let lane = first.into_iter().chain(iter::from_fn(next));
            let first = scope.spawn(move || run_lane(lane, live));
            let second = scope.spawn(|| run_lane(iter::from_fn(next), false));
            [first, second].map(|lane| lane.join())
        });
        for lane in lanes {
            let Ok(outcomes) = lane else { bail!("a lane was lost: {what}") };
            for outcome in outcomes {
                self.add(outcome?);
            }
        }
        self.took(what, started);
        Ok(())
    }

    fn leave_out_lab(&mut self) -> Vec<Run> {
        self.left_out.push("older kernels (--no-lab)".into());
        Vec::new()
    }

    /// The kernel tests on each older kernel.
    fn lab(&mut self, lists: Lists) -> Vec<Run> {
        self.run("what the lab needs", {
            let mut need = Command::new(self.root.join("dev/need"));
            need.args(lab::NEEDS);
            need
        });
        let runs = lab::runs(self.root, lists, || cargo(&[])).unwrap_or_else(|error| {
            println!("{error:#}");
            self.count("test programs for the lab", false);
            Vec::new()
        });
        let until = self.until;
        let (errors, is_check, silence) = (Errors::Apart, false, SILENCE);
        let run = |(name, command)| Run { name, command, errors, is_check, silence, until };
        runs.into_iter().map(run).collect()
    }

    /// Compiles the fuzz targets. The compiler is silent while it works on all of them.
    fn fuzz_build(&self) -> Option<Run> {
        let fuzzers = Fuzzers::are_installed().then(|| Fuzzers::new(self.root, &self.made.folder));
        let (name, command) = ("compiling the fuzz targets".to_owned(), fuzzers?.build());
        let (errors, is_check, silence) = (Errors::Along, true, 3 * SILENCE);
        Some(Run { name, command, errors, is_check, silence, until: self.until })
    }

    fn add(&mut self, outcome: Outcome) {
        let Outcome { name, good, took, tally, failed, said, ran, tests } = outcome;
        self.took.push((name.clone(), took));
        self.said.extend(said);
        let with_list = |(what, took): (String, Duration)| (format!("{what} ({name})"), took);
        self.ran.extend(ran.into_iter().map(with_list));
        self.tests.extend(tests.into_iter().map(with_list));
        self.total.passed += tally.passed;
        self.total.failed += tally.failed;
        self.failed.extend(failed);
        // A failure without a failed test counts as one.
        if (!good && tally.failed == 0) || tally == Tally::default() {
            self.count(&name, false);
        }
    }

    /// Licences, bans and sources; advisories as well where their database can be had.
    fn licences(&mut self) {
        if !works(&["deny", "--version"]) {
            return self.left_out.push("cargo deny (not installed)".into());
        }
        self.run(
            "licences, bans, sources",
            cargo(&["deny", "check", "licenses", "bans", "sources"]),
        );
        let mut advisories = cargo(&["deny", "check", "advisories"]);
        let advisories = advisories.current_dir(self.root).output();
        match advisories {
            Ok(output) if output.status.success() => self.count("advisories", true),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                if text.contains("failed to fetch advisory database") {
                    self.left_out.push("advisories (their database cannot be reached)".into());
                } else {
                    println!("{text}");
                    self.count("advisories", false);
                }
            }
            Err(_) => self.count("advisories", false),
        }
    }

    /// Every fuzz target, `seconds` each.
    fn fuzz(&mut self, seconds: u32) -> Result<()> {
        if !Fuzzers::are_installed() {
            self.left_out.push("fuzzing (needs a nightly toolchain and cargo-fuzz)".into());
            return Ok(());
        }
        let fuzzers = Fuzzers::new(self.root, &self.made.folder);
        let targets = fuzzers.targets()?;
        if targets.is_empty() {
            self.count("fuzz targets", false);
            return Ok(());
        }
        let (errors, until) = (Errors::Along, self.until);
        let named = |target: &str| format!("fuzz {target}, {seconds} s");
        let mut runs = Vec::new();
        for target in &targets {
            let (name, command) = (named(target), fuzzers.run(target, seconds)?);
            runs.push(Run { name, command, errors, is_check: true, silence: SILENCE, until });
        }
        self.in_two_lanes("the fuzzers, in two lanes", None, runs.into_iter())?;
        for target in targets.iter().filter(|target| self.failed.contains(&named(target))) {
            fuzzers.show_inputs(target)?;
        }
        fuzzers.remove()
    }

    /// Prints where the time went: the parts in their order, the slowest test programs, and the
    /// lab's slowest tests.
    fn show_times(&mut self) {
        println!();
        // Short ones of one kind are one line.
        let mut parts: Vec<(&str, Duration)> = Vec::new();
        for (name, took) in &self.took {
            let kind = if name.starts_with("fuzz ") { "fuzzers" } else { name };
            match parts.last_mut() {
                Some((last, sum)) if *last == kind => *sum += *took,
                _ => parts.push((kind, *took)),
            }
        }
        parts.push(("everything", self.begun.elapsed()));
        for (name, took) in parts {
            println!("{:6.1} min  {name}", took.as_secs_f64() / 60.0);
        }
        for list in [&mut self.ran, &mut self.tests] {
            list.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
            for (what, took) in list.iter().take(SLOWEST) {
                println!("{:6} s    {what}", took.as_secs());
            }
        }
    }

    fn finish(mut self) -> Result<()> {
        self.show_times();
        println!();
        self.said.iter().for_each(|line| println!("{line}"));
        self.left_out.iter().for_each(|step| println!("left out: {step}"));
        self.failed.iter().for_each(|step| println!("failed: {step}"));
        println!("{} passed, {} failed", self.total.passed, self.total.failed);
        if self.total.failed > 0 {
            // The line above is the last one on purpose.
            std::process::exit(1);
        }
        Ok(())
    }
}

/// Runs commands one after another. The output of the first is shown as it comes, if it is `live`;
/// that of others when they have ended.
fn run_lane(runs: impl Iterator<Item = Run>, live: bool) -> Vec<Result<Outcome>> {
    let run = |(place, run): (usize, Run)| {
        println!("== {}: begins", run.name);
        run.watch(live && place == 0)
    };
    runs.enumerate().map(run).collect()
}

fn is_root() -> bool {
    // SAFETY: takes nothing, touches nothing, cannot fail.
    unsafe { libc::geteuid() == 0 }
}

fn triple() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let Some(host) = text.lines().find_map(|line| line.strip_prefix("host: ")) else {
        bail!("rustc -vV names no host: {text}");
    };
    Ok(host.to_uppercase().replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use std::{process::Command, time::Instant};

    use super::{Errors, Run, SILENCE, Tally, run_lane};

    #[test]
    fn a_lane_adds_up_what_its_commands_say() {
        let says = |text: &str, name: &str| {
            let mut command = Command::new("echo");
            command.arg(text);
            let name = name.into();
            let (errors, is_check, silence) = (Errors::Apart, false, SILENCE);
            Run { name, command, errors, is_check, silence, until: None }
        };
        let bad = "test b ... FAILED\ntest result: FAILED. 4 passed; 1 failed; 0 ignored";
        let runs = [says("test result: ok. 2 passed; 0 failed", "good"), says(bad, "bad")];
        let lane = run_lane(runs.into_iter(), false);
        let outcomes: Vec<_> = lane.into_iter().map(Result::unwrap).collect();
        assert_eq!(outcomes[0].tally, Tally { passed: 2, failed: 0 });
        assert_eq!(outcomes[1].tally, Tally { passed: 4, failed: 1 });
        assert_eq!(
            (outcomes[1].name.as_str(), &outcomes[1].failed),
            ("bad", &vec!["b".to_owned()])
        );
        assert!(outcomes.iter().all(|outcome| outcome.good), "echo does not fail");
    }

    #[test]
    fn a_check_without_tests_counts_as_one() {
        let run = |program: &str| {
            let command = Command::new(program);
            let name = "it".into();
            let (errors, is_check, silence) = (Errors::Along, true, SILENCE);
            let run = Run { name, command, errors, is_check, silence, until: None };
            run.watch(false).unwrap()
        };
        assert_eq!(run("true").tally, Tally { passed: 1, failed: 0 });
        let bad = run("false");
        assert_eq!((bad.tally, bad.failed), (Tally { passed: 0, failed: 1 }, vec!["it".into()]));
    }

    #[test]
    fn a_part_without_time_left_fails() {
        let (name, command) = ("it".to_owned(), Command::new("true"));
        let until = Some(Instant::now());
        let (errors, is_check, silence) = (Errors::Apart, false, SILENCE);
        let run = Run { name, command, errors, is_check, silence, until };
        let outcome = run.watch(false).unwrap();
        assert_eq!((outcome.good, outcome.failed), (false, vec!["it (no time left)".to_owned()]));
        assert_eq!(outcome.tally, Tally { passed: 0, failed: 1 });
    }
}
