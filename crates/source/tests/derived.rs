//! Derived objects: a read from the middle of layers returns the same bytes as unpacking them
//! whole, and no damaged input changes that.

#![allow(clippy::unwrap_used)]

use std::{fs, io::Read, path::Path};

use burgeon_block::{BlockSource, ByteRange, ErrorKind, ObjectId, ObjectStore};
use burgeon_layer::{LayerCodec, Piece, Recorder, Restarts, Stretch, Table, TableLayer};
use burgeon_source::{
    Directory, LayersAt, Objects, References, derived_object, layer_object, origin_object,
    stored_layers_object,
};
use sha2::{Digest, Sha256};
use testkit::{Rng, gzip, like_programs};

fn recorded(stored: &[u8], codec: LayerCodec) -> (Vec<u8>, burgeon_block::Result<Restarts>) {
    let mut recorder = Recorder::new(stored, codec).unwrap();
    let mut unpacked = Vec::new();
    recorder.read_to_end(&mut unpacked).unwrap();
    (unpacked, recorder.finish(stored.len() as u64))
}

/// A layer: its unpacked bytes, its stored bytes, its codec.
type Layer = (Vec<u8>, Vec<u8>, LayerCodec);

fn layers(seed: u64, len: usize) -> Vec<Layer> {
    let plain = |n| like_programs(seed + n, len);
    let pieces = |bytes: &[u8], pack: &dyn Fn(&[u8]) -> Vec<u8>| {
        bytes.chunks(700_001).flat_map(pack).collect::<Vec<u8>>()
    };
    let mut layers: Vec<Layer> = vec![(plain(0), plain(0), LayerCodec::Plain)];
    for level in [0, 1, 6, 9] {
        layers.push((plain(1), gzip(&plain(1), level), LayerCodec::Gzip));
    }
    let members = pieces(&plain(2), &|part| gzip(part, 6));
    layers.push((plain(2), members, LayerCodec::Gzip));
    let frames = pieces(&plain(3), &|part| zstd::bulk::compress(part, 3).unwrap());
    // A skippable frame, such as one with a table of contents.
    let frames = [&frames[..], &[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]].concat();
    layers.push((plain(3), frames, LayerCodec::Zstd));
    let one = zstd::bulk::compress(&plain(4), 3).unwrap();
    layers.push((plain(4), one, LayerCodec::Zstd));
    layers
}

/// Writes the layer to the folder of blobs, under a digest made of its number.
fn put(folder: &Path, number: u8, stored: &[u8]) -> [u8; 32] {
    fs::create_dir_all(folder.join("blobs/sha256")).unwrap();
    fs::write(folder.join("blobs/sha256").join(format!("{number:02x}").repeat(32)), stored)
        .unwrap();
    [number; 32]
}

fn publish(store: &Directory, folder: &Path, table: &[u8]) -> ObjectId {
    let object = derived_object(table).unwrap();
    store.publish(&object, table).unwrap();
    let origin = LayersAt::Layout(folder.to_owned()).to_text().unwrap();
    store.publish(&origin_object(&object).unwrap(), origin.as_bytes()).unwrap();
    object
}

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end).unwrap()
}

#[test]
fn reads_from_the_middle_of_layers_return_the_original_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let store = Directory::create(folder.path().join("store")).unwrap();
    let mut rng = Rng::new(7);
    let all = layers(40, 9_000_000);
    let mut table = Table { image: [9; 32], object_len: 0, layers: vec![], stretches: vec![] };
    // The object: stretches of all layers in any order, with zeros between.
    let mut expected = Vec::new();
    for (number, (unpacked, stored, codec)) in (0u8..).zip(&all) {
        let (whole, restarts) = recorded(stored, *codec);
        assert!(whole == *unpacked, "layer {number}");
        let digest = put(folder.path(), number, stored);
        table.layers.push(TableLayer { digest, restarts: restarts.unwrap() });
    }
    for _ in 0..400 {
        expected.resize(expected.len() + rng.below(5000) as usize, 0);
        let layer = rng.below(all.len() as u64) as usize;
        let unpacked = &all[layer].0;
        let len = 1 + rng.below(300_000);
        let offset = rng.below(unpacked.len() as u64 - len);
        let at = expected.len() as u64;
        table.stretches.push(Stretch { at, offset, len: len as u32, layer: layer as u32 });
        expected.extend_from_slice(&unpacked[offset as usize..][..len as usize]);
    }
    expected.resize(expected.len() + 99, 0);
    table.object_len = expected.len() as u64;
    let bytes = table.encode().unwrap();
    assert_eq!(Table::decode(&bytes).unwrap(), table);
    let object = publish(&store, folder.path(), &bytes);
    let objects = Objects::new(store.clone(), References::Allow);
    let total = expected.len() as u64;
    for _ in 0..300 {
        let start = rng.below(total);
        let end = (start + rng.below(600_000)).min(total);
        let read = objects.read_blocking(&object, range(start, end)).unwrap();
        assert!(read == expected[start as usize..end as usize], "{start}..{end}");
    }
    // A span counts once, however many stretches use it.
    let stored: usize = all.iter().map(|(_, stored, _)| stored.len()).sum();
    assert!(objects.bytes_to_fetch(&object, range(0, total)) <= stored as u64);
    let beyond = objects.read_blocking(&object, range(total - 1, total + 1)).unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::Corrupt);
    // An image of another host may not refer to objects outside the store.
    let refusing = Objects::new(store.clone(), References::Refuse);
    let refused = refusing.read_blocking(&object, range(0, 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    // A table that does not match its digest is not used.
    let mut other = table.clone();
    other.stretches[0].offset += 1;
    store.publish(&object, &other.encode().unwrap()).unwrap();
    let objects = Objects::new(store.clone(), References::Allow);
    let error = objects.read_blocking(&object, range(0, 1)).unwrap_err();
    assert!(error.to_string().contains("does not match its digest"), "{error}");
    // A missing layer may come back; a different one is corrupt.
    let object = publish(&store, folder.path(), &bytes);
    fs::write(folder.path().join("blobs/sha256").join("01".repeat(32)), vec![0x1f; 10_000_000])
        .unwrap();
    fs::remove_file(folder.path().join("blobs/sha256").join("02".repeat(32))).unwrap();
    let objects = Objects::new(store, References::Allow);
    for (layer, kind) in [(1, ErrorKind::Corrupt), (2, ErrorKind::Unavailable)] {
        let stretch = table.stretches.iter().find(|stretch| stretch.layer == layer).unwrap();
        let error = objects.read_blocking(&object, range(stretch.at, stretch.at + 1)).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
}

#[test]
fn stored_layers_are_read_first_and_their_origin_only_when_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let store = Directory::create(folder.path().join("store")).unwrap();
    let unpacked = like_programs(5, 5_000_000);
    let stored = gzip(&unpacked, 6);
    let (_, restarts) = recorded(&stored, LayerCodec::Gzip);
    let digest = put(folder.path(), 1, &stored);
    let table = Table {
        image: [9; 32],
        object_len: unpacked.len() as u64,
        layers: vec![TableLayer { digest, restarts: restarts.unwrap() }],
        stretches: vec![Stretch { at: 0, offset: 0, len: unpacked.len() as u32, layer: 0 }],
    };
    let object = publish(&store, folder.path(), &table.encode().unwrap());
    let read = || {
        let objects = Objects::new(store.clone(), References::Allow);
        objects.read_blocking(&object, range(0, unpacked.len() as u64))
    };
    // Spans that are here are neither fetched again nor counted.
    let objects = Objects::new(store.clone(), References::Allow);
    let first = range(0, 1000);
    assert_eq!(objects.bytes_to_fetch(&object, first), 1000, "nothing is known of it yet");
    objects.read_blocking(&object, first).unwrap();
    assert_eq!(objects.bytes_to_fetch(&object, first), 0);
    let span = table.layers[0].restarts.span(0).unwrap();
    let beyond = range(span.unpacked.end() - 1, span.unpacked.end() + 1);
    let next = table.layers[0].restarts.span(span.unpacked.end()).unwrap();
    assert_eq!(objects.bytes_to_fetch(&object, beyond), next.compressed.len());
    objects.refuted(&object, first);
    assert_eq!(objects.bytes_to_fetch(&object, first), span.compressed.len());
    let layer = layer_object("here", &digest).unwrap();
    let list = |of: &ObjectId, layer: &ObjectId| {
        let list = stored_layers_object(of).unwrap();
        store.publish(&list, format!("{layer}\n").as_bytes()).unwrap();
    };
    list(&object, &layer);
    let mut damaged = stored.clone();
    damaged[stored.len() / 2..].fill(0);
    for (bytes, what) in [(&stored[..], "whole"), (&stored[..1000], "short"), (&damaged, "damaged")]
    {
        store.publish(&layer, bytes).unwrap();
        assert!(read().unwrap() == unpacked, "{what}");
    }
    // Damage that a digest detects, but unpacking does not.
    store.publish(&layer, &stored).unwrap();
    let objects = Objects::new(store.clone(), References::Allow);
    let all = range(0, unpacked.len() as u64);
    let plain = Table {
        object_len: 1000,
        layers: vec![TableLayer {
            digest: put(folder.path(), 2, &unpacked[..1000]),
            restarts: recorded(&unpacked[..1000], LayerCodec::Plain).1.unwrap(),
        }],
        stretches: vec![Stretch { at: 0, offset: 0, len: 1000, layer: 0 }],
        ..table
    };
    let plain = publish(&store, folder.path(), &plain.encode().unwrap());
    let second = layer_object("here", &[2; 32]).unwrap();
    store.publish(&second, &[0; 1000]).unwrap();
    list(&plain, &second);
    for expected in [&[0; 1000][..], &unpacked[..1000]] {
        assert_eq!(objects.read_blocking(&plain, range(0, 1000)).unwrap(), expected);
        objects.refuted(&plain, range(10, 20));
    }
    fs::remove_dir_all(folder.path().join("blobs")).unwrap();
    assert!(objects.read_blocking(&object, all).unwrap() == unpacked);
    store.publish(&layer, &damaged).unwrap();
    assert_eq!(read().unwrap_err().kind(), ErrorKind::Unavailable);
    store.publish(&layer, &stored).unwrap();
    assert!(read().unwrap() == unpacked);
}

/// Bytes that a read verifies have the identity that the table gives them; no others have one.
#[test]
fn only_ranges_that_are_verified_when_read_have_an_identity() {
    let folder = tempfile::tempdir().unwrap();
    let store = Directory::create(folder.path().join("store")).unwrap();
    let stored = gzip(&like_programs(5, 100_000), 6);
    let piece = Piece {
        stored: range(0, stored.len() as u64),
        skip: 0,
        len: 100_000,
        digest: Sha256::digest(like_programs(5, 100_000)).into(),
    };
    let (codec, len) = (LayerCodec::Gzip, stored.len() as u64);
    let listed = Restarts::of_pieces(codec, len, vec![piece]).unwrap();
    let digest = put(folder.path(), 1, &stored);
    let layers = [listed, recorded(&stored, codec).1.unwrap()];
    let table = Table {
        image: [9; 32],
        object_len: 200_000,
        layers: layers.map(|restarts| TableLayer { digest, restarts }).into(),
        stretches: [0, 1]
            .map(|n| Stretch { at: n * 100_000, offset: 0, len: 100_000, layer: n as u32 })
            .into(),
    };
    let object = publish(&store, folder.path(), &table.encode().unwrap());
    let objects = Objects::new(store.clone(), References::Allow);
    let identity = |objects: &Objects, object: &ObjectId, at: ByteRange| {
        burgeon_source::waiting(objects.identity(object, at))
    };
    let own = identity(&objects, &object, range(5, 5000)).unwrap();
    assert!(own.is_some() && own == table.identity(range(5, 5000)));
    let unverified = [range(100_000, 100_001), range(99_999, 100_001), range(199_999, 200_001)];
    for at in unverified {
        assert_eq!(identity(&objects, &object, at).unwrap(), None, "{at}");
    }
    let pack = ObjectId::new(format!("packs/{}", "0".repeat(64))).unwrap();
    assert_eq!(identity(&objects, &pack, range(0, 1)).unwrap(), None);
    let refusing = Objects::new(store, References::Refuse);
    let refused = identity(&refusing, &object, range(5, 5000)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
}

/// The digest of a layer that this host has from elsewhere does not give its bytes.
#[test]
fn a_stored_layer_is_read_only_for_images_whose_list_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = Directory::create(folder.path().join("store")).unwrap();
    let unpacked = like_programs(5, 100_000);
    let (_, restarts) = recorded(&unpacked, LayerCodec::Plain);
    let table = Table {
        image: [9; 32],
        object_len: unpacked.len() as u64,
        layers: vec![TableLayer { digest: [7; 32], restarts: restarts.unwrap() }],
        stretches: vec![Stretch { at: 0, offset: 0, len: unpacked.len() as u32, layer: 0 }],
    };
    let object = publish(&store, folder.path(), &table.encode().unwrap());
    let objects = Objects::new(store.clone(), References::Allow);
    let read = || objects.read_blocking(&object, range(0, unpacked.len() as u64));
    let layer = layer_object("elsewhere", &[7; 32]).unwrap();
    assert_ne!(layer, layer_object("here", &[7; 32]).unwrap());
    store.publish(&layer, &unpacked).unwrap();
    assert_eq!(read().unwrap_err().kind(), ErrorKind::Unavailable);
    // An image may be stored while it is read.
    let list = stored_layers_object(&object).unwrap();
    store.publish(&list, format!("{object}\n").as_bytes()).unwrap();
    assert_eq!(read().unwrap_err().kind(), ErrorKind::Unavailable, "it names no layer");
    store.publish(&list, format!("{layer}\n").as_bytes()).unwrap();
    assert!(read().unwrap() == unpacked);
}
