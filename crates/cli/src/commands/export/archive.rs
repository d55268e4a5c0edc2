//! Writes a POSIX tar archive (pax) that GNU tar, bsdtar and Burgeon's own reader understand.
//!
//! ```text
//!   [ pax header: records ] [ ustar header ] [ data, padded to 512 bytes ]      each entry
//!   two blocks of zeros                                                        at the end
//! ```
//! A record is there only if the ustar header cannot hold its value. Records of GNU tar:
//! `SCHILY.xattr.*`, `SCHILY.acl.*` with numbers of users and groups, and `GNU.sparse.*` in format
//! 1.0, whose map is text at the beginning of the data. Records are UTF-8; one of a name that is
//! not comes after `hdrcharset=BINARY` (POSIX.1-2008, pax), which GNU tar ignores with a warning,
//! and without which bsdtar fails.

use anyhow::Result;
use rustix::fs::{FileType, Statx, major, makedev, minor};
use tar::{EntryType, Header};

use super::destination::Unfinished;

const BLOCK: usize = 512;

/// Bytes that are collected before they are written.
const BUFFER: usize = 1 << 20;

/// Greatest user or group in a ustar header: seven octal digits.
const ID_MAX: u32 = 0o7_777_777;

/// Greatest size and time in a ustar header: eleven octal digits.
const NUMBER_MAX: u64 = 0o77_777_777_777;

/// Longest name or link target in a ustar header.
const NAME_MAX: usize = 100;

/// Names and values.
type Xattrs = [(Box<[u8]>, Box<[u8]>)];

/// The properties of one entry.
pub(super) struct ArchiveEntry<'a> {
    /// Its path in the archive.
    pub(super) path: &'a [u8],
    pub(super) stat: &'a Statx,
    pub(super) xattrs: &'a Xattrs,
}

/// The content of one entry.
pub(super) enum Content<'a> {
    /// Of a directory, a device or a FIFO.
    None,
    Symlink(&'a [u8]),
    /// The path of an earlier entry.
    HardLink(&'a [u8]),
    /// A file of this many bytes, all of which follow.
    Whole(u64),
    /// A file of this many bytes, of which these ranges follow: offset and length.
    Sparse(u64, &'a [(u64, u64)]),
}

/// An archive that is being written.
pub(super) struct Archive {
    to: Unfinished,
    buffer: Vec<u8>,
}

impl Archive {
    pub(super) fn new(to: Unfinished) -> Self {
        Self { to, buffer: Vec::with_capacity(BUFFER) }
    }

    /// Writes the headers of an entry. Its data follows by [`Self::data`], and then
    /// [`Self::end_of_data`].
    pub(super) fn begin(&mut self, entry: &ArchiveEntry<'_>, content: &Content<'_>) -> Result<()> {
        let stat = entry.stat;
        let mut records = Vec::new();
        let mut header = Header::new_ustar();
        header.set_mode(u32::from(stat.stx_mode) & 0o7777);
        header.set_uid(id(stat.stx_uid, b"uid", &mut records));
        header.set_gid(id(stat.stx_gid, b"gid", &mut records));
        header.set_mtime(time(stat, &mut records));
        let kind = kind(stat, content);
        header.set_entry_type(kind);
        if matches!(kind, EntryType::Char | EntryType::Block) {
            let device = makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
            header.set_device_major(major(device))?;
            header.set_device_minor(minor(device))?;
        }
        if let Content::Symlink(target) | Content::HardLink(target) = content {
            put_name(&mut header.as_old_mut().linkname, target, b"linkpath", &mut records);
        }
        // Attributes of a hard link are those of the entry that it leads to.
        if !matches!(content, Content::HardLink(_)) {
            put_xattrs(entry.xattrs, &mut records);
        }
        let mut map = Vec::new();
        let size = match content {
            Content::Sparse(size, ranges) => {
                map = sparse_map(*size, ranges);
                record(&mut records, b"GNU.sparse.major", b"1");
                record(&mut records, b"GNU.sparse.minor", b"0");
                name_record(&mut records, b"GNU.sparse.name", entry.path);
                record(&mut records, b"GNU.sparse.realsize", size.to_string().as_bytes());
                let name = sparse_name(entry.path);
                let len = name.len().min(NAME_MAX);
                header.as_old_mut().name[..len].copy_from_slice(&name[..len]);
                map.len() as u64 + ranges.iter().map(|(_, len)| len).sum::<u64>()
            }
            Content::Whole(size) => *size,
            _ => 0,
        };
        if !matches!(content, Content::Sparse(..)) {
            put_name(&mut header.as_old_mut().name, entry.path, b"path", &mut records);
        }
        if size > NUMBER_MAX {
            record(&mut records, b"size", size.to_string().as_bytes());
        }
        header.set_size(size.min(NUMBER_MAX));
        self.pax_header(&records, header.mtime()?)?;
        header.set_cksum();
        self.data(header.as_bytes())?;
        self.data(&map)
    }

    /// Appends data of an entry.
    pub(super) fn data(&mut self, bytes: &[u8]) -> Result<()> {
        if self.buffer.len() + bytes.len() > BUFFER {
            self.flush()?;
        }
        match bytes.len() < BUFFER {
            true => self.buffer.extend_from_slice(bytes),
            false => self.to.put(bytes)?,
        }
        Ok(())
    }

    /// Fills the last block of `len` bytes of data.
    pub(super) fn end_of_data(&mut self, len: u64) -> Result<()> {
        let rest = (len % BLOCK as u64) as usize;
        if rest > 0 {
            self.data(&[0; BLOCK][rest..])?;
        }
        Ok(())
    }

    /// Writes the end of the archive.
    pub(super) fn finish(mut self) -> Result<Unfinished> {
        self.data(&[0; 2 * BLOCK])?;
        self.flush()?;
        Ok(self.to)
    }

    fn pax_header(&mut self, records: &[u8], mtime: u64) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let mut header = Header::new_ustar();
        header.as_old_mut().name[..b"PaxHeader".len()].copy_from_slice(b"PaxHeader");
        header.set_entry_type(EntryType::XHeader);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(mtime);
        header.set_size(records.len() as u64);
        header.set_cksum();
        self.data(header.as_bytes())?;
        self.data(records)?;
        self.end_of_data(records.len() as u64)
    }

    fn flush(&mut self) -> Result<()> {
        self.to.put(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

fn kind(stat: &Statx, content: &Content<'_>) -> EntryType {
    if let Content::HardLink(_) = content {
        return EntryType::Link;
    }
    match FileType::from_raw_mode(u32::from(stat.stx_mode)) {
        FileType::Directory => EntryType::Directory,
        FileType::Symlink => EntryType::Symlink,
        FileType::Fifo => EntryType::Fifo,
        FileType::CharacterDevice => EntryType::Char,
        FileType::BlockDevice => EntryType::Block,
        _ => EntryType::Regular,
    }
}

/// Appends a record: its own length in decimal digits, a space, the keyword, `=`, the value, and a
/// newline.
fn record(records: &mut Vec<u8>, keyword: &[u8], value: &[u8]) {
    let rest = keyword.len() + value.len() + 3;
    let mut len = rest;
    // The length counts its own digits.
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    records.extend_from_slice(len.to_string().as_bytes());
    for part in [b" ", keyword, b"=", value, b"\n"] {
        records.extend_from_slice(part);
    }
}

/// Appends the record of a name, which may be of any bytes.
fn name_record(records: &mut Vec<u8>, keyword: &[u8], name: &[u8]) {
    if std::str::from_utf8(name).is_err() {
        record(records, b"hdrcharset", b"BINARY");
    }
    record(records, keyword, name);
}

/// A user or group for the header; one that does not fit gets a record.
fn id(id: u32, keyword: &[u8], records: &mut Vec<u8>) -> u64 {
    if id > ID_MAX {
        record(records, keyword, id.to_string().as_bytes());
    }
    id.min(ID_MAX).into()
}

/// The modification time for the header, in seconds; one that does not fit gets a record.
fn time(stat: &Statx, records: &mut Vec<u8>) -> u64 {
    let (seconds, nanoseconds) = (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec);
    let whole = u64::try_from(seconds).unwrap_or(0).min(NUMBER_MAX);
    if nanoseconds > 0 || i64::try_from(whole) != Ok(seconds) {
        record(records, b"mtime", decimal(seconds, nanoseconds).as_bytes());
    }
    whole
}

/// A time as a decimal fraction; the nanoseconds count forwards, also before 1970.
fn decimal(seconds: i64, nanoseconds: u32) -> String {
    match nanoseconds {
        0 => seconds.to_string(),
        nanoseconds if seconds >= 0 => format!("{seconds}.{nanoseconds:09}"),
        nanoseconds => {
            format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds)
        }
    }
}

/// Puts a name into its field; one that is too long gets a record.
fn put_name(field: &mut [u8; NAME_MAX], name: &[u8], keyword: &[u8], records: &mut Vec<u8>) {
    if name.len() > NAME_MAX {
        name_record(records, keyword, name);
    }
    let len = name.len().min(NAME_MAX);
    field[..len].copy_from_slice(&name[..len]);
}

fn put_xattrs(xattrs: &Xattrs, records: &mut Vec<u8>) {
    for (name, value) in xattrs {
        let acl = match &**name {
            b"system.posix_acl_access" => Some(&b"SCHILY.acl.access"[..]),
            b"system.posix_acl_default" => Some(&b"SCHILY.acl.default"[..]),
            _ => None,
        };
        match acl.zip(acl_text(value)) {
            Some((keyword, text)) => record(records, keyword, text.as_bytes()),
            None => record(records, &xattr_keyword(name), value),
        }
    }
}

/// The keyword of an attribute. `=` would end it, so GNU tar escapes that.
fn xattr_keyword(name: &[u8]) -> Vec<u8> {
    let mut keyword = b"SCHILY.xattr.".to_vec();
    for byte in name {
        match byte {
            b'%' => keyword.extend_from_slice(b"%25"),
            b'=' => keyword.extend_from_slice(b"%3D"),
            byte => keyword.push(*byte),
        }
    }
    keyword
}

/// The text of an access control list, from `struct posix_acl_xattr_header` and its entries: a tag
/// and permissions of 16 bits each, and an id of 32 bits, all little-endian.
fn acl_text(value: &[u8]) -> Option<String> {
    let entries = value.strip_prefix(&2u32.to_le_bytes())?;
    if entries.len() % 8 != 0 {
        return None;
    }
    let entry = |entry: &[u8]| {
        let short = |at: usize| Some(u16::from_le_bytes(entry.get(at..at + 2)?.try_into().ok()?));
        let (tag, bits) = (short(0)?, short(2)?);
        let id = u32::from_le_bytes(entry.get(4..8)?.try_into().ok()?);
        let who = match tag {
            0x01 => "user:".to_owned(),
            0x02 => format!("user:{id}"),
            0x04 => "group:".to_owned(),
            0x08 => format!("group:{id}"),
            0x10 => "mask:".to_owned(),
            0x20 => "other:".to_owned(),
            _ => return None,
        };
        let bit = |bit, name| if bits & bit != 0 { name } else { '-' };
        Some(format!("{who}:{}{}{}", bit(4, 'r'), bit(2, 'w'), bit(1, 'x')))
    };
    let entries: Option<Vec<_>> = entries.chunks(8).map(entry).collect();
    Some(entries?.join(","))
}

/// The map of a sparse file: the number of ranges, then offset and length of each; a range of no
/// bytes at the end of the file states its size.
fn sparse_map(size: u64, ranges: &[(u64, u64)]) -> Vec<u8> {
    let end = ranges.last().map_or(0, |(offset, len)| offset + len);
    let last = (end < size || ranges.is_empty()).then_some((size, 0));
    let count = ranges.len() + usize::from(last.is_some());
    let mut map = format!("{count}\n").into_bytes();
    for (offset, len) in ranges.iter().copied().chain(last) {
        map.extend_from_slice(format!("{offset}\n{len}\n").as_bytes());
    }
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

/// The name that programs show that know no sparse files.
fn sparse_name(path: &[u8]) -> Vec<u8> {
    let (folder, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&b"."[..], path),
    };
    [folder, b"/GNUSparseFile.0/", name].concat()
}

#[cfg(test)]
mod tests {
    use super::{acl_text, decimal, record, sparse_map, xattr_keyword};

    #[test]
    fn a_record_counts_itself() {
        let mut records = Vec::new();
        record(&mut records, b"path", b"name");
        assert_eq!(records, b"13 path=name\n");
        for len in [86, 87, 88, 89, 985, 986, 987, 988, 989] {
            records.clear();
            record(&mut records, b"path", &vec![b'x'; len]);
            let text = String::from_utf8(records.clone()).unwrap();
            assert_eq!(text.split(' ').next(), Some(records.len().to_string().as_str()));
        }
    }

    #[test]
    fn times_before_1970_are_negative_fractions() {
        for (seconds, nanoseconds, text) in [
            (5, 0, "5"),
            (5, 10, "5.000000010"),
            (0, 1, "0.000000001"),
            (-1, 0, "-1"),
            (-1, 500_000_000, "-0.500000000"),
            (-2, 250_000_000, "-1.750000000"),
        ] {
            assert_eq!(decimal(seconds, nanoseconds), text);
        }
    }

    #[test]
    fn access_control_lists_become_text() {
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, bits, id) in
            [(1u16, 7u16, u32::MAX), (2, 5, 1000), (4, 4, u32::MAX), (0x10, 5, 0), (0x20, 0, 0)]
        {
            value.extend([&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat());
        }
        let text = "user::rwx,user:1000:r-x,group::r--,mask::r-x,other::---";
        assert_eq!(acl_text(&value).as_deref(), Some(text));
        assert_eq!(acl_text(&value[..9]), None);
        assert_eq!(acl_text(b"x"), None);
    }

    #[test]
    fn a_map_ends_with_the_size() {
        let text = |map: Vec<u8>| {
            assert_eq!(map.len() % 512, 0);
            String::from_utf8(map).unwrap().trim_end_matches('\0').to_owned()
        };
        assert_eq!(text(sparse_map(10, &[(2, 3)])), "2\n2\n3\n10\n0\n");
        assert_eq!(text(sparse_map(10, &[(2, 8)])), "1\n2\n8\n");
        assert_eq!(text(sparse_map(10, &[])), "1\n10\n0\n");
    }

    #[test]
    fn keywords_hold_no_equals_sign() {
        assert_eq!(xattr_keyword(b"user.a=b%"), b"SCHILY.xattr.user.a%3Db%25");
    }
}
