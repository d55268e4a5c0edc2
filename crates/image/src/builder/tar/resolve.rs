//! Resolves paths within the tree of an archive, symlinks included, as in unpacking.
//!
//! Invariant: nothing outside the tree is consulted. The root is its own parent, and the target of
//! an absolute symlink begins at the root.

use std::borrow::Cow;

use burgeon_block::Result;

use super::super::nodes::{Node, S_IFLNK};
use crate::{corrupt, invalid};

/// Longest path in Linux, in bytes.
pub(super) const PATH_MAX: usize = 4095;
/// Deepest nesting of directories, symlinks followed: as many as fit in a path.
const DEPTH_MAX: usize = PATH_MAX / 2;
/// Symlinks in one path, as in Linux.
const LINKS_MAX: u32 = 40;
/// Parts of targets of symlinks that are followed: as many in any tree, and for each path.
/// `/lib -> usr/lib` takes two.
const FOLLOWED_MAX: u64 = 4 << 20;
const FOLLOWED_PER_PATH: u64 = 16;

/// Counts the work for symlinks above the files of a tree: a path of five bytes can lead through
/// 40 symlinks with 2000 parts each.
#[derive(Default)]
pub(super) struct Followed {
    paths: u64,
    parts: u64,
}

impl Followed {
    fn path(&mut self) {
        self.paths += 1;
    }

    /// Counts more `parts`; `Invalid` if they are too many for the paths so far.
    fn count(&mut self, parts: usize) -> Result<()> {
        self.parts += parts as u64;
        if self.parts <= FOLLOWED_MAX + FOLLOWED_PER_PATH * self.paths {
            return Ok(());
        }
        Err(invalid(
            "the paths of the archive lead through too many symlinks: if you trust it, unpack it, \
             and build from the folder",
        ))
    }
}

/// A tree in which paths are resolved. The root is node 0.
pub(super) trait Names {
    /// The node of `name` in the directory `dir`.
    fn child(&self, dir: u32, name: &[u8]) -> Option<u32>;

    fn node(&self, number: u32) -> &Node;

    fn followed(&mut self) -> &mut Followed;
}

/// The directory at `path`. `missing` creates the directory of a missing name, or gives up. Also
/// `None` if a component of the path is neither a directory nor a symlink to one.
pub(super) fn directory<T: Names>(
    tree: &mut T,
    path: &[&[u8]],
    missing: impl Fn(&mut T, u32, Box<[u8]>) -> Result<Option<u32>>,
) -> Result<Option<u32>> {
    let mut way = vec![0u32];
    let mut rest: Vec<Cow<'_, [u8]>> = path.iter().rev().map(|part| Cow::from(*part)).collect();
    let mut links = 0;
    tree.followed().path();
    while let (Some(part), Some(dir)) = (rest.pop(), way.last().copied()) {
        if *part == *b".." {
            way.truncate((way.len() - 1).max(1));
            continue;
        }
        let next = match tree.child(dir, &part) {
            Some(next) => next,
            None => match missing(tree, dir, part.as_ref().into())? {
                Some(made) => made,
                None => return Ok(None),
            },
        };
        let node = tree.node(next);
        if node.kind() == S_IFLNK {
            links += 1;
            if links > LINKS_MAX {
                return Ok(None);
            }
            if node.target.starts_with(b"/") {
                way.truncate(1);
            }
            let before = rest.len();
            let target = node.target.split(|byte| *byte == b'/').rev();
            let target = target.filter(|part| !matches!(*part, b"" | b"."));
            rest.extend(target.map(|part| Cow::from(part.to_vec())));
            let parts = rest.len() - before;
            tree.followed().count(parts)?;
        } else if !node.is_dir() {
            return Ok(None);
        } else if way.len() > DEPTH_MAX {
            return Err(corrupt(format!("directories are nested deeper than {DEPTH_MAX}")));
        } else {
            way.push(next);
        }
    }
    Ok(way.last().copied())
}
