use std::{fmt, str::FromStr};

use crate::{Error, ErrorKind};

/// The BLAKE3 digest of some bytes: the name of a chunk, a pack or a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; Digest::LEN]);

impl Digest {
    /// Length in bytes.
    pub const LEN: usize = 32;

    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The raw bytes.
    pub fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }
}

impl From<[u8; Digest::LEN]> for Digest {
    fn from(bytes: [u8; Digest::LEN]) -> Self {
        Self(bytes)
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = Error;

    /// Parses exactly 64 lower-case hexadecimal digits, so that one digest has one spelling.
    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || Error::new(ErrorKind::Invalid, format!("{text:?} is not a digest"));
        let nibble = |c: u8| match c {
            b'0'..=b'9' => Some(c - b'0'),
            b'a'..=b'f' => Some(c - b'a' + 10),
            _ => None,
        };
        let digits = text.as_bytes();
        if digits.len() != 2 * Self::LEN {
            return Err(invalid());
        }
        let mut bytes = [0; Self::LEN];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let (Some(high), Some(low)) = (nibble(pair[0]), nibble(pair[1])) else {
                return Err(invalid());
            };
            *byte = high << 4 | low;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::Digest;

    #[test]
    fn text_round_trips_and_has_one_spelling() {
        let digest = Digest::of(b"burgeon");
        let text = digest.to_string();
        assert_eq!(text.parse::<Digest>().unwrap(), digest);
        assert!(text.to_uppercase().parse::<Digest>().is_err());
        assert!(text[1..].parse::<Digest>().is_err());
    }
}
