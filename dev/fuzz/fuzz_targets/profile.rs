//! Any bytes are refused or give a profile that encodes to itself, merges, and says of an image
//! nothing but its own lazy data, whatever it says.

#![no_main]

use std::sync::LazyLock;

use burgeon_block::{ByteRange, Digest};
use burgeon_fuzz::{damaged, sample, unpacked};
use burgeon_image::{DATA_START, Manifest, Profile, READS_MAX};
use libfuzzer_sys::fuzz_target;

static IMAGE: LazyLock<Manifest> = LazyLock::new(sample);

static BASE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let block = |n: u64| ByteRange::at(DATA_START + n * 4096, 4096).expect("short");
    let profile = Profile::of(&IMAGE, Digest::of(b"image"), &[block(2), block(0)]);
    assert_eq!(profile.reads.len(), 2);
    let base = unpacked(&profile.encode().expect("the sample encodes"));
    assert_eq!(Profile::decode(&base).expect("the sample decodes"), profile);
    base
});

fuzz_target!(|input: &[u8]| {
    let Some(bytes) = damaged(&BASE, input) else { return };
    let Ok(profile) = Profile::decode(&bytes) else { return };
    let again = profile.encode().expect("what decodes encodes");
    assert_eq!(Profile::decode(&again).expect("and decodes again"), profile);
    assert!(profile.addresses().all(|range| range.start() >= DATA_START && !range.is_empty()));
    let merged = profile.merge(&profile);
    assert!(merged.reads.len() <= READS_MAX && merged.bytes() <= profile.bytes());
    let here = profile.translate(&IMAGE, Digest::of(b"another"));
    let data = IMAGE.data_range();
    assert!(here.addresses().all(|range| data.intersect(range) == Some(range)));
});
