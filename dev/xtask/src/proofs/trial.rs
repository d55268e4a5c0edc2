//! One test of the copy: compiled, then run with a time limit.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::{
    cargo::cargo,
    made::{Made, TEST_DIR},
    outcome::result_line,
};

/// Limits of the panics that are shown: lines of each, characters of a line, panics.
const REASON_LINES: usize = 4;
const REASON_CHARACTERS: usize = 300;
const REASONS_MAX: usize = 3;

/// The environment of tests.
pub(super) struct Trial {
    tree: PathBuf,
    limit: Duration,
    made: Made,
}

/// The end of a test.
pub(super) struct Verdict {
    /// True if its program said that all went well.
    pub(super) good: bool,
    pub(super) passed: u64,
    pub(super) failed: u64,
    /// Why it failed, cut.
    pub(super) said: Vec<String>,
    /// Loop devices, mounts, processes and files that it has not removed.
    pub(super) left: Vec<String>,
    /// Duration, without the compilation.
    pub(super) took: Duration,
}

impl Trial {
    /// Tests of `tree` that may take `limit` each.
    pub(super) fn new(root: &Path, tree: &Path, limit: Duration) -> Result<Self> {
        Ok(Self { tree: tree.to_path_buf(), limit, made: Made::begin(root)? })
    }

    /// Compiles a test. That comes first, so that it is told from failing.
    pub(super) fn build(&self, test: &[String]) -> Result<()> {
        let split = test.iter().position(|a| a == "--").unwrap_or(test.len());
        let mut cargo = self.cargo(&test[..split]);
        cargo.arg("--no-run").stdin(Stdio::null());
        let built = cargo.output().context("cannot run cargo")?;
        if !built.status.success() {
            bail!("it does not compile:\n{}", String::from_utf8_lossy(&built.stderr));
        }
        Ok(())
    }

    /// Runs a test that was compiled.
    pub(super) fn run(&self, test: &[String]) -> Result<Verdict> {
        let split = test.iter().position(|a| a == "--").unwrap_or(test.len());
        let mut cargo = self.cargo(&test[..split]);
        cargo.args(["--", "--test-threads=1"]).args(test.iter().skip(split + 1));
        // A file, as a process that outlives the test would keep a pipe open.
        let output = self.tree.with_file_name("output");
        cargo.stdin(Stdio::null()).stdout(File::create(&output)?);
        cargo.stderr(File::create(self.tree.with_file_name("errors"))?);
        cargo.env(TEST_DIR, &self.made.folder);
        let started = Instant::now();
        let status = wait(cargo, self.limit)?;
        let took = started.elapsed();
        let left = self.made.left();
        self.made.end();
        fs::create_dir_all(&self.made.folder)?;
        let Some(status) = status else {
            bail!("its test has not ended after {} s", self.limit.as_secs());
        };
        let text = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
        let (mut passed, mut failed) = (0, 0);
        for tally in text.lines().map(result_line) {
            (passed, failed) = (passed + tally.passed, failed + tally.failed);
        }
        let mut said = reasons(&text);
        if !status.success() && failed == 0 {
            said.push(format!("its program has ended without a result: {status}"));
        }
        Ok(Verdict { good: status.success(), passed, failed, said, left, took })
    }

    fn cargo(&self, arguments: &[String]) -> Command {
        let mut cargo = cargo(&["test", "--quiet", "--locked"]);
        cargo.args(arguments).current_dir(&self.tree);
        cargo.env("CARGO_TARGET_DIR", self.tree.with_file_name("build"));
        // Each build runs once: optimising it and its debug information cost more than they save.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
        cargo
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.made.end();
    }
}

/// The panics in the output of a test program.
fn reasons(text: &str) -> Vec<String> {
    let mut left = 0;
    let of_panic = |line: &&str| {
        match line.contains(" panicked at ") {
            true => left = REASON_LINES,
            false if line.starts_with("stack backtrace") || line.is_empty() => left = 0,
            false => left = left.saturating_sub(1),
        }
        left > 0
    };
    let lines = text.lines().filter(of_panic).take(REASONS_MAX * REASON_LINES);
    lines.map(|line| line.chars().take(REASON_CHARACTERS).collect()).collect()
}

/// Waits for a command, which is killed with its process group after `limit`; nothing then.
fn wait(mut command: Command, limit: Duration) -> Result<Option<ExitStatus>> {
    let mut child = command.process_group(0).spawn().context("cannot run a test")?;
    let group = Pid::from_child(&child);
    let (ended, end) = mpsc::channel();
    thread::spawn(move || {
        // Not waited for to the end: its group's number stays its own until it was killed.
        let seen = waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let _ = ended.send(seen.is_ok());
    });
    let in_time = end.recv_timeout(limit).is_ok();
    if !in_time {
        kill_process_group(group, Signal::KILL).context("cannot end a test")?;
    }
    let status = child.wait()?;
    Ok(in_time.then_some(status))
}

#[cfg(test)]
mod tests {
    use std::{process::Command, time::Duration};

    use testkit::PATIENCE;

    use super::{REASON_CHARACTERS, reasons, wait};

    #[test]
    fn a_panic_is_told_and_nothing_around_it() {
        let long = "x".repeat(2 * REASON_CHARACTERS);
        let text = format!(
            "---- a stdout ----\nmuch\nthread 'a' panicked at x.rs:1:2:\nfailed: {long}\n\
             stack backtrace:\n 0: main\n\ntest result: FAILED. 0 passed; 1 failed"
        );
        let said = reasons(&text);
        assert_eq!(said[0], "thread 'a' panicked at x.rs:1:2:");
        assert_eq!(said[1], format!("failed: {}", &long[..REASON_CHARACTERS - 8]));
        assert_eq!(said.len(), 2);
    }

    #[test]
    fn a_program_that_does_not_end_is_ended() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000; true"]);
        assert_eq!(wait(command, Duration::from_millis(1)).unwrap(), None);
        let status = wait(Command::new("true"), PATIENCE).unwrap();
        assert!(status.is_some_and(|status| status.success()));
    }
}
