use burgeon_block::{ByteRange, Digest, Result};

use crate::{CHUNK_MAX, corrupt};

/// Encoding of a stored chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Codec {
    /// Uncompressed; zeros that pad the last block may be missing.
    Raw = 0,
    /// One zstd frame.
    Zstd = 1,
    /// Uncompressed, in an object that verifies all its bytes by a table of its own: a derived
    /// object, made of layers that were never read.
    Verified = 2,
}

impl Codec {
    pub(crate) fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Raw),
            1 => Some(Self::Zstd),
            2 => Some(Self::Verified),
            _ => None,
        }
    }
}

/// A chunk: a part of the lazy address space, and the location of its stored bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Lazy addresses, whole blocks, at most [`CHUNK_MAX`] bytes.
    pub range: ByteRange,
    /// Index of the object that holds it ([`crate::AddressMap::object`]).
    pub object: u32,
    /// Range in the object.
    pub stored: ByteRange,
    /// Encoding of the stored bytes.
    pub codec: Codec,
    /// BLAKE3 of the raw bytes (all `range.len()` of them). Of [`Codec::Verified`] the identity
    /// that the object gives the stored range, or zeros if an earlier version made the image.
    pub digest: Digest,
}

impl Chunk {
    /// True if nothing here identifies the bytes: only the object's table does.
    pub fn lacks_identity(&self) -> bool {
        self.codec == Codec::Verified && self.digest.as_bytes() == &[0; Digest::LEN]
    }
}

/// Decodes the stored bytes of a chunk into `raw`, whose length is the chunk's (`range.len()`),
/// and checks the result against `digest`, unless their source has verified them
/// ([`Codec::Verified`]). Any difference is `Corrupt`. Never writes or allocates more than `raw`.
pub fn decode_chunk(codec: Codec, stored: &[u8], raw: &mut [u8], digest: &Digest) -> Result<()> {
    if raw.len() > CHUNK_MAX as usize {
        return Err(corrupt(format!("a chunk of {} bytes, above the limit", raw.len())));
    }
    match codec {
        Codec::Raw | Codec::Verified => {
            let Some((data, padding)) = raw.split_at_mut_checked(stored.len()) else {
                return Err(corrupt("a stored chunk is longer than the chunk"));
            };
            data.copy_from_slice(stored);
            padding.fill(0);
        }
        Codec::Zstd => {
            let len = zstd::bulk::decompress_to_buffer(stored, raw)
                .map_err(|error| corrupt(format!("a chunk does not decompress: {error}")))?;
            if len != raw.len() {
                return Err(corrupt(format!("a chunk has {len} bytes instead of {}", raw.len())));
            }
        }
    }
    if codec == Codec::Verified || Digest::of(raw) == *digest {
        Ok(())
    } else {
        Err(corrupt(format!("a chunk's bytes do not match its digest {digest}")))
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Digest, ErrorKind};

    use super::{Codec, decode_chunk};

    #[test]
    fn decoding_refuses_any_difference() {
        let data = vec![7u8; 8192];
        let digest = Digest::of(&data);
        let stored = zstd::bulk::compress(&data, 3).unwrap();
        let mut raw = vec![0; 8192];
        decode_chunk(Codec::Zstd, &stored, &mut raw, &digest).unwrap();
        assert_eq!(raw, data);
        decode_chunk(Codec::Raw, &data, &mut raw, &digest).unwrap();

        let kind = |codec, stored: &[u8], len| {
            decode_chunk(codec, stored, &mut vec![0; len], &digest).unwrap_err().kind()
        };
        assert_eq!(kind(Codec::Zstd, &stored, 4096), ErrorKind::Corrupt);
        assert_eq!(kind(Codec::Zstd, &stored, 12288), ErrorKind::Corrupt);
        assert_eq!(kind(Codec::Zstd, &stored[..stored.len() - 1], 8192), ErrorKind::Corrupt);
        assert_eq!(kind(Codec::Raw, &data, 4096), ErrorKind::Corrupt);
        assert_eq!(kind(Codec::Raw, &data[1..], 8192), ErrorKind::Corrupt);
        assert_eq!(kind(Codec::Raw, &data, 1 << 20), ErrorKind::Corrupt);
    }

    #[test]
    fn missing_padding_is_zeros() {
        let mut data = vec![9u8; 5000];
        let mut raw = vec![1; 8192];
        let stored = data.clone();
        data.resize(8192, 0);
        decode_chunk(Codec::Raw, &stored, &mut raw, &Digest::of(&data)).unwrap();
        assert_eq!(raw, data);
    }
}
