//! Any bytes are refused or read as the superblock of a cache whose parts fit into its device, or
//! as records of its log; the checksums are made good again, so that the rest is reached.

#![no_main]

use std::sync::{Arc, Mutex, PoisonError};

use burgeon_accelerate::{
    CacheStore, CachedDevice, DeviceOptions, Mode, SlowDevice, Trust, create_with,
    format::{Block, LOG_MIN, Layout, SIZE_MIN, Super},
    policy::PolicyKind,
};
use burgeon_block::{ByteRange, Erase, LocalFile, Result};
use burgeon_fuzz::edits;
use libfuzzer_sys::fuzz_target;

const BLOCK: usize = 4096;

#[derive(Clone)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    fn new(len: u64) -> Self {
        Self(Arc::new(Mutex::new(vec![0; len as usize])))
    }
}

impl LocalFile for Memory {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let at = offset as usize;
        buf.copy_from_slice(
            &self.0.lock().unwrap_or_else(PoisonError::into_inner)[at..][..buf.len()],
        );
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let at = offset as usize;
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[at..][..buf.len()]
            .copy_from_slice(buf);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

impl SlowDevice for Memory {
    fn size(&self) -> u64 {
        SIZE_MIN
    }

    fn erase(&self, _range: ByteRange, _how: Erase) -> Result<()> {
        Ok(())
    }
}

fn seal(bytes: &mut [u8]) {
    let sum = burgeon_block::ChecksumKind::Crc32c.of(&bytes[4..]) as u32;
    bytes[..4].copy_from_slice(&sum.to_le_bytes());
}

fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    if how & 4 == 0 { read_super(*how, input) } else { read_log(*how, input) }
});

fn read_super(how: u8, input: &[u8]) {
    let layout = Layout::new(SIZE_MIN << (how >> 4)).expect("a layout");
    let layout = match how & 8 {
        0 => layout,
        _ => layout.grown(2 * layout.size).expect("a growth"),
    };
    let mut bytes = Super::new([7; 16], layout).encode().bytes_mut().to_vec();
    if how.is_multiple_of(2) {
        let len = input.len().min(bytes.len());
        bytes[..len].copy_from_slice(&input[..len]);
    } else {
        edits(&mut bytes, input);
    }
    bytes.resize(BLOCK, 0);
    if how & 2 == 0 {
        seal(&mut bytes);
    }
    let mut block = Block::zeroed();
    block.bytes_mut().copy_from_slice(&bytes);
    if let Ok(read) = Super::decode(&block, layout.size) {
        let slots = read.layout.sets * 16;
        assert!(read.layout.size <= layout.size && slots > 0);
        assert!(read.layout.slot_at(slots - 1) + 4096 <= layout.size);
    }
}

fn open(cache: &Memory, slow: &Memory) -> Result<CachedDevice<Memory, Memory>> {
    let distrust = Box::new(|_: &[burgeon_accelerate::Dirty]| Ok(()));
    let store = CacheStore::open(cache.clone(), SIZE_MIN, Trust::Warm, PolicyKind::Fifo, distrust)?;
    let options = DeviceOptions::new(Mode::WriteBack);
    CachedDevice::attach(Arc::new(store), slow.clone(), "slow", Trust::Warm, options)
}

/// A log with some records, the first of which is edited.
fn read_log(how: u8, input: &[u8]) {
    let (cache, slow) = (Memory::new(SIZE_MIN), Memory::new(SIZE_MIN));
    let layout = Layout::with_log(SIZE_MIN, LOG_MIN).expect("a layout");
    create_with(&cache, layout, [7; 16]).expect("a cache");
    let device = open(&cache, &slow).expect("a device");
    for block in 0..6 {
        device.write(block * 4096, &[block as u8; 2 * BLOCK], false).expect("a write");
    }
    drop(device);
    {
        let mut bytes = cache.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The first segment that is opened is the second one, of four blocks.
        let first = (2 + layout.bitmap_blocks as usize + 4) * BLOCK;
        let record = &mut bytes[first..first + BLOCK];
        edits(record, input);
        if how & 2 == 0 {
            seal(record);
        }
    }
    if let Ok(device) = open(&cache, &slow) {
        let mut bytes = vec![0; BLOCK];
        for block in 0..8 {
            let _ = device.read(block * 4096, &mut bytes);
        }
        let _ = device.store().write_back_all();
    }
}
