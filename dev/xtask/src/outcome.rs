//! The output of a test runner: result lines added up, the words of failed tests, and times.

use std::{
    fs,
    io::{self, BufRead, BufReader, PipeReader},
    process::Command,
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// Lines of a failed test's output that are shown again at the end.
const SAID_LINES: usize = 10;

/// Begins a line: all tests run again, and those before it do not count.
pub(crate) const AGAIN: &str = "lab: running the list once more";

/// Begins what a guest of the lab says that is ended because it is silent.
const TOLD: &str = "lab: what the guest's processes wait for:";

/// Lines of that which are shown again at the end.
const TOLD_LINES: usize = 60;

/// Length of each such line, in characters.
const SAID_CHARACTERS: usize = 400;

/// From the signal that asks a program to end to the one that ends it. A guest of the lab takes
/// that time to tell what its processes wait for.
const GRACE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

/// The end of a command whose output has a test runner's result lines.
pub(crate) struct Outcome {
    pub(crate) name: String,
    pub(crate) good: bool,
    pub(crate) took: Duration,
    pub(crate) tally: Tally,
    pub(crate) failed: Vec<String>,
    pub(crate) said: Vec<String>,
    /// Duration of each test program.
    pub(crate) ran: Vec<(String, Duration)>,
    /// Duration of each test, where they run one after another.
    pub(crate) tests: Vec<(String, Duration)>,
}

impl Outcome {
    /// The failure of what had no time to begin.
    pub(crate) fn not_begun(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            good: false,
            took: Duration::ZERO,
            tally: Tally { passed: 0, failed: 1 },
            failed: vec![format!("{name} (no time left)")],
            said: Vec::new(),
            ran: Vec::new(),
            tests: Vec::new(),
        }
    }
}

/// The standard error of a command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errors {
    /// Passed on past the watcher. Tests of such a command run one after another.
    Apart,
    /// Read with its output: cargo names each program there before it runs.
    Along,
}

/// The time limits of a command.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    /// Without a line. Then the program that it runs is ended, and the next one may go on: a test
    /// that hangs fails with its name.
    pub(crate) silence: Duration,
    /// In all: from then on, each program that it runs is ended.
    pub(crate) until: Option<Instant>,
}

impl Patience {
    /// The time to wait for a line, and the reason to end the running program after it.
    fn wait(&self) -> (Duration, String) {
        /// Until what was killed has ended, and the next one has begun.
        const BETWEEN: Duration = Duration::from_millis(200);
        let silence = self.silence;
        match self.until.map(|until| until.saturating_duration_since(Instant::now())) {
            Some(left) if left < silence => (left.max(BETWEEN), "the time is up".to_owned()),
            _ => (silence, format!("no line for {} s", silence.as_secs())),
        }
    }

    fn is_over(&self) -> bool {
        self.is_over_for(Duration::ZERO)
    }

    fn is_over_for(&self, time: Duration) -> bool {
        self.until.is_some_and(|until| until + time <= Instant::now())
    }
}

/// Runs such a command, shows each line, and adds them up. The programs that it runs are asked to
/// end, one at a time, when `patience` is at an end, and killed if they do not.
pub(crate) fn watch(
    name: &str,
    mut command: Command,
    errors: Errors,
    patience: Patience,
    mut show: impl FnMut(&str),
) -> Result<Outcome> {
    show(&format!("== {name}"));
    let started = Instant::now();
    let (output, input) = io::pipe().context("cannot make a pipe")?;
    if errors == Errors::Along {
        command.stderr(input.try_clone()?);
    }
    command.stdout(input);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    // Its ends of the pipe are the command's alone from here on.
    drop(command);
    let (mut tally, mut failed, mut said) = (Tally::default(), Vec::new(), Said::default());
    let mut ran = Ran::default();
    let (lines, mut is_told, mut is_asked) = (lines(output), false, false);
    loop {
        let (wait, why) = patience.wait();
        let wait = if is_asked { wait.min(GRACE) } else { wait };
        let line = match lines.recv_timeout(wait) {
            Ok(line) => line?,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let line = format!("{why}: ending its program");
                // The end of the time is told once.
                if !is_told {
                    show(&line);
                    said.lines.push(format!("{name}: {line}"));
                }
                is_told = patience.is_over();
                let is_late = is_asked || patience.is_over_for(GRACE);
                end_children(child.id(), if is_late { libc::SIGKILL } else { libc::SIGTERM });
                is_asked = !is_asked;
                continue;
            }
        };
        is_asked = false;
        if patience.is_over() {
            end_children(child.id(), libc::SIGTERM);
        }
        show(&line);
        if line.starts_with(AGAIN) {
            (tally, failed, said, ran) = Default::default();
            continue;
        }
        let one = result_line(&line);
        tally.passed += one.passed;
        tally.failed += one.failed;
        failed.extend(failed_test(&line));
        said.hear(&line);
        ran.hear(&line, started.elapsed());
    }
    let good = child.wait()?.success();
    show(&format!("== {name}: {} s", started.elapsed().as_secs()));
    let Ran { programs: ran, mut tests, .. } = ran;
    if errors == Errors::Along {
        tests.clear();
    }
    let took = started.elapsed();
    Ok(Outcome { name: name.to_owned(), good, took, tally, failed, said: said.lines, ran, tests })
}

/// The lines of `output`, as they come. Bytes that are no UTF-8 are replaced.
fn lines(output: PipeReader) -> Receiver<io::Result<String>> {
    let (sender, receiver) = mpsc::sync_channel(64);
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n') {
            let line = line.map(|line| String::from_utf8_lossy(&line).into_owned());
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Sends `signal` to what the process `parent` waits for: of cargo, the test program that it runs.
fn end_children(parent: u32, signal: libc::c_int) {
    let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    for thread in threads {
        let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().filter_map(|number| number.parse().ok()) {
            // SAFETY: takes numbers, and touches no memory. Their parent has not waited for them,
            // or it would not hang, so the numbers are still theirs.
            unsafe { libc::kill(child, signal) };
        }
    }
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

/// Duration of each test program, by the lines of cargo and libtest, or those of the lab.
#[derive(Default)]
struct Ran {
    program: Option<String>,
    programs: Vec<(String, Duration)>,
    /// Duration of each test, by the time at which its line came.
    tests: Vec<(String, Duration)>,
    /// When the test began whose line comes next.
    begun: Duration,
}

impl Ran {
    /// Takes a line that came at `now`.
    fn hear(&mut self, line: &str, now: Duration) {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            ["running", _, "test" | "tests"] => self.begun = now,
            ["test", name, .., "ok" | "FAILED"] => {
                self.tests.push((name.to_owned(), now - self.begun));
                self.begun = now;
            }
            ["Running", source, _] => self.program = Some(source.to_owned()),
            ["Running", "unittests", source, program] => {
                self.program = Some(format!("{source} {program}"));
            }
            ["test", "result:", .., "finished", "in", seconds] => {
                let seconds = seconds.strip_suffix('s').and_then(|number| number.parse().ok());
                if let (Some(program), Some(seconds)) = (self.program.take(), seconds) {
                    self.programs.push((program, Duration::from_secs_f64(seconds)));
                }
            }
            // The output of the lab's guest.
            ["--", seconds, "s:", program] => {
                let seconds = seconds.parse().map_or(Duration::ZERO, Duration::from_secs);
                self.programs.push((program.to_owned(), seconds));
            }
            _ => {}
        }
    }
}

/// The first lines of each failed test's output: libtest shows them below
/// `---- NAME stdout ----`, when all tests of a program have ended. And what a guest tells that has
/// hung, with the line before it: the name of the test that ran.
#[derive(Default)]
struct Said {
    lines: Vec<String>,
    /// Lines that may still come of this test, or guest.
    left: usize,
    before: String,
}

impl Said {
    fn hear(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" ----") {
            self.left = SAID_LINES;
        } else if line == TOLD {
            self.left = TOLD_LINES;
            self.lines.push(self.before.chars().take(SAID_CHARACTERS).collect());
        } else if line == "failures:" {
            self.left = 0;
        }
        if self.left > 0 && !line.is_empty() {
            self.left -= 1;
            self.lines.push(line.chars().take(SAID_CHARACTERS).collect());
        }
        line.clone_into(&mut self.before);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        process::Command,
        time::{Duration, Instant},
    };

    use super::{
        Errors, Patience, Ran, SAID_CHARACTERS, Said, Tally, failed_test, result_line, watch,
    };

    #[test]
    fn the_output_of_a_failed_test_is_kept_to_its_bound() {
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
    fn a_silent_program_is_killed_and_its_parent_goes_on() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000; echo 'test result: ok. 1 passed; 0 failed'"]);
        let silence = Duration::from_millis(200);
        let patience = Patience { silence, until: None };
        let outcome = watch("it", command, Errors::Apart, patience, |_| ()).unwrap();
        assert_eq!(outcome.tally, Tally { passed: 1, failed: 0 });
        assert!(outcome.said[0].starts_with("it: no line for 0 s"), "{:?}", outcome.said);
    }

    #[test]
    fn a_list_that_runs_again_counts_once() {
        let lines = [
            "test a ... FAILED",
            "---- a stdout ----",
            "why",
            "test result: FAILED. 3 passed; 1 failed",
            "lab: running the list once more, after the fault above",
            "test result: ok. 4 passed; 0 failed",
        ];
        let mut command = Command::new("printf");
        command.arg("%s\n").args(lines);
        let patience = Patience { silence: Duration::from_secs(60), until: None };
        let outcome = watch("it", command, Errors::Apart, patience, |_| ()).unwrap();
        assert_eq!(outcome.tally, Tally { passed: 4, failed: 0 });
        assert!(outcome.good && outcome.failed.is_empty() && outcome.said.is_empty());
    }

    #[test]
    fn every_program_is_killed_when_the_time_is_up() {
        let mut command = Command::new("sh");
        command.args(["-c", "for n in 1 2 3; do sleep 1000; done; exit 7"]);
        let silence = Duration::from_secs(1000);
        let patience = Patience { silence, until: Some(Instant::now()) };
        let outcome = watch("it", command, Errors::Apart, patience, |_| ()).unwrap();
        assert!(!outcome.good);
        assert_eq!(outcome.said, ["it: the time is up: ending its program"]);
    }

    #[test]
    fn a_guest_that_has_hung_tells_what_it_waits_for_and_is_shown_at_the_end() {
        let mut command = Command::new("sh");
        let guest = r#"
            trap 'echo; echo "$TOLD"; echo futex_wait; kill $!; exit 124' TERM
            printf 'test first ... ok\ntest second ... '
            sleep 1000 >/dev/null & wait $!"#;
        // As `bash` waits for the guest's script, to run it once more.
        command.args(["-c", "sh -c \"$1\"; exit $?", "sh", guest]).env("TOLD", super::TOLD);
        let silence = Duration::from_millis(500);
        let patience = Patience { silence, until: None };
        let outcome = watch("it", command, Errors::Apart, patience, |_| ()).unwrap();
        assert!(!outcome.good);
        let why = "it: no line for 0 s: ending its program";
        assert_eq!(outcome.said, [why, "test second ... ", super::TOLD, "futex_wait"]);
        let lab = include_str!("../../lab/run");
        assert!(
            lab.contains(&format!("echo \"{}\"", super::TOLD)),
            "dev/lab/run says it otherwise"
        );
    }

    #[test]
    fn a_command_that_does_not_end_when_asked_is_killed_after_its_grace() {
        let over = Instant::now() - super::GRACE;
        let mut command = Command::new("sh");
        command.args(["-c", "sh -c \"trap '' TERM; while :; do sleep 1; done\"; exit $?"]);
        let patience = Patience { silence: Duration::from_secs(1000), until: Some(over) };
        let outcome = watch("it", command, Errors::Apart, patience, |_| ()).unwrap();
        assert!(!outcome.good);
    }

    #[test]
    fn each_program_has_its_time() {
        let mut ran = Ran::default();
        let lines = [
            "     Running tests/kill.rs (target/debug/deps/kill-0123)",
            "test result: ok. 2 passed; 0 failed; 0 ignored; finished in 35.09s",
            "     Running unittests src/lib.rs (target/debug/deps/oci-4567)",
            "test result: ok. 2 passed; 0 failed; 0 ignored; finished in 0.50s",
            "test result: ok. 2 passed; 0 failed; 0 ignored; finished in 9.00s",
            "-- 12 s: lifecycle-89ab",
        ];
        lines.iter().for_each(|line| ran.hear(line, Duration::ZERO));
        let programs: Vec<_> =
            ran.programs.iter().map(|(name, took)| (name.as_str(), took.as_millis())).collect();
        let unit = "src/lib.rs (target/debug/deps/oci-4567)";
        assert_eq!(programs, [("tests/kill.rs", 35_090), (unit, 500), ("lifecycle-89ab", 12_000)]);
    }

    #[test]
    fn each_of_the_tests_that_follow_one_another_has_its_time() {
        let mut ran = Ran::default();
        let lines = [
            (3, "running 2 tests"),
            (10, "test first ... ok"),
            (15, "test second - should panic ... FAILED"),
            (16, "test result: FAILED. 1 passed; 1 failed; 0 ignored; finished in 12.00s"),
            (20, "running 1 test"),
            (21, "test third ... ok"),
        ];
        lines.iter().for_each(|(now, line)| ran.hear(line, Duration::from_secs(*now)));
        let tests: Vec<_> =
            ran.tests.iter().map(|(name, took)| (name.as_str(), took.as_secs())).collect();
        assert_eq!(tests, [("first", 7), ("second", 5), ("third", 1)]);
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
