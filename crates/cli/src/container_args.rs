//! The command lines of containers.

use std::{ffi::OsString, path::PathBuf};

use burgeon_container::Network;
use clap::ValueEnum;

use crate::{
    pull::Pull,
    quantities::{parse_write_limit, parse_writes},
};

pub(crate) const BUNDLE_EXAMPLES: &str = "\
Examples:
  burgeon bundle oci://docker.io/python:3.12 /srv/py -- python -c 'print(1)'
  runc run -b /srv/py py                       or crun run -b /srv/py py
  burgeon umount /srv/py/rootfs                ends the mount; then remove /srv/py";

#[derive(clap::Args, Debug)]
pub(crate) struct Bundle {
    /// The image: oci://REGISTRY/REPOSITORY[:TAG|@DIGEST] or oci-layout:DIR[:TAG]
    pub(crate) image: String,
    /// The directory of the bundle: missing or empty
    pub(crate) dir: PathBuf,
    /// Connect the container's standard streams to a terminal that the runtime makes
    #[arg(long)]
    pub(crate) tty: bool,
    /// The network of the container
    #[arg(long, value_enum, default_value_t = NetworkChoice::None)]
    pub(crate) network: NetworkChoice,
    #[command(flatten)]
    pub(crate) choices: Choices,
}

/// Options of all containers.
#[derive(clap::Args, Debug)]
pub(crate) struct Choices {
    /// User of the program, by name or number, instead of the image's
    #[arg(long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Directory to start in, instead of the image's
    #[arg(long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// A further variable of the environment; it replaces one of the image
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Host name in the container
    #[arg(long, value_name = "NAME", default_value = "burgeon")]
    pub(crate) hostname: String,
    /// Keep writes under this name; a later mount with the same name restores them
    #[arg(long, value_name = "NAME", value_parser = parse_writes)]
    pub(crate) writes: Option<String>,
    /// Allow no writes; the image's volumes are empty and writable
    #[arg(long, conflicts_with_all = ["writes", "write_limit"])]
    pub(crate) read_only: bool,
    /// Limit of the writes, as for `mount`
    #[arg(long, value_name = "SIZE", value_parser = parse_write_limit)]
    pub(crate) write_limit: Option<u64>,
    /// Policy for asking a registry for the current image, as for `mount` [default: newer]
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(crate) pull: Option<Pull>,
    /// The command, in place of the image's Cmd; the image's entrypoint still comes first
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// `--network`.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NetworkChoice {
    /// The network of this machine
    Host,
    /// A network of its own, without an interface to the outside
    None,
}

impl From<NetworkChoice> for Network {
    fn from(choice: NetworkChoice) -> Self {
        match choice {
            NetworkChoice::Host => Self::Host,
            NetworkChoice::None => Self::None,
        }
    }
}

pub(crate) const RUN_EXAMPLES: &str = "\
Examples:
  burgeon run oci://docker.io/python:3.12 -- python -c 'print(1)'
  burgeon run oci://docker.io/debian:12 --writes work -- bash     the next run with --writes work continues
  burgeon run oci://docker.io/debian:12 --network none --user 1000 -- id

The exit code is that of the command, 128 and the signal's number if a signal ended it, 126 or 127 if
it cannot be executed or found, and 125 if the container cannot be set up.";

#[derive(clap::Args, Debug)]
pub(crate) struct Run {
    /// The image: oci://REGISTRY/REPOSITORY[:TAG|@DIGEST] or oci-layout:DIR[:TAG]
    pub(crate) image: String,
    /// The network of the container
    #[arg(long, value_enum, default_value_t = NetworkChoice::Host)]
    pub(crate) network: NetworkChoice,
    #[command(flatten)]
    pub(crate) choices: Choices,
}
