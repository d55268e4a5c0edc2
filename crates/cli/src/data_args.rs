//! Arguments of the commands that fetch a mount's data: `prefetch`, `pin`, `let-go`.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args as ClapArgs;

use crate::quantities::{parse_rate, parse_threads};

#[derive(ClapArgs, Debug)]
pub(crate) struct Prefetch {
    /// Files and folders in mounts
    #[arg(required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// Limit of bytes per second
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    pub(crate) rate: Option<u64>,
    /// Number of pieces that are read at the same time
    #[arg(long, default_value = "8", value_parser = parse_threads)]
    pub(crate) threads: NonZeroUsize,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Pin {
    /// Files and folders in mounts
    #[arg(required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// Drop the pins of these paths; local data stays until the cache evicts it
    #[arg(long)]
    pub(crate) remove: bool,
}

pub(crate) const LET_GO_EXAMPLES: &str = "\
Examples:
  burgeon let-go /mnt/a
  burgeon mount app:7 /mnt/a --fill --let-go

Afterwards the kernel alone serves all reads: no process of Burgeon is needed. Data in the cache is
shared with the mount where the file system can (btrfs, XFS). The rest takes disk space, and so does
all that the mount's writes may still take.";

#[derive(ClapArgs, Debug)]
pub(crate) struct LetGo {
    /// Mount points
    #[arg(required = true)]
    pub(crate) paths: Vec<PathBuf>,
}
