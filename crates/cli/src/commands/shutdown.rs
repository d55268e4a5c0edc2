//! `burgeon shutdown`: ends the daemon, and reports mounts that remain.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use burgeon_block::ErrorKind;
use burgeon_daemon::{
    doctor::mounts_without_daemon,
    holder,
    orphan::{self, Orphan},
    protocol::{MountStatus, Request},
};
use rustix::mount::UnmountFlags;
use serde_json::json;

use super::{
    Context, need_mount_privilege,
    places::places_of,
    status::that_exist,
    umount::{AT_ONCE_MS, await_release, daemon_if, detach},
};
use crate::{args, exit::Busy, holders, output};

/// Longest wait for the release of each mount after a forced umount.
const FORCED_TIMEOUT_MS: u64 = 15_000;

pub(super) fn shutdown(context: &Context, args: args::Shutdown) -> Result<ExitCode> {
    let unmounts = args.unmount || args.force;
    // A new daemon serves the mounts again, so that no umount waits, and releases them.
    let is_needed = || {
        unmounts && (!holder::waiting(&context.state).is_empty() || !lost_here(context).is_empty())
    };
    let Some((client, status)) = daemon_if(context, is_needed)? else {
        return without_daemon(context, &args);
    };
    let held = held(&status.mounts);
    if unmounts {
        need_mount_privilege("shutdown --unmount")?;
        let flags = flags(&args);
        for mount in status.mounts {
            let found = mount.fsid.and_then(|fsid| orphan::find(&context.state, fsid));
            for place in mount.fsid.map(places_of).unwrap_or_default() {
                detach(context, &place, found.as_ref(), flags)?;
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

fn flags(args: &args::Shutdown) -> UnmountFlags {
    if args.force { UnmountFlags::DETACH } else { UnmountFlags::empty() }
}

/// The mounts in this namespace that have no daemon.
fn lost_here(context: &Context) -> Vec<Orphan> {
    let mut lost = orphan::all(&context.state);
    lost.retain(|mount| mount.fsid().is_some_and(|fsid| !places_of(fsid).is_empty()));
    lost
}

/// No daemon runs. With an option to unmount, none can be started either, so this process unmounts.
fn without_daemon(context: &Context, args: &args::Shutdown) -> Result<ExitCode> {
    if args.unmount || args.force {
        for mount in lost_here(context) {
            need_mount_privilege("shutdown --unmount")?;
            for place in mount.fsid().map(places_of).unwrap_or_default() {
                detach(context, &place, Some(&mount), flags(args))?;
            }
            let release = |ms| mount.release(&context.state, Duration::from_millis(ms));
            match args.force {
                // The next daemon removes the folder of a mount that somebody still uses.
                true => drop(release(AT_ONCE_MS)),
                false => await_release(mount.target(), mount.fsid(), false, release)?,
            }
        }
        say(context, "no daemon runs")?;
        return Ok(ExitCode::SUCCESS);
    }
    let lost = mounts_without_daemon(&context.state);
    let said = match (lost, holder::waiting(&context.state).is_empty()) {
        (_, false) => {
            "no daemon runs, and readers of mounts wait for one: `burgeon doctor --repair` \
             starts it, `burgeon shutdown --force` gives the readers I/O errors"
        }
        (0, true) => "no daemon runs",
        (lost, true) => &format!(
            "no daemon runs, but {}: `burgeon doctor --repair` serves them again, `burgeon \
             shutdown --unmount` unmounts them",
            that_exist(lost)
        ),
    };
    say(context, said)?;
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
