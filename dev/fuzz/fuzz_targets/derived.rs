//! Any bytes are refused or give a table by which spans of layers are unpacked: to as many bytes as
//! it says, or not at all. The layers are there, and differ from its claims.

#![no_main]

use std::{io::Write, sync::LazyLock};

use burgeon_block::ByteRange;
use burgeon_fuzz::edits;
use burgeon_layer::{LayerCodec, Recorder, Stretch, Table, TableLayer};
use libfuzzer_sys::fuzz_target;

/// docs/format.md, "Derived objects".
const HEADER: usize = 96;
const ROWS_LEN: usize = 72;
const ROWS_STORED: usize = 80;

/// Layers, as they are stored; the rows of a sound table of them, and its windows.
type Base = ([Vec<u8>; 3], Vec<u8>, Vec<u8>);

static BASE: LazyLock<Base> = LazyLock::new(|| {
    let text: Vec<u8> = (0..2_500_000u32).map(|n| ((n / 3 % 251) ^ (n / 1000)) as u8).collect();
    let zstd = zstd::bulk::compress(&text[..50_000], 3).expect("memory");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).expect("memory");
    let stored = [gzip.finish().expect("memory"), zstd, text[..50_000].to_vec()];
    let kinds = [LayerCodec::Gzip, LayerCodec::Zstd, LayerCodec::Plain];
    let layer = |(stored, codec): (&Vec<u8>, LayerCodec)| {
        let mut recorder = Recorder::new(&stored[..], codec).expect("memory");
        std::io::copy(&mut recorder, &mut std::io::sink()).expect("a sound layer");
        let restarts = recorder.finish(stored.len() as u64).expect("a sound layer");
        TableLayer { digest: [0; 32], restarts }
    };
    let layers = stored.iter().zip(kinds).map(layer).collect();
    let stretch =
        |n: u64| Stretch { at: n * 8192, offset: n * 4000, len: 5000, layer: (n % 3) as u32 };
    let stretches = (0..10).map(stretch).collect();
    let table = Table { image: [0; 32], object_len: 100_000, layers, stretches };
    let bytes = table.encode().expect("a sound table");
    let len = bytes[ROWS_STORED..][..8].try_into().map(u64::from_le_bytes).expect("8 bytes");
    let (rows, windows) = bytes[HEADER..].split_at(len as usize);
    let rows = zstd::bulk::decompress(rows, 1 << 20).expect("a sound frame");
    (stored, rows, windows.to_vec())
});

/// A table of these rows and windows.
fn table(rows: &[u8], windows: &[u8]) -> Vec<u8> {
    let stored = zstd::bulk::compress(rows, 1).expect("memory");
    let mut bytes = b"BURGDERI\x01\0\0\0\x60\0\0\0".to_vec();
    bytes.resize(HEADER, 0);
    bytes[ROWS_LEN..][..8].copy_from_slice(&(rows.len() as u64).to_le_bytes());
    bytes[ROWS_STORED..][..8].copy_from_slice(&(stored.len() as u64).to_le_bytes());
    [&bytes[..], &stored, windows].concat()
}

fuzz_target!(|input: &[u8]| {
    let (layers, rows, windows) = &*BASE;
    let bytes = match input.split_first() {
        Some((0, raw)) => raw.to_vec(),
        Some((1, raw)) => table(raw, windows),
        Some((how, input)) => {
            let (mut rows, mut windows) = (rows.clone(), windows.clone());
            edits(if how % 2 == 0 { &mut rows } else { &mut windows }, input);
            table(&rows, &windows)
        }
        None => return,
    };
    let Ok(table) = Table::decode(&bytes) else { return };
    let all = ByteRange::new(0, table.object_len).expect("it begins at 0");
    for stretch in table.stretches(all) {
        let restarts = &table.layers[stretch.layer as usize].restarts;
        let span = restarts.span(stretch.offset).expect("stretches lie in their layer");
        assert!(span.unpacked.contains(stretch.offset));
        let (start, end) = (span.compressed.start() as usize, span.compressed.end() as usize);
        for stored in layers {
            let Some(compressed) = stored.get(start..end) else { continue };
            if let Ok(unpacked) = restarts.unpack(&span, compressed) {
                assert_eq!(unpacked.len() as u64, span.unpacked.len());
            }
        }
    }
});
