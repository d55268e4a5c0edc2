//! Tables of contents (TOC) of eStargz and zstd:chunked: any bytes are refused, or list files that
//! can be made an image, or are refused for it.

#![no_main]

use std::io::Write;

use burgeon_fuzz::{edits, options};
use burgeon_image::builder::{LayerLimits, Layers};
use burgeon_oci::fuzz::{TocKind, toc};
use libfuzzer_sys::fuzz_target;

const BASE: &str = concat!(
    r#"{"version":1,"entries":["#,
    r#"{"type":"dir","name":"a/","mode":493,"modtime":"2024-01-01T00:00:00.5Z"},"#,
    r#"{"type":"reg","name":"a/b","mode":420,"size":9000,"uid":1,"gid":2,"offset":100,"#,
    r#""xattrs":{"user.x":"eA=="},"chunkSize":5000,"#,
    r#""chunkDigest":"sha256:0000000000000000000000000000000000000000000000000000000000000000","#,
    r#""endOffset":700,"digest":"sha256:"#,
    "0000000000000000000000000000000000000000000000000000000000000000",
    r#""},{"type":"chunk","name":"a/b","offset":400,"chunkOffset":5000,"chunkSize":4000,"#,
    r#""chunkDigest":"sha256:0000000000000000000000000000000000000000000000000000000000000000"},"#,
    r#"{"type":"symlink","name":"c","linkName":"a/b"},"#,
    r#"{"type":"hardlink","name":"d","linkName":"a/b"},"#,
    r#"{"type":"char","name":"e","devMajor":1,"devMinor":3}]}"#
);

/// The TOC as a layer stores it.
fn stored(kind: TocKind, json: &[u8]) -> Vec<u8> {
    if kind == TocKind::Chunked {
        return zstd::bulk::compress(json, 1).expect("memory");
    }
    let mut header = vec![0; 512];
    header[..18].copy_from_slice(b"stargz.index.json\0");
    header[124..135].copy_from_slice(format!("{:011o}", json.len()).as_bytes());
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&header).and_then(|()| gzip.write_all(json)).expect("memory");
    gzip.finish().expect("memory")
}

/// Reads the TOC, and lists the layer.
fn list(kind: TocKind, stored: Vec<u8>, json: &[u8]) {
    let Ok(files) = toc(kind, stored, json) else { return };
    let _ = Layers::new(LayerLimits::default()).list(&files, 0, &options());
}

fuzz_target!(|input: &[u8]| {
    let Some((how, rest)) = input.split_first() else { return };
    let kind = if how & 1 == 0 { TocKind::Stargz } else { TocKind::Chunked };
    match how >> 1 {
        0 => list(kind, rest.to_vec(), &vec![b' '; 1 << 16]),
        1 => list(kind, stored(kind, rest), rest),
        // A short input is a long TOC.
        2 => {
            let entries = rest.repeat(2000);
            let json = [br#"{"version":1,"entries":["#, &entries[..], b"{}]}"].concat();
            list(kind, stored(kind, &json), &json);
        }
        _ => {
            let mut json = BASE.as_bytes().to_vec();
            edits(&mut json, rest);
            list(kind, stored(kind, &json), &json);
        }
    }
});
