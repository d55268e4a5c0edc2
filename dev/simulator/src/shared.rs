//! Several volumes over one cache: two images that share chunks, and a hostile one.
//!
//! ```text
//!   seed ─► reads of any image, evictions, faults of the disk and of each source, kills, power cuts
//!              │
//!   honest A ──┐                         A and B share chunks; the hostile image has digests of
//!   honest B ──┼─► one Cache ─► Disk     theirs, and wrong checksums
//!   hostile ───┘   policy, bounds
//! ```
//!
//! The promises, beside those of a single volume: a read fails only while its own image's source
//! gives reason; limit and floor hold after each operation; only the hostile image is found to be
//! damaged; and however often it is read, no chunk is forgotten for it, and the others go on to be
//! served from the cache.

use std::{fmt::Write, sync::Arc, time::Duration};

use burgeon_block::{ByteRange, Counters, Now};
use burgeon_cache::{
    Amount, Cache, CacheSettings, ChunkOwner, Domain, disk::CacheDisk, policy::Forecast,
};
use burgeon_volume::{CacheAccess, SharedKeys, Volume, VolumeLimits};
use testkit::Rng;
use tokio::time::sleep;

use crate::{
    Crash, Disk, FaultySource, Model, Mood,
    disk::Faults,
    world::{Reader, Readers, SimVolume, idle, runtime, some_range},
};

/// The last image is the hostile one.
const IMAGES: usize = 3;
const HOSTILE: usize = IMAGES - 1;
const DISK_LEN: u64 = 8 << 20;
/// Bytes on the disk that are not the chunks'.
const RECORDS: u64 = 512 << 10;

/// The actions of a run, as evidence that it did something.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct SharedReport {
    /// Operations, all lives together.
    pub operations: u64,
    /// Bytes that the cache has evicted.
    pub evicted: u64,
    /// Bytes that an image found, and another had fetched.
    pub shared: u64,
    /// Lives that ended in a kill or a power failure.
    pub deaths: u64,
    /// Runs at whose end a hostile image was found to be damaged.
    pub exposed: u64,
}

struct Image {
    model: Arc<Model>,
    source: FaultySource,
    volume: Arc<SimVolume>,
    counters: Arc<Counters>,
    readers: Readers,
}

impl Image {
    fn read(&mut self, disk: &Disk, range: ByteRange) {
        let reader = Reader {
            model: Arc::clone(&self.model),
            disk: disk.clone(),
            source: self.source.clone(),
            volume: Arc::clone(&self.volume),
            counters: Arc::clone(&self.counters),
        };
        self.readers.start(reader, range, None);
    }

    async fn settle(&mut self) -> Result<(), String> {
        self.readers.join().await?;
        idle(&self.volume).await
    }
}

/// A life of the machine.
struct Life {
    disk: Disk,
    cache: Arc<Cache>,
    images: Vec<Image>,
    settings: CacheSettings,
}

impl Life {
    fn boot(run: &mut Run) -> Self {
        let settings = CacheSettings {
            limit: *run.rng.pick(&[None, Some(Amount::Bytes(256 << 10))]),
            keep_free: Amount::Bytes(*run.rng.pick(&[0, DISK_LEN - (1 << 20)])),
            memory: *run.rng.pick(&[0, 128 << 10]),
            record_age: Duration::ZERO,
            pause_min: Duration::ZERO,
            pause_max: Duration::ZERO,
            ..CacheSettings::default()
        };
        let policy = Box::new(Forecast::new(256 << 10, run.rng.bits()));
        let cache = Arc::new(Cache::over(Arc::new(run.disk.clone()), settings, policy));
        let limits = VolumeLimits {
            fetches_max: *run.rng.pick(&[1, 4, 32]),
            cpu_threads: 0,
            write_threads: 0,
            // One single-flight for all.
            shared_keys: SharedKeys::default(),
            ..VolumeLimits::default()
        };
        let image = |(number, model): (usize, &Arc<Model>)| {
            let source = FaultySource::new(run.rng.bits(), model);
            let owner = ChunkOwner { image: number.to_string(), store: String::new() };
            let access = CacheAccess { store: cache.for_owner(&owner), domain: Domain::PUBLIC };
            let map = Arc::clone(&model.map);
            Image {
                model: Arc::clone(model),
                volume: Volume::new(map, source.clone(), access, limits.clone()),
                source,
                counters: Arc::default(),
                readers: Readers::default(),
            }
        };
        let images = run.models.iter().enumerate().map(image).collect();
        Self { disk: run.disk.clone(), cache, images, settings }
    }

    /// Limit and floor, and the sound images' good names.
    fn check(&self) -> Result<(), String> {
        if self.disk.is_off() {
            return Ok(());
        }
        let report = self.cache.report();
        if let Some(limit) = self.settings.limit
            && report.used > limit.of(DISK_LEN)
        {
            return Err(format!("{} bytes are used of {limit:?}", report.used));
        }
        let space = CacheDisk::space(&self.disk).map_err(|error| error.to_string())?;
        let floor = self.settings.keep_free.of(DISK_LEN);
        if space.free + RECORDS < floor {
            return Err(format!("{} bytes are free, and {floor} should be", space.free));
        }
        let sound = self.images.iter().filter(|image| image.model.slandered.is_empty());
        match sound.into_iter().find(|image| image.volume.status().is_map_damaged) {
            Some(_) => Err("a sound image is said to be damaged".into()),
            None => Ok(()),
        }
    }

    async fn settle(&mut self) -> Result<(), String> {
        for image in &mut self.images {
            image.settle().await?;
        }
        self.cache.upkeep();
        self.check()
    }

    async fn read_all(&mut self, which: usize) -> Result<(), String> {
        let image = &mut self.images[which];
        for index in 0..image.model.map.chunk_count() {
            let range = image.model.map.chunk(index).range;
            image.read(&self.disk, range);
        }
        image.settle().await
    }

    /// The faults stop. The hostile image is read again and again, and costs the others nothing.
    async fn prove(&mut self) -> Result<bool, String> {
        self.disk.set_faults(Faults::default());
        self.settings = CacheSettings { limit: None, keep_free: Amount::Bytes(0), ..self.settings };
        self.cache.resize(None, Amount::Bytes(0));
        self.settle().await?;
        self.images.iter().for_each(|image| image.source.set_mood(Mood::Calm));
        sleep(Duration::from_secs(60)).await;
        for which in [0, 1, HOSTILE, 0, 1] {
            self.read_all(which).await?;
        }
        let before = self.cache.report();
        let asked: Vec<_> = self.images.iter().map(|image| image.source.log()).collect();
        for _ in 0..3 {
            self.read_all(HOSTILE).await?;
        }
        self.cache.upkeep();
        let after = self.cache.report();
        if (before.doubted, before.evicted) != (after.doubted, after.evicted) {
            return Err(format!("a hostile image has evicted chunks: {before:?}, then {after:?}"));
        }
        self.serve_honest()?;
        self.check()?;
        let is_asked = |which: usize| self.images[which].source.log() != asked[which];
        if (0..HOSTILE).any(is_asked) {
            return Err("a source was asked for what is in the cache".into());
        }
        let hostile = &self.images[HOSTILE];
        let (is_exposed, slanders) =
            (hostile.volume.status().is_map_damaged, !hostile.model.slandered.is_empty());
        if is_exposed != slanders {
            return Err(format!("wrong checksums: {slanders}, noticed: {is_exposed}"));
        }
        Ok(is_exposed)
    }

    /// The cache has all of the honest images, and it is right.
    fn serve_honest(&self) -> Result<(), String> {
        for image in &self.images[..HOSTILE] {
            let chunks = (0..image.model.map.chunk_count()).map(|at| image.model.map.chunk(at));
            for range in chunks.map(|chunk| chunk.range) {
                let mut buf = vec![0; range.len() as usize];
                match image.volume.try_read(range, &mut buf) {
                    Ok(Now::Served) if buf == image.model.expected(range) => {}
                    Ok(Now::Absent) if !image.model.cacheable(range) => {}
                    other => return Err(format!("{range} was read before, but: {other:?}")),
                }
            }
        }
        Ok(())
    }
}

struct Run {
    rng: Rng,
    models: Vec<Arc<Model>>,
    disk: Disk,
    report: SharedReport,
    trace: String,
}

/// Runs the simulation of `seed`. The error names the promise that was broken and by which
/// operations.
pub fn simulate_shared(seed: u64) -> Result<SharedReport, String> {
    let mut rng = Rng::new(seed);
    let (shape, chunks) = (rng.bits(), 3 + rng.below(6) as usize);
    let contents = [rng.bits(), rng.bits()];
    let model =
        |(content, slanders)| Arc::new(Model::slandering(shape, content, chunks, false, slanders));
    let all = [(contents[0], false), (contents[1], false), (contents[0], true)];
    let models: Vec<_> = all.map(model).into();
    let disk = Disk::new(rng.bits(), DISK_LEN);
    let (report, trace) = (SharedReport::default(), String::new());
    let mut run = Run { rng, models, disk, report, trace };
    let end = run.all();
    end.map(|()| run.report)
        .map_err(|error| format!("seed {seed}: {error}\nafter these operations:\n{}", run.trace))
}

impl Run {
    fn note(&mut self, what: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.trace, "  {what}");
    }

    fn all(&mut self) -> Result<(), String> {
        for _ in 0..1 + self.rng.below(3) {
            self.life(false)?;
            let power = self.disk.is_off() || self.rng.below(2) == 0;
            let crash = match power {
                true => Crash::Power(*self.rng.pick(&[0, 128, 255])),
                false => Crash::Kill,
            };
            self.report.deaths += 1;
            self.note(format_args!("the end: {crash:?}"));
            self.disk.restart(crash);
        }
        self.life(true)
    }

    fn life(&mut self, last: bool) -> Result<(), String> {
        runtime()?.block_on(async {
            let mut life = Life::boot(self);
            for _ in 0..self.rng.below(60) {
                self.report.operations += 1;
                self.operation(&mut life).await?;
                if self.disk.is_off() {
                    return Ok(());
                }
                life.check()?;
            }
            if last {
                self.note(format_args!("the faults stop"));
                self.report.exposed += u64::from(life.prove().await?);
            }
            let report = life.cache.report();
            self.report.evicted += report.evicted;
            self.report.shared += report.shared;
            Ok(())
        })
    }

    async fn operation(&mut self, life: &mut Life) -> Result<(), String> {
        let which = self.rng.below(IMAGES as u64) as usize;
        match self.rng.below(100) {
            0..55 => {
                let range = some_range(&life.images[which].model, &mut self.rng);
                self.note(format_args!("read {range} of image {which}"));
                life.images[which].read(&self.disk, range);
            }
            55..60 => {
                let bytes = self.rng.below(256 << 10);
                self.note(format_args!("evict {bytes} bytes"));
                life.cache.evict(bytes);
            }
            60..66 => {
                self.note(format_args!("the cache's thread takes its turn"));
                life.cache.upkeep();
            }
            66..72 => {
                let ms = *self.rng.pick(&[0, 1, 10, 1000, 20_000]);
                self.note(format_args!("wait {ms} ms"));
                sleep(Duration::from_millis(ms)).await;
            }
            72..80 => {
                self.note(format_args!("wait for all readers"));
                life.settle().await?;
            }
            80..85 => {
                let rotten = self.disk.rot(&mut self.rng);
                self.note(format_args!("a bit rots: {rotten}"));
            }
            85..91 => {
                let faults = match self.rng.below(6) {
                    0 => Faults { space_left: Some(self.rng.below(4)), ..Faults::default() },
                    1 => Faults { write_eio: 200, ..Faults::default() },
                    2 => Faults { read_eio: 100, ..Faults::default() },
                    3 => Faults { off_at_write: Some(self.rng.below(6)), ..Faults::default() },
                    _ => Faults::default(),
                };
                self.note(format_args!("the disk: {faults:?}"));
                self.disk.set_faults(faults);
            }
            _ => {
                let moods = [Mood::Calm, Mood::Calm, Mood::Flaky, Mood::Hostile, Mood::Dead];
                let mood = *self.rng.pick(&moods);
                let image = &mut life.images[which];
                // Reads that began under a hostile source may still fail: let them end first.
                if matches!(image.source.mood(), Mood::Hostile | Mood::Dead) {
                    image.settle().await?;
                    sleep(VolumeLimits::default().given_up_for).await;
                }
                self.note(format_args!("the source of image {which}: {mood:?}"));
                image.source.set_mood(mood);
            }
        }
        Ok(())
    }
}
