//! Writes btrfs seeds: converts a description of a file tree to the metadata blocks of a
//! mountable filesystem. Pure: no clock, no randomness, no I/O of its own; the same input gives
//! the same bytes with any number of threads.
//!
//! ```text
//!   Tree ──validate──► Model ──┐                       device 1, the metadata device
//!   block checksums ───────────┼─ plan ─ place ─ emit ─►  NodeSink   (template: fsid all zero)
//!   SeedOptions ───────────────────┘                          SeedInfo
//!                                                            │ + Identity (one fsid a mount)
//!                        patch_nodes: template ► this mount ◄┴► superblock: of each device
//! ```
//!
//! *Plan* counts the leaves of every tree from the sizes of their items, *place* gives each node
//! its address, *emit* fills nodes in parallel. The layout on the devices is drawn in
//! `docs/format-seed.md`.
//!
//! Invariants, and the tests that check them:
//! - a hostile `Tree` is refused with `Invalid`, never a panic (`tests/hostile.rs`);
//! - the output reads back as the input (`tests/roundtrip.rs`), mounts, and passes
//!   `btrfs check` (`tests/kernel`);
//! - `check` finds damage (`tests/check`);
//! - patching never repairs a corrupt node (`tests/patch.rs`).

mod check;
mod csum_tree;
mod extent_tree;
mod extents;
mod format;
mod fs_tree;
mod geometry;
mod info;
mod model;
mod nodes;
mod patch;
mod scratch;
mod small_trees;
mod superblock;
mod tree;
mod virtual_area;
mod write;

pub use check::{CheckReport, NodeSource, check, for_each_item};
pub use geometry::{DATA_START, SeedOptions, Uuids};
pub use info::{SeedInfo, TreeRoot};
pub use nodes::NodeSink;
pub use patch::{Identity, Patcher, patch_nodes};
pub use superblock::{DeviceNo, SUPERBLOCK_SIZE, superblock, superblock_offsets};
pub use tree::{BlobRange, Dirent, FileExtent, Inode, InodeBody, Tree, Xattr};
pub use write::{check_tree, write_seed};

/// Bytes of a metadata node.
pub const NODE_SIZE: usize = format::NODE_SIZE;

/// The id of the subvolume that holds the tree: mount with `subvolid=256`.
pub const SUBVOLUME: u64 = format::SUBVOLUME;

/// Number of the first inode: inode `i` of a [`Tree`] is inode `FIRST_INODE + i` of the subvolume.
pub const FIRST_INODE: u64 = format::FIRST_INODE;

/// Most names of a file.
pub const LINK_MAX: u32 = format::LINK_MAX;

/// The virtual area's file, below the top level (`subvolid=5`): mapped content is cloned from it.
pub const VIRTUAL_FILE: &str = "virtual/area";

use burgeon_block::{Error, ErrorKind};

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, what)
}
