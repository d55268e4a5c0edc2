//! Maps content into a mounted file system.
//!
//! ```text
//!   Map ─► images: kept ─► the map is appended to, durably ─► the server sees it
//!       ─► address, the area's file ─► client, which clones in its own namespace
//! ```
//! Host files arrive as names in a directory that the client has open. The names are resolved in
//! that directory without following symlinks, and each file must be the one that the client has
//! seen. A client that dies before it clones has used up addresses and nothing else.

use std::{
    borrow::Cow,
    collections::HashSet,
    fs::{File, Metadata},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use burgeon_block::{ByteRange, Digest, Error, ErrorKind, ObjectKind, Result};
use burgeon_btrfs::VIRTUAL_FILE;
use burgeon_frontend::btrfs_mount::{self, Btrfs};
use burgeon_image::{
    AddressMap, Content, ExtentMap, ExtentSource, ExtentWriter, Mapping, MappingInfo,
};
use burgeon_source::{
    Access, Location, Reference, Store,
    beneath::{open_beneath, open_without_symlinks},
};
use rustix::fs::OFlags;

use super::{
    Supervisor, grants,
    helper::{self, Task},
    reconnect::writable_device,
};
use crate::{
    host::backing_devices,
    id::MountId,
    ipc::protocol::{CONTENTS_MAX, MapContent, MapRequest, MappingStatus, Reply},
    prepare,
    state::{
        access, directory_identity::DirectoryIdentity, files::Lock, grants::Grants, images,
        paths::StateDir, pins::Pins, record::MountRecord, roots,
    },
};

/// The private subvolume that contains all others.
const TOP_LEVEL: u64 = 5;

/// Limit of the listing: that many mappings with two names of 4 KiB each fit in one message.
const LISTED_MAX: usize = 400;

impl Supervisor {
    /// Maps the requested content. Returns its offset in the area's file, notes for the user, and
    /// that file.
    pub(super) fn map(
        &self,
        request: &MapRequest,
        tree: Option<OwnedFd>,
    ) -> Result<(u64, Vec<String>, File)> {
        let (record, folder) = self.area(request.id)?;
        if request.contents.len() > CONTENTS_MAX {
            let message = format!(
                "cannot map {} files into {} at once, the limit is {CONTENTS_MAX}: map them in \
                 several requests, as `burgeon map` of this version does",
                request.contents.len(),
                record.target.display()
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        // Checked before anything is written: a failure here leaves nothing behind.
        ExtentMap::check(&folder).map_err(|e| lost(&record, &folder, e))?;
        let area = self.area_of(&record)?;
        let tree = request.tree.as_deref().map(|path| own_tree(path, tree)).transpose()?;
        let mut sources = Sources::new(&self.state, &folder, request, tree);
        let contents = request.contents.iter();
        let extents = contents.map(|wanted| sources.content(wanted)).collect::<Result<_>>()?;
        let Sources { notes, grants, .. } = sources;
        // Before the map names them: a server that reads it may ask for them at once.
        self.grant_living(request.id, grants)?;
        let (label, origin) = (request.label.clone(), request.origin.clone());
        let range = {
            // One writer at a time; others wait for its three syncs.
            let _lock = Lock::take(&folder.join("lock"))?;
            let writer = ExtentWriter::open(&folder).map_err(|e| lost(&record, &folder, e));
            writer?.map(&Mapping { label, origin, extents })?
        };
        self.refresh(request.id)?;
        tracing::info!(mount = %request.id, area = %folder.display(), %range, "mapped content");
        Ok((range.start(), notes, area))
    }

    /// Returns the size of the area and its mappings.
    pub(super) fn mappings(&self, id: MountId) -> Result<Reply> {
        let (record, folder) = self.area(id)?;
        let map = ExtentMap::open(&folder).and_then(|map| Ok((map.mappings()?, map)));
        let (mut mappings, map) = map.map_err(|e| lost(&record, &folder, e))?;
        let older = mappings.len().saturating_sub(LISTED_MAX);
        let mappings = mappings.drain(older..).map(status).collect();
        Ok(Reply::Mappings { size: map.size(), mappings, older: older as u64 })
    }

    /// Pins or unpins the file `path`.
    pub(super) fn pin(&self, id: MountId, path: &str, ranges: &[(u64, u64)]) -> Result<()> {
        let file = {
            let table = self.table();
            let entry = table.mounts.get(&id).ok_or_else(|| no_mount(id))?;
            entry.record.attach.pins.clone()
        };
        {
            let _lock = Lock::take(&file.with_extension("lock"))?;
            Pins::set(&file, path, ranges)?;
        }
        self.refresh(id)
    }

    /// Opens the file of a mount's virtual area, which is in no mounted tree.
    fn area_of(&self, record: &MountRecord) -> Result<File> {
        let device = writable_device(record).ok_or_else(|| {
            let message = format!(
                "cannot map files into {}, which is mounted read-only: mount the image with \
                 --virtual SIZE, and without --read-only",
                record.target.display()
            );
            Error::new(ErrorKind::Invalid, message)
        })?;
        let (_, fds) = helper::run(&self.state, &Task::OpenArea { device }, &[], || {})?;
        let none = || {
            let message = format!(
                "the helper process has not opened the virtual area of {}: try again, and see \
                 `journalctl -u burgeon` for its error",
                record.target.display()
            );
            Error::new(ErrorKind::LocalIo, message)
        };
        Ok(fds.into_iter().next().ok_or_else(none)?.into())
    }

    fn area(&self, id: MountId) -> Result<(MountRecord, PathBuf)> {
        let table = self.table();
        let entry = table.mounts.get(&id).ok_or_else(|| no_mount(id))?;
        match &entry.record.attach.area {
            Some(folder) => Ok((entry.record.clone(), folder.clone())),
            None => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} has no virtual area to map into: it is made with the writes, by `burgeon \
                     mount --virtual SIZE`, and cannot be added later",
                    entry.record.target.display()
                ),
            )),
        }
    }
}

fn no_mount(id: MountId) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no mount {id}"))
}

/// The error for an unusable map. A new map would assign used addresses again, and the files that
/// refer to them would change their contents.
fn lost(record: &MountRecord, folder: &Path, error: Error) -> Error {
    if !matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::Corrupt | ErrorKind::UnsupportedFormat
    ) {
        return error;
    }
    let what = format!(
        "the map of {} is lost, so nothing more can be mapped: restore `extents` and \
         `sources` in {} from a backup that is not older than the last `map`, then map again",
        record.target.display(),
        folder.display()
    );
    Error::with_source(error.kind(), what, error)
}

/// Opens the file of the virtual area of the file system on `device`, in a helper process.
pub(super) fn open_area(device: &Path) -> Result<File> {
    let top = Btrfs::mount(device, TOP_LEVEL, btrfs_mount::MountAccess::Writable)?.open_root()?;
    let path = format!("/proc/self/fd/{}/{VIRTUAL_FILE}", top.as_raw_fd());
    File::open(path).map_err(|e| Error::io("cannot open the virtual area", e))
}

/// Checked sources. The devices below a file system are examined once, not for each of its files.
struct Sources<'a> {
    state: &'a StateDir,
    /// The folder of the area's map.
    area: &'a Path,
    request: &'a MapRequest,
    /// The tree that contains the files, as seen by this process.
    tree: Option<File>,
    /// Numbers of devices that are not Burgeon's.
    foreign: HashSet<u64>,
    notes: Vec<String>,
    /// The files that the server will ask for.
    grants: Grants,
}

impl<'a> Sources<'a> {
    fn new(
        state: &'a StateDir,
        area: &'a Path,
        request: &'a MapRequest,
        tree: Option<File>,
    ) -> Self {
        let (foreign, notes, mut grants) = (HashSet::new(), Vec::new(), Grants::default());
        if let (Some(root), Some(_)) = (&request.tree, &tree) {
            grants.folder(root);
        }
        Self { state, area, request, tree, foreign, notes, grants }
    }

    fn content(&mut self, wanted: &MapContent) -> Result<Content> {
        let source = match wanted {
            MapContent::Computed { name, .. } => {
                let object = ObjectKind::Computed.object(name)?;
                // Refuses an invalid computation now, not when it is read.
                let nothing = ByteRange::at(0, 0).unwrap_or_else(|| unreachable!("0 fits"));
                burgeon_source::Computed.bytes(&object, nothing)?;
                ExtentSource::Computed(object)
            }
            MapContent::File { path, inode, size, device, changed } => {
                let of_client =
                    ClientFile { inode: *inode, size: *size, device: *device, changed: *changed };
                self.file(path, &of_client)?
            }
            MapContent::Image { digest, store, store_identity, len } => {
                self.image(&digest.0, store.as_ref(), *store_identity, *len)?
            }
        };
        Ok(Content { source, offset: 0, len: wanted.len() })
    }

    /// Looks up a file by its path in the tree, or by an absolute one. The server will open it by
    /// its path, so the path must lead to the file that the client has seen in this process, too.
    fn file(&mut self, path: &Path, of_client: &ClientFile) -> Result<ExtentSource> {
        let (opened, path) = match (&self.tree, &self.request.tree) {
            (Some(tree), Some(root)) => {
                (open_beneath(tree, path, OFlags::PATH), Cow::Owned(root.join(path)))
            }
            _ => (open_without_symlinks(path, OFlags::PATH), Cow::Borrowed(path)),
        };
        let failed = |e| Error::io(format!("the daemon cannot see {}", path.display()), e);
        let file = File::from(opened.map_err(failed)?);
        let metadata = file.metadata().map_err(failed)?;
        if !of_client.is(&metadata) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the daemon sees another file at {} (inode {}, {} bytes): the file was \
                     changed just now, or is on a file system that was mounted after the daemon \
                     was started; map it again, or end the daemon with `burgeon shutdown` \
                     and mount again",
                    path.display(),
                    metadata.ino(),
                    metadata.len()
                ),
            ));
        }
        if !self.foreign.contains(&metadata.dev()) {
            backing_devices::refuse_burgeon_file(&file, &path, "a file to be mapped")?;
            self.foreign.insert(metadata.dev());
        }
        let (object, identity) = Reference::identify_open(&path, &file)?;
        self.grants.object(&object);
        Ok(ExtentSource::File { object, identity })
    }
}

/// Identity of a file as the client has seen it.
struct ClientFile {
    inode: u64,
    size: u64,
    device: Option<u64>,
    changed: Option<(i64, i64)>,
}

impl ClientFile {
    fn is(&self, now: &Metadata) -> bool {
        let changed = (now.ctime(), now.ctime_nsec());
        (self.inode, self.size) == (now.ino(), now.len())
            && self.device.is_none_or(|device| device == now.dev())
            && self.changed.is_none_or(|then| then == changed)
    }
}

/// Opens the tree at `path` and checks that it is the client's `theirs`. They differ if the tree is
/// mounted in the client's namespace alone, or was replaced meanwhile.
fn own_tree(path: &Path, theirs: Option<OwnedFd>) -> Result<File> {
    let failed = |e| Error::io(format!("the daemon cannot see {}", path.display()), e);
    let own = open_without_symlinks(path, OFlags::PATH | OFlags::DIRECTORY).map_err(failed)?;
    let own = File::from(own);
    let identity = |file: &File| file.metadata().map(|m| (m.dev(), m.ino())).map_err(failed);
    let theirs = theirs.map(|fd| identity(&fd.into())).transpose()?;
    if theirs == Some(identity(&own)?) {
        return Ok(own);
    }
    let message = format!(
        "the daemon sees another directory at {}: it was changed just now, or is on a file \
         system that was mounted after the daemon was started; map it again, or end the \
         daemon with `burgeon shutdown` and mount again",
        path.display()
    );
    Err(Error::new(ErrorKind::Invalid, message))
}

impl Sources<'_> {
    fn image(
        &mut self,
        digest: &Digest,
        store: Option<&Location>,
        store_identity: Option<DirectoryIdentity>,
        len: u64,
    ) -> Result<ExtentSource> {
        let own = store.cloned().unwrap_or_else(|| self.state.store().into());
        if let (Some(identity), Some(folder)) = (store_identity, own.folder()) {
            identity.check(folder)?;
        }
        if let Some(folder) = store.and_then(Location::folder) {
            backing_devices::refuse_burgeon(folder, "the store")?;
        }
        let mut access = self.request.access.clone();
        if access.is_empty() {
            // The settings of the service's unit apply to clients that have none.
            access = Access::from_env();
        }
        access::add(&self.state.mount(self.request.id), &own, &access)?;
        let (data, note) = keep_image(self.state, self.area, store, &access, digest)?;
        self.notes.extend(note);
        let map = images::find(self.state, self.area, digest)?.map;
        let is_own = own.folder() == Some(&*self.state.store());
        self.grants.add(grants::of_image(&own, &map, is_own, &access));
        if data.len() == len {
            return Ok(ExtentSource::Image(*digest));
        }
        let message = format!(
            "cannot map the image {digest}: it has {} bytes of data, not {len} as the client has \
             seen: map it again",
            data.len()
        );
        Err(Error::new(ErrorKind::Invalid, message))
    }
}

fn status(info: MappingInfo) -> MappingStatus {
    let MappingInfo { label, origin, range, len, extents } = info;
    MappingStatus { label, origin, start: range.start(), len, extents }
}

/// Durably keeps everything needed to read the image `digest` with `area`. Returns its lazy data,
/// and a note for the user if its store cannot record the reference.
fn keep_image(
    state: &StateDir,
    area: &Path,
    store: Option<&Location>,
    access: &Access,
    digest: &Digest,
) -> Result<(ByteRange, Option<String>)> {
    let image = images::add(state, area, store, digest)?;
    let open = Store::open(&image.store, access)?;
    let note = roots::announce(state, &image.store, &open, digest)?;
    let path = image.folder.join("map");
    let whole = |map: AddressMap| map.verify().map(|()| map.data_range());
    let range = match AddressMap::open(&path).and_then(whole) {
        Ok(range) => range,
        // There is no copy yet, or it is damaged.
        Err(_) => {
            prepare::keep_map(state, &image.store, access, *digest, &image.folder)?;
            AddressMap::open(&path).and_then(whole)?
        }
    };
    Ok((range, note))
}
