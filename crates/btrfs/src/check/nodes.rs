//! Reads and verifies nodes, and walks trees.

use std::sync::Mutex;

use burgeon_block::{ByteRange, ChecksumKind, Error, ErrorKind, Result};
use rayon::prelude::*;

use super::{NodeSource, Take, corrupt, ensure};
use crate::{
    format::{FANOUT, FSID_AT, GENERATION, HEADER, ITEM_HEADER, Key, LEAF_SPACE, NODE_SIZE},
    info::{SeedInfo, TreeRoot},
    patch::Identity,
    scratch::with_buffer,
};

const NODE: u64 = NODE_SIZE as u64;
/// Leaves read at once: 1 MiB.
const BATCH: usize = 64;
/// Written, with back references as since 2008.
const FLAGS: u64 = 1 | 1 << 56;

/// A node as its parent describes it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Node {
    pub(super) address: u64,
    pub(super) level: u8,
    pub(super) owner: u64,
    /// Its first key, and a key greater than its last.
    first: Option<Key>,
    before: Option<Key>,
}

/// Consecutive leaves of a tree.
pub(super) type Batch = Vec<Node>;

pub(super) struct Reader<'a, S> {
    pub(super) info: &'a SeedInfo,
    pub(super) fsid: [u8; 16],
    source: &'a S,
    /// Address, level and owner of each node reached.
    visited: Mutex<Vec<(u64, u8, u64)>>,
}

impl<'a, S: NodeSource> Reader<'a, S> {
    pub(super) fn new(info: &'a SeedInfo, identity: &Identity, source: &'a S) -> Self {
        Self { info, fsid: identity.fsid, source, visited: Mutex::new(Vec::new()) }
    }

    /// The nodes reached, by address.
    pub(super) fn visited(&self) -> Vec<(u64, u8, u64)> {
        let mut visited = std::mem::take(&mut *lock(&self.visited));
        visited.sort_unstable();
        visited
    }

    /// The leaves of a tree, in batches of neighbours. Verifies inner nodes.
    pub(super) fn walk(&self, owner: u64, root: TreeRoot) -> Result<Vec<Batch>> {
        let root =
            Node { address: root.address, level: root.level, owner, first: None, before: None };
        let mut level = vec![root];
        self.visit(&level)?;
        while level.first().is_some_and(|node| node.level > 0) {
            let mut below = Vec::new();
            for node in &level {
                let children = self.children(node)?;
                self.visit(&children)?;
                below.extend(children);
            }
            level = below;
        }
        Ok(level.chunks(BATCH).map(<[Node]>::to_vec).collect())
    }

    /// Records visited nodes, and stops a walk that has visited more than exist.
    fn visit(&self, nodes: &[Node]) -> Result<()> {
        let mut visited = lock(&self.visited);
        visited.extend(nodes.iter().map(|node| (node.address, node.level, node.owner)));
        let all = (self.info.system_used + self.info.metadata_used) / NODE;
        ensure(visited.len() as u64 <= all, || "some nodes are reached more than once".into())
    }

    fn children(&self, node: &Node) -> Result<Vec<Node>> {
        let mut buffer = vec![0; NODE_SIZE];
        self.read(node.address, &mut buffer)?;
        let items = self.verify_header(node, &buffer)?;
        ensure((1..=FANOUT).contains(&items), || at(node, "has a wrong number of children"))?;
        let mut take = Take(&buffer[HEADER..]);
        let mut children: Vec<Node> = Vec::with_capacity(items);
        for _ in 0..items {
            let (first, [address, generation]) = (take.key()?, take.u64s()?);
            ensure(generation == GENERATION, || at(node, "names a child of another generation"))?;
            if let Some(last) = children.last_mut() {
                last.before = Some(first);
            }
            let level = node.level - 1;
            let owner = node.owner;
            children.push(Node { address, level, owner, first: Some(first), before: node.before });
        }
        let keys = children.iter().filter_map(|child| child.first);
        verify_keys(node, keys)?;
        Ok(children)
    }

    /// Calls `visit` with each item of the leaves of a batch, after verifying them.
    pub(super) fn leaves(
        &self,
        batch: &[Node],
        mut visit: impl FnMut(Key, &[u8]) -> Result<()>,
    ) -> Result<()> {
        for run in batch.chunk_by(|a, b| a.address.checked_add(NODE) == Some(b.address)) {
            with_buffer(run.len() * NODE_SIZE, |buffer| {
                self.read(run[0].address, buffer)?;
                let mut pairs = run.iter().zip(buffer.chunks_exact(NODE_SIZE));
                pairs.try_for_each(|(node, bytes)| self.verify_leaf(node, bytes, &mut visit))
            })?;
        }
        Ok(())
    }

    /// Runs `add` over each batch of a tree, in parallel; returns the results in order.
    pub(super) fn batches<T: Default + Send>(
        &self,
        owner: u64,
        root: TreeRoot,
        add: impl Fn(&mut T, Key, &[u8]) -> Result<()> + Sync,
    ) -> Result<Vec<T>> {
        let one = |batch: &Batch| {
            let mut result = T::default();
            self.leaves(batch, |key, item| {
                add(&mut result, key, item).map_err(|error| in_item(error, owner, key))
            })?;
            Ok(result)
        };
        self.walk(owner, root)?.par_iter().map(one).collect()
    }

    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<()> {
        let range = ByteRange::at(address, buffer.len() as u64);
        let inside = [self.info.chunk_nodes(), self.info.metadata_nodes()].iter().any(|nodes| {
            range.is_some_and(|range| nodes.covers(range))
                && (address - nodes.start()).is_multiple_of(NODE)
        });
        ensure(inside, || format!("there can be no node at {address}"))?;
        self.source.read(address, buffer)
    }

    /// Verifies a node's header and returns its number of items.
    fn verify_header(&self, node: &Node, bytes: &[u8]) -> Result<usize> {
        let kind = self.info.checksum;
        let stored = &bytes[..kind.size()];
        ensure(stored == sum(kind, bytes), || at(node, "has a wrong checksum"))?;
        let zeros = bytes[kind.size()..FSID_AT].iter().all(|byte| *byte == 0);
        ensure(zeros, || at(node, "has a checksum that is too long"))?;
        let mut take = Take(&bytes[FSID_AT..HEADER]);
        ensure(take.array()? == self.fsid, || at(node, "belongs to another filesystem"))?;
        let [address, flags] = take.u64s()?;
        ensure(address == node.address, || at(node, &format!("belongs at {address}")))?;
        ensure(flags == FLAGS, || at(node, "has unknown flags"))?;
        let uuid = take.array()?;
        ensure(uuid == self.info.uuids.chunk_tree, || at(node, "names another chunk tree"))?;
        let [generation, owner] = take.u64s()?;
        ensure(generation == GENERATION, || at(node, "is of another generation"))?;
        ensure(owner == node.owner, || at(node, &format!("belongs to tree {owner}")))?;
        let items = take.u32()? as usize;
        ensure(take.u8()? == node.level, || at(node, "is on another level"))?;
        Ok(items)
    }

    fn verify_leaf(
        &self,
        node: &Node,
        bytes: &[u8],
        visit: &mut impl FnMut(Key, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let items = self.verify_header(node, bytes)?;
        let room = items <= LEAF_SPACE / ITEM_HEADER && (items > 0 || node.first.is_none());
        ensure(room, || at(node, "has a wrong number of items"))?;
        let header = |index: usize| Take(&bytes[HEADER + index * ITEM_HEADER..]).key();
        verify_keys(node, (0..items).map_while(|index| header(index).ok()))?;
        let mut end = LEAF_SPACE;
        for index in 0..items {
            let mut take = Take(&bytes[HEADER + index * ITEM_HEADER..]);
            let (key, offset, len) = (take.key()?, take.u32()? as usize, take.u32()? as usize);
            // Bodies are contiguous, each one before the previous.
            let good = offset.checked_add(len) == Some(end) && offset >= items * ITEM_HEADER;
            ensure(good, || at(node, &format!("has item {index} in a wrong place")))?;
            end = offset;
            visit(key, &bytes[HEADER + offset..HEADER + offset + len])?;
        }
        let gap = &bytes[HEADER + items * ITEM_HEADER..HEADER + end];
        ensure(gap.iter().all(|byte| *byte == 0), || at(node, "has something between its items"))
    }
}

fn verify_keys(node: &Node, keys: impl Iterator<Item = Key>) -> Result<()> {
    let mut last: Option<Key> = None;
    for key in keys {
        let sorted = match last {
            None => node.first.is_none_or(|first| first == key),
            Some(last) => last < key,
        };
        ensure(sorted, || at(node, &format!("has {key:?} out of order")))?;
        last = Some(key);
    }
    let inside = last.is_none_or(|last| node.before.is_none_or(|before| last < before));
    ensure(inside, || at(node, "has keys of the next one"))
}

fn sum(kind: ChecksumKind, bytes: &[u8]) -> Vec<u8> {
    kind.of(&bytes[FSID_AT..]).to_le_bytes()[..kind.size()].to_vec()
}

fn at(node: &Node, what: &str) -> String {
    format!("the node at {} {what}", node.address)
}

fn in_item(error: Error, tree: u64, key: Key) -> Error {
    if error.kind() != ErrorKind::Corrupt {
        return error;
    }
    corrupt(format!(
        "tree {tree}, item ({} {} {}): {}",
        key.objectid,
        key.kind,
        key.offset,
        error.to_string().trim_start_matches("the seed's metadata is damaged: ")
    ))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
