//! `burgeon mount` of what is mounted already, and has nobody who serves it: after `kill -9` of
//! everything the mount is still in place, and data that is not local gives I/O errors.
//!
//! ```text
//!   mounted there, by this state directory ─► no daemon ─► the same image and writes ─► daemon started:
//!     it takes up what the dead one left ─► served again
//! ```
//! Nothing is mounted anew, so whoever has files open there goes on.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{
    Client, Fsid, btrfs_fsid, orphan,
    protocol::{MountStatus, WritesState},
};
use burgeon_oci::Source;

use super::{Context, named};
use crate::{args, exit::Busy};

/// The longest wait until a mount is served again.
const PATIENCE: Duration = Duration::from_secs(60);

/// The pause between two looks at its state.
const PAUSE: Duration = Duration::from_millis(50);

/// Brings the mount back that is asked for, if it is in place and has lost its daemon; `None` if nothing
/// of that kind is there, and it has to be made.
pub(super) fn bring_back(
    context: &Context,
    args: &args::Mount,
) -> Result<Option<(MountStatus, PathBuf)>> {
    let Ok(target) = std::fs::canonicalize(&args.path) else { return Ok(None) };
    let Some((fsid, lost)) = lost_at(context, &target) else { return Ok(None) };
    let shown = target.display();
    let writes = match lost.writes() {
        WritesState::Sprout(sprout) => sprout.name.as_deref(),
        WritesState::ReadOnly => None,
    };
    if !is_same_image(context, &args.name, &lost) || writes != args.writes.as_deref() {
        let writes = writes.map(|name| format!(" with the writes {name:?}")).unwrap_or_default();
        return Err(Busy(format!(
            "cannot mount at {shown}: {}{writes} is mounted there, and has lost its daemon; mount the same \
             again, or use `burgeon doctor --repair`, to bring it back, or unmount it",
            lost.image()
        ))
        .into());
    }
    drop(Client::connect_or_start(&context.state)?);
    let begun = Instant::now();
    loop {
        let status = Client::connect_and_ask(&context.state)?.map(|(_, status)| status);
        let mounts = status.into_iter().flat_map(|status| status.mounts);
        let mount = mounts.into_iter().find(|mount| mount.fsid == Some(fsid));
        let problem = mount.as_ref().and_then(|mount| mount.problem.clone());
        match mount {
            Some(mount) if mount.state == "serving" => return Ok(Some((mount, target))),
            _ if problem.is_none() && begun.elapsed() < PATIENCE => thread::sleep(PAUSE),
            _ => {
                let why = problem.map(|problem| format!(": {problem}")).unwrap_or_default();
                let message = format!(
                    "the mount at {shown} cannot be brought back{why}: `burgeon doctor` says more; what \
                     is local can be read until it is unmounted"
                );
                return Err(Error::new(ErrorKind::Unavailable, message).into());
            }
        }
    }
}

/// Whether `typed` means the image of the mount: it is what was typed then, in whatever spelling, or this
/// host knows it for the same image. Nobody else is asked: what was mounted may be all that is left.
fn is_same_image(context: &Context, typed: &str, lost: &orphan::Orphan) -> bool {
    let in_repository = context.in_repository(typed).ok().flatten();
    let typed = &in_repository.map_or_else(|| typed.to_owned(), |image| image.to_string());
    let source = Source::parse(typed).and_then(Result::ok);
    let is_there = source.is_some() || context.store_location() == *lost.store();
    if is_there && named::canonical(typed) == named::canonical(lost.image()) {
        return true;
    }
    let form = lost.name().split('/').next();
    if let Some(pinned) = source.as_ref().and_then(Source::pinned)
        && form == Some(&*pinned.to_string())
    {
        return true;
    }
    if context.store_location().folder().is_none() {
        return false;
    }
    let known = context.open_store().and_then(|store| named::resolve(context, &store, typed));
    known.is_ok_and(|known| known.digest().is_ok_and(|digest| digest == lost.digest()))
}

/// The mount of this state directory that is in place exactly at `target`, if no daemon runs.
fn lost_at(context: &Context, target: &Path) -> Option<(Fsid, orphan::Orphan)> {
    let mounts = burgeon_daemon::mountinfo::read(Path::new("/proc/thread-self/mountinfo")).ok()?;
    let mount = mounts.iter().rfind(|mount| mount.target == target)?;
    if mount.fs_type != "btrfs" || !matches!(Client::connect(&context.state), Ok(None)) {
        return None;
    }
    let fsid = btrfs_fsid(target).ok()??;
    Some((fsid, orphan::find(&context.state, fsid)?))
}
