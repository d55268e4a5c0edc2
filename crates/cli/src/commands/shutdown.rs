//! `burgeon shutdown`: ends the daemon, and reports mounts that remain.

use std::{
    cmp::Reverse,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use burgeon_block::ErrorKind;
use burgeon_daemon::{
    Fsid,
    doctor::{mounts_let_go, mounts_without_daemon},
    holder,
    orphan::{self, Orphan},
    protocol::{MountStatus, Request},
};
use rustix::{
    fs::{AtFlags, CWD, StatxFlags, statx},
    io::Errno,
    mount::{UnmountFlags, unmount},
};
use serde_json::json;

use super::{
    Context, need_mount_privilege,
    places::places_of,
    umount::{AT_ONCE_MS, await_release, daemon_if, detach, release_by, release_of},
    without_daemon::that_exist,
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
    let left = status.mounts.iter().filter(|mount| mount.state == "let go" && !unmounts).count();
    if unmounts {
        need_mount_privilege("shutdown --unmount")?;
        let flags = flags(&args);
        if !args.force {
            // All or none: who has to end a program first unmounts nothing meanwhile.
            if let Some(held) = &held {
                return Err(Busy(held.clone()).into());
            }
            refuse_busy(status.mounts.iter().filter_map(|mount| mount.fsid))?;
        }
        for mount in innermost_first(status.mounts, |mount| &mount.target) {
            let found = mount.fsid.and_then(|fsid| orphan::find(&context.state, fsid));
            for place in mount.fsid.map(places_of).unwrap_or_default() {
                detach(context, &place, found.as_ref(), flags)?;
            }
            let release = |timeout_ms| release_by(&client, mount.id, timeout_ms);
            match args.force {
                true => drop(release(FORCED_TIMEOUT_MS)),
                false => await_release(&mount.target, mount.fsid, false, release)?,
            }
        }
    }
    client.call(&Request::Shutdown { force: args.force }).map_err(|e| match held {
        Some(held) if e.kind() == ErrorKind::Unavailable && !client.is_silent() => {
            Busy(held).into()
        }
        _ => anyhow::Error::from(e),
    })?;
    client.wait_for_end()?;
    let said = match left {
        0 => "the daemon has ended".to_owned(),
        1 => "the daemon has ended; a mount that was let go stays".to_owned(),
        left => format!("the daemon has ended; {left} mounts that were let go stay"),
    };
    say(context, &said)?;
    Ok(ExitCode::SUCCESS)
}

fn flags(args: &args::Shutdown) -> UnmountFlags {
    if args.force { UnmountFlags::DETACH } else { UnmountFlags::empty() }
}

/// The mounts in an order in which one below another is unmounted before it.
fn innermost_first<M>(mut mounts: Vec<M>, target: impl Fn(&M) -> &Path) -> Vec<M> {
    mounts.sort_by_key(|mount| Reverse(target(mount).components().count()));
    mounts
}

/// `Busy`, with their users, if some of the places of these file systems are in use.
fn refuse_busy(mounts: impl Iterator<Item = Fsid>) -> Result<()> {
    let places: Vec<_> = mounts.flat_map(places_of).collect();
    // A mount below another one of them goes with it.
    let holds_another =
        |place: &PathBuf| places.iter().any(|other| other != place && other.starts_with(place));
    let busy = places.iter().filter(|place| !holds_another(place) && is_busy(place));
    let busy: Vec<_> =
        busy.map(|place| format!("{} is {}", place.display(), holders::describe(place))).collect();
    if busy.is_empty() {
        return Ok(());
    }
    let what = format!(
        "nothing was unmounted: {}; end these first, or use `burgeon shutdown --force`, which \
         releases each mount when they let go",
        busy.join("; ")
    );
    Err(Busy(what).into())
}

/// True if the kernel would not unmount `place`.
fn is_busy(place: &Path) -> bool {
    // Marks what is not busy as expired, and a second call would unmount what is marked. Any look
    // at it takes the mark away: so one before, and one after.
    let look = || statx(CWD, place, AtFlags::STATX_DONT_SYNC, StatxFlags::MODE);
    let _ = look();
    let busy = unmount(place, UnmountFlags::EXPIRE | UnmountFlags::NOFOLLOW) == Err(Errno::BUSY);
    let _ = look();
    busy
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
        if !args.force {
            refuse_busy(lost_here(context).iter().filter_map(Orphan::fsid))?;
        }
        for mount in innermost_first(lost_here(context), |mount| mount.target()) {
            need_mount_privilege("shutdown --unmount")?;
            for place in mount.fsid().map(places_of).unwrap_or_default() {
                detach(context, &place, Some(&mount), flags(args))?;
            }
            let release = |timeout_ms| release_of(context, &mount, timeout_ms);
            match args.force {
                // The next daemon removes the folder of a mount that somebody still uses.
                true => drop(release(AT_ONCE_MS)),
                false => await_release(mount.target(), mount.fsid(), false, release)?,
            }
        }
        let left = mounts_without_daemon(&context.state);
        if left > 0 && !args.force {
            let what = format!(
                "no daemon runs, but {}, and not in this mount namespace: end their users \
                 (`burgeon doctor` lists these mounts), or use `burgeon shutdown --force`",
                that_exist(left)
            );
            return Err(Busy(what).into());
        }
        let said = match left {
            0 => "no daemon runs".to_owned(),
            _ => format!("no daemon runs; {}, and not in this mount namespace", that_exist(left)),
        };
        say(context, &said)?;
        return Ok(ExitCode::SUCCESS);
    }
    let let_go = mounts_let_go(&context.state).len();
    let lost = mounts_without_daemon(&context.state).saturating_sub(let_go);
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
