//! `burgeon accelerate adopt`.

use std::{path::Path, process::ExitCode};

use anyhow::Result;
use burgeon_accelerator::{adopt::adopt as take_over, folder::CacheFolder};
use burgeon_daemon::refuse_accelerated;
use serde_json::json;

use super::found::tell;
use crate::{commands::Context, output::bytes};

pub(super) fn adopt(context: &Context, name: &str, cache: &Path) -> Result<ExitCode> {
    let folder = CacheFolder::of(context.state.root(), name)?;
    refuse_accelerated(context.state.root())?;
    let cache = std::path::absolute(cache)?;
    let adopted = take_over(&folder, &cache)?;
    let dirty = adopted.dirty.iter().map(|it| json!({ "name": it.name, "bytes": it.bytes() }));
    let document = json!({
        "name": name,
        "cache": cache,
        "size": adopted.size,
        "dirty": dirty.collect::<Vec<_>>(),
    });
    tell(context, &document, |_| {
        match adopted.size {
            Some(size) => println!("cache {name}: {} on {}", bytes(size), cache.display()),
            None => println!("cache {name} is in use on this host already"),
        }
        for dirty in &adopted.dirty {
            println!("  {} of {} are in the cache alone", bytes(dirty.bytes()), dirty.name);
        }
    })
}
