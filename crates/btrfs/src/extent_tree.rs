//! The extent tree: one item for each metadata node and each data extent, with its users, and one
//! for each block group.
//!
//! It also describes its own nodes; [`ExtentTree::describe_itself`] computes their number. Nodes
//! lie below all data, so their items come first, in segments of their own, and the plan of the
//! data part does not depend on their number.

use std::ops::Range;

use crate::{
    FIRST_INODE, SUBVOLUME,
    extents::{Extents, Reference},
    format::{EXTENT_ITEM_MAX, GENERATION, Key, NODE_SIZE, Put, VIRTUAL_SUBVOLUME, kind, object},
    geometry::{Chunk, METADATA_START, system_chunk},
    nodes::{ItemOut, Items, Plan, SEGMENT_BYTES, levels, plan_segments},
    virtual_area::{self, VirtualArea},
};

const EXTENT_ITEM_HEAD: usize = 24;
const INLINE_REF: usize = 29;
const KEYED_REF: usize = 28;
const INLINE_REFS_MAX: usize = (EXTENT_ITEM_MAX - EXTENT_ITEM_HEAD) / INLINE_REF;
const FLAG_DATA: u64 = 1;
const FLAG_TREE_BLOCK: u64 = 2;
/// Items of a metadata segment, about [`SEGMENT_BYTES`].
const NODE_SEGMENT: u64 = SEGMENT_BYTES / 58;
/// Extents of a segment of the virtual area, about [`SEGMENT_BYTES`] with their block groups.
const VIRTUAL_SEGMENT: usize = (SEGMENT_BYTES / (78 + 49)) as usize;

/// Consecutive nodes of one level of one tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NodeRun {
    pub(crate) start: u64,
    pub(crate) count: u64,
    pub(crate) level: u8,
    pub(crate) owner: u64,
}

pub(crate) struct ExtentTree<'a> {
    extents: &'a Extents,
    virtual_area: &'a VirtualArea,
    data: &'a [Chunk],
    segments: Vec<ExtentSegment>,
    /// Ascending; those of the system chunk first.
    nodes: Vec<NodeRun>,
    system: Chunk,
    metadata: Chunk,
}

struct ExtentSegment {
    extents: Range<usize>,
    chunks: Range<usize>,
}

impl<'a> ExtentTree<'a> {
    /// `data` holds all data chunks, those of the virtual area last.
    pub(crate) fn new(
        extents: &'a Extents,
        virtual_area: &'a VirtualArea,
        data: &'a [Chunk],
    ) -> Self {
        let data = &data[..data.len() - virtual_area.chunks.len()];
        let segments = split(extents, data);
        let (system, metadata) = (system_chunk(0), group_at(METADATA_START));
        Self { extents, virtual_area, data, segments, nodes: Vec::new(), system, metadata }
    }

    /// First keys of the leaves of data extents.
    pub(crate) fn plan_data(&self) -> Vec<Vec<Key>> {
        let first = self.node_segments();
        plan_segments(self, first..self.segments())
    }

    /// Computes the number of nodes of this tree on each level, if it begins at `start` and
    /// describes `nodes` and its own. More nodes never need fewer leaves, so the guess only
    /// grows, and stops at the smallest tree that contains its own description.
    pub(crate) fn describe_itself(
        &mut self,
        nodes: Vec<NodeRun>,
        start: u64,
        data_keys: &[Vec<Key>],
    ) -> Vec<u64> {
        let others = nodes.len();
        let data_leaves: u64 = data_keys.iter().map(|keys| keys.len() as u64).sum();
        self.nodes = nodes;
        let mut guess = vec![1];
        loop {
            self.nodes.truncate(others);
            let mut next = start;
            for (level, &count) in guess.iter().enumerate() {
                let owner = object::EXTENT_TREE;
                self.nodes.push(NodeRun { start: next, count, level: level as u8, owner });
                next += count * NODE_SIZE as u64;
            }
            let node_keys = plan_segments(self, 0..self.node_segments());
            let node_leaves: u64 = node_keys.iter().map(|keys| keys.len() as u64).sum();
            let levels = levels(node_leaves + data_leaves);
            if levels == guess {
                return levels;
            }
            guess = levels;
        }
    }

    /// Sets the used bytes of the two metadata chunks.
    pub(crate) fn set_groups(&mut self, system: Chunk, metadata: Chunk) {
        (self.system, self.metadata) = (system, metadata);
    }

    pub(crate) fn plan(&self, data_keys: Vec<Vec<Key>>) -> Plan {
        let mut keys = plan_segments(self, 0..self.node_segments());
        keys.extend(data_keys);
        Plan::of_segments(object::EXTENT_TREE, keys)
    }

    /// The segments of nodes: `0..node_segments()`.
    fn node_segments(&self) -> usize {
        let items = self.nodes.iter().map(|run| run.count).sum::<u64>() + 2;
        items.div_ceil(NODE_SEGMENT) as usize
    }

    /// Items of nodes and their block groups, by position. A block group's item comes right
    /// after that of the first node, which has the same address.
    fn emit_nodes(&self, positions: Range<u64>, out: &mut impl ItemOut) {
        let mut position = 0;
        let mut take = || {
            position += 1;
            positions.contains(&(position - 1))
        };
        for run in &self.nodes {
            for index in 0..run.count {
                let address = run.start + index * NODE_SIZE as u64;
                if take() {
                    put_node(address, run, out);
                }
                for chunk in [&self.system, &self.metadata] {
                    if chunk.start == address && take() {
                        put_group(chunk, out);
                    }
                }
            }
        }
    }

    fn emit_extents(&self, segment: &ExtentSegment, out: &mut impl ItemOut) {
        let mut chunks = self.data[segment.chunks.clone()].iter().peekable();
        for index in segment.extents.clone() {
            let start = self.extents.all[index].start;
            while let Some(chunk) = chunks.next_if(|chunk| chunk.start < start) {
                put_group(chunk, out);
            }
            self.put_extent(index, out);
        }
        chunks.for_each(|chunk| put_group(chunk, out));
    }

    fn emit_virtual(&self, segment: usize, out: &mut impl ItemOut) {
        let extents = self.virtual_area.extents.chunks(VIRTUAL_SEGMENT).nth(segment);
        for &(start, len) in extents.unwrap_or_default() {
            let key = Key::new(start, kind::EXTENT_ITEM, len);
            out.item(key, EXTENT_ITEM_HEAD + INLINE_REF, |to| {
                let mut put = Put::new(to);
                put.u64s(&[1, GENERATION, FLAG_DATA]).u8(kind::EXTENT_DATA_REF);
                let file_offset = self.virtual_area.file_offset(start);
                put.u64s(&[VIRTUAL_SUBVOLUME, virtual_area::INODE, file_offset]).u32(1).end();
            });
            if let Some(chunk) = self.virtual_area.chunk_at(start) {
                put_group(chunk, out);
            }
        }
    }

    fn put_extent(&self, index: usize, out: &mut impl ItemOut) {
        let extent = self.extents.all[index];
        let key = Key::new(extent.start, kind::EXTENT_ITEM, extent.len);
        let head = |put: &mut Put, references: usize| {
            put.u64s(&[references as u64, GENERATION, FLAG_DATA]);
        };
        let references = self.extents.references(index);
        if let [reference] = references {
            out.item(key, EXTENT_ITEM_HEAD + INLINE_REF, |to| {
                let mut put = Put::new(to);
                head(&mut put, 1);
                put_inline(&mut put, reference);
                put.end();
            });
            return;
        }
        let mut hashed: Vec<_> = references.iter().map(|r| (r.hash(), *r)).collect();
        // The kernel looks for inline references by descending hash.
        hashed.sort_unstable_by(|a, b| b.cmp(a));
        let (inline, keyed) = hashed.split_at(hashed.len().min(INLINE_REFS_MAX));
        out.item(key, EXTENT_ITEM_HEAD + inline.len() * INLINE_REF, |to| {
            let mut put = Put::new(to);
            head(&mut put, references.len());
            inline.iter().for_each(|(_, reference)| put_inline(&mut put, reference));
            put.end();
        });
        let mut free = 0;
        for (hash, reference) in keyed.iter().rev() {
            // If two have the same hash, the next free key, which the kernel also tries.
            let offset = free.max(*hash);
            free = offset + 1;
            let key = Key::new(extent.start, kind::EXTENT_DATA_REF, offset);
            out.item(key, KEYED_REF, |to| put_reference(&mut Put::new(to), reference));
        }
    }
}

impl Items for ExtentTree<'_> {
    fn segments(&self) -> usize {
        let of_virtual = self.virtual_area.extents.len().div_ceil(VIRTUAL_SEGMENT);
        self.node_segments() + self.segments.len() + of_virtual
    }

    fn emit(&self, segment: usize, out: &mut impl ItemOut) {
        let first = segment as u64 * NODE_SEGMENT;
        match segment.checked_sub(self.node_segments()) {
            None => self.emit_nodes(first..first + NODE_SEGMENT, out),
            Some(segment) => match self.segments.get(segment) {
                Some(segment) => self.emit_extents(segment, out),
                None => self.emit_virtual(segment - self.segments.len(), out),
            },
        }
    }
}

/// Splits the data's items. A block group's item goes to the segment with the first extent at or
/// after its start.
fn split(extents: &Extents, data: &[Chunk]) -> Vec<ExtentSegment> {
    let mut segments: Vec<ExtentSegment> = Vec::new();
    let (mut first, mut first_chunk, mut bytes) = (0, 0, 0);
    for index in 0..extents.all.len() {
        let references = extents.references(index).len();
        bytes += 25 + EXTENT_ITEM_HEAD + references.min(INLINE_REFS_MAX) * INLINE_REF;
        bytes += references.saturating_sub(INLINE_REFS_MAX) * (25 + KEYED_REF);
        if bytes as u64 >= SEGMENT_BYTES && index + 1 < extents.all.len() {
            let next = extents.all[index + 1].start;
            let chunk = data.partition_point(|chunk| chunk.start < next);
            segments.push(ExtentSegment { extents: first..index + 1, chunks: first_chunk..chunk });
            (first, first_chunk, bytes) = (index + 1, chunk, 0);
        }
    }
    segments
        .push(ExtentSegment { extents: first..extents.all.len(), chunks: first_chunk..data.len() });
    segments
}

/// A block group with only its address.
fn group_at(start: u64) -> Chunk {
    Chunk { start, ..system_chunk(0) }
}

fn put_node(address: u64, run: &NodeRun, out: &mut impl ItemOut) {
    let key = Key::new(address, kind::METADATA_ITEM, u64::from(run.level));
    out.item(key, EXTENT_ITEM_HEAD + 9, |to| {
        let mut put = Put::new(to);
        put.u64s(&[1, GENERATION, FLAG_TREE_BLOCK]).u8(kind::TREE_BLOCK_REF).u64(run.owner).end();
    });
}

fn put_group(chunk: &Chunk, out: &mut impl ItemOut) {
    out.item(Key::new(chunk.start, kind::BLOCK_GROUP_ITEM, chunk.len), 24, |to| {
        Put::new(to).u64s(&[chunk.used, object::FIRST_CHUNK_TREE, chunk.flags]).end();
    });
}

fn put_inline(put: &mut Put, reference: &Reference) {
    put.u8(kind::EXTENT_DATA_REF);
    put_reference(put, reference);
}

fn put_reference(put: &mut Put, reference: &Reference) {
    let inode = FIRST_INODE + u64::from(reference.inode);
    put.u64s(&[SUBVOLUME, inode, reference.file_offset]).u32(1);
}
