//! `burgeon mount` of a mount that is in place but no longer served. After `kill -9` of all
//! processes the mount stays, and data that is not local gives I/O errors.
//!
//! ```text
//!   mounted there, by this state directory ─► no daemon ─► the same image and writes ─► daemon started:
//!     it adopts the mounts of the dead one ─► served again
//! ```
//! Nothing is mounted anew, so open files keep working.

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
use burgeon_image::catalog::ReservedName;
use burgeon_oci::Source;

use super::{Context, mount_point::Opened, named};
use crate::{args, exit::Busy};

/// Longest wait until a mount is served again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pause between two checks of its state.
const PAUSE: Duration = Duration::from_millis(50);

/// Serves the requested mount again, if it is in place and has lost its daemon; `None` if there is
/// no such mount and a new one must be made.
pub(crate) fn resume(
    context: &Context,
    args: &args::Mount,
) -> Result<Option<(MountStatus, PathBuf)>> {
    // A slash at the end would set off an automount.
    let path: PathBuf = args.path.components().collect();
    let Ok(target) = std::fs::canonicalize(path) else { return Ok(None) };
    let Some((fsid, lost)) = lost_at(context, &target) else { return Ok(None) };
    let shown = target.display();
    if !is_same(context, args, &lost) {
        return Err(Busy(format!(
            "cannot mount at {shown}: {} is mounted there, and has lost its daemon; mount the same \
             again, or use `burgeon doctor --repair`, to resume it, or unmount it",
            describe(&lost)
        ))
        .into());
    }
    let mount = serve_again(context, fsid, &target)?;
    Ok(Some((mount, target)))
}

/// Starts the daemon, and waits until the mount `fsid` at `shown` is served again.
pub(crate) fn serve_again(context: &Context, fsid: Fsid, shown: &Path) -> Result<MountStatus> {
    let shown = shown.display();
    drop(Client::connect_or_start(&context.state)?);
    let begun = Instant::now();
    loop {
        let status = Client::connect_and_ask(&context.state)?.map(|(_, status)| status);
        let mounts = status.into_iter().flat_map(|status| status.mounts);
        let mount = mounts.into_iter().find(|mount| mount.fsid == Some(fsid));
        let problem = mount.as_ref().and_then(|mount| mount.problem.clone());
        match mount {
            Some(mount) if matches!(&*mount.state, "serving" | "let go") => {
                return Ok(mount);
            }
            _ if problem.is_none() && begun.elapsed() < PATIENCE => thread::sleep(PAUSE),
            _ => {
                let why = problem.map(|problem| format!(": {problem}")).unwrap_or_default();
                let message = format!(
                    "the mount at {shown} cannot be resumed{why}: `burgeon doctor` says \
                     more; local data can be read until it is unmounted"
                );
                return Err(Error::new(ErrorKind::Unavailable, message).into());
            }
        }
    }
}

/// The mount at `opened`, if it is the requested one: made by this state directory, of the same
/// image, with the same writes. Another one of this state directory is an error.
pub(crate) fn already(
    context: &Context,
    args: &args::Mount,
    opened: &Opened,
) -> Result<Option<orphan::Orphan>> {
    let mounted = opened.btrfs_root()?.and_then(|fsid| orphan::find(&context.state, fsid));
    match mounted {
        Some(mount) if !is_same(context, args, &mount) => Err(Busy(format!(
            "cannot mount at {}: {} is mounted there; unmount it first",
            args.path.display(),
            describe(&mount)
        ))
        .into()),
        mounted => Ok(mounted),
    }
}

fn is_same(context: &Context, args: &args::Mount, mount: &orphan::Orphan) -> bool {
    is_same_image(context, &args.name, mount) && writes_of(mount) == args.writes.as_deref()
}

/// The name of the writes of a mount.
pub(crate) fn writes_of(mount: &orphan::Orphan) -> Option<&str> {
    match mount.writes() {
        WritesState::Sprout(sprout) => sprout.name.as_deref(),
        WritesState::ReadOnly => None,
    }
}

fn describe(mount: &orphan::Orphan) -> String {
    let writes = writes_of(mount).map(|name| format!(" with the writes {name:?}"));
    format!("{}{}", mount.image(), writes.unwrap_or_default())
}

/// True if `typed` means the image of the mount: the same input in any spelling, or the same image
/// to this host's knowledge. Asks no registry, since the mount may be all that is left.
fn is_same_image(context: &Context, typed: &str, lost: &orphan::Orphan) -> bool {
    let in_repository = context.in_repository(typed).ok().flatten();
    let typed = &in_repository.map_or_else(|| typed.to_owned(), |image| image.to_string());
    let source = Source::parse(typed).and_then(Result::ok);
    let is_there = source.is_some() || context.store_location() == *lost.store();
    if is_there && named::canonical(typed) == named::canonical(lost.image()) {
        return true;
    }
    let digest = ReservedName::oci(lost.name()).map(|name| name.digest);
    if let Some(pinned) = source.as_ref().and_then(Source::pinned)
        && digest == Some(pinned.as_str())
    {
        return true;
    }
    if context.store_location().folder().is_none() {
        return false;
    }
    let known = context.open_store().and_then(|store| named::resolve(context, &store, typed));
    known.is_ok_and(|known| known.digest().is_ok_and(|digest| digest == lost.digest()))
}

/// The mount of this state directory exactly at `target`, if no daemon runs.
fn lost_at(context: &Context, target: &Path) -> Option<(Fsid, orphan::Orphan)> {
    let mounts = burgeon_daemon::mountinfo::read(Path::new("/proc/thread-self/mountinfo")).ok()?;
    let mount = mounts.iter().rfind(|mount| mount.target == target)?;
    if mount.fs_type != "btrfs" || !matches!(Client::connect(&context.state), Ok(None)) {
        return None;
    }
    let fsid = btrfs_fsid(target).ok()??;
    Some((fsid, orphan::find(&context.state, fsid)?))
}
