//! The tar format: ustar, pax (POSIX.1-2001) and GNU archives, as a stream.
//!
//! ```text
//!   header 512 │ data, padded to 512 │ header │ …  │ two blocks of zeros
//!   'x' and 'g' (pax records), 'L' and 'K' (GNU long names) describe the header after them
//!   sparse files: GNU 'S' (map in the header), pax 0.0 and 0.1 (map in records), 1.0 (in data)
//! ```
//!
//! Every declared length is bounded before memory is allocated for it, and the cost of a header
//! does not grow with the headers before it.

use std::io::{self, Read};

use burgeon_block::{Error, ErrorKind, Result};

use super::{
    attributes::Attributes,
    entry::{TarEntry, show},
    records::{Records, SPARSE_MAX, decimal, too_many_pieces},
};
use crate::{FILE_MAX, corrupt};

const BLOCK: usize = 512;
/// Longest pax header or GNU long name: 16 MiB holds all xattrs that Linux allows on a file.
const META_MAX: u64 = 16 << 20;
/// Bytes that may follow an archive's end: `tar` pads to records of 10 KiB, tapes to a few MiB.
const TAIL_MAX: u64 = 64 << 20;
/// Largest total of global records. What they give to a file is counted for each file.
const GLOBAL_MAX: usize = 64 << 10;
/// Most headers with global records, which are parsed anew after each: `git archive` writes one.
const GLOBALS_MAX: u32 = 256;
/// Longest headers before one entry, in bytes: its records, names and labels.
const BEFORE_MAX: u64 = 4 * META_MAX;
/// Longest GNU long name accepted; a path in Linux has at most 4 KiB.
const NAME_MAX: u64 = 64 << 10;
/// First bytes of files that are often taken for a tar archive, and a remedy for each.
const OTHERS: [(&[u8], &str); 6] = [
    (b"BZh", "it is compressed with bzip2: bzip2 -dc FILE | burgeon build - NAME"),
    (b"LZIP", "it is compressed with lzip: lzip -dc FILE | burgeon build - NAME"),
    (&[0x04, 0x22, 0x4d, 0x18], "it is compressed with lz4: lz4 -dc FILE | burgeon build - NAME"),
    (b"PK\x03\x04", "it is a zip file: unpack it, and build from the folder"),
    (b"hsqs", "it is a squashfs image: mount it, and build from the folder"),
    (b"QFI\xfb", "it is a qcow2 disk image: mount its file system, and build from the folder"),
];
/// Longest decimal number of 64 bits.
const DIGITS_MAX: usize = 20;

/// Records for all entries after them.
struct Global {
    records: Records,
    /// Number of headers that they came in.
    headers: u32,
    /// `records`, parsed.
    attributes: Attributes,
    is_parsed: bool,
}

impl Global {
    fn extend(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.headers += 1;
        if self.headers > GLOBALS_MAX {
            let what = format!("the archive has more than {GLOBALS_MAX} headers for all files");
            return Err(corrupt(what));
        }
        self.is_parsed = false;
        self.records.extend(bytes)
    }

    fn attributes(&mut self) -> Result<&Attributes> {
        if !self.is_parsed {
            self.attributes = Attributes::of(&self.records)?;
            self.is_parsed = true;
        }
        Ok(&self.attributes)
    }
}

/// Reads an archive, header by header.
pub(super) struct Reader<R> {
    input: R,
    /// Padding after the data of the previous entry.
    padding: usize,
    global: Global,
    /// A header has been read: this is a tar archive.
    begun: bool,
    /// The mark at the end has to be there: nothing else tells a truncated archive.
    needs_mark: bool,
}

impl<R: Read> Reader<R> {
    pub(super) fn new(input: R) -> Self {
        let (records, attributes) = (Records::new(GLOBAL_MAX), Attributes::default());
        let global = Global { records, headers: 0, attributes, is_parsed: true };
        Self { input, padding: 0, global, begun: false, needs_mark: true }
    }

    /// Of a layer, whose digest tells that it is whole: some tools leave the mark out.
    pub(super) fn of_layer(input: R) -> Self {
        Self { needs_mark: false, ..Self::new(input) }
    }

    /// The stream, for an entry's data: the caller must read exactly `stored_len` bytes.
    pub(super) fn data(&mut self) -> &mut R {
        &mut self.input
    }

    /// The next entry; `None` at the end-of-archive mark, which must be present but in a layer.
    pub(super) fn next(&mut self) -> Result<Option<TarEntry>> {
        let mut records = Records::new(META_MAX as usize);
        let (mut long_path, mut long_link, mut extended, mut before) = (None, None, 0, 0);
        self.skip_padding()?;
        loop {
            let Some(header) = self.header(before > 0)? else { return Ok(None) };
            let size = header.number(124, 12)?;
            if before > BEFORE_MAX {
                let what =
                    format!("a file of the archive has more than {BEFORE_MAX} bytes of headers");
                return Err(corrupt(what));
            }
            extended += if matches!(header.kind(), b'x' | b'X' | b'L' | b'K') { size } else { 0 };
            match header.kind() {
                b'x' | b'X' => records.extend(&self.meta(size, META_MAX)?)?,
                b'g' => {
                    let bytes = self.meta(size, META_MAX)?;
                    self.global.extend(&bytes)?;
                }
                b'L' => long_path = Some(until_nul(&self.meta(size, NAME_MAX)?).to_vec()),
                b'K' => long_link = Some(until_nul(&self.meta(size, NAME_MAX)?).to_vec()),
                // A volume label.
                b'V' => drop(self.meta(size, NAME_MAX)?),
                b'M' | b'N' => {
                    return Err(corrupt("the archive goes over several volumes: join them first"));
                }
                _ => {
                    let mut entry = header.entry(size)?;
                    entry.extended = extended;
                    entry.headers = before;
                    let old_map = self.old_sparse(&header, &mut entry)?;
                    entry.path = long_path.unwrap_or(entry.path);
                    entry.link = long_link.unwrap_or(entry.link);
                    // The header's own name may be a truncated form of the full name.
                    let own = Attributes::of(&records)?;
                    let global = self.global.attributes()?;
                    let named = own.path().or(global.path());
                    let named_as_dir = named.unwrap_or(&entry.path).ends_with(b"/");
                    if matches!(entry.kind, b'0' | 0) && named_as_dir {
                        entry.kind = b'5';
                    }
                    global.apply(&mut entry);
                    own.apply(&mut entry);
                    self.padding = padding(entry.stored_len);
                    self.sparse(&records, old_map, &mut entry)?;
                    if entry.size > FILE_MAX {
                        let (path, size) = (show(&entry.path), entry.size);
                        return Err(corrupt(format!(
                            "{path} in the archive has {size} bytes, above the limit of {FILE_MAX}"
                        )));
                    }
                    return Ok(Some(entry));
                }
            }
            before += BLOCK as u64 + size;
        }
    }

    /// Skips an entry's data.
    pub(super) fn skip(&mut self, stored_len: u64) -> Result<()> {
        let mut data = (&mut self.input).take(stored_len);
        let skipped = io::copy(&mut data, &mut io::sink()).map_err(cannot_read)?;
        if skipped < stored_len {
            return Err(cannot_read(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }

    /// Reads the bytes after the archive's end: a decoder may have to check a checksum there.
    pub(super) fn finish(&mut self) -> Result<()> {
        let mut tail = (&mut self.input).take(TAIL_MAX + 1);
        if io::copy(&mut tail, &mut io::sink()).map_err(cannot_read)? <= TAIL_MAX {
            return Ok(());
        }
        let what = format!("the archive goes on for more than {TAIL_MAX} bytes after its end");
        Err(corrupt(what))
    }

    fn skip_padding(&mut self) -> Result<()> {
        let mut padding = [0; BLOCK];
        let len = std::mem::take(&mut self.padding);
        self.fill(&mut padding[..len])
    }

    fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        self.input.read_exact(buf).map_err(cannot_read)
    }

    /// Fills `first`, a byte, unless the stream ends here. An end that a decoder does not expect is
    /// an error.
    fn has_more(&mut self, first: &mut [u8]) -> Result<bool> {
        loop {
            match self.input.read(first) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read.map(|len| len > 0).map_err(cannot_read),
            }
        }
    }

    /// The next header; `is_awaited` by one that describes it.
    fn header(&mut self, is_awaited: bool) -> Result<Option<Header>> {
        let mut header = Header([0; BLOCK]);
        if !self.begun {
            self.first(&mut header)?;
        } else {
            let (first, rest) = header.0.split_at_mut(1);
            match self.has_more(first)? {
                true => self.fill(rest)?,
                false if self.needs_mark || is_awaited => return Err(truncated()),
                false => return Ok(None),
            }
        }
        if header.0 == [0; BLOCK] {
            return Ok(None);
        }
        if !header.is_sealed() {
            return Err(corrupt("the archive is damaged: the checksum of a header is wrong"));
        }
        Ok(Some(header))
    }

    /// Reads the first header, which tells a tar archive from other files.
    fn first(&mut self, header: &mut Header) -> Result<()> {
        let mut input = (&mut self.input).take(BLOCK as u64);
        let mut start = Vec::with_capacity(BLOCK);
        let len = input.read_to_end(&mut start).map_err(cannot_read)?;
        header.0[..len].copy_from_slice(&start);
        if len == 0 {
            return Err(no_tar("it is empty"));
        }
        if let Some((_, what)) = OTHERS.iter().find(|(magic, _)| start.starts_with(magic)) {
            return Err(no_tar(what));
        }
        if len < BLOCK || header.0 != [0; BLOCK] && !header.is_sealed() {
            return Err(no_tar("its first 512 bytes are not a header with a valid checksum"));
        }
        self.begun = true;
        Ok(())
    }

    /// The data of a header that describes the next one.
    fn meta(&mut self, len: u64, len_max: u64) -> Result<Vec<u8>> {
        if len > len_max {
            return Err(corrupt(format!(
                "the archive has a header of {len} bytes, above the limit of {len_max}"
            )));
        }
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes)?;
        self.padding = padding(len);
        self.skip_padding()?;
        Ok(bytes)
    }

    /// The map of GNU's old sparse format, which continues in blocks after the header.
    fn old_sparse(
        &mut self,
        header: &Header,
        entry: &mut TarEntry,
    ) -> Result<Option<Vec<(u64, u64)>>> {
        if entry.kind != b'S' {
            return Ok(None);
        }
        entry.size = header.number(483, 12)?;
        let mut map = Vec::new();
        let mut block = Header(header.0);
        let (mut first, mut count, mut more) = (386, 4, 482);
        loop {
            for index in 0..count {
                let at = first + 24 * index;
                if block.0[at] != 0 {
                    map.push((block.number(at, 12)?, block.number(at + 12, 12)?));
                }
            }
            if block.0[more] == 0 {
                return Ok(Some(map));
            }
            if map.len() > SPARSE_MAX {
                return Err(too_many_pieces());
            }
            self.fill(&mut block.0)?;
            entry.headers += BLOCK as u64;
            if entry.headers > BEFORE_MAX {
                return Err(too_many_pieces());
            }
            (first, count, more) = (0, 21, 504);
        }
    }

    /// Finds and checks the map of a sparse file, in any format.
    fn sparse(
        &mut self,
        records: &Records,
        old_map: Option<Vec<(u64, u64)>>,
        entry: &mut TarEntry,
    ) -> Result<()> {
        let map = if records.get("GNU.sparse.major") == Some(b"1") {
            Some(self.map_in_data(entry)?)
        } else {
            old_map.or(records.sparse_map()?)
        };
        let Some(map) = map else { return Ok(()) };
        if let Some(name) = records.get("GNU.sparse.name") {
            entry.path = name.to_vec();
        }
        let real = records.get("GNU.sparse.realsize").or(records.get("GNU.sparse.size"));
        if let Some(size) = real {
            entry.size = decimal(size)?;
        }
        let bad = || {
            corrupt(format!("the sparse map of {} in the archive is invalid", show(&entry.path)))
        };
        let (mut end, mut total) = (0u64, 0u64);
        for (offset, len) in &map {
            let stop = offset.checked_add(*len).ok_or_else(bad)?;
            if *offset < end || stop > entry.size {
                return Err(bad());
            }
            (end, total) = (stop, total + len);
        }
        if total != entry.stored_len {
            return Err(bad());
        }
        entry.map = Some(map);
        Ok(())
    }

    /// The map of pax format 1.0: decimal numbers, one per line, in blocks before the data.
    fn map_in_data(&mut self, entry: &mut TarEntry) -> Result<Vec<(u64, u64)>> {
        let bad = || corrupt("the sparse map of a file in the archive is invalid");
        // A number may continue in the next block; at most `DIGITS_MAX` bytes of it are kept.
        let mut digits: Vec<u8> = Vec::with_capacity(DIGITS_MAX);
        let mut numbers = Vec::new();
        let mut wanted = 1;
        while numbers.len() < wanted {
            let mut block = [0; BLOCK];
            entry.stored_len = entry.stored_len.checked_sub(BLOCK as u64).ok_or_else(bad)?;
            self.fill(&mut block)?;
            entry.headers += BLOCK as u64;
            for byte in block {
                if byte != b'\n' {
                    if digits.len() == DIGITS_MAX {
                        return Err(bad());
                    }
                    digits.push(byte);
                    continue;
                }
                numbers.push(decimal(&digits)?);
                digits.clear();
                if numbers.len() == 1 {
                    let pieces = usize::try_from(numbers[0]).unwrap_or(usize::MAX);
                    if pieces > SPARSE_MAX {
                        return Err(too_many_pieces());
                    }
                    wanted = 1 + 2 * pieces;
                }
                if numbers.len() == wanted {
                    // The rest of the block is padding.
                    break;
                }
            }
        }
        Ok(numbers[1..].chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }
}

fn padding(len: u64) -> usize {
    // A declared length may be the highest number there is.
    (len.wrapping_neg() % BLOCK as u64) as usize
}

fn no_tar(why: &str) -> Error {
    let what = format!("this is not a tar archive (plain, gzip, zstd or xz): {why}");
    Error::new(ErrorKind::UnsupportedFormat, what)
}

fn truncated() -> Error {
    corrupt("the archive ends too early: it is truncated")
}

pub(super) fn cannot_read(error: io::Error) -> Error {
    // The archive's source may have a more precise error.
    let error = match error.downcast::<Error>() {
        Ok(known) => return known,
        Err(error) => error,
    };
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return truncated();
    }
    if needs_much_memory(&error) {
        return crate::invalid(
            "the archive needs more than 128 MiB of memory to be decompressed: compress it anew, \
             with a window of at most 128 MiB for zstd or 64 MiB for xz",
        );
    }
    // An error without an OS error number comes from a decoder.
    if error.raw_os_error().is_none() {
        return corrupt(format!("the archive is damaged, it cannot be decompressed: {error}"));
    }
    Error::io("cannot read the archive", error)
}

/// True if a decoder refused a window that is too large.
fn needs_much_memory(error: &io::Error) -> bool {
    let inner = error.get_ref();
    let of_xz = inner.and_then(|error| error.downcast_ref::<liblzma::stream::Error>());
    // zstd has no error type for that.
    matches!(of_xz, Some(liblzma::stream::Error::MemLimit))
        || inner.is_some_and(|error| error.to_string().contains("too much memory"))
}

struct Header([u8; BLOCK]);

impl Header {
    fn kind(&self) -> u8 {
        self.0[156]
    }

    /// True if the checksum is right.
    fn is_sealed(&self) -> bool {
        let sum: u64 = self.0.iter().map(|byte| u64::from(*byte)).sum();
        let field: u64 = self.0[148..156].iter().map(|byte| u64::from(*byte)).sum();
        self.number(148, 8).is_ok_and(|told| told == sum - field + 8 * u64::from(b' '))
    }

    /// A number: octal digits, or, with the highest bit set, big-endian binary.
    fn number(&self, at: usize, len: usize) -> Result<u64> {
        let bad = || corrupt("the archive is damaged: a number in a header is invalid");
        let field = &self.0[at..at + len];
        if field[0] & 0x80 != 0 {
            // The first byte holds the mark; its lowest bits belong to the number.
            let mut value = u64::from(field[0] & 0x7f);
            for byte in &field[1..] {
                if value >> 56 != 0 {
                    return Err(bad());
                }
                value = value << 8 | u64::from(*byte);
            }
            return Ok(value);
        }
        let text = until_nul(field).trim_ascii();
        text.iter().try_fold(0u64, |value, digit| match digit {
            b'0'..=b'7' => Ok(value << 3 | u64::from(digit - b'0')),
            _ => Err(bad()),
        })
    }

    /// The time, which may be before 1970 in binary.
    fn mtime(&self) -> Result<i64> {
        let field = &self.0[136..148];
        if field[0] == 0xff {
            let low = field[4..].iter().fold(0, |value: u64, byte| value << 8 | u64::from(*byte));
            return Ok(low as i64);
        }
        Ok(self.number(136, 12)? as i64)
    }

    fn entry(&self, size: u64) -> Result<TarEntry> {
        let mut path = until_nul(&self.0[..100]).to_vec();
        // ustar has a prefix; GNU uses these bytes otherwise.
        let ustar = self.0[257..263] == *b"ustar\0";
        let prefix = until_nul(&self.0[345..500]);
        if ustar && !prefix.is_empty() {
            path = [prefix, b"/", &path].concat();
        }
        let has_magic = self.0[257..262] == *b"ustar";
        let device = |at| if has_magic { self.number(at, 8) } else { Ok(0) };
        let narrow = |value: u64| {
            u32::try_from(value)
                .map_err(|_| corrupt("an id of the archive does not fit in 32 bits"))
        };
        Ok(TarEntry {
            path,
            link: until_nul(&self.0[157..257]).to_vec(),
            kind: self.kind(),
            mode: narrow(self.number(100, 8)? & 0o7777)?,
            uid: narrow(self.number(108, 8)?)?,
            gid: narrow(self.number(116, 8)?)?,
            size,
            mtime_s: self.mtime()?,
            major: narrow(device(329)?)?,
            minor: narrow(device(337)?)?,
            stored_len: size,
            ..TarEntry::default()
        })
    }
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}
