//! `burgeon umount`: a plain umount that reports the fate of the writes and waits until everything
//! is released. (A plain `umount` also releases everything, but does not wait.)
//!
//! If no daemon runs, this module removes the mount's folder. If readers wait for a daemon, it
//! starts one.
//!
//! ```text
//!   umount ─► released? ─ at once ─► done
//!                │ not at once
//!                ▼
//!             holders (other namespaces, processes)? ─ some ─► they are named, and nobody waits
//!                └ none: the kernel is writing back ─► that is said, and waited for
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{
    Client, MountId, btrfs_fsid,
    doctor::mounts_without_daemon,
    holder, mountinfo,
    orphan::{self, Orphan},
    protocol::{DaemonStatus, MountStatus, Reply, Request, WritesState},
};
use rustix::{
    io::Errno,
    mount::{UnmountFlags, unmount},
};
use serde_json::json;

use super::{
    Context, need_mount_privilege, persist::Unit, places::places_of, taken,
    without_daemon::no_daemon,
};
use crate::{
    args,
    exit::{self, Busy},
    holders, output,
};

/// Longest time for the kernel to release everything after the last umount.
const RELEASE_TIMEOUT_MS: u64 = 15_000;

/// Wait before looking for holders.
pub(super) const AT_ONCE_MS: u64 = 500;

pub(super) fn umount(context: &Context, args: args::Umount) -> Result<ExitCode> {
    need_mount_privilege("umount")?;
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    // A busy mount does not keep the others mounted.
    for path in &args.paths {
        let ended = match args.forget {
            true => forget(context, path, args.lazy),
            false => one_of(context, path, args.lazy).map(|(target, writes)| {
                let said = format!("unmounted {}{writes}", output::path(&target));
                (target, said)
            }),
        };
        match ended {
            Ok((target, said)) => {
                if !context.json {
                    println!("{said}");
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

/// Unmounts `path`; returns its place and the fate of its writes.
pub(crate) fn one(context: &Context, path: &Path) -> Result<(PathBuf, String)> {
    one_of(context, path, false)
}

/// Unmounts `path` if something is mounted there, and removes its unit; returns its place and a
/// sentence.
fn forget(context: &Context, path: &Path, lazy: bool) -> Result<(PathBuf, String)> {
    let failed = |e| Error::io(format!("cannot find {}", path.display()), e);
    // The directory may be gone, or an automount, which `canonicalize` sets off with a slash.
    let plain: PathBuf = path.components().collect();
    let target = match fs::canonicalize(&plain) {
        Ok(target) => target,
        Err(_) => std::path::absolute(&plain).map_err(failed)?,
    };
    let unit = Unit::find_to_forget(&target)?;
    let shown = target.display();
    let unmounted = match is_mounted(&target) {
        true => Some(one_of(context, &target, lazy)?.1),
        false => None,
    };
    let removed = unit.remove(true)?;
    let said = match (unmounted, removed) {
        (Some(writes), true) => format!("unmounted {shown}{writes}; removed {}", unit.name()),
        (Some(writes), false) => format!("unmounted {shown}{writes}; it had no unit"),
        (None, true) => format!("removed {}; nothing was mounted", unit.name()),
        (None, false) => {
            let what = format!(
                "{shown} has no unit of `burgeon mount --persist`, and nothing is mounted there"
            );
            return Err(Error::new(ErrorKind::NotFound, what).into());
        }
    };
    Ok((target, said))
}

/// Like [`one`]; a `lazy` umount detaches the mount at once, and the mount ends with its last
/// holder.
fn one_of(context: &Context, path: &Path, lazy: bool) -> Result<(PathBuf, String)> {
    let target = fs::canonicalize(path)
        .map_err(|e| Error::io(format!("cannot unmount {}", path.display()), e))?;
    unmount_at(context, &target, lazy).map_err(|e| match is_mounted(&target) {
        true => e,
        false => taken::explain_target(context, &target, e),
    })
}

fn unmount_at(context: &Context, target: &Path, lazy: bool) -> Result<(PathBuf, String)> {
    let target = target.to_owned();
    let fsid = mounted_here(&target)?;
    let orphan = fsid.and_then(|fsid| orphan::find(&context.state, fsid));
    let daemon = match &orphan {
        Some(_) => daemon_of_waiting(context)?,
        None => Client::connect_and_ask(&context.state)?,
    };
    let no_daemon = daemon.is_none();
    let known = daemon.zip(fsid).and_then(|((client, status), fsid)| {
        let mount = status.mounts.into_iter().find(|mount| mount.fsid == Some(fsid))?;
        Some((client, mount))
    });
    if known.is_none() && !burgeon_daemon::is_burgeon_mount(&target) {
        // Another process may have unmounted it just now.
        mounted_here(&target)?;
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{} is not a mount of this Burgeon: `burgeon status` lists them",
                target.display()
            ),
        )
        .into());
    }
    if orphan.is_none() && no_daemon && !lazy && !holder::waiting(&context.state).is_empty() {
        // No daemon would know it, and umount would wait for its readers, or for its own reads.
        let what = format!(
            "cannot unmount {}: no daemon serves it, {} has no readable record of it, and its readers may wait: \
             `burgeon shutdown --force` gives readers of all mounts of this state directory I/O errors; then unmount it",
            output::path(&target),
            context.state.root().display()
        );
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    }
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    detach(context, &target, orphan.as_ref(), flags)?;
    if still_mounted(fsid) {
        return Ok((target, "; the same mount is still in place elsewhere".to_owned()));
    }
    let (writes, released) = match (known, orphan) {
        (Some((client, mount)), orphan) => {
            let release = |timeout_ms| {
                let released = release_by(&client, mount.id, timeout_ms);
                // The daemon may have ended since the status request.
                match (&orphan, released?) {
                    (Some(orphan), Release::Held(_))
                        if Client::connect(&context.state)?.is_none() =>
                    {
                        release_of(context, orphan, timeout_ms)
                    }
                    (_, released) => Ok(released),
                }
            };
            (fate_of(&mount.writes), await_release(&target, fsid, lazy, release))
        }
        (None, Some(orphan)) if no_daemon => {
            let release = |timeout_ms| release_of(context, &orphan, timeout_ms);
            (fate_of(orphan.writes()), await_release(&target, fsid, lazy, release))
        }
        _ => (String::new(), Ok(())),
    };
    match released {
        Err(held) if lazy && held.is::<Busy>() => Ok((target, format!("{writes}; {held:#}"))),
        Err(e) => Err(e),
        Ok(()) => Ok((target, writes)),
    }
}

/// The end of one wait for a release.
pub(crate) enum Release {
    Done,
    /// Something holds the mount.
    Held(Error),
}

/// Waits until the daemon has released the mount `id`.
pub(super) fn release_by(
    client: &Client,
    id: MountId,
    timeout_ms: u64,
) -> burgeon_block::Result<Release> {
    match client.call(&Request::AwaitRelease { id, timeout_ms }) {
        Ok(_) => Ok(Release::Done),
        // A daemon that does not answer says nothing of the mount.
        Err(e) if e.kind() == ErrorKind::Unavailable && !client.is_silent() => Ok(Release::Held(e)),
        Err(e) => Err(e),
    }
}

/// Waits until the kernel has released a mount that no daemon knows.
pub(super) fn release_of(
    context: &Context,
    mount: &Orphan,
    timeout_ms: u64,
) -> burgeon_block::Result<Release> {
    match mount.release(&context.state, Duration::from_millis(timeout_ms)) {
        Ok(()) => Ok(Release::Done),
        Err(e) if e.kind() == ErrorKind::Unavailable => Ok(Release::Held(e)),
        Err(e) => Err(e),
    }
}

/// Waits until the mount at `target` is released, by calling `release` with a timeout in ms.
/// Reports the holders at once.
pub(crate) fn await_release(
    target: &Path,
    fsid: Option<burgeon_daemon::Fsid>,
    lazy: bool,
    release: impl Fn(u64) -> burgeon_block::Result<Release>,
) -> Result<()> {
    let shown = target.display();
    if let Release::Done = release(AT_ONCE_MS)? {
        return Ok(());
    }
    if let Some(holders) = fsid.and_then(holders::of) {
        let then = if lazy { "" } else { "; `--lazy` returns success in this case" };
        return Err(Busy(format!(
            "{shown} is unmounted here, but still held by {holders}: it is released when they let go{then}"
        ))
        .into());
    }
    eprintln!(
        "burgeon: {shown} is unmounted, and the kernel is still writing to its devices: waiting"
    );
    match release(RELEASE_TIMEOUT_MS)? {
        Release::Done => Ok(()),
        Release::Held(why) => Err(why.into()),
    }
}

/// The daemon. Starts one if readers wait for it, since a umount might have to wait for their
/// requests. If that fails, the readers get I/O errors.
pub(crate) fn daemon_of_waiting(context: &Context) -> Result<Option<(Client, DaemonStatus)>> {
    daemon_if(context, || !holder::waiting(&context.state).is_empty())
}

/// The daemon. Starts one if none runs and it `is_needed`; if that fails, readers that wait for one
/// get I/O errors.
pub(super) fn daemon_if(
    context: &Context,
    is_needed: impl Fn() -> bool,
) -> Result<Option<(Client, DaemonStatus)>> {
    let found = Client::connect_and_ask(&context.state)?;
    if found.is_some() || !is_needed() {
        return Ok(found);
    }
    match Client::connect_or_start(&context.state) {
        Ok(_) => Ok(Client::connect_and_ask(&context.state)?),
        Err(e) => {
            eprintln!("burgeon: readers get I/O errors, because no daemon can be started: {e}");
            holder::give_up(&context.state)?;
            Ok(None)
        }
    }
}

/// The complete status of a running daemon.
pub(crate) fn ask(client: &Client) -> Result<DaemonStatus> {
    match client.call(&Request::Status)?.0 {
        Reply::Status(status) => Ok(*status),
        _ => Err(anyhow::anyhow!(
            "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it"
        )),
    }
}

/// The daemon, and the mount that contains `path`, which messages call `shown`.
pub(crate) fn mount_of(
    context: &Context,
    path: &Path,
    shown: &Path,
) -> Result<(Client, MountStatus)> {
    let none = || {
        let shown = shown.display();
        let message = format!("{shown} is in no mount of this Burgeon: see `burgeon status`");
        Error::new(ErrorKind::NotFound, message)
    };
    let (client, status) = Client::connect_and_ask(&context.state)?.ok_or_else(|| {
        if mounts_without_daemon(&context.state) == 0 {
            return none();
        }
        let message = format!("{} has no daemon: {}", shown.display(), no_daemon(context));
        Error::new(ErrorKind::Unavailable, message)
    })?;
    let fsid = btrfs_fsid(path)?.ok_or_else(none)?;
    let mount =
        status.mounts.into_iter().find(|mount| mount.fsid == Some(fsid)).ok_or_else(none)?;
    Ok((client, mount))
}

/// Unmounts `target`, where `mount` is, or names the holders. No reconnect of the mount runs
/// meanwhile; a lazy umount goes ahead if one does not finish.
pub(crate) fn detach(
    context: &Context,
    target: &Path,
    mount: Option<&Orphan>,
    flags: UnmountFlags,
) -> Result<()> {
    let shown = target.display();
    let apart = mount.map(|mount| mount.keep_apart(&context.state)).transpose();
    let _apart = match apart {
        Err(_) if flags.contains(UnmountFlags::DETACH) => None,
        Err(e) => return Err(anyhow::Error::from(e).context(format!("cannot unmount {shown}"))),
        Ok(apart) => apart,
    };
    match unmount(target, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(Busy(format!(
            "cannot unmount {shown}: {}; `burgeon umount --lazy` takes the mount away now, and releases it \
             when they let go",
            holders::describe(target)
        ))
        .into()),
        Err(Errno::INVAL) if !is_mounted(target) => Err(nothing_mounted(target)),
        Err(e) => Err(Error::io(format!("cannot unmount {shown}"), e.into()).into()),
    }
}

fn still_mounted(fsid: Option<burgeon_daemon::Fsid>) -> bool {
    fsid.is_some_and(|fsid| !places_of(fsid).is_empty())
}

/// The btrfs that is mounted exactly at `target`.
fn mounted_here(target: &Path) -> Result<Option<burgeon_daemon::Fsid>> {
    if !is_mounted(target) {
        return Err(nothing_mounted(target));
    }
    Ok(btrfs_fsid(target)?)
}

fn is_mounted(target: &Path) -> bool {
    let mounts = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    mounts.iter().any(|mount| mount.target == target)
}

fn nothing_mounted(target: &Path) -> anyhow::Error {
    let shown = target.display();
    let message = format!(
        "nothing is mounted at {shown}: it may have been unmounted just now; `burgeon status` lists mounts"
    );
    Error::new(ErrorKind::NotFound, message).into()
}

fn fate_of(writes: &WritesState) -> String {
    match writes {
        WritesState::ReadOnly => String::new(),
        WritesState::Sprout(sprout) => match &sprout.name {
            Some(name) => format!("; its writes are kept as {name:?}"),
            None => "; its writes are discarded".to_owned(),
        },
    }
}
