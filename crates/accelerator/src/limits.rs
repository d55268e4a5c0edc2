//! The limits of a slow device, as the device in front of it shows them.
//!
//! | limit | in front |
//! |---|---|
//! | logical block | the same |
//! | physical block | the same, at least the 4 KiB that the cache keeps as a unit |
//! | optimal length | the same, or 64 KiB |
//! | discard granularity | the same, at least 4 KiB; a device that discards nothing shows no discards |
//!
//! Requests are at most 256 KiB long. The kernel cuts them for a slow device that takes less.

use std::fs;

use burgeon_block::{BLOCK_SIZE, Shape, WriteCache};

use crate::disk::Disk;

/// Preferred length of requests where the slow device has none, in bytes.
const OPTIMAL_IO: u32 = 64 << 10;
/// Limits above this say more of a driver than of a device.
const LARGEST: u32 = 16 << 20;

/// The kernel's figures of a block device; a file has none of them.
#[derive(Clone, Copy, Default, Debug)]
struct Queue {
    physical_block: u32,
    optimal_io: u32,
    discard_granularity: u32,
}

/// The shape of the device in front of `slow`.
pub(crate) fn shape_of(slow: &Disk) -> Shape {
    let queue = match slow.numbers() {
        Some((major, minor)) => read(&format!("/sys/dev/block/{major}:{minor}")),
        // Holes are punched into a file.
        None => Queue { discard_granularity: BLOCK_SIZE as u32, ..Queue::default() },
    };
    shape(slow.size(), slow.logical_block(), queue)
}

/// Reads the figures of the device whose folder in sysfs this is; a partition has those of its
/// disk.
fn read(folder: &str) -> Queue {
    let value = |name: &str| {
        let places = [format!("{folder}/queue/{name}"), format!("{folder}/../queue/{name}")];
        let text = places.iter().find_map(|place| fs::read_to_string(place).ok());
        text.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let bounded = |name: &str| u32::try_from(value(name)).unwrap_or(0);
    let discards = value("discard_max_bytes") > 0;
    Queue {
        physical_block: bounded("physical_block_size"),
        optimal_io: bounded("optimal_io_size"),
        discard_granularity: if discards { bounded("discard_granularity") } else { 0 },
    }
}

fn shape(size: u64, logical_block: u32, queue: Queue) -> Shape {
    let block = BLOCK_SIZE as u32;
    let is_usable =
        |len: u32, unit: u32| len.is_power_of_two() && len <= LARGEST && len.is_multiple_of(unit);
    let physical_block = match queue.physical_block {
        len if is_usable(len, block) => len,
        _ => block,
    };
    let optimal_io = match queue.optimal_io {
        len if is_usable(len, physical_block) => len,
        _ => OPTIMAL_IO.max(physical_block),
    };
    let discard_granularity = match queue.discard_granularity {
        0 => 0,
        len if is_usable(len, block) => len,
        len if len <= block => block,
        len => len.next_multiple_of(block),
    };
    let cache = WriteCache::Volatile;
    Shape { size, logical_block, physical_block, optimal_io, discard_granularity, cache }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Queue, read, shape};

    #[test]
    fn limits_are_those_of_the_slow_device() {
        let of = |physical_block, optimal_io, discard_granularity| {
            let queue = Queue { physical_block, optimal_io, discard_granularity };
            let shape = shape(1 << 30, 512, queue);
            shape.check().unwrap();
            assert_eq!(shape.logical_block, 512);
            (shape.physical_block, shape.optimal_io, shape.discard_granularity)
        };
        // A disk; krbd; a disk with larger sectors; one that says nonsense.
        assert_eq!(of(512, 0, 512), (4096, 65_536, 4096));
        assert_eq!(of(65_536, 4 << 20, 65_536), (65_536, 4 << 20, 65_536));
        assert_eq!(of(16_384, 16_384, 0), (16_384, 16_384, 0));
        assert_eq!(of(3000, u32::MAX, 5000), (4096, 65_536, 8192));
    }

    #[test]
    fn a_partition_has_the_limits_of_its_disk() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("sda");
        fs::create_dir_all(disk.join("queue")).unwrap();
        fs::create_dir_all(disk.join("sda2")).unwrap();
        for (name, value) in [("discard_granularity", "8192"), ("discard_max_bytes", "4194304")] {
            fs::write(disk.join("queue").join(name), format!("{value}\n")).unwrap();
        }
        let found = read(disk.join("sda2").to_str().unwrap());
        assert_eq!((found.discard_granularity, found.physical_block), (8192, 0));
        // One without discards has a granularity all the same.
        fs::write(disk.join("queue/discard_max_bytes"), "0\n").unwrap();
        assert_eq!(read(disk.to_str().unwrap()).discard_granularity, 0);
    }
}
