//! Files that keep layers while they are fetched, also across interrupted processes.
//!
//! ```text
//!   kept beginning of the layer ─┬─► Tee ─┬─► reader        the whole layer, checked
//!   the rest, from the registry ─┘        └─► Spool         the rest alone: it is appended
//!                                              └─ each PIECE is allocated before; no room: emptied
//! ```
//!
//! Invariants: bytes kept by an earlier process are read again and checked with the rest before the
//! layer is published; no byte of a layer that is to stay is written before its space was allocated
//! (`tests::a_layer_without_room_is_read_and_not_kept`).

use std::{
    fs::File,
    io::{self, BufRead, Read, Seek, Write},
    path::Path,
};

use burgeon_block::{Error, ErrorKind, MemoryMeter, Result};
use burgeon_layer::Recorder;
use burgeon_source::{Partial, registry::OciDigest};

use crate::Allocate;

/// A durable spool is synced every 16 MiB: during the fetch this costs no time, at the end it
/// would.
const SYNC_LEN: u64 = 16 << 20;

/// Space is allocated in pieces of this length, ahead of the bytes: what a layer takes beyond its
/// bytes while it is stored.
pub(crate) const PIECE: u64 = 16 << 20;

/// A file that keeps a layer while it is fetched.
pub(crate) struct Spool<'a> {
    file: File,
    pub(crate) path: &'a Path,
    /// Length of the kept beginning of the layer.
    pub(crate) len: u64,
    /// The space for a file that must survive this process.
    room: Option<LayerRoom<'a>>,
}

/// The space of a layer that is being stored.
#[derive(Clone)]
pub(crate) struct LayerRoom<'a> {
    pub(crate) allocate: Allocate<'a>,
    pub(crate) digest: &'a OciDigest,
    pub(crate) size: u64,
    /// True if the layer is not to be read unless it is stored.
    pub(crate) must: bool,
}

impl LayerRoom<'_> {
    fn none(&self) -> Error {
        let what = format!(
            "cannot store the layer {}: its disk would have less free space than Burgeon leaves; \
             free some space, or leave less with `burgeon cache resize --keep-free`",
            self.digest
        );
        Error::new(ErrorKind::NoSpace, what)
    }
}

impl<'a> Spool<'a> {
    /// A temporary file.
    pub(crate) fn of(file: File) -> Self {
        Self { file, path: Path::new(""), len: 0, room: None }
    }

    /// The file of `partial`, whose path is `path`, or a new file there.
    pub(crate) fn lasting(
        path: &'a Path,
        partial: Option<&Partial>,
        room: LayerRoom<'a>,
    ) -> Result<Self> {
        let file = match partial {
            Some(partial) => partial.file().try_clone(),
            None => File::create_new(path),
        };
        let file =
            file.map_err(|error| Error::io(format!("cannot create {}", path.display()), error))?;
        Ok(Self { file, path, len: partial.map_or(0, Partial::len), room: Some(room) })
    }

    /// Empties the file, for a copy of a layer that is stored already.
    pub(crate) fn empty(&mut self) -> Result<()> {
        self.len = 0;
        self.room.iter_mut().for_each(|room| room.must = false);
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|error| Error::io(format!("cannot empty {}", self.path.display()), error))
    }
}

/// Keeps the beginning of a layer for the next try if `error` is a failed fetch, else removes it.
/// Returns the error to report.
pub(crate) fn given_up(partial: Option<Partial>, error: Error) -> Error {
    let Some(partial) = partial.filter(|_| error.kind() != ErrorKind::Unavailable) else {
        return error;
    };
    let had = !partial.is_empty();
    partial.remove();
    if !had || error.kind() != ErrorKind::Corrupt {
        return error;
    }
    let what = "the leftovers of an interrupted mount were used, and have been removed: try \
        again";
    Error::with_source(error.kind(), what, error)
}

/// Counts the bytes read as input for the memory limits of `meter`, if there is one.
pub(crate) struct Metered<'a, R> {
    pub(crate) inner: R,
    pub(crate) meter: Option<&'a MemoryMeter>,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buf)?;
        if let Some(meter) = self.meter {
            meter.input(len as u64);
        }
        Ok(len)
    }
}

/// Memory of a place in a layer of gzip that a sound layer accounts for. Most take 2 KiB, a whole
/// window of random bytes 32 KiB.
const PLACE_COST: u64 = 8 << 10;

/// Counts on `meter` the places that a recorder keeps.
pub(crate) struct CountedPlaces<'a, R> {
    pub(crate) inner: Recorder<R>,
    meter: &'a MemoryMeter,
    /// Places and bytes counted so far.
    counted: (u64, u64),
}

impl<'a, R: BufRead> CountedPlaces<'a, R> {
    pub(crate) fn new(inner: Recorder<R>, meter: &'a MemoryMeter) -> Self {
        Self { inner, meter, counted: (0, 0) }
    }
}

impl<R: BufRead> Read for CountedPlaces<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buf)?;
        let (places, bytes) = self.inner.held();
        self.meter.promise((places - self.counted.0) * PLACE_COST);
        self.meter.take(bytes - self.counted.1).map_err(io::Error::other)?;
        self.counted = (places, bytes);
        Ok(len)
    }
}

/// Copies the bytes read to a spool and counts them.
pub(crate) struct Tee<'a, R> {
    inner: R,
    /// True if `inner` failed, in reading or in checking.
    pub(crate) is_bad: bool,
    /// `None` as well once there was no room for it.
    pub(crate) spool: Option<File>,
    /// Bytes still to be read that the spool already has.
    skip: u64,
    /// Bytes that the spool has, and bytes that it has space for.
    len: u64,
    allocated: u64,
    /// Bytes written since the last sync.
    unsynced: u64,
    room: Option<LayerRoom<'a>>,
    count: &'a (dyn Fn(u64) + Sync),
}

impl<'a, R> Tee<'a, R> {
    pub(crate) fn new(inner: R, spool: Option<Spool<'a>>, count: &'a (dyn Fn(u64) + Sync)) -> Self {
        let (file, len, room) = match spool {
            Some(spool) => (Some(spool.file), spool.len, spool.room),
            None => (None, 0, None),
        };
        let (is_bad, unsynced, skip, allocated) = (false, 0, len, len);
        Self { inner, is_bad, spool: file, skip, len, allocated, unsynced, room, count }
    }

    /// An error if the layer is of no use without the spool that it has lost.
    fn is_wanted(&self) -> io::Result<()> {
        match &self.room {
            Some(room) if room.must && self.spool.is_none() => Err(io::Error::other(room.none())),
            _ => Ok(()),
        }
    }

    /// Allocates space for `more` bytes of a layer that is to stay. Without room the file is
    /// emptied, and not written again.
    fn make_room(&mut self, more: u64) -> io::Result<()> {
        let (Some(room), Some(file)) = (&self.room, &self.spool) else { return Ok(()) };
        let end = self.len + more;
        while self.allocated < end {
            // A layer longer than its size is refused at its end.
            let piece = PIECE.min(room.size.max(end) - self.allocated);
            if !(room.allocate)(file, self.allocated, piece) {
                file.set_len(0)?;
                self.spool = None;
                return self.is_wanted();
            }
            self.allocated += piece;
        }
        Ok(())
    }
}

impl<R: Read> Read for Tee<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.is_wanted()?;
        let len = self.inner.read(buf).inspect_err(|_| self.is_bad = true)?;
        let skipped = self.skip.min(len as u64) as usize;
        self.skip -= skipped as u64;
        self.make_room((len - skipped) as u64)?;
        if let Some(spool) = &mut self.spool {
            self.len += (len - skipped) as u64;
            self.unsynced += (len - skipped) as u64;
            let sync = self.room.is_some() && self.unsynced >= SYNC_LEN;
            let written = spool.write_all(&buf[skipped..len]);
            let written = written.and_then(|()| if sync { spool.sync_data() } else { Ok(()) });
            written.map_err(|error| {
                io::Error::other(Error::io("cannot keep a layer in the state directory", error))
            })?;
            self.unsynced = if sync { 0 } else { self.unsynced };
        }
        (self.count)(len as u64);
        Ok(len)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Mutex;

    use burgeon_layer::LayerCodec;
    use testkit::{Rng, gzip_flushed};

    use super::*;

    #[test]
    fn a_layer_without_room_is_read_and_not_kept() {
        /// Pieces that there is room for.
        const FITS: u64 = 2;
        let (folder, size) = (tempfile::tempdir().unwrap(), 3 * PIECE + 5);
        let layer = Rng::new(3).bytes(size as usize);
        let path = folder.path().join("layer");
        let taken = Mutex::new(0);
        let digest = OciDigest::of(&layer);
        let read = |fits: u64, must| {
            *taken.lock().unwrap() = 0;
            let allocate = |file: &File, offset: u64, len: u64| {
                assert!(file.metadata().unwrap().len() <= offset, "nothing is written before");
                let mut taken = taken.lock().unwrap();
                let has_room = *taken + len <= fits;
                *taken += if has_room { len } else { 0 };
                has_room
            };
            let room = LayerRoom { allocate: &allocate, digest: &digest, size, must };
            let _ = std::fs::remove_file(&path);
            let spool = Spool::lasting(&path, None, room).unwrap();
            let mut tee = Tee::new(&layer[..], Some(spool), &|_| ());
            let mut bytes = Vec::new();
            let read = tee.read_to_end(&mut bytes).map(|_| bytes == layer);
            (read, tee.spool.is_some(), std::fs::metadata(&path).unwrap().len())
        };
        let (whole, is_kept, len) = read(size, true);
        assert!(whole.unwrap() && is_kept && len == size);
        let (whole, is_kept, len) = read(FITS * PIECE, false);
        assert!(whole.unwrap() && !is_kept && len == 0);
        let (refused, is_kept, len) = read(FITS * PIECE, true);
        let refused = refused.unwrap_err().downcast::<Error>().unwrap();
        assert!(refused.kind() == ErrorKind::NoSpace && !is_kept && len == 0, "{refused}");
        assert_eq!(*taken.lock().unwrap(), FITS * PIECE);
    }

    /// Each place needs all of the bytes before it, which do not compress.
    #[test]
    fn the_windows_of_a_layer_are_counted() {
        let unpacked = Rng::new(9).bytes(32_000).repeat(200);
        let layer = gzip_flushed(&unpacked.chunks(600_000).collect::<Vec<_>>(), 9);
        let read = |meter: &MemoryMeter| {
            let blob = Metered { inner: &layer[..], meter: Some(meter) };
            let blob = io::BufReader::new(blob);
            let mut counted =
                CountedPlaces::new(Recorder::new(blob, LayerCodec::Gzip).unwrap(), meter);
            io::copy(&mut counted, &mut io::sink()).map(|_| counted.counted)
        };
        let (places, bytes) = read(&MemoryMeter::new()).unwrap();
        assert!(places >= 8 && bytes > places * 25_000, "{places} places, {bytes} bytes");
        let full = MemoryMeter::new();
        full.take(full.bound() - 4096).unwrap();
        let refused = read(&full).unwrap_err().downcast::<Error>().unwrap();
        assert!(refused.kind() == ErrorKind::Invalid, "{refused}");
    }
}
