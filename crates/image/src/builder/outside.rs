//! Images of one file whose bytes are not stored: a file or block device of this machine, or
//! computed bytes. (For a directory, see `in_place`.)

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

use burgeon_block::{
    BLOCK_SIZE, ByteRange, ChecksumKind, Digest, Error, ObjectId, ObjectKind, ObjectStore, Result,
};
use burgeon_btrfs::{DATA_START, Dirent, FileExtent, Inode, InodeBody, Tree};
use rayon::prelude::*;
use rustix::fs::OFlags;

use super::{
    BuildOptions, BuildReport, Honours, OnProgress, Progress, check_options, in_place,
    nodes::S_IFDIR, nodes::S_IFREG, pool, publish, read::next_data,
};
use crate::{
    CHUNK_MAX, Codec, invalid,
    manifest::{ChunkEntry, Manifest},
};

/// Bytes that can be computed; `burgeon_source` computes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Every byte has this value.
    Byte(u8),
    /// Each block of 4 KiB is its own number, as little-endian `u64`s.
    BlockNumber,
}

impl Pattern {
    fn object(self) -> Result<ObjectId> {
        ObjectKind::Computed.object(match self {
            Self::Byte(0) => "zeros".to_owned(),
            Self::Byte(byte) => format!("byte-{byte:02x}"),
            Self::BlockNumber => "block-number".to_owned(),
        })
    }

    fn fill(self, offset: u64, buf: &mut [u8]) {
        match self {
            Self::Byte(byte) => buf.fill(byte),
            Self::BlockNumber => {
                let blocks = buf.chunks_mut(BLOCK_SIZE as usize);
                for (number, block) in (offset / BLOCK_SIZE..).zip(blocks) {
                    let words = block.as_chunks_mut().0;
                    words.iter_mut().for_each(|word| *word = number.to_le_bytes());
                }
            }
        }
    }
}

/// Ranges of a file that hold data: offset, and length without padding.
type DataRanges = Vec<(u64, u64)>;

/// Builds an image of one file, `data`, of `size` bytes (a multiple of 4 KiB) that are computed
/// when they are read: the baseline for measuring everything but the data. Takes 4 bytes of
/// checksum per block, and the time to compute the checksums.
pub fn computed(
    store: &impl ObjectStore,
    name: &str,
    pattern: Pattern,
    size: u64,
    options: &BuildOptions,
    progress: OnProgress<'_>,
) -> Result<BuildReport> {
    if size == 0 || !size.is_multiple_of(BLOCK_SIZE) || size > 1 << 42 {
        return Err(invalid(format!(
            "a computed image has a multiple of {BLOCK_SIZE} bytes, at most 4 TiB, not {size}"
        )));
    }
    let fill = |offset, buf: &mut [u8]| -> io::Result<()> {
        pattern.fill(offset, buf);
        Ok(())
    };
    let ranges = cut(0, size).collect();
    let file = Inode { mode: S_IFREG | 0o444, size, ..Inode::default() };
    let object = pattern.object()?;
    let report = build(store, name, object, (b"data", file), ranges, fill, options, progress)?;
    Ok(BuildReport { honours: Some(Honours::ALL), ..report })
}

/// Builds an image of the file, block device or directory `path`, by reference: the image holds
/// digests and checksums; the bytes are read from `path` on demand. They must not change as long
/// as the image is used; changed blocks are errors, never wrong data. Only a machine where `path`
/// is the same file can mount the image.
pub fn by_reference(
    store: &impl ObjectStore,
    name: &str,
    path: &Path,
    options: &BuildOptions,
    progress: OnProgress<'_>,
) -> Result<BuildReport> {
    let cannot = |error| Error::io(format!("cannot read {}", path.display()), error);
    let path = path.canonicalize().map_err(cannot)?;
    if path.is_dir() {
        check_options(name, options)?;
        return pool(options)?.install(|| in_place::build(store, name, &path, options, progress));
    }
    let object = in_place::object_of(&path)?;
    // Opening a FIFO would block.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let opened = File::options().read(true).custom_flags(flags).open(&path).map_err(cannot)?;
    let before = opened.metadata().map_err(cannot)?;
    if !before.is_file() && !before.file_type().is_block_device() {
        let what = format!("{} is not a file, block device or directory", path.display());
        return Err(invalid(what));
    }
    // The size of a block device is its end position.
    let size = rustix::fs::seek(&opened, rustix::fs::SeekFrom::End(0));
    let size = size.map_err(|error| cannot(error.into()))?;
    let sparse = before.is_file() && before.blocks().saturating_mul(512) < size;
    let mut ranges = DataRanges::new();
    let mut at = 0;
    while let Some((start, stop)) = next_data(&opened, sparse, at, size).map_err(cannot)? {
        ranges.extend(cut(start, stop));
        at = stop;
    }
    let fill = |offset, buf: &mut [u8]| opened.read_exact_at(buf, offset);
    let file = Inode {
        mode: S_IFREG | before.mode() & 0o7777,
        uid: before.uid(),
        gid: before.gid(),
        size,
        mtime_s: before.mtime(),
        mtime_ns: before.mtime_nsec() as u32,
        ..Inode::default()
    };
    let file_name = path.file_name().unwrap_or(path.as_os_str()).as_encoded_bytes();
    let honours = Some(Honours::of(&opened)?);
    let report = build(store, name, object, (file_name, file), ranges, fill, options, progress)?;
    let mut report = BuildReport { honours, ..report };
    let after = opened.metadata().map_err(cannot)?;
    if (before.len(), before.mtime(), before.mtime_nsec())
        != (after.len(), after.mtime(), after.mtime_nsec())
    {
        report.changed.push(path);
    }
    Ok(report)
}

/// Cuts `start..stop` at multiples of [`CHUNK_MAX`].
fn cut(start: u64, stop: u64) -> impl Iterator<Item = (u64, u64)> {
    let chunk = u64::from(CHUNK_MAX);
    (start / chunk..stop.div_ceil(chunk)).map(move |index| {
        let from = (index * chunk).max(start);
        (from, ((index + 1) * chunk).min(stop) - from)
    })
}

#[allow(clippy::too_many_arguments)] // one caller a kind of image
fn build(
    store: &impl ObjectStore,
    name: &str,
    object: ObjectId,
    (file_name, file): (&[u8], Inode),
    ranges: DataRanges,
    fill: impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync,
    options: &BuildOptions,
    progress: OnProgress<'_>,
) -> Result<BuildReport> {
    check_options(name, options)?;
    pool(options)?.install(|| {
        let _lease = store.begin_write()?;
        let mut manifest = Manifest {
            tree: Tree::default(),
            checksum: options.checksum,
            chunks: Vec::with_capacity(ranges.len()),
            objects: if ranges.is_empty() { vec![] } else { vec![object.clone()] },
            block_checksums: Vec::new(),
        };
        let total = ranges.iter().map(|(_, len)| len).sum();
        let mut bytes = 0;
        // 256 chunks at a time are 64 MiB.
        for wave in ranges.chunks(256) {
            progress(&Progress {
                entries: 1,
                entries_total: Some(2),
                bytes,
                bytes_total: Some(total),
                stored_bytes: 0,
            });
            let read: io::Result<Vec<_>> =
                wave.par_iter().map(|part| read_chunk(*part, &fill, options.checksum)).collect();
            let read = read.map_err(|error| Error::io(format!("cannot read {object}"), error))?;
            for (chunk, checksums) in read {
                bytes += chunk.stored.len();
                manifest.chunks.push(chunk);
                manifest.block_checksums.extend_from_slice(&checksums);
            }
        }
        manifest.tree = tree(file_name, file, &ranges, &manifest.chunk_addresses())?;
        let image = publish(store, name, &manifest, options)?;
        let (entries, entries_total, bytes_total) = (2, Some(2), Some(total));
        progress(&Progress { entries, entries_total, bytes, bytes_total, stored_bytes: 0 });
        Ok(BuildReport::of(image))
    })
}

fn read_chunk(
    (offset, len): (u64, u64),
    fill: &(impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync),
    kind: ChecksumKind,
) -> io::Result<(ChunkEntry, Vec<u8>)> {
    let mut data = vec![0; len.next_multiple_of(BLOCK_SIZE) as usize];
    fill(offset, &mut data[..len as usize])?;
    let mut checksums = Vec::with_capacity(data.len() / BLOCK_SIZE as usize * kind.size());
    for block in data.chunks(BLOCK_SIZE as usize) {
        checksums.extend_from_slice(&kind.of(block).to_le_bytes()[..kind.size()]);
    }
    let Some(stored) = ByteRange::at(offset, len) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let blocks = (data.len() as u64 / BLOCK_SIZE) as u8;
    let digest = Digest::of(&data);
    Ok((ChunkEntry { blocks, object: 0, stored, codec: Codec::Raw, digest }, checksums))
}

/// A root directory with one file.
fn tree(name: &[u8], mut file: Inode, ranges: &DataRanges, addresses: &[u64]) -> Result<Tree> {
    let mut tree = Tree::default();
    for ((offset, len), address) in ranges.iter().zip(addresses) {
        let len = len.next_multiple_of(BLOCK_SIZE);
        match tree.extents.last_mut() {
            Some(last) if last.file_offset + last.len == *offset => last.len += len,
            _ => tree.extents.push(FileExtent { file_offset: *offset, address: *address, len }),
        }
    }
    debug_assert!(addresses.first().is_none_or(|first| *first == DATA_START));
    if !tree.extents.is_empty() {
        file.body = InodeBody::Extents { first: 0, count: tree.extents.len() as u32 };
    }
    let (mtime_s, mtime_ns) = (file.mtime_s, file.mtime_ns);
    tree.inodes =
        vec![Inode { mode: S_IFDIR | 0o755, mtime_s, mtime_ns, ..Inode::default() }, file];
    let name = tree.push_bytes(name).ok_or_else(|| {
        invalid(format!(
            "the file's name has {} bytes, above the limit of 4 GiB: rename the file",
            name.len()
        ))
    })?;
    tree.dirents = vec![Dirent { parent: 0, inode: 1, name }];
    Ok(tree)
}
