//! Identities: of mounts (random, short, for people), of file systems (fsids), and of contents
//! (digests, as text in records and messages).

use std::{fmt, str::FromStr};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The identity of one running mount: 32 random bits, written as eight hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MountId(u32);

impl MountId {
    /// A new identity.
    pub fn random() -> Result<Self> {
        Ok(Self(u32::from_le_bytes(random_bytes()?)))
    }

    /// The identity whose bits are `number`.
    pub(crate) fn from_number(number: u32) -> Self {
        Self(number)
    }

    /// Its 32 bits.
    pub(crate) fn number(self) -> u64 {
        self.0.into()
    }
}

impl fmt::Display for MountId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl FromStr for MountId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        hex_bytes::<4>(text)
            .map(|bytes| Self(u32::from_be_bytes(bytes)))
            .ok_or_else(|| Error::new(ErrorKind::Invalid, format!("{text:?} is not a mount id")))
    }
}

impl TryFrom<String> for MountId {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<MountId> for String {
    fn from(id: MountId) -> Self {
        id.to_string()
    }
}

/// The identity of a file system, as btrfs shows it: a UUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fsid(pub [u8; 16]);

impl Fsid {
    /// A new random (version 4) UUID.
    pub fn random() -> Result<Self> {
        let mut bytes: [u8; 16] = random_bytes()?;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Fsid {
    /// As `/sys/fs/btrfs` spells it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Fsid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        hex_bytes::<16>(&text.replace('-', ""))
            .map(Self)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, format!("{text:?} is not an fsid")))
    }
}

impl TryFrom<String> for Fsid {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Fsid> for String {
    fn from(fsid: Fsid) -> Self {
        fsid.to_string()
    }
}

fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("cannot get random bytes", e.into()))?;
    // The kernel never shortens requests of up to 256 bytes.
    debug_assert_eq!(n, N);
    Ok(bytes)
}

fn hex_bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|c| c.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// A digest as text in JSON.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DigestText(pub Digest);

impl From<Digest> for DigestText {
    fn from(digest: Digest) -> Self {
        Self(digest)
    }
}

impl TryFrom<String> for DigestText {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse().map(Self)
    }
}

impl From<DigestText> for String {
    fn from(digest: DigestText) -> Self {
        digest.0.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::{Fsid, MountId};

    #[test]
    fn identities_round_trip() {
        let id = MountId::random().unwrap();
        assert_eq!(id.to_string().parse::<MountId>().unwrap(), id);
        let fsid = Fsid::random().unwrap();
        assert_eq!(fsid.to_string().parse::<Fsid>().unwrap(), fsid);
        assert_eq!(fsid.to_string().len(), 36);
        assert!("0102030".parse::<MountId>().is_err());
        assert!("+1020304".parse::<MountId>().is_err());
    }
}
