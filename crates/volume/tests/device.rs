//! The lazy device of a mount: superblocks, zeros and lazy data, in any mixture.

mod common;

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, BlockDevice, Counters, ErrorKind, Now, Pages};
use burgeon_volume::{LazyDevice, VolumeLimits};
use common::{DATA_START, Fault, image_at, setup, setup_with};

const OFFSETS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];

fn superblocks() -> Vec<(u64, Box<[u8; 4096]>)> {
    OFFSETS.iter().zip(1..).map(|(offset, byte)| (*offset, Box::new([byte; 4096]))).collect()
}

#[tokio::test]
async fn every_byte_is_what_its_address_says() {
    let setup = setup();
    let data = setup.volume.map().data_range();
    let size = data.end() + (64 << 20);
    let counters: Arc<Counters> = Arc::default();
    let device =
        LazyDevice::new(Arc::clone(&setup.volume), Arc::clone(&counters), size, superblocks())
            .unwrap();
    assert_eq!(device.size(), size);
    let expected =
        |address: u64| match OFFSETS.iter().position(|o| (*o..*o + 4096).contains(&address)) {
            Some(index) => index as u8 + 1,
            None if data.contains(address) => setup.image.bytes[(address - DATA_START) as usize],
            None => 0,
        };
    let starts = [
        0,
        OFFSETS[0] - 8192,
        OFFSETS[0],
        OFFSETS[0] + 4096,
        OFFSETS[1] - 4096,
        OFFSETS[2] - 12288,
        data.start() - 8192,
        data.start(),
        data.end() - 8192,
        data.end(),
        size - 16384,
    ];
    for start in starts {
        for blocks in 1..=4 {
            let mut pages = Pages::zeroed(blocks * BLOCK_SIZE).unwrap();
            let buf = pages.bytes_mut();
            buf.fill(0xee);
            if device.try_read(start, buf).unwrap() == Now::Absent {
                device.read(start, buf).await.unwrap();
                setup.settle().await;
            }
            let right = buf.iter().zip(start..).all(|(byte, address)| *byte == expected(address));
            assert!(right, "{blocks} blocks at {start}");
        }
    }
    assert_eq!(counters.fetches.get(), 2, "the first and the last chunk, once each");
}

/// Reads that are fetched, and those straight from an object outside the store. In real time: a
/// wait has to last.
#[tokio::test]
async fn a_wait_names_the_attempts_that_failed() {
    for object in ["packs/test", "file/dev/disk"] {
        let setup = setup_with(image_at(3, object), VolumeLimits::default());
        let (data, counters) = (setup.volume.map().data_range(), Arc::clone(&setup.counters));
        let volume = Arc::clone(&setup.volume);
        let device = LazyDevice::new(volume, counters, data.end(), superblocks()).unwrap();
        setup.source.fail([Fault::Unavailable, Fault::Unavailable, Fault::WrongByte]);
        let mut pages = Pages::zeroed(BLOCK_SIZE).unwrap();
        device.read(data.start(), pages.bytes_mut()).await.unwrap();
        let waits = device.waits(0);
        assert_eq!(
            (waits.len(), waits[0].failed_tries, waits[0].fetched),
            (1, 3, true),
            "{object}"
        );
    }
}

#[test]
fn impossible_devices_and_reads_are_refused() {
    let setup = setup();
    let data = setup.volume.map().data_range();
    let make = |size, offset| {
        let superblocks = vec![(offset, Box::new([0; 4096]))];
        LazyDevice::new(Arc::clone(&setup.volume), Arc::clone(&setup.counters), size, superblocks)
    };
    for (size, offset) in [
        (data.end() - 4096, 65536),
        (data.end() + 1, 65536),
        (data.end(), data.start()),
        (data.end(), data.end()),
        (data.end(), 65537),
        (data.end(), u64::MAX),
    ] {
        let error = make(size, offset).err().expect("must be refused");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let device = make(data.end(), 65536).unwrap();
    for (offset, len) in [(1, 4096), (0, 100), (data.end(), 4096), (u64::MAX - 4095, 4096)] {
        assert!(device.try_read(offset, &mut vec![0; len]).is_err(), "{len} at {offset}");
    }
}
