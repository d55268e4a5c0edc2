//! The records on the disk: of one snapshot, and of the index of one image.
//!
//! ```text
//!   records/ID     "burgeon snapshot 1 <digest of the rest>\n", then JSON
//!   indexes/HEX    "burgeon index 1 <digest of the rest>\n", then JSON
//! ```
//!
//! Invariants: damage is noticed; a record of a newer version is not read. Held by the tests below
//! and the fuzz target `snapshotter`.

use burgeon_block::{Digest, Error, ErrorKind, Result};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    image_index::ImageIndex,
    model::{LABEL_BYTES_MAX, NAME_MAX, Snapshot},
};

const SNAPSHOT: &str = "burgeon snapshot ";
const INDEX: &str = "burgeon index ";
const VERSION: &str = "1";
/// The longest record: names and labels at their bounds, each byte as `\u0000`, and the rest.
pub const RECORD_MAX: usize = 6 * (LABEL_BYTES_MAX + 2 * NAME_MAX) + (64 << 10);

/// The bytes of a snapshot's record.
pub fn encode(snapshot: &Snapshot) -> Result<Vec<u8>> {
    let failed = |e| {
        let what = format!("cannot describe the snapshot {:?}", snapshot.name);
        Error::with_source(ErrorKind::Invalid, what, e)
    };
    encode_as(SNAPSHOT, snapshot).map_err(failed)
}

/// The snapshot of a record.
pub fn decode(bytes: &[u8]) -> Result<Snapshot> {
    decode_as(SNAPSHOT, bytes)
}

/// The bytes of an index's record.
pub(crate) fn encode_index(index: &ImageIndex) -> Result<Vec<u8>> {
    let failed = |e| {
        let what = format!("cannot describe the index of {:?}", index.manifest);
        Error::with_source(ErrorKind::Invalid, what, e)
    };
    encode_as(INDEX, index).map_err(failed)
}

/// The index of a record.
pub(crate) fn decode_index(bytes: &[u8]) -> Result<ImageIndex> {
    decode_as(INDEX, bytes)
}

fn encode_as(magic: &str, value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let body = serde_json::to_vec(value)?;
    let head = format!("{magic}{VERSION} {}\n", Digest::of(&body));
    Ok([head.as_bytes(), &body].concat())
}

fn decode_as<T: DeserializeOwned>(magic: &str, bytes: &[u8]) -> Result<T> {
    let damaged = |why: &str| Error::new(ErrorKind::Corrupt, format!("it is damaged: {why}"));
    if bytes.len() > RECORD_MAX {
        return Err(damaged("it is too long"));
    }
    let end = bytes.iter().take(200).position(|b| *b == b'\n');
    let (head, rest) = bytes.split_at(end.ok_or_else(|| damaged("it has no head"))?);
    let rest = &rest[1..];
    let head = str::from_utf8(head).ok().and_then(|head| head.strip_prefix(magic));
    let (version, digest) =
        head.and_then(|head| head.split_once(' ')).ok_or_else(|| damaged("another head"))?;
    if version != VERSION {
        let what = format!("it is of version {version}: upgrade burgeon");
        return Err(Error::new(ErrorKind::UnsupportedFormat, what));
    }
    if digest != Digest::of(rest).to_string() {
        return Err(damaged("its digest differs"));
    }
    serde_json::from_slice(rest).map_err(|e| damaged(&e.to_string()))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use burgeon_block::ErrorKind;

    use super::{RECORD_MAX, decode, encode};
    use crate::model::{LABEL_BYTES_MAX, Labels, NAME_MAX, Snapshot, SnapshotKind};

    fn snapshot(name: String, labels: Labels) -> Snapshot {
        let now = SystemTime::now();
        let parent = Some(name.clone());
        Snapshot {
            id: 7,
            name,
            parent,
            kind: SnapshotKind::Active,
            labels,
            created: now,
            updated: now,
            usage: None,
            remote: None,
            why_local: None,
            native: None,
            why_overlay: None,
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let long = "\0".repeat(NAME_MAX);
        let labels = Labels::from([("\0".repeat(LABEL_BYTES_MAX), String::new())]);
        for one in [snapshot("a".into(), Labels::new()), snapshot(long, labels)] {
            let bytes = encode(&one).unwrap();
            assert!(bytes.len() <= RECORD_MAX);
            assert_eq!(decode(&bytes).unwrap(), one);
        }
    }

    #[test]
    fn each_changed_byte_is_noticed() {
        let bytes = encode(&snapshot("a".into(), Labels::new())).unwrap();
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert!(decode(&other).is_err(), "byte {at}");
            assert!(decode(&bytes[..at]).is_err(), "{at} bytes");
        }
        let newer = String::from_utf8(bytes).unwrap().replace("snapshot 1 ", "snapshot 2 ");
        let error = decode(newer.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnsupportedFormat);
    }
}
