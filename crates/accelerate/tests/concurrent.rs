//! Threads that read and write the same blocks at once: no read returns an older version than a
//! read or write that had ended before it began.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use burgeon_accelerate::{
    CacheStore, CachedDevice, Count, DeviceOptions, DirtyLimits, Mode, SlowDevice, Trust,
    create_with, format::Layout, policy::PolicyKind,
};
use burgeon_block::{ByteRange, Erase, LocalFile, Result};
use testkit::Rng;

const BLOCK: usize = 4096;
/// More than the cache has slots, so that they change hands all the time.
const BLOCKS: u64 = 300;
const CACHE_LEN: usize = 1 << 20;

/// A disk in memory whose requests of different blocks overlap.
struct Memory(Vec<Mutex<[u8; BLOCK]>>);

impl Memory {
    fn new(len: usize) -> Self {
        Self((0..len / BLOCK).map(|_| Mutex::new([0; BLOCK])).collect())
    }
}

impl LocalFile for Memory {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        for (block, part) in self.0[offset as usize / BLOCK..].iter().zip(buf.chunks_mut(BLOCK)) {
            thread::yield_now();
            part.copy_from_slice(
                &block.lock().unwrap_or_else(PoisonError::into_inner)[..part.len()],
            );
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        for (block, part) in self.0[offset as usize / BLOCK..].iter().zip(buf.chunks(BLOCK)) {
            thread::yield_now();
            block.lock().unwrap_or_else(PoisonError::into_inner)[..part.len()]
                .copy_from_slice(part);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

impl SlowDevice for Memory {
    fn size(&self) -> u64 {
        (self.0.len() * BLOCK) as u64
    }

    fn erase(&self, _range: ByteRange, _how: Erase) -> Result<()> {
        Ok(())
    }
}

fn version_of(bytes: &[u8]) -> u64 {
    let words: Vec<_> = bytes.chunks_exact(8).collect();
    assert!(words.iter().all(|word| *word == words[0]), "a torn block");
    u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|at| bytes[at]))
}

/// One thread's requests.
fn work(device: &CachedDevice<Memory, Memory>, newest: &[AtomicU64], writes: bool, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut bytes = vec![0; 4 * BLOCK];
    for round in 1..4000 {
        let first = rng.below(BLOCKS - 4);
        let blocks = 1 + rng.below(4) as usize;
        let (at, part) = (first * BLOCK as u64, &mut bytes[..blocks * BLOCK]);
        // Of each block one thread is the writer, so that versions grow.
        if writes && rng.below(2) == 0 {
            let word = u64::to_le_bytes(round);
            part.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word));
            device.write(at, part, false).expect("a write fails");
            newest[first as usize..first as usize + blocks]
                .iter()
                .for_each(|v| v.store(round, SeqCst));
            continue;
        }
        let known: Vec<u64> =
            (0..blocks).map(|b| newest[first as usize + b].load(SeqCst)).collect();
        let direct = device.place_of(at).is_some_and(|place| {
            let block = &mut part[..BLOCK];
            device.store().file().read_at(place.start(), block).expect("a read fails");
            device.is_block(at, place, block)
        });
        let read = if direct {
            &part[..BLOCK]
        } else {
            device.read(at, part).expect("a read fails");
            &*part
        };
        for (block, known) in read.chunks(BLOCK).zip(known) {
            let version = version_of(block);
            assert!(version >= known, "version {version} after {known}");
        }
        if round % 500 == 0 {
            device.tidy().expect("tidying fails");
        }
        if round % 100 == 0 {
            let limits = DirtyLimits { percent: 50, seconds: rng.below(4) };
            let written = device.store().write_back_due(limits, round / 100);
            written.expect("writing back fails");
        }
    }
}

#[test]
fn no_thread_reads_an_older_version() {
    for (seed, (mode, kind, log_blocks)) in [
        (Mode::WriteThrough, PolicyKind::Adaptive, 0),
        (Mode::WriteThrough, PolicyKind::Clock, 0),
        (Mode::WriteAround, PolicyKind::Clock, 0),
        (Mode::WriteBack, PolicyKind::Clock, 64),
    ]
    .into_iter()
    .enumerate()
    {
        let cache = Memory::new(CACHE_LEN);
        let layout = Layout::with_log(CACHE_LEN as u64, log_blocks).expect("no layout");
        create_with(&cache, layout, [1; 16]).expect("no cache");
        let distrust = Box::new(|_: &[burgeon_accelerate::Dirty]| Ok(()));
        let store = CacheStore::open(cache, CACHE_LEN as u64, Trust::Cold, kind, distrust);
        let store = Arc::new(store.expect("no store"));
        let slow = Memory::new(BLOCKS as usize * BLOCK);
        let options = DeviceOptions::new(mode);
        let device =
            CachedDevice::attach(store, slow, "slow", Trust::Cold, options).expect("no device");
        let newest: Vec<_> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        thread::scope(|scope| {
            for thread in 0..4 {
                let (device, newest) = (&device, &newest);
                scope.spawn(move || work(device, newest, thread == 0, seed as u64 * 10 + thread));
            }
        });
        let count = |count| device.counts().get(count);
        assert_eq!((count(Count::CorruptBlocks), count(Count::CacheErrors)), (0, 0));
        assert!(count(Count::CacheHitBytes) > 0 && count(Count::MissBytes) > 0);
        device.store().write_back_all().expect("writing back fails");
        assert_eq!(device.dirty(), 0);
        let (compared, wrong) =
            device.compare(0..device.store().sets().slots()).expect("comparing fails");
        assert!(compared > 0 && wrong == 0, "{compared} {wrong}");
    }
}
