//! `burgeon upgrade`: a new program takes over the mounts.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{
    Upgraded,
    doctor::{mounts_let_go, mounts_without_daemon},
};
use serde_json::json;

use super::{Context, need_mount_privilege, without_daemon};
use crate::{args, output};

pub(super) fn upgrade(context: &Context, args: args::Upgrade) -> Result<ExitCode> {
    need_mount_privilege("upgrade")?;
    if args.check {
        return check(context);
    }
    let Some(Upgraded { status, server_replaced }) = burgeon_daemon::upgrade(&context.state)?
    else {
        return no_daemon(context);
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

/// Nothing is to be upgraded, unless mounts have survived the daemon: the old program serves them.
fn no_daemon(context: &Context) -> Result<ExitCode> {
    let lost = mounts_without_daemon(&context.state);
    if lost > mounts_let_go(&context.state).len() {
        let what = format!("nothing was upgraded: {}", without_daemon::no_daemon(context));
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    }
    match context.json {
        true => output::print_json(&json!({ "running": false }))?,
        false => println!("no daemon runs"),
    }
    Ok(ExitCode::SUCCESS)
}

fn check(context: &Context) -> Result<ExitCode> {
    if !burgeon_daemon::check_upgrade(&context.state)? {
        return no_daemon(context);
    }
    let version = env!("CARGO_PKG_VERSION");
    match context.json {
        true => output::print_json(
            &json!({ "running": true, "version": version, "can_take_over": true }),
        )?,
        false => println!("version {version} can take over here; nothing was changed"),
    }
    Ok(ExitCode::SUCCESS)
}
