//! `burgeon log`: shows and changes the log of the running daemon.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{
    Client,
    protocol::{Reply, Request},
};
use serde_json::json;

use super::Context;
use crate::{config::Format, global::LEVELS, output};

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon log                          show level and format
  burgeon log --level debug            each retry of a request, from now on
  burgeon log --level info --format json

A change holds until the daemon starts again, also by `upgrade` or `systemctl reload burgeon`; the
configuration (log.level, log.format) holds for later starts.";

#[derive(clap::Args, Debug)]
pub(crate) struct Log {
    /// Log events from this level on: error, warn, info, debug or off
    #[arg(long, value_name = "LEVEL", value_parser = LEVELS, hide_possible_values = true)]
    level: Option<String>,
    /// Format of the lines
    #[arg(long, value_enum)]
    format: Option<Format>,
}

pub(super) fn log(context: &Context, log: Log) -> Result<ExitCode> {
    let Some(client) = Client::connect(&context.state)? else {
        let what = "no daemon runs: --log-level of the command that starts it, or log.level of the \
                    configuration, sets its level";
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    };
    let json = log.format.map(|format| format == Format::Json);
    let Reply::Log { level, json } = client.call(&Request::Log { level: log.level, json })?.0
    else {
        let what = "the daemon is of another version: `burgeon upgrade` replaces it";
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    };
    let format = if json { "json" } else { "text" };
    match context.json {
        true => output::print_json(&json!({ "level": level, "format": format }))?,
        false => println!("level {level}, format {format}"),
    }
    Ok(ExitCode::SUCCESS)
}
