//! The present content of a device, by the marks of formats at their places.

use burgeon_block::{LocalFile, Result};

/// Bytes from the beginning that are looked at.
const LEN: usize = 68 << 10;

/// The answer of [`content`] for a cache.
pub const CACHE: &str = "a cache of Burgeon";

const MARKS: &[(usize, &[u8], &str)] = &[
    (40, b"burgaccl", CACHE),
    (0, b"XFSB", "an XFS file system"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (0, b"hsqs", "a squashfs file system"),
    (3, b"NTFS", "an NTFS file system"),
    (3, b"EXFAT", "an exFAT file system"),
    (0x438, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0x1_0040, b"_BHRfS_M", "a btrfs file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (0x218, b"LVM2 001", "an LVM physical volume"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a RAID"),
    (
        4096 + 24,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
        "a bcache device",
    ),
    (512, b"EFI PART", "a partition table (GPT)"),
    (4096, b"EFI PART", "a partition table (GPT)"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS file system"),
    (0x1_0400, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (510, b"\x55\xaa", "a partition table (MBR) or a FAT file system"),
];

/// The content of `file` of `size` bytes, if its format is known.
pub fn content(file: &impl LocalFile, size: u64) -> Result<Option<&'static str>> {
    let Some(mut pages) = burgeon_block::Pages::zeroed(LEN as u64) else { return Ok(None) };
    let len = (size.min(LEN as u64) as usize) / 512 * 512;
    file.read_at(0, &mut pages.bytes_mut()[..len])?;
    let bytes = pages.bytes();
    let found = MARKS.iter().find(|(at, mark, _)| bytes[*at..].starts_with(mark));
    Ok(found.map(|(.., what)| *what))
}

#[cfg(test)]
mod tests {
    use burgeon_accelerate::create;

    use super::content;
    use crate::disk::Disk;

    #[test]
    fn known_content_is_named_and_zeros_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let found = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let disk = Disk::open(&path).unwrap();
            content(&disk, disk.size()).unwrap()
        };
        let mut bytes = vec![0; 1 << 20];
        assert_eq!(found(&bytes), None);
        bytes[510..512].copy_from_slice(b"\x55\xaa");
        assert!(found(&bytes).unwrap().contains("MBR"));
        bytes[..4].copy_from_slice(b"XFSB");
        assert!(found(&bytes).unwrap().contains("XFS"));
        let disk = Disk::open(&path).unwrap();
        create(&disk, disk.size(), [1; 16]).unwrap();
        assert!(content(&disk, disk.size()).unwrap().unwrap().contains("Burgeon"));
    }
}
