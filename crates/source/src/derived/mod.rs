//! Derived objects: the data of an OCI image, read from its layers as they are.
//!
//! ```text
//!   derived/<digest>, a range ──► its table ──► stretches ──► spans of layers ──► unpacked, cut
//!                                    │                            │
//!                    store: derived/<digest>, origins/<digest> ───┼─► registry or OCI layout
//!                           layers/<sha-256> ─────────────────────┘
//! ```
//!
//! The table is an object of the store, named by its digest. The place of the layers belongs to
//! the host, not to the table: `origins/<digest>`. A stored layer is read from the store, and from
//! its origin only if that fails; `held/<digest>` lists the stored layers that the image needs.
//!
//! Invariants: a table is used only if it matches its digest; a read unpacks only a few spans at a
//! time, each of at most 32 MiB. Data of layers that were read whole to make the table is not
//! verified here: chunks have digests, and the reader reports a wrong one. Data of layers known
//! only by their table of contents (TOC) is verified when it is unpacked, because nothing else can
//! verify it.

mod layers;
mod spans;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use burgeon_block::{
    ByteRange, Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result,
};
use burgeon_layer::{Span, TABLE_MAX, Table};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::sync::OnceCell;

pub use self::layers::{LayersAt, layer_object};
use self::{
    layers::{Blobs, ORIGIN_MAX},
    spans::{Key, Spans},
};
use crate::{Access, Store, blocking, check_len};

/// Most objects whose tables are kept, each of at most 256 MiB.
const OPENED_MAX: usize = 4;
/// Most spans that one read requests at a time.
const SPANS_AT_ONCE: usize = 4;

/// The derived object of the table `bytes`, named by their digest.
pub fn derived_object(table: &[u8]) -> Result<ObjectId> {
    ObjectKind::Derived.object(Digest::of(table))
}

/// The object with the place of the layers of the derived `object`.
pub fn origin_object(object: &ObjectId) -> Result<ObjectId> {
    companion(object, ObjectKind::Origins)
}

/// The object that lists the layers of the derived `object`, one a line, in the order of its table.
/// It is made once all of them were stored; some may have been evicted since.
pub fn stored_layers_object(object: &ObjectId) -> Result<ObjectId> {
    companion(object, ObjectKind::StoredLayers)
}

/// The place of the layers of the derived `object` of `store`.
pub fn layers_at(store: &Store, object: &ObjectId) -> Result<LayersAt> {
    let origin = store.get(&origin_object(object)?, ORIGIN_MAX)?;
    LayersAt::parse(&String::from_utf8_lossy(&origin))
}

fn companion(object: &ObjectId, kind: ObjectKind) -> Result<ObjectId> {
    match object.below(ObjectKind::Derived) {
        Some(digest) => kind.object(digest),
        None => {
            Err(Error::new(ErrorKind::Invalid, format!("{object} has no record of its layers")))
        }
    }
}

/// Reads derived objects, whose tables are in a store.
pub(crate) struct Derived {
    store: Store,
    access: Access,
    opened: Mutex<HashMap<ObjectId, Arc<OnceCell<Arc<Opened>>>>>,
}

/// An object that has been read from.
struct Opened {
    table: Table,
    layers: Blobs,
    spans: Spans,
    /// Spans with wrong content: they are not read from stored layers again.
    refuted: Mutex<HashSet<Key>>,
}

impl Derived {
    /// Reads from `store`; layers in registries with the credentials in `access`.
    pub(crate) fn new(store: Store, access: Access) -> Self {
        Self { store, access, opened: Mutex::default() }
    }

    /// The bytes of `range` of `object`.
    pub(crate) async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let len = check_len(object, range)?;
        let opened = self.open(object).await?;
        if range.end() > opened.table.object_len {
            return Err(crate::too_short(object, range));
        }
        let mut out = vec![0; len];
        let (mut wanted, mut copies) = (Vec::new(), Vec::new());
        for (layer, span, parts) in parts(&opened.table, range) {
            wanted.push(Arc::clone(&opened).unpacked(layer, span));
            copies.push(parts);
        }
        // In order, a few at a time.
        let mut unpacked = stream::iter(wanted).buffered(SPANS_AT_ONCE);
        for parts in copies {
            let Some(bytes) = unpacked.try_next().await? else { break };
            for copy in parts {
                let from = &bytes[copy.from..copy.from + copy.len];
                out[copy.to..copy.to + copy.len].copy_from_slice(from);
            }
        }
        Ok(out.into())
    }

    /// The identity of the bytes of `range` of `object`, if [`Self::read`] verifies all of them.
    pub(crate) async fn identity(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<Option<Digest>> {
        let opened = self.open(object).await?;
        let is_inside = range.end() <= opened.table.object_len;
        Ok(is_inside.then(|| opened.table.identity(range)).flatten())
    }

    /// Bytes of layers that a read of `range` has to fetch, without spans that are here or being
    /// fetched.
    pub(crate) fn bytes_to_fetch(&self, object: &ObjectId, range: ByteRange) -> u64 {
        let opened = {
            let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            opened.get(object).and_then(|cell| cell.get().cloned())
        };
        let Some(opened) = opened else { return range.len() };
        // Other spans may lie between two parts of one span.
        let mut counted = HashSet::new();
        let spans = parts(&opened.table, range).into_iter();
        let absent = spans.filter(|(layer, span, _)| {
            let key = (*layer, span.index);
            counted.insert(key) && !opened.spans.has(key)
        });
        absent.map(|(_, span, _)| span.compressed.len()).sum()
    }

    /// Reports that the data of `range` was wrong: its spans are read again, from their origin.
    pub(crate) fn refuted(&self, object: &ObjectId, range: ByteRange) {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(opened) = opened.get(object).and_then(|cell| cell.get()) else { return };
        let mut refuted = opened.refuted.lock().unwrap_or_else(PoisonError::into_inner);
        for (layer, span, _) in parts(&opened.table, range) {
            refuted.insert((layer, span.index));
            opened.spans.forget((layer, span.index));
        }
    }

    async fn open(&self, object: &ObjectId) -> Result<Arc<Opened>> {
        let cell = {
            let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            // An image has one such object.
            if opened.len() >= OPENED_MAX && !opened.contains_key(object) {
                opened.clear();
            }
            Arc::clone(opened.entry(object.clone()).or_default())
        };
        let opened = cell.get_or_try_init(|| async {
            let (store, access, object) = (self.store.clone(), self.access.clone(), object.clone());
            blocking(move || Opened::read(&store, &access, &object).map(Arc::new)).await
        });
        opened.await.cloned()
    }
}

impl fmt::Debug for Derived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Derived").field(&self.store).finish()
    }
}

impl Opened {
    fn read(store: &Store, access: &Access, object: &ObjectId) -> Result<Self> {
        let bytes = store.get(object, TABLE_MAX)?;
        if derived_object(&bytes)? != *object {
            let what = format!("{object} of the store does not match its digest");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let table = Table::decode(&bytes)?;
        let at = layers_at(store, object)?;
        let stored = match store {
            Store::Directory(directory) => Some(directory.clone()),
            _ => None,
        };
        let layers = Blobs::open(at, access, (stored, stored_layers_object(object)?))?;
        Ok(Self { table, layers, spans: Spans::new(), refuted: Mutex::default() })
    }

    /// Reads and unpacks `span` of a layer.
    async fn unpacked(self: Arc<Self>, layer: u32, span: Span) -> Result<Bytes> {
        let this = Arc::clone(&self);
        let make = async move {
            let digest = &this.table.layers[layer as usize].digest;
            if !this.is_refuted((layer, span.index))
                && let Some(bytes) = this.layers.stored(layer, span.compressed).await?
            {
                match Arc::clone(&this).unpack(layer, span, bytes).await {
                    Ok(unpacked) => return Ok(unpacked),
                    Err(error) => {
                        let (object, range) =
                            (format!("sha256:{}", layers::hex(digest)), span.compressed);
                        let what = "a stored layer is damaged: reading it where it came from";
                        tracing::error!(%object, %range, %error, "{what}");
                    }
                }
            }
            let bytes = this.layers.read(digest, span.compressed).await?;
            this.unpack(layer, span, bytes).await
        };
        let len = span.compressed.len() + span.unpacked.len();
        self.spans.get((layer, span.index), len, make).await
    }

    fn is_refuted(&self, key: Key) -> bool {
        self.refuted.lock().unwrap_or_else(PoisonError::into_inner).contains(&key)
    }

    async fn unpack(self: Arc<Self>, layer: u32, span: Span, bytes: Bytes) -> Result<Bytes> {
        let unpack = move || {
            let restarts = &self.table.layers[layer as usize].restarts;
            restarts.unpack(&span, &bytes).map(Bytes::from)
        };
        blocking(unpack).await
    }
}

/// Bytes of a span to copy into an answer.
struct Copy {
    from: usize,
    to: usize,
    len: usize,
}

/// The spans of layers that hold `range`, with the parts to copy from each.
fn parts(table: &Table, range: ByteRange) -> Vec<(u32, Span, Vec<Copy>)> {
    let mut parts: Vec<(u32, Span, Vec<Copy>)> = Vec::new();
    for stretch in table.stretches(range) {
        let mut at = stretch.at.max(range.start());
        let end = stretch.end().min(range.end());
        while at < end {
            let offset = stretch.offset + (at - stretch.at);
            // A stretch lies within its layer.
            let Some(span) = table.layers[stretch.layer as usize].restarts.span(offset) else {
                break;
            };
            let len = (end - at).min(span.unpacked.end() - offset);
            let copy = Copy {
                from: (offset - span.unpacked.start()) as usize,
                to: (at - range.start()) as usize,
                len: len as usize,
            };
            at += len;
            match parts.last_mut() {
                Some((layer, last, copies))
                    if (*layer, last.index) == (stretch.layer, span.index) =>
                {
                    copies.push(copy);
                }
                _ => parts.push((stretch.layer, span, vec![copy])),
            }
        }
    }
    parts
}
