//! `burgeon accelerate flush` and `detach`: dirty blocks are written back in many short requests,
//! so that neither ends before its time nor holds others up.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_accelerator::{control::ControlRequest, folder::CacheFolder, offline};
use burgeon_block::{Error, ErrorKind};
use serde_json::json;

use super::found::{find, tell, text};
use crate::{commands::Context, output::bytes};

/// Returns when all that was written before is durable on the slow device.
pub(super) fn flush(context: &Context, name: String) -> Result<ExitCode> {
    let folder = find(context, &name)?;
    let mut before = None;
    loop {
        let question = ControlRequest::WriteBack { name: name.clone(), before, ends: false };
        let done = folder.ask_server(&question)?;
        before = done["before"].as_u64();
        if done["dirty_bytes"].as_u64() == Some(0) {
            break;
        }
    }
    let done = folder.ask_server(&ControlRequest::Flush { name })?;
    tell(context, &done, |done| println!("{} is durable", text(&done["name"])))
}

/// The same for a device that is not attached.
pub(super) fn flush_offline(context: &Context, name: &str) -> Result<ExitCode> {
    let caches = CacheFolder::all(context.state.root());
    let has_dirty = |folder: &&CacheFolder| folder.dirty().iter().any(|(dirty, _)| dirty == name);
    let folder = caches.iter().find(has_dirty).ok_or_else(|| {
        let what = format!("no cache has dirty blocks of a device {name} that is not attached");
        Error::new(ErrorKind::NotFound, what)
    })?;
    let written = offline::flush(folder, name)?;
    tell(context, &json!({ "name": name, "written_bytes": written }), |_| {
        println!("{name} is durable: {} were written back", bytes(written));
    })
}

pub(super) fn detach(context: &Context, name: String, leave_dirty: bool) -> Result<ExitCode> {
    let folder = find(context, &name)?;
    let question = ControlRequest::Detach { name: name.clone(), leave_dirty };
    let mut done = folder.ask_supervisor(&question)?;
    // A supervisor of an earlier version, which has no dirty blocks, does not say it.
    while done["is_detached"] == false {
        done = folder.ask_supervisor(&question)?;
    }
    let is_dirty = done["is_dirty"] == true;
    tell(context, &json!({ "name": name, "is_dirty": is_dirty }), |_| match is_dirty {
        true => println!(
            "{name} is detached. The cache {} has content of it that the slow device lacks: attach it there again \
             before you use it",
            folder.name()
        ),
        false => println!("{name} is detached"),
    })
}
