//! The host's cache, which all volumes of this server share, and the orders of users about it.

use std::{
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Counter, Digest, Error, ErrorKind, ObjectKind, Result};
use burgeon_cache::{
    Cache, CacheState, ChunkOwner, ChunkStore, Domain, LentRange, disk::Refused, policy::Forecast,
};
use burgeon_image::AddressMap;
use burgeon_source::{Access, LayersAt, Location, Store, layers_at};
use burgeon_volume::{CacheAccess, chunk_keys};

use super::{Serving, cache_parts, lock, reads::Reads, served::Mount};
use crate::{
    ipc::{
        link::{CacheOrder, END_SCRUB, FromServer},
        protocol::{CacheAnswer, HostCache, ReadBytes},
    },
    state::{cache::Bounds, cache_dir::CacheDir, paths::StateDir, writes},
};

/// Opens the cache of this host. Settings that cannot be read are no reason to serve nothing.
/// Chunks in `lent` are lent.
pub(super) fn open(state: &StateDir, lent: Vec<LentRange>) -> Result<Arc<Cache>> {
    let bounds = Bounds::read(state).unwrap_or_else(|error| {
        tracing::error!(%error, "the cache has its default settings");
        Bounds::default()
    });
    let settings = bounds.settings();
    // Of a disk that cannot be looked at, the cache says so itself.
    let dir = CacheDir::read(state);
    let folder = dir.folder(state);
    let size = rustix::fs::statvfs(&folder).map_or(0, |fs| fs.f_blocks * fs.f_frsize);
    let limit = settings.limit.map_or(size, |limit| limit.of(size));
    let policy = || Box::new(Forecast::new(limit, std::process::id().into()));
    let refused = |why| Cache::over(Arc::new(Refused::new(why)), settings, policy());
    let cache = match dir.problem {
        // The server has no right to that folder; a new one gets it when it can be used.
        Some(problem) => refused(problem),
        // Reads go on without a disk that has died. A new server looks at it again.
        None => Cache::open_lending(&folder, settings, policy(), lent).unwrap_or_else(|error| {
            tracing::error!(%error, "the cache cannot be opened, and keeps nothing");
            refused(error.to_string())
        }),
    };
    cache.limit_owners(cache_parts::limits(&bounds));
    Ok(Arc::new(cache))
}

/// The domain of trust of an image that is read from `store` with `access`, with layers at
/// `layers`: public if nobody can need credentials for any of them.
///
/// Besides the credentials that were given for the mount, the machine's own may be used. They are a
/// set for each store in a bucket and for each registry.
fn domain(store: &Location, access: &Access, layers: &[Option<LayersAt>]) -> Domain {
    let mut places: Vec<String> = layers.iter().filter_map(place).collect();
    match store {
        Location::Registry(name) => places.push(name.registry().to_owned()),
        // Settings that were given need not be credentials.
        other if other.has_ambient_credentials() => places.push(other.to_string()),
        _ => {}
    }
    // Mirrors serve the same bytes.
    let access = access.clone().without_hosts();
    if access.is_empty() && places.is_empty() {
        return Domain::PUBLIC;
    }
    places.sort();
    places.dedup();
    let mut identity = Vec::new();
    let given = access.variables().flat_map(|(name, value)| [name, value]);
    for text in given.chain(places.iter().map(String::as_str)) {
        identity.extend((text.len() as u64).to_le_bytes());
        identity.extend(text.as_bytes());
    }
    Domain::of(&identity)
}

/// The name of a place of layers that may want credentials; a place that could not be read may.
fn place(at: &Option<LayersAt>) -> Option<String> {
    match at {
        Some(LayersAt::Layout(_)) => None,
        Some(LayersAt::Registry(name)) => Some(name.registry().to_owned()),
        None => Some(String::new()),
    }
}

/// The places of the layers that an image in `store` refers to; `None` for one that cannot be read.
fn layers_of(map: &AddressMap, store: &Store) -> Vec<Option<LayersAt>> {
    let derived = map.objects().iter().filter(|object| object.is(ObjectKind::Derived));
    derived.map(|object| layers_at(store, object).ok()).collect()
}

impl Serving {
    /// The cache, for the image of `map`, which lies at `location` and is read with `access`; its
    /// chunks are those of `owner`.
    pub(super) fn cache_for(
        &self,
        map: &AddressMap,
        store: &Store,
        (location, access): (&Location, &Access),
        owner: &ChunkOwner,
    ) -> CacheAccess {
        let is_shared = Bounds::read(&self.state).is_ok_and(|bounds| bounds.is_shared);
        let domain = match is_shared {
            true => Domain::PUBLIC,
            false => domain(location, access, &layers_of(map, store)),
        };
        CacheAccess { store: self.cache.for_owner(owner), domain }
    }

    /// Does what a user has ordered, in a thread of its own: it may take long.
    pub(super) fn order(self: &Arc<Self>, number: u64, order: CacheOrder) {
        let serving = Arc::clone(self);
        thread::spawn(move || {
            let (done, error) = match serving.perform_order(order) {
                Ok(done) => (done, None),
                Err(error) => ((0, 0), Some(error.into())),
            };
            let (parts, unclaimed) = serving.cache_parts();
            let answer = CacheAnswer {
                bytes: done.0,
                chunks: done.1,
                cache: serving.host_cache(),
                parts,
                unclaimed: Some(unclaimed),
            };
            serving.tell(&FromServer::Cache { number, answer, error });
        });
    }

    /// Bytes and chunks that the order is about.
    fn perform_order(&self, order: CacheOrder) -> Result<(u64, u64)> {
        self.look_at_loans();
        match order {
            CacheOrder::Show => Ok((0, 0)),
            CacheOrder::Resize => {
                let bounds = Bounds::read(&self.state)?;
                let (limit, keep_free) = bounds.amounts();
                self.cache.resize(limit, keep_free);
                self.claim_chunks();
                self.cache.limit_owners(cache_parts::limits(&bounds));
                self.fetch_pins_again();
                Ok((0, 0))
            }
            CacheOrder::Evict { bytes } => Ok((self.cache.evict(bytes), 0)),
            CacheOrder::Drop { digest } => {
                let dropped = self.drop_image(&digest.0);
                self.fetch_pins_again();
                dropped
            }
            CacheOrder::Scrub { bytes_per_second } => self.scrub_cache(bytes_per_second),
            CacheOrder::Unknown => {
                let what = "the server does not know this order: `burgeon upgrade` replaces it";
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }

    /// Scrubs, and ends the scrub that runs: perhaps nobody waits for it any more.
    fn scrub_cache(&self, bytes_per_second: u64) -> Result<(u64, u64)> {
        let stop = Arc::<AtomicBool>::default();
        self.replace_scrub((bytes_per_second != END_SCRUB).then(|| Arc::clone(&stop)));
        if bytes_per_second == END_SCRUB {
            return Ok((0, 0));
        }
        let done = self.cache.scrub(bytes_per_second, &stop);
        lock(&self.scrub).take_if(|running| Arc::ptr_eq(running, &stop));
        if stop.load(Ordering::Relaxed) {
            let what = "another `burgeon cache scrub` was begun, which ended this one";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        Ok(done)
    }

    /// Ends the scrub that runs: its command has lost its connection with the supervisor.
    pub(super) fn end_scrub(&self) {
        self.replace_scrub(None);
    }

    fn replace_scrub(&self, next: Option<Arc<AtomicBool>>) {
        if let Some(before) = std::mem::replace(&mut *lock(&self.scrub), next) {
            before.store(true, Ordering::Relaxed);
        }
    }

    /// Forgets the chunks of an image in all domains that it is read in now. Lent ones stay: they
    /// take no space, and the next read would fetch them to another place.
    fn drop_image(&self, digest: &Digest) -> Result<(u64, u64)> {
        let volumes = self.volumes.of_image(&self.state.image(digest));
        let map = match volumes.first() {
            Some(volume) => Arc::clone(volume.map()),
            None => Arc::new(self.map_of(digest)?),
        };
        let domains = volumes.iter().map(|volume| volume.domain());
        let before = self.cache.report();
        for domain in domains.chain([Domain::PUBLIC]) {
            let mut keys = chunk_keys(&map, &domain);
            keys.retain(|key| !self.cache.is_lent(key));
            self.cache.drop_keys(&keys);
        }
        let after = self.cache.report();
        let evicted = after.evicted - before.evicted;
        Ok((evicted, before.chunks.saturating_sub(after.chunks)))
    }

    /// The address map of an image that is not open: prepared, or in the named writes of it.
    fn map_of(&self, digest: &Digest) -> Result<AddressMap> {
        let prepared = AddressMap::open(&self.state.image(digest).join("map"));
        let Err(error) = prepared else { return prepared };
        let is_of_image = |name: &String| {
            let record = writes::find(&self.state, name).ok().flatten();
            record.is_some_and(|record| record.manifest.0 == *digest)
        };
        let names = writes::names(&self.state)?;
        let folders = names.iter().filter(|name| is_of_image(name));
        let mut maps = folders.map(|name| writes::folder(&self.state, name).join("map"));
        maps.find_map(|map| AddressMap::open(&map).ok()).ok_or(error)
    }

    /// The bytes that mounts have read until now.
    pub(super) fn look_at_reads(&self) -> MutexGuard<'_, Reads> {
        let of = |mount: &Mount| {
            let counters = mount.slots.counters();
            let [hit, miss] = [&counters.hit_bytes, &counters.miss_bytes].map(Counter::get);
            let fetched = counters.fetched_bytes.get() + counters.background_bytes.get();
            (mount.attach.id, ReadBytes { hit, miss, fetched })
        };
        // Locked first, so that of two that look at once the later one has the later counters.
        let mut reads = lock(&self.reads);
        let now: Vec<_> = lock(&self.mounts).values().map(of).collect();
        reads.look(now.into_iter());
        reads
    }

    /// The figures of the cache for users.
    pub(super) fn host_cache(&self) -> HostCache {
        let report = self.cache.report();
        let (reads, now) = (self.look_at_reads(), Instant::now());
        let problem = match self.cache.state() {
            CacheState::Writing => None,
            CacheState::NoSpace { reason } | CacheState::Stopped { reason } => Some(reason),
        };
        HostCache {
            // The supervisor knows the folders.
            folder: None,
            earlier: Vec::new(),
            layers: None,
            problem,
            scrubbing: lock(&self.scrub).is_some(),
            used: report.used,
            limit: report.limit,
            floor: report.floor,
            free: report.free,
            chunks: report.chunks,
            held: report.held,
            admitted: report.admitted,
            refused: report.refused,
            evicted: report.evicted,
            shared: report.shared,
            lent: report.lent,
            written: report.written,
            doubted: report.doubted,
            read_errors: report.read_errors,
            write_errors: report.write_errors,
            hit_permille: report.hit_permille,
            read: reads.total(),
            read_in_a_minute: reads.within(now, Duration::from_secs(60)),
            read_in_an_hour: reads.within(now, Duration::from_secs(3600)),
        }
    }
}

#[cfg(test)]
mod tests {
    use burgeon_cache::Domain;
    use burgeon_source::{Access, LayersAt, Location};

    use super::domain;

    #[test]
    fn only_stores_that_need_no_credentials_are_public() {
        let none = Access::default();
        let of = |location: &str| domain(&Location::parse(location).unwrap(), &none, &[]);
        assert!(of("/a/folder") == Domain::PUBLIC);
        assert!(of("https://store.example/a") == Domain::PUBLIC);
        assert!(of("s3://bucket/a") != Domain::PUBLIC, "the machine may have credentials");
        assert!(of("s3://bucket/a") != of("s3://other/a"));
        // A region is no credential, and the machine's own are used beside it.
        let region: Access = serde_json::from_str(r#"{"AWS_REGION": "eu-central-1"}"#).unwrap();
        let with_region =
            |location: &str| domain(&Location::parse(location).unwrap(), &region, &[]);
        assert!(with_region("s3://bucket/a") != with_region("s3://other/a"));
    }

    #[test]
    fn layers_in_a_registry_are_in_a_domain_of_that_registry() {
        let store = Location::parse("/a/folder").unwrap();
        let of = |places: &[&str]| {
            let at = |text: &&str| LayersAt::parse(text).ok();
            domain(&store, &Access::default(), &places.iter().map(at).collect::<Vec<_>>())
        };
        let one = of(&["oci://r.example/one:1"]);
        assert!(one != Domain::PUBLIC, "the machine may have a login there");
        assert!(one == of(&["oci://r.example/two:1", "oci://r.example/one:1"]));
        assert!(one != of(&["oci://other.example/one:1"]));
        assert!(of(&["oci-layout:/a/layout"]) == Domain::PUBLIC);
        let damaged = of(&["damaged"]);
        assert!(damaged != Domain::PUBLIC && damaged != one);
        let image = format!("oci://r.example/one@sha256:{}", "0".repeat(64));
        assert!(domain(&Location::parse(&image).unwrap(), &Access::default(), &[]) == one);
    }
}
