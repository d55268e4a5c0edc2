//! The project's own tools: `cargo xtask tidy` holds the house rules,
//! `cargo xtask test` runs everything that has to hold, `cargo xtask bench` prints the figures that
//! the documents quote; `cargo xtask budget` counts the instructions of a hit;
//! `cargo xtask proofs` shows that the tests of mended defects fail without the mend.

mod bench;
mod budget;
mod built;
mod cargo;
mod check;
mod circles;
mod fail_over;
mod files;
mod fuzz;
mod lab;
mod made;
mod outcome;
mod programs;
mod proofs;
mod tidy;
mod torment;
mod upgrade_from;

use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "xtask", about = "Burgeon's own tools")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check the rules that the compiler does not: crate arrows, circles of files, file
    /// sizes, banned crates and words.
    Tidy,
    /// Measure Burgeon beside its peers and print a table of ratios, aims and verdicts.
    Bench(Box<bench::Options>),
    /// Count the instructions of a hit and hold them against the budget.
    Budget(budget::Options),
    /// Undo each mended defect in a copy of the tree and demand that its test fails.
    Proofs(proofs::Options),
    /// Kill, damage, fill and spoil at random for some minutes, and compare every byte.
    Torment(torment::Options),
    /// Build the program of an earlier commit, and take its mounts over with this one.
    UpgradeFrom(upgrade_from::Options),
    /// Move an accelerated RBD image between two guests of a cluster, and kill the one that writes.
    FailOver(fail_over::Options),
    /// Run format, lints, unit, property and simulation tests; ends with `N passed, N failed`.
    Check,
    /// Run the tests on older kernels that take too long for `test`.
    Kernels,
    /// Run everything that has to hold; ends with `N passed, N failed`.
    Test(check::Options),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Tidy => tidy::run(&root()),
        Command::Bench(options) => bench::run(&root(), &options),
        Command::Budget(options) => budget::run(&root(), &options),
        Command::Proofs(options) => proofs::run(&root(), &options),
        Command::Torment(options) => torment::run(&root(), &options),
        Command::UpgradeFrom(options) => upgrade_from::run(&root(), &options),
        Command::FailOver(options) => fail_over::run(&root(), &options),
        Command::Check => check::run_quick(&root()),
        Command::Kernels => check::run_kernels(&root()),
        Command::Test(options) => check::run(&root(), &options),
    }
}

/// The workspace's root directory.
fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_path_buf()
}
