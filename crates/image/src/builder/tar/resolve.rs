//! Resolves paths within the tree of an archive, symlinks included, as in unpacking.
//!
//! Invariant: nothing outside the tree is consulted. The root is its own parent, and the target of
//! an absolute symlink begins at the root.

use burgeon_block::Result;

use super::{
    super::nodes::{Node, S_IFLNK},
    tree::PATH_MAX,
};
use crate::corrupt;

/// Deepest nesting of directories, symlinks followed: as many as fit in a path.
const DEPTH_MAX: usize = PATH_MAX / 2;
/// Symlinks in one path, as in Linux.
const LINKS_MAX: u32 = 40;

/// A tree in which paths are resolved. The root is node 0.
pub(super) trait Names {
    /// The node of `name` in the directory `dir`.
    fn child(&self, dir: u32, name: &[u8]) -> Option<u32>;

    fn node(&self, number: u32) -> &Node;
}

/// The directory at `path`. `missing` creates the directory of a missing name, or gives up. Also
/// `None` if a component of the path is neither a directory nor a symlink to one.
pub(super) fn directory<T: Names>(
    tree: &mut T,
    path: &[&[u8]],
    missing: impl Fn(&mut T, u32, Box<[u8]>) -> Result<Option<u32>>,
) -> Result<Option<u32>> {
    let mut way = vec![0u32];
    let mut rest: Vec<Box<[u8]>> = path.iter().rev().map(|part| (*part).into()).collect();
    let mut links = 0;
    while let (Some(part), Some(dir)) = (rest.pop(), way.last().copied()) {
        if *part == *b".." {
            way.truncate((way.len() - 1).max(1));
            continue;
        }
        let next = match tree.child(dir, &part) {
            Some(next) => next,
            None => match missing(tree, dir, part)? {
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
            let target = node.target.split(|byte| *byte == b'/').rev();
            rest.extend(target.filter(|part| !matches!(*part, b"" | b".")).map(Box::from));
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
