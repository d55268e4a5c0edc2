//! Small inputs that cost much work: a separate process makes an image of each, or refuses it,
//! within 5 s of processor time (15 s unoptimised).
//!
//! `bombs.rs` is about memory. A new input is a function that writes it, and a line of `INPUTS`.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Write},
    path::Path,
    time::Duration,
};

use burgeon_block::{Digest, MemoryMeter, ObjectId, Result};
use burgeon_image::{
    ChunkEntry,
    builder::{self, LayerLimits, Layers},
};
use common::{
    archives::{header, seal},
    *,
};
use testkit::measure;

const LEN_MAX: u64 = 1 << 20;
const MEMORY_MAX: u64 = 256 << 20;
const CPU_MAX: Duration = Duration::from_secs(if cfg!(debug_assertions) { 15 } else { 5 });

/// Name, writer, and what reads it.
type Input = (&'static str, fn(&Path), fn(&Path) -> Result<u64>);

const INPUTS: &[Input] = &[
    ("a list of rights for all entries", global_acl, archive),
    ("records for all entries", global_records, archive),
    ("a long number for all entries", global_digits, archive),
    ("symlinks in each path", links, archive),
    ("symlinks in each path of a layer", links, layer),
    ("links through links", links_through_links, archive),
    ("links through links in a layer", links_through_links, layer),
    ("records without a meaning", meaningless, archive),
    ("empty records", empty_records, archive),
    ("volume labels", labels, archive),
    ("maps of empty pieces", empty_pieces, archive),
    ("maps of empty pieces in a layer", empty_pieces, layer_headers),
    ("old maps of empty pieces in a layer", old_pieces, layer_headers),
    ("old maps without pieces", no_pieces, archive),
    ("deep paths", deep, archive),
    ("deep paths in a layer", deep, layer),
    ("long names", long_names, archive),
    ("members of gzip", members, archive),
    ("blocks of gzip", blocks, archive),
    ("streams of xz", streams, archive),
    ("frames of zstd", frames, archive),
    ("skippable frames of zstd", skippable, archive),
    ("links to links", hard_links, archive),
    ("attributes", attributes, archive),
];

#[test]
fn small_inputs_cost_little_work() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, make, read) in INPUTS {
        let input = || {
            let path = folder.path().join("input");
            make(&path);
            let len = fs::metadata(&path).unwrap().len();
            assert!(len <= LEN_MAX, "{name}: {len} bytes");
            path
        };
        let read = |path: &Path| match read(path) {
            Ok(files) => format!("made an image of {files} files"),
            Err(error) => error.to_string(),
        };
        let Some(taken) = measure("small_inputs_cost_little_work", name, input, read) else {
            continue;
        };
        println!("{name}: {taken:?}");
        assert!(taken.cpu < CPU_MAX, "{name}: {taken:?}");
        assert!(taken.peak_bytes < MEMORY_MAX, "{name}: {taken:?}");
    }
}

fn archive(path: &Path) -> Result<u64> {
    let (_folder, store) = store();
    let archive = File::open(path).unwrap();
    builder::from_tar(&store, "input", archive, None, &options(), &|_| ())
        .map(|report| report.image.inodes)
}

struct Counted<'a>(File, &'a MemoryMeter);

impl Read for Counted<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.0.read(buf)?;
        self.1.input(len as u64);
        Ok(len)
    }
}

fn opened<'a>(path: &Path, layers: &'a Layers) -> impl Read + Send + use<'a> {
    let file = BufReader::new(Counted(File::open(path).unwrap(), layers.meter()));
    zstd::stream::read::Decoder::with_buffer(file).unwrap()
}

fn layer_headers(path: &Path) -> Result<u64> {
    let layers = Layers::new(LayerLimits::default());
    layers.headers(opened(path, &layers)).map(|_| 0)
}

fn layer(path: &Path) -> Result<u64> {
    let (_folder, store) = store();
    let layers = Layers::new(LayerLimits::default());
    let description = layers.describe(opened(path, &layers), 0, &options())?;
    let object = |_: &[builder::Origin], _: &mut [ChunkEntry]| {
        ObjectId::new(format!("derived/{}", Digest::of(b"no object")))
    };
    builder::describe_layers(&store, "input", vec![description], &options(), &object)
        .map(|report| report.image.inodes)
}

/// `first`, and then `again` repeated: zstd's frames may be concatenated.
fn zstd_again(path: &Path, first: &[u8], again: &[u8], times: usize) {
    let mut file = BufWriter::new(File::create(path).unwrap());
    file.write_all(&zstd::bulk::compress(first, 3).unwrap()).unwrap();
    let frame = zstd::bulk::compress(again, 3).unwrap();
    (0..times).for_each(|_| file.write_all(&frame).unwrap());
    file.write_all(&zstd::bulk::compress(&[0; 1024], 3).unwrap()).unwrap();
    file.flush().unwrap();
}

fn entry(name: &[u8], kind: u8, data: &[u8]) -> Vec<u8> {
    let mut entry = header(name, kind, data.len() as u64, b"");
    entry.extend_from_slice(data);
    entry.resize(entry.len().next_multiple_of(512), 0);
    entry
}

fn record(key: &str, value: &str) -> String {
    let len = key.len() + value.len() + 3;
    let digits = (1..).find(|digits| (len + digits).to_string().len() == *digits).unwrap();
    format!("{} {key}={value}\n", len + digits)
}

fn pax(kind: u8, records: &str) -> Vec<u8> {
    entry(b"records", kind, records.as_bytes())
}

fn empty_files() -> Vec<u8> {
    header(b"empty", b'0', 0, b"").repeat((64 << 20) / 512)
}

fn global_acl(path: &Path) {
    let users: String = (0..4_500).map(|n| format!("u:{n}:rwx,")).collect();
    let rights = record("SCHILY.acl.access", &format!("{users}u:x:rwx"));
    zstd_again(path, &pax(b'g', &rights), &empty_files(), 3);
}

fn global_records(path: &Path) {
    let all: String = (0..2_400).map(|n| record(&format!("SCHILY.acl.{n}"), "")).collect();
    zstd_again(path, &pax(b'g', &all), &empty_files(), 3);
}

fn global_digits(path: &Path) {
    let number = record("mtime", &"0".repeat(65_000));
    zstd_again(path, &pax(b'g', &number), &empty_files(), 3);
}

fn links(path: &Path) {
    let mut first = entry(b"d", b'5', b"");
    for n in 0..40 {
        let next = if n == 39 { "d".to_owned() } else { (n + 1).to_string() };
        let target = format!("{}{next}", "d/../".repeat(800));
        first.extend(entry(b"././@LongLink", b'K', target.as_bytes()));
        first.extend(header(n.to_string().as_bytes(), b'2', 0, b""));
    }
    zstd_again(path, &first, &header(b"0/x", b'0', 0, b"").repeat(100_000), 1);
}

/// Each link leads through the one before it, which the next parts lead out of again.
fn links_through_links(path: &Path) {
    let long = |kind, name: &str| entry(b"././@LongLink", kind, name.as_bytes());
    let deep = "d/".repeat(1000);
    let down = "d/".repeat(810) + &"../".repeat(808);
    let mut first = [long(b'L', &deep), header(b"d", b'5', 0, b"")].concat();
    for n in 0..38 {
        let target = match n {
            0 => format!("{down}."),
            _ => format!("{}/{down}../..", n - 1),
        };
        first.extend(long(b'K', &target));
        first.extend(header(n.to_string().as_bytes(), b'2', 0, b""));
    }
    zstd_again(path, &first, &header(b"37/x", b'0', 0, b"").repeat(10_000), 10);
}

fn meaningless(path: &Path) {
    let records = record("a", "").repeat((15 << 20) / 5);
    let again = [pax(b'x', &records), header(b"x", b'0', 0, b"")].concat();
    zstd_again(path, &header(b"first", b'0', 0, b""), &again, 60);
}

fn empty_records(path: &Path) {
    let again = header(b"records", b'g', 0, b"").repeat((64 << 20) / 512);
    zstd_again(path, &header(b"first", b'0', 0, b""), &again, 100);
}

fn labels(path: &Path) {
    let again = header(b"label", b'V', 0, b"").repeat((64 << 20) / 512);
    zstd_again(path, &header(b"first", b'0', 0, b""), &again, 100);
}

fn sparse(map: &[u8], size: u64) -> Vec<u8> {
    let records = record("GNU.sparse.major", "1")
        + &record("GNU.sparse.minor", "0")
        + &record("GNU.sparse.realsize", &size.to_string());
    [pax(b'x', &records), entry(b"sparse", b'0', map)].concat()
}

fn empty_pieces(path: &Path) {
    let mut map = format!("{}\n", 1 << 18).into_bytes();
    map.extend(b"0\n0\n".repeat(1 << 18));
    map.resize(map.len().next_multiple_of(512), 0);
    zstd_again(path, &header(b"first", b'0', 0, b""), &sparse(&map, 0).repeat(32), 200);
}

fn old_pieces(path: &Path) {
    let mut head = header(b"old", b'S', 0, b"");
    head[386..410].copy_from_slice(&b"00000000000\0".repeat(2));
    head[482] = 1;
    seal(&mut head);
    let mut more = b"00000000000\0".repeat(42);
    more.extend([1; 8]);
    let mut last = more.clone();
    last[504] = 0;
    let again = [head, more.repeat(12_000), last].concat().repeat(8);
    zstd_again(path, &header(b"first", b'0', 0, b""), &again, 100);
}

fn no_pieces(path: &Path) {
    let mut head = header(b"old", b'S', 0, b"");
    head[482] = 1;
    seal(&mut head);
    let mut more = vec![0; 504];
    more.extend([1; 8]);
    zstd_again(path, &head, &more.repeat(120_000), 2);
}

fn deep(path: &Path) {
    let mut again = Vec::new();
    let name = "d/".repeat(2040);
    for _ in 0..1000 {
        again.extend(entry(b"././@LongLink", b'L', format!("{name}x").as_bytes()));
        again.extend(header(b"x", b'0', 0, b""));
    }
    zstd_again(path, &header(b"first", b'0', 0, b""), &again, 100);
}

fn long_names(path: &Path) {
    let mut again = Vec::new();
    let folder = format!("{}/", "f".repeat(255)).repeat(14);
    for n in 0..40_000 {
        let name = format!("{folder}{}{n:06}", "n".repeat(240));
        again.extend(entry(b"././@LongLink", b'L', name.as_bytes()));
        again.extend(header(b"x", b'0', 0, b""));
    }
    zstd_again(path, &again, &[0; 1024], 1);
}

fn members(path: &Path) {
    let all = [header(b"a", b'0', 0, b""), vec![0; 1024]].concat();
    let mut bytes = testkit::gzip(&all[..512], 6);
    let member = testkit::gzip(b"", 6);
    bytes.extend(member.repeat((1 << 20) / member.len() - 10));
    bytes.extend(testkit::gzip(&all[512..], 6));
    fs::write(path, bytes).unwrap();
}

fn blocks(path: &Path) {
    let all = [header(b"a", b'0', 0, b""), vec![0; 1024]].concat();
    let mut bytes = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    // Four empty blocks of fixed codes, 10 bits each, not the last ones.
    let mut bits = 0u64;
    (0..4).for_each(|n| bits |= 0b010 << (10 * n));
    bytes.extend(bits.to_le_bytes()[..5].repeat(200_000));
    bytes.extend([1, 0x00, 0x06, 0xff, 0xf9]);
    bytes.extend(&all);
    let mut crc = flate2::Crc::new();
    crc.update(&all);
    bytes.extend(crc.sum().to_le_bytes());
    bytes.extend((all.len() as u32).to_le_bytes());
    fs::write(path, bytes).unwrap();
}

fn streams(path: &Path) {
    let xz = |bytes: &[u8]| {
        let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 9);
        xz.write_all(bytes).unwrap();
        xz.finish().unwrap()
    };
    let mut bytes = xz(&header(b"a", b'0', 0, b""));
    let byte = xz(b"\0");
    bytes.extend(byte.repeat(((1 << 20) - bytes.len()) / byte.len() - 1));
    fs::write(path, bytes).unwrap();
}

fn frames(path: &Path) {
    let frame = zstd::bulk::compress(&[0], 3).unwrap();
    zstd_again(path, &header(b"a", b'0', 0, b""), &[0; 512], 2);
    let mut file = File::options().append(true).open(path).unwrap();
    file.write_all(&frame.repeat(1_000_000 / frame.len())).unwrap();
}

fn skippable(path: &Path) {
    zstd_again(path, &header(b"a", b'0', 0, b""), &[0; 512], 2);
    let mut file = File::options().append(true).open(path).unwrap();
    file.write_all(&[0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0].repeat(100_000)).unwrap();
}

fn hard_links(path: &Path) {
    let mut all = header(b"0", b'0', 0, b"");
    for n in 1..65_000 {
        let (name, before) = (n.to_string(), (n - 1).to_string());
        all.extend(header(name.as_bytes(), b'1', 0, before.as_bytes()));
    }
    zstd_again(path, &all, &[0; 1024], 1);
}

fn attributes(path: &Path) {
    let all: String = (0..9_000).map(|n| record(&format!("SCHILY.xattr.user.{n}"), "")).collect();
    let again = [pax(b'x', &all), header(b"x", b'0', 0, b"")].concat();
    zstd_again(path, &header(b"first", b'0', 0, b""), &again, 30);
}
