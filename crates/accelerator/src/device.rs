//! A cached device as the request engine serves it.
//!
//! The core's calls wait for disks. Each runs in a thread that the runtime gives up for it.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Instant,
};

use burgeon_accelerate::CachedDevice;
use burgeon_block::{
    BLOCK_SIZE, BlockDevice, ByteRange, Erase, FileRange, Now, Result, Shape, Verdict,
    WritableDevice,
};
use tokio::task::block_in_place;

use crate::{disk::Disk, limits::shape_of, shared::SharedCells, times::Kind};

/// A slow device behind a cache, for a transport.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) cached: Arc<CachedDevice<Disk, Disk>>,
    pub(crate) cells: Arc<SharedCells>,
}

impl Served {
    /// Runs a change in a thread of its own, and notes how long it took.
    fn timed(&self, kind: Kind, change: impl FnOnce() -> Result<()>) -> Result<()> {
        let begun = Instant::now();
        let done = block_in_place(change);
        self.cells.times().ended(kind, begun);
        done
    }
}

impl BlockDevice for Served {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> Shape {
        shape_of(self.cached.slow())
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        if (buf.len() as u64) < BLOCK_SIZE {
            return Ok(Now::Absent);
        }
        let place = self.cached.place_of(offset);
        Ok(place.map_or(Now::Absent, |range| Now::Local(FileRange { file: 0, range })))
    }

    fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        (file == 0).then(|| self.cached.store().file().as_fd())
    }

    fn verify(&self, offset: u64, bytes: &[u8], from: FileRange) -> Verdict {
        match self.cached.is_block(offset, from.range, bytes) {
            true => Verdict::Good,
            false => Verdict::AskAgain,
        }
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let (begun, times) = (Instant::now(), self.cells.times());
        times.of(Kind::ReadSize).record(buf.len() as u64);
        let tier = block_in_place(|| self.cached.read(offset, buf))?;
        times.ended(Kind::of_read(tier), begun);
        Ok(())
    }
}

impl WritableDevice for Served {
    async fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> Result<()> {
        self.cells.times().of(Kind::WriteSize).record(bytes.len() as u64);
        let kind = if fua { Kind::Flush } else { Kind::Write };
        self.timed(kind, || self.cached.write(offset, bytes, fua))
    }

    async fn erase(&self, range: ByteRange, how: Erase) -> Result<()> {
        self.timed(Kind::Write, || self.cached.erase(range, how))
    }

    async fn flush(&self) -> Result<()> {
        self.timed(Kind::Flush, || self.cached.flush())
    }
}
