//! Arbitrary input: a result, never a panic.

use crate::*;

/// Arbitrary content in nodes with valid checksums: a result, never a panic.
#[test]
fn arbitrary_metadata_never_panics() {
    let good = seed();
    let nodes = (good.pieces[0].len() + good.pieces[1].len()) / 16384;
    let random = pattern(7, 16 * 4000);
    for bytes in random.chunks(16) {
        let (place, value) = (get_u64(bytes, 0), get_u64(bytes, 8));
        let mut seed = good.clone();
        let target = place as usize % nodes;
        let node = seed.nodes().nth(target).unwrap();
        let items = u32::from_le_bytes(node[96..100].try_into().unwrap()) as usize;
        let address = get_u64(node, 48);
        // Headers, and the bodies at the end, are the parts with content.
        let at = match place >> 40 & 3 {
            0 => 48 + (place >> 16) as usize % 53,
            1 => 101 + (place >> 16) as usize % (items * 25).max(1),
            _ => 16384 - 8 - (place >> 16) as usize % 4000,
        };
        let value = match place >> 42 & 3 {
            0 => value,
            1 => value & 0xff,
            2 => u64::MAX - (value & 0xffff),
            _ => get_u64(node, at).wrapping_add(1 << (value % 64)),
        };
        seed.edit_nodes(|header| header.address == address, put(at, value.to_le_bytes()));
        if let Err(error) = seed.check() {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
    }
}

#[test]
fn descriptions_are_checked_too() {
    let info = seed().info;
    let good = info.to_bytes();
    assert_eq!(SeedInfo::from_bytes(&good).unwrap(), info);
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        SeedInfo::from_bytes(&bytes).expect_err("a flipped bit");
        SeedInfo::from_bytes(&good[..at]).expect_err("a part");
    }
    let mut newer = good.clone();
    newer[8] = 2;
    let kind = SeedInfo::from_bytes(&newer).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::UnsupportedFormat);
}

/// Arbitrary fields with a valid checksum: refused, or good enough for superblocks.
#[test]
fn arbitrary_descriptions_never_panic() {
    let good = seed().info.to_bytes();
    for bytes in pattern(11, 16 * 20_000).chunks(16) {
        let (place, value) = (get_u64(bytes, 0), get_u64(bytes, 8));
        let mut wild = good.clone();
        let at = 28 + (place >> 8) as usize % 60;
        match place & 3 {
            0 => wild[at] = value as u8,
            1 => wild[at..at + 8].copy_from_slice(&value.to_le_bytes()),
            2 => wild[at..at + 8].copy_from_slice(&(value & !0xffff).to_le_bytes()),
            _ => wild[at] ^= 1 << (value % 8),
        }
        let sum = ChecksumKind::Xxhash64.of(&wild[..232]);
        wild[232..].copy_from_slice(&sum.to_le_bytes());
        let Ok(info) = SeedInfo::from_bytes(&wild) else { continue };
        for device in [DeviceNo::Metadata, DeviceNo::Data] {
            let mirrors = superblock_offsets(&info, device).len();
            for mirror in 0..=mirrors {
                let block = superblock(&info, &IDENTITY, device, mirror);
                assert_eq!(block.is_some(), mirror < mirrors);
            }
        }
    }
}
