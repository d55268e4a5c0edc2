//! Archives compressed with gzip, zstd and xz, in several members and damaged: refused, or an
//! image. The decoders take bounded memory with any header.

#![no_main]

use std::{io::Write, sync::LazyLock};

use burgeon_fuzz::{build, edits, sealed};
use libfuzzer_sys::fuzz_target;

/// An archive of one file, in three parts, each compressed by itself in each way.
static BASE: LazyLock<[Vec<u8>; 3]> = LazyLock::new(|| {
    let mut header = vec![0; 512];
    header[0] = b'a';
    header[100..107].copy_from_slice(b"0000644");
    header[124..135].copy_from_slice(format!("{:011o}", 100_000).as_bytes());
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    let mut archive = sealed(header);
    archive.extend((0..100_000u32).map(|n| (n / 7 % 251) as u8));
    archive.resize(archive.len().next_multiple_of(512) + 1024, 0);
    let parts = || archive.chunks(40_000);
    let gzip = |part: &[u8]| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(part).expect("memory");
        gzip.finish().expect("memory")
    };
    let zstd = |part: &[u8]| zstd::bulk::compress(part, 1).expect("memory");
    let xz = |part: &[u8]| {
        let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 0);
        xz.write_all(part).expect("memory");
        xz.finish().expect("memory")
    };
    [
        parts().flat_map(gzip).collect(),
        parts().flat_map(zstd).collect(),
        parts().flat_map(xz).collect(),
    ]
});

fuzz_target!(|input: &[u8]| {
    let Some((how, rest)) = input.split_first() else { return };
    let mut bytes = BASE[usize::from(how % 3)].clone();
    // Headers are where a decoder is asked for memory.
    let len = if how & 0x80 != 0 { bytes.len().min(64) } else { bytes.len() };
    edits(&mut bytes[..len], rest);
    build(bytes);
});
