//! A gzip stream of any number of members.
//!
//! As gzip(1), it accepts zeros after the last member: tapes and `dd` pad to whole blocks.

use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

/// Decompresses the members one after another, each checked by its checksum and length.
pub struct Gunzip<R>(Option<GzDecoder<R>>);

impl<R: BufRead> Gunzip<R> {
    /// Starts at the beginning of the first member.
    pub fn new(input: R) -> Self {
        Self(Some(GzDecoder::new(input)))
    }
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.0 {
            let len = member.read(buf)?;
            if len > 0 || buf.is_empty() {
                return Ok(len);
            }
            let Some(mut input) = self.0.take().map(GzDecoder::into_inner) else { break };
            self.0 = goes_on(&mut input)?.then(|| GzDecoder::new(input));
        }
        Ok(0)
    }
}

/// True if another member follows; false at the end of the input. Skips padding before the end.
fn goes_on(input: &mut impl BufRead) -> io::Result<bool> {
    let mut padding = 0;
    loop {
        let bytes = input.fill_buf()?;
        let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
        if bytes.is_empty() {
            return Ok(false);
        }
        if zeros < bytes.len() && padding + zeros == 0 {
            return Ok(true);
        }
        if zeros < bytes.len() {
            let what = "other bytes follow the zeros after the end of the gzip stream";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        padding += zeros;
        input.consume(zeros);
    }
}
