//! gzip that is read from where a block begins.
//!
//! ```text
//!   member:  header │ block │ block │ … │ 8 bytes        member …
//!            ▲              ▲
//!            nothing needed; some bits of the byte before, and what of the 32 KiB that came
//!            before is referred to: little, which is found out when the next 32 KiB have come
//! ```
//!
//! To find it out these are unpacked twice more, with two windows that hold no data but say at each
//! place, by the pair of their bytes there, which place it is: where the two outputs differ, a byte of
//! the window went. (The tool `rapidgzip` leaves out the same of its windows; it has a decoder of its own
//! that sees every reference.)
//!
//! Invariants: memory is some ten windows, whatever is read; the same bytes and the same place to begin
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
/// zstd's level for windows.
const WINDOW_LEVEL: i32 = 6;
/// Compressed bytes of which the next window of output is made, at most. It takes more only where empty
/// blocks are strung together; all of the window is kept then.
const AFTER_MAX: usize = 4 * WINDOW_LEN;
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
    /// What was unpacked before, at most 32 KiB, as a zstd frame; zeros where nothing refers to.
    pub(crate) window: Vec<u8>,
}

/// A place that is kept, whose window is not yet.
struct Unsettled {
    bits: u8,
    partial: u8,
    window: Vec<u8>,
    /// Where it is in what is unpacked.
    unpacked: u64,
    /// The compressed bytes that follow, so far.
    after: Vec<u8>,
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
    unsettled: Option<Unsettled>,
}

impl<R: BufRead> Gunzip<R> {
    /// From the beginning of a member; with `recording`, places to begin again are kept there.
    pub(crate) fn new(input: R, recording: Option<Recording>) -> Self {
        let (inflate, buffer) = (Box::default(), vec![0; BUFFER_LEN].into());
        let (at, pending, taken, made, unsettled) = Default::default();
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
            recording,
            unsettled,
        }
    }

    /// From the middle of a member.
    pub(crate) fn inside(input: R, start: &Inside) -> io::Result<Self> {
        let window = zstd::bulk::decompress(&start.window, WINDOW_LEN)?;
        Ok(Self::behind(input, (start.bits, start.partial), &window))
    }

    /// From a block, of which `bits` of the byte before are the beginning, behind `window`.
    fn behind(input: R, (bits, partial): (u8, u8), window: &[u8]) -> Self {
        let (num_bits, bit_buf) = (bits & 7, partial);
        let state = BlockBoundaryState { num_bits, bit_buf, ..BlockBoundaryState::default() };
        let mut gunzip = Self::new(input, None);
        *gunzip.inflate = DecompressorOxide::from_block_boundary_state(&state);
        gunzip.buffer[WINDOW_LEN - window.len()..WINDOW_LEN].copy_from_slice(window);
        gunzip.at = WINDOW_LEN;
        gunzip.state = State::Blocks;
        gunzip
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
        // What begins there is put in when it is known.
        recording.begin(self.taken, self.made, Start::Fresh);
        let (bits, partial, unpacked) = (state.num_bits, state.bit_buf, self.made);
        self.unsettled = Some(Unsettled { bits, partial, window, unpacked, after: Vec::new() });
        Ok(())
    }
}

impl Unsettled {
    /// Whether nothing that follows refers to the window, or too much is needed to see that.
    fn is_ripe(&self, made: u64) -> bool {
        made - self.unpacked >= WINDOW_LEN as u64 || self.after.len() > AFTER_MAX
    }

    fn settle(self) -> io::Result<Inside> {
        let Self { bits, partial, mut window, .. } = self;
        if self.after.len() <= AFTER_MAX {
            // Two windows of which no place has the same pair of bytes as another, nor a byte twice.
            let first = |place: usize| place as u8;
            let second = |place: usize| first(place).wrapping_add((place >> 8) as u8 + 1);
            let unpack = |byte: &dyn Fn(usize) -> u8| {
                let window: Vec<u8> = (0..WINDOW_LEN).map(byte).collect();
                // A member that ends has a checksum, which nobody looks at.
                let after = self.after.chain(&[0; 8][..]);
                let gunzip = Gunzip::behind(after, (bits, partial), &window);
                let mut unpacked = Vec::with_capacity(WINDOW_LEN);
                // It ends in an error where the input does.
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
