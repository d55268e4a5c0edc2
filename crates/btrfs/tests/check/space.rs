//! Chunks, extents, free space, checksums.

use crate::*;

#[test]
fn chunks_map_every_address_to_itself() {
    let data = (256, 228, DATA_START);
    let metadata = (256, 228, 128 << 20);
    broken("physical address", |s| s.edit_item(CHUNK, data, add(56, 4096)));
    broken("wrong device", |s| s.edit_item(CHUNK, data, put(48, [1])));
    broken("wrong device", |s| s.edit_item(CHUNK, data, put(64, [0; 16])));
    broken("profile SINGLE", |s| s.edit_item(CHUNK, data, put(44, [2])));
    broken("profile SINGLE", |s| s.edit_item(CHUNK, data, add(16, 65536)));
    broken("wrong length", |s| s.edit_item(CHUNK, data, put(0, [1])));
    broken("wrong length", |s| s.edit_item(CHUNK, data, put(6, [0, 0x80])));
    broken("covers the superblock", |s| {
        s.edit_item(CHUNK, (256, 228, 1 << 20), add(0, 64 << 20));
    });
    broken("do not cover", |s| s.edit_item(CHUNK, metadata, put(24, [2])));
    broken("a wrong size", |s| s.edit_item(CHUNK, (1, 216, 2), add(8, 4096)));
    broken("uses", |s| s.edit_item(CHUNK, (1, 216, 2), add(16, 4096)));
    broken("another one", |s| s.edit_item(CHUNK, (1, 216, 2), put(66, [0; 16])));
    broken("another filesystem's", |s| s.edit_item(CHUNK, (1, 216, 1), put(97, [1])));
    broken("a device is missing", |s| {
        s.edit_item(CHUNK, (1, 216, 2), put(0, [3]));
        s.edit_key(CHUNK, (1, 216, 2), (1, 216, 3));
    });
    broken("does not belong", |s| s.edit_key(CHUNK, (1, 216, 2), (1, 217, 2)));
    broken("device extents", |s| s.edit_item(DEV, (2, 204, DATA_START), add(24, 4096)));
    broken("of a chunk of this seed", |s| s.edit_item(DEV, (2, 204, DATA_START), add(16, 4096)));
    broken("counts errors", |s| s.edit_item(DEV, (0, 249, 1), add(8, 1)));
}

#[test]
fn extents_are_disjoint_and_match_their_uses() {
    let first = |s: &Seed| s.key(EXTENT, 168);
    let nth =
        |s: &Seed, n: usize| s.keys(EXTENT).into_iter().filter(|key| key.1 == 168).nth(n).unwrap();
    broken("leaves the data", |s| {
        let keys = s.keys(EXTENT);
        let last = *keys.iter().rfind(|key| key.1 == 168).unwrap();
        s.edit_key(EXTENT, last, (last.0, 168, last.2 + 4096));
    });
    broken("leaves the data", |s| {
        let key = first(s);
        s.edit_key(EXTENT, key, (key.0, 168, key.2 + 1));
    });
    broken("overlaps", |s| {
        let key = first(s);
        s.edit_key(EXTENT, key, (key.0, 168, key.2 + 4096));
    });
    broken("not a data extent", |s| s.edit_item(EXTENT, first(s), add(8, 1)));
    broken("than a file", |s| s.edit_item(EXTENT, first(s), put(24, [182])));
    broken("not ours", |s| s.edit_item(EXTENT, first(s), put(24 + 1 + 24, [2])));
    broken("not ours", |s| s.edit_item(EXTENT, first(s), add(25, 2)));
    broken("other subvolume", |s| s.edit_item(EXTENT, first(s), add(25, 1)));
    broken("uses, not", |s| s.edit_item(EXTENT, first(s), add(0, 1)));
    broken("extents and files disagree", |s| s.edit_item(EXTENT, first(s), add(33, 1)));
    broken("extents and files disagree", |s| s.edit_item(EXTENT, first(s), add(41, 4096)));
    broken("how often", |s| {
        // The file has inline data instead of its extent.
        s.edit_item(FILES, (DATA, 108, 0), put(8, 32u64.to_le_bytes()));
        s.edit_item(FILES, (DATA, 108, 0), put(20, [0]));
        s.edit_item(FILES, (DATA, 1, 0), put(16, 32u64.to_le_bytes()));
        s.edit_item(FILES, (DATA, 1, 0), put(24, 32u64.to_le_bytes()));
    });
    broken("out of order", |s| {
        let shared = nth(s, 3);
        assert!(s.keys(EXTENT).contains(&shared));
        s.edit_item(EXTENT, shared, |item| {
            let (one, two) = item[24..].split_at_mut(29);
            one.swap_with_slice(&mut two[..29]);
        });
    });
    broken("where its hash says", |s| {
        let key = s.key(EXTENT, 178);
        s.edit_key(EXTENT, key, (key.0, 178, 0));
    });
    broken("used but not there", |s| {
        let keys = s.keys(EXTENT);
        let last = *keys.iter().rfind(|key| key.1 == 178).unwrap();
        s.edit_key(EXTENT, last, (last.0 + 1, 178, last.2));
        s.edit_item(EXTENT, (last.0, 168, 4096), add(0, u64::MAX));
    });
    broken("not a node of this seed", |s| {
        let key = s.key(EXTENT, 169);
        s.edit_item(EXTENT, key, add(0, 1));
    });
    broken("nodes reached from the roots", |s| {
        let key = s.key(EXTENT, 169);
        s.edit_item(EXTENT, key, add(25, 1));
    });
    broken("nodes reached from the roots", |s| {
        let key = s.key(EXTENT, 169);
        s.edit_key(EXTENT, key, (key.0, 169, key.2 + 1));
    });
    broken("should be", |s| s.edit_item(EXTENT, (DATA_START, 192, 1 << 20), add(0, 4096)));
    broken("should be", |s| s.edit_item(EXTENT, (DATA_START, 192, 1 << 20), put(16, [4])));
    broken("of another tree", |s| s.edit_item(EXTENT, (DATA_START, 192, 1 << 20), add(8, 1)));
    broken("bytes are used in all", |s| s.info.bytes_used += 4096);
}

/// A seed with two data chunks, full.
fn two_chunks() -> Seed {
    let mut b = Builder::new();
    let file = b.mapped(0, "file", 2 << 30, &[(0, DATA_START, 2 << 30)]);
    b.tree.inodes[file as usize].nodatasum = true;
    let template = common::Template::default();
    let options = common::options(DATA_START + (2 << 30));
    let info = burgeon_btrfs::write_seed(b.finish(), &[], &options, &template).unwrap();
    let seed = Seed { info, pieces: template.into_pieces() };
    seed.check().unwrap();
    seed
}

#[test]
fn a_gap_in_the_data_chunks_is_found() {
    let down = 4096u64.wrapping_neg();
    let (first, second) = (DATA_START, DATA_START + (1 << 30));
    for chunk in [first, second] {
        // Either a gap between the two, or the last block is in none.
        let mut seed = two_chunks();
        seed.edit_item(CHUNK, (256, 228, chunk), add(0, down));
        seed.edit_item(CHUNK, (1, 216, 2), add(16, down));
        finds(&seed, "do not cover");
    }
}

#[test]
fn a_block_group_without_a_chunk_is_found() {
    let mut seed = two_chunks();
    let (first, len) = (DATA_START, 2u64 << 30);
    for (tree, key, at) in [(CHUNK, (256, 228, first), 0), (DEV, (2, 204, first), 24)] {
        seed.drop_last_item(tree);
        seed.edit_item(tree, key, put(at, len.to_le_bytes()));
    }
    seed.edit_item(EXTENT, (first, 192, len / 2), put(0, len.to_le_bytes()));
    seed.edit_key(EXTENT, (first, 192, len / 2), (first, 192, len));
    finds(&seed, "block group without a chunk");
}

#[test]
fn an_extent_across_a_chunk_border_is_found() {
    let mut seed = two_chunks();
    // The border between the two chunks moves down by a block, everywhere.
    let (first, second) = (DATA_START, DATA_START + (1 << 30));
    let down = 4096u64.wrapping_neg();
    seed.edit_item(CHUNK, (256, 228, first), add(0, down));
    seed.edit_item(CHUNK, (256, 228, second), add(0, 4096));
    seed.edit_item(CHUNK, (256, 228, second), add(56, down));
    seed.edit_key(CHUNK, (256, 228, second), (256, 228, second - 4096));
    seed.edit_item(DEV, (2, 204, first), add(24, down));
    seed.edit_item(DEV, (2, 204, second), add(24, 4096));
    seed.edit_item(DEV, (2, 204, second), add(16, down));
    seed.edit_key(DEV, (2, 204, second), (2, 204, second - 4096));
    finds(&seed, "not in one chunk");
    seed.edit_item(CHUNK, (256, 228, first), add(0, 8192));
    finds(&seed, "overlap");
}

#[test]
fn free_space_and_checksums_are_exact() {
    broken("free space tree", |s| {
        let keys = s.keys(FREE);
        let last = *keys.last().unwrap();
        s.edit_key(FREE, last, (last.0, 199, last.2 - 4096));
    });
    broken("free space tree", |s| s.edit_item(FREE, (DATA_START, 198, 1 << 20), put(0, [9])));
    broken("bitmaps", |s| s.edit_item(FREE, (DATA_START, 198, 1 << 20), put(4, [1])));
    broken("does not belong", |s| {
        let last = *s.keys(FREE).last().unwrap();
        s.edit_key(FREE, last, (last.0, 200, last.2));
    });
    broken("whole checksums", |s| {
        let key = s.key(CSUM, 128);
        s.edit_key(CSUM, key, (key.0, 128, key.2 + 1));
    });
    broken("blocks with checksums", |s| {
        let last = *s.keys(CSUM).last().unwrap();
        s.edit_key(CSUM, last, (last.0, 128, last.2 + 4096));
    });
    broken("two checksums", |s| {
        let keys = s.keys(CSUM);
        s.edit_key(CSUM, keys[1], (keys[1].0, 128, keys[0].2 + 4096));
    });
    broken("with and without checksums", |s| {
        s.edit_item(FILES, (SHARED, 1, 0), put(64, [1]));
    });
    broken("blocks with checksums", |s| s.edit_item(FILES, (PLAIN, 1, 0), put(64, [0])));
}
