//! Writes a tar archive, byte for byte as Go's `archive/tar` does for containerd: so a layer has
//! the diff ID that containerd's own differ gives it.
//!
//! ```text
//!   entry     header of ustar (512 bytes) │ data, filled up with zeros to 512 bytes
//!   entry     x header │ PAX records: what ustar has no room for │ header │ data
//!   the end   1024 zeros
//! ```
//!
//! Invariant: every entry has as many bytes of data as its header states. The formats are those of
//! POSIX.1-2001 (pax). Held by the tests below, and by those of the command that compare digests
//! with containerd's.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

const BLOCK: usize = 512;
/// The longest name, and the longest target of a link, in a header.
const NAME: usize = 100;
/// The longest begin of a path in a header of ustar.
const PREFIX: usize = 155;
/// The first number that has no room in a field of 8 bytes.
const SMALL_END: u64 = 1 << 21;
/// The first number that has no room in a field of 12 bytes.
const LARGE_END: u64 = 1 << 33;

/// The kind of an entry, as its byte in the header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    File = b'0' as isize,
    HardLink = b'1' as isize,
    Symlink = b'2' as isize,
    CharacterDevice = b'3' as isize,
    BlockDevice = b'4' as isize,
    Folder = b'5' as isize,
    Fifo = b'6' as isize,
}

/// An entry without its data.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    /// The path; that of a folder ends with a slash.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    /// The target of a link.
    pub(crate) link: Vec<u8>,
    /// The lowest 12 bits of the mode.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Bytes of data; 0 unless it is a file.
    pub(crate) size: u64,
    /// Seconds since 1970.
    pub(crate) modified: i64,
    /// Major and minor number of a device.
    pub(crate) device: (u32, u32),
    /// The value of `security.capability`.
    pub(crate) capability: Option<Vec<u8>>,
}

impl Header {
    /// An empty file that hides an entry of the layers below.
    pub(crate) fn whiteout(path: Vec<u8>) -> Self {
        Self {
            path,
            kind: Kind::File,
            link: Vec::new(),
            mode: 0,
            uid: 0,
            gid: 0,
            size: 0,
            modified: 0,
            device: (0, 0),
            capability: None,
        }
    }

    /// The PAX records, and true if ustar has room for all of it.
    fn records(&self) -> (BTreeMap<&'static str, Vec<u8>>, bool) {
        let mut records = BTreeMap::new();
        let mut fits = true;
        if self.path.len() > NAME || !self.path.is_ascii() {
            fits = split(&self.path).is_some();
            records.insert("path", self.path.clone());
        }
        if self.link.len() > NAME || !self.link.is_ascii() {
            fits = false;
            records.insert("linkpath", self.link.clone());
        }
        let numbers = [
            ("uid", u64::from(self.uid), SMALL_END),
            ("gid", u64::from(self.gid), SMALL_END),
            ("size", self.size, LARGE_END),
        ];
        for (key, number, _) in numbers.into_iter().filter(|(_, number, end)| number >= end) {
            fits = false;
            records.insert(key, number.to_string().into_bytes());
        }
        if !u64::try_from(self.modified).is_ok_and(|modified| modified < LARGE_END) {
            fits = false;
            records.insert("mtime", self.modified.to_string().into_bytes());
        }
        if let Some(capability) = &self.capability {
            fits = false;
            records.insert("SCHILY.xattr.security.capability", capability.clone());
        }
        (records, fits)
    }

    fn block(&self, fits: bool) -> Block {
        let mut block = Block::new(self.kind as u8);
        let prefix_and_name = if fits { split(&self.path) } else { None };
        let (prefix, name) = prefix_and_name.unwrap_or((b"", &self.path));
        block.text(0, NAME, name);
        block.octal(100, 8, u64::from(self.mode));
        block.octal(108, 8, u64::from(self.uid));
        block.octal(116, 8, u64::from(self.gid));
        block.octal(124, 12, self.size);
        block.octal(136, 12, u64::try_from(self.modified).unwrap_or(u64::MAX));
        block.text(157, NAME, &self.link);
        block.octal(329, 8, u64::from(self.device.0));
        block.octal(337, 8, u64::from(self.device.1));
        block.text(345, PREFIX, prefix);
        block
    }
}

/// The begin and the rest of a long path, if ustar has room for both.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.len() <= NAME || !path.is_ascii() {
        return None;
    }
    let end = match path.len() {
        len if len > PREFIX + 1 => PREFIX + 1,
        len if path[len - 1] == b'/' => len - 1,
        len => len,
    };
    let slash = path[..end].iter().rposition(|byte| *byte == b'/').filter(|slash| *slash > 0)?;
    let (prefix, name) = (&path[..slash], &path[slash + 1..]);
    (!name.is_empty() && name.len() <= NAME && prefix.len() <= PREFIX).then_some((prefix, name))
}

/// A header's bytes.
struct Block([u8; BLOCK]);

impl Block {
    fn new(kind: u8) -> Self {
        let mut block = Self([0; BLOCK]);
        block.0[156] = kind;
        block.0[257..265].copy_from_slice(b"ustar\x0000");
        block
    }

    /// Writes the ASCII characters that have room; a record has the whole text.
    fn text(&mut self, at: usize, size: usize, text: &[u8]) {
        let ascii: Vec<u8> = text.iter().copied().filter(u8::is_ascii).collect();
        let len = ascii.len().min(size);
        let field = &mut self.0[at..at + size];
        field[..len].copy_from_slice(&ascii[..len]);
        // Some readers take a name that ends with a slash for a folder.
        if ascii.len() > size && field[size - 1] == b'/' {
            let end =
                field[..size - 1].iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
            field[end] = 0;
        }
    }

    /// A number that has no room stands in a record, and is 0 here.
    fn octal(&mut self, at: usize, size: usize, number: u64) {
        let digits = size - 1;
        let number = if number < 1 << (3 * digits) { number } else { 0 };
        self.0[at..at + digits].copy_from_slice(format!("{number:0digits$o}").as_bytes());
    }

    /// The bytes with their checksum.
    fn finish(mut self) -> [u8; BLOCK] {
        self.0[148..156].fill(b' ');
        let sum: u64 = self.0.iter().copied().map(u64::from).sum();
        self.0[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
        self.0[154] = 0;
        self.0
    }
}

/// A record with its length, which counts itself.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + digits(rest);
    if rest + digits(len) != len {
        len = rest + digits(len);
    }
    [format!("{len} {key}=").as_bytes(), value, b"\n"].concat()
}

fn digits(number: usize) -> usize {
    number.to_string().len()
}

/// An archive that is being written.
#[derive(Debug)]
pub(crate) struct Tar<W> {
    to: W,
}

impl<W: Write> Tar<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to }
    }

    /// Writes an entry whose data has exactly the size of its header.
    pub(crate) fn entry(&mut self, header: &Header, data: impl io::Read) -> io::Result<()> {
        let (records, fits) = header.records();
        if !fits {
            self.records(&header.path, &records)?;
        }
        self.to.write_all(&header.block(fits).finish())?;
        let copied = io::copy(&mut data.take(header.size), &mut self.to)?;
        if copied < header.size {
            let path = String::from_utf8_lossy(&header.path);
            let what = format!("{path} became shorter while it was read");
            return Err(io::Error::other(what));
        }
        self.fill(header.size)
    }

    /// The entry before another one, with the records for it.
    fn records(
        &mut self,
        path: &[u8],
        records: &BTreeMap<&'static str, Vec<u8>>,
    ) -> io::Result<()> {
        let data: Vec<u8> = records.iter().flat_map(|(key, value)| record(key, value)).collect();
        let slash = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let name = [&path[..slash], b"PaxHeaders.0/", &path[slash..]].concat();
        let name: Vec<u8> = name.into_iter().filter(u8::is_ascii).take(NAME).collect();
        let end = name.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
        let mut block = Block::new(b'x');
        block.text(0, NAME, &name[..end]);
        for (at, size) in [(100, 8), (108, 8), (116, 8), (136, 12)] {
            block.octal(at, size, 0);
        }
        block.octal(124, 12, data.len() as u64);
        self.to.write_all(&block.finish())?;
        self.to.write_all(&data)?;
        self.fill(data.len() as u64)
    }

    /// Fills the last block of so many bytes.
    fn fill(&mut self, size: u64) -> io::Result<()> {
        let missing = size.next_multiple_of(BLOCK as u64) - size;
        self.to.write_all(&[0; BLOCK][..missing as usize])
    }

    /// Writes the end.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.to.write_all(&[0; 2 * BLOCK])?;
        Ok(self.to)
    }
}

#[cfg(test)]
mod tests {
    use super::{Header, Kind, Tar, record, split};

    fn file(path: &[u8], size: u64) -> Header {
        Header { mode: 0o644, size, ..Header::whiteout(path.to_vec()) }
    }

    /// The kind of each header, with its path.
    fn headers(tar: &[u8]) -> Vec<(u8, String)> {
        let mut found = Vec::new();
        let mut at = 0;
        while tar[at + 156] != 0 {
            let text = |from: usize, len: usize| {
                let field = &tar[at + from..at + from + len];
                let end = field.iter().position(|byte| *byte == 0).unwrap_or(len);
                String::from_utf8(field[..end].to_vec()).unwrap()
            };
            let size = u64::from_str_radix(&text(124, 12), 8).unwrap();
            let path = [text(345, 155), text(0, 100)].join("|");
            found.push((tar[at + 156], path));
            at += 512 + size.next_multiple_of(512) as usize;
        }
        assert_eq!(tar.len(), at + 1024);
        found
    }

    #[test]
    fn a_short_entry_has_one_header() {
        let mut tar = Tar::new(Vec::new());
        tar.entry(&file(b"a/b", 3), &b"abc"[..]).unwrap();
        let header = Header { kind: Kind::Folder, ..Header::whiteout(b"c/".to_vec()) };
        tar.entry(&header, &b""[..]).unwrap();
        let tar = tar.finish().unwrap();
        assert_eq!(headers(&tar), [(b'0', "|a/b".into()), (b'5', "|c/".into())]);
        assert_eq!(&tar[512..516], b"abc\0");
        // As `tar` of Go writes it, which is as POSIX wants it.
        assert_eq!(
            &tar[100..156],
            b"0000644\x000000000\x000000000\x0000000000003\x0000000000000\x00007562\x00 "
        );
        assert!(Tar::new(Vec::new()).entry(&file(b"a", 4), &b"abc"[..]).is_err());
    }

    #[test]
    fn a_long_path_is_split_or_stands_in_a_record() {
        let long = |parts: usize| ["0123456789"; 30][..parts].join("/").into_bytes();
        let mut tar = Tar::new(Vec::new());
        // 120 bytes: split. One name of 120 bytes, and not ASCII: records.
        tar.entry(&file(&long(11), 0), &b""[..]).unwrap();
        tar.entry(&file(&[b'x'; 120], 0), &b""[..]).unwrap();
        tar.entry(&file("ä".as_bytes(), 0), &b""[..]).unwrap();
        tar.entry(&file(&long(30), 0), &b""[..]).unwrap();
        let tar = tar.finish().unwrap();
        let kinds: Vec<_> = headers(&tar).into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds, *b"0x0x0x0");
        assert_eq!(split(&long(11)).unwrap().1, b"0123456789");
        assert_eq!(split(&long(30)), None);
        assert_eq!(split(&long(9)), None);
        let has = |text: &str| tar.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(has(&format!("130 path={}\n", "x".repeat(120))) && has("11 path=ä\n"));
    }

    #[test]
    fn a_record_counts_its_own_length() {
        for len in 0..1200 {
            let record = record("key", &vec![b'v'; len]);
            let text = String::from_utf8(record.clone()).unwrap();
            let stated: usize = text.split_once(' ').unwrap().0.parse().unwrap();
            assert_eq!(stated, record.len());
        }
    }

    #[test]
    fn large_numbers_and_capabilities_stand_in_records() {
        let mut header = file(b"a", 0);
        (header.uid, header.gid, header.modified) = (1 << 21, u32::MAX, -5);
        header.capability = Some(b"\x01\0\n=".to_vec());
        let (records, fits) = header.records();
        assert!(!fits);
        let keys: Vec<_> = records.keys().copied().collect();
        assert_eq!(keys, ["SCHILY.xattr.security.capability", "gid", "mtime", "uid"]);
        assert_eq!(records["mtime"], b"-5");
        header = file(b"a", 1 << 33);
        assert_eq!(header.records().0["size"], (1_u64 << 33).to_string().into_bytes());
    }
}
