use std::{ops::Deref, sync::Arc};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, BlockSource, ByteRange, Counters, Error, ErrorKind, LocalFile, Result,
    TryRead,
};

use crate::{Sabotage, Sound, Volume};

/// The lazy device of one mount: the shared volume at its lazy addresses, this mount's own
/// superblocks, and zeros everywhere else.
///
/// ```text
///   0 ···· 64 KiB ···· 64 MiB ···· 256 GiB ···· data.start ══════════ data.end ···· size
///          superblock  superblock  superblock   lazy data             zeros
/// ```
///
/// `C` is where this mount counts: an `Arc<Counters>`, or memory shared with another process.
/// What is fetched and what was wrong is counted here; hits, misses, failed reads and latencies
/// are for the frontend, which sees whole requests.
pub struct LazyDevice<S, F, C = Arc<Counters>, B = Sound> {
    volume: Arc<Volume<S, F, B>>,
    counters: C,
    size: u64,
    superblocks: Vec<(u64, Box<[u8; BLOCK_SIZE as usize]>)>,
}

/// What lies at an address of the device.
enum Part {
    Lazy,
    Superblock(usize),
    Zeros,
}

impl<S, F, C, B> LazyDevice<S, F, C, B>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    B: Sabotage,
    C: Deref<Target = Counters>,
{
    /// A device of `size` bytes with `superblocks` at their offsets. `Invalid` if the size does
    /// not hold the lazy data, or a superblock lies in it, beyond the end, or on no block border.
    pub fn new(
        volume: Arc<Volume<S, F, B>>,
        counters: C,
        size: u64,
        superblocks: Vec<(u64, Box<[u8; BLOCK_SIZE as usize]>)>,
    ) -> Result<Self> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let data = volume.map().data_range();
        if size < data.end() || !size.is_multiple_of(BLOCK_SIZE) {
            return invalid(format!("a device of {size} bytes cannot hold {data}"));
        }
        for (offset, _) in &superblocks {
            let fits = ByteRange::at(*offset, BLOCK_SIZE).is_some_and(|range| {
                range.end() <= size && range.intersect(data).is_none() && range.to_blocks() == range
            });
            if !fits {
                return invalid(format!("a superblock cannot lie at {offset}"));
            }
        }
        Ok(Self { volume, counters, size, superblocks })
    }

    /// The volume behind it.
    pub fn volume(&self) -> &Arc<Volume<S, F, B>> {
        &self.volume
    }

    /// What this mount has counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn check(&self, offset: u64, buf: &[u8]) -> Result<ByteRange> {
        ByteRange::at(offset, buf.len() as u64)
            .filter(|range| range.end() <= self.size && range.to_blocks() == *range)
            .ok_or_else(|| {
                let message = format!("{} bytes at {offset} are not of this device", buf.len());
                Error::new(ErrorKind::Invalid, message)
            })
    }

    /// What lies at `at`, and how far that goes within `range`.
    fn part(&self, at: u64, range: ByteRange) -> (Part, ByteRange) {
        let data = self.volume.map().data_range();
        let mut end = range.end();
        let mut kind = Part::Zeros;
        if data.contains(at) {
            (kind, end) = (Part::Lazy, end.min(data.end()));
        } else {
            for (index, (offset, _)) in self.superblocks.iter().enumerate() {
                if *offset == at {
                    (kind, end) = (Part::Superblock(index), at + BLOCK_SIZE);
                    break;
                }
                if *offset > at {
                    end = end.min(*offset);
                }
            }
            if data.start() > at {
                end = end.min(data.start());
            }
        }
        // `end > at` by construction, so this is never the fallback.
        (kind, ByteRange::new(at, end).unwrap_or(range))
    }

    /// Fills `out` with what needs no volume; `false` for lazy data.
    fn fill_local(&self, kind: &Part, out: &mut [u8]) -> bool {
        match kind {
            Part::Lazy => return false,
            Part::Superblock(index) => out.copy_from_slice(&self.superblocks[*index].1[..]),
            Part::Zeros => out.fill(0),
        }
        true
    }
}

impl<S, F, C, B> BlockDevice for LazyDevice<S, F, C, B>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    B: Sabotage,
    C: Deref<Target = Counters> + Send + Sync + 'static,
{
    fn size(&self) -> u64 {
        self.size
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<TryRead> {
        let range = self.check(offset, buf)?;
        let mut at = offset;
        while at < range.end() {
            let (kind, piece) = self.part(at, range);
            let out = &mut buf[(at - offset) as usize..][..piece.len() as usize];
            if !self.fill_local(&kind, out)
                && self.volume.try_read(piece, out, &self.counters)? == TryRead::Absent
            {
                return Ok(TryRead::Absent);
            }
            at = piece.end();
        }
        Ok(TryRead::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let range = self.check(offset, buf)?;
        let mut at = offset;
        while at < range.end() {
            let (kind, piece) = self.part(at, range);
            let out = &mut buf[(at - offset) as usize..][..piece.len() as usize];
            if !self.fill_local(&kind, out) {
                self.volume.read(piece, out, &self.counters).await?;
            }
            at = piece.end();
        }
        Ok(())
    }
}
