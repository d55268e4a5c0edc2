//! Maps of sparse files, in each of their formats, written by the input: refused, or an image.

#![no_main]

use burgeon_fuzz::{build, sealed};
use libfuzzer_sys::fuzz_target;

/// A tar header of the file `name` with `len` bytes.
fn header(name: &[u8], kind: u8, len: usize) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name);
    header[100..107].copy_from_slice(b"0000644");
    header[124..135].copy_from_slice(format!("{len:011o}").as_bytes());
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    header
}

fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// A pax record, whose length counts itself.
fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let fits = |digits: &usize| (rest + digits).to_string().len() == *digits;
    let digits = (1..).find(fits).expect("a length");
    [format!("{} ", rest + digits).as_bytes(), key, b"=", value, b"\n"].concat()
}

fuzz_target!(|input: &[u8]| {
    let Some(([format, size, repeat], text)) = input.split_first_chunk::<3>() else { return };
    // A short input is a long map.
    let map = text.repeat(1 + usize::from(*repeat));
    let size = (1u64 << (size % 40)).to_string();
    let (records, data) = match format % 3 {
        0 => {
            let major = record(b"GNU.sparse.major", b"1");
            let real = record(b"GNU.sparse.realsize", size.as_bytes());
            ([major, record(b"GNU.sparse.minor", b"0"), real].concat(), map)
        }
        1 => {
            let real = record(b"GNU.sparse.size", size.as_bytes());
            ([record(b"GNU.sparse.map", &map), real].concat(), vec![7; map.len() / 4])
        }
        _ => {
            let pair = |two: &[u8]| {
                let offset = record(b"GNU.sparse.offset", two[0].to_string().as_bytes());
                let len = record(b"GNU.sparse.numbytes", two[1].to_string().as_bytes());
                [offset, len].concat()
            };
            let pairs: Vec<u8> = map.as_chunks::<2>().0.iter().flat_map(|two| pair(two)).collect();
            let len = map.as_chunks::<2>().0.iter().map(|two| usize::from(two[1])).sum();
            let real = record(b"GNU.sparse.size", size.as_bytes());
            ([pairs, real].concat(), vec![7; len])
        }
    };
    let archive = [
        header(b"x", b'x', records.len()),
        padded(records),
        header(b"sparse", b'0', data.len()),
        padded(data),
        vec![0; 1024],
    ];
    build(sealed(archive.concat()));
});
