//! Names the mount that is in the way, and its holders: a mount with the same writes, or a mount
//! that was unmounted here and lives on in another mount namespace or by an open file. A mount that
//! is just being released is waited for.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::ErrorKind;
use burgeon_daemon::{
    Client, Fsid, orphan,
    protocol::{Reply, Request, WritesState},
    writes,
};

use super::{Context, places::places_of};
use crate::{exit::Busy, holders};

/// A mount of the state directory, with or without a daemon.
struct Known {
    fsid: Fsid,
    target: PathBuf,
    writes: Option<String>,
}

/// Longest wait for writes that are being released: after a plain umount, that takes a second or
/// so.
const RELEASE_MAX: Duration = Duration::from_secs(5);

/// Sends `request`, a mount with the writes `name`, again while these are being released.
pub(super) fn call_when_released(
    context: &Context,
    client: &Client,
    request: &Request,
    name: Option<&str>,
) -> burgeon_block::Result<(Reply, Vec<OwnedFd>)> {
    let begun = Instant::now();
    loop {
        let was_taken = name.filter(|name| is_taken(context, name));
        let made = client.call(request);
        let is_refused = made.as_ref().is_err_and(|e| e.kind() == ErrorKind::Unavailable);
        match was_taken {
            Some(name)
                if is_refused && begun.elapsed() < RELEASE_MAX && !is_held(context, name) =>
            {
                thread::sleep(Duration::from_millis(100));
            }
            _ => return made,
        }
    }
}

fn is_taken(context: &Context, name: &str) -> bool {
    writes::is_mounted(&context.state, name).is_ok_and(|is_mounted| is_mounted)
}

/// True if a mount of the writes `name` is in place, or held by a process or another namespace.
fn is_held(context: &Context, name: &str) -> bool {
    let of_it = |mount: &Known| mount.writes.as_deref() == Some(name);
    let is_held =
        |mount: Known| !places_of(mount.fsid).is_empty() || holders::of(mount.fsid).is_some();
    all(context).into_iter().filter(of_it).any(is_held)
}

/// Names the place or the holders of the mount with the writes `name`, if `error` says that they
/// are in use; any other error stays as it is. `or` is what else the user can do.
pub(super) fn explain_writes(
    context: &Context,
    name: &str,
    or: &str,
    error: anyhow::Error,
) -> anyhow::Error {
    let is_taken = kind_of(&error) == Some(ErrorKind::Unavailable) && is_taken(context, name);
    let mounts = if is_taken { all(context) } else { Vec::new() };
    let mount = mounts.into_iter().find(|mount| mount.writes.as_deref() == Some(name));
    let told = mount.and_then(|mount| {
        let already = format!("the writes {name:?} are mounted already");
        let places = places_of(mount.fsid);
        if let Some(place) = places.first() {
            let at = place.display();
            return Some(format!(
                "{already}, at {at}: unmount them with `burgeon umount {at}`{or}"
            ));
        }
        let holders = holders::of(mount.fsid)?;
        let shown = mount.target.display();
        Some(format!(
            "{already}: {shown} is unmounted here, but still held by {holders}: the writes are \
             free when these let go; end them or unmount it there{or}"
        ))
    });
    told.map_or(error, |told| Busy(told).into())
}

/// Names the holders of a mount that was at `target`, if `error` says that nothing is mounted
/// there; any other error stays as it is.
pub(super) fn explain_target(
    context: &Context,
    target: &Path,
    error: anyhow::Error,
) -> anyhow::Error {
    if kind_of(&error) != Some(ErrorKind::NotFound) {
        return error;
    }
    let gone = all(context).into_iter().filter(|mount| mount.target == target);
    let mut held = gone.filter_map(|mount| match places_of(mount.fsid).is_empty() {
        true => holders::of(mount.fsid),
        false => None,
    });
    let shown = target.display();
    held.next().map_or(error, |holders| {
        let told = format!(
            "{shown} is unmounted here already, but still held by {holders}: it is released when \
             they let go"
        );
        Busy(told).into()
    })
}

fn kind_of(error: &anyhow::Error) -> Option<ErrorKind> {
    error.downcast_ref::<burgeon_block::Error>().map(burgeon_block::Error::kind)
}

fn all(context: &Context) -> Vec<Known> {
    let name = |writes: &WritesState| match writes {
        WritesState::Sprout(sprout) => sprout.name.clone(),
        WritesState::ReadOnly => None,
    };
    if let Ok(Some((_, status))) = Client::connect_and_ask(&context.state) {
        let known = status.mounts.into_iter().filter_map(|mount| {
            let writes = name(&mount.writes);
            Some(Known { fsid: mount.fsid?, target: mount.target, writes })
        });
        return known.collect();
    }
    let known = orphan::all(&context.state).into_iter().filter_map(|mount| {
        let (target, writes) = (mount.target().to_owned(), name(mount.writes()));
        Some(Known { fsid: mount.fsid()?, target, writes })
    });
    known.collect()
}
