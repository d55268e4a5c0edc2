//! Maps a file or a tree of this host: walks it, gives it addresses in batches, clones it.
//!
//! ```text
//!   open the tree once ─► names and attributes, folder by folder ─► daemon: the tree's descriptor, names
//!     ─► clone; an entry that is opened again must be unchanged
//! ```
//! Whole blocks are cloned. The rest of the last block is read here and written: btrfs would do
//! the same when the file is cut there, but through the daemon.
//!
//! Invariant (held by `tests/paths.rs`): nothing outside the tree appears at the target, whatever
//! its owner does meanwhile. No symlink is followed, and a file is read only while device, inode,
//! size and change time are as the walk found them.

use std::{
    collections::HashMap,
    ffi::{CStr, OsStr},
    fs::{File, Metadata},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{FileExt, MetadataExt},
        },
    },
    path::{Path, PathBuf},
    thread,
};

use anyhow::Result;
use burgeon_block::{BLOCK_SIZE, Error, ErrorKind};
use burgeon_daemon::{
    Honours,
    protocol::{CONTENTS_MAX, MapContent},
};
use burgeon_image::builder::xattrs_of;
use burgeon_source::beneath::{link_to, open_again, open_beneath, open_without_symlinks};
use rustix::{
    fs::{Dir, OFlags, SeekFrom, readlinkat, seek},
    io::Errno,
};

use super::{
    Mapped, Mount, Target, clone,
    disarm::{Disarm, Disarmed},
    name_it, no_file,
    tree::{self, Kind, Origin, TreeEntry, Xattrs, cannot_make, check_count},
    unnamed,
};

/// Most bytes of paths in one request: a quarter of the longest message, leaving room for JSON.
const PATHS_MAX: usize = 1 << 20;

/// Flags that open a directory for listing.
const LISTED: OFlags = OFlags::DIRECTORY.union(OFlags::NOATIME);

/// A file or a tree of this host.
pub(super) struct Local {
    /// The tree, or the parent directory of the single file.
    root: File,
    root_path: PathBuf,
    /// The file's name in `root`, if `root` is not a tree.
    only: Option<PathBuf>,
    /// State of each entry at the walk; further names of a file have none.
    found: Vec<Found>,
    /// The area's file, once there are extents to clone from it.
    area: Option<File>,
}

/// State of an entry at the walk.
struct Found {
    device: u64,
    inode: u64,
    is_file: bool,
    size: u64,
    changed: (i64, i64),
    /// Allocated bytes on its disk.
    allocated: u64,
    /// Offset in the area.
    start: u64,
}

impl Found {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            is_file: metadata.is_file(),
            size: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            allocated: metadata.blocks() * 512,
            start: 0,
        }
    }

    /// Bytes to clone. A file below a block is copied.
    fn whole(&self) -> u64 {
        self.size / BLOCK_SIZE * BLOCK_SIZE
    }

    fn is_same(&self, now: &Self) -> bool {
        let same = (self.device, self.inode) == (now.device, now.inode);
        // A directory changes with every entry made in it.
        let unchanged = !self.is_file || (self.size, self.changed) == (now.size, now.changed);
        same && unchanged && self.is_file == now.is_file
    }
}

/// Makes `local` appear at `target`.
pub(super) fn map(
    mount: &Mount,
    target: &Target,
    mut local: Local,
) -> Result<(Mapped, Vec<String>)> {
    let mut entries = local.walk()?;
    let disarm = Disarm::new(Honours::of(&local.root)?, mount.honours);
    let notes = disarm.apply(&mut entries).into_iter().collect();
    let [root, ..] = entries.as_slice() else { unreachable!("the root is one") };
    match root.kind {
        Kind::Folder => {
            local.give_addresses(mount, target, &entries)?;
            Ok((tree::make(target, &entries, &Disarmed(&local, disarm))?, notes))
        }
        Kind::File(size) => {
            let file = unnamed(target, size >= BLOCK_SIZE)?;
            local.give_addresses(mount, target, &entries)?;
            local.fill(root, &file)?;
            tree::dress(&file, root, &Disarmed(&local, disarm), &target.path)?;
            name_it(&file, target)?;
            Ok((Mapped { files: 1, bytes: size }, notes))
        }
        _ => Err(no_file(local.full(root).display())),
    }
}

impl Local {
    /// Opens the resolved `path`. A symlink in it was put there since.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = |e: std::io::Error| match Errno::from_io_error(&e) {
            Some(Errno::LOOP) => changed(path),
            _ => Error::io(format!("cannot map {}", path.display()), e),
        };
        let open = |path: &Path| open_without_symlinks(path, OFlags::PATH).map_err(failed);
        let opened = File::from(open(path)?);
        let is_folder = opened.metadata().map_err(failed)?.is_dir();
        let (root, root_path, only) = match (is_folder, path.parent(), path.file_name()) {
            (false, Some(parent), Some(name)) => {
                (open(parent)?.into(), parent.to_owned(), Some(PathBuf::from(name)))
            }
            _ => (opened, path.to_owned(), None),
        };
        let this = Self { root, root_path, only, found: Vec::new(), area: None };
        let (root, shown) = (&this.root, &this.root_path);
        // Also checked here: the daemon may not see mounts of this namespace.
        burgeon_daemon::refuse_burgeon_file(root, shown, "the source of a mapping")?;
        Ok(this)
    }

    /// The root and everything below it, folders before their contents.
    fn walk(&mut self) -> Result<Vec<TreeEntry>> {
        let (mut entries, mut links) = (Vec::new(), HashMap::new());
        let root = self.root.try_clone().map_err(|e| self.cannot_map(Path::new(""), e))?;
        let first = match &self.only {
            Some(name) => look(&root, name).map_err(|e| self.cannot_map(Path::new(""), e))?,
            None => root.try_clone().map_err(|e| self.cannot_map(Path::new(""), e))?,
        };
        let is_folder = self.found(PathBuf::new(), &first, &mut entries, &mut links)?;
        let mut folders = Vec::new();
        folders.extend(is_folder.then(PathBuf::new));
        while let Some(folder) = folders.pop() {
            let failed = |e| self.cannot_map(&folder, e);
            let opened = self.open_folder(&folder).map_err(failed)?;
            let mut names = Vec::new();
            for name in Dir::read_from(&opened).map_err(|e| failed(e.into()))? {
                let name = name.map_err(|e| failed(e.into()))?.file_name().to_owned();
                if !matches!(name.to_bytes(), b"." | b"..") {
                    names.push(name);
                }
            }
            for name in names {
                let name = OsStr::from_bytes(name.to_bytes());
                let path = folder.join(name);
                let child = look(&opened, name.as_ref()).map_err(|e| self.cannot_map(&path, e))?;
                if self.found(path.clone(), &child, &mut entries, &mut links)? {
                    folders.push(path);
                }
            }
        }
        Ok(entries)
    }

    /// Records `opened` under the name `path`; returns whether it is a folder.
    fn found(
        &mut self,
        path: PathBuf,
        opened: &File,
        entries: &mut Vec<TreeEntry>,
        links: &mut HashMap<(u64, u64), usize>,
    ) -> Result<bool> {
        check_count(entries, self.root_path.display())?;
        let metadata = opened.metadata().map_err(|e| self.cannot_map(&path, e))?;
        let file_type = metadata.file_type();
        let first = match metadata.nlink() > 1 && !file_type.is_dir() {
            true => *links.entry((metadata.dev(), metadata.ino())).or_insert(entries.len()),
            false => entries.len(),
        };
        let kind = if first != entries.len() {
            Kind::Link(first)
        } else if file_type.is_dir() {
            Kind::Folder
        } else if file_type.is_file() {
            Kind::File(metadata.len())
        } else if file_type.is_symlink() {
            let to = readlinkat(opened, c"", Vec::new());
            let to = to.map_err(|e| self.cannot_map(&path, e.into()))?;
            Kind::Symlink(OsStr::from_bytes(CStr::to_bytes(&to)).into())
        } else {
            Kind::Node(metadata.rdev())
        };
        let key = self.found.len() as u64;
        if !matches!(kind, Kind::Link(_)) {
            self.found.push(Found::of(&metadata));
        }
        entries.push(TreeEntry {
            path,
            kind,
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            modified: (metadata.mtime(), metadata.mtime_nsec() as u32),
            key,
        });
        Ok(file_type.is_dir())
    }

    fn open_folder(&self, folder: &Path) -> std::io::Result<OwnedFd> {
        let name = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        match open_beneath(&self.root, name, LISTED) {
            // Only the owner and root may use O_NOATIME.
            Err(e) if Errno::from_io_error(&e) == Some(Errno::PERM) => {
                open_beneath(&self.root, name, OFlags::DIRECTORY)
            }
            opened => opened,
        }
    }

    fn cannot_map(&self, path: &Path, error: std::io::Error) -> Error {
        match Errno::from_io_error(&error) {
            Some(Errno::LOOP) => changed(&self.root_path.join(path)),
            _ => Error::io(format!("cannot map {}", self.root_path.join(path).display()), error),
        }
    }

    /// Maps every file of a block or more, in batches.
    fn give_addresses(
        &mut self,
        mount: &Mount,
        target: &Target,
        entries: &[TreeEntry],
    ) -> Result<()> {
        let is_file =
            |entry: &&TreeEntry| matches!(entry.kind, Kind::File(size) if size >= BLOCK_SIZE);
        let mut files = entries.iter().filter(is_file).peekable();
        while files.peek().is_some() {
            let (mut batch, mut contents, mut bytes) = (Vec::new(), Vec::new(), 0);
            while bytes < PATHS_MAX && batch.len() < CONTENTS_MAX {
                let Some(entry) = files.next() else { break };
                let path = self.name(entry).to_owned();
                bytes += path.as_os_str().len() + 150;
                let Some(found) = self.found.get(entry.key as usize) else {
                    unreachable!("each file was found")
                };
                let Found { device, inode, size, changed, .. } = *found;
                let (device, changed) = (Some(device), Some(changed));
                contents.push(MapContent::File { path, inode, size, device, changed });
                batch.push(entry.key as usize);
            }
            let origin = match &self.only {
                Some(name) => self.root_path.join(name),
                None => self.root_path.clone(),
            };
            let origin = origin.display().to_string();
            let tree = Some((&*self.root_path, self.root.as_fd()));
            let mut given = mount.map(&target.path, &origin, contents, tree)?;
            for source in batch {
                let source = &mut self.found[source];
                source.start = given.start;
                given.start += source.size.next_multiple_of(BLOCK_SIZE);
            }
            self.area = Some(given.area);
        }
        Ok(())
    }

    /// The path of an entry relative to `root`.
    fn name<'a>(&'a self, entry: &'a TreeEntry) -> &'a Path {
        match (&self.only, entry.path.as_os_str().is_empty()) {
            (Some(name), true) => name,
            (None, true) => Path::new("."),
            (_, false) => &entry.path,
        }
    }

    /// The full path of an entry on this host, for messages.
    fn full(&self, entry: &TreeEntry) -> PathBuf {
        match self.name(entry) {
            name if name == Path::new(".") => self.root_path.clone(),
            name => self.root_path.join(name),
        }
    }

    /// Opens an entry for inspection, if it is unchanged since the walk.
    fn open_found(&self, entry: &TreeEntry) -> Result<File> {
        let cannot = |e| self.cannot_map(&entry.path, e);
        let opened = look(&self.root, self.name(entry)).map_err(cannot)?;
        self.check(entry, &opened)?;
        Ok(opened)
    }

    fn check(&self, entry: &TreeEntry, opened: &File) -> Result<()> {
        let now = opened.metadata().map_err(|e| self.cannot_map(&entry.path, e))?;
        match self.found[entry.key as usize].is_same(&Found::of(&now)) {
            true => Ok(()),
            false => Err(changed(&self.full(entry)).into()),
        }
    }

    /// Clones whole blocks of `source` from `from` to `to`.
    fn clone(&self, source: &Found, file: &File, from: u64, to: u64) -> Result<()> {
        match &self.area {
            Some(area) if from < to => clone(area, source.start + from, file, from, to - from),
            _ => Ok(()),
        }
    }
}

impl Origin for Local {
    fn threads(&self) -> usize {
        // More threads only wait for one another in btrfs.
        thread::available_parallelism().map_or(1, usize::from).min(4)
    }

    fn fill(&self, entry: &TreeEntry, file: &File) -> Result<()> {
        let source = &self.found[entry.key as usize];
        let whole = source.whole();
        if source.size == whole && source.allocated >= whole {
            return self.clone(source, file, 0, whole);
        }
        let path = self.full(entry);
        let failed = |e| Error::io(format!("cannot map {}", path.display()), e);
        let original = self.open_found(entry)?;
        let original = open_again(&original, OFlags::NONBLOCK).map_err(failed)?;
        let mut rest = vec![0; (source.size - whole) as usize];
        original.read_exact_at(&mut rest, whole).map_err(failed)?;
        if source.allocated >= source.size {
            self.clone(source, file, 0, whole)?;
        } else {
            for (from, to) in data(&original, whole).map_err(failed)? {
                self.clone(source, file, from, to)?;
            }
        }
        let failed = cannot_make(&path);
        if rest.iter().any(|byte| *byte != 0) {
            file.write_all_at(&rest, whole).map_err(failed)?;
        } else {
            file.set_len(source.size).map_err(failed)?;
        }
        self.check(entry, &original)
    }

    fn xattrs(&self, entry: &TreeEntry) -> Result<Xattrs> {
        let opened = self.open_found(entry)?;
        let failed = |e| {
            let path = self.full(entry);
            Error::io(format!("cannot read the attributes of {}", path.display()), e)
        };
        Ok(xattrs_of(&link_to(&opened)).map_err(failed)?)
    }
}

/// Opens `name` in `folder` for inspection, whatever its type.
fn look(folder: impl AsFd, name: &Path) -> std::io::Result<File> {
    Ok(open_beneath(folder, name, OFlags::PATH | OFlags::NOFOLLOW)?.into())
}

fn changed(path: &Path) -> Error {
    let message = format!("{} was changed while it was mapped: try again", path.display());
    Error::new(ErrorKind::Unavailable, message)
}

/// Data ranges of `file`, in whole blocks before `end`.
fn data(file: &File, end: u64) -> std::io::Result<Vec<(u64, u64)>> {
    let (mut ranges, mut at) = (Vec::new(), 0);
    while at < end {
        let from = match seek(file, SeekFrom::Data(at)) {
            Ok(from) if from < end => from / BLOCK_SIZE * BLOCK_SIZE,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let to = seek(file, SeekFrom::Hole(from.max(at)))?.next_multiple_of(BLOCK_SIZE).min(end);
        ranges.push((from.max(at), to));
        at = to.max(at + BLOCK_SIZE);
    }
    Ok(ranges)
}
