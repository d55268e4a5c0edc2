//! The instruction budget of a hit: the limit for our part of a cached 4 KiB read.
//!
//! ```text
//!   release build of the test `hits` of burgeon-frontend ── callgrind ──► instructions ÷ requests
//!                                                             held against dev/xtask/hit_path.budget
//! ```
//!
//! Instructions and not seconds: they are the same on a busy machine. Of the kernel's work nothing
//! is counted but the calls to it.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};

use crate::{built, cargo::cargo};

/// The test that is counted; it says how many hits there were.
const TEST: &str = "ublk::queue::hits::a_queue_answers_hits_from_the_cache";
/// The function that answers them: nothing else is counted.
const COUNTED: &str = "*answer_hits*";
/// The file with the budget.
const FILE: &str = "dev/xtask/hit_path.budget";
/// Allowed excess over the budget, in percent: another version of the compiler, or a
/// processor for which the C library copies in another way, may differ by that much.
const TOLERANCE: u64 = 10;

/// Debian packages for this, in the form of `dev/need`.
pub(crate) const NEEDS: [&str; 1] = ["valgrind=valgrind"];

#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Make the present count the budget.
    #[arg(long)]
    renew: bool,
}

/// Counts, prints, and fails if it is more than the budget; or makes it the budget.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let path = root.join(FILE);
    let counted = count(root)?;
    if options.renew {
        fs::write(&path, format!("{counted}\n")).with_context(|| path.display().to_string())?;
        println!("a hit of 4 KiB: {counted} instructions; that is the budget now");
        return Ok(());
    }
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let budget = text.trim().parse().with_context(|| format!("{FILE} holds {text:?}"))?;
    println!("a hit of 4 KiB: {counted} instructions, budget {budget}");
    verdict(counted, budget)
}

fn verdict(counted: u64, budget: u64) -> Result<()> {
    let most = budget + budget * TOLERANCE / 100;
    ensure!(
        counted <= most,
        "a hit costs {counted} instructions, and the budget is {budget} (up to {most} are \
         tolerated): make it cheaper, or, if it is worth it, `cargo xtask budget --renew` and say why"
    );
    Ok(())
}

/// Instructions a request.
fn count(root: &Path) -> Result<u64> {
    let mut command =
        cargo(&["test", "--release", "--locked", "--package=burgeon-frontend", "--lib"]);
    command.args(["--no-run", "--message-format=json"]).current_dir(root);
    let program =
        built::executables(command, &[("burgeon-frontend", "burgeon_frontend")])?.remove(0);
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"])
        .arg(format!("--toggle-collect={COUNTED}"))
        .arg(program)
        .args(["--exact", TEST, "--test-threads=1", "--nocapture"])
        .output()
        .context("cannot run valgrind: install the package valgrind")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let passed = output.status.success() && printed.contains("1 passed");
    ensure!(passed, "the test that is counted fails: {printed}{said}");
    match (collected(&said), hits(&printed)) {
        (Some(instructions), Some(hits)) if instructions > hits => Ok(instructions.div_ceil(hits)),
        _ => bail!("callgrind has not counted {COUNTED}: {printed}{said}"),
    }
}

/// The number of the test's line `12345 hits`.
fn hits(printed: &str) -> Option<u64> {
    let number = printed.lines().find_map(|line| line.trim().strip_suffix(" hits"))?;
    number.rsplit(' ').next()?.parse().ok().filter(|hits| *hits > 0)
}

/// The number of callgrind's line `==1== Collected : 12345`.
fn collected(said: &str) -> Option<u64> {
    let line = said.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{collected, hits, verdict};

    #[test]
    fn the_count_of_callgrind_is_found() {
        let said = "==7== Events    : Ir\n==7== Collected : 183000000\n==7==\n";
        assert_eq!(collected(said), Some(183_000_000));
        assert_eq!(collected("==7== Events    : Ir"), None);
        assert_eq!(hits("test a::b ... 100 hits\nok\n"), Some(100));
        assert_eq!((hits("0 hits"), hits("ok")), (None, None));
    }

    #[test]
    fn a_heavier_hit_is_refused_and_a_lighter_one_is_not() {
        assert!(verdict(1100, 1000).is_ok() && verdict(10, 1000).is_ok());
        let error = verdict(1101, 1000).unwrap_err().to_string();
        assert!(error.contains("--renew"), "{error}");
    }
}
