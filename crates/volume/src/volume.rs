//! The volume of one image: answers reads of its lazy address space, for all its mounts.

use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Counters, LocalFile, Now, ObjectId, ObjectKind, Result,
};
use burgeon_image::{AddressMap, Codec};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use crate::{
    CacheState, Limits,
    ahead::Way,
    brought::{Brought, BroughtBytes},
    cache::CacheFile,
    fetch::beyond,
    flights::{Background, FlightTable, Seats, Waiter},
    outage::Outage,
    pool::Pool,
    seats::{Seat, SeatPool},
};

/// The lazy data of one image: a map, a source of bytes and a cache file.
///
/// Mounts of one image share one volume; each brings its own [`Counters`] to every read. What no
/// reader asked for (fill, prefetch, flights all of whose readers went away) is counted in
/// [`Volume::background`]. Here is counted what is fetched and what was wrong; hits, misses,
/// failed reads and latencies are counted by the frontend, which sees whole requests.
pub struct Volume<S, F> {
    pub(crate) map: Arc<AddressMap>,
    pub(crate) source: S,
    pub(crate) cache: CacheFile<F>,
    pub(crate) limits: Limits,
    pub(crate) cpu: Pool,
    pub(crate) writers: Pool,
    pub(crate) flights: FlightTable,
    pub(crate) seats: SeatPool,
    pub(crate) background_seats: SeatPool,
    pub(crate) fill_turn: tokio::sync::Mutex<()>,
    pub(crate) background: Arc<Counters>,
    pub(crate) readers: Readers,
    pub(crate) retrying: Outage,
    /// What profiles have brought; made with the first of them.
    pub(crate) brought: OnceLock<Brought>,
    /// What was read ahead; made with the first of it.
    pub(crate) ahead: OnceLock<Brought>,
    pub(crate) way: Way,
    /// By object: read straight through, never cached.
    through: Box<[bool]>,
    any_through: bool,
}

/// A look at a volume's health, for `status`.
#[derive(Clone, Debug)]
pub struct Status {
    /// Bytes in the cache, as far as is known; each is still verified when read.
    pub materialised_bytes: u64,
    /// Whether fetched chunks are kept.
    pub cache: CacheState,
    /// Reads of the cache file that failed; they became misses.
    pub cache_read_errors: u64,
    /// Writes of the cache file that failed.
    pub cache_write_errors: u64,
    /// Chunks that were served and not kept.
    pub uncached_chunks: u64,
    /// Chunks being fetched, or written to the cache, now.
    pub flights: usize,
    /// Reads that wait for a chunk now.
    pub waiting_readers: usize,
    /// What the source answered last when it did not give good bytes.
    pub last_source_error: Option<String>,
    /// What was read ahead.
    pub ahead: BroughtBytes,
}

/// Reads that wait now, so that background work can stand back.
#[derive(Default)]
pub(crate) struct Readers {
    waiting: AtomicUsize,
    pub(crate) gone: Notify,
    /// Chunks that readers fetch by themselves.
    fetching: AtomicUsize,
}

impl Readers {
    fn arrive(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// A chunk is fetched because a reader wants it.
    pub(crate) fn fetch(&self) -> Fetching<'_> {
        self.fetching.fetch_add(1, Ordering::Relaxed);
        Fetching(self)
    }

    pub(crate) fn fetching(&self) -> usize {
        self.fetching.load(Ordering::Relaxed)
    }
}

/// One fetch of a reader's own.
pub(crate) struct Fetching<'a>(&'a Readers);

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.0.fetching.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One waiting reader; dropped also when the read is cancelled.
struct Waiting<'a>(&'a Readers);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.gone.notify_waiters();
        }
    }
}

/// Where a piece of a read comes from.
pub(crate) enum Boarding {
    /// From the cache, as it looks.
    Local,
    /// From a flight.
    Flight(Waiter),
    /// There is no seat now.
    Full,
}

/// Objects outside the store, which are local already or cost nothing to make anew.
fn is_through(object: &ObjectId) -> bool {
    matches!(object.kind(), Some(ObjectKind::File | ObjectKind::Computed))
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// A volume over `cache`, a file of at least `map.data_range().len()` bytes, which may be new,
    /// left by a crash, or hold anything at all.
    pub fn new(map: Arc<AddressMap>, source: S, cache: F, limits: Limits) -> Arc<Self> {
        Self::over(map, source, (cache, None), limits)
    }

    /// The same of an image that nobody has read ([`AddressMap::is_unsummed`]): what its blocks are is
    /// written to `checksums`, [`crate::SEEN_LEN`] bytes each, as they come. Without it nothing of such an image is
    /// cached.
    pub fn unsummed(
        map: Arc<AddressMap>,
        source: S,
        cache: F,
        checksums: F,
        limits: Limits,
    ) -> Arc<Self> {
        Self::over(map, source, (cache, Some(checksums)), limits)
    }

    fn over(
        map: Arc<AddressMap>,
        source: S,
        (cache, checksums): (F, Option<F>),
        limits: Limits,
    ) -> Arc<Self> {
        let through: Box<[bool]> = map.objects().iter().map(is_through).collect();
        Arc::new(Self {
            cache: CacheFile::open(cache, checksums, &map, &limits),
            any_through: through.contains(&true),
            through,
            cpu: Pool::new(limits.cpu_threads),
            writers: Pool::new(limits.write_threads),
            flights: FlightTable::default(),
            seats: SeatPool::new(limits.flights_max, limits.room.flights.clone()),
            background_seats: SeatPool::new(
                limits.background_flights,
                limits.room.background.clone(),
            ),
            fill_turn: tokio::sync::Mutex::default(),
            background: Arc::default(),
            readers: Readers::default(),
            retrying: Outage::new(&limits),
            brought: OnceLock::new(),
            ahead: OnceLock::new(),
            way: Way::default(),
            map,
            source,
            limits,
        })
    }

    /// The map this volume answers by.
    pub fn map(&self) -> &Arc<AddressMap> {
        &self.map
    }

    /// Where it fetches from.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// What was done for no reader in particular.
    pub fn background(&self) -> &Counters {
        &self.background
    }

    /// Bytes of lazy data in the cache. Each block is still verified when it is read.
    pub fn materialised_bytes(&self) -> u64 {
        self.cache.present_bytes()
    }

    /// How the volume is.
    pub fn status(&self) -> Status {
        Status {
            materialised_bytes: self.materialised_bytes(),
            cache: self.cache.state(),
            cache_read_errors: self.cache.read_errors.get(),
            cache_write_errors: self.cache.write_errors.get(),
            uncached_chunks: self.cache.uncached_chunks.get(),
            flights: self.flights.len(),
            waiting_readers: self.readers.waiting(),
            last_source_error: self.retrying.last(),
            ahead: self.ahead(),
        }
    }

    /// Makes the cache durable. Nothing depends on it: what is lost is fetched again.
    pub fn sync(&self) -> Result<()> {
        self.cache.sync()
    }

    /// Answers from what is local: verified bytes, or [`Now::Absent`]. No allocation, no wait
    /// but for the cache file. `range` is whole blocks of [`AddressMap::data_range`], `buf` as
    /// long as it and aligned to 4 KiB; anything else is `Invalid`.
    pub fn try_read(&self, range: ByteRange, buf: &mut [u8], counters: &Counters) -> Result<Now> {
        self.check(range, buf)?;
        if self.cache.read(&self.map, range, buf, counters)
            || (self.any_through && self.try_through(range, buf))
        {
            self.was_read(range);
            return Ok(Now::Served);
        }
        Ok(Now::Absent)
    }

    /// Answers from wherever the bytes are. Waits at most `limits.deadline` for an answer of the source, a
    /// seat included when `limits.flights_max` chunks are under way. `Corrupt` when the source
    /// insists on wrong bytes, `Unavailable` when it gave none. May be dropped at any await.
    pub async fn read(
        self: &Arc<Self>,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        self.check(range, buf)?;
        let _waiting = self.readers.arrive();
        self.read_pieces(range, buf, counters).await?;
        self.was_read(range);
        Ok(())
    }

    fn was_read(&self, range: ByteRange) {
        for brought in [&self.brought, &self.ahead] {
            if let Some(brought) = brought.get() {
                brought.read(range);
            }
        }
    }

    /// Bytes that profiles have brought, if there was one since the volume was opened.
    pub fn brought(&self) -> Option<BroughtBytes> {
        self.brought.get().map(Brought::bytes)
    }

    /// Bytes that were read ahead since the volume was opened.
    pub(crate) fn ahead(&self) -> BroughtBytes {
        self.ahead.get().map(Brought::bytes).unwrap_or_default()
    }

    /// Starts to fetch the chunks of `range` that are not here, as far as there are seats for
    /// background work, and returns how many it started. A hint: what does not fit is dropped.
    pub fn prefetch(self: &Arc<Self>, range: ByteRange) -> usize {
        let mut started = 0;
        let mut next = range.start();
        while next < range.end() {
            let Some(index) = self.map.chunk_at(next) else { break };
            let chunk = self.map.chunk(index).range;
            next = chunk.end();
            if self.is_through(index) || self.cache.has(chunk) {
                continue;
            }
            let Some(seat) = self.background_seats.try_take() else { break };
            let background = Background { _seat: seat, payer: None };
            let deadline = self.retrying.deadline(Instant::now());
            match self.board_now(index, chunk, &mut None, &mut Some(background), deadline) {
                Ok(Boarding::Flight(_)) => started += 1,
                Ok(Boarding::Local) | Err(_) => {}
                Ok(Boarding::Full) => break,
            }
        }
        started
    }

    fn check(&self, range: ByteRange, buf: &[u8]) -> Result<()> {
        let whole = range.start().is_multiple_of(BLOCK_SIZE)
            && range.end().is_multiple_of(BLOCK_SIZE)
            && range.len() == buf.len() as u64;
        if whole && self.map.data_range().covers(range) { Ok(()) } else { Err(beyond(range)) }
    }

    pub(crate) fn is_through(&self, index: u32) -> bool {
        // What is stored compressed cannot be read in part.
        let chunk = self.map.chunk(index);
        self.any_through && chunk.codec == Codec::Raw && self.through[chunk.object as usize]
    }

    /// The part of `range` from `at` on that lies in one chunk.
    fn piece(&self, at: u64, range: ByteRange) -> Result<(u32, ByteRange)> {
        let rest = ByteRange::new(at, range.end()).ok_or_else(|| beyond(range))?;
        let index = self.map.chunk_at(at).ok_or_else(|| beyond(rest))?;
        let piece = self.map.chunk(index).range.intersect(rest).ok_or_else(|| beyond(rest))?;
        Ok((index, piece))
    }

    fn try_through(&self, range: ByteRange, buf: &mut [u8]) -> bool {
        let mut at = range.start();
        while at < range.end() {
            let Ok((index, piece)) = self.piece(at, range) else { return false };
            let out = part(buf, range, piece);
            if !self.is_through(index) || !self.read_through_now(index, piece, out) {
                return false;
            }
            at = piece.end();
        }
        true
    }

    /// Keeps up to `flights_per_read` chunks under way and copies them out in order. It waits for
    /// a seat only while it holds none, so readers cannot starve each other.
    async fn read_pieces(
        self: &Arc<Self>,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        let mut flying: VecDeque<(u32, ByteRange, Waiter)> = VecDeque::new();
        let arrived = Instant::now();
        let mut at = range.start();
        while at < range.end() || !flying.is_empty() {
            let mut full = flying.len() >= self.limits.flights_per_read.max(1);
            if at < range.end() && !full {
                let (index, piece) = self.piece(at, range)?;
                let out = part(buf, range, piece);
                if self.is_through(index) {
                    if !self.read_through_now(index, piece, out) {
                        self.read_through(index, piece, out, arrived, counters).await?;
                    }
                    at = piece.end();
                    continue;
                }
                if self.cache.read(&self.map, piece, out, counters) {
                    at = piece.end();
                    continue;
                }
                match self.board(index, piece, flying.is_empty(), arrived).await? {
                    Boarding::Local => continue,
                    Boarding::Flight(waiter) => {
                        flying.push_back((index, piece, waiter));
                        at = piece.end();
                    }
                    Boarding::Full => full = true,
                }
            }
            if !full && at < range.end() {
                continue;
            }
            if let Some((index, piece, mut waiter)) = flying.pop_front() {
                let landed = waiter.landed().await?;
                landed.claim(counters);
                let chunk = self.map.chunk(index).range;
                let skip = (piece.start() - chunk.start()) as usize;
                let bytes = &landed.bytes()?[skip..][..piece.len() as usize];
                part(buf, range, piece).copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    /// Joins or starts the flight of a chunk of which `piece` is wanted, for a reader that came at
    /// `arrived`. Without `patient` it is [`Boarding::Full`] when there is no seat.
    async fn board(
        self: &Arc<Self>,
        index: u32,
        piece: ByteRange,
        patient: bool,
        arrived: Instant,
    ) -> Result<Boarding> {
        let mut seat = None;
        loop {
            let deadline = self.retrying.deadline(arrived);
            match self.board_now(index, piece, &mut seat, &mut None, deadline)? {
                Boarding::Full if patient => {}
                boarding => return Ok(boarding),
            }
            seat = match timeout_at(deadline, self.seats.take()).await {
                Ok(seat) => seat,
                // Others have got good bytes meanwhile.
                Err(_) if self.retrying.deadline(arrived) > deadline => continue,
                Err(_) => return Err(self.retrying.no_room()),
            };
        }
    }

    /// The same for background work, which waits for a seat without end.
    pub(crate) async fn board_for_fill(
        self: &Arc<Self>,
        index: u32,
        piece: ByteRange,
        background: Option<Background>,
    ) -> Result<Boarding> {
        let (mut seat, mut background) = (None, background);
        loop {
            let deadline = self.retrying.deadline(Instant::now());
            match self.board_now(index, piece, &mut seat, &mut background, deadline)? {
                Boarding::Full => seat = self.seats.take().await,
                boarding => return Ok(boarding),
            }
        }
    }

    fn board_now(
        self: &Arc<Self>,
        index: u32,
        piece: ByteRange,
        seat: &mut Option<Seat>,
        background: &mut Option<Background>,
        deadline: Instant,
    ) -> Result<Boarding> {
        let (flight, waiter, seats) = {
            let mut table = self.flights.lock();
            if let Some(waiter) = table.join(index.into()) {
                return Ok(Boarding::Flight(waiter));
            }
            if self.cache.has(piece) {
                return Ok(Boarding::Local);
            }
            if background.is_none() {
                self.retrying.check(index.into())?;
            }
            let Some(seat) = seat.take().or_else(|| self.seats.try_take()) else {
                return Ok(Boarding::Full);
            };
            let (flight, waiter) = table.insert(index.into());
            (flight, waiter, Seats { _flight: seat, background: background.take() })
        };
        tokio::spawn(Arc::clone(self).fly(index, flight, seats, deadline));
        Ok(Boarding::Flight(waiter))
    }
}

/// The part of `buf`, which holds `range`, that holds `piece`.
pub(crate) fn part(buf: &mut [u8], range: ByteRange, piece: ByteRange) -> &mut [u8] {
    let skip = (piece.start() - range.start()) as usize;
    &mut buf[skip..][..piece.len() as usize]
}
