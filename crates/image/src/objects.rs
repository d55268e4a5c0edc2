//! Encoding of lists of object names: for each its length (u16) and its bytes.

use burgeon_block::{ObjectId, Result};

use crate::corrupt;

pub(crate) fn encode(objects: &[ObjectId]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for object in objects {
        // ObjectId::LEN_MAX is 1024.
        bytes.extend_from_slice(&(object.as_str().len() as u16).to_le_bytes());
        bytes.extend_from_slice(object.as_str().as_bytes());
    }
    bytes
}

pub(crate) fn decode(mut bytes: &[u8], count: u64) -> Result<Vec<ObjectId>> {
    let bad = || corrupt("the list of objects is damaged");
    let mut objects = Vec::new();
    for _ in 0..count {
        let (len, rest) = bytes.split_first_chunk::<2>().ok_or_else(bad)?;
        let (name, rest) =
            rest.split_at_checked(u16::from_le_bytes(*len).into()).ok_or_else(bad)?;
        objects.push(ObjectId::new(std::str::from_utf8(name).map_err(|_| bad())?)?);
        bytes = rest;
    }
    if bytes.is_empty() { Ok(objects) } else { Err(bad()) }
}
