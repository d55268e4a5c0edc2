//! zstd of several frames, each of which can be unpacked by itself.

use std::io::{self, BufRead, Read};

use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use crate::restart::Recording;

/// zstd's window, at most: 2²⁷ bytes, as `zstd --long` writes it.
const WINDOW_LOG_MAX: u32 = 27;

/// Unpacks frames, one after another, and keeps where they begin.
pub(crate) struct Unzstd<R> {
    input: R,
    decoder: Decoder<'static>,
    /// Within a frame.
    inside: bool,
    taken: u64,
    made: u64,
    recording: Recording,
}

impl<R: BufRead> Unzstd<R> {
    pub(crate) fn new(input: R, recording: Recording) -> io::Result<Self> {
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX))?;
        Ok(Self { input, decoder, inside: false, taken: 0, made: 0, recording })
    }

    /// What was recorded, after the end: with the bytes unpacked.
    pub(crate) fn finish(self) -> (u64, Recording) {
        (self.made, self.recording)
    }
}

impl<R: BufRead> Read for Unzstd<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let bytes = self.input.fill_buf()?;
            let ended = bytes.is_empty();
            if ended && !self.inside {
                return Ok(0);
            }
            if !self.inside {
                self.recording.may_begin(self.taken, self.made);
            }
            let (mut input, mut output) = (InBuffer::around(bytes), OutBuffer::around(&mut *buf));
            let rest = self.decoder.run(&mut input, &mut output)?;
            let (used, made) = (input.pos(), output.pos());
            self.input.consume(used);
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
