//! Random trees, as sequences of steps.

use std::collections::BTreeSet;

use burgeon_btrfs::DATA_START;
use proptest::prelude::*;

use super::{Builder, FILE, pattern};

/// Blocks of lazy data: the first part for files with checksums, the rest for those without.
const SUMMED: u64 = 96;
const BLOCKS: u64 = 128;

/// One step of building a tree. Numbers that select something are taken modulo the number of
/// choices.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Directory {
        parent: usize,
        name: Vec<u8>,
    },
    Inline {
        parent: usize,
        name: Vec<u8>,
        content: Vec<u8>,
    },
    Symlink {
        parent: usize,
        name: Vec<u8>,
        target: Vec<u8>,
    },
    Special {
        parent: usize,
        name: Vec<u8>,
        kind: usize,
        rdev: u32,
    },
    Hole {
        parent: usize,
        name: Vec<u8>,
        size: u64,
    },
    /// Pairs of blocks: preceding hole, length, offset in the lazy data.
    File {
        parent: usize,
        name: Vec<u8>,
        plain: bool,
        runs: Vec<(u64, u64, u64)>,
        cut: u64,
    },
    Link {
        parent: usize,
        name: Vec<u8>,
        target: usize,
    },
    Xattrs {
        target: usize,
        xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    },
    Attributes {
        target: usize,
        owner: (u32, u32),
        mode: u32,
        time: (i64, u32),
    },
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![8 => b'a'..=b'd', 1 => any::<u8>()]
        .prop_filter("a name", |byte| !matches!(byte, 0 | b'/'));
    prop_oneof![8 => 1..5usize, 1 => 200..=255usize]
        .prop_flat_map(move |len| proptest::collection::vec(byte.clone(), len))
        .prop_filter("a name", |name| !matches!(&name[..], b"." | b".."))
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let p = any::<usize>;
    let bytes = |most: usize| proptest::collection::vec(any::<u8>(), 1..=most);
    let target = proptest::collection::vec(1..=255u8, 1..=4095);
    let runs = proptest::collection::vec((0..3u64, 1..9u64, 0..SUMMED), 1..6);
    let xattrs = proptest::collection::vec((name(), bytes(600)), 0..5);
    prop_oneof![
        (p(), name()).prop_map(|(parent, name)| Step::Directory { parent, name }),
        (p(), name(), bytes(4095)).prop_map(|(parent, name, content)| Step::Inline {
            parent,
            name,
            content
        }),
        (p(), name(), target).prop_map(|(parent, name, target)| Step::Symlink {
            parent,
            name,
            target
        }),
        (p(), name(), p(), any::<u32>()).prop_map(|(parent, name, kind, rdev)| Step::Special {
            parent,
            name,
            kind,
            rdev
        }),
        (p(), name(), 0..=i64::MAX as u64).prop_map(|(parent, name, size)| Step::Hole {
            parent,
            name,
            size
        }),
        (p(), name(), any::<bool>(), runs, 0..4096u64).prop_map(
            |(parent, name, plain, runs, cut)| Step::File { parent, name, plain, runs, cut }
        ),
        (p(), name(), p()).prop_map(|(parent, name, target)| Step::Link { parent, name, target }),
        (p(), xattrs).prop_map(|(target, xattrs)| Step::Xattrs { target, xattrs }),
        (p(), any::<(u32, u32)>(), any::<u32>(), (any::<i64>(), 0..1_000_000_000u32))
            .prop_map(|(target, owner, mode, time)| Step::Attributes { target, owner, mode, time }),
    ]
}

/// The tree under construction, with the choices for the next steps.
struct Growing {
    builder: Builder,
    directories: Vec<u32>,
    others: Vec<u32>,
    taken: BTreeSet<(u32, Vec<u8>)>,
}

impl Growing {
    fn new() -> Self {
        let mut builder = Builder::new();
        builder.data = pattern(7, (BLOCKS * 4096) as usize);
        Self { builder, directories: vec![0], others: Vec::new(), taken: BTreeSet::new() }
    }

    /// The chosen directory, if the name is free there.
    fn place(&mut self, parent: usize, name: &[u8]) -> Option<u32> {
        let parent = self.directories[parent % self.directories.len()];
        self.taken.insert((parent, name.to_vec())).then_some(parent)
    }

    fn step(&mut self, step: &Step) -> Option<()> {
        match step {
            Step::Directory { parent, name } => {
                let parent = self.place(*parent, name)?;
                let directory = self.builder.dir(parent, name);
                self.directories.push(directory);
            }
            Step::Inline { parent, name, content } => {
                let parent = self.place(*parent, name)?;
                self.others.push(self.builder.inline(parent, name, content));
            }
            Step::Symlink { parent, name, target } => {
                let parent = self.place(*parent, name)?;
                self.others.push(self.builder.symlink(parent, name, target));
            }
            Step::Special { parent, name, kind, rdev } => {
                let parent = self.place(*parent, name)?;
                let mode = [0o010644, 0o140755, 0o020600, 0o060600][kind % 4];
                let inode = self.builder.add(parent, name, mode);
                if kind % 4 >= 2 {
                    self.builder.tree.inodes[inode as usize].rdev = u64::from(*rdev);
                }
                self.others.push(inode);
            }
            Step::Hole { parent, name, size } => {
                let parent = self.place(*parent, name)?;
                let inode = self.builder.add(parent, name, FILE);
                self.builder.tree.inodes[inode as usize].size = *size;
                self.others.push(inode);
            }
            Step::File { parent, name, plain, runs, cut } => {
                let parent = self.place(*parent, name)?;
                let inode = self.file(parent, name, *plain, runs, *cut);
                self.others.push(inode);
            }
            Step::Link { parent, name, target } => {
                if self.others.is_empty() {
                    return None;
                }
                let target = self.others[target % self.others.len()];
                let parent = self.place(*parent, name)?;
                self.builder.link(parent, name, target);
            }
            Step::Xattrs { target, xattrs } => {
                let inode = (target % self.builder.tree.inodes.len()) as u32;
                let mut seen = BTreeSet::new();
                let xattrs: Vec<(&[u8], &[u8])> = xattrs
                    .iter()
                    .filter(|(name, _)| seen.insert(name.clone()))
                    .map(|(name, value)| (&name[..], &value[..]))
                    .collect();
                self.builder.xattrs(inode, &xattrs);
            }
            Step::Attributes { target, owner, mode, time } => {
                let count = self.builder.tree.inodes.len();
                let inode = &mut self.builder.tree.inodes[target % count];
                (inode.uid, inode.gid) = *owner;
                inode.mode = inode.mode & 0o170000 | mode & 0o7777;
                (inode.mtime_s, inode.mtime_ns) = *time;
            }
        }
        Some(())
    }

    fn file(
        &mut self,
        parent: u32,
        name: &[u8],
        plain: bool,
        runs: &[(u64, u64, u64)],
        cut: u64,
    ) -> u32 {
        let (low, high) = if plain { (SUMMED, BLOCKS) } else { (0, SUMMED) };
        let mut offset = 0;
        let mut extents = Vec::new();
        for (hole, len, at) in runs {
            offset += hole;
            let at = low + at % (high - low);
            let len = (*len).min(high - at);
            extents.push((offset * 4096, DATA_START + at * 4096, len * 4096));
            offset += len;
        }
        let inode = self.builder.mapped(parent, name, offset * 4096 - cut, &extents);
        self.builder.tree.inodes[inode as usize].nodatasum = plain;
        inode
    }
}

pub(crate) fn grow(steps: &[Step]) -> Builder {
    let mut growing = Growing::new();
    for step in steps {
        // A step with a name that is taken is skipped.
        let _ = growing.step(step);
    }
    growing.builder
}
