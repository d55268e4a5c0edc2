//! Lifetime totals: what all mounts of this host have counted, kept over restarts.
//!
//! ```text
//!   look ──► a mount's counters ─ minus those of the last look ─► its store's total
//!                                                              └► its own total
//!   encode ──► a file, durably ──► only then a snapshot shows them
//! ```
//!
//! The last seen counters are part of the file. So a supervisor that starts while mounts are served
//! counts each read once, and a crash loses what was counted since the last look, at most.
//!
//! Invariants: no total goes down (`tests`); at most [`STORES_MAX`] stores have totals of their
//! own.

use std::collections::BTreeMap;

use burgeon_block::{Digest, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::values::{CacheValues, Values};

/// Stores with totals of their own; those that come later share one, [`OTHER_STORES`].
pub const STORES_MAX: usize = 20;

/// The name of all other stores.
pub const OTHER_STORES: &str = "other";

/// The longest file of totals, in bytes. Two thousand mounts take 1.4 MB, and 10 MB if the name of
/// each one's store is as long as a path can be.
pub const TOTALS_MAX: usize = 64 << 20;

const MAGIC: &str = "burgeon totals ";
const VERSION: &str = "1";

/// All totals.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// The time of the first look, in seconds since 1970.
    pub since_unix_seconds: u64,
    /// The time of the last look.
    pub seen_unix_seconds: u64,
    /// Servers started.
    pub server_starts: u64,
    /// The cache, of all servers.
    pub cache: CacheValues,
    stores: BTreeMap<String, Values>,
    mounts: BTreeMap<String, Mount>,
    server: Server,
}

/// A mount that is there.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Mount {
    /// The key of its store.
    store: String,
    /// Its counters at the last look.
    seen: Values,
    /// Those of counters that it had before.
    #[serde(default, skip_serializing_if = "Values::is_zero")]
    before: Values,
}

/// The server at the last look.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Server {
    pid: u32,
    cache: CacheValues,
}

impl Totals {
    /// Totals that count from a time on, in seconds since 1970.
    pub fn from(since_unix_seconds: u64) -> Self {
        Self { since_unix_seconds, ..Self::default() }
    }

    /// True if both have the same figures, whenever they were seen.
    pub fn is_same(&self, other: &Self) -> bool {
        *self == Self { seen_unix_seconds: self.seen_unix_seconds, ..other.clone() }
    }

    /// Adds what a mount has counted since the last look. `store` is shown to users.
    pub fn look(&mut self, mount: &str, store: &str, now: Values) {
        let key = self.store_key(store);
        let entry = self.mounts.entry(mount.to_owned());
        let entry = entry.or_insert_with(|| Mount { store: key, ..Mount::default() });
        let new = match now.since(&entry.seen) {
            Some(new) => new,
            None => {
                entry.before.add(&entry.seen);
                now.clone()
            }
        };
        entry.seen = now;
        self.stores.entry(entry.store.clone()).or_default().add(&new);
    }

    /// Adds what the cache of the server `pid` has counted since the last look.
    pub fn look_at_cache(&mut self, pid: u32, now: CacheValues) {
        self.look_at_server(pid);
        let new = now.since(self.server.cache).unwrap_or(now);
        self.server.cache = now;
        self.cache = self.cache.plus(new);
    }

    /// Counts a server that is not that of the last look.
    pub fn look_at_server(&mut self, pid: u32) {
        if self.server.pid != pid {
            self.server = Server { pid, cache: CacheValues::default() };
            self.server_starts = self.server_starts.saturating_add(1);
        }
    }

    /// Forgets the mounts for which `is_gone` holds. Their stores keep what they have counted.
    pub fn forget(&mut self, is_gone: impl Fn(&str) -> bool) {
        self.mounts.retain(|mount, _| !is_gone(mount));
    }

    /// True if the mount was not forgotten.
    pub fn has(&self, mount: &str) -> bool {
        self.mounts.contains_key(mount)
    }

    /// The totals of each store.
    pub fn stores(&self) -> &BTreeMap<String, Values> {
        &self.stores
    }

    /// The totals of each mount.
    pub fn mounts(&self) -> BTreeMap<String, Values> {
        let total = |mount: &Mount| {
            let mut total = mount.before.clone();
            total.add(&mount.seen);
            total
        };
        self.mounts.iter().map(|(id, mount)| (id.clone(), total(mount))).collect()
    }

    fn store_key(&self, store: &str) -> String {
        let own = self.stores.keys().filter(|key| *key != OTHER_STORES).count();
        match self.stores.contains_key(store) || own < STORES_MAX {
            true => store.to_owned(),
            false => OTHER_STORES.to_owned(),
        }
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let failed = |e| Error::with_source(ErrorKind::Invalid, "cannot describe the totals", e);
        let body = serde_json::to_vec(self).map_err(failed)?;
        let head = format!("{MAGIC}{VERSION} {}\n", Digest::of(&body));
        // A longer file would be taken for a damaged one when it is read.
        if head.len() + body.len() > TOTALS_MAX {
            let what = format!("the totals of {} mounts do not fit", self.mounts.len());
            return Err(Error::new(ErrorKind::OverLimit, what));
        }
        Ok([head.as_bytes(), &body].concat())
    }

    /// Reads the bytes of the file.
    pub fn from_file(bytes: &[u8]) -> Result<Self> {
        let damaged = |why: &str| Error::new(ErrorKind::Corrupt, format!("it is damaged: {why}"));
        let end = bytes.iter().take(200).position(|byte| *byte == b'\n');
        let (head, rest) = bytes.split_at(end.ok_or_else(|| damaged("it has no head"))?);
        let rest = &rest[1..];
        let head = str::from_utf8(head).ok().and_then(|head| head.strip_prefix(MAGIC));
        match head.and_then(|head| head.split_once(' ')) {
            Some((VERSION, digest)) if digest == Digest::of(rest).to_string() => {}
            Some((VERSION, _)) => return Err(damaged("its digest differs")),
            Some((version, _)) => {
                let what = format!("it is of version {version}: upgrade burgeon");
                return Err(Error::new(ErrorKind::UnsupportedFormat, what));
            }
            None => return Err(damaged("another head")),
        }
        serde_json::from_slice(rest).map_err(|e| damaged(&e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Counters, ErrorKind};

    use super::{OTHER_STORES, STORES_MAX, Totals};
    use crate::values::{CacheValues, ReadTier, Values};

    fn hits(bytes: u64) -> Values {
        let counters = Counters::default();
        counters.hit_bytes.add(bytes);
        counters.hit_latency.record(1000);
        Values::of(&counters)
    }

    fn bytes(totals: &Totals, store: &str) -> u64 {
        totals.stores()[store].bytes(ReadTier::Cache)
    }

    fn reread(totals: &Totals) -> Totals {
        Totals::from_file(&totals.encode().unwrap()).unwrap()
    }

    #[test]
    fn each_read_counts_once_over_restarts_and_new_counters() {
        let mut totals = Totals::default();
        totals.look("a", "/s", hits(100));
        // The supervisor starts again; the mount's counters are still there.
        let mut totals = reread(&totals);
        totals.look("a", "/s", hits(130));
        assert_eq!((bytes(&totals, "/s"), totals.mounts()["a"].bytes(ReadTier::Cache)), (130, 130));
        // The counters were made anew.
        totals.look("a", "/s", hits(7));
        let mut totals = reread(&totals);
        totals.look("a", "/s", hits(9));
        assert_eq!((bytes(&totals, "/s"), totals.mounts()["a"].bytes(ReadTier::Cache)), (139, 139));
        totals.forget(|mount| mount == "a");
        assert_eq!((bytes(&totals, "/s"), totals.mounts().len()), (139, 0));
    }

    #[test]
    fn totals_pass_every_power_of_two_and_saturate() {
        for start in [1u64 << 32, 1 << 53, u64::MAX - 5] {
            let mut totals = Totals::default();
            totals.look("a", "/s", hits(start - 1));
            let mut totals = reread(&totals);
            totals.look("a", "/s", hits(start + 1));
            assert_eq!(bytes(&reread(&totals), "/s"), start + 1);
            totals.look("b", "/s", hits(100));
            assert_eq!(bytes(&totals, "/s"), (start + 1).saturating_add(100));
        }
    }

    #[test]
    fn later_stores_share_one_total_and_keep_it() {
        let mut totals = Totals::default();
        for number in 0..STORES_MAX + 3 {
            totals.look(&format!("m{number}"), &format!("s3://{number}"), hits(1));
        }
        assert_eq!(totals.stores().len(), STORES_MAX + 1);
        assert_eq!(bytes(&totals, OTHER_STORES), 3);
        let last = STORES_MAX + 1;
        totals.look(&format!("m{last}"), &format!("s3://{last}"), hits(5));
        assert_eq!(bytes(&totals, OTHER_STORES), 7);
    }

    #[test]
    fn the_cache_of_each_server_is_added() {
        let values = |admitted| CacheValues { admitted, ..CacheValues::default() };
        let mut totals = Totals::default();
        totals.look_at_cache(7, values(10));
        totals.look_at_cache(7, values(15));
        // More than the last one's: only the process tells them apart.
        totals.look_at_cache(8, values(20));
        assert_eq!((totals.cache.admitted, totals.server_starts), (35, 2));
    }

    #[test]
    fn damage_is_noticed() {
        let mut totals = Totals::default();
        totals.look("a", "/s", hits(1 << 60));
        let sound = totals.encode().unwrap();
        for at in 0..sound.len() {
            let mut damaged = sound.clone();
            damaged[at] ^= 4;
            let error = Totals::from_file(&damaged).unwrap_err();
            let kinds = [ErrorKind::Corrupt, ErrorKind::UnsupportedFormat];
            assert!(kinds.contains(&error.kind()), "{at}: {error}");
        }
        // A value that a later version has added is left out.
        let text = String::from_utf8(serde_json::to_vec(&hits(3)).unwrap()).unwrap();
        let longer: Values = serde_json::from_str(&text.replace(']', ",99]")).unwrap();
        assert_eq!(longer, hits(3));
    }
}
