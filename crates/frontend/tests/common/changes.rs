//! Changes to a writable block device: the same over each transport.

use std::{
    fs::{File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
    sync::atomic::Ordering::SeqCst,
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Pages};

use crate::scratch::Scratch;

const BLKDISCARD: libc::c_ulong = 0x1277;
const BLKZEROOUT: libc::c_ulong = 0x127f;
/// Changes at random.
const CHANGES: u64 = 300;
/// Blocks of the longest one: more than a request holds.
const BLOCKS_MAX: u64 = 150;

fn open(path: &Path, flags: i32) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT | flags).open(path).unwrap()
}

/// Writes zeros to `blocks` blocks from `first` on, or discards them.
fn erase(file: &File, request: libc::c_ulong, first: u64, blocks: u64) {
    let range = [first * BLOCK_SIZE, blocks * BLOCK_SIZE];
    // SAFETY: both requests read two 64-bit numbers.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, range.as_ptr()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Writes, erases, flushes and reads at random, and compares with a model of the content.
/// `discards`: whether discarded ranges read as zeros.
pub(crate) fn change_at_random(path: &Path, device: &Scratch, mut seed: u64, discards: bool) {
    println!("seed {seed}");
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let (direct, durable) = (open(path, 0), open(path, libc::O_DSYNC));
    let blocks = device.size() / BLOCK_SIZE;
    let mut model = vec![0u8; device.size() as usize];
    let mut buffer = Pages::zeroed(BLOCKS_MAX * BLOCK_SIZE).unwrap();
    for change in 0..CHANGES {
        let first = random(blocks - BLOCKS_MAX);
        let count = if random(3) == 0 { 1 + random(BLOCKS_MAX) } else { 1 };
        let (start, len) = ((first * BLOCK_SIZE) as usize, (count * BLOCK_SIZE) as usize);
        let (place, bytes) = (&mut model[start..start + len], &mut buffer.bytes_mut()[..len]);
        match random(8) {
            0 => {
                erase(&direct, BLKZEROOUT, first, count);
                place.fill(0);
            }
            1 if discards => {
                erase(&direct, BLKDISCARD, first, count);
                place.fill(0);
            }
            2 => {
                direct.sync_data().unwrap();
                assert_eq!(device.volatile.load(SeqCst), 0, "change {change} is not durable");
            }
            3 => {
                device.spoil(first);
            }
            kind => {
                for (n, word) in (0..).zip(bytes.as_chunks_mut::<8>().0) {
                    *word = (change << 32 | n).to_le_bytes();
                }
                place.copy_from_slice(bytes);
                let file = if kind == 4 { &durable } else { &direct };
                file.write_all_at(bytes, start as u64).unwrap();
                if kind == 4 {
                    assert_eq!(device.volatile.load(SeqCst), 0, "change {change} is not durable");
                }
            }
        }
        direct.read_exact_at(bytes, start as u64).unwrap();
        assert!(*bytes == model[start..start + len], "change {change}: wrong bytes at {start}");
    }
    let mut all = Pages::zeroed(device.size()).unwrap();
    direct.read_exact_at(all.bytes_mut(), 0).unwrap();
    assert!(all.bytes() == model, "wrong bytes after all changes");
    // Places of the cache were used, and those that were spoilt were noticed.
    assert!(device.good.load(SeqCst) > 0 && device.doubted.load(SeqCst) > 0);
    assert!(device.flushes.load(SeqCst) > 0);
}
