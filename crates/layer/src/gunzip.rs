//! gzip that is read from where a block begins.
//!
//! ```text
//!   member:  header │ block │ block │ … │ 8 bytes        member …
//!            ▲              ▲
//!            nothing needed; some bits of the byte before, and the 32 KiB that came before
//! ```
//!
//! Invariants: memory is two windows, whatever is read; the same bytes and the same place to begin
//! give the same output, also where a block refers to what was never there (zeros); what is recorded
//! matches the checksums of its members.

use std::io::{self, BufRead, Read};

use miniz_oxide::inflate::{
    TINFLStatus,
    core::{
        BlockBoundaryState, DecompressorOxide, decompress,
        inflate_flags::{TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY},
    },
};

use crate::restart::{Recording, Start};

/// How far back a block may refer.
const WINDOW_LEN: usize = 32 << 10;
/// zstd's level for windows: 1 ms for each.
const WINDOW_LEVEL: i32 = 9;
/// Output that is kept: a window, and as much again so that it is rarely interrupted.
const BUFFER_LEN: usize = 2 * WINDOW_LEN;
/// Longest header of a member: names, comments and extra fields have no bound of their own.
const HEADER_MAX: usize = 1 << 20;

/// Bits of a header that say what follows in it.
const HEADER_CRC: u8 = 2;
const EXTRA: u8 = 4;
const NAME: u8 = 8;
const COMMENT: u8 = 16;
const RESERVED: u8 = 0xe0;

/// Where a block begins that is not the first of its member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Inside {
    /// Bits of the byte before that belong to the block: 0 to 7.
    pub(crate) bits: u8,
    /// These bits.
    pub(crate) partial: u8,
    /// What was unpacked before, at most 32 KiB, as a zstd frame.
    pub(crate) window: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// A member begins, or nothing follows.
    Member,
    Blocks,
    Ended,
}

/// Unpacks members, one after another.
pub(crate) struct Gunzip<R> {
    input: R,
    inflate: Box<DecompressorOxide>,
    buffer: Box<[u8]>,
    /// Where in `buffer` the next output goes; `pending` bytes before that nobody has read yet.
    at: usize,
    pending: usize,
    state: State,
    /// Compressed bytes taken, and bytes unpacked.
    taken: u64,
    made: u64,
    /// Of what the member has unpacked to, where it was read from its beginning.
    checksum: crc32fast::Hasher,
    recording: Option<Recording>,
}

impl<R: BufRead> Gunzip<R> {
    /// From the beginning of a member; with `recording`, places to begin again are kept there.
    pub(crate) fn new(input: R, recording: Option<Recording>) -> Self {
        let (inflate, buffer) = (Box::default(), vec![0; BUFFER_LEN].into());
        let (at, pending, taken, made) = Default::default();
        let (state, checksum) = (State::Member, crc32fast::Hasher::new());
        Self { input, inflate, buffer, at, pending, state, taken, made, checksum, recording }
    }

    /// From the middle of a member.
    pub(crate) fn inside(input: R, start: &Inside) -> io::Result<Self> {
        let (num_bits, bit_buf) = (start.bits & 7, start.partial);
        let state = BlockBoundaryState { num_bits, bit_buf, ..BlockBoundaryState::default() };
        let mut gunzip = Self::new(input, None);
        *gunzip.inflate = DecompressorOxide::from_block_boundary_state(&state);
        let window = zstd::bulk::decompress(&start.window, WINDOW_LEN)?;
        gunzip.buffer[WINDOW_LEN - window.len()..WINDOW_LEN].copy_from_slice(&window);
        gunzip.at = WINDOW_LEN;
        gunzip.state = State::Blocks;
        Ok(gunzip)
    }

    /// What was recorded, after the end: with the bytes unpacked.
    pub(crate) fn finish(self) -> (u64, Recording) {
        (self.made, self.recording.unwrap_or_default())
    }

    fn step(&mut self) -> io::Result<()> {
        match self.state {
            State::Member => self.member(),
            State::Blocks => self.blocks(),
            State::Ended => Ok(()),
        }
    }

    /// Begins a member, if there is another.
    fn member(&mut self) -> io::Result<()> {
        if self.input.fill_buf()?.is_empty() {
            self.state = State::Ended;
            return Ok(());
        }
        if let Some(recording) = &mut self.recording {
            recording.may_begin(self.taken, self.made);
        }
        let mut head = [0; 10];
        self.fill(&mut head)?;
        let flags = head[3];
        if head[..3] != [0x1f, 0x8b, 8] || flags & RESERVED != 0 {
            return Err(damaged("a member of the gzip stream begins wrongly"));
        }
        if flags & EXTRA != 0 {
            let mut len = [0; 2];
            self.fill(&mut len)?;
            self.fill(&mut vec![0; u16::from_le_bytes(len).into()])?;
        }
        for field in [NAME, COMMENT] {
            if flags & field != 0 {
                self.text()?;
            }
        }
        if flags & HEADER_CRC != 0 {
            self.fill(&mut [0; 2])?;
        }
        self.inflate.init();
        // What an earlier member left is nothing that this one may refer to.
        self.buffer.fill(0);
        self.at = 0;
        self.state = State::Blocks;
        Ok(())
    }

    /// Passes over a text that ends with NUL.
    fn text(&mut self) -> io::Result<()> {
        for _ in 0..HEADER_MAX {
            let mut byte = [0];
            self.fill(&mut byte)?;
            if byte == [0] {
                return Ok(());
            }
        }
        Err(damaged("a name in the gzip stream does not end"))
    }

    fn fill(&mut self, buf: &mut [u8]) -> io::Result<()> {
        self.input.read_exact(buf)?;
        self.taken += buf.len() as u64;
        Ok(())
    }

    fn blocks(&mut self) -> io::Result<()> {
        let input = self.input.fill_buf()?;
        if input.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let stop = if self.recording.is_some() { TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY } else { 0 };
        let flags = TINFL_FLAG_HAS_MORE_INPUT | stop;
        let (status, used, made) =
            decompress(&mut self.inflate, input, &mut self.buffer, self.at, flags);
        self.input.consume(used);
        self.taken += used as u64;
        self.made += made as u64;
        if self.recording.is_some() {
            // What is made at a time ends at the end of the buffer at the latest.
            self.checksum.update(&self.buffer[self.at..self.at + made]);
        }
        self.at = (self.at + made) % BUFFER_LEN;
        // Nobody goes on before these have been read.
        self.pending = made;
        match status {
            TINFLStatus::NeedsMoreInput | TINFLStatus::HasMoreOutput => Ok(()),
            TINFLStatus::BlockBoundary => self.boundary(),
            TINFLStatus::Done => {
                let mut tail = [0; 8];
                self.fill(&mut tail)?;
                let unpacked = std::mem::take(&mut self.checksum).finalize();
                // Who reads from the middle knows digests of what is unpacked. The length that
                // follows says no more than the checksum.
                if self.recording.is_some() && tail[..4] != unpacked.to_le_bytes() {
                    return Err(damaged("the gzip stream does not match its checksum"));
                }
                self.state = State::Member;
                Ok(())
            }
            _ => Err(damaged("the gzip stream makes no sense")),
        }
    }

    /// Keeps the place between two blocks, if it is far enough from the one before.
    fn boundary(&mut self) -> io::Result<()> {
        let Some(recording) = &mut self.recording else { return Ok(()) };
        let Some(state) = self.inflate.block_boundary_state() else { return Ok(()) };
        if !recording.is_due(self.made) {
            return Ok(());
        }
        let (early, late) = self.buffer.split_at(self.at);
        let mut window = [late, early].concat();
        window.drain(..BUFFER_LEN - WINDOW_LEN);
        let window = zstd::bulk::compress(&window, WINDOW_LEVEL)?;
        let inside = Inside { bits: state.num_bits, partial: state.bit_buf, window };
        recording.begin(self.taken, self.made, Start::Inside(inside));
        Ok(())
    }
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.pending == 0 {
            if self.state == State::Ended {
                return Ok(0);
            }
            self.step()?;
        }
        let len = buf.len().min(self.pending);
        // They lie before `at`, and did not go beyond the end of the buffer.
        let end = if self.at == 0 { BUFFER_LEN } else { self.at };
        let from = end - self.pending;
        buf[..len].copy_from_slice(&self.buffer[from..from + len]);
        self.pending -= len;
        Ok(len)
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
