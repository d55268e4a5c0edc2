//! Readers and writers that compare every byte, past the page cache.

use std::{
    collections::HashMap,
    fs::File,
    io::IoSliceMut,
    os::unix::fs::{FileExt, OpenOptionsExt},
    sync::{Arc, PoisonError, atomic::Ordering::SeqCst},
    thread::{self, JoinHandle},
    time::Duration,
};

use testkit::{AlignedBlock, PATIENCE, Pattern, Rng, wait_until};

use crate::world::{Ledger, Place};

/// Blocks of the file that a writer writes to.
const WRITTEN: u64 = 256;

/// Length of a block.
const BLOCK: u64 = 4096;

/// Threads that read and write.
pub(crate) struct Load(Vec<JoinHandle<()>>);

impl Load {
    pub(crate) fn start(ledger: &Arc<Ledger>, places: &[Arc<Place>]) -> Self {
        let mut threads = Vec::new();
        for (number, place) in places.iter().enumerate() {
            for reader in 0..2 {
                let (ledger, place) = (Arc::clone(ledger), Arc::clone(place));
                let seed = (number * 2 + reader) as u64;
                threads.push(thread::spawn(move || read(&ledger, &place, seed)));
            }
            if place.writable {
                let (ledger, place) = (Arc::clone(ledger), Arc::clone(place));
                threads.push(thread::spawn(move || write(&ledger, &place, number as u64)));
            }
        }
        Self(threads)
    }

    /// Waits for all threads; says how many hang.
    pub(crate) fn join(self) -> usize {
        wait_until(PATIENCE, || self.0.iter().all(JoinHandle::is_finished));
        let (done, stuck): (Vec<_>, Vec<_>) = self.0.into_iter().partition(JoinHandle::is_finished);
        let panicked = done.into_iter().filter_map(|thread| thread.join().err()).count();
        assert_eq!(panicked, 0, "a thread of the load panicked");
        stuck.len()
    }
}

fn read(ledger: &Ledger, place: &Place, seed: u64) {
    let (mut rng, mut buffer) = (Rng::new(seed), AlignedBlock::default());
    let path = place.at.join("pattern");
    while !ledger.is_stopped() {
        let gate = place.gate.read().unwrap_or_else(PoisonError::into_inner);
        let began_us = ledger.now_us();
        let block = rng.below(place.pattern.blocks);
        let outcome = Pattern::open_direct(&path).and_then(|file| {
            file.read_exact_at(&mut buffer.0, block * BLOCK)?;
            Ok(())
        });
        let excused = place.is_excused(began_us);
        match outcome {
            Ok(()) if buffer.0[..] == place.pattern.block(block) => {
                place.newest_good_us.fetch_max(began_us, SeqCst);
                ledger.count("reads");
                if !excused {
                    ledger.slow(ledger.now_us() - began_us);
                }
            }
            Ok(()) => {
                ledger.violation(format!("wrong bytes in block {block} of {}", path.display()))
            }
            Err(_) if excused => {
                ledger.count("excused read errors");
                drop(gate);
                // As a program would that tries again.
                thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                let waited_ms = (ledger.now_us() - began_us) / 1000;
                let path = path.display();
                ledger.violation(format!("block {block} of {path}: {error} after {waited_ms} ms"));
            }
        }
    }
}

/// Reads everything once, and lets errors pass: every fetch under way for `place` has come, or
/// has been given up, when this returns.
pub(crate) fn read_through(place: &Place) {
    const AT_ONCE: u64 = 256;
    let Ok(file) = Pattern::open_direct(&place.at.join("pattern")) else { return };
    let mut blocks: Vec<_> = (0..AT_ONCE).map(|_| AlignedBlock::default()).collect();
    for first in (0..place.pattern.blocks).step_by(AT_ONCE as usize) {
        let mut parts: Vec<_> =
            blocks.iter_mut().map(|block| IoSliceMut::new(&mut block.0)).collect();
        let _ = rustix::io::preadv(&file, &mut parts, first * BLOCK);
    }
}

/// The content that a block may have: the last write, or the one before if the last one failed.
#[derive(Clone, Copy)]
struct Held {
    version: u64,
    /// Of a write that failed, and may have come through all the same.
    perhaps: Option<u64>,
}

/// Writes versions of blocks and reads them again, now and then after an fsync.
fn write(ledger: &Ledger, place: &Place, seed: u64) {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let path = place.at.join("written");
    let kept = place.options.contains(&"--writes");
    let (mut held, mut mounts, mut version) = (HashMap::<u64, Held>::new(), 0, 1);
    while !ledger.is_stopped() {
        let gate = place.gate.read().unwrap_or_else(PoisonError::into_inner);
        if *gate != mounts && !kept {
            held.clear();
        }
        mounts = *gate;
        let began_us = ledger.now_us();
        let block = rng.below(WRITTEN);
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(direct)
            .open(&path);
        let step = file.and_then(|file| {
            let mut buffer = AlignedBlock::default();
            if let Some(known) = held.get(&block) {
                file.read_exact_at(&mut buffer.0, block * BLOCK)?;
                let content = |version| Pattern { seed: version, blocks: WRITTEN }.block(block);
                let right = buffer.0[..] == content(known.version)
                    || known.perhaps.is_some_and(|version| buffer.0[..] == content(version));
                if !right {
                    let name = path.display();
                    ledger.violation(format!("block {block} of {name} is not what was written"));
                }
                ledger.count("reads of writes");
            }
            version += 1;
            buffer.0.copy_from_slice(&Pattern { seed: version, blocks: WRITTEN }.block(block));
            let written = file.write_all_at(&buffer.0, block * BLOCK);
            match (&written, held.get_mut(&block)) {
                (Ok(()), _) => drop(held.insert(block, Held { version, perhaps: None })),
                (Err(_), Some(known)) => known.perhaps = Some(version),
                (Err(_), None) => {}
            }
            written?;
            if rng.below(8) == 0 {
                file.sync_all()?;
                ledger.count("fsyncs");
            }
            ledger.count("writes");
            Ok(())
        });
        drop(gate);
        if let Err(error) = step {
            // A block whose write failed twice may hold either; it is forgotten.
            held.remove(&block);
            if place.is_excused(began_us) {
                ledger.count("excused write errors");
            } else {
                let waited_ms = (ledger.now_us() - began_us) / 1000;
                let path = path.display();
                let what = format!("writing block {block} of {path}: {error} after {waited_ms} ms");
                ledger.violation(what);
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
}
