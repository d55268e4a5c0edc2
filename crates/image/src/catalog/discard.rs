//! Cleans up after a failed build.

use std::{collections::HashSet, sync::Mutex, sync::PoisonError};

use burgeon_block::{Error, ErrorKind, ObjectId, ObjectStore, Result};

use crate::{
    ManifestLimits,
    manifest::{ENCODED_MAX, Manifest},
};

/// Packs that one build has added to its store.
#[derive(Default)]
pub(crate) struct Added(Mutex<Vec<ObjectId>>);

impl Added {
    pub(crate) fn push(&self, pack: ObjectId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(pack);
    }

    fn into_packs(self) -> Vec<ObjectId> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the packs that a failed build has `added` to `store`; its lease must have been
/// released. Returns `error`, extended if a pack remains.
pub(crate) fn discard(store: &impl ObjectStore, added: Added, error: Error) -> Error {
    let packs = added.into_packs();
    if packs.is_empty() {
        return error;
    }
    let Err(why) = remove(store, &packs) else { return error };
    let what = format!(
        "the build has failed, and the {} packs that it has stored stay in the store until `burgeon gc` \
         removes them ({why})",
        packs.len()
    );
    Error::with_source(error.kind(), what, error)
}

/// Removes `packs`, except those that a manifest refers to: another build may have made the same
/// ones meanwhile.
fn remove(store: &impl ObjectStore, packs: &[ObjectId]) -> Result<()> {
    let collecting = store.begin_collect()?;
    if collecting.writers > 0 {
        let what = "another build is running, and may use them";
        return Err(Error::new(ErrorKind::Unavailable, what));
    }
    let mut needed = HashSet::new();
    for manifest in store.list("manifests")? {
        let bytes = store.get(&manifest, ENCODED_MAX)?;
        needed.extend(Manifest::decode_chunks(&bytes, &ManifestLimits::default())?.1);
    }
    packs.iter().filter(|pack| !needed.contains(*pack)).try_for_each(|pack| store.remove(pack))
}
