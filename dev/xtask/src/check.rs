//! Everything that has to hold, one step after another, with one line at the end.
//!
//! ```text
//!   fmt ─► clippy ─► cargo test ─► budget ─► older kernels ─► cargo deny ─► fuzzers ─► nothing left behind
//!                        │                          │                                         │
//!                        └──────────────────────────┴─ "test result" lines, added up ─────────┴─► "N passed, N failed"
//! ```
//!
//! A failed step does not stop the ones after it. A step whose tool is not installed is named as
//! left out; it counts neither way.

use std::{
    fs,
    io::{BufRead, BufReader},
    iter,
    path::Path,
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::{
    budget, lab,
    made::{Made, TEST_DIR},
};

/// How long each fuzz target runs in a bounded run, in seconds, unless asked otherwise.
const FUZZ_SECONDS: u32 = 20;

/// How many lines of what a failed test said are shown again at the end.
const SAID_LINES: usize = 10;

/// How much of each such line, in characters.
const SAID_CHARACTERS: usize = 400;

/// The crate of the fuzz targets.
const FUZZ: &str = "dev/fuzz";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seconds that each fuzz target runs.
    #[arg(long, default_value_t = FUZZ_SECONDS)]
    fuzz_seconds: u32,
    /// Leave the older kernels out: for a quick run, never in CI.
    #[arg(long)]
    no_lab: bool,
    /// Arguments for `cargo test`, such as a crate or a test's name.
    #[arg(last = true)]
    arguments: Vec<String>,
}

#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

/// Runs all steps; an error when any failed.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let made = Made::begin(root)?;
    let mut steps = Steps {
        root,
        made: &made,
        total: Tally::default(),
        failed: Vec::new(),
        said: Vec::new(),
        left_out: Vec::new(),
    };
    steps.run("format", cargo(&["fmt", "--all", "--check"]));
    let lints = ["clippy", "--workspace", "--all-targets", "--locked", "--", "--deny=warnings"];
    steps.run("lints", cargo(&lints));
    steps.tests(&options.arguments)?;
    steps.budget();
    steps.lab(options.no_lab)?;
    steps.licences();
    steps.fuzz(options.fuzz_seconds)?;
    let left = made.left();
    left.iter().for_each(|left| println!("left behind: {left}"));
    steps.count("nothing left behind", left.is_empty());
    made.remove();
    steps.finish()
}

struct Steps<'a> {
    root: &'a Path,
    made: &'a Made,
    total: Tally,
    failed: Vec<String>,
    /// What failed tests have printed, cut: whoever sees only the end of a log knows why.
    said: Vec<String>,
    left_out: Vec<String>,
}

impl Steps<'_> {
    fn run(&mut self, name: &str, mut command: Command) {
        println!("== {name}");
        let started = Instant::now();
        let good = command.current_dir(self.root).status().is_ok_and(|status| status.success());
        println!("== {name}: {} s", started.elapsed().as_secs());
        self.count(name, good);
    }

    fn count(&mut self, name: &str, good: bool) {
        if good {
            self.total.passed += 1;
        } else {
            self.total.failed += 1;
            self.failed.push(name.to_owned());
        }
    }

    /// `cargo test` with its output passed on and its result lines added up.
    fn tests(&mut self, arguments: &[String]) -> Result<()> {
        let mut command = cargo(&["test", "--workspace", "--locked", "--no-fail-fast"]);
        command.args(arguments).current_dir(self.root);
        command.env(TEST_DIR, &self.made.folder);
        if !is_root() {
            // Programs that mount need root; cargo itself does not.
            let runner = format!("CARGO_TARGET_{}_RUNNER", triple()?);
            command.env(runner, "sudo --preserve-env");
        }
        self.tally("tests", command)
    }

    /// What a hit may cost.
    fn budget(&mut self) {
        let mut need = Command::new(self.root.join("dev/need"));
        need.args(budget::NEEDS);
        self.run("what counting needs", need);
        let (name, started) = ("instructions of a hit", Instant::now());
        println!("== {name}");
        let counted = budget::run(self.root, &budget::Options::default());
        if let Err(error) = &counted {
            println!("{error:#}");
        }
        println!("== {name}: {} s", started.elapsed().as_secs());
        self.count(name, counted.is_ok());
    }

    /// The kernel tests on each older kernel.
    fn lab(&mut self, leave_out: bool) -> Result<()> {
        if leave_out {
            self.left_out.push("older kernels (--no-lab)".into());
            return Ok(());
        }
        self.run("what the lab needs", {
            let mut need = Command::new(self.root.join("dev/need"));
            need.args(lab::NEEDS);
            need
        });
        let runs = match lab::runs(self.root, || cargo(&[])) {
            Ok(runs) => runs,
            Err(error) => {
                println!("{error:#}");
                self.count("test programs for the lab", false);
                return Ok(());
            }
        };
        // An emulated guest keeps little more than one processor busy: two run side by side.
        let runs = Mutex::new(runs.into_iter());
        let next = || runs.lock().ok()?.next();
        let lanes = thread::scope(|scope| {
            [(); 2].map(|()| scope.spawn(|| run_lane(iter::from_fn(next)))).map(|lane| lane.join())
        });
        for lane in lanes {
            let Ok(outcomes) = lane else { bail!("a run of the lab was lost") };
            for outcome in outcomes {
                self.add(outcome?);
            }
        }
        Ok(())
    }

    fn tally(&mut self, name: &str, command: Command) -> Result<()> {
        let outcome = watch(name, command, |line| println!("{line}"))?;
        self.add(outcome);
        Ok(())
    }

    fn add(&mut self, outcome: Outcome) {
        let Outcome { name, good, tally, failed, said } = outcome;
        self.said.extend(said);
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

    /// Every fuzz target, `seconds` each, from no corpus and with one seed: the same inputs in the
    /// same order each time, more of them on a faster machine.
    fn fuzz(&mut self, seconds: u32) -> Result<()> {
        if !works(&["+nightly", "fuzz", "--version"]) {
            self.left_out.push("fuzzing (needs a nightly toolchain and cargo-fuzz)".into());
            return Ok(());
        }
        let fuzz = |verb| {
            let mut command = cargo_by_rustup(&["+nightly", "fuzz", verb, "--fuzz-dir"]);
            command.arg(self.root.join(FUZZ));
            command
        };
        let list = fuzz("list").output().context("cargo fuzz list")?;
        let targets = String::from_utf8_lossy(&list.stdout).into_owned();
        if targets.trim().is_empty() {
            self.count("fuzz targets", false);
        }
        for target in targets.split_whitespace() {
            let folder = self.made.folder.join("fuzz").join(target);
            let (corpus, temporary) = (folder.join("corpus"), folder.join("temporary"));
            for folder in [&corpus, &temporary] {
                fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
            }
            let mut command = fuzz("run");
            command.arg(target).arg(&corpus).arg("--").args(fuzz_options(seconds));
            command.arg(format!("-artifact_prefix={}/", folder.display()));
            // Never in /tmp, which may be small.
            command.env("TMPDIR", &temporary);
            // As libFuzzer's own option, for the end of the process.
            command.env("ASAN_OPTIONS", "detect_leaks=0");
            let failed = self.failed.len();
            self.run(&format!("fuzz {target}, {seconds} s"), command);
            if self.failed.len() > failed {
                show_inputs(target, &folder)?;
            }
        }
        fs::remove_dir_all(self.made.folder.join("fuzz"))
            .context("cannot remove the fuzzers' folder")?;
        Ok(())
    }

    fn finish(self) -> Result<()> {
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

/// How a command ended whose output has a test runner's result lines.
struct Outcome {
    name: String,
    good: bool,
    tally: Tally,
    failed: Vec<String>,
    said: Vec<String>,
}

/// Runs commands one after another, and shows what each has said when it has ended.
fn run_lane(runs: impl Iterator<Item = (String, Command)>) -> Vec<Result<Outcome>> {
    let run = |(name, command): (String, Command)| {
        println!("== {name}: begins");
        let mut text = String::new();
        let outcome = watch(&name, command, |line| text.extend([line, "\n"]));
        print!("{text}");
        outcome
    };
    runs.map(run).collect()
}

/// Runs such a command, shows each line, and adds them up.
fn watch(name: &str, mut command: Command, mut show: impl FnMut(&str)) -> Result<Outcome> {
    show(&format!("== {name}"));
    let started = Instant::now();
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let output = child.stdout.take().context("no output")?;
    let (mut tally, mut failed, mut said) = (Tally::default(), Vec::new(), Said::default());
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        show(&line);
        let one = result_line(&line);
        tally.passed += one.passed;
        tally.failed += one.failed;
        failed.extend(failed_test(&line));
        said.hear(&line);
    }
    let good = child.wait()?.success();
    show(&format!("== {name}: {} s", started.elapsed().as_secs()));
    Ok(Outcome { name: name.to_owned(), good, tally, failed, said: said.lines })
}

/// libFuzzer's options: bounds that only a bug can reach, however busy the machine is.
fn fuzz_options(seconds: u32) -> [String; 8] {
    [
        format!("-max_total_time={seconds}"),
        "-seed=1".into(),
        // Of one input: a bomb is refused within 5 s; sanitizers and a busy machine take ten times that.
        "-timeout=60".into(),
        // Readers are bounded at 256 MiB for inputs of this length. The sanitizer takes as much again, and
        // keeps 256 MiB of freed memory.
        "-rss_limit_mb=1024".into(),
        // Of one allocation: a window of zstd.
        "-malloc_limit_mb=192".into(),
        // Threads that are ending still hold memory; safe Rust has better ways to find leaks.
        "-detect_leaks=0".into(),
        // Inputs are lists of edits: many at once from the start.
        "-len_control=0".into(),
        "-max_len=600".into(),
    ]
}

/// Prints the inputs that a fuzzer has left in `folder`, so that a log is enough to try them
/// again.
fn show_inputs(target: &str, folder: &Path) -> Result<()> {
    let mut inputs: Vec<_> = fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
    inputs.retain(|path| path.is_file());
    inputs.sort();
    for path in inputs {
        let output = Command::new("base64").arg("--wrap=0").arg(&path).output();
        let text = String::from_utf8(output.context("cannot run base64")?.stdout)?;
        println!("{}; to try it again:", path.file_name().unwrap_or_default().display());
        println!("  echo {text} | base64 -d > input");
        println!("  cargo +nightly fuzz run --fuzz-dir {FUZZ} {target} input");
    }
    Ok(())
}

fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// Cargo as rustup's proxy, which knows `+nightly`; `cargo run` sets `CARGO` to one toolchain's.
fn cargo_by_rustup(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments);
    ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"].iter().for_each(|name| {
        command.env_remove(name);
    });
    command
}

fn works(arguments: &[&str]) -> bool {
    let mut command = cargo_by_rustup(arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
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

/// The numbers of a line `test result: ok. 12 passed; 0 failed; ...`; zeros for other lines.
pub(crate) fn result_line(line: &str) -> Tally {
    let Some(rest) = line.strip_prefix("test result: ") else { return Tally::default() };
    let number = |word: &str| {
        let before = rest.split(&[';', '.']).find_map(|part| part.trim().strip_suffix(word));
        before.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    };
    Tally { passed: number("passed"), failed: number("failed") }
}

fn failed_test(line: &str) -> Option<String> {
    let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
    Some(name.to_owned())
}

/// The first lines of what each failed test has printed: libtest shows them below
/// `---- NAME stdout ----`, when all tests of a program have ended.
#[derive(Default)]
struct Said {
    lines: Vec<String>,
    /// Lines that may still come of this test.
    left: usize,
}

impl Said {
    fn hear(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" ----") {
            self.left = SAID_LINES;
        } else if line == "failures:" {
            self.left = 0;
        }
        if self.left > 0 && !line.is_empty() {
            self.left -= 1;
            self.lines.push(line.chars().take(SAID_CHARACTERS).collect());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{SAID_CHARACTERS, Said, Tally, failed_test, result_line, run_lane};

    #[test]
    fn a_lane_adds_up_what_its_commands_say() {
        let says = |text: &str, name: &str| {
            let mut command = Command::new("echo");
            command.arg(text);
            (name.to_owned(), command)
        };
        let bad = "test b ... FAILED\ntest result: FAILED. 4 passed; 1 failed; 0 ignored";
        let runs = [says("test result: ok. 2 passed; 0 failed", "good"), says(bad, "bad")];
        let outcomes: Vec<_> = run_lane(runs.into_iter()).into_iter().map(Result::unwrap).collect();
        assert_eq!(outcomes[0].tally, Tally { passed: 2, failed: 0 });
        assert_eq!(outcomes[1].tally, Tally { passed: 4, failed: 1 });
        assert_eq!(
            (outcomes[1].name.as_str(), &outcomes[1].failed),
            ("bad", &vec!["b".to_owned()])
        );
        assert!(outcomes.iter().all(|outcome| outcome.good), "echo does not fail");
    }

    #[test]
    fn what_a_failed_test_said_is_kept_to_its_bound() {
        let mut said = Said::default();
        let long = "x".repeat(2 * SAID_CHARACTERS);
        let text =
            ["test a ... FAILED", "", "failures:", "", "---- a stdout ----", "", "why", &long];
        text.iter().for_each(|line| said.hear(line));
        (0..100).for_each(|_| said.hear("more"));
        ["failures:", "    a", "test result: FAILED"].iter().for_each(|line| said.hear(line));
        assert_eq!(said.lines[..2], ["---- a stdout ----", "why"]);
        assert_eq!(said.lines[2].len(), SAID_CHARACTERS);
        assert_eq!(said.lines[3..], ["more"; 7]);
    }

    #[test]
    fn result_lines_add_up() {
        let line = "test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.02s";
        assert_eq!(result_line(line), Tally { passed: 12, failed: 3 });
        assert_eq!(result_line("test x ... ok"), Tally::default());
        assert_eq!(failed_test("test a::b ... FAILED").as_deref(), Some("a::b"));
        assert_eq!(failed_test("test a::b ... ok"), None);
    }
}
