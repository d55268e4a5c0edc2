//! Images of layers: upper layers hide lower ones, and nothing leaves the tree.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{
    collections::HashSet,
    fs,
    io::{Cursor, Read},
    sync::Mutex,
};

use burgeon_block::{Digest, Error, ErrorKind, ObjectId, Result};
use burgeon_image::{
    ChunkEntry, Codec, Manifest, ManifestLimits, Wanted,
    builder::{self, BuildReport, FilePart, Layer, LayerLimits, Layers, Listed, Origin},
};

use burgeon_btrfs::FileExtent;
use burgeon_source::Directory;
use common::*;
use testkit::Rng;

/// A tar header and its data.
fn entry(name: &str, kind: u8, link: &str, data: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(if kind == b'5' { b"0000755" } else { b"0000644" });
    for (at, len) in [(108, 7), (116, 7), (136, 11)] {
        header[at..at + len].fill(b'0');
    }
    header[124..135].copy_from_slice(format!("{:011o}", data.len()).as_bytes());
    header[156] = kind;
    header[157..157 + link.len()].copy_from_slice(link.as_bytes());
    header[257..263].copy_from_slice(b"ustar\0");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
    header[154] = 0;
    header.extend_from_slice(data);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

fn file(name: &str, data: &str) -> Vec<u8> {
    entry(name, b'0', "", data.as_bytes())
}

fn folder(name: &str) -> Vec<u8> {
    entry(name, b'5', "", b"")
}

fn link(name: &str, to: &str) -> Vec<u8> {
    entry(name, b'1', to, b"")
}

fn symlink(name: &str, to: &str) -> Vec<u8> {
    entry(name, b'2', to, b"")
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

fn build_layers(layers: &[Vec<u8>]) -> Result<(tempfile::TempDir, Vec<String>)> {
    let (folder, store) = store();
    let all = Layers::new(LayerLimits::default());
    let mut built = Vec::new();
    for bytes in layers {
        let headers = all.headers(&bytes[..])?;
        let bytes = bytes.clone();
        let open = move || -> Result<Box<dyn Read + Send>> { Ok(Box::new(Cursor::new(bytes))) };
        built.push(Layer { headers, open: Box::new(open) });
    }
    let report = builder::from_layers(&store, "layers", built, &options(), &|_| ())?;
    let manifest: Manifest = load(&store, &report);
    let data = data(&store, &manifest);
    Ok((folder, shown(&manifest, &data)))
}

/// The same tree from a description of the layers, whose data stays in them.
fn describe_layers(layers: &[Vec<u8>]) -> Result<(Manifest, Vec<u8>)> {
    let (_folder, store) = store();
    let all = Layers::new(LayerLimits::default());
    let described = (0..).zip(layers);
    let described = described.map(|(number, bytes)| all.describe(&bytes[..], number, &options()));
    let data = Mutex::default();
    let object = |origins: &[Origin], chunks: &mut [ChunkEntry]| {
        let len = chunks.iter().map(ChunkEntry::len).sum::<u64>();
        let mut bytes = vec![0; len as usize];
        for Origin { at, layer, offset, len } in origins.iter().copied() {
            let (to, from, len) = (at as usize, offset as usize, len as usize);
            bytes[to..to + len].copy_from_slice(&layers[layer as usize][from..from + len]);
        }
        assert!(origins.is_sorted_by_key(|origin| origin.at));
        *data.lock().unwrap() = bytes;
        ObjectId::new(format!("derived/{}", "0".repeat(64)))
    };
    let described = described.collect::<Result<Vec<_>>>()?;
    let report = builder::describe_layers(&store, "layers", described, &options(), &object)?;
    let manifest: Manifest = load(&store, &report);
    manifest.validate(&ManifestLimits::default())?;
    let (data, mut at) = (data.into_inner().unwrap(), 0);
    for chunk in &manifest.chunks {
        let len = chunk.len() as usize;
        assert_eq!(Digest::of(&data[at..at + len]), chunk.digest);
        at += len;
    }
    let checksum = |block| manifest.checksum.of(block).to_le_bytes();
    let checksums = data.chunks(4096).flat_map(|block| checksum(block)[..4].to_vec());
    assert!(checksums.eq(manifest.block_checksums.iter().copied()));
    Ok((manifest, data))
}

fn shown(manifest: &Manifest, data: &[u8]) -> Vec<String> {
    let shown = paths(&manifest.tree).into_iter().map(|(path, number)| {
        let inode = &manifest.tree.inodes[number as usize];
        let path = String::from_utf8(path).unwrap();
        match inode.mode & 0o170000 {
            0o040000 => format!("{path}/"),
            _ => {
                let content = content(manifest, data, inode);
                format!("{path}={}", String::from_utf8(content).unwrap())
            }
        }
    });
    let mut shown: Vec<_> = shown.filter(|path| !path.is_empty() && path != "/").collect();
    shown.sort();
    shown
}

#[track_caller]
fn gives(layers: &[&[Vec<u8>]], expected: &[&str]) {
    let layers: Vec<_> = layers.iter().map(|entries| archive(entries)).collect();
    assert_eq!(build_layers(&layers).unwrap().1, expected);
    let (manifest, data) = describe_layers(&layers).unwrap();
    assert_eq!(shown(&manifest, &data), expected);
}

#[track_caller]
fn refuses(layers: &[&[Vec<u8>]], said: &str) {
    let layers: Vec<_> = layers.iter().map(|entries| archive(entries)).collect();
    let error = build_layers(&layers).map(|(_, shown)| shown).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains(said), "{error}");
    let error = describe_layers(&layers).map(|_| ()).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains(said), "{error}");
}

#[test]
fn whiteouts_remove_only_entries_of_lower_layers() {
    let below = [folder("d"), file("d/a", "1"), file("d/b", "1"), file("x", "1")];
    gives(&[&below, &[file(".wh.x", ""), file("d/.wh.a", "")]], &["d/", "d/b=1"]);
    gives(&[&below, &[file(".wh.d", "")]], &["x=1"]);
    // It removes nothing of its own layer, wherever it stands.
    for own in [[file("d/.wh.a", ""), file("d/a", "2")], [file("d/a", "2"), file("d/.wh.a", "")]] {
        gives(&[&below, &own], &["d/", "d/a=2", "d/b=1", "x=1"]);
    }
    let opaque = [file("d/c", "2"), file("d/.wh..wh..opq", ""), file("d/b", "2")];
    gives(&[&below, &opaque], &["d/", "d/b=2", "d/c=2", "x=1"]);
    gives(&[&below, &[file(".wh..wh..opq", ""), file("y", "2")]], &["y=2"]);
    // A whiteout of a missing name is allowed; remains of an old driver are ignored.
    let foreign = [file(".wh.none", ""), file("no/.wh.x", ""), file(".wh..wh.plnk/1.2", "z")];
    gives(&[&below, &foreign], &["d/", "d/a=1", "d/b=1", "x=1"]);
    gives(&[&below, &[file(".wh.d", "")], &[file("d/new", "3")]], &["d/", "d/new=3", "x=1"]);
}

#[test]
fn types_change_and_links_work_across_layers() {
    let below = [folder("d"), file("d/a", "1"), file("f", "1"), symlink("s", "d")];
    gives(&[&below, &[file("d", "2")]], &["d=2", "f=1", "s=d"]);
    gives(&[&below, &[folder("f"), file("f/x", "2")]], &["d/", "d/a=1", "f/", "f/x=2", "s=d"]);
    gives(&[&below, &[folder("s"), file("s/x", "2")]], &["d/", "d/a=1", "f=1", "s/", "s/x=2"]);
    gives(&[&below, &[file("s/x", "2")]], &["d/", "d/a=1", "d/x=2", "f=1", "s=d"]);
    gives(&[&below, &[link("l", "s/a")]], &["d/", "d/a=1", "f=1", "l=1", "s=d"]);
    // The other name keeps its content.
    gives(&[&[file("a", "1"), link("b", "a")], &[file("a", "2")]], &["a=2", "b=1"]);
    gives(&[&[file("a", "1")], &[link("b", "a")], &[file(".wh.a", "")]], &["b=1"]);
    // Of two entries of one layer the later one counts; an empty image is valid.
    gives(&[&[file("a", "1"), file("a", "2")]], &["a=2"]);
    gives(&[&[], &[]], &[]);
}

/// Go writes non-ASCII names so that the truncated name in the header ends like a folder's.
#[test]
fn a_name_truncated_in_the_header_is_not_a_directory() {
    let record = entry("x", b'x', "", "17 path=names/é\n".as_bytes());
    gives(&[&[record, file("names/", "1")]], &["names/", "names/é=1"]);
    gives(&[&[file("names/", "")]], &["names/"]);
}

#[test]
fn nothing_leaves_the_tree() {
    for name in ["../x", "/x", "a/../../x", "", &"n".repeat(100)[..0]] {
        refuses(&[&[file(name, "")]], "not a safe name");
    }
    for name in [".wh.", ".wh..", ".wh...", "d/.wh."] {
        refuses(&[&[folder("d"), file("d/a", "")], &[file(name, "")]], "removes no valid name");
    }
    refuses(&[&[file(".wh.x/y", "")]], "not a safe name");
    refuses(&[&[file(".", "x")]], "replaces /");
    refuses(&[&[file("a", "")], &[file("a/b", "")]], "not a directory");
    refuses(&[&[link("a", "b")]], "hard link");
    refuses(&[&[folder("d"), link("a", "d")]], "hard link");
    refuses(&[&[symlink("a", "b"), symlink("b", "a")], &[file("a/x", "")]], "not a directory");
    refuses(&[&[entry("a", b'Y', "", b"")]], "unknown");
    // A symlink upwards ends at the root of the tree.
    let up = [symlink("up", "../../../.."), symlink("root", "/")];
    let through = [file("up/a", "1"), file("root/b", "1"), link("c", "up/root/up/a")];
    gives(&[&up, &through], &["a=1", "b=1", "c=1", "root=/", "up=../../../.."]);
}

#[test]
fn directory_depth_is_limited() {
    // GNU's encoding of long names and targets.
    let long = |kind: u8, text: &str| entry("././@LongLink", kind, "", text.as_bytes());
    let deep = "d/".repeat(2000);
    let below = [long(b'L', &deep), folder("x"), long(b'K', &deep), symlink("deep", "x")];
    let deeper = |count: usize| folder(&format!("deep/{}", "e/".repeat(count)));
    build_layers(&[archive(&below), archive(&[deeper(45)])]).unwrap();
    let far =
        [symlink("deep/far", "e/".repeat(45).trim_end_matches('/')), folder("deep/far/f/g/h/i/j")];
    refuses(&[&below, &[deeper(45)], &far], "deeper than");
    let long_name = [long(b'L', &"d/".repeat(2049)), folder("x")];
    refuses(&[&long_name], "a path in the archive has 4098 bytes, above the limit of 4095");
}

#[test]
fn every_limit_stops_the_work() {
    let limits = LayerLimits { entries: 10, names: 1000, unpacked: 1 << 20 };
    let headers = |bytes: &mut dyn Read| -> Result<()> {
        let layers = Layers::new(limits);
        layers.headers(bytes).map(drop)
    };
    let over = |error: Error, said: &str| {
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains(said), "{error}");
    };
    let many: Vec<_> = (0..11).map(|n| file(&n.to_string(), "")).collect();
    over(headers(&mut &archive(&many)[..]).unwrap_err(), "more than 10 files");
    let long: Vec<_> = (0..10).map(|n| symlink(&format!("{n}{}", "x".repeat(90)), "y")).collect();
    headers(&mut &archive(&long)[..]).unwrap();
    let long: Vec<_> = (0..9).map(|n| symlink(&n.to_string(), &"y".repeat(99))).collect();
    headers(&mut &archive(&long)[..]).unwrap();
    let long: Vec<_> =
        (0..10).map(|n| symlink(&format!("{n}{}", "x".repeat(80)), &"y".repeat(80))).collect();
    over(headers(&mut &archive(&long)[..]).unwrap_err(), "bytes of names");
    // A few bytes may unpack to endless data.
    let mut bomb = entry("zeros", b'0', "", b"");
    bomb[124..135].copy_from_slice(b"77777777777");
    bomb[148..156].fill(b' ');
    let sum: u32 = bomb.iter().map(|byte| u32::from(*byte)).sum();
    bomb[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
    bomb[154] = 0;
    over(headers(&mut bomb.as_slice().chain(std::io::repeat(0))).unwrap_err(), "bytes, unpacked");
    // Several layers share the limits.
    let layers = Layers::new(limits);
    layers.headers(&archive(&many[..6])[..]).unwrap();
    over(layers.headers(&archive(&many[..6])[..]).map(drop).unwrap_err(), "more than 10 files");
}

#[test]
fn a_layer_that_differs_on_the_second_read_is_refused() {
    let (_folder, store) = store();
    let first = archive(&[file("a", "1"), file("b", "2")]);
    let headers = Layers::new(LayerLimits::default()).headers(&first[..]).unwrap();
    let other = archive(&[file("a", "1")]);
    let open = move || -> Result<Box<dyn Read + Send>> { Ok(Box::new(Cursor::new(other))) };
    let layers = vec![Layer { headers, open: Box::new(open) }];
    let error = builder::from_layers(&store, "x", layers, &options(), &|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(burgeon_image::catalog::resolve(&store, "x").is_err());
}

#[test]
fn a_description_has_the_same_tree_whatever_whiteouts_remove() {
    for seed in 0..6 {
        let mut rng = Rng::new(seed);
        let mut layers = Vec::new();
        for layer in 0..4 {
            let mut entries = Vec::new();
            for _ in 0..rng.below(60) {
                let name = format!("f{}", rng.below(80));
                // Inline, in a group, alone, of several chunks; some of them the same.
                let len = *rng.pick(&[10, 5000, 70_000, 262_144, 600_000]);
                let len = len + if rng.below(2) == 0 { 0 } else { rng.below(3000) as usize };
                let data = Rng::new(rng.below(30)).bytes(len);
                entries.push(match rng.below(4) {
                    0 if layer > 0 => entry(&format!(".wh.{name}"), b'0', "", b""),
                    _ => entry(&name, b'0', "", &data),
                });
            }
            layers.push(archive(&entries));
        }
        let (manifest, data) = describe_layers(&layers).unwrap();
        let all = Layers::new(LayerLimits::default());
        let built = layers.iter().map(|bytes| {
            let headers = all.headers(&bytes[..]).unwrap();
            let bytes = bytes.clone();
            let open = move || -> Result<Box<dyn Read + Send>> { Ok(Box::new(Cursor::new(bytes))) };
            Layer { headers, open: Box::new(open) }
        });
        let (_folder, store) = store();
        let built = built.collect();
        let report = builder::from_layers(&store, "x", built, &options(), &|_| ()).unwrap();
        let expected: Manifest = load(&store, &report);
        let expected_data = common::data(&store, &expected);
        let tree = |manifest: &Manifest, data: &[u8]| {
            let files = paths(&manifest.tree).into_iter();
            let content = |number| content(manifest, data, &manifest.tree.inodes[number as usize]);
            files.skip(1).map(|(path, number)| (path, content(number))).collect::<Vec<_>>()
        };
        assert!(tree(&manifest, &data) == tree(&expected, &expected_data), "{seed}");
        assert!(!tree(&manifest, &data).is_empty());
        // Every chunk is needed by a file.
        let starts = manifest.chunk_addresses();
        for (start, end) in starts.iter().zip(&starts[1..]) {
            let mut extents = manifest.tree.extents.iter();
            let needs = |e: &FileExtent| e.address < *end && e.address + e.len > *start;
            assert!(extents.any(needs), "{seed}");
        }
    }
}

/// A file of a table of contents with these parts.
fn listed(path: &str, size: u64, parts: &[(u64, u32, u64)]) -> Listed {
    let digest = |offset| *Digest::of(&u64::to_le_bytes(offset)).as_bytes();
    let part = |&(at, len, offset)| FilePart { at, len, offset, digest: digest(offset) };
    let parts = parts.iter().map(part).collect();
    Listed { path: path.into(), kind: b'0', mode: 0o644, size, parts, ..Listed::default() }
}

/// The image of a listed layer whose unpacked bytes are `bytes`, below an archive.
fn list_layers(files: &[Listed], bytes: &[u8], above: &[u8]) -> Result<(Manifest, Vec<u8>)> {
    let (_folder, store) = store();
    let (report, data) = list_layers_in(&store, files, bytes, above)?;
    Ok((load(&store, &report), data))
}

/// The same in `store`.
fn list_layers_in(
    store: &Directory,
    files: &[Listed],
    bytes: &[u8],
    above: &[u8],
) -> Result<(BuildReport, Vec<u8>)> {
    let all = Layers::new(LayerLimits { unpacked: 40_000_000, ..LayerLimits::default() });
    let layers = vec![all.list(files, 0, &options())?, all.describe(above, 1, &options())?];
    let data = Mutex::default();
    let object = |origins: &[Origin], chunks: &mut [ChunkEntry]| {
        let len = chunks.iter().map(ChunkEntry::len).sum::<u64>();
        let mut object = vec![0; len as usize];
        for Origin { at, layer, offset, len } in origins.iter().copied() {
            let (to, from, len) = (at as usize, offset as usize, len as usize);
            object[to..to + len].copy_from_slice(&[bytes, above][layer as usize][from..from + len]);
        }
        assert!(origins.is_sorted_by_key(|origin| origin.at));
        *data.lock().unwrap() = object;
        ObjectId::new(format!("derived/{}", "0".repeat(64)))
    };
    let report = builder::describe_layers(store, "listed", layers, &options(), &object)?;
    Ok((report, data.into_inner().unwrap()))
}

#[test]
fn a_listed_layer_is_placed_without_reading_it() {
    let bytes = Rng::new(3).bytes(1_500_000);
    let files = [
        listed("small", 9, &[(0, 9, 100)]),
        listed("large", 600_000, &[(0, 250_001, 200_000), (250_001, 349_999, 900_000)]),
        // Holes at the beginning, in the middle and at the end.
        listed("sparse", 4 << 20, &[(300_000, 5, 1000), ((2 << 20) - 1, 2, 2000)]),
        listed("hole", 1 << 20, &[]),
        listed("empty", 0, &[]),
        listed("same", 700, &[(0, 700, 5)]),
        listed("again", 700, &[(0, 700, 5)]),
        listed("similar", 701, &[(0, 700, 5)]),
        listed("gone", 500_000, &[(0, 500_000, 0)]),
    ];
    let above = archive(&[file(".wh.gone", ""), file("above", &"x".repeat(5000))]);
    let (manifest, data) = list_layers(&files, &bytes, &above).unwrap();
    assert!(manifest.lacks_checksums());
    let at = |path: &str| paths(&manifest.tree).into_iter().find(|(p, _)| p == path.as_bytes());
    let inode = |path: &str| &manifest.tree.inodes[at(path).unwrap().1 as usize];
    for file in &files[..8] {
        let path = std::str::from_utf8(&file.path).unwrap();
        let mut expected = vec![0; file.size as usize];
        for FilePart { at, len, offset, .. } in file.parts.iter().copied() {
            let (at, offset, len) = (at as usize, offset as usize, len as usize);
            expected[at..at + len].copy_from_slice(&bytes[offset..offset + len]);
        }
        assert!(content(&manifest, &data, inode(path)) == expected, "{path}");
    }
    assert!(content(&manifest, &data, inode("above")) == "x".repeat(5000).into_bytes());
    assert!(at("gone").is_none());
    let extents = |path: &str| manifest.tree.extents_of(inode(path)).to_vec();
    assert_eq!(extents("same"), extents("again"), "one content, one address");
    assert_ne!(extents("same"), extents("similar"));
    assert!(inode("large").nodatasum && inode("above").nodatasum && !inode("empty").nodatasum);
    // The large file, gaps around sparse data, three of the small files, and the upper layer; no
    // removed files.
    assert!(data.len() < 2_000_000, "{}", data.len());
}

#[test]
fn an_image_of_lists_gets_the_checksums_that_a_complete_copy_gives() {
    let (folder, store) = store();
    let bytes = Rng::new(4).bytes(200_000);
    let files = [listed("file", 150_000, &[(0, 150_000, 1000)])];
    let (report, mut data) = list_layers_in(&store, &files, &bytes, &archive(&[])).unwrap();
    let manifest: Manifest = load(&store, &report);
    data.resize(manifest.data_range().len() as usize, 0);
    let sums: Vec<u8> = data
        .chunks(4096)
        .flat_map(|block| {
            manifest.checksum.of(block).to_le_bytes()[..manifest.checksum.size()].to_vec()
        })
        .collect();
    let path = folder.path().join("sums");
    let prepare = |sums: Option<&[u8]>, digest: &Digest| {
        let checksums = sums.map(|sums| {
            fs::write(&path, sums).unwrap();
            fs::File::open(&path).unwrap()
        });
        let wanted = Wanted { checksums, ..Wanted::default() };
        let limits = burgeon_image::ManifestLimits::default();
        burgeon_image::prepare(&store, digest, folder.path(), wanted, &limits, |_| {}, || {})
    };
    let seed_has = |sums: &[u8]| {
        let seed = fs::read(folder.path().join("seed")).unwrap();
        seed.windows(sums.len()).any(|window| window == sums)
    };
    let digest = report.image.digest().unwrap();
    prepare(None, &digest).unwrap();
    assert!(!seed_has(&sums[..64]));
    prepare(Some(&sums), &digest).unwrap();
    assert!(seed_has(&sums[..64]), "btrfs keeps the checksums of adjacent blocks together");
    let map = burgeon_image::AddressMap::open(&folder.path().join("map")).unwrap();
    assert!(map.lacks_checksums(), "the server goes on to verify chunks");

    let refused = |sums: &[u8], digest: &Digest| prepare(Some(sums), digest).unwrap_err().kind();
    assert_eq!(refused(&sums[1..], &digest), ErrorKind::Invalid);
    assert_eq!(refused(&[&sums[..], &[0; 4]].concat(), &digest), ErrorKind::Invalid);
    // One that has checksums keeps its own.
    fs::create_dir(folder.path().join("tree")).unwrap();
    fs::write(folder.path().join("tree/file"), &bytes).unwrap();
    let other = from_directory(&store, "other", &folder.path().join("tree"));
    assert_eq!(refused(&sums, &other.image.digest().unwrap()), ErrorKind::Invalid);
}

/// Lists of small and big files; the second one has other files in the middle, more of them.
#[test]
fn lists_with_the_same_run_of_files_have_the_same_chunks() {
    let mut rng = Rng::new(11);
    let mut files: Vec<(u64, u32)> = (0..600).map(|n| (n, 1 + rng.below(40_000) as u32)).collect();
    // Big files with tails of all kinds.
    for (n, len) in [(50, 600_000), (120, 530_000), (400, 1 << 20), (401, (1 << 19) + 9)] {
        files[n].1 = len;
    }
    let mut changed = files.clone();
    changed.splice(300..303, (1000..1007).map(|n| (n, 9000)));
    // The parts of each chunk: file, offset in it, length, offset in the chunk.
    let chunks = |files: &[(u64, u32)]| {
        let listed: Vec<_> = files
            .iter()
            .map(|(n, len)| listed(&format!("f{n}"), (*len).into(), &[(0, *len, n << 32)]))
            .collect();
        let all = Layers::new(LayerLimits::default());
        let (_folder, store) = store();
        let parts = Mutex::default();
        let object = |origins: &[Origin], chunks: &mut [ChunkEntry]| {
            let mut all = vec![Vec::new(); chunks.len()];
            for Origin { at, offset, len, .. } in origins {
                let chunk = chunks.partition_point(|chunk| chunk.stored.end() <= *at);
                all[chunk].push((*at - chunks[chunk].stored.start(), *offset, *len));
            }
            assert!(chunks.iter().all(|chunk| chunk.codec == Codec::Verified));
            chunks.iter_mut().for_each(|chunk| chunk.digest = Digest::of(b"identity"));
            *parts.lock().unwrap() = all;
            ObjectId::new(format!("derived/{}", "0".repeat(64)))
        };
        let layers = vec![all.list(&listed, 0, &options()).unwrap()];
        let report = builder::describe_layers(&store, "x", layers, &options(), &object).unwrap();
        let manifest: Manifest = load(&store, &report);
        assert!(manifest.chunks.iter().all(|chunk| chunk.digest == Digest::of(b"identity")));
        parts.into_inner().unwrap()
    };
    let len = |parts: &[(u64, u64, u32)]| parts.iter().map(|part| u64::from(part.2)).sum::<u64>();
    let (one, two) = (chunks(&files), chunks(&changed));
    let known: HashSet<_> = one.iter().collect();
    let new: u64 = two.iter().filter(|parts| !known.contains(parts)).map(|parts| len(parts)).sum();
    let all: u64 = two.iter().map(|parts| len(parts)).sum();
    println!("{new} bytes of {all} are in other chunks than before");
    // Seven files of 9,000 bytes, the rest of their chunks, and some until the cuts meet again.
    assert!(new < 63_000 + 4 * (256 << 10), "{new}");
    // Groups are neither tiny nor cut at fixed lengths; pieces of a big file lie alone.
    let lens: Vec<_> = one.iter().map(|parts| len(parts)).collect();
    let cut = lens.iter().filter(|len| (128 << 10..216 << 10).contains(*len)).count();
    assert!(cut > lens.len() / 4, "{lens:?}");
    let alone = |n: u64, at: u64, len: u32| vec![(0, (n << 32) + at, len)];
    for parts in [alone(50, 0, 256 << 10), alone(120, 512 << 10, 530_000 - (512 << 10))] {
        assert_eq!(one.contains(&parts), parts[0].2 > 32 << 10, "{parts:?}");
    }
    assert!(one.contains(&alone(50, 512 << 10, 600_000 - (512 << 10))));
}

#[test]
fn impossible_lists_are_refused_at_once() {
    let none = archive(&[]);
    let refused = |file: Listed| list_layers(&[file], &[], &none).unwrap_err().kind();
    for file in [
        listed("a", 5, &[(0, 6, 0)]),
        listed("a", 9, &[(4, 2, 0), (5, 1, 0)]),
        listed("a", 9, &[(4, 0, 0)]),
        listed("a", u64::MAX, &[]),
        listed("../a", 0, &[]),
        Listed { kind: b'x', ..listed("a", 0, &[]) },
        Listed { mtime_ns: 1_000_000_000, ..listed("a", 0, &[]) },
        Listed { kind: b'1', link: b"nowhere".to_vec(), ..listed("a", 0, &[]) },
        Listed { kind: b'2', ..listed("a", 0, &[]) },
    ] {
        assert_eq!(refused(file.clone()), ErrorKind::Corrupt, "{file:?}");
    }
    // Only the parts of a sparse file count, however long the file is.
    let (manifest, data) =
        list_layers(&[listed("a", 1 << 60, &[(1 << 59, 5, 0)])], &[7; 5], &none).unwrap();
    assert_eq!((data.len(), manifest.chunks.len()), (256 << 10, 1));
    // More data than an image may have, both from distant positions and from the same one.
    let parts: Vec<_> = (0..3).map(|n| (n << 24, 1 << 24, 0)).collect();
    assert_eq!(refused(listed("a", 1 << 30, &parts)), ErrorKind::Invalid);
    let parts: Vec<_> = (0..200).map(|n| (n << 18, 1, 0)).collect();
    assert_eq!(refused(listed("a", 1 << 30, &parts)), ErrorKind::Invalid);
    // A refused list counts nothing.
    let all = Layers::new(LayerLimits { entries: 2, ..LayerLimits::default() });
    let files = ["a", "b", "c"].map(|path| listed(path, 0, &[]));
    for _ in 0..3 {
        assert!(all.list(&files, 0, &options()).is_err());
    }
    all.list(&files[..2], 0, &options()).unwrap();
    assert!(all.list(&files[..1], 0, &options()).is_err());
}

#[test]
fn a_manifest_without_checksums_claims_none() {
    let bytes = Rng::new(3).bytes(5000);
    let none = archive(&[]);
    let (sound, _) = list_layers(&[listed("a", 5000, &[(0, 5000, 0)])], &bytes, &none).unwrap();
    sound.validate(&ManifestLimits::default()).unwrap();
    type Lie = fn(&mut Manifest);
    let lies: [Lie; 3] = [
        |manifest| manifest.block_checksums[5] = 1,
        |manifest| manifest.tree.inodes.last_mut().unwrap().nodatasum = false,
        |manifest| manifest.objects[0] = ObjectId::new("computed/zeros").unwrap(),
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let mut manifest = sound.clone();
        lie(&mut manifest);
        let error = manifest.validate(&ManifestLimits::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{number}: {error}");
    }
}
