//! `cargo xtask torment`: the test program `torment` of the command, for as long as asked for.
//!
//! The program itself (`crates/cli/tests/torment/`) says what it does; `make test` runs it for a
//! minute.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::cargo::cargo;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Duration in minutes.
    #[arg(long, default_value_t = 1)]
    minutes: u64,
    /// The seed of an earlier run, to do the same things in the same order.
    #[arg(long)]
    seed: Option<u64>,
}

/// Builds the release program and torments it. An error if a byte was wrong, a wait had no end, or
/// anything was left behind.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let mut command =
        cargo(&["test", "--release", "--locked", "--package", "burgeon", "--test", "torment"]);
    command.current_dir(root).env("TORMENT_SECONDS", (options.minutes * 60).to_string());
    if let Some(seed) = options.seed {
        command.env("TORMENT_SEED", seed.to_string());
    }
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "the torment found something, or could not run: {status}");
    Ok(())
}
