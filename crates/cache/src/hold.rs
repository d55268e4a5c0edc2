use std::{fmt, sync::Arc};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};

use crate::{
    ChunkKey,
    cache::{Shared, lock},
};

/// Keeps chunks from eviction until it is dropped.
#[must_use = "the chunks are held as long as this lives"]
pub struct Hold {
    _release: Box<dyn Send + Sync>,
}

impl Hold {
    /// A hold that ends when `release` is dropped.
    pub fn new(release: impl Send + Sync + 'static) -> Self {
        Self { _release: Box::new(release) }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}

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
                admin.held_bytes = admin.held_bytes.saturating_sub(self.shared.len_of(key));
            }
        }
    }
}

/// Holds `keys`; those that are not here are held when they come.
pub(crate) fn take(shared: &Arc<Shared>, keys: &[ChunkKey]) -> Result<Hold> {
    let space = shared.disk.space()?;
    let mut admin = lock(&shared.admin);
    let most = most(shared.bounds(space, admin.used, 0).limit);
    let mut wanted = admin.held_bytes;
    let mut taken = 0;
    for key in keys {
        let count = admin.held.entry(*key).or_default();
        *count += 1;
        taken += 1;
        wanted += if *count == 1 { shared.len_of(key) } else { 0 };
        if wanted > most {
            break;
        }
    }
    let before = std::mem::replace(&mut admin.held_bytes, wanted);
    drop(admin);
    let release = Release { shared: shared.clone(), keys: keys[..taken].to_vec() };
    if wanted > most {
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

impl Shared {
    /// Bytes that the chunk with `key` takes on the disk.
    fn len_of(&self, key: &ChunkKey) -> u64 {
        let chunk = self.index.find(key, &self.slots).and_then(|slot| self.slots.chunk(slot));
        chunk.map_or(0, |chunk| u64::from(chunk.about.blocks()) * BLOCK_SIZE)
    }
}
