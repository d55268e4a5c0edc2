//! The log of a dm-log-writes device: each write in the order in which a disk with a volatile cache
//! makes it durable.
//!
//! ```text
//!   block 0: magic, version, entries, block size │ entry │ its data │ entry │ its data │ …
//!   entry: sector, sectors, flags, length of a mark's text; one block, which has the text, too
//! ```
//!
//! A write is logged when the first flush after it ends, so what stands between a mark and the next
//! flush was not durable at the mark (kernel: admin-guide/device-mapper/log-writes.rst).

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use testkit::Rng;

use crate::slow::{Slow, run};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
/// Unit of a torn write.
const SECTOR: u64 = 512;

/// A device that logs its writes, over a file.
pub(crate) struct Logged {
    name: String,
    log: PathBuf,
    /// Both are in use until the device is removed.
    below: Option<(Slow, Slow)>,
}

impl Logged {
    /// Over `file`, with a log in a file beside it.
    pub(crate) fn over(file: &Path, name: &str) -> Self {
        let log = file.with_extension("log");
        File::create(&log).unwrap().set_len(4 << 30).unwrap();
        let below = (Slow::new(file, &[]), Slow::new(&log, &[]));
        let sectors = std::fs::metadata(file).unwrap().len() / SECTOR;
        let table = format!("0 {sectors} log-writes {} {}", below.0.text(), below.1.text());
        dmsetup(&["create", name, "--table", &table]);
        Self { name: name.to_owned(), log, below: Some(below) }
    }

    pub(crate) fn path(&self) -> PathBuf {
        Path::new("/dev/mapper").join(&self.name)
    }

    /// Marks this moment, in which nobody writes: what was not flushed stands between `mark` and
    /// the next flush of the log.
    pub(crate) fn cut(&self, mark: &str) {
        dmsetup(&["message", &self.name, "0", "mark", mark]);
        File::open(self.path()).unwrap().sync_all().unwrap();
    }

    /// Ends the device, and returns its log.
    pub(crate) fn end(mut self) -> Log {
        dmsetup(&["remove", "--retry", &self.name]);
        self.below = None;
        Log::open(&self.log)
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        if self.below.is_some() {
            let remove = ["remove", "--force", &self.name];
            let _ = Command::new("dmsetup").env("DM_DISABLE_UDEV", "1").args(remove).status();
        }
    }
}

fn dmsetup(arguments: &[&str]) {
    run(Command::new("dmsetup").env("DM_DISABLE_UDEV", "1").args(arguments));
}

/// Reads a log from its beginning.
pub(crate) struct Log {
    file: File,
    block: u64,
    left: u64,
    next: u64,
}

struct Entry {
    /// In bytes, of the device.
    at: u64,
    len: u64,
    flags: u64,
    mark: String,
    /// Place of its data in the log.
    data: u64,
}

impl Log {
    fn open(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let mut head = [0; 28];
        file.read_exact_at(&mut head, 0).unwrap();
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap());
        assert_eq!((word(0), word(8)), (MAGIC, 1), "no log of writes");
        let block = u64::from(u32::from_le_bytes(head[24..28].try_into().unwrap()));
        Self { file, block, left: word(16), next: block }
    }

    fn entry(&mut self) -> Option<Entry> {
        self.left = self.left.checked_sub(1)?;
        let mut bytes = vec![0; self.block as usize];
        self.file.read_exact_at(&mut bytes, self.next).unwrap();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let (at, len, flags) = (word(0) * self.block, word(8) * self.block, word(16));
        let text = &bytes[32..32 + word(24) as usize];
        let mark = String::from_utf8_lossy(text).trim_end_matches('\0').to_owned();
        let data = self.next + self.block;
        self.next = data + if flags & DISCARD == 0 { len } else { 0 };
        Some(Entry { at, len, flags, mark, data })
    }

    fn bytes_of(&self, entry: &Entry) -> Vec<u8> {
        let mut bytes = vec![0; entry.len as usize];
        // A discard leaves zeros.
        if entry.flags & DISCARD == 0 {
            self.file.read_exact_at(&mut bytes, entry.data).unwrap();
        }
        bytes
    }

    /// Writes all that was durable at `mark` to `image`.
    pub(crate) fn replay_until(&mut self, mark: &str, image: &File) {
        loop {
            let entry = self.entry().unwrap_or_else(|| panic!("the log has no mark {mark}"));
            if entry.flags & MARK != 0 && entry.mark == mark {
                return;
            }
            image.write_all_at(&self.bytes_of(&entry), entry.at).unwrap();
        }
    }

    /// Of the writes that were not durable at the last mark, some reach `image`, and some of those
    /// in part. All of them are durable later, so they go to `base`. Returns their number.
    pub(crate) fn lose_some(&mut self, rng: &mut Rng, image: &Path, base: &File) -> u64 {
        let image = OpenOptions::new().write(true).open(image).unwrap();
        let kept_of_four = rng.below(4);
        let mut writes = 0;
        while let Some(entry) = self.entry() {
            if entry.flags & MARK != 0 {
                panic!("a mark without a flush after it: {}", entry.mark);
            }
            let bytes = self.bytes_of(&entry);
            base.write_all_at(&bytes, entry.at).unwrap();
            if entry.flags & FLUSH != 0 {
                break;
            }
            writes += 1;
            if rng.below(4) < kept_of_four {
                let sectors = entry.len / SECTOR;
                let kept = if rng.below(4) == 0 { rng.below(sectors) } else { sectors };
                image.write_all_at(&bytes[..(kept * SECTOR) as usize], entry.at).unwrap();
            }
        }
        writes
    }
}
