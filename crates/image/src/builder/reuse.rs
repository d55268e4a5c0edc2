use std::collections::HashMap;

use burgeon_block::{ByteRange, Digest, ObjectId, ObjectKind, ObjectStore, Result};

use super::BuildOptions;
use crate::{Codec, ManifestLimits, catalog, manifest::Manifest};

/// Chunks that the store already holds and a build need not store again.
///
/// The index is the manifests: a chunk counts as stored if a manifest of the store locates it in
/// a pack that exists and is long enough. Invariant: only manifests count whose chunks this host
/// has stored or verified. Any other manifest may be wrong about a chunk's position, because its
/// author lied or its store is damaged, and the new image would be unreadable. Reading each chunk
/// before reusing it would also be safe, but costs a fetch per chunk if the store is a bucket.
///
/// A manifest that cannot be read is skipped: reusing less is always safe. The writer's lease
/// keeps a collector from removing the chunks found here.
#[derive(Default)]
pub(super) struct Known {
    pub(super) objects: Vec<ObjectId>,
    pub(super) chunks: Vec<KnownChunk>,
    index: HashMap<Digest, u32>,
}

pub(super) struct KnownChunk {
    pub(super) object: u32,
    pub(super) stored: ByteRange,
    pub(super) codec: Codec,
    blocks: u8,
}

impl Known {
    /// Reads the manifests of `store` that this host trusts, in the order of their digests. If
    /// two contain a chunk, the first wins, so that the same store gives the same image.
    pub(super) fn read(store: &impl ObjectStore, options: &BuildOptions) -> Result<Self> {
        let mut known = Self::default();
        let Some(provenance) = options.provenance.as_ref().filter(|_| options.reuse) else {
            return Ok(known);
        };
        let mut object_numbers: HashMap<ObjectId, Option<(u32, u64)>> = HashMap::new();
        for name in store.list("manifests")? {
            let digest = name.digest(ObjectKind::Manifest);
            let Some(digest) = digest.filter(|digest| provenance.of(digest).has_sound_chunks())
            else {
                continue;
            };
            // Compared with its digest: another host may have written something else there.
            let Ok(bytes) = catalog::load_bytes(store, &digest) else { continue };
            let Ok((chunks, objects)) = Manifest::decode_chunks(&bytes, &ManifestLimits::default())
            else {
                continue;
            };
            let mut numbers = Vec::with_capacity(objects.len());
            for object in objects {
                if let Some(number) = object_numbers.get(&object) {
                    numbers.push(*number);
                    continue;
                }
                let usable = object.is(ObjectKind::Pack);
                let len = if usable { store.len(&object)? } else { None };
                let number = len.map(|len| {
                    known.objects.push(object.clone());
                    (known.objects.len() as u32 - 1, len)
                });
                object_numbers.insert(object, number);
                numbers.push(number);
            }
            for chunk in chunks {
                let Some((object, len)) = numbers[chunk.object as usize] else { continue };
                if chunk.stored.end() > len {
                    continue;
                }
                let next = known.chunks.len() as u32;
                known.index.entry(chunk.digest).or_insert_with(|| {
                    let (stored, codec, blocks) = (chunk.stored, chunk.codec, chunk.blocks);
                    known.chunks.push(KnownChunk { object, stored, codec, blocks });
                    next
                });
            }
        }
        Ok(known)
    }

    /// The chunk with `digest`, if the store holds it.
    pub(super) fn find(&self, digest: &Digest, blocks: u8) -> Option<u32> {
        let index = *self.index.get(digest)?;
        (self.chunks[index as usize].blocks == blocks).then_some(index)
    }
}
