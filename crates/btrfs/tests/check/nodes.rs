//! Nodes and roots.

use crate::*;

#[test]
fn any_flipped_bit_is_found() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Xxhash64] {
        let mut builder = Builder::new();
        builder.file(0, "file", &pattern(1, 10_000));
        let options = burgeon_btrfs::SeedOptions { checksum, ..builder.options() };
        let good = builder.seed(&options);
        let mut random = pattern(99, 8 * 1000).chunks(8).map(|c| get_u64(c, 0)).collect::<Vec<_>>();
        random.extend(0..64);
        for flip in random {
            let mut seed = good.clone();
            let nodes = seed.nodes().count();
            let node = seed.nodes().nth(flip as usize % nodes).unwrap();
            node[(flip >> 16) as usize % 16384] ^= 1 << (flip >> 40 & 7);
            seed.check().expect_err("a flipped bit");
        }
    }
}

#[test]
fn nodes_match_their_parents() {
    let files_leaf = |h: &common::Header| h.owner == FILES && h.level == 0;
    let files_root = |h: &common::Header| h.owner == FILES && h.level == 1;
    let dev = |h: &common::Header| h.owner == DEV;
    broken("too long", |s| s.nodes().for_each(|node| node[31] = 1));
    broken("another filesystem", |s| s.edit_nodes(dev, put(32, [1])));
    broken("belongs at", |s| s.edit_nodes(dev, add(48, 16384)));
    broken("unknown flags", |s| s.edit_nodes(dev, put(56, [3])));
    broken("another chunk tree", |s| s.edit_nodes(dev, put(64, [0; 16])));
    broken("another generation", |s| s.edit_nodes(dev, add(80, 1)));
    broken("belongs to tree", |s| s.edit_nodes(dev, put(88, [11])));
    broken("another level", |s| s.edit_nodes(dev, put(100, [1])));
    broken("wrong number of items", |s| s.edit_nodes(dev, put(96, [0xff; 4])));
    broken("wrong number of items", |s| s.edit_nodes(files_leaf, put(96, [0; 4])));
    broken("wrong place", |s| s.edit_nodes(dev, put(101 + 17, [0; 4])));
    broken("wrong place", |s| s.edit_nodes(dev, put(101 + 21, [0xff; 4])));
    broken("between its items", |s| s.edit_nodes(dev, put(8192, [1])));
    broken("wrong number of children", |s| s.edit_nodes(files_root, put(96, [0; 4])));
    broken("wrong number of children", |s| s.edit_nodes(files_root, put(96, [0xff; 4])));
    broken("child of another generation", |s| s.edit_nodes(files_root, add(101 + 25, 1)));
    broken("there can be no node", |s| s.edit_nodes(files_root, add(101 + 17, 1)));
    broken("there can be no node", |s| s.edit_nodes(files_root, add(101 + 17, 1 << 50)));
    broken("there can be no node", |s| s.edit_nodes(files_root, add(101 + 17, u64::MAX << 30)));
    // A key beyond those of the next leaf, and one that differs from the parent's.
    broken("out of order", |s| s.edit_nodes(files_root, add(101 + 33, 1)));
    broken("keys of the next", |s| {
        s.edit_nodes(files_root, |node| {
            // The second child then begins before the first ends.
            let lower = node[101..118].to_vec();
            node[134..151].copy_from_slice(&lower);
            node[134 + 9] += 1;
        });
    });
    broken("out of order", |s| s.edit_key(DEV, (2, 204, DATA_START), (0, 204, DATA_START)));
}

#[test]
fn a_node_visited_too_often_is_found() {
    broken("more than once", |s| {
        s.edit_nodes(
            |header| header.owner == FILES && header.level == 1,
            |node| {
                // As many children as fit, all the same node.
                let child = node[118..134].to_vec();
                node[96..100].copy_from_slice(&493u32.to_le_bytes());
                for (index, pointer) in node[101..].chunks_exact_mut(33).take(493).enumerate() {
                    pointer[..8].copy_from_slice(&(256 + index as u64).to_le_bytes());
                    pointer[8] = 1;
                    pointer[9..17].fill(0);
                    pointer[17..].copy_from_slice(&child);
                }
            },
        );
    });
}

#[test]
fn roots_are_complete() {
    broken("lacks a tree", |s| s.edit_key(ROOT, (10, 132, 0), (11, 132, 0)));
    broken("not a root of this seed", |s| s.edit_item(ROOT, (7, 132, 0), add(160, 1)));
    broken("another UUID", |s| s.edit_item(ROOT, (256, 132, 0), put(247, [0; 16])));
    broken("names no subvolume", |s| s.edit_item(ROOT, (5, 156, 256), add(8, 1)));
    broken("both directions", |s| s.edit_key(ROOT, (256, 144, 5), (256, 145, 5)));
    broken("tree 7 has", |s| s.edit_item(ROOT, (7, 132, 0), add(160 + 32, 16384)));
    broken("uuid tree", |s| {
        let key = s.key(UUID, 251);
        s.edit_item(UUID, key, add(0, 1));
    });
    broken("top level", |s| s.edit_item(TOP, (256, 96, 2), add(0, 1)));
    broken("top level", |s| s.edit_key(TOP, (256, 96, 2), (256, 97, 2)));
    broken("relocation tree", |s| s.edit_key(RELOC, (256, 12, 256), (256, 13, 256)));
}

#[test]
fn an_item_that_is_too_long_is_found() {
    broken("an item is too long", |s| {
        s.edit_nodes(
            |header| header.owner == CHUNK,
            |node| {
                // The last item moves into the gap before it, by a byte.
                let at = 101 + (leaf_items(node).len() - 1) * 25;
                let (_, range) = leaf_items(node).pop().unwrap();
                node.copy_within(range.clone(), range.start - 1);
                node[at + 17] -= 1;
                node[at + 21] += 1;
            },
        );
    });
}

#[test]
fn another_identity_is_refused() {
    let seed = seed();
    let error = check(&seed.info, &IDENTITY, &seed).unwrap_err();
    assert!(error.to_string().contains("another filesystem"), "{error}");
}
