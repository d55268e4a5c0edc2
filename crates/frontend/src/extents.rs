//! Extents of a file: btrfs reports their logical addresses, which lie on the lazy device for data
//! that is not local.

use std::{ffi::c_ulong, fs::File};

use burgeon_block::{ByteRange, Result};

use crate::sys::{failed, ioctl_struct};

const FS_IOC_FIEMAP: c_ulong = 0xc020_660b;
/// Extents asked for at once: 14 KiB.
const BATCH: usize = 256;
const LAST: u32 = 0x1;
/// Nowhere yet, somewhere else, compressed, or in the metadata: UNKNOWN, DELALLOC, ENCODED, INLINE.
const NOT_ADDRESSED: u32 = 0x2 | 0x4 | 0x8 | 0x200;

/// Reserved, and all zeros when read.
const UNWRITTEN: u32 = 0x800;
/// FIEMAP_FLAG_SYNC.
const FLAG_SYNC: u32 = 0x1;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

/// `struct fiemap` with room for its extents.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; BATCH],
}

/// The extents of a file: of each its place in the file, its address and its length, in bytes.
pub type Places = Vec<(u64, u64, u64)>;

/// The places of all data of `file`, written first if it was not; `None` if some of it has no
/// address of its own.
pub fn places(file: &File) -> Result<Option<Places>> {
    let mut places = Vec::new();
    let mut is_whole = true;
    all(file, FLAG_SYNC, |extent| {
        // An extent that is written but counts as zeros says nothing about the data behind it.
        is_whole &= extent.flags & (NOT_ADDRESSED | UNWRITTEN) == 0;
        places.push((extent.logical, extent.physical, extent.length));
    })?;
    Ok(is_whole.then_some(places))
}

/// The addresses of the bytes of `file`, as far as they have any, in the order of the file.
pub fn addresses(file: &File) -> Result<Vec<ByteRange>> {
    let mut found = Vec::new();
    all(file, 0, |extent| {
        if extent.flags & NOT_ADDRESSED == 0 {
            found.extend(ByteRange::at(extent.physical, extent.length));
        }
    })?;
    Ok(found)
}

/// Calls `each` for every extent, in the order of the file.
fn all(file: &File, flags: u32, mut each: impl FnMut(&Extent)) -> Result<()> {
    let mut start = 0;
    loop {
        let mut request = Request {
            start,
            length: u64::MAX - start,
            flags,
            mapped: 0,
            count: BATCH as u32,
            reserved: 0,
            extents: [Extent::default(); BATCH],
        };
        // SAFETY: FS_IOC_FIEMAP reads a `fiemap` and writes at most `count` extents behind it.
        unsafe { ioctl_struct(file, FS_IOC_FIEMAP, &mut request) }
            .map_err(|e| failed("cannot list the extents of a file", e))?;
        let extents = &request.extents[..(request.mapped as usize).min(BATCH)];
        extents.iter().for_each(&mut each);
        match extents.last() {
            Some(last) if last.flags & LAST == 0 && last.length > 0 => {
                start = last.logical.saturating_add(last.length);
            }
            _ => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BATCH, Extent, Request};

    #[test]
    fn the_structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<Extent>(), 56);
        assert_eq!(size_of::<Request>(), 32 + BATCH * 56);
    }
}
