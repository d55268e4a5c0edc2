//! Any bytes are refused or are an archive that an image can be made of; nothing panics, and no
//! declared length is believed before there are bytes for it. Two archives are layers as well, and
//! what can be built of them can be described.

#![no_main]

use std::io::{Cursor, Read};

use burgeon_block::{ObjectId, Result};
use burgeon_fuzz::{Oblivion, options, seal};
use burgeon_image::{
    ChunkEntry,
    builder::{self, BuildOptions, Layer, LayerLimits, Layers, Origin},
};
use libfuzzer_sys::fuzz_target;

/// Headers of 512 bytes are long for a fuzzer: an input is a row of fields instead.
fn archive(mut input: &[u8]) -> Vec<u8> {
    const NAMES: [&[u8]; 16] = [
        b"a",
        b"a/b",
        b"b/",
        b"../a",
        b"/a",
        b"a/",
        b"./",
        b"b/c",
        b".wh.a",
        b"b/.wh.c",
        b".wh.b",
        b".wh..wh..opq",
        b"b/.wh..wh..opq",
        b".wh..",
        b"c",
        b"d",
    ];
    const KINDS: &[u8] = b"0123456SxgLKVZ";
    let mut archive = Vec::new();
    while let Some((head, rest)) = input.split_first_chunk::<4>() {
        let data_len = usize::from(head[3]).min(rest.len());
        let (data, rest) = rest.split_at(data_len);
        input = rest;
        let mut header = [0; 512];
        let name = NAMES[usize::from(head[0] & 15)];
        header[..name.len()].copy_from_slice(name);
        header[100..107].copy_from_slice(b"0000644");
        // Mostly the data's length, sometimes another one.
        let size = if head[0] & 0x80 != 0 { usize::from(head[2]) << 13 } else { data_len };
        header[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        header[156] = KINDS[usize::from(head[1]) % KINDS.len()];
        let link = NAMES[usize::from(head[2] & 15)];
        header[157..157 + link.len()].copy_from_slice(link);
        header[257..265].copy_from_slice(b"ustar\x0000");
        // A field of the header that the data overwrites: numbers and sparse maps.
        if head[0] & 0x40 != 0 {
            let at = 100 + usize::from(head[2]) * 3 / 2;
            let len = data_len.min(512 - at);
            header[at..at + len].copy_from_slice(&data[..len]);
        }
        archive.extend_from_slice(&header);
        archive.extend_from_slice(data);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    seal(&mut archive);
    archive
}

/// Builds and describes an image of two layers.
fn layers(layers: &[Vec<u8>; 2], options: &BuildOptions) {
    let all = || Layers::new(LayerLimits::default());
    let (of_headers, described) = (all(), all());
    let build = || {
        let layer = |bytes: &Vec<u8>| {
            let bytes = bytes.clone();
            let headers = of_headers.headers(&bytes[..])?;
            let open = || Ok(Box::new(Cursor::new(bytes)) as Box<dyn Read + Send>);
            Ok(Layer { headers, open: Box::new(open) })
        };
        let layers = layers.iter().map(layer).collect::<Result<Vec<_>>>()?;
        builder::from_layers(&Oblivion, "x", layers, options, &|_| ())
    };
    let describe = || {
        let layer =
            |(number, bytes): (u32, &Vec<u8>)| described.describe(&bytes[..], number, options);
        let layers = (0..).zip(layers).map(layer).collect::<Result<Vec<_>>>()?;
        let object = |_: &[Origin], _: &mut [ChunkEntry]| {
            ObjectId::new(format!("derived/{}", "0".repeat(64)))
        };
        builder::describe_layers(&Oblivion, "x", layers, options, &object)
    };
    match (build(), describe()) {
        (Ok(built), Ok(described)) => assert_eq!(built.image.inodes, described.image.inodes),
        (Err(built), Err(described)) => assert_eq!(built.kind(), described.kind()),
        (built, described) => panic!("{built:?}, but {described:?}"),
    }
}

fuzz_target!(|input: &[u8]| {
    let options = options();
    let bytes = match input.split_first() {
        Some((0, raw)) => raw.to_vec(),
        Some((1, rest)) => {
            let (first, second) = rest.split_at(rest.len() / 2);
            return layers(&[archive(first), archive(second)], &options);
        }
        Some((_, rest)) => archive(rest),
        None => return,
    };
    burgeon_fuzz::build(bytes);
});
