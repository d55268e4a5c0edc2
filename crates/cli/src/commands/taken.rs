//! Names the mount that is in the way, and its holders: a mount with the same writes, or a mount
//! that was unmounted here and lives on in another mount namespace or by an open file.

use std::path::{Path, PathBuf};

use burgeon_block::ErrorKind;
use burgeon_daemon::{Client, Fsid, orphan, protocol::WritesState, writes};

use super::{Context, umount::places_of};
use crate::{exit::Busy, holders};

/// A mount of the state directory, with or without a daemon.
struct Known {
    fsid: Fsid,
    target: PathBuf,
    writes: Option<String>,
}

/// Names the place or the holders of the mount with the writes `name`, if `error` says that they
/// are in use; any other error stays as it is. `or` is what else the user can do.
pub(super) fn explain_writes(
    context: &Context,
    name: &str,
    or: &str,
    error: anyhow::Error,
) -> anyhow::Error {
    let is_taken = kind_of(&error) == Some(ErrorKind::Unavailable)
        && writes::is_mounted(&context.state, name).is_ok_and(|is_mounted| is_mounted);
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
