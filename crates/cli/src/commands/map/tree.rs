//! A whole tree: walked first, given addresses in batches, cloned by several threads.

use std::{
    fs::{self, File, FileTimes, Metadata},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, lchown, symlink},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use anyhow::Result;
use burgeon_block::{BLOCK_SIZE, Error, ErrorKind};
use burgeon_daemon::{
    protocol::{CONTENTS_MAX, MapContent},
    reflink::{end_nodatasum, make_nodatasum},
};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{Mapped, Mount, Target, clone, exists, like};

/// Entries of a tree: some 300 bytes of memory each.
const ENTRIES_MAX: usize = 10_000_000;
/// Folders in folders: no path of the kernel's 4096 bytes has more.
const DEPTH_MAX: usize = 2048;
/// Bytes of paths in one request: a quarter of the longest message, for what JSON adds.
const PATHS_MAX: usize = 1 << 20;
/// Threads that clone. They wait for one another in btrfs beyond this.
const THREADS_MAX: usize = 4;

struct Entry {
    /// Relative to the root.
    path: PathBuf,
    metadata: Metadata,
    /// Where it lies in the area.
    start: u64,
}

pub(super) fn map(mount: &Mount, target: &Target, from: &Path) -> Result<Mapped> {
    // Files are made with their own modes, in a folder that nobody else can enter.
    rustix::process::umask(rustix::fs::Mode::empty());
    let mut entries = Vec::new();
    walk(from, Path::new(""), 0, &mut entries)?;
    let name = target.path.file_name().unwrap_or_default().to_string_lossy();
    let staging = target.folder.join(format!(".{name}.burgeon-{}", std::process::id()));
    fs::DirBuilder::new().mode(0o700).create(&staging).map_err(|e| {
        Error::io(format!("cannot make a folder in {}", target.folder.display()), e)
    })?;
    let made = make(mount, target, from, &staging, &mut entries).and_then(|mapped| {
        renameat_with(CWD, &staging, CWD, &target.path, RenameFlags::NOREPLACE).map_err(
            |errno| match errno {
                rustix::io::Errno::EXIST => exists(&target.path),
                errno => Error::io(format!("cannot name {}", target.path.display()), errno.into()),
            },
        )?;
        Ok(mapped)
    });
    if made.is_err() {
        // What cannot be removed either is named by the next attempt.
        let _ = fs::remove_dir_all(&staging);
    }
    made
}

/// Collects what is below `root/path`, folders before what is in them.
fn walk(root: &Path, path: &Path, depth: usize, entries: &mut Vec<Entry>) -> Result<()> {
    let full = root.join(path);
    let failed = |e| Error::io(format!("cannot map {}", full.display()), e);
    let metadata = fs::symlink_metadata(&full).map_err(failed)?;
    let kind = metadata.file_type();
    if !(kind.is_dir() || kind.is_file() || kind.is_symlink()) {
        let message = format!("{} is no file, folder or symlink", full.display());
        return Err(Error::new(ErrorKind::Invalid, message).into());
    }
    if entries.len() >= ENTRIES_MAX || depth > DEPTH_MAX {
        let message = format!("{} has too many files or folders in folders", root.display());
        return Err(Error::new(ErrorKind::Invalid, message).into());
    }
    entries.push(Entry { path: path.to_owned(), metadata, start: 0 });
    if kind.is_dir() {
        for child in fs::read_dir(&full).map_err(failed)? {
            walk(root, &path.join(child.map_err(failed)?.file_name()), depth + 1, entries)?;
        }
    }
    Ok(())
}

fn make(
    mount: &Mount,
    target: &Target,
    from: &Path,
    staging: &Path,
    entries: &mut [Entry],
) -> Result<Mapped> {
    let area = give_addresses(mount, target, from, entries)?;
    // What is made in these folders inherits that it has no checksums, to be cloned to.
    make_nodatasum(&open(staging)?)?;
    let folders: Vec<_> = entries.iter().filter(|entry| entry.metadata.is_dir()).collect();
    for folder in folders.iter().skip(1) {
        let path = staging.join(&folder.path);
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(cannot_make(&path))?;
    }
    let others: Vec<_> = entries.iter().filter(|entry| !entry.metadata.is_dir()).collect();
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        while let Some(entry) = others.get(next.fetch_add(1, Relaxed)) {
            if let Err(error) = make_one(area.as_ref(), from, staging, entry) {
                next.store(others.len(), Relaxed);
                *failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    thread::scope(|scope| {
        (1..threads).for_each(|_| {
            scope.spawn(work);
        });
        work();
    });
    if let Some(error) = failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        return Err(error);
    }
    // Last, since making files changes their times: from the leaves up.
    for folder in folders.iter().rev() {
        let path = staging.join(&folder.path);
        let folder_file = open(&path)?;
        end_nodatasum(&folder_file)?;
        like(&folder_file, &folder.metadata).map_err(cannot_make(&path))?;
    }
    let files = others.iter().filter(|entry| entry.metadata.is_file());
    let bytes = files.clone().map(|entry| entry.metadata.len()).sum();
    Ok(Mapped { files: files.count() as u64, bytes })
}

/// Whether a file is mapped, and not copied: less than a block would take one of local data in
/// any case, for its end.
fn is_mapped(entry: &Entry) -> bool {
    entry.metadata.is_file() && entry.metadata.len() >= BLOCK_SIZE
}

/// Maps all that is to be mapped, in batches; the area's file if there was any.
fn give_addresses(
    mount: &Mount,
    target: &Target,
    from: &Path,
    entries: &mut [Entry],
) -> Result<Option<File>> {
    let mut area = None;
    let mut rest: Vec<_> = entries.iter_mut().filter(|entry| is_mapped(entry)).collect();
    let mut rest = rest.as_mut_slice();
    while !rest.is_empty() {
        let mut bytes = 0;
        let mut fits = |entry: &&mut Entry| {
            bytes += from.as_os_str().len() + entry.path.as_os_str().len() + 100;
            bytes <= PATHS_MAX
        };
        let count = rest.iter().take(CONTENTS_MAX).take_while(|entry| fits(entry)).count().max(1);
        let (batch, others) = rest.split_at_mut(count);
        let contents = batch.iter().map(|entry| MapContent::File {
            path: from.join(&entry.path),
            inode: entry.metadata.ino(),
            size: entry.metadata.len(),
        });
        let origin = from.display().to_string();
        let (mut start, file) = mount.map(&target.path, &origin, contents.collect())?;
        for entry in batch {
            entry.start = start;
            start += entry.metadata.len().next_multiple_of(BLOCK_SIZE);
        }
        area = Some(file);
        rest = others;
    }
    Ok(area)
}

fn make_one(area: Option<&File>, from: &Path, staging: &Path, entry: &Entry) -> Result<()> {
    let path = staging.join(&entry.path);
    let failed = cannot_make(&path);
    let metadata = &entry.metadata;
    if metadata.is_symlink() {
        let target = fs::read_link(from.join(&entry.path)).map_err(&failed)?;
        symlink(target, &path).map_err(&failed)?;
        lchown(&path, Some(metadata.uid()), Some(metadata.gid())).map_err(&failed)?;
        return Ok(());
    }
    let mode = metadata.mode() & 0o7777;
    let mut file =
        File::options().write(true).create_new(true).mode(mode).open(&path).map_err(&failed)?;
    match area.filter(|_| is_mapped(entry)) {
        Some(area) => clone(area, entry.start, &file, metadata.len())?,
        None => {
            let mut source = File::open(from.join(&entry.path)).map_err(&failed)?;
            std::io::copy(&mut source, &mut file).map_err(&failed)?;
        }
    }
    // Each change of an inode is a transaction's, and most files need but one.
    let ours = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let finished = match (metadata.uid(), metadata.gid()) == ours {
        true => {
            metadata.modified().and_then(|time| file.set_times(FileTimes::new().set_modified(time)))
        }
        false => like(&file, metadata),
    };
    Ok(finished.map_err(failed)?)
}

fn open(folder: &Path) -> Result<File> {
    Ok(File::open(folder).map_err(cannot_make(folder))?)
}

fn cannot_make(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |e| Error::io(format!("cannot make {}", path.display()), e)
}
