//! Any bytes are refused or give a map in which every address can be looked up.

#![no_main]

use std::sync::LazyLock;

use burgeon_fuzz::{damaged, sample, unpacked};
use burgeon_image::AddressMap;
use libfuzzer_sys::fuzz_target;

static BASE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let map = AddressMap::from_manifest(&sample()).expect("the sample has a map");
    let path = std::env::temp_dir().join(format!("fuzz-map-{}", std::process::id()));
    map.write_to(&path).expect("a temporary file");
    let bytes = std::fs::read(&path).expect("a temporary file");
    std::fs::remove_file(&path).expect("a temporary file");
    unpacked(&bytes)
});

fuzz_target!(|input: &[u8]| {
    let Some(bytes) = damaged(&BASE, input) else { return };
    let Ok(map) = AddressMap::from_bytes(bytes) else { return };
    let range = map.data_range();
    for address in (range.start()..range.end()).step_by(4096).take(1000) {
        let index = map.chunk_at(address).expect("every address lies in a chunk");
        let chunk = map.chunk(index);
        assert!(chunk.range.contains(address));
        assert!((chunk.object as usize) < map.objects().len());
        map.block_checksum(address);
    }
    assert_eq!(map.chunk_at(range.end()), None);
});
