//! `burgeon record`: runs a command, and makes a profile of its first reads.
//!
//! ```text
//!   page cache of the mount let go ─► server takes note ─► CMD ─► addresses ─► files, by the manifest
//!     ─► merged with the stored profile ─► stored with the image, or on this host
//! ```
//! The server does not see reads from the page cache, so the cache is dropped first. Pages that
//! running programs have mapped stay, and their reads are not recorded.

use std::{
    ffi::CString,
    fs::{self, File},
    io::Read,
    os::unix::{ffi::OsStrExt, fs::OpenOptionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus, Stdio},
};

use anyhow::{Context as _, Result};
use burgeon_block::{ByteRange, Digest, Error, ErrorKind};
use burgeon_daemon::{
    Client, keep_profile, kept_profile, note_recorded,
    protocol::{MountStatus, Reply, Request},
};
use burgeon_image::{
    Manifest, ManifestLimits, Profile, READS_MAX, catalog, load_profile, publish_profile,
};
use burgeon_source::{Access, Store};
use rustix::fs::{Advice, AtFlags, OFlags, StatxAttributes, StatxFlags, fadvise};
use serde_json::json;

use super::{Context, named, umount::mount_of};
use crate::{
    args,
    output::{self, bytes, counted},
};

pub(super) fn record(context: &Context, args: args::Record) -> Result<ExitCode> {
    let (client, mount) = mount_of(context, &args.path, &args.path)?;
    let root = fs::canonicalize(&args.path)
        .map_err(|e| Error::io(format!("cannot record {}", args.path.display()), e))?;
    let image = mount.digest.0;
    // Before the command runs: everything needed to interpret its reads.
    let store = Store::open(&mount.store, &Access::from_env())?;
    let manifest = manifest(context, &store, &image)?;
    let_go(&root)?;
    client.call(&Request::Record { id: mount.id })?;
    let status = run(context, &args.command)?;
    let (Reply::Recorded { cut_short }, mut fds) =
        client.call(&Request::Recorded { id: mount.id })?
    else {
        anyhow::bail!(
            "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it"
        );
    };
    let reads = fds.pop().context("the daemon sent no recorded reads")?;
    let profile = Profile::of(&manifest, image, &addresses(File::from(reads))?);
    let kept = keep(context, &store, &mount, args.output.as_deref(), &profile)?;
    if args.output.is_none() {
        note(context, &image, true)?;
    }
    report(context, &profile, &kept, cut_short, status)?;
    Ok(exit_code(status))
}

/// Tells `status` whether `image` now has a profile that its present mounts do not use.
pub(super) fn note(context: &Context, image: &Digest, is_there: bool) -> Result<()> {
    let status = Client::connect_and_ask(&context.state)?.map(|(_, status)| status);
    let mounts = status.into_iter().flat_map(|status| status.mounts);
    for mount in mounts.filter(|mount| mount.digest.0 == *image) {
        // The mount may be gone by now.
        let _ = note_recorded(&context.state, mount.id, is_there);
    }
    Ok(())
}

/// The manifest of a mounted image. This host usually has it.
fn manifest(context: &Context, store: &Store, image: &Digest) -> Result<Manifest> {
    match manifest_here(context, image) {
        Some(manifest) => Ok(manifest),
        None => Ok(catalog::load(store, image, &ManifestLimits::default())?),
    }
}

/// The manifest of a mounted image, if this host has it: no store is asked.
pub(super) fn manifest_here(context: &Context, image: &Digest) -> Option<Manifest> {
    let bytes = fs::read(context.state.image(image).join("manifest")).ok()?;
    (Digest::of(&bytes) == *image)
        .then(|| Manifest::decode(&bytes, &ManifestLimits::default()).ok())?
}

/// Drops the page cache of the files below `root`, in this mount.
fn let_go(root: &Path) -> Result<()> {
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let failed = |e| Error::io(format!("cannot look into {}", folder.display()), e);
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // Nobody reads an entry that disappears or cannot be opened.
            let Ok(kind) = entry.file_type() else { continue };
            let path = entry.path();
            if kind.is_dir() && !is_mount_root(&path) {
                folders.push(path);
            } else if kind.is_file() {
                let mut options = File::options();
                let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOATIME;
                options.read(true).custom_flags(flags.bits() as i32);
                if let Ok(file) = options.open(&path) {
                    let _ = fadvise(&file, 0, None, Advice::DontNeed);
                }
            }
        }
    }
    Ok(())
}

fn is_mount_root(path: &Path) -> bool {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return false };
    let (flags, mask) = (AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS);
    rustix::fs::statx(rustix::fs::CWD, &name, flags, mask)
        .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

fn run(context: &Context, command: &[std::ffi::OsString]) -> Result<ExitStatus> {
    let (program, arguments) = command.split_first().context("there is no command to run")?;
    let mut child = Command::new(program);
    child.args(arguments);
    if context.json {
        // Standard output is reserved for the document.
        child.stdout(Stdio::from(
            rustix::io::dup(rustix::stdio::stderr()).map_err(std::io::Error::from)?,
        ));
    }
    let shown = Path::new(program).display();
    Ok(child.status().map_err(|e| Error::io(format!("cannot run {shown}"), e))?)
}

/// The reads that the daemon has recorded.
fn addresses(reads: File) -> Result<Vec<ByteRange>> {
    const RECORD: usize = 16;
    let mut bytes = Vec::new();
    reads
        .take((READS_MAX * RECORD) as u64)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::io("cannot read the recorded ranges", e))?;
    let ranges = bytes.chunks_exact(RECORD).filter_map(|record| {
        let (start, end) = record.split_first_chunk::<8>()?;
        let end = end.first_chunk::<8>()?;
        ByteRange::new(u64::from_le_bytes(*start), u64::from_le_bytes(*end))
    });
    Ok(ranges.collect())
}

/// The location of a stored profile, for the user.
struct Kept {
    place: String,
    /// The reason for not storing it with its image.
    instead: Option<String>,
}

/// Merges `profile` with the stored ones and stores it with its image, or on this host if the
/// store is read-only. With `output`, writes it only to that file.
fn keep(
    context: &Context,
    store: &Store,
    mount: &MountStatus,
    output: Option<&Path>,
    profile: &Profile,
) -> Result<Kept> {
    if let Some(path) = output {
        // As a shell would: `path` may be a device or a symlink of the user's.
        fs::write(path, profile.encode()?)
            .map_err(|e| Error::io(format!("cannot write {}", path.display()), e))?;
        return Ok(Kept { place: path.display().to_string(), instead: None });
    }
    let local = kept_profile(&context.state, &profile.image)?;
    let stored = load_profile(store, &profile.image)?;
    let merged = [stored, local, Some(profile.clone())].into_iter().flatten();
    let Some(merged) = merged.reduce(|before, after| before.merge(&after)) else {
        unreachable!("there is at least this one")
    };
    match store.check_writable().and_then(|()| publish_profile(store, &merged)) {
        Ok(()) => {
            burgeon_daemon::forget_profile(&context.state, &profile.image)?;
            Ok(Kept { place: format!("with the image in {}", mount.store), instead: None })
        }
        Err(e) => {
            keep_profile(&context.state, &merged)?;
            let place: PathBuf = context.state.profile(&profile.image);
            Ok(Kept { place: place.display().to_string(), instead: Some(e.to_string()) })
        }
    }
}

fn report(
    context: &Context,
    profile: &Profile,
    kept: &Kept,
    cut_short: bool,
    status: ExitStatus,
) -> Result<()> {
    let (files, ranges) = (profile.files.len(), profile.reads.len());
    if context.json {
        return output::print_json(&json!({
            "image": profile.image.to_string(),
            "files": files,
            "ranges": ranges,
            "bytes": profile.bytes(),
            "cut_short": cut_short,
            "kept": kept.place,
            "not_in_store": kept.instead,
            "exit_code": status.code(),
        }));
    }
    let size = bytes(profile.bytes());
    eprintln!(
        "recorded {}, {size} in {}; kept {}",
        counted(files as u64, "file"),
        counted(ranges as u64, "range"),
        kept.place
    );
    if let Some(why) = &kept.instead {
        eprintln!("note: not stored with the image, because {why}");
    }
    if cut_short {
        eprintln!("note: reads after the first {READS_MAX} ranges are left out");
    }
    if ranges == 0 {
        eprintln!("note: the command read no data of the image: does it use this mount?");
    }
    Ok(())
}

/// The command's exit code; 128 plus the signal's number, as in shells.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// The profile of the image `name`, or the one in the file of that name.
pub(super) fn find(context: &Context, name: &str) -> Result<Profile> {
    let path = Path::new(name);
    if path.is_file() {
        let profile = burgeon_daemon::read_profile(path)?;
        return profile.with_context(|| format!("{name} has gone away"));
    }
    let store = context.open_store()?;
    let image = named::resolve(context, &store, name)?.digest()?;
    let local = kept_profile(&context.state, &image)?;
    let both = [load_profile(&store, &image)?, local];
    both.into_iter().flatten().reduce(|before, after| before.merge(&after)).ok_or_else(|| {
        let what = format!(
            "the image {name:?} has no profile: mount it, and `burgeon record PATH -- COMMAND`"
        );
        Error::new(ErrorKind::NotFound, what).into()
    })
}
