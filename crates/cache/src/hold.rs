//! Chunks that are kept from eviction while somebody needs them.

use std::sync::Arc;

use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    ChunkKey, Hold,
    shared::{Shared, lock},
};

/// Most that all holds keep, of a cache with this limit.
pub(crate) fn most(limit: u64) -> u64 {
    limit / 5 * 4
}

struct Release {
    shared: Arc<Shared>,
    keys: Vec<ChunkKey>,
}

impl Drop for Release {
    fn drop(&mut self) {
        for key in &self.keys {
            let mut admin = lock(&self.shared.admin);
            let Some(count) = admin.held.get_mut(key) else { continue };
            *count -= 1;
            if *count == 0 {
                admin.held.remove(key);
                let bytes = self.shared.counted_len_of(key, &admin);
                admin.held_bytes = admin.held_bytes.saturating_sub(bytes);
            }
        }
    }
}

/// Holds `keys`; those that are not here are held when they come.
pub(crate) fn take(shared: &Arc<Shared>, keys: &[ChunkKey]) -> Result<Hold> {
    let space = shared.disk.space()?;
    let mut admin = lock(&shared.admin);
    let most = most(shared.bounds(space, admin.used, 0).limit);
    let is_too_much = |wanted: u64, before: u64| wanted > most && wanted > before;
    let mut wanted = admin.held_bytes;
    let mut taken = 0;
    for key in keys {
        let count = admin.held.entry(*key).or_default();
        *count += 1;
        let is_first = *count == 1;
        taken += 1;
        wanted += if is_first { shared.counted_len_of(key, &admin) } else { 0 };
        // The limit may have become smaller than the holds: those that are there stay.
        if is_too_much(wanted, admin.held_bytes) {
            break;
        }
    }
    let before = std::mem::replace(&mut admin.held_bytes, wanted);
    drop(admin);
    let release = Release { shared: shared.clone(), keys: keys[..taken].to_vec() };
    if is_too_much(wanted, before) {
        drop(release);
        let what = format!(
            "cannot keep {} bytes more in the cache: {before} of the {most} bytes that may be kept \
             are taken; raise the limit, or unpin other files",
            wanted - before
        );
        return Err(Error::new(ErrorKind::NoSpace, what));
    }
    Ok(Hold::new(release))
}
