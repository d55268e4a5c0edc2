//! Writes the fixture that `tests/fixtures.rs` opens: `make_fixture FOLDER` makes two small
//! images, one with each kind of block checksum, in a store, and the address map of the first.
//! Run once for each version of the formats; its output stays in the repository forever.

use std::{error::Error, fs, path::PathBuf};

use burgeon_block::ChecksumKind;
use burgeon_image::{AddressMap, ManifestLimits, builder, catalog};
use burgeon_source::Directory;

/// A header of a ustar archive, with its data.
fn entry(name: &str, kind: u8, data: &[u8], link: &str, device: (u32, u32)) -> Vec<u8> {
    let mut header = vec![0; 512];
    let mut put =
        |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, if kind == b'5' { "0000755" } else { "0004640" });
    put(108, "0001750");
    put(116, "0000062");
    put(124, &format!("{:011o}", data.len()));
    put(136, "14000000000");
    put(157, link);
    put(257, "ustar\0");
    put(263, "00");
    put(329, &format!("{:07o}", device.0));
    put(337, &format!("{:07o}", device.1));
    put(148, "        ");
    header[156] = kind;
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header.extend_from_slice(data);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

/// A pax record; its length includes itself.
fn record(text: &str) -> String {
    format!("{} {text}\n", text.len() + 4)
}

fn archive() -> Vec<u8> {
    let none = (0, 0);
    let pattern: Vec<u8> = (0..300_000u32).map(|n| (n / 1000) as u8).collect();
    let noise: Vec<u8> =
        (0..3000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    let xattr = record("SCHILY.xattr.user.key=value");
    let map = record("GNU.sparse.map=1048576,4096,8388607,1") + &record("GNU.sparse.size=8388608");
    [
        entry("dir/", b'5', b"", "", none),
        entry("pax", b'x', xattr.as_bytes(), "", none),
        entry("dir/tiny", b'0', b"tiny\n", "", none),
        entry("dir/pattern", b'0', &pattern, "", none),
        entry("dir/noise", b'0', &noise, "", none),
        entry("dir/link", b'1', b"", "dir/noise", none),
        entry("symlink", b'2', b"", "dir/tiny", none),
        entry("null", b'3', b"", "", (1, 3)),
        entry("fifo", b'6', b"", "", none),
        entry("pax", b'x', map.as_bytes(), "", none),
        entry("sparse", b'0', &[7; 4097], "", none),
        vec![0; 1024],
    ]
    .concat()
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args_os().nth(1).ok_or("make_fixture FOLDER")?);
    let store = Directory::create(folder.join("store"))?;
    for (name, checksum) in [("crc32c", ChecksumKind::Crc32c), ("xxhash64", ChecksumKind::Xxhash64)]
    {
        let options = builder::BuildOptions { checksum, ..builder::BuildOptions::default() };
        let archive = std::io::Cursor::new(archive());
        let report = builder::from_tar(&store, name, archive, None, &options, &|_| ())?;
        let digest = report.image.digest()?;
        println!("{name} {digest}");
        let manifest = catalog::load(&store, &digest, &ManifestLimits::default())?;
        AddressMap::from_manifest(&manifest)?.write_to(&folder.join(format!("{name}.map")))?;
    }
    fs::remove_dir_all(folder.join("store/tmp"))?;
    fs::remove_file(folder.join("store/lock"))?;
    Ok(())
}
