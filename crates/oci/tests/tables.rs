//! Layers, and indexes made elsewhere, with as many places and rows as fit: what a whole read of
//! them takes of memory and processor time.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, time::Duration};

use burgeon_image::{ManifestLimits, builder::BuildOptions, catalog};
use burgeon_layer::{Stretch, TABLE_MAX, Table};
use burgeon_oci::{
    Documents, Found, ImageForm, Pull, ReadLayers, Source, Tags, Work, find_or_build, index,
};
use burgeon_source::{Access, Directory, registry::OciDigest};
use flate2::{Compress, Compression, Crc, FlushCompress};
use serde_json::Value;
use testkit::{OciLayout, Rng};

const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// The image of the layout in `folder`, in a store there, or the error.
fn found(folder: &Path, want: ImageForm<'_>) -> String {
    let source = Source::parse(&format!("oci-layout:{}", folder.display())).unwrap().unwrap();
    let own = Directory::create(folder.join("own")).unwrap();
    match with_work(folder, &own, |work| find_or_build(&own, &source, want, work)) {
        Ok(Found::Image(found)) => format!("{:?} {:?}", found.how, found.notes),
        Ok(Found::Ours(name)) => name.to_string(),
        Err(error) => error.to_string(),
    }
}

fn with_work<T>(folder: &Path, own: &Directory, what: impl FnOnce(&Work<'_>) -> T) -> T {
    let (access, options) = (Access::default(), BuildOptions::default());
    let tags = Tags { folder: &folder.join("tags"), pull: Pull::Newer };
    let documents = Documents::new(folder.join("documents"));
    what(&Work {
        access: &access,
        tags,
        documents: &documents,
        read: &ReadLayers::default(),
        spool: folder,
        own: Some(own),
        content: None,
        allocate: &|_, _, _| true,
        options: &options,
        fetching: &|_, _| (),
        building: &|_| (),
    })
}

/// The header of a regular file.
fn header(len: u64) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..4].copy_from_slice(b"file");
    header[124..135].copy_from_slice(format!("{len:011o}").as_bytes());
    header[156] = b'0';
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{:06o}\0", sum + 8 * 32).as_bytes());
    header
}

/// A file of random bytes that repeat at the farthest distance: after each 645 KB, a place needs
/// nearly the whole window of 32 KiB, which does not compress.
fn windows(parts: u64) -> Vec<u8> {
    let random = Rng::new(7).bytes(63 * 512);
    let part = random.repeat(20);
    let len = random.len() as u64 + parts * part.len() as u64;
    let (head, tail) = ([header(len), random].concat(), [0; 1024]);
    let mut compress = Compress::new(Compression::best(), false);
    let mut stored = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let mut add = |bytes: &[u8], flush| {
        let mut out = Vec::with_capacity(bytes.len() + 1000);
        compress.compress_vec(bytes, &mut out, flush).unwrap();
        out
    };
    stored.extend(add(&head, FlushCompress::Sync));
    // The first of these may refer to the head in another way than the others to each other.
    stored.extend(add(&part, FlushCompress::Sync));
    let again = add(&part, FlushCompress::Sync);
    stored.extend(again.repeat(parts as usize - 1));
    stored.extend(add(&tail, FlushCompress::Finish));
    let (mut sum, mut of_part) = (Crc::new(), Crc::new());
    sum.update(&head);
    of_part.update(&part);
    (0..parts).for_each(|_| sum.combine(&of_part));
    let mut of_tail = Crc::new();
    of_tail.update(&tail);
    sum.combine(&of_tail);
    stored.extend(sum.sum().to_le_bytes());
    stored.extend(sum.amount().to_le_bytes());
    stored
}

/// Few parts show that the layer is sound and has its places; with many, the windows exceed what
/// places account for.
#[test]
fn a_layer_of_windows_takes_a_bounded_amount_of_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, parts, said) in [("few", 200, "Fetched"), ("many", 3200, "MiB of memory")] {
        let layout = folder.path().join(name);
        let input = || {
            let layer = windows(parts);
            assert!(layer.len() < 16 << 20, "{name}: {}", layer.len());
            OciLayout::by_hand(&layout, None, &[(GZIP, layer)], |_| ()).unwrap();
            layout.clone()
        };
        let test = "a_layer_of_windows_takes_a_bounded_amount_of_memory";
        let taken = testkit::measure(test, name, input, |layout| {
            let said = found(layout, ImageForm::Any);
            let tables = fs::read_dir(layout.join("own/derived")).into_iter().flatten().flatten();
            let tables = tables.map(|table| table.metadata().unwrap().len()).sum::<u64>();
            format!("{said}, table of {tables} bytes")
        });
        let Some(taken) = taken else { continue };
        println!("{name}: {taken:?}");
        assert!(taken.said.contains(said), "{name}: {taken:?}");
        assert!(taken.peak_bytes < 256 << 20, "{name}: {taken:?}");
        if name == "few" {
            let len = taken.said.split(' ').rev().nth(1).unwrap().parse::<u64>().unwrap();
            assert!(len > 190 * 30_000, "windows are needed whole: {taken:?}");
        }
    }
}

/// Tables of an index: one with more rows than its length accounts for, one with as many as that.
#[test]
fn the_table_of_an_index_takes_a_bounded_amount_of_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, rows, said) in [("many", 5_500_000, "declares"), ("most", 900_000, "Built []")] {
        let layout = folder.path().join(name);
        let input = || {
            let layer = testkit::gzip(&[header(9000), vec![b'x'; 9216], vec![0; 1024]].concat(), 6);
            OciLayout::by_hand(&layout, None, &[(GZIP, layer)], |_| ()).unwrap();
            hostile_index(&layout, rows);
            layout.clone()
        };
        let test = "the_table_of_an_index_takes_a_bounded_amount_of_memory";
        let taken = testkit::measure(test, name, input, |layout| {
            let pinned = fs::read_to_string(layout.join("pinned")).unwrap();
            found(layout, ImageForm::Index(&pinned))
        });
        let Some(taken) = taken else { continue };
        println!("{name}: {taken:?}");
        assert!(taken.said.contains(said), "{name}: {taken:?}");
        assert!(taken.peak_bytes < 256 << 20, "{name}: {taken:?}");
        assert!(taken.cpu < Duration::from_secs(15), "{name}: {taken:?}");
    }
}

/// Puts an index of the image in `layout` beside it, with `rows` stretches in its table, and its
/// digest into the file `pinned`.
fn hostile_index(layout: &Path, rows: u64) {
    let publisher = Directory::create(layout.join("publisher")).unwrap();
    let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap().unwrap();
    let made = with_work(layout, &publisher, |work| index(&publisher, &source, true, work));
    let digest = made.unwrap().digest;
    let blob = |digest: &str| layout.join("blobs/sha256").join(&digest[7..]);
    let put = |bytes: &[u8]| {
        let digest = OciDigest::of(bytes).to_string();
        fs::write(blob(&digest), bytes).unwrap();
        digest
    };
    let mut document: Value = serde_json::from_slice(&fs::read(blob(&digest)).unwrap()).unwrap();
    let part =
        |n: usize| fs::read(blob(document["layers"][n]["digest"].as_str().unwrap())).unwrap();
    let mut table = Table::decode(&part(1)).unwrap();
    let stretch = |at| Stretch { at, offset: 0, len: 1, layer: 0 };
    (table.object_len, table.stretches) = (rows, (0..rows).map(stretch).collect());
    let table = table.encode().unwrap();
    assert!((table.len() as u64) < TABLE_MAX.min(64 << 10), "{}", table.len());
    // The manifest names its table by digest.
    let mut manifest =
        burgeon_image::Manifest::decode(&part(0), &ManifestLimits::default()).unwrap();
    manifest.objects = vec![burgeon_source::derived_object(&table).unwrap()];
    let (manifest, _) = manifest.encode(1).unwrap();
    for (n, bytes) in [&manifest, &table].into_iter().enumerate() {
        document["layers"][n]["digest"] = put(bytes).into();
        document["layers"][n]["size"] = bytes.len().into();
    }
    fs::write(layout.join("pinned"), put(document.to_string().as_bytes())).unwrap();
    assert!(catalog::list(&publisher).unwrap().len() == 1);
}
