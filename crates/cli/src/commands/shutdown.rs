//! `burgeon shutdown`: ends the daemon, with a clean word about what is still mounted.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_daemon::{Client, protocol::Request};
use rustix::mount::UnmountFlags;
use serde_json::json;

use super::{
    Context, need_mount_privilege,
    umount::{detach, places_of},
};
use crate::{args, output};

/// How long each mount may take to be released after its umount.
const RELEASE_TIMEOUT_MS: u64 = 15_000;

pub(super) fn shutdown(context: &Context, args: args::Shutdown) -> Result<ExitCode> {
    let Some((client, status)) = Client::connect_and_ask(&context.state)? else {
        say(context, "no daemon runs")?;
        return Ok(ExitCode::SUCCESS);
    };
    if args.unmount || args.force {
        need_mount_privilege("shutdown --unmount")?;
        let flags = if args.force { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        for mount in status.mounts {
            for place in mount.fsid.map(places_of).unwrap_or_default() {
                detach(&place, flags)?;
            }
            let released = client
                .call(&Request::AwaitRelease { id: mount.id, timeout_ms: RELEASE_TIMEOUT_MS });
            if !args.force {
                released?;
            }
        }
    }
    client.call(&Request::Shutdown { force: args.force })?;
    client.wait_for_end();
    say(context, "the daemon has ended")?;
    Ok(ExitCode::SUCCESS)
}

fn say(context: &Context, words: &str) -> Result<()> {
    if context.json {
        return output::print_json(&json!({ "running": false }));
    }
    println!("{words}");
    Ok(())
}
