use burgeon_btrfs::{Dirent, Tree};

/// The paths of a tree.
pub struct Paths<'a> {
    tree: &'a Tree,
    /// The first name of each inode.
    name_of: Vec<Option<u32>>,
}

impl<'a> Paths<'a> {
    /// Prepares paths for the inodes of `tree`; takes 8 bytes per inode.
    pub fn new(tree: &'a Tree) -> Self {
        let mut name_of = vec![None; tree.inodes.len()];
        for (index, dirent) in (0u32..).zip(&tree.dirents) {
            if let Some(name) = name_of.get_mut(dirent.inode as usize) {
                name.get_or_insert(index);
            }
        }
        Self { tree, name_of }
    }

    /// A path to `inode` (the first, if it has several): `/` for the root.
    pub fn of_inode(&self, inode: u32) -> Vec<u8> {
        match self.name(inode) {
            Some(dirent) => self.of_dirent(dirent),
            None => b"/".to_vec(),
        }
    }

    /// The path that ends in `dirent`.
    pub fn of_dirent(&self, dirent: &Dirent) -> Vec<u8> {
        let mut parts = vec![self.tree.bytes(dirent.name)];
        let mut at = dirent.parent;
        // A tree that was not validated may have a cycle.
        for _ in 0..self.name_of.len() {
            let Some(above) = self.name(at) else { break };
            parts.push(self.tree.bytes(above.name));
            at = above.parent;
        }
        let mut path = Vec::new();
        for part in parts.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(part);
        }
        path
    }

    fn name(&self, inode: u32) -> Option<&'a Dirent> {
        let index = self.name_of.get(inode as usize).copied().flatten();
        // The root has no name, even if an unvalidated tree gives it one.
        index.filter(|_| inode != 0).and_then(|index| self.tree.dirents.get(index as usize))
    }
}

/// A path to `inode`, for a message.
pub(crate) fn path_of(tree: &Tree, inode: u32) -> String {
    String::from_utf8_lossy(&Paths::new(tree).of_inode(inode)).into_owned()
}
