//! Inodes, names, file extents.

use crate::*;

/// Inconsistencies between two batches of leaves, which different threads read.
#[test]
fn rules_hold_across_batches() {
    let mut b = Builder::new();
    let directory = b.dir(0, "directory");
    for n in 0..20_000 {
        b.add(directory, format!("an entry with a name of some length {n}"), FILE);
    }
    let address = b.append(&pattern(1, 4096));
    let runs: Vec<_> = (0..20_000).map(|n| (n * 8192, address, 4096)).collect();
    let file = 256 + u64::from(b.mapped(0, "file", 20_000 * 8192, &runs));
    let options = b.options();
    let good = b.seed(&options);
    let starts: Vec<u64> = {
        let mut leaves = Vec::new();
        good.clone().edit_nodes(
            |header| header.owner == FILES && header.level == 0,
            |node| leaves.push(get_u64(node, 48)),
        );
        leaves.iter().step_by(64).skip(1).copied().collect()
    };
    // Each batch has its own first key: find borders inside the directory and inside the file.
    let mut tried = [false; 2];
    for start in starts {
        let mut first = (0, 0, 0);
        let at = |address: u64| {
            move |header: &common::Header| header.address == address && header.owner == FILES
        };
        good.clone().edit_nodes(at(start), |node| first = leaf_items(node)[0].0);
        let mut seed = good.clone();
        if first.0 == 257 && first.1 == 96 {
            // All names from here on get the next number.
            seed.edit_nodes(|header| header.owner == FILES, |node| bump_offsets(node, first));
            finds(&seed, "lacks an entry");
            tried[0] = true;
        } else if first.0 == file && first.1 == 108 {
            // The previous extent reaches into the first one here.
            seed.edit_nodes(at(start - 16384), |node| {
                let (_, range) = leaf_items(node).pop().unwrap();
                for at in [8, 29, 45] {
                    add(at, 8192)(&mut node[range.clone()]);
                }
            });
            finds(&seed, "overlap");
            tried[1] = true;
        }
    }
    assert_eq!(tried, [true; 2]);
}

/// Adds one to the offset of all keys of the same kind and object from `first` on.
fn bump_offsets(node: &mut [u8], first: (u64, u8, u64)) {
    let step = if node[100] == 0 { 25 } else { 33 };
    let count = u32::from_le_bytes(node[96..100].try_into().unwrap()) as usize;
    for slot in node[101..].chunks_exact_mut(step).take(count) {
        let offset = get_u64(slot, 9);
        if (get_u64(slot, 0), slot[8]) == (first.0, first.1) && offset >= first.2 {
            slot[9..17].copy_from_slice(&(offset + 1).to_le_bytes());
        }
    }
}

#[test]
fn inode_items_agree_with_other_items() {
    let wrong = |expected: &str, number: u64, at: usize, bytes: &[u8]| {
        broken(expected, |s| s.edit_item(FILES, (number, 1, 0), put(at, bytes)));
    };
    wrong("not an inode of this seed", DATA, 0, &[2]);
    wrong("not an inode of this seed", DATA, 64, &[2]);
    wrong("nanoseconds", DATA, 112 + 8, &[0xff; 4]);
    wrong("a mode that is none", DATA, 52, &[0xff; 4]);
    wrong("number of links", DATA, 40, &[2]);
    wrong("number of links", DIRECTORY, 40, &[2]);
    wrong("number of bytes", DATA, 24, &[1]);
    wrong("number of bytes", INLINE, 24, &[1]);
    wrong("number of bytes", DIRECTORY, 24, &[1]);
    wrong("a wrong size", DATA, 16, &[0, 0x10, 0]);
    wrong("a wrong size", DATA, 23, &[0x80]);
    wrong("a wrong size", INLINE, 16, &[5]);
    wrong("a wrong size", SYMLINK, 16, &[5]);
    wrong("a wrong size", DIRECTORY, 16, &[5]);
    wrong("a wrong size", DEVICE, 16, &[5]);
    wrong("device number", DATA, 56, &[5]);
    wrong("and has no checksums", DIRECTORY, 64, &[1]);
    wrong("has entries and is not a directory", DIRECTORY, 52, &0o100755u32.to_le_bytes());
    wrong("has content and is not a file", DATA, 52, &0o010644u32.to_le_bytes());
    wrong("disagree on types", DEVICE, 52, &0o060644u32.to_le_bytes());
    wrong("cannot be the root", 256, 52, &0o010644u32.to_le_bytes());
    broken("at offset 0", |s| s.edit_key(FILES, (INLINE, 1, 0), (INLINE, 1, 1)));
    broken("does not belong", |s| s.edit_key(FILES, (INLINE, 1, 0), (INLINE, 0, 0)));
    broken("is a directory with two names", |s| {
        s.edit_item(FILES, (LINKED, 1, 0), put(52, 0o040755u32.to_le_bytes()));
    });
}

#[test]
fn names_agree_in_all_items() {
    let item = |s: &Seed| {
        let keys = s.keys(FILES);
        *keys.iter().find(|key| key.0 == DIRECTORY && key.1 == 84).unwrap()
    };
    broken("no inode", |s| s.edit_item(FILES, (DIRECTORY, 96, 2), put(8, [2])));
    broken("another generation", |s| s.edit_item(FILES, (DIRECTORY, 96, 2), put(17, [2])));
    broken("not a file name", |s| s.edit_item(FILES, (DIRECTORY, 96, 2), put(30, b"/")));
    broken("not a file name", |s| s.edit_item(FILES, (DIRECTORY, 96, 2), put(30, [0])));
    broken("back references disagree", |s| {
        s.edit_item(FILES, (DATA, 12, DIRECTORY), put(10, b"DATA"));
    });
    broken("back references disagree", |s| s.edit_item(FILES, (DATA, 12, DIRECTORY), add(0, 1)));
    broken("disagree with themselves", |s| s.edit_item(FILES, item(s), put(29, [5])));
    broken("disagree with themselves", |s| s.edit_item(FILES, item(s), add(0, 1)));
    broken("where its hash says", |s| s.edit_item(FILES, item(s), put(30, b"X")));
    broken("where its hash says", |s| {
        let key = s.key(FILES, 13);
        s.edit_key(FILES, key, (key.0, 13, key.2 + 1));
    });
    broken("where its hash says", |s| {
        let key = s.key(FILES, 24);
        s.edit_item(FILES, key, put(30, b"X"));
    });
    broken("not an extended attribute", |s| {
        let key = s.key(FILES, 24);
        s.edit_item(FILES, key, put(29, [1]));
    });
    broken("the entry before is missing", |s| {
        s.edit_key(FILES, (DIRECTORY, 96, 3), (DIRECTORY, 96, 4));
    });
    broken("lacks its first entry", |s| {
        s.edit_key(FILES, (DIRECTORY, 96, 3), (DIRECTORY, 96, 4));
        s.edit_key(FILES, (DIRECTORY, 96, 2), (DIRECTORY, 96, 3));
    });
}

#[test]
fn a_duplicate_name_is_found() {
    let mut b = Builder::new();
    for name in common::colliding(!1, "x", 2) {
        b.add(0, name, FILE);
    }
    let options = b.options();
    let mut seed = b.seed(&options);
    let key = seed.key(FILES, 84);
    seed.edit_item(FILES, key, |item| {
        let (one, two) = item.split_at_mut(item.len() / 2);
        two.copy_from_slice(one);
    });
    assert!(seed.check().unwrap_err().to_string().contains("is there twice"));
}

#[test]
fn a_missing_inode_item_is_found() {
    let mut b = Builder::new();
    let file = b.inline(0, "file", b"");
    b.xattrs(file, &[(b"user.a", b"b")]);
    let options = b.options();
    let mut seed = b.seed(&options);
    let key = seed.key(FILES, 24);
    seed.edit_key(FILES, key, (258, 24, key.2));
    assert!(seed.check().unwrap_err().to_string().contains("258 is not there"));
}

#[test]
fn a_directory_cycle_is_found() {
    let mut b = Builder::new();
    let one = b.dir(0, "a");
    let two = b.dir(one, "a");
    b.dir(two, "a");
    let options = b.options();
    let mut seed = b.seed(&options);
    // From 256/257/258/259 to 256/259 and 257/258/257: each still has a name.
    for kind in [84, 96] {
        for (parent, child) in [(256, 259u64), (258, 257)] {
            let keys = seed.keys(FILES);
            let key = *keys.iter().find(|key| key.0 == parent && key.1 == kind).unwrap();
            seed.edit_item(FILES, key, put(0, child.to_le_bytes()));
        }
    }
    seed.edit_key(FILES, (257, 12, 256), (257, 12, 258));
    seed.edit_key(FILES, (259, 12, 258), (259, 12, 256));
    let error = seed.check().unwrap_err().to_string();
    assert!(error.contains("inside itself"), "{error}");
}

#[test]
fn file_extents_are_whole_and_disjoint() {
    broken("not a whole extent", |s| s.edit_item(FILES, (DATA, 108, 0), add(37, 4096)));
    broken("not a whole extent", |s| s.edit_item(FILES, (DATA, 108, 0), put(20, [2])));
    broken("not a plain extent", |s| s.edit_item(FILES, (DATA, 108, 0), put(16, [1])));
    broken("cannot be inline", |s| s.edit_item(FILES, (INLINE, 108, 0), add(8, 1)));
    broken("overlaps the extent before", |s| {
        s.edit_key(FILES, (MANY, 108, 8192), (MANY, 108, 8193));
    });
    broken("overlaps the extent before", |s| {
        s.edit_item(FILES, (MANY, 108, 0), |item| {
            for at in [8, 29, 45] {
                add(at, 8192)(item);
            }
        });
    });
}
