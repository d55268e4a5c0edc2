use std::{
    fmt,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, LocalFile, Pages, Result};
use burgeon_image::open_own;
use rustix::{
    fs::{FallocateFlags, OFlags, SeekFrom, fallocate, fdatasync, seek},
    io::{Errno, retry_on_intr},
};

/// No symlink is followed, and a FIFO is not waited for.
const CAREFUL: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK);

/// Access of a [`DirectFile`] to its bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Access {
    /// Past the page cache: no second copy in memory, no writeback to wait for.
    Direct,
    /// Through the page cache, because the file system refuses direct I/O.
    Buffered {
        /// Its error.
        reason: String,
    },
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => f.write_str("direct I/O"),
            Self::Buffered { reason } => write!(f, "buffered I/O (direct I/O refused: {reason})"),
        }
    }
}

/// A sparse local file of fixed length, read and written with direct I/O where the file system
/// allows it, in whole blocks.
pub struct DirectFile {
    file: File,
    path: PathBuf,
    len: u64,
    access: Access,
}

impl DirectFile {
    /// Opens `path`, or makes it, as a sparse file of exactly `len` bytes (rounded up to blocks).
    /// Existing content is kept, except bytes beyond `len`.
    pub fn open(path: &Path, len: u64) -> Result<Self> {
        let len = len.div_ceil(BLOCK_SIZE).saturating_mul(BLOCK_SIZE);
        let (file, access) = open(path)
            .map_err(|error| Error::io(format!("cannot open {}", path.display()), error))?;
        file.set_len(len).map_err(|error| {
            Error::io(format!("cannot make {} {len} bytes long", path.display()), error)
        })?;
        Ok(Self { file, path: path.to_owned(), len, access })
    }

    /// The same through the page cache, for writes that are smaller than a block.
    pub fn open_buffered(path: &Path, len: u64) -> Result<Self> {
        let failed = |error| Error::io(format!("cannot open {}", path.display()), error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = open_own(path, &mut options, CAREFUL).map_err(failed)?;
        file.set_len(len).map_err(failed)?;
        let access = Access::Buffered { reason: "its writes are small".to_owned() };
        Ok(Self { file, path: path.to_owned(), len, access })
    }

    /// Direct I/O, or the reason why not.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Length in bytes, a multiple of the block size.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if the file was made with no room for a byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
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

    /// True if the kernel takes this buffer as it is.
    fn fits(&self, offset: u64, buf: &[u8]) -> bool {
        let whole = |n: u64| n.is_multiple_of(BLOCK_SIZE);
        self.access != Access::Direct
            || (whole(offset) && whole(buf.len() as u64) && whole(buf.as_ptr().addr() as u64))
    }

    /// A block buffer that covers `range`; only callers with unaligned buffers come here.
    fn bounce(&self, range: ByteRange) -> Result<(ByteRange, Pages)> {
        let blocks = range.to_blocks();
        let pages = Pages::zeroed(blocks.len()).ok_or_else(|| {
            Error::new(ErrorKind::LocalIo, format!("no memory for {}", self.path.display()))
        })?;
        Ok((blocks, pages))
    }
}

fn open(path: &Path) -> io::Result<(File, Access)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let direct = open_own(path, &mut options, CAREFUL | OFlags::DIRECT);
    let refusal = match direct.and_then(|file| probe(&file).map(|()| file)) {
        Ok(file) => return Ok((file, Access::Direct)),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => error,
        Err(error) => return Err(error),
    };
    Ok((open_own(path, &mut options, CAREFUL)?, Access::Buffered { reason: refusal.to_string() }))
}

/// Some file systems take the flag and refuse the first read.
fn probe(file: &File) -> io::Result<()> {
    let mut page = Pages::zeroed(BLOCK_SIZE).ok_or(io::ErrorKind::OutOfMemory)?;
    file.read_at(page.bytes_mut(), 0).map(drop)
}

fn read_full(file: &File, mut offset: u64, mut buf: &mut [u8]) -> io::Result<()> {
    while !buf.is_empty() {
        match file.read_at(buf, offset) {
            Ok(0) => {
                buf.fill(0);
                return Ok(());
            }
            Ok(n) => {
                buf = &mut buf[n..];
                offset += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl LocalFile for DirectFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let range = self.range(offset, buf.len())?;
        let failed = |error| self.error("read", range, error);
        if self.fits(offset, buf) {
            return read_full(&self.file, offset, buf).map_err(failed);
        }
        let (blocks, mut pages) = self.bounce(range)?;
        read_full(&self.file, blocks.start(), pages.bytes_mut()).map_err(failed)?;
        let skip = (range.start() - blocks.start()) as usize;
        buf.copy_from_slice(&pages.bytes()[skip..][..buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let range = self.range(offset, buf.len())?;
        let failed = |error| self.error("write", range, error);
        if self.fits(offset, buf) {
            return self.file.write_all_at(buf, offset).map_err(failed);
        }
        let (blocks, mut pages) = self.bounce(range)?;
        if blocks != range {
            read_full(&self.file, blocks.start(), pages.bytes_mut()).map_err(failed)?;
        }
        let skip = (range.start() - blocks.start()) as usize;
        pages.bytes_mut()[skip..][..buf.len()].copy_from_slice(buf);
        self.file.write_all_at(pages.bytes(), blocks.start()).map_err(failed)
    }

    fn punch_hole(&self, range: ByteRange) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        retry_on_intr(|| fallocate(&self.file, flags, range.start(), range.len()))
            .map_err(|error| self.error("punch a hole at", range, error.into()))
    }

    fn next_data(&self, offset: u64) -> Result<Option<ByteRange>> {
        if offset >= self.len {
            return Ok(None);
        }
        let rest = ByteRange::new(offset, self.len);
        let failed = |error: Errno| {
            Error::io(format!("cannot look for data in {}", self.path.display()), error.into())
        };
        let start = match seek(&self.file, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // The file system keeps no account of holes: all of it may be data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(rest),
            Err(error) => return Err(failed(error)),
        };
        let end = seek(&self.file, SeekFrom::Hole(start)).map_err(failed)?;
        Ok(ByteRange::new(start, end.min(self.len)))
    }

    fn sync(&self) -> Result<()> {
        fdatasync(&self.file).map_err(|error| {
            Error::io(format!("cannot sync {}", self.path.display()), error.into())
        })
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{ByteRange, LocalFile, Pages};

    use super::DirectFile;

    #[test]
    fn holes_data_and_unaligned_buffers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache");
        let file = DirectFile::open(&path, 1 << 20).unwrap();
        assert_eq!(file.next_data(0).unwrap(), None);

        let mut block = Pages::zeroed(4096).unwrap();
        block.bytes_mut().fill(7);
        file.write_at(65536, block.bytes()).unwrap();
        file.write_at(131_073, b"unaligned").unwrap();
        file.sync().unwrap();
        assert_eq!(file.next_data(0).unwrap(), ByteRange::new(65536, 69632));

        let mut bytes = vec![1; 13];
        file.read_at(131_071, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\0unaligned\0\0");
        file.read_at(65536, block.bytes_mut()).unwrap();
        assert!(block.bytes().iter().all(|byte| *byte == 7));

        file.punch_hole(ByteRange::new(65536, 69632).unwrap()).unwrap();
        file.read_at(65536, block.bytes_mut()).unwrap();
        assert!(block.bytes().iter().all(|byte| *byte == 0));
        assert!(file.read_at((1 << 20) - 1, &mut bytes).is_err(), "beyond the end");

        drop(file);
        let file = DirectFile::open(&path, 1 << 20).unwrap();
        file.read_at(131_073, &mut bytes[..9]).unwrap();
        assert_eq!(&bytes[..9], b"unaligned", "opening again keeps the bytes");
    }
}
