//! The options of the commands that watch and examine: `trace`, `top` and `doctor`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub(crate) const TRACE_EXAMPLES: &str = "\
Examples:
  burgeon trace /mnt/a                         the last reads that waited for 10 ms or longer
  burgeon trace /mnt/a --follow 60             those of the next 60 s, as they end
  burgeon trace /mnt/a --top files             the files that cost the most time
  burgeon trace /mnt/a --summary --threshold 1

The server remembers the last 256 waits of each mount: of 1 ms or longer, and of reads that failed.";

#[derive(Args, Debug)]
pub(crate) struct Trace {
    /// The mount
    pub(crate) mount: PathBuf,
    /// Leave out shorter waits, in milliseconds, unless their reads failed
    #[arg(long, value_name = "MS", default_value = "10")]
    pub(crate) threshold: u64,
    /// Show the waits of the next seconds instead of the remembered ones
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(crate) follow: Option<u64>,
    /// Show only the files with the longest total waits
    #[arg(long, value_enum, conflicts_with = "summary")]
    pub(crate) top: Option<By>,
    /// Show only totals: waits, time, failed tries, errors
    #[arg(long)]
    pub(crate) summary: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
pub(crate) enum By {
    /// By file
    Files,
}

pub(crate) const TOP_EXAMPLES: &str = "\
Examples:
  burgeon top                    until Ctrl-C
  burgeon top --interval 5
  burgeon top --count 1          for scripts: one screen after one interval";

#[derive(Args, Debug)]
pub(crate) struct Top {
    /// Seconds between two screens
    #[arg(long, value_name = "SECONDS", default_value = "2")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) interval: u64,
    /// End after this many screens
    #[arg(long, value_name = "NUMBER")]
    pub(crate) count: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    /// Repair the leftovers of a crash; kept writes are never removed
    #[arg(long)]
    pub(crate) repair: bool,
    /// Only print the repairs that --repair would make
    #[arg(long, requires = "repair")]
    pub(crate) dry_run: bool,
    /// Write a report for support to this new file: findings, status, configuration, metrics and
    /// the end of the log, without secrets
    #[arg(long, value_name = "FILE", conflicts_with = "repair")]
    pub(crate) report: Option<PathBuf>,
}
