//! The fuzz targets, each for a bounded time: from no corpus and with one seed, so the same inputs
//! come in the same order each time, more of them on a faster machine.
//!
//! ```text
//!   cargo fuzz list ─► build, all at once ─► run, one command a target ─► inputs that failed
//!                                            folder/TARGET/{corpus,temporary}
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::cargo::{cargo_by_rustup, works};

/// The crate of the fuzz targets.
pub(crate) const FUZZ: &str = "dev/fuzz";

pub(crate) struct Fuzzers {
    crate_folder: PathBuf,
    /// Of what they make: removed by the caller.
    folder: PathBuf,
}

impl Fuzzers {
    pub(crate) fn new(root: &Path, folder: &Path) -> Self {
        Self { crate_folder: root.join(FUZZ), folder: folder.join("fuzz") }
    }

    pub(crate) fn are_installed() -> bool {
        works(&["+nightly", "fuzz", "--version"])
    }

    fn cargo_fuzz(&self, verb: &str) -> Command {
        let mut command = cargo_by_rustup(&["+nightly", "fuzz", verb, "--fuzz-dir"]);
        command.arg(&self.crate_folder);
        // A run of seconds: optimising for longer takes more time than it gives.
        command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
        command
    }

    /// Compiles all of them.
    pub(crate) fn build(&self) -> Command {
        self.cargo_fuzz("build")
    }

    /// Names of the targets.
    pub(crate) fn targets(&self) -> Result<Vec<String>> {
        let list = self.cargo_fuzz("list").output().context("cannot run cargo fuzz list")?;
        Ok(String::from_utf8_lossy(&list.stdout).split_whitespace().map(str::to_owned).collect())
    }

    /// Runs `target` for `seconds`.
    pub(crate) fn run(&self, target: &str, seconds: u32) -> Result<Command> {
        let folder = self.folder.join(target);
        let (corpus, temporary) = (folder.join("corpus"), folder.join("temporary"));
        for folder in [&corpus, &temporary] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let mut command = self.cargo_fuzz("run");
        command.arg(target).arg(&corpus).arg("--").args(options(seconds));
        command.arg(format!("-artifact_prefix={}/", folder.display()));
        // Never in /tmp, which may be small.
        command.env("TMPDIR", &temporary);
        // As libFuzzer's own option, for the end of the process.
        command.env("ASAN_OPTIONS", "detect_leaks=0");
        Ok(command)
    }

    /// Prints the inputs on which `target` has failed, so that a log is enough to try them again.
    pub(crate) fn show_inputs(&self, target: &str) -> Result<()> {
        let entries = fs::read_dir(self.folder.join(target))?.flatten();
        let mut inputs: Vec<_> = entries.map(|entry| entry.path()).collect();
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

    /// Removes all that they have made.
    pub(crate) fn remove(&self) -> Result<()> {
        fs::remove_dir_all(&self.folder)
            .with_context(|| format!("cannot remove {}", self.folder.display()))
    }
}

/// libFuzzer's options: bounds that only a bug can reach, however busy the machine is.
fn options(seconds: u32) -> [String; 8] {
    [
        format!("-max_total_time={seconds}"),
        "-seed=1".into(),
        // Of one input: a bomb is refused within 5 s; sanitizers and a busy machine take ten times
        // that.
        "-timeout=60".into(),
        // Readers are bounded at 256 MiB for inputs of this length. The sanitizer takes as much
        // again, and keeps 256 MiB of freed memory.
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
