//! A device that is written to: a cache in one file, which the engine reads, and the truth in
//! another. Two blocks of three are answered from the cache, the third is a miss.
#![allow(dead_code)] // each test program uses a part

use std::{
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileExt,
    },
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, ByteRange, ChecksumKind, Erase, Error, FileRange, Now, Result, Shape,
    Verdict, WritableDevice, WriteCache,
};

const SUM: ChecksumKind = ChecksumKind::Crc32c;
const CACHE: u32 = 3;

pub(crate) struct Scratch {
    shape: Shape,
    cache: File,
    truth: File,
    /// Checksums of the cache's blocks.
    sums: Vec<AtomicU64>,
    /// Places of the cache that were read and good, and that were not.
    pub(crate) good: AtomicUsize,
    pub(crate) doubted: AtomicUsize,
    pub(crate) flushes: AtomicUsize,
    /// Changes since the last flush that are not durable.
    pub(crate) volatile: AtomicUsize,
}

impl Scratch {
    /// As long as `truth`, and the same content.
    pub(crate) fn new(truth: File) -> Self {
        let size = truth.metadata().unwrap().len();
        let cache = tempfile::tempfile().unwrap();
        let mut content = vec![0; size as usize];
        truth.read_exact_at(&mut content, 0).unwrap();
        cache.write_all_at(&content, 0).unwrap();
        let sums = content.chunks(BLOCK_SIZE as usize).map(|block| SUM.of(block).into()).collect();
        let shape = Shape {
            optimal_io: 64 << 10,
            discard_granularity: 4096,
            cache: WriteCache::Volatile,
            ..Shape::read_only(size)
        };
        let [good, doubted, flushes, volatile] = [const { AtomicUsize::new(0) }; 4];
        Self { shape, cache, truth, sums, good, doubted, flushes, volatile }
    }

    /// Spoils a block of the cache, as a failing disk does.
    pub(crate) fn spoil(&self, block: u64) {
        self.cache.write_all_at(&[0x5a; 100], block * BLOCK_SIZE + 7).unwrap();
    }

    fn change(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let io = |result: std::io::Result<()>| result.map_err(|e| Error::io("cannot write", e));
        io(self.truth.write_all_at(bytes, offset))?;
        io(self.cache.write_all_at(bytes, offset))?;
        for (block, bytes) in (offset / BLOCK_SIZE..).zip(bytes.chunks(BLOCK_SIZE as usize)) {
            self.sums[block as usize].store(SUM.of(bytes), SeqCst);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.truth.sync_data().map_err(|e| Error::io("cannot flush", e))
    }
}

impl BlockDevice for Scratch {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        let (first, count) = (offset / BLOCK_SIZE, buf.len() as u64 / BLOCK_SIZE);
        // Up to the next block that is a miss.
        let here = (2 - first % 3).min(count);
        let range = ByteRange::at(offset, here * BLOCK_SIZE).unwrap();
        let from = FileRange { file: CACHE, range };
        Ok(if here == 0 { Now::Absent } else { Now::Local(from) })
    }

    fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        (file == CACHE).then(|| self.cache.as_fd())
    }

    fn verify(&self, offset: u64, bytes: &[u8], from: FileRange) -> Verdict {
        assert_eq!((from.range.start(), from.range.len()), (offset, bytes.len() as u64));
        let blocks = (offset / BLOCK_SIZE..).zip(bytes.chunks(BLOCK_SIZE as usize));
        let mut sums = blocks.map(|(n, block)| SUM.of(block) == self.sums[n as usize].load(SeqCst));
        if sums.all(|good| good) {
            self.good.fetch_add(1, SeqCst);
            return Verdict::Good;
        }
        self.doubted.fetch_add(1, SeqCst);
        Verdict::AskAgain
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.truth.read_exact_at(buf, offset).map_err(|e| Error::io("cannot read", e))
    }
}

impl WritableDevice for Scratch {
    async fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> Result<()> {
        self.change(offset, bytes)?;
        if fua {
            return self.sync();
        }
        self.volatile.fetch_add(1, SeqCst);
        Ok(())
    }

    async fn erase(&self, range: ByteRange, _how: Erase) -> Result<()> {
        self.volatile.fetch_add(1, SeqCst);
        self.change(range.start(), &vec![0; range.len() as usize])
    }

    async fn flush(&self) -> Result<()> {
        self.volatile.store(0, SeqCst);
        self.flushes.fetch_add(1, SeqCst);
        self.sync()
    }
}
