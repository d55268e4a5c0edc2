//! Shared by the commands of a cache: they find the cache of a device, and print a document.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_accelerator::{control::ControlRequest, folder::CacheFolder};
use burgeon_block::{Error, ErrorKind};
use serde_json::Value;

use crate::{commands::Context, output};

/// The text of a string in a document.
pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(super) fn tell(
    context: &Context,
    document: &Value,
    say: impl FnOnce(&Value),
) -> Result<ExitCode> {
    match context.json {
        true => output::print_json(document)?,
        false => say(document),
    }
    Ok(ExitCode::SUCCESS)
}

/// The cache with an attached device `name`.
pub(super) fn find(context: &Context, name: &str) -> Result<CacheFolder, Error> {
    let mut silent = None;
    for folder in CacheFolder::all(context.state.root()) {
        match folder.ask_server(&ControlRequest::Status) {
            Ok(status) => {
                let mut devices = status["devices"].as_array().into_iter().flatten();
                if devices.any(|device| text(&device["name"]) == name) {
                    return Ok(folder);
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // It may have the device, unless another cache has.
            Err(error) => silent = Some(error),
        }
    }
    Err(silent.unwrap_or_else(|| {
        let what = format!("no device {name} is attached: `burgeon accelerate status` lists them");
        Error::new(ErrorKind::NotFound, what)
    }))
}
