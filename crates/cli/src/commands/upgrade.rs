//! `burgeon upgrade`: a new program takes over the mounts.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_daemon::Upgraded;
use serde_json::json;

use super::{Context, need_mount_privilege};
use crate::output;

pub(super) fn upgrade(context: &Context) -> Result<ExitCode> {
    need_mount_privilege("upgrade")?;
    let Some(Upgraded { status, server_replaced }) = burgeon_daemon::upgrade(&context.state)?
    else {
        if context.json {
            output::print_json(&json!({ "running": false }))?;
        } else {
            println!("no daemon runs");
        }
        return Ok(ExitCode::SUCCESS);
    };
    if context.json {
        output::print_json(&json!({
            "running": true,
            "version": status.version,
            "supervisor_pid": status.supervisor_pid,
            "server_pid": status.server_pid,
            "server_replaced": server_replaced,
            "mounts": status.mounts.len(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    println!("the daemon is version {} now; mounted: {}", status.version, status.mounts.len());
    if !server_replaced {
        println!(
            "note: a mount is --fast, whose reads would fail without the serving process: the old \
             program serves on; when it is unmounted, run `burgeon upgrade` again"
        );
    }
    Ok(ExitCode::SUCCESS)
}
