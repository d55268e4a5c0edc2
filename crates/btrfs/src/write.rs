//! `write_seed`: plans all trees, gives every node its address, writes all nodes.
//!
//! ```text
//!   SYSTEM chunk    chunk tree
//!   METADATA chunk  root │ dev │ uuid │ data reloc │ top level │ free space │ (virtual area) │
//!                   csum │ subvolume │ extent
//! ```
//! The trees that a mount reads come first.

use burgeon_block::Result;

use crate::{
    SUBVOLUME,
    csum_tree::CsumTree,
    extent_tree::{ExtentTree, NodeRun},
    extents::Extents,
    format::{NODE_SIZE, SECTOR, VIRTUAL_SUBVOLUME, object},
    fs_tree::FsTree,
    geometry::{
        Chunk, DATA_START, DataLayout, METADATA_START, SYSTEM_START, SeedOptions,
        check_metadata_bytes, devices, metadata_chunk, system_chunk,
    },
    info::{SeedInfo, TreeRoot},
    invalid,
    model::Model,
    nodes::{Emitter, ItemList, NodeSink, Plan},
    small_trees::{self, Root},
    tree::Tree,
    virtual_area::VirtualArea,
};

/// Checks that btrfs can hold the names, links and attributes of `tree`, as [`write_seed`] does
/// before it writes anything.
///
/// Errors: `Invalid`, as for [`write_seed`].
pub fn check_tree(tree: &Tree) -> Result<()> {
    Model::new(tree, SeedOptions::METADATA_BYTES_MAX).map(drop)
}

/// Writes the metadata nodes of a seed with `tree` as its subvolume [`SUBVOLUME`], as a
/// *template*: with an fsid of zeros, which [`crate::patch_nodes`] replaces.
///
/// `checksums` holds, for each block from [`DATA_START`] on, its checksum in little-endian bytes,
/// at least up to the last block of a file that is not `nodatasum`.
///
/// Errors: `Invalid` if `tree`, `checksums` or `options` break a rule stated at their types, or
/// need more metadata than allowed, or more than 64 times the bytes of `tree`; errors of `sink`.
pub fn write_seed(
    tree: &Tree,
    checksums: &[u8],
    options: &SeedOptions,
    sink: &impl NodeSink,
) -> Result<SeedInfo> {
    let layout = DataLayout::checked(options.data_end)?;
    let virtual_area = VirtualArea::new(options)?;
    let options = &bounded(tree, &virtual_area, options);
    let model = Model::new(tree, options.metadata_bytes_max)?;
    let extents = Extents::new(&model, &layout, options.metadata_bytes_max)?;
    let size = options.checksum.size();
    let blocks = extents.with_checksums.last().map_or(0, |last| (last.end() - DATA_START) / SECTOR);
    if ((checksums.len() / size) as u64) < blocks {
        return Err(invalid(format!(
            "{blocks} block checksums are needed, {} are there",
            checksums.len() / size
        )));
    }
    let fs_tree = FsTree::new(&model, &extents);
    check_metadata_bytes(fs_tree.bytes(), options)?;
    let mut data = data_chunks(&layout, &extents);
    data.extend(&virtual_area.chunks);
    let csum_tree = CsumTree::new(&extents, checksums, size);
    let seed = Seed::place(options, (&extents, &virtual_area), &data, &csum_tree, &fs_tree)?;
    let emitter =
        Emitter { checksum: options.checksum, chunk_tree_uuid: options.uuids.chunk_tree, sink };
    seed.emit(&emitter, &csum_tree, &fs_tree)?;
    Ok(seed.info)
}

/// The options with a limit that keeps a small hostile tree from expanding to gigabytes: without
/// overlapping extents and large shared attributes, metadata is below ten times its tree.
fn bounded(tree: &Tree, virtual_area: &VirtualArea, options: &SeedOptions) -> SeedOptions {
    const FREE: u64 = 64 << 20;
    const TIMES: u64 = 64;
    fn bytes<T>(table: &[T]) -> u64 {
        size_of_val(table) as u64
    }
    let tables = bytes(&tree.inodes) + bytes(&tree.dirents) + bytes(&tree.extents);
    let tree_bytes = tables + bytes(&tree.xattrs) + bytes(&tree.blob);
    let free = FREE + virtual_area.cost();
    let most = options.metadata_bytes_max.min(free + TIMES.saturating_mul(tree_bytes));
    SeedOptions { metadata_bytes_max: most, ..*options }
}

/// The data chunks, with their used bytes.
fn data_chunks(layout: &DataLayout, extents: &Extents) -> Vec<Chunk> {
    let mut chunks = layout.chunks();
    let mut extents = extents.all.iter().peekable();
    for chunk in &mut chunks {
        while let Some(extent) = extents.next_if(|extent| extent.start < chunk.start + chunk.len) {
            chunk.used += extent.len;
        }
    }
    chunks
}

/// A tree with an address.
struct Placed {
    plan: Plan,
    start: u64,
}

impl Placed {
    fn root(&self) -> Root {
        let root = TreeRoot { address: self.plan.root(self.start), level: self.plan.root_level() };
        Root { tree: self.plan.owner, root, bytes: self.plan.bytes() }
    }
}

/// Allocates addresses, one tree after another, and records their owners.
struct Places {
    next: u64,
    runs: Vec<NodeRun>,
}

impl Places {
    fn from(start: u64) -> Self {
        Self { next: start, runs: Vec::new() }
    }

    fn put(&mut self, owner: u64, levels: &[u64]) -> u64 {
        let start = self.next;
        for (level, &count) in levels.iter().enumerate() {
            self.runs.push(NodeRun { start: self.next, count, level: level as u8, owner });
            self.next += count * NODE_SIZE as u64;
        }
        start
    }

    fn place(&mut self, plan: Plan) -> Placed {
        Placed { start: self.put(plan.owner, &plan.levels), plan }
    }
}

/// The trees whose items are kept as bytes, in address order. Neither the number nor the sizes of
/// their items depend on addresses and sizes in `roots` and `chunks`.
fn small_trees(
    roots: &[Root],
    chunks: &[Chunk],
    extents: &Extents,
    virtual_area: &VirtualArea,
    options: &SeedOptions,
) -> Vec<(u64, ItemList)> {
    let uuids = &options.uuids;
    let with_virtual = virtual_area.range.is_some();
    let devices = devices(chunks, uuids);
    let mut trees = vec![
        (object::CHUNK_TREE, small_trees::chunk_tree(&devices, chunks)),
        (object::ROOT_TREE, small_trees::root_tree(roots, uuids)),
        (object::DEV_TREE, small_trees::dev_tree(&devices, chunks, uuids)),
        (object::UUID_TREE, small_trees::uuid_tree(uuids, with_virtual)),
        (object::DATA_RELOC_TREE, small_trees::data_reloc_tree()),
        (object::FS_TREE, small_trees::top_level(with_virtual)),
        (object::FREE_SPACE_TREE, small_trees::free_space_tree(chunks, extents)),
    ];
    trees.extend(virtual_area.subvolume());
    trees
}

/// The trees that the root tree names; the last only if there is a virtual area.
const NAMED: [u64; 9] = [
    object::EXTENT_TREE,
    object::DEV_TREE,
    object::FS_TREE,
    object::CSUM_TREE,
    object::UUID_TREE,
    object::FREE_SPACE_TREE,
    SUBVOLUME,
    object::DATA_RELOC_TREE,
    VIRTUAL_SUBVOLUME,
];

/// All parts of a seed with their addresses.
struct Seed<'a> {
    small: Vec<(Placed, ItemList)>,
    csum: Placed,
    subvolume: Placed,
    extent: Placed,
    extent_tree: ExtentTree<'a>,
    info: SeedInfo,
}

impl<'a> Seed<'a> {
    fn place(
        options: &SeedOptions,
        (extents, virtual_area): (&'a Extents, &'a VirtualArea),
        data: &'a [Chunk],
        csum_tree: &CsumTree,
        fs_tree: &FsTree,
    ) -> Result<Self> {
        let mut extent_tree = ExtentTree::new(extents, virtual_area, data);
        let ((subvolume, csum), data_keys) = rayon::join(
            || {
                rayon::join(
                    || Plan::new(SUBVOLUME, fs_tree),
                    || Plan::new(object::CSUM_TREE, csum_tree),
                )
            },
            || extent_tree.plan_data(),
        );
        let chunks_of = |system_used: u64, metadata_used: u64| -> Vec<Chunk> {
            [&[system_chunk(system_used), metadata_chunk(metadata_used)], data].concat()
        };

        // First with guessed addresses, only for the shapes.
        let root = TreeRoot { address: 0, level: 0 };
        let named = &NAMED[..NAMED.len() - usize::from(virtual_area.range.is_none())];
        let guess: Vec<_> = named.iter().map(|&tree| Root { tree, root, bytes: 0 }).collect();
        let trees = |roots: &[Root], chunks: &[Chunk]| {
            small_trees(roots, chunks, extents, virtual_area, options)
        };
        let mut system = Places::from(SYSTEM_START);
        let mut metadata = Places::from(METADATA_START);
        let mut small_starts = Vec::new();
        for (owner, items) in trees(&guess, &chunks_of(0, 0)) {
            let places = if owner == object::CHUNK_TREE { &mut system } else { &mut metadata };
            small_starts.push(places.put(owner, &Plan::new(owner, &items).levels));
        }
        let csum = metadata.place(csum);
        let subvolume = metadata.place(subvolume);
        let system_used = system.next - SYSTEM_START;
        let mut nodes = system.runs;
        nodes.append(&mut metadata.runs);
        let extent_start = metadata.next;
        let extent_levels = extent_tree.describe_itself(nodes, extent_start, &data_keys);
        metadata.put(object::EXTENT_TREE, &extent_levels);
        let metadata_used = metadata.next - METADATA_START;
        check_metadata_bytes(metadata_used, options)?;
        let chunks = chunks_of(system_used, metadata_used);

        // Now with the final addresses.
        extent_tree.set_groups(chunks[0], chunks[1]);
        let extent = Placed { plan: extent_tree.plan(data_keys), start: extent_start };
        debug_assert_eq!(extent.plan.levels, extent_levels);
        let mut roots = vec![csum.root(), subvolume.root(), extent.root()];
        let place = |lists: Vec<(u64, ItemList)>| -> Vec<(Placed, ItemList)> {
            let plan = |((owner, items), start): ((u64, ItemList), &u64)| {
                (Placed { plan: Plan::new(owner, &items), start: *start }, items)
            };
            lists.into_iter().zip(&small_starts).map(plan).collect()
        };
        let shapes = place(trees(&guess, &chunks));
        let shaped = shapes.iter().map(|(placed, _)| placed.root());
        roots.extend(shaped.filter(|root| named.contains(&root.tree)));
        let small = place(trees(&roots, &chunks));
        let info = describe(options, virtual_area, &chunks, &small);
        Ok(Self { small, csum, subvolume, extent, extent_tree, info })
    }

    fn emit(
        &self,
        emitter: &Emitter<impl NodeSink>,
        csum_tree: &CsumTree,
        fs_tree: &FsTree,
    ) -> Result<()> {
        let tree =
            |placed: &Placed, items: &ItemList| emitter.tree(&placed.plan, items, placed.start);
        let (subvolume, (extent, (csum, small))) = rayon::join(
            || emitter.tree(&self.subvolume.plan, fs_tree, self.subvolume.start),
            || {
                rayon::join(
                    || emitter.tree(&self.extent.plan, &self.extent_tree, self.extent.start),
                    || {
                        rayon::join(
                            || emitter.tree(&self.csum.plan, csum_tree, self.csum.start),
                            || {
                                self.small
                                    .iter()
                                    .try_for_each(|(placed, items)| tree(placed, items))
                            },
                        )
                    },
                )
            },
        );
        subvolume.and(extent).and(csum).and(small)
    }
}

fn describe(
    options: &SeedOptions,
    virtual_area: &VirtualArea,
    chunks: &[Chunk],
    small: &[(Placed, ItemList)],
) -> SeedInfo {
    let root = |tree: u64| {
        let placed = small.iter().map(|(placed, _)| placed.root()).find(|root| root.tree == tree);
        placed.map_or(TreeRoot { address: 0, level: 0 }, |root| root.root)
    };
    SeedInfo {
        checksum: options.checksum,
        uuids: options.uuids,
        data_end: options.data_end,
        virtual_area: virtual_area.range,
        system_used: chunks[0].used,
        metadata_used: chunks[1].used,
        bytes_used: chunks.iter().map(|chunk| chunk.used).sum(),
        root: root(object::ROOT_TREE),
        chunk_root: root(object::CHUNK_TREE),
    }
}
