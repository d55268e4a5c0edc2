//! A cache device and a slow device in memory, which can fail.

// Each program uses a part of it.
#![allow(dead_code)]

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};

use burgeon_accelerate::{
    CacheStore, CachedDevice, DeviceOptions, Mode, SlowDevice, Trust, create_with, format::Layout,
    policy::PolicyKind,
};
use burgeon_block::{ByteRange, Erase, Error, ErrorKind, LocalFile, Result};

pub(crate) const BLOCK: usize = 4096;
pub(crate) const CACHE_LEN: usize = 4 << 20;
pub(crate) const SLOW_BLOCKS: usize = 1024;
pub(crate) const LOG_BLOCKS: u32 = 256;

/// A disk in memory that notes its writes.
#[derive(Clone)]
pub(crate) struct Disk(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) bytes: Mutex<Vec<u8>>,
    /// First block and number of blocks of each write.
    pub(crate) writes: Mutex<Vec<(usize, usize)>>,
    pub(crate) fails: AtomicBool,
    /// A write fails, and leaves zeros.
    pub(crate) tears: AtomicBool,
    /// The next write is made, and fails all the same.
    pub(crate) fails_late: AtomicBool,
    pub(crate) syncs: AtomicU64,
    pub(crate) serial: Mutex<Option<String>>,
    pub(crate) on_read: Mutex<Option<Hook>>,
    pub(crate) on_write: Mutex<Option<Hook>>,
}

/// Runs once, before the first access at this byte or behind it.
pub(crate) type Hook = (u64, Box<dyn FnOnce() + Send>);

fn run_hook(hook: &Mutex<Option<Hook>>, offset: u64) {
    let hook = lock(hook).take_if(|(from, _)| offset >= *from);
    if let Some((_, run)) = hook {
        run();
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    pub(crate) fn new(len: usize) -> Self {
        let inner = Inner {
            bytes: Mutex::new(vec![0; len]),
            writes: Mutex::default(),
            fails: AtomicBool::new(false),
            tears: AtomicBool::new(false),
            fails_late: AtomicBool::new(false),
            syncs: AtomicU64::new(0),
            serial: Mutex::default(),
            on_read: Mutex::default(),
            on_write: Mutex::default(),
        };
        Self(Arc::new(inner))
    }

    fn check(&self) -> Result<()> {
        match self.0.fails.load(SeqCst) {
            true => Err(Error::new(ErrorKind::LocalIo, "the disk is broken")),
            false => Ok(()),
        }
    }

    pub(crate) fn fail(&self, fails: bool) {
        self.0.fails.store(fails, SeqCst);
    }

    pub(crate) fn taken_writes(&self) -> Vec<(usize, usize)> {
        std::mem::take(&mut lock(&self.0.writes))
    }

    /// Another disk of the same content.
    pub(crate) fn copy(&self) -> Self {
        let other = Self::new(0);
        lock(&other.0.bytes).clone_from(&lock(&self.0.bytes));
        other
    }

    pub(crate) fn set_serial(&self, serial: &str) {
        *lock(&self.0.serial) = Some(serial.to_owned());
    }

    pub(crate) fn block(&self, block: usize) -> Vec<u8> {
        lock(&self.0.bytes)[block * BLOCK..(block + 1) * BLOCK].to_vec()
    }
}

impl LocalFile for Disk {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        run_hook(&self.0.on_read, offset);
        self.check()?;
        let at = offset as usize;
        buf.copy_from_slice(&lock(&self.0.bytes)[at..at + buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        run_hook(&self.0.on_write, offset);
        self.check()?;
        let at = offset as usize;
        if self.0.tears.load(SeqCst) {
            lock(&self.0.bytes)[at..at + BLOCK].fill(0);
            return Err(Error::new(ErrorKind::LocalIo, "the disk tears writes"));
        }
        lock(&self.0.bytes)[at..at + buf.len()].copy_from_slice(buf);
        lock(&self.0.writes).push((at / BLOCK, buf.len() / BLOCK));
        if self.0.fails_late.swap(false, SeqCst) {
            return Err(Error::new(ErrorKind::LocalIo, "the disk says that it failed"));
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.0.syncs.fetch_add(1, SeqCst);
        self.check()
    }
}

impl SlowDevice for Disk {
    fn size(&self) -> u64 {
        lock(&self.0.bytes).len() as u64
    }

    fn serial(&self) -> Option<String> {
        lock(&self.0.serial).clone()
    }

    fn erase(&self, range: ByteRange, _how: Erase) -> Result<()> {
        self.write_at(range.start(), &vec![0; range.len() as usize])
    }
}

pub(crate) struct Machine {
    pub(crate) cache: Disk,
    pub(crate) slow: Disk,
    /// The first block of the log.
    pub(crate) log: usize,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let (cache, slow) = (Disk::new(CACHE_LEN), Disk::new(SLOW_BLOCKS * BLOCK));
        let layout = Layout::with_log(CACHE_LEN as u64, LOG_BLOCKS).expect("no layout");
        create_with(&cache, layout, [1; 16]).expect("no cache");
        Self { cache, slow, log: 2 + layout.bitmap_blocks as usize }
    }

    pub(crate) fn open(&self) -> Result<CachedDevice<Disk, Disk>> {
        self.open_with(Trust::Warm)
    }

    pub(crate) fn open_with(&self, trust: Trust) -> Result<CachedDevice<Disk, Disk>> {
        self.attach("slow", &self.slow, trust, DeviceOptions::new(Mode::WriteBack))
    }

    pub(crate) fn store(&self, trust: Trust) -> Result<Arc<CacheStore<Disk>>> {
        let (len, distrust) =
            (CACHE_LEN as u64, Box::new(|_: &[burgeon_accelerate::Dirty]| Ok(())));
        CacheStore::open(self.cache.clone(), len, trust, PolicyKind::Clock, distrust).map(Arc::new)
    }

    pub(crate) fn attach(
        &self,
        name: &str,
        slow: &Disk,
        trust: Trust,
        options: DeviceOptions,
    ) -> Result<CachedDevice<Disk, Disk>> {
        CachedDevice::attach(self.store(trust)?, slow.clone(), name, trust, options)
    }

    pub(crate) fn start(&self) -> CachedDevice<Disk, Disk> {
        self.open().expect("no device")
    }

    /// The block of the log in which this block's newest version lies.
    pub(crate) fn logged(&self, bytes: &[u8]) -> usize {
        let blocks = self.log..self.log + LOG_BLOCKS as usize;
        blocks.rev().find(|at| self.cache.block(*at) == bytes).expect("not in the log")
    }
}

pub(crate) fn put(device: &CachedDevice<Disk, Disk>, block: usize, byte: u8) {
    device.write((block * BLOCK) as u64, &[byte; BLOCK], false).expect("a write fails");
}

pub(crate) fn get(device: &CachedDevice<Disk, Disk>, block: usize) -> Result<u8> {
    let mut bytes = [0; BLOCK];
    device.read((block * BLOCK) as u64, &mut bytes)?;
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn block");
    Ok(bytes[0])
}
