//! A decoder for zstd streams of several frames, each of which can be unpacked alone.
//!
//! Invariant: at most one layer at a time in this process has a window larger than [`WIDE`], which
//! may be 128 MiB. The others wait for it before a frame that needs such a window.

use std::{
    io::{self, BufRead, Read},
    sync::{Condvar, Mutex, PoisonError},
};

use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use crate::places::Recording;

/// Largest window: 2²⁷ bytes, as `zstd --long` writes it.
const WINDOW_LOG_MAX: u32 = 27;
/// Largest window that all layers may have at the same time: 8 MiB, that of zstd level 19.
const WIDE: u64 = 8 << 20;
/// Magic number of a frame with data.
const MAGIC: u32 = 0xfd2f_b528;

/// Unpacks a sequence of frames and records where they begin.
pub(crate) struct Unzstd<R> {
    input: R,
    decoder: Decoder<'static>,
    /// The beginning of a frame, not yet passed to the decoder.
    head: Vec<u8>,
    /// True if the decoder is within a frame.
    inside: bool,
    taken: u64,
    made: u64,
    recording: Recording,
    /// Kept to the end, because the decoder keeps the memory of its largest window.
    permit: Option<WindowPermit>,
}

impl<R: BufRead> Unzstd<R> {
    pub(crate) fn new(input: R, recording: Recording) -> io::Result<Self> {
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX))?;
        let (head, inside, taken, made, permit) = (Vec::new(), false, 0, 0, None);
        Ok(Self { input, decoder, head, inside, taken, made, recording, permit })
    }

    /// As [`Recording::held`].
    pub(crate) fn held(&self) -> (u64, u64) {
        self.recording.held()
    }

    /// The length of the output and the recorded places; valid at the end of the input.
    pub(crate) fn finish(self) -> (u64, Recording) {
        (self.made, self.recording)
    }

    /// Reads the head of the next frame; false at the end of the input.
    fn begin(&mut self) -> io::Result<bool> {
        let window = loop {
            if let Some(window) = window_len(&self.head) {
                break window;
            }
            let Some(byte) = self.input.fill_buf()?.first() else { break 0 };
            self.head.push(*byte);
            self.input.consume(1);
        };
        if self.head.is_empty() {
            return Ok(false);
        }
        if window > WIDE && self.permit.is_none() {
            self.permit = Some(WindowPermit::wait());
        }
        self.recording.may_begin(self.taken, self.made);
        Ok(true)
    }
}

impl<R: BufRead> Read for Unzstd<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.inside && self.head.is_empty() && !self.begin()? {
                return Ok(0);
            }
            let has_head = !self.head.is_empty();
            let bytes = if has_head { &self.head } else { self.input.fill_buf()? };
            let ended = bytes.is_empty();
            let (mut input, mut output) = (InBuffer::around(bytes), OutBuffer::around(&mut *buf));
            let rest = self.decoder.run(&mut input, &mut output)?;
            let (used, made) = (input.pos(), output.pos());
            if has_head {
                self.head.drain(..used);
            } else {
                self.input.consume(used);
            }
            self.taken += used as u64;
            self.made += made as u64;
            self.inside = rest != 0;
            if made > 0 || buf.is_empty() {
                return Ok(made);
            }
            if ended && used == 0 && self.inside {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Window size in bytes of a frame that begins with `head` (RFC 8878, 3.1.1.1); `None` if `head`
/// is too short. Zero for a skippable frame and for data that is no frame.
fn window_len(head: &[u8]) -> Option<u64> {
    let (magic, rest) = head.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*magic) != MAGIC {
        return Some(0);
    }
    let (flags, rest) = rest.split_first()?;
    if flags & 0x20 == 0 {
        let window = rest.first()?;
        let base = 1u64 << (10 + (window >> 3));
        return Some(base + base / 8 * u64::from(window & 7));
    }
    // Single segment: the window is as large as the content.
    let dictionary = [0, 1, 2, 4][usize::from(flags & 3)];
    let len = [1, 2, 4, 8][usize::from(flags >> 6)];
    let mut content = [0; 8];
    content[..len].copy_from_slice(rest.get(dictionary..dictionary + len)?);
    Some(u64::from_le_bytes(content))
}

/// Permission to have the one wide window.
struct WindowPermit;

static TAKEN: Mutex<bool> = Mutex::new(false);
static FREE: Condvar = Condvar::new();

impl WindowPermit {
    fn wait() -> Self {
        let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken =
            FREE.wait_while(taken, |taken| *taken).unwrap_or_else(PoisonError::into_inner);
        *taken = true;
        Self
    }
}

impl Drop for WindowPermit {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) = false;
        FREE.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, Read, Write};

    use super::{Recording, Unzstd, window_len};

    fn compressed(raw: &[u8], window_log: u32, tells_len: bool) -> Vec<u8> {
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window_log).unwrap();
        if tells_len {
            encoder.set_pledged_src_size(Some(raw.len() as u64)).unwrap();
        }
        encoder.write_all(raw).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn the_window_length_is_read_from_the_frame() {
        let frame = compressed(&[7; 100], 27, false);
        assert_eq!(window_len(&frame), Some(1 << 27));
        for len in [200, 300, 70_000] {
            let frame = zstd::bulk::compress(&vec![7; len], 3).unwrap();
            let window = window_len(&frame).unwrap();
            assert!((len as u64).abs_diff(window) <= 256, "{window} of {len}");
        }
        assert_eq!(window_len(&0x184d_2a50u32.to_le_bytes()), Some(0));
        assert_eq!((0..4).find_map(|len| window_len(&frame[..len])), None);
    }

    #[test]
    fn frames_of_any_window_are_unpacked_from_any_buffer() {
        let mut raw = Vec::new();
        let mut stored = Vec::new();
        for (number, log) in [(1, 27), (2, 10), (3, 24), (4, 27)] {
            let part: Vec<u8> = (0..50_000u32).map(|n| (n / number % 251) as u8).collect();
            stored.extend(compressed(&part, log, number % 2 == 0));
            stored.extend([&0x184d_2a5fu32.to_le_bytes()[..], &[3, 0, 0, 0], b"abc"].concat());
            raw.extend(part);
        }
        for at_a_time in [1, 5, 1000] {
            let input = BufReader::with_capacity(at_a_time, &stored[..]);
            let mut all = Vec::new();
            Unzstd::new(input, Recording::default()).unwrap().read_to_end(&mut all).unwrap();
            assert!(all == raw);
        }
        let mut cut = Unzstd::new(&stored[..3], Recording::default()).unwrap();
        cut.read_to_end(&mut Vec::new()).unwrap_err();
    }
}
