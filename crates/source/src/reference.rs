use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Error, ErrorKind, FileIdentity, ObjectId, ObjectKind,
    Result,
};
use bytes::Bytes;
use rustix::fs::OFlags;

use crate::{
    beneath::open_without_symlinks,
    check_len,
    opening::{Manner, opened_now, with_opened},
    too_short,
};

/// Two changes of a file within this time may have the same change time: kernels count it in ticks
/// of at most 10 ms.
const CHANGE_TIME_STEP: Duration = Duration::from_millis(20);

/// Files and block devices outside any store: object `file/srv/disk.img` is `/srv/disk.img`. Uses
/// O_DIRECT if the file system supports it: the volume caches these bytes, so the page cache need
/// not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference(());

impl Reference {
    /// All files of this machine.
    pub fn new() -> Self {
        Self(())
    }

    /// The object for the file at the absolute `path`.
    pub fn object(path: &Path) -> Result<ObjectId> {
        let relative = path.to_str().and_then(|path| path.strip_prefix('/'));
        match relative {
            Some(relative) => ObjectKind::File.object(relative),
            None => Err(Error::new(
                ErrorKind::Invalid,
                format!("{} is not an absolute path in UTF-8", path.display()),
            )),
        }
    }

    /// The object of the regular file at the absolute `path`, and the identity of its present
    /// state, which differs from that of every later one.
    pub fn identify(path: &Path) -> Result<(ObjectId, FileIdentity)> {
        let failed = |error| Error::io(format!("cannot look at {}", path.display()), error);
        let file = open_without_symlinks(path, OFlags::PATH).map_err(failed)?;
        Self::identify_open(path, &file.into())
    }

    /// [`Self::identify`] for an open `file` at `path`; an `O_PATH` descriptor suffices. Waits up
    /// to 20 ms if the file has just changed, so that the next change gets another change time.
    pub fn identify_open(path: &Path, file: &File) -> Result<(ObjectId, FileIdentity)> {
        let object = Self::object(path)?;
        let look = || {
            let failed = |error| Error::io(format!("cannot look at {}", path.display()), error);
            let metadata = file.metadata().map_err(failed)?;
            if metadata.is_file() {
                return Ok(identity(&metadata));
            }
            let message = format!("{} is not a regular file", path.display());
            Err(Error::new(ErrorKind::Invalid, message))
        };
        let first = look()?;
        if !is_fresh(&first) {
            return Ok((object, first));
        }
        std::thread::sleep(CHANGE_TIME_STEP);
        Ok((object, look()?))
    }

    /// The bytes of `range` of `object`. Blocks on the disk.
    pub fn read_now(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let path = path_of(object)?;
        self.read_opened(&path, opened_now(&path, Manner::Referred), object, range)
    }

    /// The bytes with the identity of the file that they came from.
    pub fn read_identified_now(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<(FileIdentity, Bytes)> {
        let path = path_of(object)?;
        self.read_identified_opened(&path, opened_now(&path, Manner::Identified), object, range)
    }

    fn read_opened(
        &self,
        path: &Path,
        opened: io::Result<File>,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<Bytes> {
        self.read_from(&opened.map_err(cannot_read(path))?, object, range)
    }

    fn read_identified_opened(
        &self,
        path: &Path,
        opened: io::Result<File>,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<(FileIdentity, Bytes)> {
        let file = opened.map_err(cannot_read(path))?;
        let look =
            || file.metadata().map(|metadata| identity(&metadata)).map_err(cannot_read(path));
        let before = look()?;
        let bytes = self.read_from(&file, object, range)?;
        if look()? == before {
            return Ok((before, bytes));
        }
        let message = format!("{} was changed while it was read", path.display());
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    fn read_from(&self, file: &File, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        check_len(object, range)?;
        let failed = |error| Error::io(format!("cannot read {}", object.shown()), error);
        let blocks = range.to_blocks();
        let mut buf = vec![0; (blocks.len() + BLOCK_SIZE) as usize];
        // O_DIRECT needs an aligned address; a Vec guarantees none, so use its aligned part.
        let shift = buf.as_ptr().align_offset(BLOCK_SIZE as usize);
        let target = &mut buf[shift..shift + blocks.len() as usize];
        let filled = read_up_to(file, target, blocks.start()).map_err(failed)?;
        let start = (range.start() - blocks.start()) as usize;
        let end = start + range.len() as usize;
        if filled < end {
            return Err(too_short(object, range));
        }
        Ok(Bytes::from(buf).slice(shift + start..shift + end))
    }
}

impl BlockSource for Reference {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let (this, path, object) = (*self, path_of(object)?, object.clone());
        let read = move |path: &Path, opened| this.read_opened(path, opened, &object, range);
        with_opened(path, Manner::Referred, read).await
    }

    async fn read_identified(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<(FileIdentity, Bytes)> {
        let (this, path, object) = (*self, path_of(object)?, object.clone());
        let read =
            move |path: &Path, opened| this.read_identified_opened(path, opened, &object, range);
        with_opened(path, Manner::Identified, read).await
    }
}

fn identity(metadata: &Metadata) -> FileIdentity {
    let time =
        |seconds: i64, nanos: i64| seconds.saturating_mul(1_000_000_000).saturating_add(nanos);
    FileIdentity {
        inode: metadata.ino(),
        size: metadata.size(),
        mtime_ns: time(metadata.mtime(), metadata.mtime_nsec()),
        ctime_ns: time(metadata.ctime(), metadata.ctime_nsec()),
    }
}

fn is_fresh(identity: &FileIdentity) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as i64;
    now.abs_diff(identity.ctime_ns) < CHANGE_TIME_STEP.as_nanos() as u64
}

fn path_of(object: &ObjectId) -> Result<PathBuf> {
    match object.below(ObjectKind::File) {
        Some(relative) => Ok(Path::new("/").join(relative)),
        None => Err(Error::new(ErrorKind::NotFound, format!("{object} does not name a file"))),
    }
}

/// `Unavailable` if the opener did not answer: it may do so later.
fn cannot_read(path: &Path) -> impl Fn(io::Error) -> Error {
    let what = format!("cannot read {}", path.display());
    move |error| match error.kind() {
        io::ErrorKind::TimedOut => Error::with_source(ErrorKind::Unavailable, what.clone(), error),
        _ => Error::io(what.clone(), error),
    }
}

/// Reads until `buf` is full or the file ends; returns the number of bytes read.
fn read_up_to(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => {
                done += n;
                // A direct read that ends off a block boundary is at the end of the file.
                if !(done as u64).is_multiple_of(BLOCK_SIZE) {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use burgeon_block::{ByteRange, ErrorKind};

    use super::Reference;

    #[test]
    fn any_change_of_a_file_changes_its_identity() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("data");
        let other = folder.path().join("other");
        let whole = ByteRange::at(0, 5000).unwrap();
        std::fs::write(&path, [1; 5000]).unwrap();
        let (object, first) = Reference::identify(&path).unwrap();
        let now = || Reference::new().read_identified_now(&object, whole).unwrap();
        assert_eq!(now(), (first, vec![1; 5000].into()));
        assert_eq!(Reference::identify(&path).unwrap().1, first, "reading changes nothing");
        // As quickly as can be: the same length, in place.
        std::fs::write(&path, [2; 5000]).unwrap();
        assert_ne!(now().0, first);
        let (_, second) = Reference::identify(&path).unwrap();
        // Another file of the same length, with the old modification time.
        std::fs::write(&other, [3; 5000]).unwrap();
        let mtime = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::File::options().write(true).open(&other).unwrap().set_modified(mtime).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let third = now().0;
        assert_eq!(third.mtime_ns, second.mtime_ns);
        assert_ne!(third, second);
        assert!(Reference::identify(folder.path()).is_err(), "a folder has no bytes");
    }

    #[test]
    fn reads_unaligned_ranges_and_refuses_to_read_past_the_end() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("data");
        let data: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
        std::fs::write(&path, &data).unwrap();
        let object = Reference::object(&path).unwrap();
        let read =
            |start, len| Reference::new().read_now(&object, ByteRange::at(start, len).unwrap());
        for (start, len) in [(0, 10_000), (1, 1), (4095, 2), (8192, 1808), (10_000, 0)] {
            let expected = &data[start as usize..(start + len) as usize];
            assert_eq!(read(start, len).unwrap(), expected, "{start} {len}");
        }
        assert_eq!(read(9_999, 2).unwrap_err().kind(), ErrorKind::Corrupt);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(0, 1).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
