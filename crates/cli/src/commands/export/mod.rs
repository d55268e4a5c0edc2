//! `burgeon export`: a mount's tree, or kept writes, as a tar archive that other programs read.
//!
//! ```text
//!   MOUNT          ─► open_tree: a detached copy of the mount, without mounts below it ─┐
//!   --writes NAME  ─► the daemon's detached mount, read-only, moved nowhere            ─┴► walk ─► archive ─► output
//! ```
//! Invariants (held by `tests/export.rs`): nothing is mounted in the user's namespace; a file is at
//! its name only if it is complete; memory grows with hard-linked files alone.

mod archive;
mod destination;
mod walk;

use std::{
    ffi::OsStr,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Result, anyhow};
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{
    Client, MountId, btrfs_fsid, orphan,
    protocol::{
        AttributesRequest, MountRequest, ProfileRequest, Reply, Request, SproutRequest,
        TransportRequest, WritesRequest,
    },
    writes,
};
use burgeon_source::{Access, Location};
use rustix::{
    fs::CWD,
    mount::{OpenTreeFlags, open_tree},
};
use serde_json::json;

use self::{archive::Archive, destination::Destination, walk::Walk};
use super::{Context, need_mount_privilege, resume::serve_again, taken};
use crate::{
    args::{Export, Format},
    exit,
    output::{self, bytes, counted},
};

pub(super) fn export(context: &Context, args: Export) -> Result<ExitCode> {
    let Format::Tar = args.format;
    if args.path.is_none() && args.writes.is_none() {
        let what = "name a mount, or kept writes with --writes NAME: see `burgeon export --help`";
        return Err(exit::Usage(what.to_owned()).into());
    }
    let destination = Destination::new(&args.output)?;
    if context.json && destination.is_standard_output() {
        let what = "--json prints on standard output: name a file for the archive with -o FILE";
        return Err(exit::Usage(what.to_owned()).into());
    }
    need_mount_privilege("export")?;
    let source = match (args.path, args.writes) {
        (Some(path), _) => Source::of_mount(context, &path)?,
        (None, name) => Source::of_writes(context, &name.unwrap_or_default())?,
    };
    let shown = source.shown.clone();
    let destination = destination.create()?;
    let mut archive = Archive::new(destination);
    let walked = Walk::new(&shown, &mut archive).run(&source.root);
    let released = source.release();
    let (walked, archive) = (walked?, archive.finish()?);
    let len = archive.publish()?;
    released?;
    let changed = counted(walked.changed, "file");
    let error = (walked.changed > 0).then(|| {
        let what = format!("{changed} changed while they were read: export {shown} again");
        anyhow::Error::new(Error::new(ErrorKind::Invalid, what))
    });
    if context.json {
        let mut document = json!({
            "exported": shown, "archive": args.output, "entries": walked.entries, "bytes": len,
            "changed": walked.named.iter().map(|name| text(name)).collect::<Vec<_>>(),
            "sockets": walked.sockets,
        });
        if let Some(error) = &error {
            document["error"] = exit::document(error);
        }
        output::print_json(&document)?;
    } else {
        eprintln!("exported {shown}: {}, {}", counted(walked.entries, "entry"), bytes(len));
    }
    Ok(match error {
        None => ExitCode::SUCCESS,
        Some(error) => {
            exit::say(&error);
            exit::code_of(&error)
        }
    })
}

/// A name of the tree, for messages.
fn text(name: &[u8]) -> String {
    OsStr::from_bytes(name).display().to_string()
}

/// The tree to export.
struct Source {
    /// The root of a mount that is in no namespace.
    root: OwnedFd,
    shown: String,
    /// The daemon's mount to release.
    mount: Option<(Client, MountId)>,
}

impl Source {
    fn of_mount(context: &Context, path: &Path) -> Result<Self> {
        let shown = path.display();
        if !path.exists() {
            let what = format!("cannot export {shown}: nothing is there");
            return Err(Error::new(ErrorKind::NotFound, what).into());
        }
        if !burgeon_daemon::is_burgeon_mount(path) {
            let what = format!(
                "cannot export {shown}: it is in no mount of Burgeon; `burgeon status` lists them"
            );
            return Err(Error::new(ErrorKind::NotFound, what).into());
        }
        // Without a daemon, reads of data that is not in memory would wait, or fail.
        if Client::connect(&context.state)?.is_none()
            && let Some(fsid) = btrfs_fsid(path)?
            && orphan::find(&context.state, fsid).is_some()
        {
            serve_again(context, fsid, path)?;
        }
        // Without mounts below it: the tree is that of the file system alone.
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let root = open_tree(CWD, path, flags)
            .map_err(|e| Error::io(format!("cannot export {shown}"), e.into()))?;
        Ok(Self { root, shown: shown.to_string(), mount: None })
    }

    /// Mounts kept writes read-only, and moves the mount nowhere.
    fn of_writes(context: &Context, name: &str) -> Result<Self> {
        let record = writes::find(&context.state, name)?.ok_or_else(|| {
            let what = format!("there are no writes {name:?}: `burgeon writes list` lists them");
            Error::new(ErrorKind::NotFound, what)
        })?;
        let store = context.store.clone().or(record.store);
        let access = match &store {
            Some(Location::Registry(artifact)) => Access::from_env().for_registry(artifact)?,
            _ => Access::from_env(),
        };
        let mut attributes = AttributesRequest::default();
        attributes.others.read_only = true;
        let shown = format!("the writes {name:?}");
        let request = MountRequest {
            image: record.image,
            digest: Some(record.manifest),
            shown: None,
            store,
            store_identity: None,
            store_away: false,
            access,
            writes: WritesRequest::Kept(SproutRequest {
                name: Some(name.to_owned()),
                limit: None,
                thin: record.thin,
                device: None,
            }),
            fill: false,
            transport: TransportRequest::Auto,
            fast: false,
            target: PathBuf::from(format!("(export of {shown})")),
            virtual_bytes: 0,
            fetch_limit: None,
            profile: ProfileRequest::None,
            attributes,
        };
        let client = Client::connect_or_start(&context.state)?;
        let request = Request::Mount(Box::new(request));
        let made = taken::call_when_released(context, &client, &request, Some(name));
        let (reply, mut fds) = made.map_err(|e| {
            taken::explain_writes(context, name, ", or export that mount", e.into())
        })?;
        let (Reply::Mounted(mounted), Some(root)) = (reply, fds.pop()) else {
            return Err(anyhow!(
                "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it"
            ));
        };
        Ok(Self { root, shown, mount: Some((client, mounted.id)) })
    }

    /// Unmounts what was mounted, and waits until it is released.
    fn release(self) -> Result<()> {
        /// As `burgeon umount`.
        const TIMEOUT_MS: u64 = 15_000;
        drop(self.root);
        if let Some((client, id)) = self.mount {
            client.call(&Request::AwaitRelease { id, timeout_ms: TIMEOUT_MS })?;
        }
        Ok(())
    }
}
