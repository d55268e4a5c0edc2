//! The message of the status socket: durable totals, and the present state of mounts and cache.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    label::label,
    totals::{OTHER_STORES, Totals},
    values::{CacheValues, Values},
};

/// Mounts in a snapshot: more than the descriptors that systemd keeps allow. Totals of stores
/// count all mounts.
pub const MOUNTS_MAX: usize = 2000;

/// Everything that is exported of the daemon.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
#[serde(default)]
pub struct MetricsSnapshot {
    /// Burgeon's version.
    pub version: String,
    /// The time of the first look at the totals, in seconds since 1970.
    pub since_unix_seconds: u64,
    /// The time at which the totals were written, in seconds since 1970; 0 if they never were.
    pub written_unix_seconds: u64,
    /// Servers started.
    pub server_starts: u64,
    /// Totals of the cache.
    pub cache: CacheValues,
    /// Totals of each store.
    pub stores: BTreeMap<String, Values>,
    /// Totals of each mount.
    pub mounts: BTreeMap<String, Values>,
    /// True if a server runs.
    pub has_server: bool,
    /// Number of mounts.
    pub mount_count: u64,
    /// The mounts now, at most [`MOUNTS_MAX`].
    pub mounts_now: Vec<MountNow>,
    /// Layers that unpack to another digest than their image states.
    pub differing_layers: u64,
    /// The cache now; `None` while no server has it.
    pub cache_now: Option<CacheNow>,
}

/// A mount now.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
#[serde(default)]
pub struct MountNow {
    /// Its identity.
    pub id: String,
    /// The image, as the user typed it.
    pub image: String,
    /// Its mount point.
    pub target: String,
    /// Its store.
    pub store: String,
    /// Its transport.
    pub transport: String,
    /// It is served.
    pub is_serving: bool,
    /// Bytes of data in the image.
    pub data_bytes: u64,
    /// Bytes of these that are local, if the server has told.
    pub local_bytes: Option<u64>,
    /// Reads that wait for a chunk, over all mounts of the image.
    pub waiting_readers: Option<u64>,
    /// Chunks in flight, over all mounts of the image.
    pub in_flight: Option<u64>,
    /// Bytes reserved for its writes.
    pub reserved_bytes: u64,
}

/// The cache now, in bytes.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
#[serde(default)]
pub struct CacheNow {
    /// Taken.
    pub used: u64,
    /// Most that it may take now.
    pub limit: u64,
    /// Left free on its file system.
    pub floor: u64,
    /// Free on its file system.
    pub free: u64,
    /// Kept by pins.
    pub held: u64,
    /// Bytes of chunks that share their space with plain files.
    pub lent: u64,
    /// Chunks, a number.
    pub chunks: u64,
    /// Bytes of reads in the last hour that local bytes alone have answered.
    pub hit_in_an_hour: u64,
    /// Bytes of the others.
    pub miss_in_an_hour: u64,
}

impl MountNow {
    /// The same with texts as labels show them: a snapshot of many mounts is one message.
    pub fn shortened(mut self) -> Self {
        for text in [&mut self.image, &mut self.target, &mut self.store] {
            *text = label(text).into_owned();
        }
        self
    }
}

impl MetricsSnapshot {
    /// The number of stores of present mounts that have no values of their own.
    pub fn stores_in_other(&self) -> u64 {
        let stores: BTreeSet<_> = self.mounts_now.iter().map(|mount| &mount.store).collect();
        let shares = |store: &&&String| !self.stores.contains_key(store.as_str());
        // The store of a new mount is unknown until the next totals are durable.
        match self.stores.contains_key(OTHER_STORES) {
            true => stores.iter().filter(shares).count() as u64,
            false => 0,
        }
    }

    /// Takes the totals, which must be durable.
    pub fn with_totals(mut self, totals: &Totals) -> Self {
        self.since_unix_seconds = totals.since_unix_seconds;
        self.written_unix_seconds = totals.seen_unix_seconds;
        self.server_starts = totals.server_starts;
        self.cache = totals.cache;
        let stores = totals.stores().iter();
        // As in `MountNow::shortened`.
        self.stores = stores.map(|(key, it)| (label(key).into_owned(), it.clone())).collect();
        self.mounts = totals.mounts().into_iter().take(MOUNTS_MAX).collect();
        self
    }
}
