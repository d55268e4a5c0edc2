use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{ByteRange, Error, ErrorKind, LocalFile, Result, read_or_zeros};
use burgeon_image::open_own;
use rustix::fs::{OFlags, fdatasync};

/// No symlink is followed, and a FIFO is not waited for.
const CAREFUL: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK);

/// A sparse file of recorded checksums. It is used through the page cache, because its writes are
/// smaller than a block.
pub struct ChecksumFile {
    file: File,
    path: PathBuf,
    len: u64,
}

impl ChecksumFile {
    /// Opens `path`, or makes it, as a sparse file of exactly `len` bytes. Existing content is
    /// kept, except bytes beyond `len`.
    pub fn open(path: &Path, len: u64) -> Result<Self> {
        let failed = |error| Error::io(format!("cannot open {}", path.display()), error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = open_own(path, &mut options, CAREFUL).map_err(failed)?;
        Self::over(file, path, len)
    }

    /// The same over `file`, which another process has opened at `path`.
    pub fn over(file: File, path: &Path, len: u64) -> Result<Self> {
        file.set_len(len).map_err(|error| {
            Error::io(format!("cannot set the length of {}", path.display()), error)
        })?;
        Ok(Self { file, path: path.to_owned(), len })
    }

    fn error(&self, doing: &str, range: ByteRange, error: io::Error) -> Error {
        Error::io(format!("cannot {doing} {range} of {}", self.path.display()), error)
    }

    fn range(&self, offset: u64, len: usize) -> Result<ByteRange> {
        ByteRange::at(offset, len as u64).filter(|range| range.end() <= self.len).ok_or_else(|| {
            let path = self.path.display();
            let message = format!("{len} bytes at {offset} are beyond the end of {path}");
            Error::new(ErrorKind::Invalid, message)
        })
    }
}

impl LocalFile for ChecksumFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let range = self.range(offset, buf.len())?;
        read_or_zeros(&self.file, offset, buf).map_err(|error| self.error("read", range, error))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let range = self.range(offset, buf.len())?;
        self.file.write_all_at(buf, offset).map_err(|error| self.error("write", range, error))
    }

    fn sync(&self) -> Result<()> {
        fdatasync(&self.file).map_err(|error| {
            Error::io(format!("cannot sync {}", self.path.display()), error.into())
        })
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::LocalFile;

    use super::ChecksumFile;

    #[test]
    fn holes_read_as_zeros_and_opening_again_keeps_the_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checksums");
        let file = ChecksumFile::open(&path, 1 << 20).unwrap();
        file.write_at(131_073, b"unaligned").unwrap();
        file.sync().unwrap();
        let mut bytes = vec![1; 13];
        file.read_at(131_071, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\0unaligned\0\0");
        assert!(file.read_at((1 << 20) - 1, &mut bytes).is_err(), "beyond the end");
        assert!(file.write_at((1 << 20) - 1, &bytes).is_err(), "beyond the end");

        drop(file);
        let file = ChecksumFile::open(&path, 1 << 20).unwrap();
        file.read_at(131_073, &mut bytes[..9]).unwrap();
        assert_eq!(&bytes[..9], b"unaligned");
    }
}
