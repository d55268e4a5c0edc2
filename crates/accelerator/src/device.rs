//! A cached device as the request engine serves it.
//!
//! The core's calls wait for disks. Each runs in a thread that the runtime gives up for it.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use burgeon_accelerate::Cached;
use burgeon_block::{
    BLOCK_SIZE, BlockDevice, ByteRange, Erase, FileRange, Now, Result, Shape, Verdict,
    WritableDevice, WriteCache,
};
use tokio::task::block_in_place;

use crate::disk::Disk;

/// Preferred length of requests, in bytes.
const OPTIMAL_IO: u32 = 64 << 10;

/// A slow device behind a cache, for a transport.
pub(crate) struct Served(pub(crate) Arc<Cached<Disk, Disk>>);

impl BlockDevice for Served {
    fn shape(&self) -> Shape {
        let slow = self.0.slow();
        Shape {
            size: slow.size(),
            logical_block: slow.logical_block(),
            physical_block: BLOCK_SIZE as u32,
            optimal_io: OPTIMAL_IO,
            discard_granularity: BLOCK_SIZE as u32,
            cache: WriteCache::Volatile,
        }
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        if (buf.len() as u64) < BLOCK_SIZE {
            return Ok(Now::Absent);
        }
        let place = self.0.place_of(offset);
        Ok(place.map_or(Now::Absent, |range| Now::Local(FileRange { file: 0, range })))
    }

    fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        (file == 0).then(|| self.0.store().file().as_fd())
    }

    fn verify(&self, offset: u64, bytes: &[u8], from: FileRange) -> Verdict {
        match self.0.is_block(offset, from.range, bytes) {
            true => Verdict::Good,
            false => Verdict::AskAgain,
        }
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        block_in_place(|| self.0.read(offset, buf))
    }
}

impl WritableDevice for Served {
    async fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> Result<()> {
        block_in_place(|| self.0.write(offset, bytes, fua))
    }

    async fn erase(&self, range: ByteRange, how: Erase) -> Result<()> {
        block_in_place(|| self.0.erase(range, how))
    }

    async fn flush(&self) -> Result<()> {
        block_in_place(|| self.0.flush())
    }
}
