//! `burgeon accelerate grow` and `replace`: another size, or another device, of a cache.

use std::{fs, path::Path, process::ExitCode};

use anyhow::Result;
use burgeon_accelerator::{
    control::ControlRequest,
    dirty::refuse_elsewhere,
    disk::Disk,
    folder::CacheFolder,
    growth,
    replace::{self as moving, layout_of, settle},
};
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::refuse_accelerated;
use serde_json::{Value, json};

use super::{
    NewCache,
    found::{tell, text},
    make_file, refuse_content, refuse_dirty,
};
use crate::{commands::Context, output::bytes};

/// The device of a cache that is not served.
fn open_idle(folder: &CacheFolder) -> Result<Disk, Error> {
    settle(folder)?;
    Disk::open(&folder.cache()?)
}

pub(super) fn grow(context: &Context, name: &str, size: Option<u64>) -> Result<ExitCode> {
    let folder = CacheFolder::of(context.state.root(), name)?;
    folder.cache()?;
    let done = match folder.is_served() {
        true => folder.ask_supervisor(&ControlRequest::Grow { size })?,
        false => {
            let mut disk = open_idle(&folder)?;
            let head = burgeon_accelerate::read_super(&disk, disk.size())?;
            if !folder.is_its_cache(head.id) {
                let what = format!("{} is not the device of {name}", disk.path().display());
                return Err(Error::new(ErrorKind::Invalid, what).into());
            }
            let size = growth::grow(&mut disk, size)?;
            json!({ "cache": disk.path(), "size": size })
        }
    };
    tell_size(context, name, &done)
}

fn tell_size(context: &Context, name: &str, done: &Value) -> Result<ExitCode> {
    tell(context, done, |done| {
        let size = bytes(done["size"].as_u64().unwrap_or(0));
        println!("cache {name}: {size} on {}", text(&done["cache"]));
    })
}

pub(super) fn replace(context: &Context, name: &str, on: NewCache) -> Result<ExitCode> {
    let folder = CacheFolder::of(context.state.root(), name)?;
    folder.cache()?;
    refuse_accelerated(context.state.root())?;
    let on = NewCache { cache: std::path::absolute(&on.cache)?, ..on };
    let is_made = make_file(&on.cache, on.size, on.log_size)?;
    let done = move_to(&folder, &on).inspect_err(|_| {
        if is_made {
            remove_unused(&folder, &on.cache);
        }
    })?;
    tell_size(context, name, &done)
}

/// Removes the file that was made for a cache that did not move to it. An error is no proof of
/// that: a supervisor that did not answer in time may go on, and has the file open then.
fn remove_unused(folder: &CacheFolder, file: &Path) {
    let Ok(claimed) = Disk::open(file) else { return };
    if folder.cache().is_ok_and(|now| now != file) {
        let _ = fs::remove_file(file);
    }
    drop(claimed);
}

fn move_to(folder: &CacheFolder, on: &NewCache) -> Result<Value, Error> {
    let (cache, log_size) = (&on.cache, on.log_size);
    let new = Disk::open(cache)?;
    let layout = layout_of(new.size(), log_size)?;
    refuse_content(&new, on.force)?;
    refuse_dirty(&new, "replace")?;
    // It may be a slow device that looks empty, because a cache has its content.
    refuse_elsewhere(folder, "", &new)?;
    if !folder.is_served() {
        moving::replace(folder, &open_idle(folder)?, &new, layout)?;
        return Ok(json!({ "cache": cache, "size": new.size() }));
    }
    // The supervisor claims it.
    drop(new);
    loop {
        let question = ControlRequest::Replace { cache: cache.to_owned(), log_size };
        let done = folder.ask_supervisor(&question)?;
        if done["is_replaced"] != false {
            return Ok(done);
        }
    }
}
