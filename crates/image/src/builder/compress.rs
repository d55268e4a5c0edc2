//! zstd for chunks.

use std::{cell::RefCell, io};

use burgeon_block::{Error, Result};
use zstd::zstd_safe::{CCtx, CParameter, Strategy, compress_bound, get_error_name};

use crate::{CHUNK_MAX, Codec};

/// log₂ of [`CHUNK_MAX`].
const WINDOW_LOG: u32 = CHUNK_MAX.ilog2();

/// Parameters of levels 1 to 12: chain log, hash log, search log, shortest match, target length,
/// strategy. Levels from 13 on, which aim at size, use zstd's own.
///
/// Levels 5 to 12 are zstd's for inputs above 256 KiB, with tables no larger than a chunk can
/// fill: zstd's parameters for shorter inputs cost up to a third more time for one or two per
/// cent of size. The tables of levels 1 to 4 fit in a processor's second-level cache. At level 3,
/// a chunk of 256 KiB takes no more bytes than two blocks of 128 KiB at zstd's level 3, and four
/// fifths of the time.
#[rustfmt::skip]
const LEVELS: [(u32, u32, u32, u32, u32, Strategy); 12] = [
    (13, 14, 1, 6,  0, Strategy::ZSTD_fast),
    (13, 15, 1, 6,  0, Strategy::ZSTD_fast),
    (13, 15, 1, 5,  0, Strategy::ZSTD_fast),
    (16, 17, 1, 5,  0, Strategy::ZSTD_dfast),
    (18, 19, 3, 5,  2, Strategy::ZSTD_greedy),
    (18, 19, 3, 5,  4, Strategy::ZSTD_lazy),
    (18, 19, 4, 5,  8, Strategy::ZSTD_lazy),
    (18, 19, 4, 5, 16, Strategy::ZSTD_lazy2),
    (18, 19, 4, 5, 16, Strategy::ZSTD_lazy2),
    (18, 19, 5, 5, 16, Strategy::ZSTD_lazy2),
    (18, 19, 6, 5, 16, Strategy::ZSTD_lazy2),
    (18, 19, 6, 5, 32, Strategy::ZSTD_lazy2),
];

struct Compressor {
    level: i32,
    context: CCtx<'static>,
    out: Vec<u8>,
}

impl Compressor {
    fn new(level: i32) -> io::Result<Self> {
        let mut context = CCtx::create();
        let index = usize::try_from(level - 1).unwrap_or(usize::MAX);
        let parameters = match LEVELS.get(index) {
            None => vec![CParameter::CompressionLevel(level)],
            Some((chain, hash, search, shortest, target, strategy)) => vec![
                CParameter::WindowLog(WINDOW_LOG),
                CParameter::ChainLog(*chain),
                CParameter::HashLog(*hash),
                CParameter::SearchLog(*search),
                CParameter::MinMatch(*shortest),
                CParameter::TargetLength(*target),
                CParameter::Strategy(*strategy),
            ],
        };
        for parameter in parameters {
            context.set_parameter(parameter).map_err(failed)?;
        }
        Ok(Self { level, context, out: vec![0; compress_bound(CHUNK_MAX as usize)] })
    }

    fn compress(&mut self, data: &[u8]) -> io::Result<&[u8]> {
        let len = self.context.compress2(&mut self.out[..], data).map_err(failed)?;
        Ok(&self.out[..len])
    }
}

fn failed(code: usize) -> io::Error {
    io::Error::other(get_error_name(code))
}

thread_local! {
    static COMPRESSOR: RefCell<Option<Compressor>> = const { RefCell::new(None) };
}

/// Compresses a chunk with this thread's context; leaves it uncompressed if that saves too
/// little.
pub(super) fn compress(data: Vec<u8>, level: i32) -> Result<(Codec, Vec<u8>)> {
    let compressed = COMPRESSOR.with_borrow_mut(|slot| -> io::Result<_> {
        if slot.as_ref().is_none_or(|compressor| compressor.level != level) {
            *slot = Some(Compressor::new(level)?);
        }
        let Some(compressor) = slot else { unreachable!("it was made just now") };
        let compressed = compressor.compress(&data)?;
        // A saving of less than 1/64 is not worth the decompression.
        let worth_it = compressed.len() < data.len() - data.len() / 64;
        Ok(worth_it.then(|| compressed.to_vec()))
    });
    match compressed {
        Ok(Some(compressed)) => Ok((Codec::Zstd, compressed)),
        Ok(None) => Ok((Codec::Raw, data)),
        Err(error) => Err(Error::io("cannot compress a chunk", error)),
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::Digest;

    use super::compress;
    use crate::{CHUNK_MAX, Codec, decode_chunk};

    #[test]
    fn every_level_round_trips() {
        let text: Vec<u8> = (0..CHUNK_MAX).map(|n| ((n / 3 % 251) ^ (n / 1000)) as u8).collect();
        for level in 1..=22 {
            let (codec, stored) = compress(text.clone(), level).unwrap();
            assert_eq!(codec, Codec::Zstd);
            assert!(stored.len() < text.len() / 2, "level {level}: {}", stored.len());
            let mut raw = vec![0; text.len()];
            decode_chunk(codec, &stored, &mut raw, &Digest::of(&text)).unwrap();
        }
    }
}
