//! Every bound of the data path, each a named constant with its arithmetic.

use std::{sync::Arc, time::Duration};

use crate::{SharedKeys, SharedPermits};

/// Chunks of one volume being fetched, decompressed, served or written to the cache at once. Each
/// holds at most 256 KiB as stored and 256 KiB raw: 32 × 512 KiB = 16 MiB. It is enough for the
/// network: 32 × 256 KiB in flight at 50 ms a round trip is 160 MiB/s. Shorter chunks that come
/// with one request share a permit, up to 256 KiB of them.
pub const FETCHES_MAX: usize = 32;

/// The same over all volumes of a process: 64 × 512 KiB = 32 MiB, however many images are busy.
/// Twice [`FETCHES_MAX`], so that one image whose store is away leaves room for all others.
const SHARED_FETCHES: usize = 2 * FETCHES_MAX;

/// Of these, permits for background work: as in each volume.
const SHARED_BACKGROUND: usize = SHARED_FETCHES / 4 * 3;

/// Chunks one read waits for at once. The kernel's largest request (256 pages, 1 MiB) touches five
/// chunks; four at a time leave permits for seven more such readers in [`FETCHES_MAX`].
const FETCHES_PER_READ: usize = 4;

/// Permits for background work: three quarters of [`FETCHES_MAX`]. That is 6 MiB of data in
/// flight, 120 MiB/s at 50 ms a round trip, and leaves permits for two readers at once; while
/// readers wait, fill begins nothing new.
const BACKGROUND_FETCHES: usize = FETCHES_MAX / 4 * 3;

/// Threads that write the cache. Direct writes of 256 KiB: four keep an SSD busy.
const WRITE_THREADS: usize = 4;

/// Limit of fill's wait for readers to be served. Then it takes one more chunk all the same, so
/// that a busy volume fills, too: one chunk (256 KiB) a second.
const FILL_YIELD: Duration = Duration::from_secs(1);

/// Limit of a read's wait for an unavailable source and for a permit, after which it is `EIO`.
/// Below the 120 s after which Linux logs a hung task, above a store's restart.
const DEADLINE: Duration = Duration::from_secs(30);

/// Limit of one try: a third of the deadline, so that a stalled connection is given up
/// early enough for two more tries.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);

/// First and longest pause between tries. Doubling, they come after 0.05, 0.1, … 1.6, then every
/// 2 s: about 19 tries in 30 s.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// Time in which a chunk that was given up is `EIO` at once: the kernel asks a second time for a
/// page whose read-ahead failed, within milliseconds.
const GIVEN_UP_FOR: Duration = Duration::from_secs(1);

/// Tries beyond the first when the answer is wrong rather than missing.
const REFETCHES: u32 = 1;

/// First and longest pause of cache writes after the file system was full. A full host sees at
/// most one failing write a minute and volume.
const NO_SPACE_PAUSE_MIN: Duration = Duration::from_secs(1);
const NO_SPACE_PAUSE_MAX: Duration = Duration::from_secs(60);

/// The bounds that a volume works within; a daemon uses `VolumeLimits::default()`.
#[derive(Clone, Debug)]
pub struct VolumeLimits {
    /// The permits of the process. Clones of these limits share them, too; each
    /// `VolumeLimits::default()` has its own.
    pub shared: SharedPermits,
    /// The chunks that the volumes of the process fetch now: shared in the same way.
    pub shared_keys: SharedKeys,
    /// Chunks of the volume held in memory at once.
    pub fetches_max: usize,
    /// Of these, chunks one read waits for at once.
    pub fetches_per_read: usize,
    /// Of these, chunks that background work holds.
    pub background_fetches: usize,
    /// Threads that verify and decompress; 0 does it on the fetching task, in a fixed order, for
    /// simulations.
    pub cpu_threads: usize,
    /// Threads that write the cache; 0 does it on the fetching task, for simulations.
    pub write_threads: usize,
    /// Longest that fill stands back for readers before it takes one chunk.
    pub fill_yield: Duration,
    /// Longest that a read waits without an answer of the source before it fails.
    pub deadline: Duration,
    /// Longest that one try may take.
    pub try_timeout: Duration,
    /// First pause between tries.
    pub backoff_min: Duration,
    /// Longest pause between tries.
    pub backoff_max: Duration,
    /// Time in which a chunk that was given up fails at once.
    pub given_up_for: Duration,
    /// The image's name in events of the log.
    pub image: Arc<str>,
    /// Further tries when the source answers wrongly.
    pub refetches: u32,
    /// First pause of cache writes when there is no space.
    pub no_space_pause_min: Duration,
    /// Longest pause of cache writes when there is no space.
    pub no_space_pause_max: Duration,
}

impl Default for VolumeLimits {
    fn default() -> Self {
        Self {
            shared: SharedPermits::new(SHARED_FETCHES, SHARED_BACKGROUND),
            shared_keys: SharedKeys::default(),
            fetches_max: FETCHES_MAX,
            fetches_per_read: FETCHES_PER_READ,
            background_fetches: BACKGROUND_FETCHES,
            // Decompression is pure CPU work: one thread a CPU.
            cpu_threads: std::thread::available_parallelism().map_or(2, usize::from),
            write_threads: WRITE_THREADS,
            fill_yield: FILL_YIELD,
            deadline: DEADLINE,
            try_timeout: TRY_TIMEOUT,
            backoff_min: BACKOFF_MIN,
            backoff_max: BACKOFF_MAX,
            given_up_for: GIVEN_UP_FOR,
            image: "".into(),
            refetches: REFETCHES,
            no_space_pause_min: NO_SPACE_PAUSE_MIN,
            no_space_pause_max: NO_SPACE_PAUSE_MAX,
        }
    }
}
