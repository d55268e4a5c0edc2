//! Derived objects: what an image's data is of the layers of an ordinary image, read from these as
//! they are.
//!
//! ```text
//!   derived/<digest>, a range ──► its table ──► stretches ──► spans of layers ──► unpacked, cut out
//!                                    │                            │
//!                    store: derived/<digest>, origins/<digest> ───┼─► registry or OCI layout
//!                           layers/<sha-256> ─────────────────────┘
//! ```
//!
//! The table is an object of the store under its digest. Where the layers are is no part of it, but
//! of this host: `origins/<digest>`. Layers that the store holds as they came are read there, and
//! elsewhere only when that fails; `held/<digest>` lists those that the image needs. Invariants: a
//! table is used only if it matches its digest; a read makes no more than a few spans at a time, each
//! of at most 32 MiB. What comes back of layers that were read is not verified here: chunks have
//! digests, and who finds one wrong says so. Of layers that are known by their tables of contents it
//! is, where it is unpacked: nobody else can.

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

/// Objects whose tables are kept, each of at most 256 MiB.
const OPENED_MAX: usize = 4;
/// Spans that one read asks for at a time.
const SPANS_AT_ONCE: usize = 4;

/// The object of the table `bytes`, whose name is the name of the derived object.
pub fn derived_object(table: &[u8]) -> Result<ObjectId> {
    ObjectKind::Derived.object(Digest::of(table))
}

/// The object that says where the layers of the derived `object` are.
pub fn origin_object(object: &ObjectId) -> Result<ObjectId> {
    beside(object, ObjectKind::Origins)
}

/// The object that lists the layers of the derived `object`, one a line, where all of them are held.
pub fn held_object(object: &ObjectId) -> Result<ObjectId> {
    beside(object, ObjectKind::Held)
}

fn beside(object: &ObjectId, kind: ObjectKind) -> Result<ObjectId> {
    match object.below(ObjectKind::Derived) {
        Some(digest) => kind.object(digest),
        None => Err(Error::new(ErrorKind::Invalid, format!("{object} is derived from nothing"))),
    }
}

/// Reads derived objects, whose tables are in a store.
pub(crate) struct Derived {
    store: Store,
    access: Access,
    opened: Mutex<HashMap<ObjectId, Arc<OnceCell<Arc<Opened>>>>>,
}

/// An object of which something was read.
struct Opened {
    table: Table,
    layers: Blobs,
    spans: Spans,
    /// Spans that were not what was stored: they are not read from layers that are held.
    refuted: Mutex<HashSet<Key>>,
}

impl Derived {
    /// Of `store`; layers in registries are read with what `access` holds.
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
        // In order, and a few ahead.
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

    /// Bytes of layers that a read of `range` has to fetch: none of spans that are here, or coming.
    pub(crate) fn bytes_to_fetch(&self, object: &ObjectId, range: ByteRange) -> u64 {
        let opened = {
            let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            opened.get(object).and_then(|cell| cell.get().cloned())
        };
        let Some(opened) = opened else { return range.len() };
        // A span may have bytes of others between its own.
        let mut counted = HashSet::new();
        let spans = parts(&opened.table, range).into_iter();
        let absent = spans.filter(|(layer, span, _)| {
            let key = (*layer, span.index);
            counted.insert(key) && !opened.spans.has(key)
        });
        absent.map(|(_, span, _)| span.compressed.len()).sum()
    }

    /// What was read of `range` was wrong: the spans that it is of are read anew, where they came from.
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
        let origin = store.get(&origin_object(object)?, ORIGIN_MAX)?;
        let at = LayersAt::parse(&String::from_utf8_lossy(&origin))?;
        let held = match store {
            Store::Directory(directory) => Some(directory.clone()),
            _ => None,
        };
        let layers = Blobs::open(at, access, held)?;
        Ok(Self { table, layers, spans: Spans::new(), refuted: Mutex::default() })
    }

    /// The span `span` of a layer.
    async fn unpacked(self: Arc<Self>, layer: u32, span: Span) -> Result<Bytes> {
        let this = Arc::clone(&self);
        let make = async move {
            let digest = &this.table.layers[layer as usize].digest;
            if !this.is_refuted((layer, span.index))
                && let Some(bytes) = this.layers.held(digest, span.compressed).await?
            {
                match Arc::clone(&this).unpack(layer, span, bytes).await {
                    Ok(unpacked) => return Ok(unpacked),
                    Err(error) => {
                        let (object, range) = (layer_object(digest)?, span.compressed);
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

/// Bytes of a span that go into an answer.
struct Copy {
    from: usize,
    to: usize,
    len: usize,
}

/// Which spans of which layers hold `range`, and what of them goes where.
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
