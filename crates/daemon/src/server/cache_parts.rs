//! The parts of the host's cache: its chunks by image and by store, and limits of them.
//!
//! ```text
//!   volume opened ─► owner of its chunks: image, store ─► admitted chunks count for it
//!   chunks of an earlier server ── figures asked for, or a limit ─► claimed by the open volumes
//! ```

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    thread,
};

use burgeon_block::Digest;
use burgeon_cache::{Cache, ChunkKey, ChunkOwner, Domain, Scope};
use burgeon_source::Location;
use burgeon_volume::chunk_keys;

use super::{
    Serving, lock,
    volumes::{ImageVolume, Origin},
};
use crate::{
    ipc::protocol::{CachePart, PartLimit, PartOfCache},
    state::cache::Bounds,
};

/// Most images and stores that are listed, beside those with a limit.
const LISTED_MAX: usize = 1000;

/// The limits of parts among `bounds`.
pub(super) fn limits(bounds: &Bounds) -> Vec<(Scope, u64)> {
    let limit = |limit: &PartLimit| Some((scope(&limit.part), limit.bytes?));
    bounds.parts.iter().filter_map(limit).collect()
}

fn scope(part: &CachePart) -> Scope {
    match part {
        CachePart::Image(digest) => Scope::Image(digest.0.to_string()),
        CachePart::Store(store) => Scope::Store(store.to_string()),
    }
}

/// The part that is named by a scope of this server.
fn part(scope: &Scope) -> Option<CachePart> {
    Some(match scope {
        Scope::Image(image) => CachePart::Image(image.parse::<Digest>().ok()?.into()),
        Scope::Store(store) => CachePart::Store(Location::parse(store).ok()?),
    })
}

/// The keys of a volume's chunks in all domains in which it finds them.
fn keys(volume: &ImageVolume) -> Vec<ChunkKey> {
    let own = Some(volume.domain()).filter(|domain| *domain != Domain::PUBLIC);
    let domains = [Domain::PUBLIC].into_iter().chain(own);
    domains.flat_map(|domain| chunk_keys(volume.map(), &domain)).collect()
}

/// The open volumes that have claimed their chunks, so that each does it once.
#[derive(Default)]
pub(super) struct Claimed {
    origins: HashSet<Origin>,
    /// Bytes that nobody had claimed after that.
    unclaimed: u64,
}

impl Serving {
    /// Has the open volumes claim the chunks that an earlier server left.
    pub(super) fn claim_chunks(&self) {
        let unclaimed = || self.cache.owned_bytes().unclaimed;
        let mut claimed = lock(&self.claimed);
        if unclaimed() > claimed.unclaimed {
            // The cache was not loaded yet.
            claimed.origins.clear();
        }
        let open = self.volumes.open_now();
        claimed.origins.retain(|origin| open.iter().any(|(open, _)| open == origin));
        for (origin, volume) in open {
            let owner = origin.owner();
            if claimed.origins.insert(origin) {
                self.cache.claim(&owner, &keys(&volume));
            }
        }
        claimed.unclaimed = unclaimed();
    }

    /// Bounds the chunks that an earlier server left of a volume that was just opened, if it has a
    /// limit. In a thread of its own: a large image has millions.
    pub(super) fn claim_if_limited(&self, owner: ChunkOwner, volume: &Arc<ImageVolume>) {
        if !self.cache.is_limited(&owner) {
            return;
        }
        let (cache, volume) = (Arc::clone(&self.cache), Arc::clone(volume));
        thread::spawn(move || Cache::claim(&cache, &owner, &keys(&volume)));
    }

    /// The parts of the cache, and the bytes of chunks that nobody has claimed.
    pub(super) fn cache_parts(&self) -> (Vec<PartOfCache>, u64) {
        self.claim_chunks();
        let owned = self.cache.owned_bytes();
        let limits: HashMap<Scope, u64> = self.cache.limits().into_iter().collect();
        let mut bytes: BTreeMap<Scope, u64> = limits.keys().map(|it| (it.clone(), 0)).collect();
        for (owner, of_owner) in owned.owners {
            for scope in [Scope::Image(owner.image), Scope::Store(owner.store)] {
                *bytes.entry(scope).or_default() += of_owner;
            }
        }
        let mut parts: Vec<(Scope, u64)> = bytes.into_iter().collect();
        parts.sort_by_key(|(scope, bytes)| (!limits.contains_key(scope), u64::MAX - bytes));
        let listed = parts.iter().filter(|(scope, bytes)| *bytes > 0 || limits.contains_key(scope));
        let parts = listed.take(limits.len() + LISTED_MAX).filter_map(|(scope, bytes)| {
            let limit = limits.get(scope).copied();
            Some(PartOfCache { part: part(scope)?, bytes: *bytes, limit })
        });
        (parts.collect(), owned.unclaimed)
    }
}
