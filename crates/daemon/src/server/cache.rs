//! The host's cache, which all volumes of this server share, and the orders of users about it.

use std::{
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use burgeon_block::{Digest, Result};
use burgeon_cache::{Cache, Domain, Report, policy::Forecast};
use burgeon_image::AddressMap;
use burgeon_source::{Access, Location};
use burgeon_volume::{CacheAccess, chunk_keys};

use super::Serving;
use crate::{
    ipc::{
        link::{CacheOrder, FromServer},
        protocol::{CacheAnswer, HostCache},
    },
    state::{cache::Bounds, paths::StateDir},
};

/// Opens the cache of this host. Settings that cannot be read are no reason to serve nothing.
pub(super) fn open(state: &StateDir) -> Result<Arc<Cache>> {
    let bounds = Bounds::read(state).unwrap_or_else(|error| {
        tracing::error!(%error, "the cache has its default settings");
        Bounds::default()
    });
    let settings = bounds.settings();
    // Of a disk that cannot be looked at, the cache says so itself.
    let size = rustix::fs::statvfs(state.cache()).map_or(0, |fs| fs.f_blocks * fs.f_frsize);
    let limit = settings.limit.map_or(size, |limit| limit.of(size));
    let policy = Forecast::new(limit, std::process::id().into());
    Ok(Arc::new(Cache::open(&state.cache(), settings, Box::new(policy))?))
}

/// The domain of trust of an image that is read from `store` with `access`: public if nobody needs
/// credentials for it.
pub(super) fn domain(store: &Location, access: &Access) -> Domain {
    if access.is_empty() && !store.has_ambient_credentials() {
        return Domain::PUBLIC;
    }
    let mut identity = Vec::new();
    // Without settings the machine's own credentials are used, which are those for this store.
    let store = if access.is_empty() { store.to_string() } else { String::new() };
    for text in access.variables().flat_map(|(name, value)| [name, value]).chain([&*store]) {
        identity.extend((text.len() as u64).to_le_bytes());
        identity.extend(text.as_bytes());
    }
    Domain::of(&identity)
}

impl Serving {
    /// The cache, for an image that is read from `store` with `access`.
    pub(super) fn cache_for(&self, store: &Location, access: &Access) -> CacheAccess {
        CacheAccess { store: Arc::clone(&self.cache) as _, domain: domain(store, access) }
    }

    /// Does what a user has ordered, in a thread of its own: it may take long.
    pub(super) fn order(self: &Arc<Self>, number: u64, order: CacheOrder) {
        let serving = Arc::clone(self);
        thread::spawn(move || {
            let (done, error) = match serving.perform_order(order) {
                Ok(done) => (done, None),
                Err(error) => ((0, 0), Some(error.into())),
            };
            let answer = CacheAnswer { bytes: done.0, chunks: done.1, cache: serving.host_cache() };
            serving.tell(&FromServer::Cache { number, answer, error });
        });
    }

    /// Bytes and chunks that the order is about.
    fn perform_order(&self, order: CacheOrder) -> Result<(u64, u64)> {
        match order {
            CacheOrder::Show => {}
            CacheOrder::Resize => {
                let (limit, keep_free) = Bounds::read(&self.state)?.amounts();
                self.cache.resize(limit, keep_free);
            }
            CacheOrder::Evict { bytes } => return Ok((self.cache.evict(bytes), 0)),
            CacheOrder::Drop { digest } => return self.drop_image(&digest.0),
            CacheOrder::Scrub { bytes_per_second } => {
                return Ok(self.cache.scrub(bytes_per_second, &AtomicBool::new(false)));
            }
            CacheOrder::Unknown => tracing::warn!("ignoring an order of a later supervisor"),
        }
        Ok((0, 0))
    }

    /// Forgets the chunks of an image in all domains that it is read in now.
    fn drop_image(&self, digest: &Digest) -> Result<(u64, u64)> {
        let folder = self.state.image(digest);
        let map = Arc::new(AddressMap::open(&folder.join("map"))?);
        let before = self.cache.report();
        for domain in self.volumes.domains(&folder).into_iter().chain([Domain::PUBLIC]) {
            self.cache.drop_keys(&chunk_keys(&map, &domain));
        }
        let after = self.cache.report();
        let evicted = after.evicted - before.evicted;
        Ok((evicted, before.chunks.saturating_sub(after.chunks)))
    }

    /// The figures of the cache for users.
    pub(super) fn host_cache(&self) -> HostCache {
        let Report {
            used,
            limit,
            floor,
            free,
            chunks,
            held,
            admitted,
            refused,
            evicted,
            written,
            doubted,
            read_errors,
            write_errors,
            ..
        } = self.cache.report();
        HostCache {
            used,
            limit,
            floor,
            free,
            chunks,
            held,
            admitted,
            refused,
            evicted,
            written,
            doubted,
            read_errors,
            write_errors,
        }
    }
}

#[cfg(test)]
mod tests {
    use burgeon_cache::Domain;
    use burgeon_source::{Access, Location};

    use super::domain;

    #[test]
    fn only_stores_that_need_no_credentials_are_public() {
        let none = Access::default();
        let of = |location: &str| domain(&Location::parse(location).unwrap(), &none);
        assert!(of("/a/folder") == Domain::PUBLIC);
        assert!(of("https://store.example/a") == Domain::PUBLIC);
        assert!(of("s3://bucket/a") != Domain::PUBLIC, "the machine may have credentials");
        assert!(of("s3://bucket/a") != of("s3://other/a"));
    }
}
