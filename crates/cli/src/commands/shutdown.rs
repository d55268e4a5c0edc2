//! `burgeon shutdown`: ends the daemon, and reports mounts that remain.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_block::ErrorKind;
use burgeon_daemon::{
    Client, holder,
    protocol::{MountStatus, Request},
};
use rustix::mount::UnmountFlags;
use serde_json::json;

use super::{
    Context, need_mount_privilege,
    umount::{await_release, daemon_of_waiting, detach, places_of},
};
use crate::{args, exit::Busy, holders, output};

/// Longest wait for the release of each mount after a forced umount.
const FORCED_TIMEOUT_MS: u64 = 15_000;

pub(super) fn shutdown(context: &Context, args: args::Shutdown) -> Result<ExitCode> {
    let daemon = match args.unmount || args.force {
        // This daemon unmounts, and releases the rest.
        true => daemon_of_waiting(context)?,
        false => Client::connect_and_ask(&context.state)?,
    };
    let Some((client, status)) = daemon else {
        let said = match holder::waiting(&context.state).is_empty() {
            true => "no daemon runs",
            false => {
                "no daemon runs, and readers of mounts wait for one: `burgeon doctor --repair` \
                 starts it, `burgeon shutdown --force` gives the readers I/O errors"
            }
        };
        say(context, said)?;
        return Ok(ExitCode::SUCCESS);
    };
    let held = held(&status.mounts);
    if args.unmount || args.force {
        need_mount_privilege("shutdown --unmount")?;
        let flags = if args.force { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        for mount in status.mounts {
            for place in mount.fsid.map(places_of).unwrap_or_default() {
                detach(&place, flags)?;
            }
            let release = |timeout_ms| {
                client.call(&Request::AwaitRelease { id: mount.id, timeout_ms }).map(drop)
            };
            match args.force {
                true => drop(release(FORCED_TIMEOUT_MS)),
                false => await_release(&mount.target, mount.fsid, false, release)?,
            }
        }
    }
    client.call(&Request::Shutdown { force: args.force }).map_err(|e| match held {
        Some(held) if e.kind() == ErrorKind::Unavailable => Busy(held).into(),
        _ => anyhow::Error::from(e),
    })?;
    client.wait_for_end();
    say(context, "the daemon has ended")?;
    Ok(ExitCode::SUCCESS)
}

/// The holders of the first mount that is mounted nowhere in this namespace, where nobody could
/// unmount it.
fn held(mounts: &[MountStatus]) -> Option<String> {
    mounts.iter().find_map(|mount| {
        let fsid = mount.fsid.filter(|fsid| places_of(*fsid).is_empty())?;
        let (shown, holders) = (mount.target.display(), holders::of(fsid)?);
        Some(format!(
            "{shown} is not mounted here, but held by {holders}: end them first, or use `burgeon \
             shutdown --force`, after which they get I/O errors"
        ))
    })
}

fn say(context: &Context, words: &str) -> Result<()> {
    if context.json {
        return output::print_json(&json!({ "running": false }));
    }
    println!("{words}");
    Ok(())
}
