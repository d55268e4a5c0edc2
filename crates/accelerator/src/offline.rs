//! Writes back the dirty blocks of a device that is not attached, without serving it: after a power
//! loss in a rescue system, or before the cache device is taken out.
//!
//! ```text
//!   claims of cache and slow device ─► the checks of an attachment ─► log ─► slow device ─► durable
//! ```
//!
//! Invariants: nobody else has either device meanwhile; a device that may be another one is not
//! written to; after an error or a death, the blocks stay in the cache.

use std::sync::Arc;

use burgeon_accelerate::{
    CacheStore, CachedDevice, DeviceOptions, Dirty, Mode, Trust, policy::PolicyKind,
};
use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};

use crate::{
    announced::withdraw,
    dirty::{Owners, record_distrust, refuse_elsewhere},
    disk::Disk,
    folder::CacheFolder,
};

/// Blocks that are written back at once: 8 MiB.
const BLOCKS_AT_ONCE: usize = 2048;

/// Writes back all dirty blocks of the device `name`; returns their bytes. `NotFound` if the cache
/// has none, `Unavailable` if the cache is served or a device is in use, `Invalid` if the slow
/// device or the cache device is another one, `LocalIo` if the cache device has failed.
pub fn flush(folder: &CacheFolder, name: &str) -> Result<u64> {
    let cache = folder.name();
    if folder.is_served() {
        let what = format!(
            "the cache {cache} is in use: attach {name}, and use `burgeon accelerate flush {name}` \
             without --offline"
        );
        return Err(Error::new(ErrorKind::Unavailable, what));
    }
    let owners = Owners::at(&folder.owners());
    let missing = || {
        let what = format!("the cache {cache} has no dirty blocks of a device {name}");
        Error::new(ErrorKind::NotFound, what)
    };
    let owner = owners.get(name).ok_or_else(missing)?;
    if folder.distrust().exists() {
        let what = format!(
            "the device of the cache {cache} has failed while it was in use: attach {name}, which \
             tells what is lost"
        );
        return Err(Error::new(ErrorKind::LocalIo, what));
    }
    let slow = Disk::open(&owner.slow)?;
    refuse_elsewhere(folder, name, &slow)?;
    let store = open(folder)?;
    owners.check(store.id(), |_| false)?;
    let is_changed = owners.is_changed(name, &slow, false)?;
    let options = DeviceOptions { is_changed, ..DeviceOptions::new(Mode::WriteThrough) };
    let cached = CachedDevice::attach(store.clone(), slow, name, Trust::Cold, options)?;
    let (bytes, all) = (cached.dirty() * BLOCK_SIZE, store.log_position());
    while cached.write_back(all, BLOCKS_AT_ONCE)? > 0 {}
    cached.flush()?;
    cached.tidy()?;
    if cached.is_settled() {
        owners.remove(name);
        // It may be used again.
        withdraw(name, cached.slow());
    }
    Ok(bytes)
}

fn open(folder: &CacheFolder) -> Result<Arc<CacheStore<Disk>>> {
    let file = Disk::open(&folder.cache()?)?;
    let (size, place) = (file.size(), folder.distrust());
    let distrust = Box::new(move |dirty: &[Dirty]| record_distrust(&place, dirty));
    let store = CacheStore::open(file, size, Trust::Cold, PolicyKind::Clock, distrust)?;
    if folder.is_its_cache(store.id()) {
        return Ok(Arc::new(store));
    }
    let what = format!(
        "{} is not the device that the cache {} was made on",
        store.file().path().display(),
        folder.name()
    );
    Err(Error::new(ErrorKind::Invalid, what))
}
