//! One life of the machine: a volume from its start to its end, and the checks on it.

use std::{sync::Arc, time::Duration};

use burgeon_block::{BLOCK_SIZE, ByteRange, Counter, Counters, Now};
use burgeon_cache::{Amount, Cache, CacheSettings, Domain, policy::Forecast};
use burgeon_volume::{
    CacheAccess, Fill, FillState, ProfilePrefetch, ProfileState, Volume, VolumeLimits,
};
use testkit::Rng;
use tokio::{
    runtime::Runtime,
    task::JoinHandle,
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{Disk, FaultySource, Model, Mood, SimFile, disk::Faults, model::range};

pub(crate) type SimVolume = Volume<FaultySource, SimFile>;

/// No read takes longer: a dozen readers, one permit, 30 seconds each, and some more.
pub(crate) const READ_TIME_MAX: Duration = Duration::from_secs(3600);

/// Longest checkpoint-free journal of some lives, in bytes.
const JOURNAL_LEN: u64 = 4096;

/// Blocks of the longest read.
const READ_BLOCKS_MAX: u64 = 96;

/// The runtime of one life, whose clock goes on when everybody waits. Tasks that still run at its
/// end are ended with it.
pub(crate) fn runtime() -> Result<Runtime, String> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build();
    runtime.map_err(|error| format!("no runtime: {error}"))
}

/// Waits until nothing is fetched.
pub(crate) async fn idle(volume: &SimVolume) -> Result<(), String> {
    let until = Instant::now() + READ_TIME_MAX;
    while volume.status().in_flight > 0 {
        if timeout_at(until, sleep(Duration::from_millis(10))).await.is_err() {
            return Err("a fetch never ends".into());
        }
    }
    // A task leaves the table just before it ends, and its account is closed by its end.
    sleep(Duration::from_millis(1)).await;
    Ok(())
}

/// Some blocks of an image.
pub(crate) fn some_range(model: &Model, rng: &mut Rng) -> ByteRange {
    let all = model.range();
    let blocks = all.len() / BLOCK_SIZE;
    let first = rng.below(blocks);
    let len = 1 + rng.below(READ_BLOCKS_MAX.min(blocks - first));
    // Most reads are small.
    let len = if rng.below(3) > 0 { len.min(1 + rng.below(4)) } else { len };
    range(all.start() + first * BLOCK_SIZE, len * BLOCK_SIZE)
}

/// A running machine.
pub(crate) struct World {
    model: Arc<Model>,
    pub(crate) disk: Disk,
    pub(crate) source: FaultySource,
    volume: Arc<SimVolume>,
    cache: Arc<Cache>,
    counters: Arc<Counters>,
    limits: VolumeLimits,
    readers: Readers,
    fill: Option<Fill>,
    profile: Option<ProfilePrefetch>,
    bad_at_start: u64,
}

impl World {
    /// Starts the machine: `model`'s image over the content of `disk`.
    pub(crate) fn boot(
        model: &Arc<Model>,
        disk: &Disk,
        limits: &VolumeLimits,
        rng: &mut Rng,
    ) -> Self {
        let source = FaultySource::new(rng.bits(), model);
        let map = Arc::clone(&model.map);
        // The policy of the host's cache; a turn of it is a few of the image's chunks.
        let policy = Box::new(Forecast::new(1 << 20, rng.bits()));
        let cache = Arc::new(Cache::over(Arc::new(disk.clone()), settings(rng), policy));
        let domain = Domain::PUBLIC;
        let access = CacheAccess { store: Arc::clone(&cache) as _, domain };
        let (source_of_volume, limits) = (source.clone(), limits.clone());
        let volume = match model.verified {
            false => Volume::new(map, source_of_volume, access, limits.clone()),
            true => {
                let (file, limits) = (disk.checksums(), limits.clone());
                Volume::without_checksums(map, source_of_volume, access, file, limits)
            }
        };
        Self {
            // A power failure may have taken the bytes of any chunk, and not its record.
            bad_at_start: match disk.has_lost_power() {
                true => cache.report().used / BLOCK_SIZE,
                false => 0,
            },
            cache,
            model: Arc::clone(model),
            disk: disk.clone(),
            source,
            volume,
            counters: Arc::default(),
            limits,
            readers: Readers::default(),
            fill: None,
            profile: None,
        }
    }

    /// Some blocks of the image.
    pub(crate) fn some_range(&self, rng: &mut Rng) -> ByteRange {
        some_range(&self.model, rng)
    }

    /// Starts a read that is given up after `patience`.
    pub(crate) fn read(&mut self, range: ByteRange, patience: Option<Duration>) {
        let reader = Reader {
            model: Arc::clone(&self.model),
            disk: self.disk.clone(),
            source: self.source.clone(),
            volume: Arc::clone(&self.volume),
            counters: Arc::clone(&self.counters),
        };
        self.readers.start(reader, range, patience);
    }

    /// The cache's thread takes its turn.
    pub(crate) fn upkeep(&self) {
        self.cache.upkeep();
    }

    /// Evicts some chunks.
    pub(crate) fn evict(&self, bytes: u64) {
        self.cache.evict(bytes);
    }

    pub(crate) fn prefetch(&self, range: ByteRange) {
        self.volume.prefetch(range);
    }

    pub(crate) fn start_fill(&mut self) {
        self.fill = Some(self.volume.fill());
    }

    pub(crate) fn stop_fill(&mut self) {
        self.fill = None;
    }

    /// Starts to prefetch a profile of `ranges`, instead of another one.
    pub(crate) fn start_profile(&mut self, ranges: Vec<ByteRange>) {
        self.profile = Some(self.volume.prefetch_profile(ranges.into_iter(), None));
    }

    pub(crate) fn stop_profile(&mut self) {
        self.profile = None;
    }

    pub(crate) fn sync(&self) {
        // A failure is the machine's, and takes nothing that was promised.
        let _ = self.volume.sync();
    }

    /// Waits for all readers.
    pub(crate) async fn join(&mut self) -> Result<(), String> {
        self.readers.join().await
    }

    /// Waits until nothing is going on, and compares the accounts.
    pub(crate) async fn settle(&mut self) -> Result<(), String> {
        self.stop_fill();
        self.stop_profile();
        self.join().await?;
        idle(&self.volume).await?;
        self.upkeep();
        if self.disk.is_off() { Ok(()) } else { self.compare_accounts() }
    }

    /// The counters match the actions of source and disk exactly.
    fn compare_accounts(&self) -> Result<(), String> {
        let (source, disk, status) = (self.source.log(), self.disk.log(), self.volume.status());
        let total = |of: fn(&Counters) -> &Counter| {
            of(&self.counters).get() + of(self.volume.background()).get()
        };
        let equal = [
            ("good answers", source.good, total(|c| &c.fetches)),
            ("bytes from the source", source.bytes, total(|c| &c.fetched_bytes)),
            ("wrong answers", source.lies, total(|c| &c.source_corrupt_chunks)),
            ("waiting readers", 0, status.waiting_readers as u64),
        ];
        for (what, happened, counted) in equal {
            if happened != counted {
                return Err(format!("{what}: {happened} happened, {counted} were counted"));
            }
        }
        let (least, counted) = (source.errors, total(|c| &c.source_errors));
        if !(least..=least + source.dropped).contains(&counted) {
            return Err(format!("source errors: {least} happened, {counted} were counted"));
        }
        // Some of them were of the file of checksums, and of files that nobody reads.
        let report = self.cache.report();
        let at_most = [
            ("failed cache writes", disk.write_errors, report.write_errors),
            ("failed cache reads", disk.read_errors, report.read_errors),
        ];
        for (what, happened, counted) in at_most {
            if counted > happened {
                return Err(format!("{what}: {happened} happened, {counted} were counted"));
            }
        }
        let (bad, counted) =
            (self.bad_at_start + self.disk.rotten(), total(|c| &c.cache_corrupt_blocks));
        // A slandered block counts with the rotten one of its chunk.
        let bad = if self.model.slandered.is_empty() { bad } else { 2 * bad };
        if counted > bad {
            return Err(format!("at most {bad} cached blocks went bad, {counted} were counted"));
        }
        if source.doubled {
            return Err("one chunk was fetched twice at a time".into());
        }
        if disk.written_after_eio {
            return Err("checksums were written after their file had failed".into());
        }
        Ok(())
    }

    /// The faults stop. After any events in this life, every byte can now be read; unless the file
    /// of checksums has failed, all of it can be filled, and is then served without the source.
    pub(crate) async fn prove(&mut self) -> Result<(), String> {
        // First of all the power: it must not fail any more while the rest settles.
        self.disk.set_faults(Faults::default());
        self.cache.resize(None, Amount::Bytes(0));
        self.settle().await?;
        self.source.set_mood(Mood::Calm);
        sleep(self.limits.no_space_pause_max).await;
        self.prove_profile().await?;
        self.read_all().await?;
        let fill = self.volume.fill();
        let end = timeout(READ_TIME_MAX, fill.ended()).await.map_err(|_| "fill never ends")?;
        drop(fill);
        self.settle().await?;
        if self.disk.has_failed() {
            return Ok(());
        }
        let all = self.model.cacheable_bytes();
        if (end.state, end.done_bytes, end.failed_bytes) != (FillState::Done, all, 0) {
            return Err(format!("nothing hinders, but fill ended with {end:?}"));
        }
        let before = self.source.log();
        self.read_local().await?;
        if self.source.log() != before {
            return Err("the source was asked for what is in the cache".into());
        }
        let here = self.volume.materialised_bytes();
        if here < all || here > self.model.range().len() {
            return Err(format!("{here} bytes are said to be in the cache, {all} are"));
        }
        self.settle().await
    }

    /// A profile is prefetched to its end, beside a reader, and each chunk is asked for once.
    async fn prove_profile(&mut self) -> Result<(), String> {
        let all = self.model.range();
        let middle = all.start() + all.len() / BLOCK_SIZE / 2 * BLOCK_SIZE;
        let second = range(middle, all.end() - middle);
        // In another order than they lie in, and some of it twice.
        let prefetch = self.volume.prefetch_profile([second, all].into_iter(), None);
        self.read(range(all.start(), BLOCK_SIZE), None);
        let ended = timeout(READ_TIME_MAX, prefetch.ended()).await;
        let end = ended.map_err(|_| "a profile prefetch never ends")?;
        drop(prefetch);
        self.settle().await?;
        let all_of_it = end.state == ProfileState::Done && end.done_bytes == end.total_bytes;
        if !all_of_it && !self.disk.has_failed() {
            return Err(format!("nothing hinders, but the profile prefetch ended with {end:?}"));
        }
        Ok(())
    }

    async fn read_all(&mut self) -> Result<(), String> {
        let all = self.model.range();
        for start in (all.start()..all.end()).step_by((READ_BLOCKS_MAX * BLOCK_SIZE) as usize) {
            let len = (READ_BLOCKS_MAX * BLOCK_SIZE).min(all.end() - start);
            self.read(range(start, len), None);
        }
        self.settle().await
    }

    /// Everything that can be in the cache is, and is right.
    async fn read_local(&self) -> Result<(), String> {
        for index in 0..self.model.map.chunk_count() {
            let range = self.model.map.chunk(index).range;
            if !self.model.cacheable(range) {
                continue;
            }
            let mut buf = vec![0; range.len() as usize];
            match self.volume.try_read(range, &mut buf) {
                Ok(Now::Served) if buf == self.model.expected(range) => {}
                Ok(Now::Served) => return Err(format!("wrong bytes for {range}")),
                // Its digest is right, and so are its bytes, in the cache.
                Ok(Now::Absent) if self.model.slandered.contains(&index) => {
                    let read = self.volume.read(range, &mut buf, &self.counters).await;
                    read.map_err(|error| format!("{range} has a right digest, but: {error}"))?;
                    if buf != self.model.expected(range) {
                        return Err(format!("wrong bytes for {range}"));
                    }
                }
                other => return Err(format!("{range} was filled, but: {other:?}")),
            }
        }
        Ok(())
    }
}

/// Settings of a cache that pauses for no time, because the simulated clock is not its clock.
fn settings(rng: &mut Rng) -> CacheSettings {
    CacheSettings {
        limit: *rng.pick(&[None, None, Some(Amount::Bytes(2 << 20))]),
        keep_free: Amount::Bytes(0),
        memory: *rng.pick(&[0, 1 << 20]),
        journal_len: *rng.pick(&[JOURNAL_LEN, 64 << 20]),
        record_age: Duration::ZERO,
        pause_min: Duration::ZERO,
        pause_max: Duration::ZERO,
        ..CacheSettings::default()
    }
}

/// Reads that are going on.
#[derive(Default)]
pub(crate) struct Readers(Vec<JoinHandle<Result<(), String>>>);

impl Readers {
    /// Starts a read that is given up after `patience`.
    pub(crate) fn start(&mut self, reader: Reader, range: ByteRange, patience: Option<Duration>) {
        self.0.push(tokio::spawn(async move {
            let reading = reader.read(range);
            match patience {
                None => reading.await,
                Some(patience) => timeout(patience, reading).await.unwrap_or(Ok(())),
            }
        }));
    }

    /// Waits for all of them.
    pub(crate) async fn join(&mut self) -> Result<(), String> {
        for reader in self.0.drain(..) {
            reader.await.map_err(|error| format!("a reader died: {error}"))??;
        }
        Ok(())
    }
}

/// The environment of a reader.
pub(crate) struct Reader {
    pub(crate) model: Arc<Model>,
    pub(crate) disk: Disk,
    pub(crate) source: FaultySource,
    pub(crate) volume: Arc<SimVolume>,
    pub(crate) counters: Arc<Counters>,
}

impl Reader {
    /// Reads as a frontend does, and judges the answer.
    async fn read(&self, range: ByteRange) -> Result<(), String> {
        let mut buf = vec![0xee; range.len() as usize];
        let answer = match self.volume.try_read(range, &mut buf) {
            Ok(Now::Served) => Ok(()),
            Ok(Now::Absent | Now::Local(_)) => {
                let read = self.volume.read(range, &mut buf, &self.counters);
                let late = |_| format!("the read of {range} has no end");
                timeout(READ_TIME_MAX, read).await.map_err(late)?
            }
            Err(error) => Err(error),
        };
        if self.disk.is_off() {
            return Ok(());
        }
        match answer {
            Ok(()) if buf == self.model.expected(range) => Ok(()),
            Ok(()) => Err(format!("wrong bytes for {range}")),
            Err(_) if matches!(self.source.mood(), Mood::Hostile | Mood::Dead) => Ok(()),
            Err(error) => Err(format!("an error without a reason for {range}: {error}")),
        }
    }
}
