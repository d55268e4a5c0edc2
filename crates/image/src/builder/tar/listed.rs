//! Layers described by their table of contents (TOC), without reading them.
//!
//! ```text
//!   Listed ── attributes ──► entry, as from a header of the archive
//!          └─ data ────────► extents of chunks; digests and checksums are not known yet
//! ```
//!
//! Addresses ascend in the order of the layer's files, so that data fetched together is adjacent.
//! Each piece of a big file is a chunk. Other files join a group, which ends before a file whose
//! parts' digests say so: layers with the same run of files share its chunks, whatever precedes the
//! run. Groups are longer than those of images of ours (`grouping.rs`), because the cache keeps a
//! seal of a block with each. Invariants: the list is trusted only for the position of
//! parts; work and memory grow with the list, whatever lengths it claims.

use std::{collections::HashMap, sync::Arc};

use burgeon_block::{BLOCK_SIZE, ByteRange, Digest, Result};

use super::{
    super::{
        BuildOptions, Xattrs,
        assemble::{Assembled, Extent, NOWHERE, Origin, Placed},
        grouping::Grouping,
        xattrs,
    },
    describe::Description,
    entry::{TarEntry, show},
    layers::{Amount, Layers},
};
use crate::{
    CHUNK_MAX, Codec, FILE_MAX, corrupt,
    manifest::{ChunkEntry, Manifest},
};

/// A file as listed in a table of contents.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Path in the archive.
    pub path: Vec<u8>,
    /// Target of a symlink or hard link.
    pub link: Vec<u8>,
    /// Type flag of tar: `b'0'` to `b'6'`.
    pub kind: u8,
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes, holes included.
    pub size: u64,
    /// Modification time, in seconds since 1970.
    pub mtime_s: i64,
    /// Its nanoseconds.
    pub mtime_ns: u32,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Extended attributes; those that do not belong to a tree are left out.
    pub xattrs: Xattrs,
    /// Its data, in order; gaps are zeros. Files with identical parts share their data.
    pub parts: Vec<FilePart>,
}

/// A contiguous part of a file's data in its layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilePart {
    /// Offset in the file.
    pub at: u64,
    /// Length in bytes, at least one.
    pub len: u32,
    /// Offset in the unpacked layer.
    pub offset: u64,
    /// SHA-256, compared when the part is read.
    pub digest: [u8; 32],
}

impl Layers {
    /// Describes layer `number` of the image, which consists of `files` in the archive's order.
    ///
    /// Errors: `Corrupt` for impossible files, `Invalid` beyond a limit.
    pub fn list(
        &self,
        files: &[Listed],
        number: u32,
        options: &BuildOptions,
    ) -> Result<Description> {
        let mut entries = Vec::with_capacity(files.len());
        let mut amount = Amount::default();
        for file in files {
            let entry = entry_of(file)?;
            amount.add(&entry);
            check_parts(file, &mut amount)?;
            entries.push(entry);
        }
        // All at once: a list that is too long must count nothing, since its layer may still be
        // read.
        self.take(&amount)?;
        let mut sketch = Sketch { layer: number, ..Sketch::default() };
        for (node, (file, entry)) in (0..).zip(files.iter().zip(&entries)) {
            if entry.is_regular() {
                sketch.place(node, file);
            }
        }
        let meter = Arc::clone(self.meter());
        Ok(Description { entries, assembled: sketch.finish(options), meter })
    }
}

/// Checks and counts the data of a file: each part as an entry, and all pieces that it touches as
/// whole pieces, because a manifest describes whole pieces.
fn check_parts(file: &Listed, amount: &mut Amount) -> Result<()> {
    let (mut end, mut counted) = (0, 0);
    for part in &file.parts {
        let stop = part.at.checked_add(part.len.into());
        let fits = part.at >= end && part.len > 0 && stop.is_some_and(|stop| stop <= file.size);
        let (true, Some(stop)) = (fits, stop) else {
            return Err(corrupt(format!("the data of {} is out of order", show(&file.path))));
        };
        let chunk = u64::from(CHUNK_MAX);
        let from = (part.at / chunk * chunk).max(counted);
        let until = stop.next_multiple_of(chunk).min(file.size.next_multiple_of(BLOCK_SIZE));
        amount.entries += 1;
        amount.unpacked = amount.unpacked.saturating_add(until.saturating_sub(from));
        (end, counted) = (stop, until);
    }
    Ok(())
}

fn entry_of(file: &Listed) -> Result<TarEntry> {
    let known = matches!(file.kind, b'0'..=b'6');
    if !known || file.size > FILE_MAX || file.mtime_ns >= 1_000_000_000 {
        return Err(corrupt(format!(
            "{} in the layer has an impossible type, size or time",
            show(&file.path)
        )));
    }
    let mut attributes = file.xattrs.clone();
    attributes.retain(|(name, _)| xattrs::wanted_of_archive(name));
    attributes.sort();
    attributes.dedup_by(|a, b| a.0 == b.0);
    let extended = attributes.iter().map(|(name, value)| name.len() + value.len());
    let extended = (file.path.len() + file.link.len() + extended.sum::<usize>()) as u64;
    Ok(TarEntry {
        extended,
        path: file.path.clone(),
        link: file.link.clone(),
        kind: file.kind,
        mode: file.mode & 0o7777,
        uid: file.uid,
        gid: file.gid,
        size: file.size,
        mtime_s: file.mtime_s,
        mtime_ns: file.mtime_ns,
        major: file.device.0,
        minor: file.device.1,
        xattrs: attributes,
        ..TarEntry::default()
    })
}

/// Identifies a file's content by the digests that are compared when it is read.
fn content(file: &Listed) -> Digest {
    let mut parts = file.size.to_le_bytes().to_vec();
    for part in &file.parts {
        parts.extend(part.at.to_le_bytes());
        parts.extend(part.len.to_le_bytes());
        parts.extend(part.digest);
    }
    Digest::of(&parts)
}

/// The rule of groups, with the digest of a file's size and parts for that of its content.
const GROUPING: Grouping = Grouping { alone: CHUNK_MAX, min: 128 << 10, cut_bits: 3 };
/// The tail of a big file is a chunk of its own from this length on.
const TAIL_MIN: u32 = 32 << 10;

/// The planned positions of files' data.
#[derive(Default)]
struct Sketch {
    layer: u32,
    /// Length of each chunk.
    chunks: Vec<u32>,
    /// Total length of the chunks.
    end: u64,
    /// Another short piece may join the last chunk.
    open: bool,
    placed: Placed,
    origins: Vec<Origin>,
    /// Extents of the files placed so far, by a digest of their parts.
    seen: HashMap<Digest, std::ops::Range<usize>>,
}

impl Sketch {
    fn place(&mut self, node: u32, file: &Listed) {
        let content = content(file);
        if let Some(same) = self.seen.get(&content) {
            let extents = &mut self.placed.extents;
            let same: Vec<_> =
                extents[same.clone()].iter().map(|of| Extent { node, ..*of }).collect();
            extents.extend(same);
            return;
        }
        let first = self.placed.extents.len();
        for FilePart { at, len, offset, .. } in file.parts.iter().copied() {
            let (mut at, mut offset, end) = (at, offset, at + u64::from(len));
            while at < end {
                let window = at / u64::from(CHUNK_MAX) * u64::from(CHUNK_MAX);
                let address = self.window(node, (file.size, &content), window, first);
                let len = (end - at).min(window + u64::from(CHUNK_MAX) - at);
                self.origins.push(Origin {
                    at: address + (at - window),
                    layer: self.layer,
                    offset,
                    len: len as u32,
                });
                (at, offset) = (at + len, offset + len);
            }
        }
        self.seen.insert(content, first..self.placed.extents.len());
    }

    /// Address of the file's bytes from `window` on. Places them if they are not placed yet: the
    /// window is the last one placed or a new one. The file's extents begin with `first`.
    fn window(
        &mut self,
        node: u32,
        (size, content): (u64, &Digest),
        window: u64,
        first: usize,
    ) -> u64 {
        if let Some(last) = self.placed.extents[first..].last()
            && last.file_offset == window
        {
            return self.end - u64::from(last.len);
        }
        let len = (size - window).min(u64::from(CHUNK_MAX)).next_multiple_of(BLOCK_SIZE) as u32;
        let of_big_file = size > u64::from(CHUNK_MAX);
        let may_join = |group: &u32| !GROUPING.ends(*group as usize, len as usize, content);
        // Each piece of a big file begins a chunk; after a short tail, other files join it.
        let joins = self.open && !of_big_file && self.chunks.last().is_some_and(may_join);
        if !joins {
            self.chunks.push(0);
        }
        self.open = !of_big_file || len < TAIL_MIN;
        let chunk = self.chunks.len() as u32 - 1;
        let offset = self.chunks[chunk as usize];
        self.chunks[chunk as usize] += len;
        self.placed.extents.push(Extent { node, file_offset: window, chunk, offset, len });
        self.end += u64::from(len);
        self.end - u64::from(len)
    }

    fn finish(self, options: &BuildOptions) -> Assembled {
        let mut next = 0;
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for len in self.chunks {
            let blocks = (u64::from(len) / BLOCK_SIZE) as u8;
            // Below 2⁶³: the data was counted.
            let stored = ByteRange::at(next, len.into()).unwrap_or(NOWHERE);
            let digest = Digest::from([0; Digest::LEN]);
            chunks.push(ChunkEntry { blocks, object: 0, stored, codec: Codec::Verified, digest });
            next += u64::from(len);
        }
        let checksum = options.checksum;
        let block_checksums = vec![0; (next / BLOCK_SIZE) as usize * checksum.size()];
        let (tree, objects) = Default::default();
        Assembled {
            placed: self.placed,
            manifest: Manifest { tree, checksum, chunks, objects, block_checksums },
            new_bytes: 0,
            known_bytes: 0,
            origins: self.origins,
        }
    }
}
