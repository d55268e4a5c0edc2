//! Write-back, one property at a time; the simulator has the crashes.

mod machine;

use std::sync::{Arc, atomic::Ordering::SeqCst};

use burgeon_accelerate::{
    CacheStore, CachedDevice, Count, Counts, DeviceOptions, DirtyLimits, Mode, Trust, create_with,
    format::{LOG_MIN, Layout},
    policy::PolicyKind,
};
use burgeon_block::{ErrorKind, LocalFile};
use machine::{BLOCK, CACHE_LEN, Disk, Machine, SLOW_BLOCKS, get, lock, put};

#[test]
fn blocks_are_written_back_by_address_and_adjoining_ones_at_once() {
    let machine = Machine::new();
    let device = machine.start();
    // 10 to 29 backwards, and single ones.
    (10..30).rev().for_each(|block| put(&device, block, 1));
    [900, 5, 400].into_iter().for_each(|block| put(&device, block, 2));
    put(&device, 12, 3);
    device.flush().expect("a flush fails");
    assert_eq!((machine.slow.taken_writes(), device.dirty()), (Vec::new(), 23));
    device.store().write_back_all().expect("writing back fails");
    let expected = vec![(5, 1), (10, 20), (400, 1), (900, 1)];
    assert_eq!((machine.slow.taken_writes(), device.dirty()), (expected, 0));
    assert!(machine.slow.block(12) == [3; BLOCK] && machine.slow.block(13) == [1; BLOCK]);
}

#[test]
fn age_or_fill_begins_the_writing_back() {
    let machine = Machine::new();
    let device = machine.start();
    let due = |percent, seconds, now| {
        let limits = DirtyLimits { percent, seconds };
        device.store().write_back_due(limits, now).expect("writing back fails");
        !machine.slow.taken_writes().is_empty()
    };
    assert!(!due(100, 30, 1000));
    put(&device, 7, 1);
    assert!(!due(100, 30, 1030));
    assert!(due(100, 30, 1031));
    assert_eq!(device.dirty(), 0);
    (0..60).for_each(|block| put(&device, block, 2));
    let (dirty, percent) = device.store().dirty();
    assert!(dirty == 60 && percent > 30, "{percent}");
    assert!(!due(percent + 10, 30, 1040));
    assert!(due(percent, 30, 1040));
}

#[test]
fn a_full_log_makes_room_for_itself() {
    let machine = Machine::new();
    let device = machine.start();
    for round in 1..=3 {
        (0..SLOW_BLOCKS).for_each(|block| put(&device, block, round + (block % 50) as u8));
    }
    assert!(device.dirty() > 0 && !machine.slow.taken_writes().is_empty());
    for block in 0..SLOW_BLOCKS {
        assert_eq!(get(&device, block).expect("a read fails"), 3 + (block % 50) as u8);
    }
}

#[test]
fn a_slow_device_that_fails_keeps_its_dirty_blocks() {
    let machine = Machine::new();
    let device = machine.start();
    // The first flush of a process makes durable what an earlier one wrote to the slow device.
    device.flush().expect("a flush fails");
    (0..20).for_each(|block| put(&device, block, 1));
    machine.slow.fail(true);
    assert!(device.store().write_back_all().is_err());
    // They are served, take new versions, and are durable.
    put(&device, 3, 2);
    device.flush().expect("a flush fails");
    assert_eq!((get(&device, 3).unwrap_or(0), get(&device, 4).unwrap_or(0)), (2, 1));
    assert_eq!(device.dirty(), 20);
    assert!(device.write(0, &[9; BLOCK], false).is_ok());
    machine.slow.fail(false);
    device.store().write_back_all().expect("writing back fails");
    assert!(machine.slow.block(3) == [2; BLOCK] && machine.slow.block(0) == [9; BLOCK]);
}

#[test]
fn a_damaged_dirty_block_is_lost_by_name_and_no_older_version_is_served() {
    let machine = Machine::new();
    let device = machine.start();
    put(&device, 8, 1);
    device.flush().expect("a flush fails");
    put(&device, 8, 2);
    put(&device, 9, 2);
    device.flush().expect("a flush fails");
    // This record says that those before it are durable.
    put(&device, 100, 3);
    drop(device);
    let at = machine.logged(&[2; BLOCK]) - 2;
    assert!(machine.cache.block(at) == [2; BLOCK], "the layout of the log has changed");
    lock(&machine.cache.0.bytes)[at * BLOCK + 17] ^= 1;
    let device = machine.start();
    let error = get(&device, 8).expect_err("an older version is served").to_string();
    assert!(error.contains("bytes 32768 to 36864 of slow"), "{error}");
    assert_eq!((get(&device, 9).unwrap_or(0), get(&device, 100).unwrap_or(0)), (2, 3));
    // It stays so, also for those that come later.
    assert!(device.store().write_back_all().is_err());
    drop(device);
    let device = machine.start();
    assert!(get(&device, 8).is_err());
    // A new version ends that.
    put(&device, 8, 4);
    device.store().write_back_all().expect("writing back fails");
    drop(device);
    assert_eq!(get(&machine.start(), 8).unwrap_or(0), 4);
}

#[test]
fn a_log_that_lacks_a_durable_record_is_refused() {
    let machine = Machine::new();
    let device = machine.start();
    for block in 0..4 {
        put(&device, block, 1 + block as u8);
        device.flush().expect("a flush fails");
    }
    drop(device);
    let head = machine.logged(&[2; BLOCK]) - 1;
    let original = machine.cache.block(head);
    lock(&machine.cache.0.bytes)[head * BLOCK + 100] ^= 1;
    let error = machine.open().map(drop).expect_err("a durable record is missed by nobody");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    lock(&machine.cache.0.bytes)[head * BLOCK..(head + 1) * BLOCK].copy_from_slice(&original);
    assert!(machine.open().is_ok());
}

#[test]
fn a_dead_cache_device_takes_the_dirty_blocks_alone() {
    let machine = Machine::new();
    machine.slow.write_at(0, &vec![7; SLOW_BLOCKS * BLOCK]).expect("a write fails");
    let device = machine.start();
    put(&device, 3, 1);
    machine.cache.fail(true);
    let mut bytes = [0; BLOCK];
    // Its record may count at the next start.
    assert!(device.write(9 * BLOCK as u64, &[2; BLOCK], false).is_err());
    device.write(10 * BLOCK as u64, &[2; BLOCK], false).expect("a clean block is not written");
    assert!(device.store().has_failed());
    let error = device.read(0, &mut vec![0; 8 * BLOCK]).expect_err("an older version is served");
    assert!(error.to_string().contains("bytes 12288 to 16384 of slow"), "{error}");
    assert!(device.write(3 * BLOCK as u64, &[2; BLOCK], false).is_err());
    assert!(device.flush().is_err());
    device.read(4 * BLOCK as u64, &mut bytes).expect("a clean block is lost");
    assert!(bytes == [7; BLOCK] && machine.slow.block(10) == [2; BLOCK]);
    assert!(get(&device, 9).is_err() && get(&device, 10).is_ok());
    // With the cache, the next process has them.
    machine.cache.fail(false);
    drop(device);
    // Block 10 was written round the cache, so it is another one than the cache knows.
    let options = DeviceOptions::new(Mode::WriteBack);
    let refused = machine.attach("slow", &machine.slow, Trust::Cold, options);
    assert_eq!(refused.map(drop).unwrap_err().kind(), ErrorKind::Invalid);
    let options = DeviceOptions { is_changed: true, ..options };
    let device = machine.attach("slow", &machine.slow, Trust::Cold, options).expect("no device");
    let read = [3, 9, 10].map(|block| get(&device, block).unwrap_or(0));
    assert_eq!(read, [1, 7, 2]);
}

#[test]
fn a_version_stays_while_its_successor_may_not_count() {
    let machine = Machine::new();
    let device = machine.start();
    put(&device, 5, 1);
    device.flush().expect("a flush fails");
    // Neither the record nor the end of its generation is written.
    machine.cache.fail(true);
    assert!(device.write(5 * BLOCK as u64, &[2; BLOCK], false).is_err());
    machine.cache.fail(false);
    assert!(get(&device, 5).is_err());
    assert!(device.store().write_back_all().is_err());
    drop(device);
    assert_eq!(get(&machine.start(), 5).unwrap_or(0), 1);
}

#[test]
fn failed_writes_damage_one_superblock_alone() {
    let machine = Machine::new();
    let device = machine.start();
    // A segment of 16 blocks is full.
    (0..8).for_each(|_| put(&device, 5, 1));
    machine.cache.0.tears.store(true, SeqCst);
    for _ in 0..3 {
        assert!(device.write(5 * BLOCK as u64, &[2; BLOCK], false).is_err());
    }
    machine.cache.0.tears.store(false, SeqCst);
    drop(device);
    assert_eq!(get(&machine.start(), 5).unwrap_or(0), 1);
}

#[test]
fn a_cold_start_caches_nothing_that_may_be_volatile() {
    let machine = Machine::new();
    let device = machine.open_with(Trust::Cold).expect("no device");
    assert_eq!((machine.slow.0.syncs.load(SeqCst), device.marked()), (1, 0));
    drop(device);
    machine.slow.fail(true);
    let device = machine.open_with(Trust::Cold).expect("no device");
    assert_eq!(device.marked(), (SLOW_BLOCKS * BLOCK) as u64 >> 20);
}

#[test]
fn a_record_whose_write_failed_never_counts() {
    let machine = Machine::new();
    let device = machine.start();
    put(&device, 5, 1);
    machine.cache.0.fails_late.store(true, SeqCst);
    assert!(device.write(5 * BLOCK as u64, &[2; BLOCK], false).is_err());
    assert_eq!(get(&device, 5).unwrap_or(0), 1);
    drop(device);
    let device = machine.start();
    assert_eq!(get(&device, 5).unwrap_or(0), 1);
    put(&device, 5, 3);
    drop(device);
    assert_eq!(get(&machine.start(), 5).unwrap_or(0), 3);
}

#[test]
fn a_retired_block_leaves_nothing_older_in_the_stored_index() {
    let machine = Machine::new();
    machine.slow.write_at(0, &vec![7; SLOW_BLOCKS * BLOCK]).expect("a write fails");
    let device = machine.start();
    (0..32).for_each(|block| assert_eq!(get(&device, block).unwrap_or(0), 7));
    device.tidy().expect("tidying fails");
    assert!(device.store().sets().used() >= 32);
    // Under this policy, the blocks do not come back to their slots at once.
    device.store().set_policy(PolicyKind::Adaptive);
    (0..32).for_each(|block| put(&device, block, 1));
    device.store().write_back_all().expect("writing back fails");
    drop(device);
    let device = machine.start();
    (0..32).for_each(|block| assert_eq!(get(&device, block).unwrap_or(0), 1));
}

#[test]
fn records_that_a_user_writes_as_data_do_not_count() {
    let machine = Machine::new();
    let device = machine.start();
    put(&device, 1, 1);
    let record = machine.cache.block(machine.logged(&[1; BLOCK]) - 1);
    put(&device, 1, 2);
    for block in 20..60 {
        let at = (block * BLOCK) as u64;
        device.write(at, &record, false).expect("a write fails");
    }
    drop(device);
    let device = machine.start();
    assert_eq!(get(&device, 1).unwrap_or(0), 2);
    let mut bytes = vec![0; BLOCK];
    device.read(30 * BLOCK as u64, &mut bytes).expect("a read fails");
    assert!(bytes == record);
}

#[test]
fn a_small_log_is_refused() {
    for blocks in [1, LOG_MIN - 1, 300] {
        assert!(Layout::with_log(1 << 20, blocks).is_err(), "{blocks}");
    }
}

/// The kernel tells a loss once: to the sync at the start, while a program still waits to be told.
#[test]
fn a_loss_that_shows_at_a_cold_start_fails_the_flushes_of_a_device_in_use() {
    for is_in_use in [true, false] {
        let (cache, slow) = (Disk::new(CACHE_LEN), Disk::new(SLOW_BLOCKS * BLOCK));
        let layout = Layout::with_log(CACHE_LEN as u64, 0).expect("no layout");
        create_with(&cache, layout, [1; 16]).expect("no cache");
        let (len, distrust) =
            (CACHE_LEN as u64, Box::new(|_: &[burgeon_accelerate::Dirty]| Ok(())));
        let store = CacheStore::open(cache, len, Trust::Cold, PolicyKind::Clock, distrust)
            .expect("no store");
        let options = DeviceOptions { is_in_use, ..DeviceOptions::new(Mode::WriteThrough) };
        slow.fail(true);
        let device =
            CachedDevice::attach(Arc::new(store), slow.clone(), "slow", Trust::Cold, options);
        slow.fail(false);
        let device = device.expect("not attached").count_in(Counts::default());
        assert_eq!(device.flush().is_err(), is_in_use);
        assert_eq!(device.write(0, &[1; BLOCK], false).is_err(), is_in_use);
    }
}

#[test]
fn bytes_beside_the_blocks_are_counted_for_the_device_that_writes() {
    let machine = Machine::new();
    let (busy, idle) = (Disk::new(SLOW_BLOCKS * BLOCK), Disk::new(SLOW_BLOCKS * BLOCK));
    let store = machine.store(Trust::Warm).expect("no store");
    let options = DeviceOptions::new(Mode::WriteBack);
    let attach = |slow: &Disk, name| {
        CachedDevice::attach(store.clone(), slow.clone(), name, Trust::Warm, options)
            .expect("no device")
    };
    // The idle one is tidied first, as by a server.
    let (idle, busy) = (attach(&idle, "idle"), attach(&busy, "busy"));
    let tidy = || [&idle, &busy].iter().for_each(|device| device.tidy().expect("no tidying"));
    tidy();
    tidy();
    let of = |device: &CachedDevice<Disk, Disk>| device.counts().get(Count::CacheMetaBytes);
    let (before, others) = (of(&busy), of(&idle));
    machine.cache.taken_writes();
    // Each has a head of a record beside it.
    (0..100).for_each(|block| put(&busy, 3 * block, 1));
    tidy();
    tidy();
    let blocks: usize = machine.cache.taken_writes().iter().map(|(_, len)| len).sum();
    let (busy, idle) = (of(&busy) - before, of(&idle) - others);
    assert!(busy >= 100 * BLOCK as u64, "{busy} of the busy device, {idle} of the idle one");
    // Its own record, at each tidying.
    assert!(idle <= 2 * BLOCK as u64, "{idle} of the idle device, {busy} of the busy one");
    // The last records are counted later.
    assert!((blocks as u64 - 100) * BLOCK as u64 - busy - idle <= 3 * BLOCK as u64);
}
