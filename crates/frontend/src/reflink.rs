//! Files that share their blocks with the virtual area's file: made by cloning, without reading.
//!
//! The area has no btrfs checksums (`nodatasum`), and btrfs clones between files of the same kind
//! only; so the new file is made `nodatasum`, too, while it is still empty.
//!
//! Invariants (held by `tests/virtual_area.rs`): nothing is read to clone whole blocks; a file is
//! named only once it is complete.

use std::{ffi::c_ulong, fs::File, os::fd::AsRawFd};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, Result};
use rustix::{
    fs::{IFlags, ioctl_getflags, ioctl_setflags},
    io::Errno,
};

use crate::sys::{failed, ioctl_struct};

const FICLONERANGE: c_ulong = 0x4020_940d;

/// `struct file_clone_range`.
#[repr(C)]
struct CloneRange {
    from: i64,
    offset: u64,
    len: u64,
    to: u64,
}

/// Makes `file`, which is empty, one without data checksums, as the virtual area's is; of a
/// directory: the files that will be made in it.
pub fn make_nodatasum(file: &File) -> Result<()> {
    set_nodatasum(file, true)
}

/// Lets the files that will be made in the directory `folder` have data checksums again.
pub fn end_nodatasum(folder: &File) -> Result<()> {
    set_nodatasum(folder, false)
}

fn set_nodatasum(file: &File, on: bool) -> Result<()> {
    let set = || -> Result<(), Errno> {
        let mut flags = ioctl_getflags(file)?;
        flags.set(IFlags::NOCOW, on);
        ioctl_setflags(file, flags)?;
        // If the file is not empty, btrfs ignores the change without an error.
        match ioctl_getflags(file)?.contains(IFlags::NOCOW) == on {
            true => Ok(()),
            false => Err(Errno::OPNOTSUPP),
        }
    };
    let what = "cannot change whether files have data checksums (chattr +C)";
    set().map_err(|errno| failed(what, errno))
}

/// Clones the whole blocks `blocks` of the file `from`, such as the virtual area's, to `to` (a
/// multiple of 4 KiB, in bytes) of `file`, whose end moves there if it was before. Nothing is read.
/// `NoSpace` if the file system has no room for the metadata.
pub fn clone_blocks(from: &File, blocks: ByteRange, file: &File, to: u64) -> Result<()> {
    if blocks.is_empty() || blocks.to_blocks() != blocks || !to.is_multiple_of(BLOCK_SIZE) {
        let message = format!("{blocks} of a file cannot be cloned to {to}");
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    let (offset, len) = (blocks.start(), blocks.len());
    let mut range = CloneRange { from: from.as_raw_fd().into(), offset, len, to };
    // SAFETY: FICLONERANGE reads one `file_clone_range`.
    let cloned = unsafe { ioctl_struct(file, FICLONERANGE, &mut range) };
    cloned.map(|_| ()).map_err(|cause| {
        let hint = match cause.raw_os_error() {
            Some(libc::EXDEV) => "; the target is on another file system",
            Some(libc::EINVAL) => {
                "; has one file data checksums and the other none, or is it beyond the end?"
            }
            Some(libc::EROFS) => "; the mount is read-only",
            _ => "",
        };
        failed(format!("cannot clone {blocks}{hint}"), cause)
    })
}

#[cfg(test)]
mod tests {
    use super::{CloneRange, clone_blocks};
    use burgeon_block::{ByteRange, ErrorKind};

    #[test]
    fn the_structure_has_the_kernels_size() {
        assert_eq!(size_of::<CloneRange>(), 32);
    }

    #[test]
    fn ranges_that_are_no_blocks_are_refused() {
        let file = tempfile::tempfile().unwrap();
        for (start, len, to) in [(0, 0, 0), (1, 4096, 0), (0, 4097, 0), (0, 4096, 1)] {
            let range = ByteRange::at(start, len).unwrap();
            let error = clone_blocks(&file, range, &file, to).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    }
}
