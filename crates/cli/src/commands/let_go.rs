//! `burgeon let-go`: puts a plain file below a mount, which needs no process of Burgeon any more.

use std::{path::Path, process::ExitCode};

use anyhow::{Context as _, Result};
use burgeon_block::Error;
use serde_json::json;

use super::{Context, need_mount_privilege, umount::mount_of};
use crate::{
    data_args,
    output::{self, bytes},
    progress::Progress,
};

/// A mount that was let go.
pub(super) struct LetGone {
    /// Bytes of its data.
    bytes: u64,
    gone: burgeon_daemon::let_go::LetGone,
}

impl LetGone {
    pub(super) fn to_json(&self, path: &Path) -> serde_json::Value {
        let LetGone { bytes, gone } = self;
        json!({
            "path": path,
            "bytes": bytes,
            "cloned": gone.cloned,
            "copied": gone.copied,
            "at_next_mount": gone.later,
        })
    }

    pub(super) fn describe(&self, path: &Path) {
        let (path, LetGone { bytes: all, gone }) = (path.display(), self);
        let made = match (gone.cloned, gone.copied) {
            (0, 0) => String::new(),
            (cloned, copied) => {
                format!(" ({} shared with the cache, {} copied)", bytes(cloned), bytes(copied))
            }
        };
        let bytes = bytes(*all);
        match &gone.later {
            None => println!(
                "let {path} go: its {bytes} are in a plain file{made}, and no process of Burgeon \
                 is needed for it"
            ),
            Some(why) => println!(
                "{path} is served on: {why}. Its {bytes} are in a plain file{made}, and the next \
                 mount of the image needs no process of Burgeon: unmount this one and mount the \
                 image again"
            ),
        }
    }
}

pub(super) fn let_go(context: &Context, args: &data_args::LetGo) -> Result<ExitCode> {
    need_mount_privilege("let-go")?;
    let mut done = Vec::new();
    for path in &args.paths {
        let gone = of_mount(context, path)?;
        if !context.json {
            gone.describe(path);
        }
        done.push(gone.to_json(path));
    }
    if context.json {
        output::print_json(&json!({ "let_go": done }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Lets the mount at `path` go.
pub(super) fn of_mount(context: &Context, path: &Path) -> Result<LetGone> {
    let failed = || format!("cannot let {} go", path.display());
    let there = std::fs::canonicalize(path)
        .map_err(|e| Error::io(format!("{} (`burgeon status` lists the mounts)", failed()), e))?;
    let (client, mount) = mount_of(context, &there, path)?;
    let progress = Progress::new("let-go");
    let update = |done: u64| progress.update(done, Some(mount.data_bytes));
    let gone = burgeon_daemon::let_go::let_go(&context.state, &client, mount.id, &update)
        .with_context(failed)?;
    progress.finish();
    Ok(LetGone { bytes: mount.data_bytes, gone })
}
