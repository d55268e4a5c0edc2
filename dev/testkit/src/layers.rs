//! Layers that resemble those of real images.

use std::io::Write;

use crate::Rng;

/// Bytes that compress as programs do: random ones, repeated at all distances.
pub fn like_programs(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes = rng.bytes(1000);
    while bytes.len() < len {
        let run = 1 + rng.below(300) as usize;
        if rng.below(3) == 0 {
            bytes.extend(rng.bytes(run));
        } else {
            let far = (1 + rng.below(40_000) as usize).min(bytes.len());
            let from = bytes.len() - far;
            let until = (from + run).min(bytes.len());
            bytes.extend_from_within(from..until);
        }
    }
    bytes.truncate(len);
    bytes
}

/// `bytes` as a member of gzip, with everything that its header may have.
pub fn gzip(bytes: &[u8], level: u32) -> Vec<u8> {
    gzip_flushed(&[bytes], level)
}

/// The same of all `parts`, with a block that begins where each but the first does.
pub fn gzip_flushed(parts: &[&[u8]], level: u32) -> Vec<u8> {
    let mut encoder = flate2::GzBuilder::new()
        .filename("layer.tar")
        .comment("a comment")
        .extra(*b"extra")
        .write(Vec::new(), flate2::Compression::new(level));
    let mut write = || -> std::io::Result<()> {
        for (number, part) in parts.iter().enumerate() {
            if number > 0 {
                encoder.flush()?;
            }
            encoder.write_all(part)?;
        }
        Ok(())
    };
    let written = write().and_then(|()| encoder.finish());
    written.unwrap_or_else(|error| unreachable!("memory takes everything: {error}"))
}
