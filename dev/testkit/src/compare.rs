//! Is the copy the original? Entry by entry: kind, content, holes, mode, owner, modification
//! time, hard-link groups, extended attributes, device numbers.
//!
//! Holes: a whole block that is a hole in the original must be one in the copy. The opposite may
//! differ: an image may store a block of zeros as a hole.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File, Metadata},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rustix::{
    fs::{SeekFrom, lgetxattr, lgetxattr_query, llistxattr, llistxattr_query, seek},
    io::Errno,
};

const BLOCK: u64 = 4096;
const BUFFER: usize = 1 << 20;
/// Differences kept; the others are only counted.
const KEPT_MAX: usize = 10_000;
/// Differences printed.
const SHOWN_MAX: usize = 20;

/// Result of a comparison.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Entries of the original.
    pub entries: u64,
    /// Bytes of content compared.
    pub bytes: u64,
    /// All differences.
    pub differences: u64,
    /// The first of them, each with its path.
    pub first: Vec<String>,
    originals: HashMap<(u64, u64), PathBuf>,
    copies: HashMap<(u64, u64), PathBuf>,
}

impl Comparison {
    /// Number of entries that could not be read; panics if anything else differs.
    #[track_caller]
    pub fn only_io_errors(&self) -> u64 {
        let error = |line: &&String| line.contains("Input/output error");
        let errors = self.first.iter().filter(error).count() as u64;
        assert!(errors == self.differences, "not only I/O errors: {self}");
        errors
    }

    /// Panics with the first differences unless the trees are the same.
    #[track_caller]
    pub fn assert_same(&self) {
        assert!(self.differences == 0 && self.entries > 0, "{self}");
    }

    fn differs(&mut self, path: &Path, what: impl fmt::Display) {
        self.differences += 1;
        if self.first.len() < KEPT_MAX {
            self.first.push(format!("{}: {what}", path.as_os_str().as_bytes().escape_ascii()));
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} entries, {} bytes, {} differences",
            self.entries, self.bytes, self.differences
        )?;
        self.first.iter().take(SHOWN_MAX).try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// Compares the folder `copy` with the folder `original`. An error means that the trees could not
/// be read, not that they differ; an entry of the copy that cannot be read is a difference.
pub fn compare(original: &Path, copy: &Path) -> Result<Comparison> {
    let mut comparison = Comparison::default();
    entry(original, copy, Path::new("."), &mut comparison)?;
    let mut folders = vec![PathBuf::from(".")];
    while let Some(folder) = folders.pop() {
        let names = names(&original.join(&folder))?;
        let copied = match self::names(&copy.join(&folder)) {
            Ok(copied) => copied,
            Err(error) => {
                comparison.differs(&folder, format!("cannot be listed: {error:#}"));
                continue;
            }
        };
        for name in copied.iter().filter(|name| names.binary_search(name).is_err()) {
            comparison.differs(&folder.join(name), "only in the copy");
        }
        for name in &names {
            let path = folder.join(name);
            if copied.binary_search(name).is_err() {
                comparison.differs(&path, "missing");
            } else if entry(&original.join(&path), &copy.join(&path), &path, &mut comparison)? {
                folders.push(path);
            }
        }
    }
    Ok(comparison)
}

fn names(folder: &Path) -> Result<Vec<OsString>> {
    let entries = fs::read_dir(folder).with_context(|| format!("{folder:?}"))?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name()))
        .collect::<std::io::Result<Vec<_>>>()
        .with_context(|| format!("{folder:?}"))?;
    names.sort();
    Ok(names)
}

/// Compares one entry; says whether both are folders.
fn entry(original: &Path, copy: &Path, path: &Path, found: &mut Comparison) -> Result<bool> {
    found.entries += 1;
    let a = fs::symlink_metadata(original).with_context(|| format!("{original:?}"))?;
    let b = match fs::symlink_metadata(copy) {
        Ok(b) => b,
        Err(error) => {
            found.differs(path, error);
            return Ok(false);
        }
    };
    metadata(path, &a, &b, found);
    xattrs(original, copy, path, found)?;
    let kind = a.file_type();
    if kind != b.file_type() {
        found.differs(path, "another kind of file");
        return Ok(false);
    }
    if !kind.is_dir() {
        link_group(path, &a, &b, found);
    }
    if kind.is_symlink() {
        let (target, copied) = (fs::read_link(original)?, fs::read_link(copy));
        if copied.as_ref().ok() != Some(&target) {
            found.differs(path, format!("symlink to {copied:?} instead of {target:?}"));
        }
    } else if kind.is_file()
        && a.len() == b.len()
        && let Err(error) = content(original, copy, path, a.len(), found)
    {
        found.differs(path, format!("{error:#}"));
    }
    Ok(kind.is_dir())
}

fn metadata(path: &Path, a: &Metadata, b: &Metadata, found: &mut Comparison) {
    let mut check = |what: &str, a: i128, b: i128| {
        if a != b {
            let text = if what == "mode" {
                format!("mode is {b:o}, was {a:o}")
            } else {
                format!("{what} is {b}, was {a}")
            };
            found.differs(path, text);
        }
    };
    check("mode", a.mode().into(), b.mode().into());
    check("uid", a.uid().into(), b.uid().into());
    check("gid", a.gid().into(), b.gid().into());
    check("mtime", nanoseconds(a), nanoseconds(b));
    let kind = a.file_type();
    if kind.is_char_device() || kind.is_block_device() {
        check("rdev", a.rdev().into(), b.rdev().into());
    }
    if !kind.is_dir() {
        check("number of links", a.nlink().into(), b.nlink().into());
        check("size", a.len().into(), b.len().into());
    }
}

fn nanoseconds(metadata: &Metadata) -> i128 {
    i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec())
}

/// Names that are one file in the original must be one file in the copy, and no others.
fn link_group(path: &Path, a: &Metadata, b: &Metadata, found: &mut Comparison) {
    let first = |group: &mut HashMap<(u64, u64), PathBuf>, m: &Metadata| {
        group.entry((m.dev(), m.ino())).or_insert_with(|| path.to_path_buf()).clone()
    };
    let a = first(&mut found.originals, a);
    let b = first(&mut found.copies, b);
    if a != b {
        found.differs(path, format!("is the same file as {b:?}, was the same as {a:?}"));
    }
}

fn xattrs(original: &Path, copy: &Path, path: &Path, found: &mut Comparison) -> Result<()> {
    let a = read_xattrs(original)?;
    match read_xattrs(copy) {
        Err(error) => found.differs(path, format!("{error:#}")),
        Ok(b) if a == b => {}
        Ok(b) => {
            for (name, value) in &a {
                if !b.contains(&(name.clone(), value.clone())) {
                    found.differs(path, format!("xattr {name:?} is missing or differs"));
                }
            }
            for (name, _) in b.iter().filter(|(name, _)| a.iter().all(|(other, _)| other != name)) {
                found.differs(path, format!("xattr {name:?} is new"));
            }
        }
    }
    Ok(())
}

fn read_xattrs(path: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
    let listing = || format!("listing xattrs of {path:?}");
    // For most files there is nothing, which costs no buffer.
    let mut list = vec![0; llistxattr_query(path).with_context(listing)?];
    llistxattr(path, &mut list).with_context(listing)?;
    let mut xattrs = Vec::new();
    for name in list.split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let name = OsStr::from_bytes(name);
        let reading = || format!("reading xattr {name:?} of {path:?}");
        let mut value = vec![0; lgetxattr_query(path, name).with_context(reading)?];
        lgetxattr(path, name, &mut value).with_context(reading)?;
        xattrs.push((name.to_os_string(), value));
    }
    xattrs.sort();
    Ok(xattrs)
}

/// Compares content and holes, reading only where one of the two may hold data.
fn content(
    original: &Path,
    copy: &Path,
    path: &Path,
    size: u64,
    found: &mut Comparison,
) -> Result<()> {
    if size == 0 {
        return Ok(());
    }
    let a = File::open(original).with_context(|| format!("{original:?}"))?;
    let b = File::open(copy).context("cannot be opened")?;
    let buffer = || vec![0; size.min(BUFFER as u64) as usize];
    let mut buffers = (buffer(), buffer());
    let (mut offset, mut told) = (0, false);
    while offset < size {
        let (data_a, data_b) = (next(&a, offset, size, true)?, next(&b, offset, size, true)?);
        // A hole of the original, in whole blocks, must not be data in the copy.
        let hole_end = if data_a < size { data_a } else { size } / BLOCK * BLOCK;
        if data_b.max(offset.next_multiple_of(BLOCK)) < hole_end && !told {
            found.differs(path, format!("data at {data_b}, where the original has a hole"));
            told = true;
        }
        let start = data_a.min(data_b);
        if start >= size {
            break;
        }
        let ends = (next(&a, start, size, false)?, next(&b, start, size, false)?);
        let end = ends.0.max(ends.1).min(start + BUFFER as u64).min(size);
        let len = (end - start) as usize;
        let (x, y) = (&mut buffers.0[..len], &mut buffers.1[..len]);
        a.read_exact_at(x, start).context("cannot read the original")?;
        b.read_exact_at(y, start).with_context(|| format!("cannot read {len} bytes at {start}"))?;
        found.bytes += end - start;
        if x != y {
            let at = x.iter().zip(&*y).take_while(|(x, y)| x == y).count();
            found.differs(path, format!("content differs at byte {}", start + at as u64));
            return Ok(());
        }
        offset = end;
    }
    Ok(())
}

/// The next data (or hole) at or after `offset`; `size` when there is none.
fn next(file: &File, offset: u64, size: u64, data: bool) -> Result<u64> {
    if offset >= size {
        return Ok(size);
    }
    let from = if data { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) };
    match seek(file, from) {
        Ok(place) => Ok(place.min(size)),
        Err(Errno::NXIO) => Ok(size),
        Err(error) => Err(error).context("cannot seek for data"),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File, OpenOptions},
        os::unix::fs::{FileExt, PermissionsExt},
        path::Path,
        process::Command,
    };

    use super::compare;
    use crate::{Rng, Space, Torture, TortureSize, torture::set_time};

    fn copy(from: &Path, to: &Path) {
        let done = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
        assert!(done.success());
    }

    #[test]
    fn a_torture_tree_equals_its_copy_and_its_twin_of_the_same_seed() {
        let space = Space::new("compare-same");
        let (a, b, c) = (space.path("a"), space.path("b"), space.path("c"));
        Torture::make(&a, 1, TortureSize::Full).unwrap();
        copy(&a, &b);
        let found = compare(&a, &b).unwrap();
        found.assert_same();
        assert!(found.entries > 8000 && found.bytes > 50_000_000, "{found}");
        Torture::make(&c, 1, TortureSize::Full).unwrap();
        compare(&a, &c).unwrap().assert_same();
    }

    /// Makes one change to the copy; the comparison must name exactly that.
    fn finds(space: &Space, expected: &str, change: impl FnOnce(&Path)) {
        let (a, b) = (space.path("a"), space.path("changed"));
        copy(&a, &b);
        change(&b);
        let found = compare(&a, &b).unwrap();
        fs::remove_dir_all(&b).unwrap();
        assert!(found.first.iter().any(|line| line.contains(expected)), "{expected}: {found}");
    }

    #[test]
    fn every_kind_of_difference_is_found() {
        let space = Space::new("compare-different");
        Torture::make(&space.path("a"), 2, TortureSize::Small).unwrap();
        let write = |path: &Path, at: u64, byte: &[u8]| {
            let time = fs::metadata(path).unwrap().modified().unwrap();
            let file = OpenOptions::new().write(true).open(path).unwrap();
            file.write_all_at(byte, at).unwrap();
            file.set_modified(time).unwrap();
        };
        finds(&space, "sizes/large: content differs at byte 2999999", |b| {
            let path = b.join("sizes/large");
            let mut last = [0];
            File::open(&path).unwrap().read_exact_at(&mut last, 2_999_999).unwrap();
            write(&path, 2_999_999, &[last[0] ^ 128]);
        });
        finds(&space, "sparse/tebibyte: data at 549755883520, where", |b| {
            write(&b.join("sparse/tebibyte"), (1 << 39) + 8192 * 16, &[0]);
            write(&b.join("sparse/tebibyte"), (1 << 39) + 4096 * 32, &[0]);
            write(&b.join("sparse/tebibyte"), (1 << 39) + 65_536 * 2, &[0]);
            write(&b.join("sparse/tebibyte"), 549_755_883_520, &[0]);
        });
        finds(&space, "sizes/random-100: number of links", |b| {
            fs::hard_link(b.join("sizes/random-100"), b.join("sizes/z")).unwrap();
        });
        finds(&space, "fifo-again: is the same file as", |b| {
            let again = b.join("special/fifo-again");
            fs::remove_file(&again).unwrap();
            copy(&b.join("special/fifo"), &again);
        });
        finds(&space, "sizes: mtime", |b| set_time(&b.join("sizes"), 1, 1).unwrap());
        finds(&space, "attrs/mode-4755: mode is 100755", |b| {
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(b.join("attrs/mode-4755"), mode).unwrap();
        });
        finds(&space, "attrs/xattrs: xattr \"user.n01\" is missing", |b| {
            rustix::fs::lremovexattr(b.join("attrs/xattrs"), "user.n01").unwrap();
        });
        finds(&space, "deep-0/deep-1/new: only in the copy", |b| {
            fs::write(b.join("deep-0/deep-1/new"), Rng::new(1).bytes(5)).unwrap();
        });
        finds(&space, "many/entry-7: missing", |b| {
            fs::remove_file(b.join("many/entry-7")).unwrap();
        });
        finds(&space, "special/null: another kind of file", |b| {
            fs::remove_file(b.join("special/null")).unwrap();
            fs::write(b.join("special/null"), "").unwrap();
        });
    }
}
