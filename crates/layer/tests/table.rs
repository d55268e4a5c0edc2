//! A layer read from the middle gives the same bytes as from the beginning, or an error, whatever
//! the table says.

#![allow(clippy::unwrap_used)]

use std::{fs, io::Read, path::Path};

use burgeon_block::{ByteRange, ErrorKind};
use burgeon_layer::{LayerCodec, Piece, Recorder, Restarts, Stretch, Table, TableLayer};
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use testkit::{Rng, gzip, gzip_flushed, like_programs};

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).unwrap()
}

fn recorded(stored: &[u8], codec: LayerCodec) -> (Vec<u8>, burgeon_block::Result<Restarts>) {
    let mut recorder = Recorder::new(stored, codec).unwrap();
    let mut unpacked = Vec::new();
    recorder.read_to_end(&mut unpacked).unwrap();
    (unpacked, recorder.finish(stored.len() as u64))
}

#[test]
fn spans_equal_the_unpacked_layer() {
    let plain = like_programs(40, 9_000_000);
    let parts = || plain.chunks(700_001);
    // A skippable frame, such as those that hold tables of contents.
    let passed_over = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
    let mut layers = vec![(plain.clone(), LayerCodec::Plain)];
    layers.extend([0, 1, 6, 9].map(|level| (gzip(&plain, level), LayerCodec::Gzip)));
    layers.push((parts().flat_map(|part| gzip(part, 6)).collect(), LayerCodec::Gzip));
    // Members with a place shortly before their end; the rest refers to data before the place.
    let ends = plain.chunks(600_000).map(|part| part.split_at(part.len() - 9_000));
    let ends = ends.flat_map(|(long, end)| gzip_flushed(&[long, end], 9));
    layers.push((ends.collect(), LayerCodec::Gzip));
    // A place followed by many empty blocks.
    let (long, end) = plain.split_at(600_000);
    let mut strung = vec![&[][..]; 40_000];
    (strung[0], strung[39_999]) = (long, end);
    let strung = gzip_flushed(&strung, 9);
    assert!(strung.len() > gzip(&plain, 9).len() + 150_000, "{}", strung.len());
    layers.push((strung, LayerCodec::Gzip));
    layers.push((parts().flat_map(zstd).chain(passed_over).collect(), LayerCodec::Zstd));
    layers.push((zstd(&plain), LayerCodec::Zstd));
    // Zeros pad the end to whole blocks, as gzip(1) accepts it.
    layers.push((gzip(&plain, 6).into_iter().chain([0; 100_000]).collect(), LayerCodec::Gzip));
    for (number, (stored, codec)) in layers.iter().enumerate() {
        let (whole, restarts) = recorded(stored, *codec);
        assert!(whole == plain, "{number}");
        let spans = check_spans(&restarts.unwrap(), stored, &plain, number as u64);
        // The single frame of zstd is a single span.
        assert!(if number == 9 { spans == 1 } else { spans >= 4 }, "{number}: {spans}");
    }
}

/// An empty block is 10 bits: a layer of 100 MB of them would take ten minutes.
#[test]
fn blocks_without_data_are_refused() {
    let head = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    // Four empty blocks of fixed codes.
    let four = (0..4).fold(0u64, |bits, n| bits | 0b010 << (10 * n));
    let blocks = four.to_le_bytes()[..5].repeat(100_000);
    let stored = [&head[..], &blocks].concat();
    let mut recorder = Recorder::new(&stored[..], LayerCodec::Gzip).unwrap();
    let error = recorder.read_to_end(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("blocks without data"), "{error}");
    // The same when it is read from the middle.
    let digest = Sha256::digest(b"a").into();
    let len = stored.len() as u64;
    let piece = Piece { stored: ByteRange::at(0, len).unwrap(), skip: 0, len: 1, digest };
    let restarts = Restarts::of_pieces(LayerCodec::Gzip, len, vec![piece]).unwrap();
    let error = restarts.unpack(&restarts.span(0).unwrap(), &stored).unwrap_err();
    assert!(error.to_string().contains("blocks without data"), "{error}");
}

/// Blocks, members and references of many lengths, near places and far from them.
#[test]
fn spans_of_random_gzip_equal_the_unpacked_layer() {
    for seed in 0..24 {
        let mut rng = Rng::new(seed);
        let (mut stored, mut plain) = (Vec::new(), Vec::new());
        for _ in 0..=rng.below(3) {
            let mut member = like_programs(seed, 1 + rng.below(1_500_000) as usize);
            // Repeats at about the largest distance that a block may refer to.
            for _ in 0..rng.below(40) {
                let back = [1, 300, 32_000, 32_767, 32_768, 33_000][rng.below(6) as usize];
                let len = (rng.below(60_000) as usize).min(member.len());
                let from = (rng.below(member.len() as u64) as usize).min(member.len() - len);
                for at in from.max(back)..from + len {
                    member[at] = member[at - back];
                }
            }
            let mut cuts: Vec<_> =
                (0..rng.below(30)).map(|_| rng.below(member.len() as u64) as usize).collect();
            cuts.extend([0, member.len()]);
            cuts.sort_unstable();
            let parts: Vec<_> = cuts.windows(2).map(|cut| &member[cut[0]..cut[1]]).collect();
            stored.extend(gzip_flushed(&parts, rng.below(10) as u32));
            plain.extend(member);
        }
        let (whole, restarts) = recorded(&stored, LayerCodec::Gzip);
        assert!(whole == plain, "{seed}");
        check_spans(&restarts.unwrap(), &stored, &plain, seed);
    }
}

/// Unpacks and checks each span alone; returns their number.
fn check_spans(restarts: &Restarts, stored: &[u8], plain: &[u8], number: u64) -> u32 {
    let (mut at, mut spans) = (0, 0);
    while let Some(span) = restarts.span(at) {
        assert_eq!((span.index, span.unpacked.start()), (spans, at), "{number}");
        let compressed = span.compressed.start() as usize..span.compressed.end() as usize;
        let unpacked = restarts.unpack(&span, &stored[compressed]).unwrap();
        assert!(unpacked == plain[at as usize..span.unpacked.end() as usize], "{number}, {at}");
        (at, spans) = (span.unpacked.end(), spans + 1);
    }
    assert_eq!(at, plain.len() as u64, "{number}");
    spans
}

#[test]
fn a_layer_that_cannot_be_read_lazily_is_refused() {
    let large = zstd::bulk::compress(&vec![7; 33 << 20], 1).unwrap();
    let (_, restarts) = recorded(&large, LayerCodec::Zstd);
    let error = restarts.unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("zstd:chunked"));
    // A truncated layer is a read error instead.
    let cut = [gzip(&like_programs(1, 100_000), 6), zstd(&like_programs(1, 100_000))];
    for (stored, codec) in cut.iter().zip([LayerCodec::Gzip, LayerCodec::Zstd]) {
        let mut recorder = Recorder::new(&stored[..stored.len() - 9], codec).unwrap();
        recorder.read_to_end(&mut Vec::new()).unwrap_err();
    }
}

#[test]
fn an_index_is_small() {
    let stored = gzip(&like_programs(5, 40_000_000), 6);
    let (_, restarts) = recorded(&stored, LayerCodec::Gzip);
    let layer = TableLayer { digest: [1; 32], restarts: restarts.unwrap() };
    let table = Table { image: [0; 32], object_len: 0, layers: vec![layer], stretches: vec![] };
    let len = table.encode().unwrap().len();
    assert!(len < stored.len() / 30, "{len} of {}", stored.len());
}

/// A table of two descriptions of one small layer, and the layer blob.
fn table() -> (Table, Vec<u8>) {
    let stored =
        [gzip(&like_programs(3, 700_000), 6), gzip(&like_programs(4, 2_700_000), 1)].concat();
    let (_, restarts) = recorded(&stored, LayerCodec::Gzip);
    let mut layers = vec![TableLayer { digest: [1; 32], restarts: restarts.unwrap() }];
    // The same bytes as pieces: the first member, and parts of the second.
    let (first, second) = (gzip(&like_programs(3, 700_000), 6), like_programs(4, 2_700_000));
    let piece = |stored: (usize, usize), skip: usize, bytes: &[u8]| Piece {
        stored: ByteRange::new(stored.0 as u64, stored.1 as u64).unwrap(),
        skip: skip as u32,
        len: bytes.len() as u32,
        digest: Sha256::digest(bytes).into(),
    };
    let (cut, end) = (first.len(), stored.len());
    let pieces = vec![
        piece((0, cut), 0, &like_programs(3, 700_000)),
        piece((cut, end), 9, &second[9..5009]),
        piece((cut, end), 600_000, &second[600_000..1_300_000]),
    ];
    let restarts = Restarts::of_pieces(LayerCodec::Gzip, end as u64, pieces).unwrap();
    layers.push(TableLayer { digest: [2; 32], restarts });
    let stretch = |n: u64| Stretch {
        at: n * 8192,
        offset: n % 25 * 50_000,
        len: 6000,
        layer: (n / 25) as u32,
    };
    let stretches = (0..36).map(stretch).collect();
    (Table { image: [7; 32], object_len: 300_000, layers, stretches }, stored)
}

#[test]
fn tables_round_trip_and_other_versions_are_refused() {
    let (table, _) = table();
    let bytes = table.encode().unwrap();
    assert_eq!(Table::decode(&bytes).unwrap(), table);
    let kind = |at: usize, byte: u8| {
        let mut other = bytes.clone();
        other[at] = byte;
        Table::decode(&other).unwrap_err().kind()
    };
    assert_eq!(kind(0, b'x'), ErrorKind::Corrupt);
    assert_eq!(kind(8, 2), ErrorKind::UnsupportedFormat);
    assert_eq!(kind(32, 1), ErrorKind::UnsupportedFormat);
    for len in [0, 50, 95, 96, 200, bytes.len() - 1] {
        assert_eq!(Table::decode(&bytes[..len]).unwrap_err().kind(), ErrorKind::Corrupt, "{len}");
    }
    let mut far = table.clone();
    far.stretches[35].offset = 1_400_001;
    assert!(Table::decode(&far.encode().unwrap()).is_err());
    let mut beyond = table;
    beyond.object_len = 292_000;
    assert!(Table::decode(&beyond.encode().unwrap()).is_err());
}

/// Two layers that have most of their pieces in common, at other offsets, as two versions of an
/// image have them.
#[test]
fn a_range_of_the_same_parts_has_the_same_identity_in_every_table() {
    let digest = |n: u8| -> [u8; 32] { Sha256::digest([n]).into() };
    // Pieces of these lengths, with their digests.
    let layer = |pieces: &[(u32, u8)]| {
        let mut at = 0;
        let pieces = pieces.iter().map(|(len, n)| {
            let stored = ByteRange::at(at, 100).unwrap();
            at += 100;
            Piece { stored, skip: 0, len: *len, digest: digest(*n) }
        });
        let restarts = Restarts::of_pieces(LayerCodec::Gzip, 10_000, pieces.collect()).unwrap();
        TableLayer { digest: [1; 32], restarts }
    };
    let made = |layers, stretches: &[(u64, u64, u32, u32)]| {
        let stretch = |(at, offset, len, layer): &(u64, u64, u32, u32)| Stretch {
            at: *at,
            offset: *offset,
            len: *len,
            layer: *layer,
        };
        let stretches = stretches.iter().map(stretch).collect();
        Table { image: [7; 32], object_len: 1 << 30, layers, stretches }
    };
    let range = |start, len| ByteRange::at(start, len).unwrap();
    // Chunks of 16 KiB: three pieces, zeros between; then a window of a fourth.
    let one = made(
        vec![layer(&[(3000, 1), (5000, 2), (200, 3), (60_000, 4)])],
        &[(0, 0, 3000, 0), (4096, 3000, 5200, 0), (16384, 18_200, 16_384, 0)],
    );
    let other = made(
        vec![
            layer(&[(9, 9)]),
            layer(&[(77, 8), (3000, 1), (70, 7), (5000, 2), (200, 3), (60_000, 4)]),
        ],
        &[
            (0, 0, 9, 0),
            (32_768, 77, 3000, 1),
            (36_864, 3147, 5000, 1),
            (41_864, 8147, 200, 1),
            (65_536, 18_347, 16_384, 1),
        ],
    );
    let identity = |table: &Table, start, len| table.identity(range(start, len)).unwrap();
    assert_eq!(identity(&one, 0, 16384), identity(&other, 32_768, 16384));
    assert_eq!(identity(&one, 16384, 16384), identity(&other, 65_536, 16384));
    assert_ne!(identity(&one, 0, 16384), identity(&one, 16384, 16384));
    // Its length, and each number and digest of a part, count.
    assert_ne!(identity(&one, 0, 16384), identity(&one, 0, 12288));
    assert_ne!(identity(&one, 1 << 20, 4096), identity(&one, 1 << 20, 8192), "zeros");
    let changes: [&dyn Fn(&mut Table); 5] = [
        &|table| table.layers = vec![layer(&[(3000, 1), (5000, 5), (200, 3), (60_000, 4)])],
        &|table| table.layers = vec![layer(&[(3000, 1), (4999, 2), (201, 3), (60_000, 4)])],
        &|table| table.stretches[1].at += 1,
        &|table| table.stretches[1].offset += 1,
        &|table| table.stretches[1].len -= 1,
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut changed = one.clone();
        change(&mut changed);
        assert_ne!(identity(&changed, 0, 16384), identity(&one, 0, 16384), "{number}");
        assert_eq!(identity(&changed, 16384, 16384), identity(&one, 16384, 16384), "{number}");
    }
    let mut window = one.clone();
    window.stretches[2].offset += 1;
    assert_ne!(identity(&window, 16384, 16384), identity(&one, 16384, 16384));
    // Bytes of a layer that was read as a whole have no digests here.
    let (both, _) = table();
    assert!(both.identity(range(0, 4096)).is_none());
    assert!(both.identity(range(25 * 8192, 4096)).is_some());
    assert!(both.identity(range(24 * 8192, 16384)).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// With any table, a span of an existing layer unpacks to its stated length, or to an error.
    #[test]
    fn no_table_does_harm(edits in prop::collection::vec((any::<u16>(), any::<u8>()), 1..6)) {
        let (table, stored) = table();
        let sound = table.encode().unwrap();
        // docs/format.md, "Derived objects".
        let rows_stored = u64::from_le_bytes(sound[80..88].try_into().unwrap()) as usize;
        let mut rows = zstd::bulk::decompress(&sound[96..96 + rows_stored], 1 << 20).unwrap();
        for (at, byte) in edits {
            let at = usize::from(at) % rows.len();
            rows[at] = byte;
        }
        let packed = zstd(&rows);
        let mut bytes = sound[..96].to_vec();
        bytes[80..88].copy_from_slice(&(packed.len() as u64).to_le_bytes());
        bytes.extend(packed);
        bytes.extend_from_slice(&sound[96 + rows_stored..]);
        let Ok(table) = Table::decode(&bytes) else { return Ok(()) };
        for stretch in &table.stretches {
            let restarts = &table.layers[stretch.layer as usize].restarts;
            let span = restarts.span(stretch.offset).expect("stretches lie in their layer");
            prop_assert!(span.compressed.len() <= 32 << 20 && span.unpacked.len() <= 32 << 20);
            let (start, end) = (span.compressed.start() as usize, span.compressed.end() as usize);
            let Some(compressed) = stored.get(start..end) else { continue };
            if let Ok(unpacked) = restarts.unpack(&span, compressed) {
                prop_assert_eq!(unpacked.len() as u64, span.unpacked.len());
            }
        }
    }
}

/// Millions of references to one byte compress to almost nothing.
#[test]
fn a_small_table_declares_no_huge_one() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("table-bomb");
    let input = || {
        let (_, restarts) = recorded(b"x", LayerCodec::Plain);
        let count = 5_500_000;
        let stretch = |at| Stretch { at, offset: 0, len: 1, layer: 0 };
        let table = Table {
            image: [0; 32],
            object_len: count,
            layers: vec![TableLayer { digest: [0; 32], restarts: restarts.unwrap() }],
            stretches: (0..count).map(stretch).collect(),
        };
        let bytes = table.encode().unwrap();
        assert!(bytes.len() < 64 << 10, "{}", bytes.len());
        fs::write(&path, bytes).unwrap();
        path.clone()
    };
    let test = "a_small_table_declares_no_huge_one";
    let measured = testkit::measure(test, "table", input, |path| {
        match Table::decode(&fs::read(path).unwrap()) {
            Ok(table) => format!("{} stretches", table.stretches.len()),
            Err(error) => error.to_string(),
        }
    });
    let Some(measured) = measured else { return };
    fs::remove_file(&path).unwrap();
    println!("{measured:?}");
    assert!(measured.said.contains("declares"), "{measured:?}");
    assert!(measured.peak_bytes < 256 << 20, "{measured:?}");
}
