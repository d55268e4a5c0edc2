//! Pax records: `LENGTH KEY=VALUE\n`; the length includes itself.

use std::collections::BTreeMap;

use burgeon_block::{Error, Result};

use crate::corrupt;

/// Longest map of a sparse file, in pieces: 1 GiB of alternating blocks.
pub(super) const SPARSE_MAX: usize = 1 << 18;
/// Keys accepted in one header: Linux lists 64 KiB of a file's attribute names, 7 bytes each.
const PAIRS_MAX: usize = 10_000;

/// Keys and values, by key. A later value of a key replaces an earlier one, except for the pairs
/// of sparse format 0.0, which are kept separately, in order. Unknown keys are dropped.
pub(super) struct Records {
    pairs: BTreeMap<String, Vec<u8>>,
    sparse: Vec<u64>,
    /// Bytes that may still be added, counting replaced ones.
    room: usize,
}

impl Records {
    /// No records; at most `len_max` bytes may be added in total.
    pub(super) fn new(len_max: usize) -> Self {
        Self { pairs: BTreeMap::new(), sparse: Vec::new(), room: len_max }
    }

    pub(super) fn extend(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.room = self.room.checked_sub(bytes.len()).ok_or_else(|| {
            corrupt("the extended headers of the archive are too long: unpack it, and build from the folder")
        })?;
        while !bytes.is_empty() {
            let (record, rest) = split_record(bytes).ok_or_else(bad)?;
            bytes = rest;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            let key = std::str::from_utf8(key).map_err(|_| bad())?;
            if matches!(key, "GNU.sparse.offset" | "GNU.sparse.numbytes") {
                if self.sparse.len() >= 2 * SPARSE_MAX {
                    return Err(too_many_pieces());
                }
                self.sparse.push(decimal(value)?);
                continue;
            }
            if !has_meaning(key) {
                continue;
            }
            if self.pairs.len() >= PAIRS_MAX && !self.pairs.contains_key(key) {
                return Err(corrupt(format!(
                    "a file of the archive has more than {PAIRS_MAX} attributes"
                )));
            }
            self.pairs.insert(key.to_owned(), value.to_vec());
        }
        Ok(())
    }

    pub(super) fn get(&self, key: &str) -> Option<&[u8]> {
        self.pairs.get(key).map(Vec::as_slice)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.pairs.iter().map(|(key, value)| (key.as_str(), value.as_slice()))
    }

    /// The map of sparse formats 0.0 and 0.1.
    pub(super) fn sparse_map(&self) -> Result<Option<Vec<(u64, u64)>>> {
        let numbers = match self.get("GNU.sparse.map") {
            Some(map) => {
                if map.iter().filter(|byte| **byte == b',').count() >= 2 * SPARSE_MAX {
                    return Err(too_many_pieces());
                }
                map.split(|byte| *byte == b',').map(decimal).collect::<Result<Vec<_>>>()?
            }
            None if self.sparse.is_empty() => return Ok(None),
            None => self.sparse.clone(),
        };
        if numbers.len() % 2 != 0 {
            return Err(bad());
        }
        Ok(Some(numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()))
    }
}

/// True if the key describes a file.
fn has_meaning(key: &str) -> bool {
    let prefixes = ["SCHILY.acl.", "SCHILY.xattr.", "GNU.sparse."];
    matches!(key, "path" | "linkpath" | "size" | "uid" | "gid" | "mtime")
        || prefixes.iter().any(|prefix| key.starts_with(prefix))
}

pub(super) fn too_many_pieces() -> Error {
    corrupt(format!("a sparse file of the archive has more than {SPARSE_MAX} pieces"))
}

/// The first record without length and newline, and the bytes after it.
fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let len = usize::try_from(decimal(&bytes[..space]).ok()?).ok()?;
    let (record, rest) = bytes.split_at_checked(len)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    Some((record, rest))
}

fn bad() -> Error {
    corrupt("the archive is damaged: an extended header is invalid")
}

/// An unsigned decimal number.
pub(super) fn decimal(text: &[u8]) -> Result<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(text).ok().filter(|_| digits);
    number.and_then(|number| number.parse().ok()).ok_or_else(bad)
}

/// A time in decimal seconds, optionally signed and with a fraction, as whole seconds and
/// nanoseconds (which count forward, also before 1970).
pub(super) fn time(text: &[u8]) -> Result<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(text) => (true, text),
        None => (false, text),
    };
    let (whole, fraction) = match text.iter().position(|byte| *byte == b'.') {
        Some(point) => (&text[..point], &text[point + 1..]),
        None => (text, &b""[..]),
    };
    let seconds = i64::try_from(decimal(whole)?).map_err(|_| bad())?;
    let mut digits = [b'0'; 9];
    for (digit, given) in digits.iter_mut().zip(fraction) {
        *digit = *given;
    }
    let nanos = decimal(&digits)? as u32;
    Ok(match (negative, nanos) {
        (false, _) => (seconds, nanos),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanos),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_and_replaced() {
        let mut records = Records::new(24);
        records.extend(b"12 path=abc\n11 size=123\n").unwrap_err();
        let mut records = Records::new(36);
        records.extend(b"12 path=abc\n12 size=123\n").unwrap();
        assert_eq!(records.get("path"), Some(&b"abc"[..]));
        records.extend(b"12 path=\n=x\n").unwrap();
        assert_eq!(records.get("path"), Some(&b"\n=x"[..]));
        records.extend(b"6 a=b\n").unwrap_err();
        for bad in [&b"x"[..], b"5 a=b\n", b"0 a=b\n", b"99 a=b\n", b"6 ab\n\n", b"8 a=b\n\n"] {
            assert!(Records::new(100).extend(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times_have_signs_and_fractions() {
        assert_eq!(time(b"12.5").unwrap(), (12, 500_000_000));
        assert_eq!(time(b"12.1234567891").unwrap(), (12, 123_456_789));
        assert_eq!(time(b"-1.25").unwrap(), (-2, 750_000_000));
        assert_eq!(time(b"-3").unwrap(), (-3, 0));
        for bad in [&b""[..], b"1.x", b"--1", b"1e5", b"99999999999999999999"] {
            assert!(time(bad).is_err(), "{bad:?}");
        }
    }
}
