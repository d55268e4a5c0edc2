use std::{ops::Deref, os::fd::BorrowedFd, sync::Arc, time::Instant};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, BlockSource, ByteRange, Counter, Counters, Error, ErrorKind,
    FileRange, LocalFile, Now, Result, Shape, Verdict,
};
use burgeon_image::extents::FileLog;

use crate::{
    Budget, Fill, ProfilePrefetch, Recording, VirtualArea, Volume,
    budget::spent,
    read_log::ReadLog,
    waits::{Wait, WaitRecord, Waits},
};

/// The lazy device of one mount: the shared volume at its lazy addresses, the mount's virtual area
/// if it has one, this mount's own superblocks, and zeros everywhere else.
///
/// ```text
///   0 ···· 64 KiB ···· 64 MiB ···· 256 GiB ···· data.start ══════════ data.end ···· area ═══════ ···· size
///          superblock  superblock  superblock   lazy data             zeros         mapped content
/// ```
///
/// A mount may have a fetch limit: beyond it only local bytes are served. The limit is checked
/// before a fetch, so fetches in flight come on top: at most [`crate::FETCHES_MAX`] chunks, one
/// request of a profile and one of each reader.
///
/// `C` holds this mount's counters: an `Arc<Counters>`, or memory shared with another process.
/// The device counts fetches and wrong bytes; the frontend, which sees whole requests, counts
/// hits, misses, failed reads and latencies.
pub struct LazyDevice<S, F, C = Arc<Counters>> {
    volume: Arc<Volume<S, F>>,
    counters: C,
    /// In events of the log.
    name: String,
    size: u64,
    superblocks: Vec<(u64, Box<[u8; BLOCK_SIZE as usize]>)>,
    area: Option<Area<S, F>>,
    budget: Arc<Budget>,
    over_limit_reads: Counter,
    log: ReadLog,
    waits: Waits,
}

/// A virtual area and where it lies.
struct Area<S, F> {
    range: ByteRange,
    area: Arc<VirtualArea<S, F, FileLog>>,
}

/// The kind of content at an address of the device.
enum Region {
    Lazy,
    Virtual,
    Superblock(usize),
    Zeros,
}

impl<S, F, C> LazyDevice<S, F, C>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    C: Deref<Target = Counters> + Clone + Send + Sync + 'static,
{
    /// A device of `size` bytes with `superblocks` at their offsets. `Invalid` if the size does
    /// not hold the lazy data, or a superblock lies in it, beyond the end, or on no block border.
    pub fn new(
        volume: Arc<Volume<S, F>>,
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
        Ok(Self {
            volume,
            budget: Budget::new(counters.clone(), u64::MAX),
            counters,
            name: String::new(),
            size,
            superblocks,
            area: None,
            over_limit_reads: Counter::default(),
            log: ReadLog::default(),
            waits: Waits::default(),
        })
    }

    /// The same with a name for events of the log: the mount's.
    pub fn named(mut self, name: String) -> Self {
        self.name = name;
        self
    }

    /// The same with `area` from `start` on. `Invalid` if it does not fit there.
    pub fn with_area(mut self, start: u64, area: Arc<VirtualArea<S, F, FileLog>>) -> Result<Self> {
        let data = self.volume.map().data_range();
        let free = |range: &ByteRange| {
            range.end() <= self.size
                && range.to_blocks() == *range
                && range.intersect(data).is_none()
                && self.superblocks.iter().all(|(offset, _)| !range.contains(*offset))
        };
        let Some(range) = ByteRange::at(start, area.size()).filter(free) else {
            let message = format!("a virtual area of {} bytes cannot lie at {start}", area.size());
            return Err(Error::new(ErrorKind::Invalid, message));
        };
        self.area = Some(Area { range, area });
        Ok(self)
    }

    /// The same with a limit to the bytes that this mount fetches, for readers and in the
    /// background, as the sources send them, over all its life ([`Counters::fetched_bytes`] and
    /// [`Counters::background_bytes`]).
    pub fn with_fetch_limit(mut self, bytes: u64) -> Self {
        self.budget = Budget::new(self.counters.clone(), bytes);
        self
    }

    /// Reads that were refused because of the fetch limit.
    pub fn over_limit_reads(&self) -> u64 {
        self.over_limit_reads.get()
    }

    /// The virtual area.
    pub fn area(&self) -> Option<&Arc<VirtualArea<S, F, FileLog>>> {
        self.area.as_ref().map(|area| &area.area)
    }

    fn may_fetch(&self) -> bool {
        spent(&self.counters) < self.budget.limit()
    }

    fn over_limit(&self) -> Error {
        self.over_limit_reads.add(1);
        let message = format!(
            "this mount has fetched {} bytes, and its limit is {}: mount it with a higher --fetch-limit",
            self.budget.spent(),
            self.budget.limit()
        );
        Error::new(ErrorKind::OverLimit, message)
    }

    /// Begins to record which lazy data is read, in order of first use.
    pub fn start_recording(&self) {
        self.log.start();
    }

    /// Ends recording.
    pub fn finish_recording(&self) -> Recording {
        self.log.finish()
    }

    /// The last reads that had to wait, after number `after`, the oldest first.
    pub fn waits(&self, after: u64) -> Vec<Wait> {
        self.waits.after(after)
    }

    /// The name of the object with the data at an address; `None` if it is no lazy data.
    pub fn object_at(&self, address: u64) -> Option<String> {
        let map = self.volume.map();
        let index = map.chunk_at(address)?;
        Some(map.object(map.chunk(index).object).shown())
    }

    /// Starts to fetch all of the image, as far as the limit goes. Must be called within a
    /// runtime.
    pub fn fill(&self) -> Fill {
        self.volume.fill_for(Arc::clone(&self.budget))
    }

    /// Starts to fetch the ranges of a profile, likewise: [`Volume::prefetch_profile`].
    pub fn prefetch_profile(&self, ranges: impl Iterator<Item = ByteRange>) -> ProfilePrefetch {
        self.volume.prefetch_profile(ranges, Some(Arc::clone(&self.budget)))
    }

    /// Starts to fetch the cacheable content at `ranges` of the device: a fill for each image
    /// that has some of it. Computed bytes and local files need none. Must be called within a
    /// runtime.
    pub async fn fill_ranges(&self, ranges: &[ByteRange]) -> Result<Vec<Fill>> {
        let mut parts = Vec::<(Arc<_>, Vec<ByteRange>)>::new();
        let mut add = |volume: Arc<Volume<S, F>>, range| match parts
            .iter_mut()
            .find(|(known, _)| Arc::ptr_eq(known, &volume))
        {
            Some((_, ranges)) => ranges.push(range),
            None => parts.push((volume, vec![range])),
        };
        for range in ranges {
            let mut at = range.start();
            while at < range.end().min(self.size) {
                let (kind, piece) = self.region(at, *range);
                if let Region::Lazy = kind {
                    add(Arc::clone(&self.volume), piece);
                } else if let (Region::Virtual, Some(area)) = (kind, &self.area) {
                    let found = area.area.of_images(area.offsets(piece)).await?;
                    found.into_iter().for_each(|(volume, range)| add(volume, range));
                }
                at = piece.end();
            }
        }
        let fill = |(volume, ranges): &(Arc<Volume<S, F>>, Vec<_>)| {
            volume.fill_ranges(ranges, Arc::clone(&self.budget))
        };
        Ok(parts.iter().map(fill).collect())
    }

    /// The volume behind it.
    pub fn volume(&self) -> &Arc<Volume<S, F>> {
        &self.volume
    }

    /// This mount's counters.
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

    /// The kind of content at `at`, and the part of `range` that it fills.
    fn region(&self, at: u64, range: ByteRange) -> (Region, ByteRange) {
        let data = self.volume.map().data_range();
        let mut end = range.end();
        let mut kind = Region::Zeros;
        let area = self.area.as_ref().map(|area| area.range);
        if data.contains(at) {
            (kind, end) = (Region::Lazy, end.min(data.end()));
        } else if let Some(area) = area.filter(|area| area.contains(at)) {
            (kind, end) = (Region::Virtual, end.min(area.end()));
        } else {
            for (index, (offset, _)) in self.superblocks.iter().enumerate() {
                if *offset == at {
                    (kind, end) = (Region::Superblock(index), at + BLOCK_SIZE);
                    break;
                }
                if *offset > at {
                    end = end.min(*offset);
                }
            }
            for start in [Some(data), area].into_iter().flatten().map(ByteRange::start) {
                if start > at {
                    end = end.min(start);
                }
            }
        }
        // `end > at` by construction, so this is never the fallback.
        (kind, ByteRange::new(at, end).unwrap_or(range))
    }

    /// Fills `out`, which holds `piece`, from local bytes. The lazy data's place on a disk is an
    /// answer unless it `may_wait` for it.
    #[inline]
    fn fill_now(
        &self,
        kind: &Region,
        piece: ByteRange,
        out: &mut [u8],
        may_wait: bool,
    ) -> Result<Now> {
        Ok(match (kind, &self.area) {
            (Region::Lazy, _) => {
                self.log.note(piece);
                match may_wait {
                    false => self.volume.try_read(piece, out)?,
                    true if self.volume.read_local(piece, out)? => Now::Served,
                    true => Now::Absent,
                }
            }
            (Region::Virtual, Some(area)) => {
                let piece = area.offsets(piece);
                area.area.try_read(piece, out, &self.counters, self.may_fetch())?
            }
            (Region::Superblock(index), _) => {
                out.copy_from_slice(&self.superblocks[*index].1[..]);
                Now::Served
            }
            (Region::Zeros | Region::Virtual, _) => {
                out.fill(0);
                Now::Served
            }
        })
    }
}

impl<S, F> Area<S, F> {
    /// Range of `piece` of the device in the area.
    fn offsets(&self, piece: ByteRange) -> ByteRange {
        let start = piece.start() - self.range.start();
        // It lies inside, so its end does not overflow.
        ByteRange::at(start, piece.len()).unwrap_or(piece)
    }
}

impl<S, F, C> BlockDevice for LazyDevice<S, F, C>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    C: Deref<Target = Counters> + Clone + Send + Sync + 'static,
{
    fn shape(&self) -> Shape {
        Shape::read_only(self.size)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        let range = self.check(offset, buf)?;
        let mut at = offset;
        while at < range.end() {
            let (kind, piece) = self.region(at, range);
            let out = &mut buf[(at - offset) as usize..][..piece.len() as usize];
            // Only the request's first bytes may be answered by their place.
            match self.fill_now(&kind, piece, out, at > offset)? {
                Now::Served => at = piece.end(),
                answer => return Ok(answer),
            }
        }
        Ok(Now::Served)
    }

    fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        self.volume.local_file(file)
    }

    fn verify(&self, offset: u64, bytes: &[u8], _: FileRange) -> Verdict {
        let range = self.check(offset, bytes);
        range.map_or(Verdict::AskAgain, |range| self.volume.verify(range, bytes))
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let range = self.check(offset, buf)?;
        let (begun, record) = (Instant::now(), WaitRecord::default());
        let result = self.read_parts(range, buf, &record).await;
        self.waits.note(range, begun.elapsed(), &record, &result);
        result
    }
}

impl<S, F, C> LazyDevice<S, F, C>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    C: Deref<Target = Counters> + Clone + Send + Sync + 'static,
{
    async fn read_parts(
        &self,
        range: ByteRange,
        buf: &mut [u8],
        record: &WaitRecord,
    ) -> Result<()> {
        let (mut at, offset) = (range.start(), range.start());
        while at < range.end() {
            let (kind, piece) = self.region(at, range);
            let out = &mut buf[(at - offset) as usize..][..piece.len() as usize];
            if !self.may_fetch() {
                if self.fill_now(&kind, piece, out, true)? != Now::Served {
                    return Err(self.over_limit());
                }
            } else if let (Region::Virtual, Some(area)) = (&kind, &self.area) {
                area.area.read(area.offsets(piece), out, &self.counters).await?;
            } else if matches!(kind, Region::Lazy) {
                self.volume.read_and_tell(piece, out, &self.counters, record).await?;
            } else {
                self.fill_now(&kind, piece, out, true)?;
            }
            at = piece.end();
        }
        Ok(())
    }
}
