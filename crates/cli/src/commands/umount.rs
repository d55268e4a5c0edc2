//! `burgeon umount`: a plain umount that says what it means for the writes, and waits until
//! everything is released. (A plain `umount` releases everything, too; it just does not wait.)
//!
//! Where no daemon runs that could take the mount's folder away, this does it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{
    Client, btrfs_fsid, mountinfo, orphan,
    protocol::{MountStatus, Reply, Request, Status, WritesState},
};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::json;

use super::{Context, need_mount_privilege};
use crate::{
    args,
    exit::{self, Busy},
    holders, output,
};

/// How long the kernel may take to let go of everything after the last umount.
const RELEASE_TIMEOUT_MS: u64 = 15_000;

pub(super) fn umount(context: &Context, args: args::Umount) -> Result<ExitCode> {
    need_mount_privilege("umount")?;
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    // One that is in use is no reason to leave the others mounted.
    for path in &args.paths {
        match one(context, path) {
            Ok((target, writes)) => {
                if !context.json {
                    println!("unmounted {}{writes}", target.display());
                }
                done.push(target);
            }
            Err(e) => {
                exit::say(&e);
                failed.push((path, e));
            }
        }
    }
    let first = failed.first().map(|(_, error)| error);
    if context.json {
        let mut document = json!({ "unmounted": done });
        if let Some(error) = first {
            document["error"] = exit::document(error);
            let all = failed.iter().map(|(path, error)| {
                let mut one = exit::document(error);
                one["path"] = json!(path);
                one
            });
            document["failed"] = all.collect();
        }
        output::print_json(&document)?;
    }
    Ok(first.map_or(ExitCode::SUCCESS, exit::code_of))
}

/// Unmounts `path`; returns where it was and what happened to its writes.
pub(crate) fn one(context: &Context, path: &Path) -> Result<(PathBuf, String)> {
    let target = fs::canonicalize(path)
        .map_err(|e| Error::io(format!("cannot unmount {}", path.display()), e))?;
    let fsid = mounted_here(&target)?;
    let orphan = fsid.and_then(|fsid| orphan::find(&context.state, fsid));
    let daemon = Client::connect_and_ask(&context.state)?;
    let no_daemon = daemon.is_none();
    let known = daemon.zip(fsid).and_then(|((client, status), fsid)| {
        let mount = status.mounts.into_iter().find(|mount| mount.fsid == Some(fsid))?;
        Some((client, mount))
    });
    if known.is_none() && !burgeon_daemon::is_burgeon_mount(&target) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{} is not a mount of this Burgeon: `burgeon status` lists them",
                target.display()
            ),
        )
        .into());
    }
    detach(&target, UnmountFlags::empty())?;
    if still_mounted(fsid) {
        return Ok((target, "; the same mount is still in place elsewhere".to_owned()));
    }
    let release = |orphan: &orphan::Orphan| {
        orphan.release(&context.state, Duration::from_millis(RELEASE_TIMEOUT_MS))
    };
    let writes = match (known, orphan) {
        (Some((client, mount)), orphan) => {
            let await_release =
                Request::AwaitRelease { id: mount.id, timeout_ms: RELEASE_TIMEOUT_MS };
            if let Err(e) = client.call(&await_release) {
                // It may have ended since it was asked.
                match orphan.filter(|_| matches!(Client::connect(&context.state), Ok(None))) {
                    Some(orphan) => release(&orphan)?,
                    None => return Err(e.into()),
                }
            }
            what_became_of(&mount.writes)
        }
        (None, Some(orphan)) if no_daemon => {
            release(&orphan)?;
            what_became_of(orphan.writes())
        }
        _ => String::new(),
    };
    Ok((target, writes))
}

/// Asks a running daemon for everything.
pub(crate) fn ask(client: &Client) -> Result<Status> {
    match client.call(&Request::Status)?.0 {
        Reply::Status(status) => Ok(*status),
        _ => Err(anyhow::anyhow!("the daemon gave an answer to something else")),
    }
}

/// The daemon, and the mount of it that `path` is in.
pub(crate) fn mount_of(context: &Context, path: &Path) -> Result<(Client, MountStatus)> {
    let none = || {
        let shown = path.display();
        let message = format!("{shown} is in no mount of this Burgeon: see `burgeon status`");
        Error::new(ErrorKind::Invalid, message)
    };
    let (client, status) = Client::connect_and_ask(&context.state)?.ok_or_else(none)?;
    let fsid = btrfs_fsid(path)?.ok_or_else(none)?;
    let mount =
        status.mounts.into_iter().find(|mount| mount.fsid == Some(fsid)).ok_or_else(none)?;
    Ok((client, mount))
}

/// Unmounts, or says who is in the way.
pub(crate) fn detach(target: &Path, flags: UnmountFlags) -> Result<()> {
    match unmount(target, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::BUSY) => {
            Err(Busy(format!("cannot unmount {}: {}", target.display(), holders::describe(target)))
                .into())
        }
        Err(e) => Err(Error::io(format!("cannot unmount {}", target.display()), e.into()).into()),
    }
}

/// The places of this namespace where the btrfs `fsid` is mounted, the innermost first.
pub(crate) fn places_of(fsid: burgeon_daemon::Fsid) -> Vec<PathBuf> {
    let mounts = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    let mut places: Vec<_> = mounts
        .into_iter()
        .filter(|mount| mount.fs_type == "btrfs")
        .filter(|mount| btrfs_fsid(&mount.target).is_ok_and(|here| here == Some(fsid)))
        .map(|mount| mount.target)
        .collect();
    places.reverse();
    places
}

fn still_mounted(fsid: Option<burgeon_daemon::Fsid>) -> bool {
    fsid.is_some_and(|fsid| !places_of(fsid).is_empty())
}

/// The btrfs that is mounted exactly at `target`.
fn mounted_here(target: &Path) -> Result<Option<burgeon_daemon::Fsid>> {
    let mounts = mountinfo::read(Path::new("/proc/thread-self/mountinfo"))?;
    if !mounts.iter().any(|mount| mount.target == target) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("nothing is mounted at {}", target.display()),
        )
        .into());
    }
    Ok(btrfs_fsid(target)?)
}

fn what_became_of(writes: &WritesState) -> String {
    match writes {
        WritesState::ReadOnly => String::new(),
        WritesState::Sprout(sprout) => match &sprout.name {
            Some(name) => format!("; its writes are kept as {name:?}"),
            None => "; its writes are discarded".to_owned(),
        },
    }
}
