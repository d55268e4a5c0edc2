//! Groups names and attributes into shared items.

use super::{Merged, Model};
use crate::{
    FIRST_INODE,
    format::{DIR_ENTRY, EXTREF_HEAD, INODE_REF_HEAD, ITEM_MAX, extref_hash, name_hash},
};

/// The items that name an inode's parents.
pub(crate) struct LinkItems {
    /// INODE_REF: one per parent, key offset the parent's number; members are dirents.
    pub(crate) refs: Vec<Merged<usize>>,
    /// INODE_EXTREF for names that did not fit, by hash.
    pub(crate) extrefs: Vec<Merged<usize>>,
}

impl Model<'_> {
    /// Sorts the names of an inode with several into items. An INODE_REF takes the names of one
    /// parent in their order as long as they fit; INODE_EXTREFs take the rest.
    pub(crate) fn link_items(&self, inode: usize) -> LinkItems {
        let mut links: Vec<usize> = self.links(inode).iter().map(|&link| link as usize).collect();
        let parent = |link: usize| u64::from(self.tree.dirents[link].parent) + FIRST_INODE;
        links.sort_by_key(|&link| (parent(link), link));
        let mut refs: Vec<Merged<usize>> = Vec::new();
        let mut spilled = Vec::new();
        for link in links {
            let (parent, name) = (parent(link), self.name(link));
            let len = INODE_REF_HEAD + name.len();
            match refs.last_mut().filter(|last| last.key_offset == parent) {
                Some(last) if last.len + len <= ITEM_MAX => {
                    last.len += len;
                    last.members.push(link);
                }
                Some(_) => spilled.push((u64::from(extref_hash(parent, name)), link)),
                None => refs.push(Merged { key_offset: parent, len, members: vec![link] }),
            }
        }
        LinkItems { refs, extrefs: merge(spilled, |&link| EXTREF_HEAD + self.name(link).len()) }
    }

    /// The XATTR_ITEMs of an inode, by hash; members are indices into the tree's xattrs.
    pub(crate) fn xattr_items(&self, inode: usize) -> Vec<Merged<usize>> {
        let inode = self.inode(inode);
        let first = inode.xattr_first as usize;
        let hashed = (first..first + inode.xattr_count as usize)
            .map(|xattr| (u64::from(name_hash(self.span(self.tree.xattrs[xattr].name))), xattr));
        merge(hashed.collect(), |&xattr| {
            let xattr = self.tree.xattrs[xattr];
            DIR_ENTRY + xattr.name.len as usize + xattr.value.len as usize
        })
    }
}

fn merge<T: Copy + Ord>(mut keyed: Vec<(u64, T)>, len: impl Fn(&T) -> usize) -> Vec<Merged<T>> {
    keyed.sort_unstable();
    let mut items: Vec<Merged<T>> = Vec::new();
    for (key_offset, member) in keyed {
        match items.last_mut().filter(|last| last.key_offset == key_offset) {
            Some(last) => {
                last.len += len(&member);
                last.members.push(member);
            }
            None => items.push(Merged { key_offset, len: len(&member), members: vec![member] }),
        }
    }
    items
}
