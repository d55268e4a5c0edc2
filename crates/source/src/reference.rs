use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{BLOCK_SIZE, BlockSource, ByteRange, Error, ErrorKind, ObjectId, Result};
use bytes::Bytes;
use rustix::fs::OFlags;

use crate::{blocking, check_len, too_short};

/// Files and block devices outside any store: object `file/srv/disk.img` is `/srv/disk.img`.
/// Read with O_DIRECT where the file system can: what is read here is cached by the volume, not
/// by the page cache as well.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference(());

impl Reference {
    /// All files of this machine.
    pub fn new() -> Self {
        Self(())
    }

    /// The object that stands for the file at the absolute `path`.
    pub fn object(path: &Path) -> Result<ObjectId> {
        let relative = path.to_str().and_then(|path| path.strip_prefix('/'));
        match relative {
            Some(relative) => ObjectId::new(format!("file/{relative}")),
            None => Err(Error::new(
                ErrorKind::Invalid,
                format!("{} is not an absolute path in UTF-8", path.display()),
            )),
        }
    }

    /// The bytes of `range` of `object`; waits for the disk.
    pub fn read_now(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        check_len(object, range)?;
        let path = path_of(object)?;
        let failed = |error| Error::io(format!("cannot read {}", path.display()), error);
        let file = open(&path).map_err(failed)?;
        let blocks = range.to_blocks();
        let mut buf = vec![0; (blocks.len() + BLOCK_SIZE) as usize];
        // O_DIRECT wants an aligned address; a Vec cannot promise one, so take the part that is.
        let shift = buf.as_ptr().align_offset(BLOCK_SIZE as usize);
        let target = &mut buf[shift..shift + blocks.len() as usize];
        let filled = read_up_to(&file, target, blocks.start()).map_err(failed)?;
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
        let (this, object) = (*self, object.clone());
        blocking(move || this.read_now(&object, range)).await
    }
}

fn path_of(object: &ObjectId) -> Result<PathBuf> {
    match object.as_str().strip_prefix("file/") {
        Some(relative) => Ok(Path::new("/").join(relative)),
        None => Err(Error::new(ErrorKind::NotFound, format!("{object} does not name a file"))),
    }
}

fn open(path: &Path) -> io::Result<File> {
    let open = |flags: OFlags| {
        let flags = (flags | OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as i32;
        File::options().read(true).custom_flags(flags).open(path)
    };
    match open(OFlags::DIRECT) {
        // tmpfs before 6.6, and some network file systems, have no direct I/O.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => open(OFlags::empty()),
        result => result,
    }
}

/// Reads until `buf` is full or the file ends; returns how much was read.
fn read_up_to(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => {
                done += n;
                // A direct read that ends off a block boundary has met the end of the file.
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
