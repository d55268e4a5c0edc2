//! Root records: the manifests that each host needs of a store.
//!
//! An object `roots/<host>` lists the manifests that the host's writes, seeds and mounts depend
//! on. Invariant: a host publishes its record before it relies on a manifest, under a writer's
//! lease, and looks for the manifest afterwards. A collector never overlaps a writer's lease, so
//! it has either read the record or removed the manifest before the host looked.

use std::time::{SystemTime, UNIX_EPOCH};

use burgeon_block::{Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};
use serde::{Deserialize, Serialize};

use super::{
    manifest_object,
    names::{check_name, escape, unescape},
};

const FORMAT: u32 = 1;
/// Longest record: a hundred thousand manifests.
const RECORD_MAX: u64 = 8 << 20;

/// The needs of one host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostRoots {
    format: u32,
    /// The host's id, such as its machine id.
    pub host: String,
    /// Time the record was written, in seconds since 1970.
    pub written_s: u64,
    manifests: Vec<String>,
}

impl HostRoots {
    /// The record in `bytes`. `Corrupt` if it is damaged; `UnsupportedFormat` if it is of another
    /// version.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = |why: String| Error::new(ErrorKind::Corrupt, format!("is damaged ({why})"));
        let record: Self =
            serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        if record.format != FORMAT {
            let what = format!("has the unknown format {}", record.format);
            return Err(Error::new(ErrorKind::UnsupportedFormat, what));
        }
        record.digests().map_err(|error| damaged(error.to_string()))?;
        Ok(record)
    }

    /// The manifests.
    pub fn digests(&self) -> Result<Vec<Digest>> {
        self.manifests.iter().map(|digest| digest.parse()).collect()
    }
}

fn object(host: &str) -> Result<ObjectId> {
    check_name(host)?;
    ObjectKind::Roots.object(escape(host))
}

/// Publishes that `host` needs exactly the manifests `digests` of `store`; replaces its record.
/// `NotFound` if one of them does not exist: it was removed before the record was published.
pub fn publish_roots(store: &impl ObjectStore, host: &str, digests: &[Digest]) -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut manifests: Vec<String> = digests.iter().map(Digest::to_string).collect();
    manifests.sort();
    manifests.dedup();
    let (host_name, written_s) = (host.to_owned(), now.as_secs());
    let record = HostRoots { format: FORMAT, host: host_name, written_s, manifests };
    let mut line = serde_json::to_vec(&record)
        .map_err(|error| Error::with_source(ErrorKind::Invalid, "cannot write a record", error))?;
    line.push(b'\n');
    let _lease = store.begin_write()?;
    store.publish(&object(host)?, &line)?;
    for digest in digests {
        if store.len(&manifest_object(digest)?)?.is_none() {
            let what = format!("the store no longer has the manifest {digest}");
            return Err(Error::new(ErrorKind::NotFound, what));
        }
    }
    Ok(())
}

/// Removes the record of `host`, which will not use the store again.
pub fn forget_host(store: &impl ObjectStore, host: &str) -> Result<()> {
    store.remove(&object(host)?)
}

/// The record of `host`; `None` if it has none. Another host's record is not read, so a damaged one
/// keeps nobody from a mount. `Corrupt` if the record is damaged.
pub fn read_host_roots(store: &impl ObjectStore, host: &str) -> Result<Option<HostRoots>> {
    let object = object(host)?;
    let unreadable = |error: Error| {
        let what = format!("this host's record {object} of the images that it needs is unreadable");
        Error::with_source(error.kind(), what, error)
    };
    let bytes = match store.get(&object, RECORD_MAX) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // A store without any object looks like one that is away.
        Err(error) if error.kind() != ErrorKind::Corrupt && store.len(&object)?.is_none() => {
            return Ok(None);
        }
        bytes => bytes.map_err(unreadable)?,
    };
    HostRoots::decode(&bytes).map(Some).map_err(unreadable)
}

/// The records of all hosts. An unreadable one is an error: that host's needs are unknown, so
/// nothing may be removed.
pub fn read_roots(store: &impl ObjectStore) -> Result<Vec<HostRoots>> {
    let mut records = Vec::new();
    for object in store.list("roots")? {
        let name = object.below(ObjectKind::Roots).and_then(unescape);
        let unreadable = |kind, why: String| {
            let what = format!(
                "nothing can be removed from the store: {object}, the record of the images that a host \
                 needs, {why}; run `burgeon gc` with the store on that host to renew it, or remove it if \
                 the host is gone"
            );
            Error::new(kind, what)
        };
        if name.is_none() {
            return Err(unreadable(ErrorKind::Corrupt, "has no host's name".to_owned()));
        }
        let bytes = match store.get(&object, RECORD_MAX) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                return Err(unreadable(error.kind(), "is not a regular file".to_owned()));
            }
            bytes => bytes?,
        };
        let record = HostRoots::decode(&bytes)
            .map_err(|error| unreadable(error.kind(), error.to_string()))?;
        records.push(record);
    }
    Ok(records)
}
