//! Any bytes are refused, or are the encoding of a seed's description and give superblocks.

#![no_main]

use std::sync::LazyLock;

use burgeon_block::Digest;
use burgeon_btrfs::{
    DeviceNo, Identity, SeedInfo, SeedOptions, Uuids, superblock, superblock_offsets, write_seed,
};
use burgeon_fuzz::{Nowhere, edits, sample};
use libfuzzer_sys::fuzz_target;

static BASE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let image = sample();
    let options = SeedOptions::new(image.data_range().end(), Uuids::derive(&Digest::of(b"image")));
    let info = write_seed(&image.tree, &image.block_checksums, &options, &Nowhere);
    info.expect("the sample makes a seed").to_bytes()
});

fuzz_target!(|input: &[u8]| {
    let mut bytes = BASE.clone();
    edits(&mut bytes, input);
    // The last field is the checksum of all before it.
    let end = bytes.len() - 8;
    let sum = xxhash_rust::xxh64::xxh64(&bytes[..end], 0);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    let Ok(info) = SeedInfo::from_bytes(&bytes) else { return };
    let again = SeedInfo::from_bytes(&info.to_bytes());
    assert!(again.is_ok_and(|again| again == info));
    let identity = Identity { fsid: [9; 16] };
    for device in [DeviceNo::Metadata, DeviceNo::Data] {
        for mirror in 0..superblock_offsets(&info, device).len() {
            let _ = superblock(&info, &identity, device, mirror);
        }
    }
});
