//! The encoding of a profile: a file of sections.
//!
//! Rules: a read has at least one block; addresses start at `DATA_START` and, like file offsets,
//! stay below 2⁶³; the file is in the list; paths begin with `/`, have no NUL and at most 4,096
//! bytes.

use burgeon_block::{BLOCK_SIZE, Digest, Error, ErrorKind, Result};
use burgeon_btrfs::DATA_START;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use super::{Profile, ProfileRead, READS_MAX, whole_blocks};
use crate::{
    columns::{Reader, Writer, row_len},
    container::{self, Container, Format, Section},
    corrupt,
};

const FORMAT: Format = Format { magic: *b"BURGPROF", what: "profile" };
const PARAMS: u32 = 1;
const FILES: u32 = 2;
const READS: u32 = 3;
/// File, offset in blocks, address in blocks from `DATA_START`, blocks, age.
const WIDTHS: [usize; 5] = [4, 8, 8, 4, 1];

/// Longest encoded profile, in bytes, that is read from a store.
pub const PROFILE_MAX: u64 = 32 << 20;
/// Total bytes of all paths: a quarter of a million of 64 bytes each.
const PATHS_MAX: u64 = 16 << 20;
/// Most paths: at most one per range, and aging ranges may leave theirs behind. A path takes at
/// least 56 bytes of memory, however short it is.
const FILES_MAX: u64 = 4 * READS_MAX as u64;
/// Longest path, in bytes.
const PATH_MAX: usize = 4096;
/// Longest range, in bytes: 32 bits of blocks.
pub(super) const LEN_MAX: u64 = whole_blocks(u32::MAX as u64 * BLOCK_SIZE);
const LEVEL: i32 = 3;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Params {
    image: [u8; Digest::LEN],
    runs: U32,
    reserved: U32,
    files: U64,
    paths_len: U64,
    reads: U64,
}

impl Profile {
    /// The encoded profile; `Invalid` if the total length of its paths exceeds the limit.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut paths = Vec::new();
        for path in &self.files {
            if path.len() > PATH_MAX {
                return Err(too_long());
            }
            // PATH_MAX fits.
            paths.extend_from_slice(&(path.len() as u16).to_le_bytes());
            paths.extend_from_slice(path);
        }
        if paths.len() as u64 > PATHS_MAX || self.files.len() as u64 > FILES_MAX {
            return Err(too_long());
        }
        let params = Params {
            image: *self.image.as_bytes(),
            runs: self.runs.into(),
            reserved: 0.into(),
            files: (self.files.len() as u64).into(),
            paths_len: (paths.len() as u64).into(),
            reads: (self.reads.len() as u64).into(),
        };
        let mut columns = Writer::new(&WIDTHS, self.reads.len());
        let reads = || self.reads.iter();
        columns.column(WIDTHS[0], reads().map(|read| read.file.into()));
        columns.column(WIDTHS[1], reads().map(|read| read.offset / BLOCK_SIZE));
        columns.column(WIDTHS[2], reads().map(|read| (read.address - DATA_START) / BLOCK_SIZE));
        columns.column(WIDTHS[3], reads().map(|read| read.len / BLOCK_SIZE));
        columns.column(WIDTHS[4], reads().map(|read| read.age.into()));
        let zstd = |kind, raw| Section { kind, raw, level: Some(LEVEL) };
        let params = Section { kind: PARAMS, raw: params.as_bytes().to_vec(), level: None };
        let sections = vec![params, zstd(FILES, paths), zstd(READS, columns.finish())];
        container::encode(FORMAT, sections)
    }

    /// Decodes the output of [`Self::encode`]. `Corrupt` if the bytes are damaged or break a
    /// rule, `UnsupportedFormat` if their version or a feature is unknown.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > PROFILE_MAX {
            return Err(corrupt("the profile is too long"));
        }
        let container = Container::parse(FORMAT, bytes)?;
        let params = container.read(bytes, PARAMS, size_of::<Params>() as u64)?;
        let params = Params::read_from_bytes(&params)
            .map_err(|_| corrupt("the profile's parameters are cut short"))?;
        let (files, paths_len) = (params.files.get(), params.paths_len.get());
        let rows = params.reads.get();
        if rows > READS_MAX as u64 || paths_len > PATHS_MAX || files > FILES_MAX {
            return Err(corrupt("the profile claims to be too large"));
        }
        let files = paths(&container.read(bytes, FILES, paths_len)?, files as usize)?;
        let columns = container.read(bytes, READS, rows * row_len(&WIDTHS))?;
        let mut columns = Reader::new(&columns, rows as usize);
        let file = columns.column(WIDTHS[0])?;
        let offset = columns.column(WIDTHS[1])?;
        let address = columns.column(WIDTHS[2])?;
        let len = columns.column(WIDTHS[3])?;
        let age = columns.column(WIDTHS[4])?;
        let rows = file.zip(offset).zip(address).zip(len).zip(age);
        let reads = rows.map(|((((file, offset), address), len), age)| {
            read(file, offset, address, len, age, files.len())
                .ok_or_else(|| corrupt("a range of the profile is impossible"))
        });
        let reads = reads.collect::<Result<_>>()?;
        Ok(Self { image: params.image.into(), runs: params.runs.get(), files, reads })
    }
}

fn read(
    file: u64,
    offset: u64,
    address: u64,
    len: u64,
    age: u64,
    files: usize,
) -> Option<ProfileRead> {
    let bytes = |blocks: u64| blocks.checked_mul(BLOCK_SIZE).filter(|bytes| *bytes < 1 << 62);
    let (offset, len) = (bytes(offset)?, bytes(len).filter(|len| *len > 0)?);
    let address = DATA_START + bytes(address)?;
    let (file, age) = (u32::try_from(file).ok()?, u8::try_from(age).ok()?);
    ((file as usize) < files).then_some(ProfileRead { file, offset, address, len, age })
}

fn paths(mut bytes: &[u8], count: usize) -> Result<Vec<Vec<u8>>> {
    let bad = || corrupt("the profile's list of files is damaged");
    let mut paths = Vec::new();
    for _ in 0..count {
        let (len, rest) = bytes.split_first_chunk::<2>().ok_or_else(bad)?;
        let len = usize::from(u16::from_le_bytes(*len));
        let (path, rest) = rest.split_at_checked(len).ok_or_else(bad)?;
        if len > PATH_MAX || path.first() != Some(&b'/') || path.contains(&0) {
            return Err(bad());
        }
        paths.push(path.to_vec());
        bytes = rest;
    }
    if bytes.is_empty() { Ok(paths) } else { Err(bad()) }
}

fn too_long() -> Error {
    Error::new(ErrorKind::Invalid, "the profile's paths are too long")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decoded, 16 MiB of short paths would take 400 MiB.
    #[test]
    fn short_paths_are_counted_before_they_are_read() {
        let profile = |files: u64| {
            let paths = [1, 0, b'/'].repeat(files as usize);
            let params = Params {
                image: [0; Digest::LEN],
                runs: 1.into(),
                reserved: 0.into(),
                files: files.into(),
                paths_len: (paths.len() as u64).into(),
                reads: 0.into(),
            };
            let section = |kind, raw| Section { kind, raw, level: Some(1) };
            let params = Section { kind: PARAMS, raw: params.as_bytes().to_vec(), level: None };
            let sections = vec![params, section(FILES, paths), section(READS, Vec::new())];
            container::encode(FORMAT, sections).unwrap()
        };
        assert!(Profile::decode(&profile(1000)).is_ok());
        let refused = Profile::decode(&profile(FILES_MAX + 1)).unwrap_err();
        assert!(refused.to_string().contains("too large"), "{refused}");
    }
}
