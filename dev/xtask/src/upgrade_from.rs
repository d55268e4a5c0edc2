//! `cargo xtask upgrade-from COMMIT`: builds the program of an earlier commit, and has this one
//! take its mounts over.
//!
//! ```text
//!   commit ─► worktree ─► cargo build ─► tests/upgrade_from.rs of this tree, with BURGEON_EARLIER
//! ```
//!
//! The worktree goes afterwards; what was built stays in `target/earlier` for the next time.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};

/// A commit whose messages between the daemon's processes have the version before today's.
const PREVIOUS: &str = "10c7bb6c";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The earlier commit, tag or branch.
    #[arg(default_value = PREVIOUS)]
    commit: String,
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let (tree, built) = (root.join("target/earlier-tree"), root.join("target/earlier"));
    let git = |arguments: &[&str]| Command::new("git").current_dir(root).args(arguments).status();
    let tree_name = tree.to_str().context("the path of the checkout is not UTF-8")?;
    let remove = || git(&["worktree", "remove", "--force", tree_name]);
    // One that a killed run has left.
    if tree.exists() {
        remove()?;
    }
    let made = git(&["worktree", "add", "--quiet", "--detach", tree_name, &options.commit])?;
    ensure!(made.success(), "there is no commit {} in this clone", options.commit);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let build = Command::new(&cargo)
        .current_dir(&tree)
        .args(["build", "--locked", "--package", "burgeon"])
        .env("CARGO_TARGET_DIR", &built)
        .status();
    remove()?;
    ensure!(build?.success(), "the program of {} cannot be built", options.commit);
    let test = Command::new(&cargo)
        .current_dir(root)
        .args(["test", "--locked", "--package", "burgeon", "--test", "upgrade_from"])
        .env("BURGEON_EARLIER", built.join("debug/burgeon"))
        .status()?;
    ensure!(test.success(), "mounts of the program of {} are not taken over", options.commit);
    Ok(())
}
