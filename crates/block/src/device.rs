//! The seam between the kernel and a block device.
//!
//! ```text
//!   frontend ── try_read ─► Served     the buffer holds verified bytes
//!            │            ─► Local      they lie in a local file: the frontend reads them there,
//!            │                          then asks verify ─► Good, or AskAgain (try_read)
//!            │            ─► Absent ──► read().await
//!            └─ write, erase, flush     of a WritableDevice only
//! ```
//!
//! Offsets and lengths are whole logical blocks within the device; read buffers are aligned to
//! 4 KiB. `frontend`'s engine checks both before it calls a device.

use std::{future::Future, os::fd::BorrowedFd};

use crate::{BLOCK_SIZE, ByteRange, Error, ErrorKind, Result};

/// The writability of a device, and the durability of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteCache {
    /// The device is never written to.
    ReadOnly,
    /// A write is durable when it returns; a flush has nothing to do.
    Through,
    /// A write is durable after a later flush, or when it was made with `fua`.
    Volatile,
}

/// The parameters of a device for the kernel. Constant while the device is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Size in bytes: whole logical blocks.
    pub size: u64,
    /// Unit of requests in bytes: a power of two from 512 to 4096.
    pub logical_block: u32,
    /// Smallest write that needs no read before it, in bytes: a power of two, at least one logical
    /// block.
    pub physical_block: u32,
    /// Preferred length of requests in bytes: whole physical blocks.
    pub optimal_io: u32,
    /// Unit of discards in bytes, whole logical blocks; 0 for no discards.
    pub discard_granularity: u32,
    /// Its writability, and the durability of a write.
    pub cache: WriteCache,
}

impl Shape {
    /// A read-only device of `size` bytes with blocks of 4 KiB.
    pub const fn read_only(size: u64) -> Self {
        let block = BLOCK_SIZE as u32;
        Self {
            size,
            logical_block: block,
            physical_block: block,
            optimal_io: block,
            discard_granularity: 0,
            cache: WriteCache::ReadOnly,
        }
    }

    /// `Invalid`, with the reason, unless the fields agree with their descriptions.
    pub fn check(&self) -> Result<()> {
        let (logical, physical) = (self.logical_block, self.physical_block);
        let whole = |len: u32, unit: u32| len.is_multiple_of(unit);
        let why = if !logical.is_power_of_two() || !(512..=4096).contains(&logical) {
            format!("logical blocks of {logical} bytes")
        } else if !physical.is_power_of_two() || physical < logical {
            format!("physical blocks of {physical} bytes above logical ones of {logical}")
        } else if self.optimal_io == 0 || !whole(self.optimal_io, physical) {
            format!("an optimal length of {} bytes", self.optimal_io)
        } else if !whole(self.discard_granularity, logical) {
            format!("discards of {} bytes", self.discard_granularity)
        } else if !self.size.is_multiple_of(logical.into()) {
            format!("{} bytes, which are not whole blocks of {logical} bytes", self.size)
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Invalid, format!("cannot serve a device with {why}")))
    }
}

/// A range in one of a device's local files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileRange {
    /// The file's number, for [`BlockDevice::local_file`].
    pub file: u32,
    /// The bytes of the file.
    pub range: ByteRange,
}

/// The answer of [`BlockDevice::try_read`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Now {
    /// The buffer holds verified bytes.
    Served,
    /// The first bytes of the request, as many as the range has, lie in a local file. The caller
    /// reads them, asks [`BlockDevice::verify`], and then `try_read` for the rest.
    Local(FileRange),
    /// Something has to be fetched: call [`BlockDevice::read`]. The buffer's content is undefined.
    Absent,
}

/// The answer of [`BlockDevice::verify`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The bytes are those of the device.
    Good,
    /// They are not: call [`BlockDevice::try_read`] again, because their place may be stale. Where
    /// the same place comes again, call [`BlockDevice::read`], which checks it.
    AskAgain,
}

/// A block device that a frontend presents to the kernel.
pub trait BlockDevice: Send + Sync + 'static {
    /// The device's parameters for the kernel.
    fn shape(&self) -> Shape;

    /// Its name in events of the log: the mount's.
    fn name(&self) -> &str {
        ""
    }

    /// Reads local data. Never waits for I/O or allocates; the first read of a chunk may take a
    /// short lock.
    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now>;

    /// The file of this number, open for reading as long as the device lives; `None` if there is
    /// none. Devices that never answer [`Now::Local`] have none.
    fn local_file(&self, _file: u32) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Checks `bytes`, which were read at `from` for the device's `offset`. Never waits or
    /// allocates. If the file cannot be read, [`Self::read`] is called instead.
    fn verify(&self, _offset: u64, _bytes: &[u8], _from: FileRange) -> Verdict {
        Verdict::AskAgain
    }

    /// Reads from any source, within that source's deadline.
    fn read(&self, offset: u64, buf: &mut [u8]) -> impl Future<Output = Result<()>> + Send;

    /// Size in bytes.
    fn size(&self) -> u64 {
        self.shape().size
    }
}

/// Kind of a [`WritableDevice::erase`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Erase {
    /// The content is no longer needed: the range may read as any former content of its blocks, or
    /// as zeros. Doing nothing is allowed.
    Discard,
    /// The range reads as zeros from now on.
    Zeroes {
        /// True if its space may be freed.
        unmap: bool,
    },
}

/// A block device that can be written to.
///
/// A change that returned without an error is visible to every later read and survives the end of
/// our processes. It survives a crash of the machine as [`Shape::cache`] says. Concurrent changes
/// have no order. Each may be applied twice, because a successor repeats the requests of a server
/// that was killed; between the two, no other change of these blocks returns.
pub trait WritableDevice: BlockDevice {
    /// Writes `bytes` at `offset`; with `fua`, they are durable when this returns.
    fn write(
        &self,
        offset: u64,
        bytes: &[u8],
        fua: bool,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Erases a range. `UnsupportedFormat` if the device cannot: the kernel then writes zeros or
    /// does without discards.
    fn erase(&self, range: ByteRange, how: Erase) -> impl Future<Output = Result<()>> + Send;

    /// Makes every change durable that returned before this call.
    fn flush(&self) -> impl Future<Output = Result<()>> + Send;
}

#[cfg(test)]
mod tests {
    use super::Shape;

    #[test]
    fn a_shape_that_no_kernel_takes_is_invalid() {
        let good = Shape { optimal_io: 65_536, ..Shape::read_only(1 << 30) };
        good.check().unwrap();
        Shape { logical_block: 512, discard_granularity: 512, ..good }.check().unwrap();
        for bad in [
            Shape { size: 4097, ..good },
            Shape { logical_block: 256, ..good },
            Shape { logical_block: 8192, physical_block: 8192, ..good },
            Shape { logical_block: 1536, ..good },
            Shape { physical_block: 512, ..good },
            Shape { optimal_io: 0, ..good },
            Shape { discard_granularity: 100, ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
