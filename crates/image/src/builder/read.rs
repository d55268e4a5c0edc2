//! The data of a scanned directory tree, wave by wave.

use std::{
    collections::BTreeSet,
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Digest, Error, Result};
use rayon::prelude::*;
use rustix::{buffer::spare_capacity, fs::SeekFrom, io::Errno};

use super::{
    assemble::{Input, Piece, Wave},
    scan::{Scan, ScannedFile, refuse},
};
use crate::{CHUNK_MAX, INLINE_MAX};

/// Bytes read by one task: enough files that opening their directory costs little.
const UNIT_LEN: u64 = 1 << 20;
/// Length of the pieces that big files are cut into.
const PIECE: u64 = CHUNK_MAX as u64;
/// Bytes of a wave. A build takes three times this memory, plus the tree.
pub(super) const WAVE_LEN: u64 = 32 << 20;

/// The work of one task: files `first..end`, or `len` bytes from `start` of a big file.
#[derive(Clone, Copy)]
struct Unit {
    first: usize,
    end: usize,
    start: u64,
    len: u64,
}

/// The result of one task.
#[derive(Default)]
struct UnitRead {
    wave: Wave,
    changed: Vec<PathBuf>,
    problems: Vec<(PathBuf, Error)>,
}

/// Reads the files of a scan in parallel, each byte once: first the reads of the profile, in
/// pieces of [`CHUNK_MAX`], then the rest in the scan's order.
pub(super) struct DirectoryInput<'a> {
    scan: &'a Scan,
    /// Reads of the profile, and the number of them done.
    first: Vec<Unit>,
    first_read: usize,
    /// Pieces that come first, by file number and piece number.
    taken: BTreeSet<(usize, u64)>,
    /// The next file, and the offset to continue at; kept open if it is a big one with holes.
    next: usize,
    offset: u64,
    opened: Option<File>,
    /// Counts bytes as they are read.
    bytes: &'a AtomicU64,
    entries: &'a AtomicU64,
    /// Files whose size or time changed while they were read, and directories whose entries
    /// changed; several times if several tasks saw the change.
    pub(super) changed: Vec<PathBuf>,
}

impl<'a> DirectoryInput<'a> {
    /// `first` holds file numbers and ranges in them.
    pub(super) fn new(
        scan: &'a Scan,
        first: &[(usize, ByteRange)],
        bytes: &'a AtomicU64,
        entries: &'a AtomicU64,
    ) -> Self {
        let (mut units, mut taken) = (Vec::new(), BTreeSet::new());
        for (file, range) in first {
            let size = scan.nodes[scan.files[*file].node as usize].size;
            for piece in range.start() / PIECE..range.end().min(size).div_ceil(PIECE) {
                if taken.insert((*file, piece)) {
                    let (start, end) = (piece * PIECE, ((piece + 1) * PIECE).min(size));
                    units.push(Unit { first: *file, end: *file + 1, start, len: end - start });
                }
            }
        }
        Self {
            scan,
            first: units,
            first_read: 0,
            taken,
            next: 0,
            offset: 0,
            opened: None,
            bytes,
            entries,
            changed: Vec::new(),
        }
    }

    /// True if a part of `file` comes first, so that the rest of it is read piece by piece.
    fn is_taken(&self, file: usize) -> bool {
        self.taken.range((file, 0)..(file + 1, 0)).next().is_some()
    }

    /// The next units of the profile's reads.
    fn plan_first(&mut self) -> Vec<Unit> {
        let mut total = 0;
        let rest = self.first[self.first_read..].iter();
        let units: Vec<Unit> = rest
            .take_while(|unit| {
                total += unit.len.max(BLOCK_SIZE);
                total <= WAVE_LEN
            })
            .copied()
            .collect();
        self.first_read += units.len();
        units
    }

    fn size(&self, file: usize) -> u64 {
        self.scan.nodes[self.scan.files[file].node as usize].size
    }

    /// Cuts the next wave into units; depends on sizes alone.
    fn plan(&mut self) -> Vec<Unit> {
        let mut units = Vec::new();
        let mut total = 0;
        while total < WAVE_LEN && self.next < self.scan.files.len() {
            let first = self.next;
            if self.size(first) > UNIT_LEN || self.is_taken(first) {
                if let Some((start, len)) = self.plan_big(first) {
                    units.push(Unit { first, end: first + 1, start, len });
                    total += len;
                }
                if self.offset == self.size(first) {
                    (self.next, self.offset, self.opened) = (first + 1, 0, None);
                }
                continue;
            }
            let mut len = 0;
            while self.next < self.scan.files.len() && !self.is_taken(self.next) {
                // Opening a small file costs as much as reading some blocks.
                let cost = self.size(self.next).max(BLOCK_SIZE);
                if len + cost > UNIT_LEN {
                    break;
                }
                len += cost;
                self.next += 1;
            }
            units.push(Unit { first, end: self.next, start: 0, len: u64::MAX });
            total += len;
        }
        units
    }

    /// The next part of a big file, start and length. Holes are skipped here, because a file may
    /// consist almost entirely of holes.
    fn plan_big(&mut self, number: usize) -> Option<(u64, u64)> {
        let file = &self.scan.files[number];
        let size = self.size(number);
        let (mut start, mut stop) = (self.offset, size);
        if file.sparse {
            if self.opened.is_none() {
                // An error here occurs again, and is reported, when the file is read.
                let dir = self.scan.open_dir(self.scan.dir_of(file));
                self.opened = dir.ok().and_then(|dir| self.scan.open_file(&dir, file).ok());
            }
            let data = self.opened.as_ref().map(|opened| next_data(opened, true, start, size));
            match data {
                Some(Ok(Some(range))) => (start, stop) = range,
                Some(Ok(None)) => {
                    self.bytes.fetch_add(size - self.offset, Relaxed);
                    self.entries.fetch_add(1, Relaxed);
                    self.offset = size;
                    return None;
                }
                Some(Err(_)) | None => {}
            }
        }
        // Cuts are at multiples of UNIT_LEN, and so at multiples of the chunk length.
        let mut end = ((start / UNIT_LEN + 1) * UNIT_LEN).min(stop);
        // Skips the pieces that came first: their bytes have been counted.
        let taken = self.taken.range((number, start / PIECE)..(number + 1, 0)).next();
        if let Some((_, piece)) = taken.copied() {
            end = end.min((piece * PIECE).max(start));
            if end == start {
                self.bytes.fetch_add(start - self.offset, Relaxed);
                self.offset = ((piece + 1) * PIECE).min(size);
                return None;
            }
        }
        self.bytes.fetch_add(start - self.offset, Relaxed);
        self.offset = end;
        Some((start, end - start))
    }

    fn read(&self, unit: Unit) -> UnitRead {
        let mut read = UnitRead::default();
        let mut dir: Option<(u32, File)> = None;
        for file in &self.scan.files[unit.first..unit.end] {
            let result = match &dir {
                Some((number, dir)) if *number == self.scan.dir_of(file) => {
                    self.read_file(dir, file, unit, &mut read)
                }
                _ => self.open_dir(file, &mut read).and_then(|opened| {
                    let (_, dir) = dir.insert((self.scan.dir_of(file), opened));
                    self.read_file(dir, file, unit, &mut read)
                }),
            };
            if let Err(error) = result {
                read.problems.push((self.scan.file_path(file), error));
            }
        }
        read
    }

    /// Opens the directory of `file`, and checks whether its entries changed since the scan.
    fn open_dir(&self, file: &ScannedFile, read: &mut UnitRead) -> Result<File> {
        let number = self.scan.dir_of(file);
        let opened = self.scan.open_dir(number)?;
        let now = opened.metadata().map_err(|error| Error::io("cannot read it", error))?;
        let node = &self.scan.nodes[number as usize];
        if (now.mtime(), now.mtime_nsec()) != (node.mtime_s, i64::from(node.mtime_ns)) {
            read.changed.push(self.scan.path_of(number));
        }
        Ok(opened)
    }

    fn read_file(
        &self,
        dir: &File,
        file: &ScannedFile,
        unit: Unit,
        read: &mut UnitRead,
    ) -> Result<()> {
        let node = &self.scan.nodes[file.node as usize];
        let cannot = |error| Error::io("cannot read it", error);
        let opened = self.scan.open_file(dir, file).map_err(cannot)?;
        let same = |opened: &File| -> io::Result<bool> {
            let now = opened.metadata()?;
            let time = (now.mtime(), now.mtime_nsec());
            Ok(now.is_file()
                && now.len() == node.size
                && time == (node.mtime_s, i64::from(node.mtime_ns)))
        };
        let before = same(&opened).map_err(cannot)?;
        let end = node.size.min(unit.start.saturating_add(unit.len));
        let mut at = unit.start;
        while let Some((start, stop)) = next_data(&opened, file.sparse, at, end).map_err(cannot)? {
            if node.size <= u64::from(INLINE_MAX) {
                let data = read_range(&opened, 0, node.size).map_err(cannot)?;
                read.wave.inline.push((file.node, data.into()));
            } else {
                self.read_pieces(&opened, file.node, start..stop, &mut read.wave)
                    .map_err(cannot)?;
            }
            at = stop;
        }
        if !before || !same(&opened).map_err(cannot)? {
            read.changed.push(self.scan.file_path(file));
        }
        self.bytes.fetch_add(end - unit.start, Relaxed);
        if end == node.size {
            self.entries.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    /// Reads a run of data, cut at multiples of `CHUNK_MAX` of the file.
    fn read_pieces(
        &self,
        opened: &File,
        node: u32,
        range: std::ops::Range<u64>,
        wave: &mut Wave,
    ) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let cut = (at / u64::from(CHUNK_MAX) + 1) * u64::from(CHUNK_MAX);
            let end = cut.min(range.end);
            let mut data = read_range(opened, at, end - at)?;
            data.resize(data.len().next_multiple_of(BLOCK_SIZE as usize), 0);
            let digest = Digest::of(&data);
            let origins = Vec::new();
            wave.pieces.push(Piece { node, file_offset: at, data, digest, origins });
            at = end;
        }
        Ok(())
    }
}

impl Input for DirectoryInput<'_> {
    fn next(&mut self) -> Result<Option<Wave>> {
        let first = self.plan_first();
        let comes_first = !first.is_empty();
        let units = if comes_first { first } else { self.plan() };
        if units.is_empty() {
            return Ok(None);
        }
        let read: Vec<_> = units.into_par_iter().map(|unit| self.read(unit)).collect();
        let mut wave = Wave { comes_first, ..Wave::default() };
        let mut problems = Vec::new();
        for unit in read {
            wave.pieces.extend(unit.wave.pieces);
            wave.inline.extend(unit.wave.inline);
            self.changed.extend(unit.changed);
            problems.extend(unit.problems);
        }
        refuse(&problems)?;
        Ok(Some(wave))
    }
}

/// The next run of data in `at..end`, rounded outwards to blocks (but not beyond `end`).
pub(super) fn next_data(
    file: &File,
    sparse: bool,
    at: u64,
    end: u64,
) -> io::Result<Option<(u64, u64)>> {
    if at >= end {
        return Ok(None);
    }
    if !sparse {
        return Ok(Some((at, end)));
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start >= end => return Ok(None),
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system cannot report holes: all of it is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((at, end))),
        Err(error) => return Err(error.into()),
    };
    let stop = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    let start = (start / BLOCK_SIZE * BLOCK_SIZE).max(at);
    Ok(Some((start, stop.next_multiple_of(BLOCK_SIZE).min(end))))
}

/// Reads `len` bytes. If the file has become shorter, the rest is zeros (and the change is
/// reported).
fn read_range(file: &File, start: u64, len: u64) -> io::Result<Vec<u8>> {
    // Room for the padding avoids a second allocation.
    let mut data: Vec<u8> = Vec::with_capacity(len.next_multiple_of(BLOCK_SIZE) as usize);
    while (data.len() as u64) < len {
        let at = start + data.len() as u64;
        match rustix::io::pread(file, spare_capacity(&mut data), at) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // The capacity may exceed `len`, or the file may have become shorter.
    data.resize(len as usize, 0);
    Ok(data)
}
