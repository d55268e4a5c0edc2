//! Any bytes are refused or read as the superblock of a cache whose parts fit into its device; the
//! checksum is made good again, so that the rest is reached.

#![no_main]

use burgeon_accelerate::format::{Block, Layout, SIZE_MIN, Super};
use burgeon_fuzz::edits;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    let layout = Layout::new(SIZE_MIN << (how >> 4)).expect("a layout");
    let mut bytes = Super::new([7; 16], layout).encode().bytes_mut().to_vec();
    if how % 2 == 0 {
        let len = input.len().min(bytes.len());
        bytes[..len].copy_from_slice(&input[..len]);
    } else {
        edits(&mut bytes, input);
    }
    bytes.resize(4096, 0);
    if how & 2 == 0 {
        let sum = burgeon_block::ChecksumKind::Crc32c.of(&bytes[4..]) as u32;
        bytes[..4].copy_from_slice(&sum.to_le_bytes());
    }
    let mut block = Block::zeroed();
    block.bytes_mut().copy_from_slice(&bytes);
    if let Ok(read) = Super::decode(&block, layout.size) {
        let slots = read.layout.sets * 16;
        assert!(read.layout.size <= layout.size && slots > 0);
        assert!(read.layout.slot_at(slots - 1) + 4096 <= layout.size);
    }
});
