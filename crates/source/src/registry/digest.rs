//! SHA-256 digests, and readers that check them.

use std::{
    fmt,
    io::{self, Read},
    str::FromStr,
};

use burgeon_block::{Error, ErrorKind, Result};
use sha2::{Digest as _, Sha256};

/// A digest as registries write it: `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OciDigest(String);

impl OciDigest {
    /// Hashes `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self::from_hasher(Sha256::new_with_prefix(bytes))
    }

    fn from_hasher(hasher: Sha256) -> Self {
        let hex: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("sha256:{hex}"))
    }

    /// The digest in binary.
    pub fn bytes(&self) -> [u8; 32] {
        let value = |digit: u8| if digit < b'a' { digit - b'0' } else { digit - b'a' + 10 };
        let digits = self.hex().as_bytes();
        std::array::from_fn(|at| value(digits[2 * at]) << 4 | value(digits[2 * at + 1]))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The hexadecimal digits.
    pub fn hex(&self) -> &str {
        &self.0[7..]
    }
}

impl FromStr for OciDigest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let digits = text.strip_prefix("sha256:").map(str::as_bytes).unwrap_or_default();
        let hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if digits.len() == 64 && digits.iter().all(hex) {
            return Ok(Self(text.to_owned()));
        }
        let shown: String = text.chars().take(100).collect();
        let what = format!(
            "{shown:?} is not a digest: write sha256: and 64 lower-case \
            hexadecimal digits"
        );
        Err(Error::new(ErrorKind::Invalid, what))
    }
}

impl fmt::Display for OciDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Reads `size` bytes with a known digest; different content is reported as `Corrupt` before the
/// end.
pub struct Checked<R> {
    inner: R,
    hasher: Sha256,
    digest: OciDigest,
    size: u64,
    read: u64,
}

impl<R: Read> Checked<R> {
    /// Expects `size` bytes with `digest` from `inner`.
    pub fn new(inner: R, digest: OciDigest, size: u64) -> Self {
        Self { inner, hasher: Sha256::new(), digest, size, read: 0 }
    }

    fn wrong(&self, why: &str) -> io::Error {
        io::Error::other(Error::new(ErrorKind::Corrupt, format!("the blob {} {why}", self.digest)))
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        let len = self.inner.read(buf)?;
        self.read += len as u64;
        if self.read > self.size || len == 0 && self.read < self.size {
            let than = if self.read > self.size { "longer" } else { "shorter" };
            let why = format!("is {than} than the {} bytes that the image states", self.size);
            return Err(self.wrong(&why));
        }
        self.hasher.update(&buf[..len]);
        if len == 0 && OciDigest::from_hasher(self.hasher.clone()) != self.digest {
            return Err(self.wrong("does not match its digest: tampered with, or damaged"));
        }
        Ok(len)
    }
}

/// Computes the digest of the bytes read.
pub struct Digesting<R> {
    inner: R,
    hasher: Sha256,
}

impl<R: Read> Digesting<R> {
    /// Reads from `inner`.
    pub fn new(inner: R) -> Self {
        Self { inner, hasher: Sha256::new() }
    }

    /// The stream that it reads from.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// The digest of all bytes read.
    pub fn digest(self) -> OciDigest {
        OciDigest::from_hasher(self.hasher)
    }
}

impl<R: Read> Read for Digesting<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buf)?;
        self.hasher.update(&buf[..len]);
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};

    use super::{Checked, OciDigest};

    #[test]
    fn a_digest_is_sha256_in_lower_case() {
        let of_nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(OciDigest::of(b"").to_string(), of_nothing);
        assert_eq!(of_nothing.parse::<OciDigest>().unwrap(), OciDigest::of(b""));
        let upper = of_nothing.to_uppercase();
        for bad in ["", "sha256:", "sha512:00", &of_nothing[7..], &upper, "sha256:../../x"] {
            assert!(bad.parse::<OciDigest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_the_expected_bytes_pass() {
        let read = |bytes: &'static [u8], size| {
            let mut checked = Checked::new(bytes, OciDigest::of(b"abc"), size);
            io::copy(&mut checked, &mut io::sink()).map_err(|e| e.to_string())
        };
        assert_eq!(read(b"abc", 3), Ok(3));
        assert!(read(b"abd", 3).unwrap_err().contains("does not match its digest"));
        assert!(read(b"ab", 3).unwrap_err().contains("is shorter than the 3 bytes"));
        assert!(read(b"abcd", 3).unwrap_err().contains("is longer than the 3 bytes"));
        // An endless body is refused as soon as it is too long.
        let mut endless = Checked::new(io::repeat(b'a'), OciDigest::of(b"abc"), 3);
        assert!(endless.read(&mut [0; 100]).is_err());
    }
}
