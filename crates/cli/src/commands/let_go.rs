//! `burgeon let-go`: puts a plain file below a mount, which needs no process of Burgeon any more.

use std::{path::Path, process::ExitCode};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{Context, need_mount_privilege, umount::mount_of};
use crate::{
    data_args,
    output::{self, bytes},
    progress::Progress,
};

pub(super) fn let_go(context: &Context, args: &data_args::LetGo) -> Result<ExitCode> {
    need_mount_privilege("let-go")?;
    let mut done = Vec::new();
    for path in &args.paths {
        let copied = of_mount(context, path)?;
        if !context.json {
            describe(path, copied);
        }
        done.push(json!({ "path": path, "bytes": copied }));
    }
    if context.json {
        output::print_json(&json!({ "let_go": done }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Lets the mount at `path` go; returns the bytes of its data.
pub(super) fn of_mount(context: &Context, path: &Path) -> Result<u64> {
    let failed = || format!("cannot let {} go", path.display());
    let there = std::fs::canonicalize(path).with_context(failed)?;
    let (client, mount) = mount_of(context, &there, path)?;
    let progress = Progress::new("let-go");
    let update = |done: u64| progress.update(done, Some(mount.data_bytes));
    burgeon_daemon::let_go::let_go(&context.state, &client, mount.id, &update)
        .with_context(failed)?;
    progress.finish();
    Ok(mount.data_bytes)
}

pub(super) fn describe(path: &Path, copied: u64) {
    println!(
        "let {} go: its {} are in a plain file, and no process of Burgeon is needed for it",
        path.display(),
        bytes(copied)
    );
}
