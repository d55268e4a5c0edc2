//! Trees of nodes: packs sorted items into leaves, and leaves under inner nodes.
//!
//! ```text
//!   items of a tree:  |segment 0      |segment 1   |segment 2 …     emitted in parallel
//!   leaves:           [ ][ ][ ][ ][ ] [ ][ ][ ][ ] [ ][ ] …         a segment begins a new leaf
//!   a tree's nodes:   leaves │ level 1 │ level 2 │ … root           consecutive addresses
//!
//!   leaf:   header │ item headers ► …zeros… ◄ item bodies
//! ```
//! The ends of segments depend on the input alone, so the bytes do not depend on the number of
//! threads. A segment aims at [`SEGMENT_BYTES`]: one write to the sink.

use burgeon_block::{ChecksumKind, Result};
use rayon::prelude::*;

use crate::{
    format::{
        FANOUT, FSID_AT, GENERATION, HEADER, ITEM_HEADER, KEY_POINTER, Key, LEAF_SPACE, NODE_SIZE,
        Put,
    },
    scratch::with_buffer,
};

/// Target size of a segment's items: large enough that the half-empty leaf at its end costs less
/// than one per cent and writes are large, small enough to keep every core busy.
pub(crate) const SEGMENT_BYTES: u64 = 1 << 20;

/// Takes a tree's items in order.
pub(crate) trait ItemOut {
    /// Adds an item of `len` bytes; `fill` is called at most once, to write all of them.
    fn item(&mut self, key: Key, len: usize, fill: impl FnOnce(&mut [u8]));
}

/// Returns a tree's items in order, segment by segment; the same ones on each call.
pub(crate) trait Items: Sync {
    fn segments(&self) -> usize;
    fn emit(&self, segment: usize, out: &mut impl ItemOut);
}

/// Items kept as bytes, for small trees.
pub(crate) struct ItemList(pub(crate) Vec<(Key, Vec<u8>)>);

impl ItemList {
    const SEGMENT: usize = 16384;
}

impl Items for ItemList {
    fn segments(&self) -> usize {
        self.0.len().div_ceil(Self::SEGMENT)
    }

    fn emit(&self, segment: usize, out: &mut impl ItemOut) {
        for (key, bytes) in self.0.iter().skip(segment * Self::SEGMENT).take(Self::SEGMENT) {
            out.item(*key, bytes.len(), |to| to.copy_from_slice(bytes));
        }
    }
}

/// Finds the first keys of leaves.
#[derive(Default)]
struct Planner {
    used: usize,
    first_keys: Vec<Key>,
}

impl ItemOut for Planner {
    fn item(&mut self, key: Key, len: usize, _: impl FnOnce(&mut [u8])) {
        debug_assert!(ITEM_HEADER + len <= LEAF_SPACE);
        if self.first_keys.is_empty() || self.used + ITEM_HEADER + len > LEAF_SPACE {
            self.first_keys.push(key);
            self.used = 0;
        }
        self.used += ITEM_HEADER + len;
    }
}

/// The first keys of the leaves of each segment in `segments`.
pub(crate) fn plan_segments(items: &impl Items, segments: std::ops::Range<usize>) -> Vec<Vec<Key>> {
    let plan = |segment| {
        let mut planner = Planner::default();
        items.emit(segment, &mut planner);
        planner.first_keys
    };
    segments.into_par_iter().map(plan).collect()
}

/// Number of nodes on each level of a tree with `leaves` leaves, leaves first.
pub(crate) fn levels(leaves: u64) -> Vec<u64> {
    let mut levels = vec![leaves.max(1)];
    while let Some(&last) = levels.last().filter(|last| **last > 1) {
        levels.push(last.div_ceil(FANOUT as u64));
    }
    levels
}

/// The shape of a tree, before it has an address.
pub(crate) struct Plan {
    pub(crate) owner: u64,
    segments: Vec<Vec<Key>>,
    pub(crate) levels: Vec<u64>,
}

impl Plan {
    pub(crate) fn new(owner: u64, items: &impl Items) -> Self {
        Self::of_segments(owner, plan_segments(items, 0..items.segments()))
    }

    pub(crate) fn of_segments(owner: u64, segments: Vec<Vec<Key>>) -> Self {
        let leaves = segments.iter().map(|keys| keys.len() as u64).sum();
        Self { owner, segments, levels: levels(leaves) }
    }

    pub(crate) fn nodes(&self) -> u64 {
        self.levels.iter().sum()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.nodes() * NODE_SIZE as u64
    }

    pub(crate) fn root_level(&self) -> u8 {
        (self.levels.len() - 1) as u8
    }

    /// Address of the root, the last node, if the tree begins at `start`.
    pub(crate) fn root(&self, start: u64) -> u64 {
        start + self.bytes() - NODE_SIZE as u64
    }
}

/// Receives the nodes of a seed's template.
pub trait NodeSink: Sync {
    /// Writes `nodes`, whole nodes one after another, at address `physical` (bytes) of the
    /// metadata device. Each address is written once; several threads call at a time.
    fn write(&self, physical: u64, nodes: &[u8]) -> Result<()>;
}

/// The common fields of node headers, and the sink for nodes.
pub(crate) struct Emitter<'a, S> {
    pub(crate) checksum: ChecksumKind,
    pub(crate) chunk_tree_uuid: [u8; 16],
    pub(crate) sink: &'a S,
}

impl<S: NodeSink> Emitter<'_, S> {
    /// Writes all nodes of the tree `plan` of `items`, from address `start` on.
    pub(crate) fn tree(&self, plan: &Plan, items: &impl Items, start: u64) -> Result<()> {
        let mut at = start;
        let starts: Vec<u64> = plan
            .segments
            .iter()
            .map(|keys| {
                at += (keys.len() * NODE_SIZE) as u64;
                at - (keys.len() * NODE_SIZE) as u64
            })
            .collect();
        if at == start {
            return self.leaves(plan.owner, start, 1, |_| ());
        }
        (0..plan.segments.len()).into_par_iter().try_for_each(|segment| {
            let leaves = plan.segments[segment].len();
            self.leaves(plan.owner, starts[segment], leaves, |out| items.emit(segment, out))
        })?;
        self.inner(plan, start)
    }

    fn leaves(
        &self,
        owner: u64,
        start: u64,
        leaves: usize,
        emit: impl FnOnce(&mut LeafWriter),
    ) -> Result<()> {
        with_buffer(leaves * NODE_SIZE, |buffer| {
            let header = |address, items: u32, node: &mut [u8]| {
                self.header(node, address, owner, items, 0);
                self.seal(node);
            };
            let mut writer = LeafWriter {
                buffer: &mut *buffer,
                leaf: 0,
                items: 0,
                data: NODE_SIZE,
                finish: &|leaf, items, node| {
                    header(start + (leaf * NODE_SIZE) as u64, items, node);
                },
            };
            if leaves > 0 {
                emit(&mut writer);
                writer.finish();
                debug_assert_eq!(writer.leaf + 1, leaves);
                self.sink.write(start, buffer)?;
            }
            Ok(())
        })
    }

    fn inner(&self, plan: &Plan, start: u64) -> Result<()> {
        let mut children: Vec<Key> = plan.segments.iter().flatten().copied().collect();
        let mut child_start = start;
        for (level, &count) in plan.levels.iter().enumerate().skip(1) {
            let level_start = child_start + (children.len() * NODE_SIZE) as u64;
            let first_keys = children.iter().step_by(FANOUT).copied().collect();
            let mut nodes = vec![0; count as usize * NODE_SIZE];
            for (index, (node, keys)) in
                nodes.chunks_exact_mut(NODE_SIZE).zip(children.chunks(FANOUT)).enumerate()
            {
                let address = level_start + (index * NODE_SIZE) as u64;
                self.header(node, address, plan.owner, keys.len() as u32, level as u8);
                let first_child = child_start + (index * FANOUT * NODE_SIZE) as u64;
                for (i, key) in keys.iter().enumerate() {
                    let child = first_child + (i * NODE_SIZE) as u64;
                    Put::new(&mut node[HEADER + i * KEY_POINTER..])
                        .key(*key)
                        .u64s(&[child, GENERATION]);
                }
                self.seal(node);
            }
            self.sink.write(level_start, &nodes)?;
            (children, child_start) = (first_keys, level_start);
        }
        Ok(())
    }

    fn header(&self, node: &mut [u8], address: u64, owner: u64, items: u32, level: u8) {
        /// Written, with back references as since 2008.
        const FLAGS: u64 = 1 | 1 << 56;
        let mut put = Put::new(&mut node[..HEADER]);
        put.zeros(FSID_AT + 16).u64s(&[address, FLAGS]).bytes(&self.chunk_tree_uuid);
        put.u64s(&[GENERATION, owner]).u32(items).u8(level).end();
    }

    fn seal(&self, node: &mut [u8]) {
        let checksum = self.checksum.of(&node[FSID_AT..]).to_le_bytes();
        node[..self.checksum.size()].copy_from_slice(&checksum[..self.checksum.size()]);
    }
}

/// Fills consecutive leaves with the items of one segment.
struct LeafWriter<'a> {
    buffer: &'a mut [u8],
    leaf: usize,
    items: usize,
    /// Start of the bodies written so far in the leaf.
    data: usize,
    finish: &'a dyn Fn(usize, u32, &mut [u8]),
}

impl LeafWriter<'_> {
    fn headers_end(&self) -> usize {
        HEADER + self.items * ITEM_HEADER
    }

    fn finish(&mut self) {
        let headers_end = self.headers_end();
        let node = &mut self.buffer[self.leaf * NODE_SIZE..][..NODE_SIZE];
        node[headers_end..self.data].fill(0);
        (self.finish)(self.leaf, self.items as u32, node);
    }
}

impl ItemOut for LeafWriter<'_> {
    fn item(&mut self, key: Key, len: usize, fill: impl FnOnce(&mut [u8])) {
        if self.headers_end() + ITEM_HEADER + len > self.data {
            self.finish();
            self.leaf += 1;
            (self.items, self.data) = (0, NODE_SIZE);
        }
        self.data -= len;
        let at = self.headers_end();
        let node = &mut self.buffer[self.leaf * NODE_SIZE..][..NODE_SIZE];
        key.write(&mut node[at..]);
        Put::new(&mut node[at + Key::LEN..]).u32((self.data - HEADER) as u32).u32(len as u32);
        fill(&mut node[self.data..self.data + len]);
        self.items += 1;
    }
}
