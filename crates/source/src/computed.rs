use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Error, ErrorKind, ObjectId, ObjectKind, Result,
};
use bytes::Bytes;

use crate::check_len;

/// Generated, endless objects: `computed/zeros`, `computed/byte-5a` (every byte 0x5a),
/// `computed/block-number` (each 4 KiB block repeats its own number, as little-endian u64s).
#[derive(Clone, Copy, Debug, Default)]
pub struct Computed;

enum Pattern {
    Byte(u8),
    BlockNumber,
}

impl Pattern {
    fn of(object: &ObjectId) -> Result<Self> {
        let unknown = || {
            Error::new(
                ErrorKind::NotFound,
                format!(
                    "{object} is not a computed object: there are zeros, byte-XX and block-number"
                ),
            )
        };
        match object.below(ObjectKind::Computed).ok_or_else(unknown)? {
            "zeros" => Ok(Self::Byte(0)),
            "block-number" => Ok(Self::BlockNumber),
            name => {
                let digits = name.strip_prefix("byte-").filter(|digits| digits.len() == 2);
                let byte = digits.and_then(|digits| {
                    digits
                        .bytes()
                        .all(|c| c.is_ascii_hexdigit())
                        .then(|| u8::from_str_radix(digits, 16).ok())?
                });
                byte.map(Self::Byte).ok_or_else(unknown)
            }
        }
    }
}

impl Computed {
    /// The bytes of `range` of `object`, without waiting.
    pub fn bytes(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let len = check_len(object, range)?;
        match Pattern::of(object)? {
            Pattern::Byte(byte) => Ok(Bytes::from(vec![byte; len])),
            Pattern::BlockNumber => Ok(block_numbers(range)),
        }
    }
}

impl Computed {
    /// Fills `buf`, which is as long as `range`, without allocating.
    fn fill(&self, object: &ObjectId, range: ByteRange, buf: &mut [u8]) -> Result<()> {
        if buf.len() != check_len(object, range)? {
            let message = format!("{range} of {object} does not fit in {} bytes", buf.len());
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        match Pattern::of(object)? {
            Pattern::Byte(byte) => buf.fill(byte),
            Pattern::BlockNumber => {
                let mut at = range.start();
                for part in split_at_blocks(at, buf) {
                    let number = (at / BLOCK_SIZE).to_le_bytes();
                    let phase = (at % 8) as usize;
                    if phase == 0 {
                        part.chunks_mut(8)
                            .for_each(|out| out.copy_from_slice(&number[..out.len()]));
                    } else {
                        part.iter_mut()
                            .zip(number.iter().cycle().skip(phase))
                            .for_each(|(out, byte)| *out = *byte);
                    }
                    at += part.len() as u64;
                }
            }
        }
        Ok(())
    }
}

/// Splits `buf`, which begins at `start`, at the block boundaries.
fn split_at_blocks(start: u64, buf: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    let first = (BLOCK_SIZE - start % BLOCK_SIZE).min(buf.len() as u64) as usize;
    let (head, rest) = buf.split_at_mut(first);
    std::iter::once(head).chain(rest.chunks_mut(BLOCK_SIZE as usize))
}

fn block_numbers(range: ByteRange) -> Bytes {
    let first = range.start() / BLOCK_SIZE;
    let last = range.end().div_ceil(BLOCK_SIZE);
    let mut blocks = Vec::with_capacity(((last - first) * BLOCK_SIZE) as usize);
    for block in first..last {
        for _ in 0..BLOCK_SIZE / 8 {
            blocks.extend_from_slice(&block.to_le_bytes());
        }
    }
    let start = (range.start() - first * BLOCK_SIZE) as usize;
    Bytes::from(blocks).slice(start..start + range.len() as usize)
}

impl BlockSource for Computed {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        self.bytes(object, range)
    }

    fn read_now(&self, object: &ObjectId, range: ByteRange, buf: &mut [u8]) -> Option<Result<()>> {
        Some(self.fill(object, range, buf))
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{BlockSource, ByteRange, ErrorKind, ObjectId};

    use super::Computed;

    fn bytes(name: &str, start: u64, len: u64) -> Vec<u8> {
        let object = ObjectId::new(name).unwrap();
        Computed.bytes(&object, ByteRange::at(start, len).unwrap()).unwrap().to_vec()
    }

    #[test]
    fn patterns_match_their_names() {
        assert_eq!(bytes("computed/zeros", 5, 3), [0; 3]);
        assert_eq!(bytes("computed/byte-5a", 1 << 50, 2), [0x5a; 2]);
        assert_eq!(bytes("computed/block-number", 3 * 4096 - 8, 16), {
            let mut expected = 2u64.to_le_bytes().to_vec();
            expected.extend(3u64.to_le_bytes());
            expected
        });
    }

    #[test]
    fn filling_a_buffer_gives_the_same_bytes() {
        for (name, start, len) in [
            ("computed/zeros", 7, 9),
            ("computed/byte-5a", 0, 4096),
            ("computed/block-number", 12285, 8200),
        ] {
            let (object, range) =
                (ObjectId::new(name).unwrap(), ByteRange::at(start, len).unwrap());
            let mut buf = vec![1; len as usize];
            Computed.read_now(&object, range, &mut buf).unwrap().unwrap();
            assert_eq!(buf, bytes(name, start, len), "{name}");
            assert!(Computed.read_now(&object, range, &mut buf[1..]).unwrap().is_err());
        }
    }

    #[test]
    fn unknown_patterns_and_huge_ranges_are_refused() {
        let range = ByteRange::at(0, 1).unwrap();
        for name in ["computed/ones", "computed/byte-5", "computed/byte-+5", "zeros"] {
            let object = ObjectId::new(name).unwrap();
            let kind = Computed.bytes(&object, range).unwrap_err().kind();
            assert_eq!(kind, ErrorKind::NotFound, "{name}");
        }
        let zeros = ObjectId::new("computed/zeros").unwrap();
        assert!(Computed.bytes(&zeros, ByteRange::at(0, 1 << 40).unwrap()).is_err());
    }
}
