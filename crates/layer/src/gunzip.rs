//! A gzip decoder that can start at a block boundary.
//!
//! ```text
//!   member:  header │ block │ block │ … │ 8 bytes        member …
//!            ▲              ▲
//!            needs nothing; needs some bits of the byte before, and the bytes of the
//!                           preceding 32 KiB (the window) that later blocks refer to
//! ```
//!
//! Few bytes of a window are referred to; the others are stored as zeros. To find the used ones,
//! the 32 KiB after the boundary are unpacked twice more, behind two artificial windows. At each
//! offset, the bytes of these two windows differ, and the pair identifies the offset: where the
//! outputs differ, they show which byte of the window was copied. (`rapidgzip` zeroes the same
//! bytes; its own decoder sees every reference.)
//!
//! Invariants: memory is about ten windows, whatever the input; the same input and starting place
//! give the same output, even if a block refers to data before the beginning (zeros); recorded
//! places belong to members whose checksums matched.

use std::io::{self, BufRead, Read};

use miniz_oxide::inflate::{
    TINFLStatus,
    core::{
        BlockBoundaryState, DecompressorOxide, decompress,
        inflate_flags::{TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY},
    },
};

use crate::places::{Inside, Recording, Start};

/// Farthest distance that a block may refer back, in bytes.
const WINDOW_LEN: usize = 32 << 10;
/// zstd level for windows.
const WINDOW_LEVEL: i32 = 6;
/// Most compressed bytes that are buffered for the 32 KiB after a place. Only long runs of empty
/// blocks need more; the whole window is kept then.
const AFTER_MAX: usize = 4 * WINDOW_LEN;
/// Length of the output buffer: a window, and as much again so that calls of the decoder are long.
const BUFFER_LEN: usize = 2 * WINDOW_LEN;
/// Most blocks of a stream, and least bytes of output for each block beyond: a block without output
/// is 10 bits, and takes as long as a kilobyte of data.
const BLOCKS_MAX: u64 = 256 << 10;
const BLOCK_LEN: u64 = 16;
/// Longest name or comment in the header of a member; the format sets no limit.
const HEADER_MAX: usize = 1 << 20;

/// Flags of a member's header: the optional fields that follow.
const HEADER_CRC: u8 = 2;
const EXTRA: u8 = 4;
const NAME: u8 = 8;
const COMMENT: u8 = 16;
const RESERVED: u8 = 0xe0;

/// A recorded place whose window is not final yet.
struct Unsettled {
    bits: u8,
    partial: u8,
    window: Vec<u8>,
    /// Offset in the unpacked layer.
    unpacked: u64,
    /// The compressed bytes after the place, so far.
    after: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a member, or at the end of the input.
    Member,
    Blocks,
    Ended,
}

/// A decoder for a sequence of members.
pub(crate) struct Gunzip<R> {
    input: R,
    inflate: Box<DecompressorOxide>,
    buffer: Box<[u8]>,
    /// Offset in `buffer` of the next output. The `pending` bytes before it are not yet read.
    at: usize,
    pending: usize,
    state: State,
    /// Compressed bytes consumed, and bytes unpacked.
    taken: u64,
    made: u64,
    /// CRC of the member's output; used only while recording.
    checksum: crc32fast::Hasher,
    /// Bytes of `buffer` that may hold output of the member.
    filled: usize,
    /// Blocks so far, without the last one of each member.
    blocks: u64,
    recording: Option<Recording>,
    unsettled: Option<Unsettled>,
}

impl<R: BufRead> Gunzip<R> {
    /// Starts at the beginning of a member. Places are added to `recording`, if given.
    pub(crate) fn new(input: R, recording: Option<Recording>) -> Self {
        let (inflate, buffer) = (Box::default(), vec![0; BUFFER_LEN].into());
        let (at, pending, taken, made, filled, blocks, unsettled) = Default::default();
        let (state, checksum) = (State::Member, crc32fast::Hasher::new());
        Self {
            input,
            inflate,
            buffer,
            at,
            pending,
            state,
            taken,
            made,
            checksum,
            filled,
            blocks,
            recording,
            unsettled,
        }
    }

    /// Starts inside a member.
    pub(crate) fn inside(input: R, start: &Inside) -> io::Result<Self> {
        let window = zstd::bulk::decompress(&start.window, WINDOW_LEN)?;
        Ok(Self::behind(input, (start.bits, start.partial), &window))
    }

    /// Starts after `window`, at a block whose first `bits` bits, from the preceding byte, are
    /// `partial`.
    fn behind(input: R, (bits, partial): (u8, u8), window: &[u8]) -> Self {
        let (num_bits, bit_buf) = (bits & 7, partial);
        let state = BlockBoundaryState { num_bits, bit_buf, ..BlockBoundaryState::default() };
        let mut gunzip = Self::new(input, None);
        *gunzip.inflate = DecompressorOxide::from_block_boundary_state(&state);
        gunzip.buffer[WINDOW_LEN - window.len()..WINDOW_LEN].copy_from_slice(window);
        gunzip.at = WINDOW_LEN;
        gunzip.filled = BUFFER_LEN;
        gunzip.state = State::Blocks;
        gunzip
    }

    /// The length of the output and the recorded places; valid at the end of the input.
    /// As [`Recording::held`].
    pub(crate) fn held(&self) -> (u64, u64) {
        self.recording.as_ref().map(Recording::held).unwrap_or_default()
    }

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

    /// Reads the header of the next member, if there is one.
    fn member(&mut self) -> io::Result<()> {
        let padding = if self.taken > 0 { self.skip_zeros()? } else { 0 };
        if self.input.fill_buf()?.is_empty() {
            self.state = State::Ended;
            return Ok(());
        }
        if padding > 0 {
            let what = "other bytes follow the zeros after the end of the gzip stream";
            return Err(damaged(what));
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
        // A member must not refer to the output of an earlier one. A member can be 20 bytes, so
        // clearing the whole buffer would cost more than reading it.
        self.buffer[..self.filled].fill(0);
        self.filled = 0;
        self.at = 0;
        self.state = State::Blocks;
        Ok(())
    }

    /// Skips zeros, which pad the end of a stream to whole blocks; returns their number.
    fn skip_zeros(&mut self) -> io::Result<u64> {
        let before = self.taken;
        loop {
            let bytes = self.input.fill_buf()?;
            let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
            let is_all = zeros == bytes.len();
            self.input.consume(zeros);
            self.taken += zeros as u64;
            if zeros == 0 || !is_all {
                return Ok(self.taken - before);
            }
        }
    }

    /// Skips a NUL-terminated string.
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
        let flags = TINFL_FLAG_HAS_MORE_INPUT | TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY;
        let (status, used, made) =
            decompress(&mut self.inflate, input, &mut self.buffer, self.at, flags);
        if let Some(unsettled) = &mut self.unsettled {
            unsettled.after.extend_from_slice(&input[..used]);
        }
        self.input.consume(used);
        self.taken += used as u64;
        self.made += made as u64;
        let is_over = status == TINFLStatus::Done;
        if let Some(unsettled) = self.unsettled.take_if(|it| is_over || it.is_ripe(self.made))
            && let Some(recording) = &mut self.recording
        {
            recording.settle(Start::Inside(unsettled.settle()?));
        }
        if self.recording.is_some() {
            // The output of one call never wraps around the end of the buffer.
            self.checksum.update(&self.buffer[self.at..self.at + made]);
        }
        self.filled = self.filled.max(self.at + made);
        self.at = (self.at + made) % BUFFER_LEN;
        // `read` drains these before the next step.
        self.pending = made;
        match status {
            TINFLStatus::NeedsMoreInput | TINFLStatus::HasMoreOutput => Ok(()),
            TINFLStatus::BlockBoundary => self.boundary(),
            TINFLStatus::Done => {
                let mut tail = [0; 8];
                self.fill(&mut tail)?;
                let unpacked = std::mem::take(&mut self.checksum).finalize();
                // A reader that starts inside a member checks digests of the output instead. The
                // length that follows adds nothing to the checksum.
                if self.recording.is_some() && tail[..4] != unpacked.to_le_bytes() {
                    return Err(damaged("the gzip stream does not match its checksum"));
                }
                self.state = State::Member;
                Ok(())
            }
            _ => Err(damaged("the gzip stream is damaged")),
        }
    }

    /// Counts the boundary between two blocks, and records it if it is far enough from the previous
    /// place.
    fn boundary(&mut self) -> io::Result<()> {
        self.blocks += 1;
        if self.blocks > BLOCKS_MAX + self.made / BLOCK_LEN {
            return Err(damaged("the gzip stream consists of blocks without data"));
        }
        let Some(recording) = &mut self.recording else { return Ok(()) };
        let Some(state) = self.inflate.block_boundary_state() else { return Ok(()) };
        if !recording.is_due(self.made) {
            return Ok(());
        }
        let (early, late) = self.buffer.split_at(self.at);
        let mut window = [late, early].concat();
        window.drain(..BUFFER_LEN - WINDOW_LEN);
        // `settle` replaces the start once the window is final.
        recording.begin(self.taken, self.made, Start::Fresh);
        let (bits, partial, unpacked) = (state.num_bits, state.bit_buf, self.made);
        self.unsettled = Some(Unsettled { bits, partial, window, unpacked, after: Vec::new() });
        Ok(())
    }
}

impl Unsettled {
    /// True if no later block can refer to the window, or `after` has become too long.
    fn is_ripe(&self, made: u64) -> bool {
        made - self.unpacked >= WINDOW_LEN as u64 || self.after.len() > AFTER_MAX
    }

    fn settle(self) -> io::Result<Inside> {
        let Self { bits, partial, mut window, .. } = self;
        if self.after.len() <= AFTER_MAX {
            // Two windows: the pair of bytes at each offset is unique, and its two bytes differ.
            let first = |place: usize| place as u8;
            let second = |place: usize| first(place).wrapping_add((place >> 8) as u8 + 1);
            let unpack = |byte: &dyn Fn(usize) -> u8| {
                let window: Vec<u8> = (0..WINDOW_LEN).map(byte).collect();
                // Stands for the trailer of the member, which is not checked here.
                let after = self.after.chain(&[0; 8][..]);
                let gunzip = Gunzip::behind(after, (bits, partial), &window);
                let mut unpacked = Vec::with_capacity(WINDOW_LEN);
                // Running out of input is expected here.
                let _ = gunzip.take(WINDOW_LEN as u64).read_to_end(&mut unpacked);
                unpacked
            };
            let mut is_used = vec![false; WINDOW_LEN];
            for (first, second) in unpack(&first).into_iter().zip(unpack(&second)) {
                let page = usize::from(second.wrapping_sub(first).wrapping_sub(1));
                let place = page << 8 | usize::from(first);
                if let Some(is_used) = is_used.get_mut(place).filter(|_| first != second) {
                    *is_used = true;
                }
            }
            for (byte, is_used) in window.iter_mut().zip(&is_used) {
                *byte = if *is_used { *byte } else { 0 };
            }
            let unused = is_used.iter().take_while(|is_used| !**is_used).count();
            window.drain(..unused);
        }
        Ok(Inside { bits, partial, window: zstd::bulk::compress(&window, WINDOW_LEVEL)? })
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
        // The pending bytes end at `at`, and never wrap.
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
