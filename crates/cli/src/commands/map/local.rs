//! From a file or a tree of this host: walked first, given addresses in batches, cloned.
//!
//! Whole blocks are cloned; the rest of the last one is read here and written, which is what btrfs
//! would do when the file is cut there, without going through the daemon.

use std::{
    collections::HashMap,
    fs::{self, File, Metadata},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    thread,
};

use anyhow::Result;
use burgeon_block::{BLOCK_SIZE, Error, ErrorKind};
use burgeon_daemon::protocol::{CONTENTS_MAX, MapContent};
use burgeon_image::build::xattrs_of;
use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};

use super::{
    Mapped, Mount, Target, clone, name_it, no_file,
    tree::{self, Entry, Kind, Origin, Xattrs, cannot_make, check_count},
    unnamed,
};

/// Bytes of paths in one request: a quarter of the longest message, for what JSON adds.
const PATHS_MAX: usize = 1 << 20;

/// A tree of this host.
struct Local<'a> {
    root: &'a Path,
    sources: Vec<Source>,
    /// The area's file, once there is something to clone from it.
    area: Option<File>,
}

/// A regular file, as it was when it was found.
struct Source {
    inode: u64,
    size: u64,
    changed: (i64, i64),
    /// Bytes that it takes on its disk.
    allocated: u64,
    /// Where it lies in the area.
    start: u64,
}

impl Source {
    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            size: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            allocated: metadata.blocks() * 512,
            start: 0,
        }
    }

    /// Bytes that are cloned. A file below a block is copied.
    fn whole(&self) -> u64 {
        self.size / BLOCK_SIZE * BLOCK_SIZE
    }

    fn is_same(&self, other: &Self) -> bool {
        let facts = |source: &Self| (source.inode, source.size, source.changed);
        facts(self) == facts(other)
    }
}

/// Makes `from`, a file or a folder, appear at `target`.
pub(super) fn map(mount: &Mount, target: &Target, from: &Path) -> Result<Mapped> {
    let mut local = Local { root: from, sources: Vec::new(), area: None };
    let entries = local.walk()?;
    let [root, ..] = entries.as_slice() else { unreachable!("the root is one") };
    match root.kind {
        Kind::Folder => {
            local.give_addresses(mount, target, &entries)?;
            tree::make(target, &entries, &local)
        }
        Kind::File(size) => {
            let file = unnamed(&target.folder, size >= BLOCK_SIZE)?;
            local.give_addresses(mount, target, &entries)?;
            local.fill(root, &file)?;
            tree::dress(&file, root, &local, &target.path)?;
            name_it(&file, &target.path)?;
            Ok(Mapped { files: 1, bytes: size })
        }
        _ => Err(no_file(from.display())),
    }
}

impl Local<'_> {
    /// All that is at the root and below, folders before what is in them.
    fn walk(&mut self) -> Result<Vec<Entry>> {
        let failed = |path: &Path, e| Error::io(format!("cannot map {}", path.display()), e);
        let metadata = fs::symlink_metadata(self.root).map_err(|e| failed(self.root, e))?;
        let (mut entries, mut links) = (Vec::new(), HashMap::new());
        let is_folder = metadata.is_dir();
        self.found(PathBuf::new(), &metadata, &mut entries, &mut links)?;
        let mut folders = Vec::new();
        folders.extend(is_folder.then(PathBuf::new));
        while let Some(folder) = folders.pop() {
            let full = self.root.join(&folder);
            for child in fs::read_dir(&full).map_err(|e| failed(&full, e))? {
                let child = child.map_err(|e| failed(&full, e))?;
                let metadata = child.metadata().map_err(|e| failed(&child.path(), e))?;
                let path = folder.join(child.file_name());
                if metadata.is_dir() {
                    folders.push(path.clone());
                }
                self.found(path, &metadata, &mut entries, &mut links)?;
            }
        }
        Ok(entries)
    }

    fn found(
        &mut self,
        path: PathBuf,
        metadata: &Metadata,
        entries: &mut Vec<Entry>,
        links: &mut HashMap<(u64, u64), usize>,
    ) -> Result<()> {
        check_count(entries, self.root.display())?;
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
            let full = self.root.join(&path);
            let failed = |e| Error::io(format!("cannot map {}", full.display()), e);
            Kind::Symlink(fs::read_link(&full).map_err(failed)?)
        } else {
            Kind::Node(metadata.rdev())
        };
        let key = self.sources.len() as u64;
        if let Kind::File(_) = kind {
            self.sources.push(Source::of(metadata));
        }
        entries.push(Entry {
            path,
            kind,
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            modified: (metadata.mtime(), metadata.mtime_nsec() as u32),
            key,
        });
        Ok(())
    }

    /// Maps every file of a block or more, in batches.
    fn give_addresses(&mut self, mount: &Mount, target: &Target, entries: &[Entry]) -> Result<()> {
        let is_file = |entry: &&Entry| matches!(entry.kind, Kind::File(size) if size >= BLOCK_SIZE);
        let mut files = entries.iter().filter(is_file).peekable();
        while files.peek().is_some() {
            let (mut batch, mut contents, mut bytes) = (Vec::new(), Vec::new(), 0);
            while bytes < PATHS_MAX && batch.len() < CONTENTS_MAX {
                let Some(entry) = files.next() else { break };
                let path = self.full(entry);
                bytes += path.as_os_str().len() + 100;
                let Some(Source { inode, size, .. }) = self.sources.get(entry.key as usize) else {
                    unreachable!("each file has its source")
                };
                contents.push(MapContent::File { path, inode: *inode, size: *size });
                batch.push(entry.key as usize);
            }
            let origin = self.root.display().to_string();
            let mut given = mount.map(&target.path, &origin, contents)?;
            for source in batch {
                let source = &mut self.sources[source];
                source.start = given.start;
                given.start += source.size.next_multiple_of(BLOCK_SIZE);
            }
            self.area = Some(given.area);
        }
        Ok(())
    }

    /// Where an entry lies on this host.
    fn full(&self, entry: &Entry) -> PathBuf {
        if entry.path.as_os_str().is_empty() {
            return self.root.to_owned();
        }
        self.root.join(&entry.path)
    }

    /// Clones whole blocks of `source` from `from` to `to`.
    fn clone(&self, source: &Source, file: &File, from: u64, to: u64) -> Result<()> {
        match &self.area {
            Some(area) if from < to => clone(area, source.start + from, file, from, to - from),
            _ => Ok(()),
        }
    }
}

impl Origin for Local<'_> {
    fn threads(&self) -> usize {
        // They wait for one another in btrfs beyond this.
        thread::available_parallelism().map_or(1, usize::from).min(4)
    }

    fn fill(&self, entry: &Entry, file: &File) -> Result<()> {
        let source = &self.sources[entry.key as usize];
        let whole = source.whole();
        if source.size == whole && source.allocated >= whole {
            return self.clone(source, file, 0, whole);
        }
        let path = self.full(entry);
        let failed = |e| Error::io(format!("cannot map {}", path.display()), e);
        let original = File::open(&path).map_err(failed)?;
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
        let now = original.metadata().map_err(cannot_make(&path))?;
        if Source::of(&now).is_same(source) {
            return Ok(());
        }
        let message = format!("{} was changed while it was mapped: try again", path.display());
        Err(Error::new(ErrorKind::Unavailable, message).into())
    }

    fn xattrs(&self, entry: &Entry) -> Result<Xattrs> {
        let path = self.full(entry);
        let failed = |e| Error::io(format!("cannot read the attributes of {}", path.display()), e);
        Ok(xattrs_of(&path).map_err(failed)?)
    }
}

/// Where `file` has data, in whole blocks before `end`.
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
