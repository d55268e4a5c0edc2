//! A disk in memory that loses, tears and misdirects writes, is full, and crashes.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, Result};

use crate::disk::{CacheDisk, DiskFile, IoMode, Space};

type Block = Arc<[u8]>;
type Names = BTreeMap<String, usize>;

#[derive(Clone, Default)]
struct File {
    now: BTreeMap<u64, Block>,
    durable: BTreeMap<u64, Block>,
    len: u64,
    is_arena: bool,
}

struct State {
    seed: u64,
    files: Vec<File>,
    names: Names,
    /// The names after each change since they were last synced, the oldest first.
    history: Vec<Names>,
    capacity: u64,
    /// Bytes that others take.
    others: u64,
    changes: u64,
    /// The change before which the machine is switched off.
    off_at: u64,
    /// One write of so many is lost, and one goes elsewhere; 0 for none.
    lies: u64,
    /// Times that a write lets other threads go first.
    yields: u32,
    server: u64,
    taken_by: Option<u64>,
    arenas_peak: u64,
    free_least: u64,
}

/// A disk of a machine that can be switched off. Clones are the same disk.
#[derive(Clone)]
pub struct CrashingDisk {
    state: Arc<Mutex<State>>,
    server: u64,
}

impl CrashingDisk {
    /// An empty disk of `capacity` bytes.
    pub fn new(capacity: u64, seed: u64) -> Self {
        let state = State {
            seed,
            files: Vec::new(),
            names: Names::new(),
            history: Vec::new(),
            capacity,
            others: 0,
            changes: 0,
            off_at: u64::MAX,
            lies: 0,
            yields: 0,
            server: 0,
            taken_by: None,
            arenas_peak: 0,
            free_least: capacity,
        };
        Self { state: Arc::new(Mutex::new(state)), server: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Switches the machine off before its `changes`-th change from now.
    pub fn off_after(&self, changes: u64) {
        let mut state = self.lock();
        state.off_at = state.changes.saturating_add(changes);
    }

    /// Changes so far.
    pub fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// From now on, one write of `lies` is lost, and as many are misdirected; none if 0.
    pub fn lie(&self, lies: u64) {
        self.lock().lies = lies;
    }

    /// From now on, a write lets other threads go first so many times.
    pub fn slow_down(&self, yields: u32) {
        self.lock().yields = yields;
    }

    /// Others take `bytes` of the disk.
    pub fn others_take(&self, bytes: u64) {
        self.lock().others = bytes;
    }

    /// Most bytes that arenas took at once.
    pub fn arenas_peak(&self) -> u64 {
        self.lock().arenas_peak
    }

    /// The least that was free after one of our writes, as long as others took nothing more.
    pub fn free_least(&self) -> u64 {
        self.lock().free_least
    }

    /// The disk after a power failure: each block that was not synced is as it was written last,
    /// or as it was synced last.
    pub fn crash(&self) -> Self {
        let mut state = self.lock();
        let changes = state.history.len() as u64;
        let kept = state.below(changes + 1) as usize;
        if kept < state.history.len() {
            state.names = state.history[kept].clone();
        }
        state.history.clear();
        for n in 0..state.files.len() {
            let mut file = std::mem::take(&mut state.files[n]);
            let places: Vec<u64> = file.now.keys().chain(file.durable.keys()).copied().collect();
            for place in places {
                if state.below(2) == 0 {
                    match file.durable.get(&place).cloned() {
                        Some(block) => file.now.insert(place, block),
                        None => file.now.remove(&place),
                    };
                }
            }
            file.durable = file.now.clone();
            state.files[n] = file;
        }
        state.off_at = u64::MAX;
        drop(state);
        self.reboot()
    }

    /// The disk for the next server, after the last one was killed.
    pub fn reboot(&self) -> Self {
        let mut state = self.lock();
        state.server += 1;
        state.taken_by = None;
        let server = state.server;
        drop(state);
        Self { state: self.state.clone(), server }
    }
}

fn error(kind: ErrorKind, what: &str) -> Error {
    Error::new(kind, what)
}

impl State {
    fn below(&mut self, limit: u64) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }

    fn change(&mut self) -> Result<()> {
        if self.changes >= self.off_at {
            return Err(error(ErrorKind::LocalIo, "the machine is off"));
        }
        self.changes += 1;
        Ok(())
    }

    fn names_change(&mut self) -> Result<()> {
        self.change()?;
        self.history.push(self.names.clone());
        Ok(())
    }

    /// Bytes that named files take, and those of arenas alone. A removed file is taken as freed.
    fn taken(&self) -> (u64, u64) {
        let mut counted = HashMap::new();
        for file in self.names.values() {
            let bytes = self.files[*file].now.len() as u64 * BLOCK_SIZE;
            counted.insert(*file, (bytes, self.files[*file].is_arena));
        }
        let all = counted.values().map(|(bytes, _)| bytes).sum();
        (all, counted.values().filter(|(_, is)| *is).map(|(bytes, _)| bytes).sum())
    }

    fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.others + self.taken().0)
    }

    fn write(&mut self, file: usize, offset: u64, buf: &[u8]) -> Result<()> {
        self.change()?;
        let file = &mut self.files[file];
        for (at, part) in parts(offset, buf.len()) {
            let mut block = file.now.get(&at).map_or(vec![0; BLOCK_SIZE as usize], |b| b.to_vec());
            let skip = (offset.max(at * BLOCK_SIZE) - at * BLOCK_SIZE) as usize;
            block[skip..skip + part.len()].copy_from_slice(&buf[part]);
            file.now.insert(at, block.into());
        }
        file.len = file.len.max(offset + buf.len() as u64);
        let arenas = self.taken().1;
        self.arenas_peak = self.arenas_peak.max(arenas);
        self.free_least = self.free_least.min(self.free());
        Ok(())
    }
}

/// The blocks that `len` bytes at `offset` touch, each with its part of the bytes.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let end = offset + len as u64;
    (offset / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE)).map(move |at| {
        let (from, to) = ((at * BLOCK_SIZE).max(offset), ((at + 1) * BLOCK_SIZE).min(end));
        (at, (from - offset) as usize..(to - offset) as usize)
    })
}

impl CacheDisk for CrashingDisk {
    fn take(&self) -> Result<bool> {
        let mut state = self.lock();
        state.change()?;
        let is_free = state.taken_by.is_none_or(|server| server == self.server);
        if is_free && state.server == self.server {
            state.taken_by = Some(self.server);
        }
        Ok(state.taken_by == Some(self.server))
    }

    fn check(&self) -> Result<()> {
        let state = self.lock();
        if state.changes >= state.off_at {
            Err(error(ErrorKind::LocalIo, "the machine is off"))
        } else {
            Ok(())
        }
    }

    fn list(&self) -> Result<Vec<String>> {
        Ok(self.lock().names.keys().cloned().collect())
    }

    fn create(&self, name: &str, _: IoMode) -> Result<Box<dyn DiskFile>> {
        let mut state = self.lock();
        if state.names.contains_key(name) {
            return Err(error(ErrorKind::LocalIo, "the file is there already"));
        }
        state.names_change()?;
        let is_arena = name.starts_with("arena-");
        state.files.push(File { is_arena, ..File::default() });
        let file = state.files.len() - 1;
        state.names.insert(name.to_owned(), file);
        Ok(Box::new(Handle { disk: self.clone(), file }))
    }

    fn open(&self, name: &str, _: IoMode) -> Result<Box<dyn DiskFile>> {
        let missing = || error(ErrorKind::NotFound, "there is no such file");
        let file = *self.lock().names.get(name).ok_or_else(missing)?;
        Ok(Box::new(Handle { disk: self.clone(), file }))
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let mut state = self.lock();
        state.names_change()?;
        let missing = || error(ErrorKind::NotFound, "there is no such file");
        let file = state.names.remove(from).ok_or_else(missing)?;
        state.files[file].is_arena = to.starts_with("arena-");
        state.names.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        let mut state = self.lock();
        state.names_change()?;
        let removed = state.names.remove(name);
        removed.map(drop).ok_or_else(|| error(ErrorKind::NotFound, "there is no such file"))
    }

    fn sync(&self) -> Result<()> {
        let mut state = self.lock();
        state.change()?;
        state.history.clear();
        Ok(())
    }

    fn space(&self) -> Result<Space> {
        let state = self.lock();
        Ok(Space { size: state.capacity, free: state.free() })
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

struct Handle {
    disk: CrashingDisk,
    file: usize,
}

impl DiskFile for Handle {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let state = self.disk.lock();
        let file = &state.files[self.file];
        for (at, part) in parts(offset, buf.len()) {
            let skip = (offset.max(at * BLOCK_SIZE) - at * BLOCK_SIZE) as usize;
            match file.now.get(&at) {
                Some(block) => buf[part.clone()].copy_from_slice(&block[skip..skip + part.len()]),
                None => buf[part].fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        // A write takes a while: others look at the space meanwhile.
        (0..self.disk.lock().yields).for_each(|_| std::thread::yield_now());
        let mut state = self.disk.lock();
        if state.free() < (buf.len() as u64).next_multiple_of(BLOCK_SIZE) {
            return Err(error(ErrorKind::NoSpace, "the disk is full"));
        }
        let lies = state.lies;
        match if lies > 0 { state.below(lies) } else { u64::MAX } {
            0 => Ok(()),
            1 => {
                let offset = state.below(64) * BLOCK_SIZE;
                state.write(self.file, offset, buf)
            }
            _ => state.write(self.file, offset, buf),
        }
    }

    fn punch(&self, range: ByteRange) -> Result<()> {
        let mut state = self.disk.lock();
        state.change()?;
        let file = &mut state.files[self.file];
        let (first, end) = (range.start() / BLOCK_SIZE, range.end() / BLOCK_SIZE);
        file.now.retain(|at, _| !(first..end).contains(at));
        Ok(())
    }

    fn clear(&self) -> Result<()> {
        let mut state = self.disk.lock();
        state.change()?;
        let file = &mut state.files[self.file];
        file.now.clear();
        file.len = 0;
        Ok(())
    }

    fn sizes(&self) -> Result<(u64, u64)> {
        let state = self.disk.lock();
        let file = &state.files[self.file];
        Ok((file.len, file.now.len() as u64 * BLOCK_SIZE))
    }

    fn sync(&self) -> Result<()> {
        let mut state = self.disk.lock();
        state.change()?;
        let file = &mut state.files[self.file];
        file.durable = file.now.clone();
        Ok(())
    }

    fn identity(&self) -> u64 {
        self.file as u64 + 1
    }

    fn waiting_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
