//! Dirty blocks meet their own slow device, or none.

mod machine;

use std::sync::{Arc, Mutex, atomic::Ordering::SeqCst};

use burgeon_accelerate::{
    CacheStore, CachedDevice, DeviceOptions, Dirty, DirtyLimits, Mode, Trust, dirty_in,
    policy::PolicyKind,
};
use burgeon_block::{ByteRange, Erase, ErrorKind, LocalFile, Result};
use machine::{BLOCK, Disk, Machine, SLOW_BLOCKS, get, lock, put};

const BACK: Mode = Mode::WriteBack;

/// A device with a clean block of 1 everywhere, and the dirty blocks 3 and 900.
fn dirty_machine() -> Machine {
    let machine = Machine::new();
    machine.slow.set_serial("S1");
    machine.slow.write_at(0, &vec![1; SLOW_BLOCKS * BLOCK]).expect("a write fails");
    let device = machine.start();
    put(&device, 3, 2);
    put(&device, 900, 2);
    device.flush().expect("a flush fails");
    machine
}

fn refused(machine: &Machine, slow: &Disk, trust: Trust) -> String {
    let before = lock(&slow.0.bytes).clone();
    let result = machine.attach("slow", slow, trust, DeviceOptions::new(BACK));
    let error = result.map(drop).expect_err("another device gets the dirty blocks");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(*lock(&slow.0.bytes) == before, "another device was written to");
    let text = error.to_string();
    assert!(text.contains("8192 bytes") && text.contains("accept their loss"), "{text}");
    text
}

#[test]
fn another_device_is_refused_by_what_differs() {
    let machine = dirty_machine();
    for trust in [Trust::Warm, Trust::Cold] {
        let longer = Disk::new((SLOW_BLOCKS + 1) * BLOCK);
        assert!(refused(&machine, &longer, trust).contains("4198400 bytes, and had 4194304"));
        let serial = machine.slow.copy();
        serial.set_serial("S2");
        assert!(refused(&machine, &serial, trust).contains("\"S2\", and was \"S1\""));
        let first = machine.slow.copy();
        first.write_at(200 * BLOCK as u64, &[9]).expect("a write fails");
        assert!(refused(&machine, &first, trust).contains("bytes 819200 to 823296 differ"));
        // Only samples of the rest are compared: one of 12 blocks.
        let rest = machine.slow.copy();
        let at = 600 * BLOCK as u64;
        rest.write_at(at, &[9; 24 * BLOCK]).expect("a write fails");
        assert!(refused(&machine, &rest, trust).contains("differ"));
    }
    // A copy of the device that has no serial number is the device.
    let copy = machine.slow.copy();
    let device =
        machine.attach("slow", &copy, Trust::Cold, DeviceOptions::new(BACK)).expect("refused");
    assert_eq!((get(&device, 3).unwrap_or(0), get(&device, 4).unwrap_or(0)), (2, 1));
    device.store().write_back_all().expect("writing back fails");
    assert!(copy.block(900) == [2; BLOCK] && machine.slow.block(900) == [1; BLOCK]);
}

/// Two file systems of one kind and size may differ in few blocks, which are dirty soon.
#[test]
fn another_device_is_refused_by_what_is_dirty() {
    let machine = dirty_machine();
    for trust in [Trust::Warm, Trust::Cold] {
        let other = machine.slow.copy();
        other.write_at(3 * BLOCK as u64, &[7; BLOCK]).expect("a write fails");
        assert!(refused(&machine, &other, trust).contains("bytes 12288 to 16384 differ"));
    }
    // Blocks that are being written back are not compared: after a power failure, the device has a
    // part of them.
    let options = DeviceOptions::new(BACK);
    let device = machine.attach("slow", &machine.slow, Trust::Cold, options).expect("refused");
    device.write_back(device.store().log_position(), 4096).expect("writing back fails");
    put(&device, 3, 4);
    device.flush().expect("a flush fails");
    drop(device);
    let other = machine.slow.copy();
    other.write_at(3 * BLOCK as u64, &[7; BLOCK]).expect("a write fails");
    let result = machine.attach("slow", &other, Trust::Cold, options);
    assert!(result.is_err(), "it has been written back since");
    machine.attach("slow", &machine.slow, Trust::Cold, options).expect("refused");
}

#[test]
fn a_copy_of_the_identity_that_rots_refuses_no_device_of_its_own() {
    for copy in 0..2 {
        let machine = dirty_machine();
        let options = DeviceOptions::new(BACK);
        let device = machine.attach("slow", &machine.slow, Trust::Cold, options).expect("refused");
        machine.slow.fail(true);
        let before = device.store().log_position();
        device.write_back(before, 4096).expect_err("the slow device fails");
        drop(device);
        machine.slow.fail(false);
        // It was on its way.
        machine.slow.write_at(3 * BLOCK as u64, &[2; BLOCK]).expect("a write fails");
        let first = machine.log + machine::LOG_BLOCKS as usize;
        for number in 0..16 {
            let at = ((first + 2 * number + copy) * BLOCK + 99) as u64;
            machine.cache.write_at(at, &[0xa5]).expect("a write fails");
        }
        machine.attach("slow", &machine.slow, Trust::Cold, options).expect("refused");
    }
}

#[test]
fn an_accepted_loss_is_the_end_of_the_dirty_blocks() {
    let machine = dirty_machine();
    let blocks = [3, 900].map(|block| block * BLOCK as u64..(block + 1) * BLOCK as u64);
    let dirty = [Dirty { name: "slow".to_owned(), ranges: blocks.to_vec() }];
    assert_eq!(machine.store(Trust::Warm).unwrap().dirty_devices(), dirty);
    assert_eq!(dirty_in(&machine.cache, machine::CACHE_LEN as u64).unwrap(), dirty);
    for len in [SLOW_BLOCKS, SLOW_BLOCKS / 2] {
        let other = Disk::new(len * BLOCK);
        let options = DeviceOptions { accepts_loss: true, ..DeviceOptions::new(BACK) };
        let device = machine.attach("slow", &other, Trust::Cold, options).expect("refused");
        assert_eq!((device.dirty(), get(&device, 3).unwrap_or(9)), (0, 0));
        put(&device, 5, 4);
        drop(device);
        // They do not come back, and new ones are the new device's.
        let store = machine.store(Trust::Cold).expect("no store");
        assert_eq!(bytes_of(&store), [("slow".to_owned(), 4096)]);
        drop(store);
        refused_after(&machine, &Disk::new((len + 8) * BLOCK));
        let options = DeviceOptions::new(BACK);
        let device = machine.attach("slow", &other, Trust::Cold, options).expect("refused");
        device.store().write_back_all().expect("writing back fails");
        assert!(other.block(5) == [4; BLOCK] && other.block(3) == [0; BLOCK]);
        put(&device, 6, 1);
        put(&device, 7, 1);
    }
}

fn bytes_of(store: &CacheStore<Disk>) -> Vec<(String, u64)> {
    store.dirty_devices().into_iter().map(|dirty| (dirty.name.clone(), dirty.bytes())).collect()
}

fn refused_after(machine: &Machine, slow: &Disk) {
    let result = machine.attach("slow", slow, Trust::Cold, DeviceOptions::new(BACK));
    assert!(
        result.map(drop).expect_err("another device").to_string().contains("accept their loss")
    );
}

/// Its records stay in the log, and its number is given to the next device.
#[test]
fn the_blocks_of_a_forgotten_device_are_not_those_of_the_next() {
    let machine = dirty_machine();
    let options = DeviceOptions::new(BACK);
    let device = machine.attach("slow", &machine.slow, Trust::Cold, options).expect("refused");
    device.write_back(device.store().log_position(), 4096).expect("writing back fails");
    assert_eq!((device.dirty(), machine.slow.block(3)), (0, vec![2; BLOCK]));
    drop(device);
    machine.store(Trust::Cold).expect("no store").forget_device("slow").expect("not forgotten");
    let store = machine.store(Trust::Cold).expect("no store");
    assert!(store.dirty_devices().is_empty());
    let next = Disk::new(SLOW_BLOCKS * BLOCK);
    let device = CachedDevice::attach(store, next.clone(), "next", Trust::Cold, options);
    let device = device.expect("not attached");
    assert_eq!((device.dirty(), get(&device, 3).unwrap_or(9)), (0, 0));
    device.store().write_back_all().expect("writing back fails");
    assert_eq!(next.block(3), [0; BLOCK]);
}

/// Whatever it writes itself, in whatever order, it is the same device for its successor.
#[test]
fn own_writes_change_no_identity() {
    for trust in [Trust::Warm, Trust::Cold] {
        let machine = Machine::new();
        let attach = || machine.attach("slow", &machine.slow, trust, DeviceOptions::new(BACK));
        let mut rng = testkit::Rng::new(7);
        for round in 1..120 {
            let device = attach().unwrap_or_else(|error| panic!("round {round}: {error}"));
            for _ in 0..rng.below(12) {
                step(&device, &mut rng).unwrap_or_else(|error| panic!("round {round}: {error}"));
            }
            if device.dirty() == 0 {
                put(&device, 100, 1);
            }
        }
    }
}

fn step(device: &CachedDevice<Disk, Disk>, rng: &mut testkit::Rng) -> Result<()> {
    let block = if rng.below(2) == 0 { rng.below(300) } else { rng.below(SLOW_BLOCKS as u64) };
    let len = 1 + rng.below(16).min(SLOW_BLOCKS as u64 - block - 1);
    let range = ByteRange::at(block * BLOCK as u64, len * BLOCK as u64).expect("a range");
    match rng.below(9) {
        0..3 => device.write(range.start(), &vec![rng.below(9) as u8; range.len() as usize], false),
        3 => device.erase(range, Erase::Zeroes { unmap: false }),
        4 => device.set_mode(rng.pick(&Mode::ALL).0),
        5 => device.tidy(),
        6 => device.store().write_back_due(DirtyLimits { percent: 30, seconds: 0 }, rng.below(99)),
        7 => device.flush(),
        _ => device.store().write_back_all(),
    }
}

/// The oldest part of the log cannot be freed, and nobody fails for it.
#[test]
fn a_dirty_device_that_is_absent_keeps_its_blocks_and_disturbs_no_other() {
    let machine = dirty_machine();
    let other = Disk::new(SLOW_BLOCKS * BLOCK);
    let store = machine.store(Trust::Cold).expect("no store");
    let options = DeviceOptions::new(BACK);
    let device = CachedDevice::attach(store, other.clone(), "other", Trust::Cold, options);
    let device = device.expect("not attached");
    for round in 1..4 {
        (0..SLOW_BLOCKS).for_each(|block| put(&device, block, round));
        device.flush().expect("a flush fails");
    }
    device.store().write_back_all().expect("writing back fails");
    assert_eq!((device.dirty(), other.block(77)), (0, vec![3; BLOCK]));
    let limits = DirtyLimits { percent: 1, seconds: 1 };
    device.store().write_back_due(limits, 1000).expect("writing back fails");
    assert_eq!(bytes_of(device.store()), [("slow".to_owned(), 8192)]);
    assert!(device.store().forget_device("slow").is_err());
    drop(device);
    // A restart finds none of the blocks of the other one.
    let store = machine.store(Trust::Cold).expect("no store");
    assert_eq!(bytes_of(&store), [("slow".to_owned(), 8192)]);
    let slow = CachedDevice::attach(store, machine.slow.clone(), "slow", Trust::Cold, options);
    let slow = slow.expect("not attached");
    slow.store().write_back_all().expect("writing back fails");
    assert!(machine.slow.block(3) == [2; BLOCK] && slow.store().dirty_devices().is_empty());
}

/// The successor of a process whose cache device died knows which bytes went with it.
#[test]
fn bytes_that_are_gone_are_refused_by_name() {
    let machine = dirty_machine();
    let gone = machine.store(Trust::Warm).expect("no store").dirty_devices();
    let store = CacheStore::failed(Disk::new(machine::CACHE_LEN), gone).expect("no store");
    let options = DeviceOptions { is_in_use: true, ..DeviceOptions::new(BACK) };
    let device =
        CachedDevice::attach(store.into(), machine.slow.clone(), "slow", Trust::Cold, options);
    let device = device.expect("not attached");
    let error = get(&device, 3).expect_err("an older version is served").to_string();
    assert!(error.contains("bytes 12288 to 16384 of slow were dirty"), "{error}");
    assert!(device.write(900 * BLOCK as u64, &[1; BLOCK], false).is_err());
    let range = ByteRange::at(2 * BLOCK as u64, 2 * BLOCK as u64).expect("a range");
    assert!(device.erase(range, Erase::Zeroes { unmap: false }).is_err());
    put(&device, 4, 5);
    assert_eq!((get(&device, 4).unwrap_or(0), get(&device, 2).unwrap_or(0)), (5, 1));
    assert!(device.flush().is_err());
}

/// It is told before a write bypasses the cache.
#[test]
fn a_cache_device_that_dies_leaves_a_list_of_what_it_had() {
    let machine = Machine::new();
    let told: Arc<Mutex<Vec<Dirty>>> = Arc::default();
    let (place, len) = (told.clone(), machine::CACHE_LEN as u64);
    let distrust = Box::new(move |dirty: &[Dirty]| {
        lock(&place).extend_from_slice(dirty);
        Ok(())
    });
    let store =
        CacheStore::open(machine.cache.clone(), len, Trust::Cold, PolicyKind::Clock, distrust);
    let (store, options) = (Arc::new(store.expect("no store")), DeviceOptions::new(BACK));
    let device = CachedDevice::attach(store, machine.slow.clone(), "slow", Trust::Cold, options);
    let device = device.expect("not attached");
    (10..20).for_each(|block| put(&device, block, 1));
    put(&device, 30, 1);
    machine.cache.fail(true);
    device.set_mode(Mode::WriteThrough).expect("the mode stays");
    put(&device, 40, 1);
    let ranges = vec![10 * BLOCK as u64..20 * BLOCK as u64, 30 * BLOCK as u64..31 * BLOCK as u64];
    assert_eq!(*lock(&told), [Dirty { name: "slow".to_owned(), ranges }]);
    assert!(machine.slow.block(40) == [1; BLOCK] && get(&device, 15).is_err());
}

/// A sample that is written back while others are read is not replaced by what was read of it
/// before.
#[test]
fn a_sample_that_is_written_back_meanwhile_is_the_newer_one() {
    let machine = Machine::new();
    let device = Arc::new(machine.start());
    device.set_mode(Mode::WriteThrough).expect("the mode stays");
    [10, 300].into_iter().for_each(|block| put(&device, block, 1));
    device.set_mode(BACK).expect("the mode stays");
    let other = device.clone();
    let write_back = Box::new(move || {
        put(&other, 10, 9);
        other.write_back(u64::MAX, usize::MAX).expect("writing back fails");
    });
    // The first MiB has been read by then.
    *lock(&machine.slow.0.on_read) = Some((256 * BLOCK as u64, write_back));
    device.tidy().expect("tidying fails");
    assert!(lock(&machine.slow.0.on_read).is_none(), "no further sample was read");
    assert_eq!((machine.slow.block(10), device.marked()), (vec![9; BLOCK], 0));
    own_device_comes_back(&machine, device);
}

fn own_device_comes_back(machine: &Machine, device: Arc<CachedDevice<Disk, Disk>>) {
    device.set_mode(BACK).expect("the mode stays");
    put(&device, 500, 2);
    drop(device);
    let device = machine.attach("slow", &machine.slow, Trust::Cold, DeviceOptions::new(BACK));
    assert_eq!(get(&device.expect("its own device is refused"), 500).unwrap_or(0), 2);
}

/// The mode changes, and the device is tidied, while a write is on its way to the log.
#[test]
fn a_write_on_its_way_to_the_log_keeps_the_identity() {
    let machine = Machine::new();
    let device = Arc::new(machine.start());
    let other = device.clone();
    let change = Box::new(move || {
        other.set_mode(Mode::WriteThrough).expect("the mode stays");
        assert!(!other.is_settled());
        other.tidy().expect("tidying fails");
    });
    *lock(&machine.cache.0.on_write) = Some(((machine.log * BLOCK) as u64, change));
    device.write(3 * BLOCK as u64, &[1; 2 * BLOCK], false).expect("a write fails");
    assert!(device.mode() == Mode::WriteThrough && device.dirty() == 2);
    let first = device.store().log_position();
    // It meets a dirty block.
    put(&device, 4, 2);
    assert_eq!(device.write_back(first, usize::MAX).expect("writing back fails"), 0);
    assert_eq!((device.dirty(), machine.slow.block(3)), (1, vec![1; BLOCK]));
    drop(device);
    let device = machine.attach("slow", &machine.slow, Trust::Cold, DeviceOptions::new(BACK));
    assert_eq!(get(&device.expect("its own device is refused"), 4).unwrap_or(0), 2);
}

#[test]
fn a_device_that_fails_keeps_no_other_from_being_written_back() {
    let machine = dirty_machine();
    let store = machine.store(Trust::Warm).expect("no store");
    let options = DeviceOptions::new(BACK);
    let (slow, other) = (machine.slow.clone(), Disk::new(SLOW_BLOCKS * BLOCK));
    let attach = |slow, name| CachedDevice::attach(store.clone(), slow, name, Trust::Warm, options);
    let failing = attach(slow, "slow").expect("not attached");
    let device = attach(other.clone(), "other").expect("not attached");
    put(&device, 7, 1);
    machine.slow.fail(true);
    let limits = DirtyLimits { percent: 0, seconds: 0 };
    assert!(store.write_back_due(limits, 1).is_err());
    assert_eq!((device.dirty(), other.block(7), failing.dirty()), (0, vec![1; BLOCK], 2));
    // Nor from being written to, also when the log is full.
    for round in 1..4 {
        (0..SLOW_BLOCKS).for_each(|block| put(&device, block, round));
        device.flush().expect("a flush fails");
    }
    assert_eq!((get(&device, 900).unwrap_or(0), get(&failing, 900).unwrap_or(0)), (3, 2));
    machine.slow.fail(false);
    store.write_back_all().expect("writing back fails");
    assert_eq!((machine.slow.block(900), other.block(900)), (vec![2; BLOCK], vec![3; BLOCK]));
    assert_eq!(failing.dirty() + device.dirty(), 0);
}

/// Otherwise a power failure takes the version from the log alone, and the slow device is another
/// one than is known.
#[test]
fn a_version_is_durable_in_the_log_before_the_slow_device_has_it() {
    for apart in [false, true] {
        let machine = Machine::new();
        let device = machine.start();
        put(&device, 3, 1);
        let (cache, before) = (machine.cache.clone(), machine.cache.0.syncs.load(SeqCst));
        let check = Box::new(move || {
            assert!(cache.0.syncs.load(SeqCst) > before, "it may be volatile yet");
        });
        *lock(&machine.slow.0.on_write) = Some((0, check));
        match apart {
            true => drop(device.write_back(u64::MAX, 1).expect("writing back fails")),
            false => device.store().write_back_all().expect("writing back fails"),
        }
        assert!(machine.slow.block(3) == [1; BLOCK] && device.dirty() == 0);
    }
}
