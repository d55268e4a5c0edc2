//! Merges layers into one tree, as the OCI image specification defines.
//!
//! ```text
//!   a layer:  first  .wh.NAME, .wh..wh..opq    remove entries of the layers below
//!             then   all other entries          added, in the archive's order
//! ```
//!
//! Invariants: a path is resolved within the tree, symlinks of lower layers included, and cannot
//! leave it; a whiteout never removes an entry of its own layer; work and memory per entry do not
//! grow with the number of entries before it.

use std::{collections::BTreeMap, sync::Arc};

use burgeon_block::{Error, ErrorKind, MemoryMeter, Result};

use super::{
    super::nodes::{Node, S_IFDIR, S_IFREG},
    entry::{TarEntry, show},
    resolve::{self, Followed, Names},
    tree::{FOLDER_COST, node_of, safe_parts, unsafe_name},
};
use crate::corrupt;

/// Prefix of a removed name.
const WHITEOUT: &[u8] = b".wh.";
/// Marks a directory that hides its contents in lower layers.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of names that an old storage driver used internally.
const FOREIGN: &[u8] = b".wh..wh.";

/// Source of a file's data: layer, and entry in it.
pub(super) type EntryRef = (u32, u32);

/// The merged tree.
pub(super) struct Merge {
    meter: Arc<MemoryMeter>,
    nodes: Vec<Node>,
    names: Vec<BTreeMap<Box<[u8]>, u32>>,
    /// Source of each regular file's data.
    places: Vec<Option<EntryRef>>,
    followed: Followed,
    nodes_max: usize,
}

impl Merge {
    /// Creates an empty tree of at most `nodes_max` files of any type, removed ones included. The
    /// memory of the layers' entries has been counted; directories without an entry are counted
    /// on `meter`.
    pub(super) fn new(nodes_max: usize, meter: Arc<MemoryMeter>) -> Self {
        let root = Node { mode: S_IFDIR | 0o755, ..Node::default() };
        let (nodes, names, places) = (vec![root], vec![BTreeMap::new()], vec![None]);
        Self { meter, nodes, names, places, followed: Followed::default(), nodes_max }
    }

    /// Puts layer number `layer` above the previous ones.
    pub(super) fn layer(&mut self, layer: u32, entries: &[TarEntry]) -> Result<()> {
        for entry in entries {
            self.whiteout(entry)?;
        }
        for (place, entry) in (0..).zip(entries) {
            self.put(entry, (layer, place))?;
        }
        Ok(())
    }

    /// Applies a whiteout of the layer.
    fn whiteout(&mut self, entry: &TarEntry) -> Result<()> {
        let path = safe_parts(&entry.path)?;
        let Some((name, parents)) = path.split_last() else { return Ok(()) };
        let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(()) };
        if *name == OPAQUE {
            if let Some(dir) = self.find(parents)? {
                self.names[dir as usize].clear();
            }
            return Ok(());
        }
        if name.starts_with(FOREIGN) {
            return Ok(());
        }
        if matches!(hidden, b"" | b"." | b"..") {
            let what = format!(
                "{} in the layer is a whiteout that removes no valid name",
                show(&entry.path)
            );
            return Err(corrupt(what));
        }
        if let Some(dir) = self.find(parents)? {
            self.names[dir as usize].remove(hidden);
        }
        Ok(())
    }

    fn put(&mut self, entry: &TarEntry, place: EntryRef) -> Result<()> {
        let path = safe_parts(&entry.path)?;
        if path.iter().any(|part| part.starts_with(FOREIGN)) {
            return Ok(());
        }
        let Some((name, parents)) = path.split_last() else {
            let node = node_of(entry)?;
            if entry.kind == b'1' || !node.is_dir() {
                return Err(corrupt("the layer replaces / by something that is not a directory"));
            }
            self.nodes[0] = node;
            return Ok(());
        };
        if name.starts_with(WHITEOUT) {
            return Ok(());
        }
        if parents.iter().any(|part| part.starts_with(WHITEOUT)) {
            return Err(unsafe_name(&entry.path));
        }
        if entry.kind == b'1' {
            let target = self.link_target(entry)?;
            let dir = self.folder(parents, &entry.path)?;
            self.names[dir as usize].insert((*name).into(), target);
            return Ok(());
        }
        let node = node_of(entry)?;
        let dir = self.folder(parents, &entry.path)?;
        let before = self.names[dir as usize].get(*name).copied();
        if let Some(before) = before
            && self.nodes[before as usize].is_dir()
            && node.is_dir()
        {
            self.nodes[before as usize] = node;
            return Ok(());
        }
        let place = (node.kind() == S_IFREG).then_some(place);
        let number = self.push(node, place)?;
        self.names[dir as usize].insert((*name).into(), number);
        Ok(())
    }

    fn link_target(&mut self, entry: &TarEntry) -> Result<u32> {
        let wrong = || {
            corrupt(format!(
                "{} in the layer is a hard link to {}, which is not a file of it or of a layer below",
                show(&entry.path),
                show(&entry.link)
            ))
        };
        let path = safe_parts(&entry.link).map_err(|_| wrong())?;
        let (name, parents) = path.split_last().ok_or_else(wrong)?;
        let dir = self.find(parents)?.ok_or_else(wrong)?;
        let target = self.names[dir as usize].get(*name).copied().ok_or_else(wrong)?;
        if self.nodes[target as usize].is_dir() { Err(wrong()) } else { Ok(target) }
    }

    fn push(&mut self, node: Node, place: Option<EntryRef>) -> Result<u32> {
        if self.nodes.len() >= self.nodes_max {
            return Err(too_many(self.nodes_max as u64));
        }
        self.nodes.push(node);
        self.names.push(BTreeMap::new());
        self.places.push(place);
        Ok(self.nodes.len() as u32 - 1)
    }

    /// The directory at `path`, if it exists.
    fn find(&mut self, path: &[&[u8]]) -> Result<Option<u32>> {
        resolve::directory(self, path, |_, _, _| Ok(None))
    }

    /// The directory at `path`; created if the layers omit it.
    fn folder(&mut self, path: &[&[u8]], shown: &[u8]) -> Result<u32> {
        let make = |tree: &mut Self, dir: u32, name: Box<[u8]>| {
            tree.meter.take(FOLDER_COST)?;
            let made = tree.push(Node { mode: S_IFDIR | 0o755, ..Node::default() }, None)?;
            tree.names[dir as usize].insert(name, made);
            Ok(Some(made))
        };
        let not_there = || {
            corrupt(format!(
                "{} in the layer lies below something that is not a directory",
                show(shown)
            ))
        };
        resolve::directory(self, path, make)?.ok_or_else(not_there)
    }

    /// The nodes, each directory's names sorted, and the sources of the remaining files' data, in
    /// reading order.
    pub(super) fn finish(mut self) -> (Vec<Node>, Vec<(EntryRef, u32)>) {
        let mut lasting = vec![false; self.nodes.len()];
        let mut wanted = Vec::new();
        let mut stack = vec![0u32];
        while let Some(number) = stack.pop() {
            if std::mem::replace(&mut lasting[number as usize], true) {
                continue;
            }
            wanted.extend(self.places[number as usize].map(|place| (place, number)));
            stack.extend(self.names[number as usize].values());
        }
        for (node, names) in self.nodes.iter_mut().zip(self.names) {
            node.children = names.into_iter().collect();
        }
        wanted.sort_unstable();
        (self.nodes, wanted)
    }
}

impl Names for Merge {
    fn child(&self, dir: u32, name: &[u8]) -> Option<u32> {
        self.names[dir as usize].get(name).copied()
    }

    fn node(&self, number: u32) -> &Node {
        &self.nodes[number as usize]
    }

    fn followed(&mut self) -> &mut Followed {
        &mut self.followed
    }
}

pub(super) fn too_many(entries: u64) -> Error {
    let what =
        format!("the archive has more than {entries} files: unpack it, and build from the folder");
    Error::new(ErrorKind::Invalid, what)
}
