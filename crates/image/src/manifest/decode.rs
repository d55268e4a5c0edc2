use burgeon_block::{Error, ErrorKind, MemoryMeter, Result};
use burgeon_btrfs::{BlobRange, Dirent, FileExtent, Inode, InodeBody, Xattr};

use super::*;
use crate::{
    columns::{Reader, row_len},
    container::Container,
    corrupt, objects,
};

/// Counts are 32-bit indices in a tree.
const COUNT_MAX: u64 = u32::MAX as u64 - 1;

impl Manifest {
    /// Decodes the output of [`Self::encode`]. `Corrupt` if the bytes are damaged or break a
    /// rule, `UnsupportedFormat` if their version or a feature is unknown, `Invalid` if they
    /// exceed `limits`.
    pub fn decode(bytes: &[u8], limits: &ManifestLimits) -> Result<Self> {
        let container = Container::parse(FORMAT, bytes)?;
        let params = params(&container, bytes)?;
        check_sizes(&params, bytes, limits)?;
        let checksum = ChecksumKind::from_number(params.checksum_kind.get()).ok_or_else(|| {
            let what = format!("block checksums of kind {} are unknown", params.checksum_kind);
            Error::new(ErrorKind::UnsupportedFormat, what)
        })?;
        let read = |kind, len| container.read(bytes, kind, len);
        let table = |kind, rows: U64, widths: &[usize]| read(kind, rows.get() * row_len(widths));

        let mut blob = read(NAMES, params.names_len.get())?;
        let mut tree = Tree::default();
        let inline_at = blob.len() as u64;
        blob.extend_from_slice(&read(INLINE, params.inline_len.get())?);
        let xattrs_at = blob.len() as u64;
        blob.extend_from_slice(&read(XATTR_BYTES, params.xattr_bytes_len.get())?);
        let end = blob.len() as u64;
        tree.blob = blob;
        dirents(&mut tree, &table(DIRENTS, params.dirents, &DIRENT_WIDTHS)?, &params, inline_at)?;
        let inode_columns = table(INODES, params.inodes, &INODE_WIDTHS)?;
        inodes(&mut tree, &inode_columns, &params, inline_at..xattrs_at)?;
        drop(inode_columns);
        let xattr_columns = table(XATTRS, params.xattrs, &XATTR_WIDTHS)?;
        xattrs(&mut tree, &xattr_columns, &params, xattrs_at..end)?;
        extents(&mut tree, &table(EXTENTS, params.extents, &EXTENT_WIDTHS)?, &params)?;

        let chunks = chunks(
            &table(CHUNKS, params.chunks, &CHUNK_WIDTHS)?,
            &read(DIGESTS, params.chunks.get() * Digest::LEN as u64)?,
            params.chunks.get() as usize,
        )?;
        let names = read(OBJECTS, params.objects_len.get())?;
        let objects = objects::decode(&names, params.objects.get())?;
        let block_checksums = read(CHECKSUMS, params.blocks.get() * checksum.size() as u64)?;
        let manifest = Self { tree, checksum, chunks, objects, block_checksums };
        manifest.validate(limits)?;
        Ok(manifest)
    }

    /// Upper bound, in bytes, of the memory for preparing the image of an encoded manifest: 256
    /// MiB, 512 bytes per entry, four times the bytes of names, of attributes and of data in the
    /// manifest, its tables of data, and the encoded manifest. Errors as in [`Self::decode`].
    pub fn memory_bound(bytes: &[u8], limits: &ManifestLimits) -> Result<u64> {
        let params = params(&Container::parse(FORMAT, bytes)?, bytes)?;
        check_sizes(&params, bytes, limits)?;
        let entries = params.inodes.get().max(params.dirents.get());
        let names = [params.names_len, params.inline_len, params.xattr_bytes_len];
        let names: u64 = names.iter().map(|len| len.get()).sum();
        Ok((256 << 20) + 512 * entries + 4 * names + decoded_len(&params) + bytes.len() as u64)
    }

    /// The objects that hold the chunks of an encoded manifest. Errors as in [`Self::decode`].
    pub fn decode_objects(bytes: &[u8], limits: &ManifestLimits) -> Result<Vec<ObjectId>> {
        Ok(Self::decode_chunks(bytes, limits)?.1)
    }

    /// [`Self::lacks_checksums`] for an encoded manifest.
    pub fn decode_lacks_checksums(bytes: &[u8], limits: &ManifestLimits) -> Result<bool> {
        let (chunks, _) = Self::decode_chunks(bytes, limits)?;
        Ok(chunks.iter().any(|chunk| chunk.codec == Codec::Verified))
    }

    /// Decodes only the chunk table and the objects, which deduplication and the collector need,
    /// without the tree.
    pub(crate) fn decode_chunks(
        bytes: &[u8],
        limits: &ManifestLimits,
    ) -> Result<(Vec<ChunkEntry>, Vec<ObjectId>)> {
        let container = Container::parse(FORMAT, bytes)?;
        let params = params(&container, bytes)?;
        check_sizes(&params, bytes, limits)?;
        let rows = params.chunks.get();
        let columns = container.read(bytes, CHUNKS, rows * row_len(&CHUNK_WIDTHS))?;
        let digests = container.read(bytes, DIGESTS, rows * Digest::LEN as u64)?;
        let chunks = chunks(&columns, &digests, rows as usize)?;
        let names = container.read(bytes, OBJECTS, params.objects_len.get())?;
        let objects = objects::decode(&names, params.objects.get())?;
        validate::chunk_table(&chunks, &objects, None)?;
        Ok((chunks, objects))
    }
}

fn params(container: &Container, bytes: &[u8]) -> Result<Params> {
    let raw = container.read(bytes, PARAMS, size_of::<Params>() as u64)?;
    Params::read_from_bytes(&raw).map_err(|_| corrupt("the manifest's parameters are cut short"))
}

/// Refuses, before anything is allocated, declared sizes that are absurd, exceed the limits, or
/// are impossible for the manifest's length.
fn check_sizes(params: &Params, bytes: &[u8], limits: &ManifestLimits) -> Result<()> {
    let counts = [
        params.inodes,
        params.dirents,
        params.extents,
        params.xattrs,
        params.chunks,
        params.objects,
    ];
    if counts.iter().any(|count| count.get() > COUNT_MAX) {
        return Err(corrupt("the manifest declares an impossible number of entries"));
    }
    let total = decoded_len(params);
    if total > limits.bytes_max {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "the manifest takes {total} bytes decoded, above the limit {}",
                limits.bytes_max
            ),
        ));
    }
    let meter = MemoryMeter::of_input(bytes.len() as u64);
    meter.promise(total);
    meter.take(total).map_err(|error| {
        let what = format!("a manifest of {} bytes declares {total} bytes", bytes.len());
        Error::with_source(error.kind(), what, error)
    })?;
    let data_len = params.blocks.get().saturating_mul(BLOCK_SIZE);
    if data_len > limits.data_max {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("the image holds {data_len} bytes, above the limit {}", limits.data_max),
        ));
    }
    Ok(())
}

/// Decoded length of everything that a manifest declares.
fn decoded_len(params: &Params) -> u64 {
    let kind = ChecksumKind::from_number(params.checksum_kind.get());
    let checksum_len = kind.map_or(8, ChecksumKind::size) as u64;
    let sizes = [
        params.inodes.get() * (row_len(&INODE_WIDTHS) + size_of::<Inode>() as u64),
        params.dirents.get() * (row_len(&DIRENT_WIDTHS) + size_of::<Dirent>() as u64),
        params.extents.get() * (row_len(&EXTENT_WIDTHS) + size_of::<FileExtent>() as u64),
        params.xattrs.get() * (row_len(&XATTR_WIDTHS) + size_of::<Xattr>() as u64),
        params.chunks.get()
            * (row_len(&CHUNK_WIDTHS) + (Digest::LEN + size_of::<ChunkEntry>()) as u64),
        params.objects.get() * size_of::<ObjectId>() as u64,
        params.blocks.get().saturating_mul(checksum_len),
        params.names_len.get(),
        params.inline_len.get(),
        params.xattr_bytes_len.get(),
        params.objects_len.get(),
    ];
    sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size))
}

/// Allocates the spans of a part of the blob, one after another.
struct Spans {
    next: u64,
    end: u64,
}

impl Spans {
    fn take(&mut self, len: u64) -> Result<BlobRange> {
        let start = self.next;
        let fits = u32::try_from(len).ok().filter(|_| len <= self.end - start);
        let Some(len) = fits else {
            return Err(corrupt("the manifest names bytes that it does not hold"));
        };
        self.next += u64::from(len);
        Ok(BlobRange { start, len })
    }

    fn finish(self) -> Result<()> {
        if self.next == self.end {
            Ok(())
        } else {
            Err(corrupt("the manifest holds bytes that belong to nothing"))
        }
    }
}

fn dirents(tree: &mut Tree, columns: &[u8], params: &Params, names_len: u64) -> Result<()> {
    let rows = params.dirents.get() as usize;
    let mut reader = Reader::new(columns, rows);
    let (parents, inodes, lens) = (reader.column(4)?, reader.column(4)?, reader.column(1)?);
    let mut spans = Spans { next: 0, end: names_len };
    let (mut parent, mut inode) = (0u32, 0u32);
    tree.dirents.reserve_exact(rows);
    for ((parent_delta, inode_delta), len) in parents.zip(inodes).zip(lens) {
        parent = parent.wrapping_add(parent_delta as u32);
        inode = inode.wrapping_add(inode_delta as u32);
        tree.dirents.push(Dirent { parent, inode, name: spans.take(len)? });
    }
    spans.finish()
}

fn inodes(
    tree: &mut Tree,
    columns: &[u8],
    params: &Params,
    inline: std::ops::Range<u64>,
) -> Result<()> {
    let rows = params.inodes.get() as usize;
    let mut reader = Reader::new(columns, rows);
    let (mut modes, mut uids, mut gids) = (reader.column(2)?, reader.column(4)?, reader.column(4)?);
    let (mut rdevs, mut sizes) = (reader.column(8)?, reader.column(8)?);
    let (mut seconds, mut nanos) = (reader.column(8)?, reader.column(4)?);
    let (mut bodies, mut counts) = (reader.column(1)?, reader.column(4)?);
    let mut xattr_counts = reader.column(2)?;
    let mut spans = Spans { next: inline.start, end: inline.end };
    let (mut extent_next, mut xattr_next) = (0u64, 0u64);
    let next = |column: &mut dyn Iterator<Item = u64>| column.next().unwrap_or_default();
    tree.inodes.reserve_exact(rows);
    for _ in 0..rows {
        let size = next(&mut sizes);
        let (body, count) = (next(&mut bodies), next(&mut counts));
        let (extent_first, xattr_first) = (extent_next as u32, xattr_next as u32);
        let xattr_count = next(&mut xattr_counts);
        extent_next += count;
        xattr_next += xattr_count;
        if extent_next > params.extents.get() || xattr_next > params.xattrs.get() {
            return Err(corrupt("an inode claims more extents or xattrs than there are"));
        }
        tree.inodes.push(Inode {
            mode: next(&mut modes) as u32,
            uid: next(&mut uids) as u32,
            gid: next(&mut gids) as u32,
            rdev: next(&mut rdevs),
            size,
            mtime_s: next(&mut seconds) as i64,
            mtime_ns: next(&mut nanos) as u32,
            body: match body & !NODATASUM {
                BODY_NONE if count == 0 => InodeBody::None,
                BODY_INLINE if count == 0 => InodeBody::Inline(spans.take(size)?),
                BODY_EXTENTS if count > 0 => {
                    InodeBody::Extents { first: extent_first, count: count as u32 }
                }
                _ => return Err(corrupt("an inode has an impossible body")),
            },
            xattr_first: if xattr_count == 0 { 0 } else { xattr_first },
            xattr_count: xattr_count as u32,
            nodatasum: body & NODATASUM != 0,
        });
    }
    if extent_next != params.extents.get() || xattr_next != params.xattrs.get() {
        return Err(corrupt("the manifest holds extents or xattrs that belong to no inode"));
    }
    spans.finish()
}

fn xattrs(
    tree: &mut Tree,
    columns: &[u8],
    params: &Params,
    bytes: std::ops::Range<u64>,
) -> Result<()> {
    let rows = params.xattrs.get() as usize;
    let mut reader = Reader::new(columns, rows);
    let (names, values) = (reader.column(1)?, reader.column(2)?);
    let mut spans = Spans { next: bytes.start, end: bytes.end };
    tree.xattrs.reserve_exact(rows);
    for (name, value) in names.zip(values) {
        tree.xattrs.push(Xattr { name: spans.take(name)?, value: spans.take(value)? });
    }
    spans.finish()
}

fn extents(tree: &mut Tree, columns: &[u8], params: &Params) -> Result<()> {
    let rows = params.extents.get() as usize;
    let mut reader = Reader::new(columns, rows);
    let (offsets, deltas, lens) = (reader.column(8)?, reader.column(8)?, reader.column(8)?);
    let absurd = || corrupt("an extent of the manifest has an absurd size");
    let mut expected = DATA_START;
    tree.extents.reserve_exact(rows);
    for ((offset, delta), len) in offsets.zip(deltas).zip(lens) {
        let file_offset = offset.checked_mul(BLOCK_SIZE).ok_or_else(absurd)?;
        let len = len.checked_mul(BLOCK_SIZE).ok_or_else(absurd)?;
        let address = expected.wrapping_add(delta);
        expected = address.checked_add(len).ok_or_else(absurd)?;
        tree.extents.push(FileExtent { file_offset, address, len });
    }
    Ok(())
}

fn chunks(columns: &[u8], digests: &[u8], rows: usize) -> Result<Vec<ChunkEntry>> {
    let mut reader = Reader::new(columns, rows);
    let (blocks, codecs, objects) = (reader.column(1)?, reader.column(1)?, reader.column(4)?);
    let (starts, lens) = (reader.column(8)?, reader.column(4)?);
    let (mut object, mut expected) = (0u32, 0u64);
    let mut chunks = Vec::with_capacity(rows);
    let rows = blocks.zip(codecs).zip(objects).zip(starts).zip(lens);
    for (((((blocks, codec), delta), start), len), digest) in rows.zip(digests.as_chunks().0) {
        object = object.wrapping_add(delta as u32);
        let stored = ByteRange::at(expected.wrapping_add(start), len);
        let stored = stored.ok_or_else(|| corrupt("a chunk of the manifest ends nowhere"))?;
        expected = stored.end();
        let codec = Codec::from_number(codec as u8).ok_or_else(|| {
            let what = format!("chunks of the manifest are stored in an unknown way ({codec})");
            Error::new(ErrorKind::UnsupportedFormat, what)
        })?;
        let digest = Digest::from(*digest);
        chunks.push(ChunkEntry { blocks: blocks as u8, object, stored, codec, digest });
    }
    Ok(chunks)
}
