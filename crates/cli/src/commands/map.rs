//! `burgeon map`: makes content appear in a mounted tree by cloning, without copying a byte.
//!
//! ```text
//!   target checked ─► daemon: addresses in the virtual area, durable ─► clone ─► named
//! ```
//! A file is made without a name and named last; a tree is made next to its place and moved there.
//! So a failure leaves nothing half-made.

mod disarm;
mod image;
mod local;
mod tree;

use std::{
    ffi::OsString,
    fmt::Display,
    fs::{self, File, Permissions},
    io,
    ops::AddAssign,
    os::{fd::BorrowedFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::Result;
use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind};
use burgeon_daemon::{
    Client, Honours, MountId,
    protocol::{MapContent, MapRequest, MappingStatus, Reply, Request},
    reflink::{clone_blocks, make_nodatasum},
};
use burgeon_source::{
    Access,
    beneath::{link_to, open_without_symlinks},
};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat, statat};
use serde_json::json;

use self::local::Local;
use super::{Context, need_mount_privilege, umount::mount_of};
use crate::{args, output};

/// The mount to map into.
pub(super) struct Mount {
    pub(super) client: Client,
    pub(super) id: MountId,
    /// The rights that the mount honours.
    honours: Honours,
}

pub(super) fn map(context: &Context, args: args::Map) -> Result<ExitCode> {
    let begun = Instant::now();
    if args.list {
        return list(context, &args.target);
    }
    need_mount_privilege("map")?;
    let target = Target::new(&args.target)?;
    let mount = Mount::of_folder(context, &target.folder, &target.path)?;
    let (mapped, notes) = match (&args.from, &args.computed, args.size) {
        (Some(from), ..) => match fs::canonicalize(from) {
            Ok(from) => local::map(&mount, &target, Local::open(&from)?)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound && from.is_relative() => {
                image::map(context, &mount, &target, image::Named::find(context, from)?)?
            }
            Err(e) => return Err(Error::io(format!("cannot map {}", from.display()), e).into()),
        },
        (None, Some(name), Some(size)) => (computed(&mount, &target, name, size)?, Vec::new()),
        _ => anyhow::bail!("name the content to map: --from or --computed"),
    };
    let ms = begun.elapsed().as_millis() as u64;
    let Mapped { files, bytes } = mapped;
    if context.json {
        output::print_json(&json!({
            "target": target.path, "files": files, "bytes": bytes, "ms": ms, "notes": notes,
        }))?;
    } else {
        let size = output::bytes(bytes);
        let files = output::counted(files, "file");
        println!("mapped {} in {ms} ms: {files}, {size}", target.path.display());
        notes.iter().for_each(|note| println!("note: {note}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Totals of a mapping.
#[derive(Default)]
struct Mapped {
    files: u64,
    bytes: u64,
}

impl AddAssign for Mapped {
    fn add_assign(&mut self, more: Self) {
        self.files += more.files;
        self.bytes += more.bytes;
    }
}

/// Start of a mapping in the area's file.
struct Addresses {
    start: u64,
    area: File,
    /// Notes for the user.
    notes: Vec<String>,
}

/// A new path in an existing folder. The folder may belong to another user, so it is opened once,
/// and everything is made and named below that descriptor.
struct Target {
    path: PathBuf,
    folder: File,
    /// The name in the folder.
    name: OsString,
}

impl Target {
    fn new(path: &Path) -> Result<Self> {
        let absolute = std::path::absolute(path)?;
        let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
            let message = format!("{} cannot be the name of a file", path.display());
            return Err(Error::new(ErrorKind::Invalid, message).into());
        };
        let failed =
            |e| Error::io(format!("cannot map to {}: make its folder first", path.display()), e);
        let folder = fs::canonicalize(parent).map_err(failed)?;
        let opened = open_without_symlinks(&folder, OFlags::DIRECTORY).map_err(failed)?;
        let target = Self { path: folder.join(name), folder: opened.into(), name: name.to_owned() };
        if statat(&target.folder, &target.name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Err(exists(&target.path).into());
        }
        Ok(target)
    }

    /// The full path of something below the target, for messages.
    fn shown(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.path.clone() } else { self.path.join(path) }
    }
}

fn exists(path: &Path) -> Error {
    let shown = path.display();
    let message = format!("{shown} is there already: remove it, or map to another name");
    Error::new(ErrorKind::Invalid, message)
}

impl Mount {
    /// The mount that contains `path`.
    pub(super) fn of(context: &Context, path: &Path) -> Result<Self> {
        Self::shown(context, path, path)
    }

    /// The same; messages call the path `shown`.
    fn shown(context: &Context, path: &Path, shown: &Path) -> Result<Self> {
        let (client, status) = mount_of(context, path, shown)?;
        let honours = disarm::honours_of(context, &status);
        Ok(Self { client, id: status.id, honours })
    }

    /// The mount that contains the open `folder`, which the user called `typed`.
    fn of_folder(context: &Context, folder: &File, typed: &Path) -> Result<Self> {
        Self::shown(context, &link_to(folder), typed)
    }

    /// Gives `contents` consecutive addresses. Files of a `tree` lie below it: its path and its
    /// descriptor.
    fn map(
        &self,
        label: &Path,
        origin: &str,
        contents: Vec<MapContent>,
        tree: Option<(&Path, BorrowedFd<'_>)>,
    ) -> Result<Addresses> {
        let (label, origin) = (label.to_string_lossy().into_owned(), origin.to_owned());
        let access = Access::from_env();
        let (path, fd) = tree.unzip();
        let path = path.map(Path::to_owned);
        let request = MapRequest { id: self.id, label, origin, contents, tree: path, access };
        let request = Request::Map(request);
        let (reply, mut fds) = self.client.call_with(&request, fd.as_slice())?;
        match (reply, fds.pop()) {
            (Reply::Mapped { start, notes }, Some(area)) => {
                Ok(Addresses { start, area: area.into(), notes })
            }
            _ => Err(anyhow::anyhow!(
                "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it"
            )),
        }
    }
}

fn computed(mount: &Mount, target: &Target, name: &str, size: u64) -> Result<Mapped> {
    if size == 0 {
        let message = "--size 0: a file without content needs no mapping";
        return Err(Error::new(ErrorKind::Invalid, message).into());
    }
    let file = unnamed(target, true)?;
    let content = MapContent::Computed { name: name.to_owned(), len: size };
    let given = mount.map(&target.path, &format!("computed {name}"), vec![content], None)?;
    clone(&given.area, given.start, &file, 0, size.next_multiple_of(BLOCK_SIZE))?;
    if !size.is_multiple_of(BLOCK_SIZE) {
        // btrfs reads the last block and keeps the file's part of it locally.
        let cut = file.set_len(size);
        cut.map_err(|e| Error::io("cannot cut the last block of a mapped file", e))?;
    }
    let set = file.set_permissions(Permissions::from_mode(0o644));
    set.map_err(|e| Error::io("cannot set the mode of a mapped file", e))?;
    name_it(&file, target)?;
    Ok(Mapped { files: 1, bytes: size })
}

fn no_file(shown: impl Display) -> anyhow::Error {
    let message = format!("cannot map {shown}: it is neither a file nor a directory");
    Error::new(ErrorKind::Invalid, message).into()
}

/// A new unnamed file for `target`. If it is `mapped`, extents can be cloned to it.
fn unnamed(target: &Target, mapped: bool) -> Result<File> {
    let failed = |e| Error::io(format!("cannot make {}", target.path.display()), e);
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(&target.folder, ".", flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(file.map_err(|e| failed(e.into()))?);
    tree::forget_acls(&file).map_err(failed)?;
    if mapped {
        make_nodatasum(&file)?;
    }
    Ok(file)
}

/// Clones `len` bytes, whole blocks, from `start` in the area to `to` in `file`.
fn clone(area: &File, start: u64, file: &File, to: u64, len: u64) -> Result<()> {
    let blocks = ByteRange::at(start, len);
    let blocks = blocks.ok_or_else(|| Error::new(ErrorKind::Corrupt, "an address beyond all"))?;
    Ok(clone_blocks(area, blocks, file, to)?)
}

fn name_it(file: &File, target: &Target) -> Result<()> {
    let (from, flags) = (link_to(file), AtFlags::SYMLINK_FOLLOW);
    linkat(CWD, from, &target.folder, &target.name, flags).map_err(|errno| match errno {
        rustix::io::Errno::EXIST => exists(&target.path).into(),
        errno => Error::io(format!("cannot name {}", target.path.display()), errno.into()).into(),
    })
}

fn list(context: &Context, path: &Path) -> Result<ExitCode> {
    let mount = Mount::of(context, path)?;
    let (Reply::Mappings { size, mappings, older }, _) =
        mount.client.call(&Request::Mappings { id: mount.id })?
    else {
        anyhow::bail!(
            "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it"
        );
    };
    if context.json {
        output::print_json(&json!({ "size": size, "mappings": mappings, "older": older }))?;
        return Ok(ExitCode::SUCCESS);
    }
    println!("{} to map into", output::bytes(size));
    if older > 0 {
        println!("{older} older mappings are not listed");
    }
    let heading = ["address", "bytes", "extents", "target", "source"].map(str::to_owned).to_vec();
    let row = |mapping: &MappingStatus| {
        let MappingStatus { label, origin, start, len, extents } = mapping;
        vec![
            start.to_string(),
            output::bytes(*len),
            extents.to_string(),
            label.clone(),
            origin.clone(),
        ]
    };
    if !mappings.is_empty() {
        let rows: Vec<_> = std::iter::once(heading).chain(mappings.iter().map(row)).collect();
        output::table(&rows);
    }
    Ok(ExitCode::SUCCESS)
}
