//! Costs and savings of chunks of several lengths: `cargo run --release --locked -p burgeon-image
//! --example grouping -- TREE…` builds each tree, and two of random files, by several rules
//! (`builder::Grouping`), changes files, and builds it again.
//!
//! ```text
//!   TREE ──► copy ── built by each rule ──► sizes, what a program fetches that reads 1 folder in 20
//!             ├─ one file in fifty gets another first line ── built again ──► scattered   (4 times)
//!             └─ so do all files of a folder ──────────────── built again ──► folder      (4 times)
//! ```
//!
//! A host that has read the tree before fetches the chunks that no earlier version has. The table
//! shows their stored bytes as multiples of the changed files' own part of them.

#![allow(clippy::print_stdout)]

use std::{
    collections::{BTreeMap, HashSet},
    error::Error,
    ffi::OsString,
    fs,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

use burgeon_block::Digest;
use burgeon_image::{
    AddressMap, Manifest, ManifestLimits, Paths,
    builder::{self, BuildOptions, Grouping},
    catalog,
};
use burgeon_source::Directory;
use testkit::Rng;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const KIB: u32 = 1 << 10;
/// The first is the rule before there was a choice, but for the last pieces of big files, which
/// were chunks of their own from 32 KiB on.
const RULES: [Grouping; 8] = [
    Grouping { alone: 256 * KIB, min: 128 * KIB, cut_bits: 3 },
    Grouping { alone: 256 * KIB, min: 64 * KIB, cut_bits: 2 },
    Grouping { alone: 64 * KIB, min: 48 * KIB, cut_bits: 1 },
    Grouping { alone: 64 * KIB, min: 32 * KIB, cut_bits: 1 },
    Grouping { alone: 32 * KIB, min: 32 * KIB, cut_bits: 1 },
    Grouping { alone: 32 * KIB, min: 16 * KIB, cut_bits: 1 },
    Grouping { alone: 32 * KIB, min: 8 * KIB, cut_bits: 1 },
    Grouping { alone: 4 * KIB, min: 0, cut_bits: 0 },
];
const VERSIONS: usize = 4;
/// One file in so many changes; of a program's start, one folder in so many is read.
const SCATTERED: usize = 50;
const STARTED: usize = 20;
/// A folder that changes has at least so many files.
const FOLDER_MIN: usize = 10;

/// Regular files, by folder.
type Files = BTreeMap<PathBuf, Vec<PathBuf>>;

/// The results of one rule so far.
#[derive(Default)]
struct Row {
    seen: HashSet<Digest>,
    sizes: String,
    /// Stored bytes of new chunks, and of the changed files in them: scattered, folder.
    fetched: [u64; 2],
    changed: [f64; 2],
}

fn main() -> Result<()> {
    let work = std::env::temp_dir().join(format!("burgeon-grouping-{}", std::process::id()));
    let result = measure_all(&work);
    fs::remove_dir_all(&work)?;
    result
}

fn measure_all(work: &Path) -> Result<()> {
    let mut trees: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    trees.extend([make_tree(work, 16)?, make_tree(work, 40)?]);
    for (number, tree) in trees.iter().enumerate() {
        let folder = work.join(number.to_string());
        fs::create_dir(&folder)?;
        measure(tree, &folder)?;
        fs::remove_dir_all(folder)?;
    }
    Ok(())
}

/// Random files of 2 KiB to `most` KiB: 50 in each of 30 folders.
fn make_tree(work: &Path, most: usize) -> Result<PathBuf> {
    let root = work.join(format!("random files of 2 to {most} KiB"));
    let mut rng = Rng::new(2);
    for folder in 0..30 {
        let folder = root.join(format!("folder-{folder:02}"));
        fs::create_dir_all(&folder)?;
        for file in 0..50 {
            let len = 2049 + rng.below((most << 10) as u64 - 2048) as usize;
            fs::write(folder.join(format!("file-{file:02}")), rng.bytes(len))?;
        }
    }
    Ok(root)
}

fn measure(tree: &Path, work: &Path) -> Result<()> {
    let copy = work.join("tree");
    let mut files = Files::new();
    copy_tree(tree, &copy, &mut files)?;
    let mut rows: Vec<Row> = RULES.iter().map(|_| Row::default()).collect();
    let mut rng = Rng::new(1);
    let started: HashSet<PathBuf> = {
        let folders = files.keys().filter(|_| rng.below(STARTED as u64) == 0);
        folders.cloned().collect()
    };
    for (rule, row) in RULES.iter().zip(&mut rows) {
        let (manifest, map) = build(work, &copy, *rule)?;
        row.seen = manifest.chunks.iter().map(|chunk| chunk.digest).collect();
        row.sizes = sizes(&manifest, map, &copy, &started)?;
    }
    for version in 0..2 * VERSIONS {
        let kind = version / VERSIONS;
        let changed = change(&files, kind, &mut rng)?;
        for (rule, row) in RULES.iter().zip(&mut rows) {
            let (manifest, _) = build(work, &copy, *rule)?;
            let new = manifest.chunks.iter().filter(|chunk| row.seen.insert(chunk.digest));
            row.fetched[kind] += new.map(|chunk| chunk.stored.len()).sum::<u64>();
            let is_changed = |path: &Path| changed.contains(path);
            row.changed[kind] +=
                chunks_of(&manifest, &copy, is_changed).map(|(_, own)| own).sum::<f64>();
        }
    }
    let count: usize = files.values().map(Vec::len).sum();
    let name = tree.strip_prefix(work.parent().unwrap_or(work)).unwrap_or(tree);
    println!("\n{}, {count} files\n", name.display());
    println!(
        "| alone, group from, cut before 1 in | chunks | mean KiB | packs MiB | manifest KiB | map KiB | start: chunks; runs; MiB | scattered | folder |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (Grouping { alone, min, cut_bits }, row) in RULES.iter().zip(&rows) {
        let one_in = 1u32 << cut_bits;
        let [scattered, folder] = [0, 1].map(|kind| row.fetched[kind] as f64 / row.changed[kind]);
        let (alone, min) = (alone / KIB, min / KIB);
        println!(
            "| {alone} KiB, {min} KiB, {one_in} | {} | {scattered:.1} | {folder:.2} |",
            row.sizes
        );
    }
    Ok(())
}

/// Copies the regular files of one file system.
fn copy_tree(from: &Path, to: &Path, files: &mut Files) -> Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, to) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_dir() {
            copy_tree(&entry.path(), &to, files)?;
        } else if kind.is_file() {
            fs::copy(entry.path(), &to)?;
            let parent = to.parent().unwrap_or(&to).to_owned();
            files.entry(parent).or_default().push(to);
        }
    }
    // `read_dir` has no order, and the changes are to be the same in each run.
    files.values_mut().for_each(|of_folder| of_folder.sort());
    Ok(())
}

/// Builds the tree into a new store: its manifest, and the lengths of that and of its map.
fn build(work: &Path, tree: &Path, grouping: Grouping) -> Result<(Manifest, [u64; 2])> {
    let store = Directory::create(work.join("store"))?;
    let options = BuildOptions { grouping, reuse: false, ..BuildOptions::default() };
    let report = builder::from_directory(&store, "x", tree, &options, &|_| ())?;
    let digest = report.image.digest()?;
    let manifest = catalog::load(&store, &digest, &ManifestLimits::default())?;
    let encoded = catalog::load_bytes(&store, &digest)?.len() as u64;
    let map = work.join("map");
    AddressMap::from_manifest(&manifest)?.write_to(&map)?;
    let map = fs::metadata(&map)?.len();
    fs::remove_dir_all(work.join("store"))?;
    fs::remove_file(work.join("map"))?;
    Ok((manifest, [encoded, map]))
}

fn sizes(
    manifest: &Manifest,
    [encoded, map]: [u64; 2],
    copy: &Path,
    started: &HashSet<PathBuf>,
) -> Result<String> {
    let chunks = &manifest.chunks;
    let raw: u64 = chunks.iter().map(|chunk| chunk.len()).sum();
    let stored: u64 = chunks.iter().map(|chunk| chunk.stored.len()).sum();
    let is_read = |path: &Path| path.parent().is_some_and(|folder| started.contains(folder));
    let mut read: Vec<usize> = chunks_of(manifest, copy, is_read).map(|(chunk, _)| chunk).collect();
    read.sort_unstable();
    read.dedup();
    let fetched: u64 = read.iter().map(|index| chunks[*index].stored.len()).sum();
    let adjoin = |pair: &&[usize]| {
        let [before, after] = [&chunks[pair[0]], &chunks[pair[1]]];
        before.object == after.object && before.stored.end() == after.stored.start()
    };
    let runs = read.len() - read.windows(2).filter(adjoin).count();
    Ok(format!(
        "{} | {} | {:.2} | {} | {} | {}; {runs}; {:.2}",
        chunks.len(),
        raw / 1024 / chunks.len().max(1) as u64,
        mib(stored),
        encoded / 1024,
        map / 1024,
        read.len(),
        mib(fetched),
    ))
}

/// The chunks of the files that `wanted` names, and the files' own part of their stored bytes.
fn chunks_of(
    manifest: &Manifest,
    copy: &Path,
    wanted: impl Fn(&Path) -> bool,
) -> impl Iterator<Item = (usize, f64)> {
    let (tree, paths) = (&manifest.tree, Paths::new(&manifest.tree));
    let addresses = manifest.chunk_addresses();
    let mut found = Vec::new();
    for (number, inode) in tree.inodes.iter().enumerate() {
        let path = paths.of_inode(number as u32);
        let path = PathBuf::from(OsString::from_vec(path));
        let path = copy.join(path.strip_prefix("/").unwrap_or(&path));
        if !wanted(&path) {
            continue;
        }
        for extent in tree.extents_of(inode) {
            let end = extent.address + extent.len;
            let first = addresses.partition_point(|address| *address <= extent.address) - 1;
            for (index, chunk) in manifest.chunks.iter().enumerate().skip(first) {
                if addresses[index] >= end {
                    break;
                }
                let (from, until) = (addresses[index].max(extent.address), addresses[index + 1]);
                let part = (until.min(end) - from) as f64 / chunk.len() as f64;
                found.push((index, part * chunk.stored.len() as f64));
            }
        }
    }
    found.into_iter()
}

/// Gives files another first line, so that all that follows moves: those of a folder, or one in
/// [`SCATTERED`].
fn change(files: &Files, kind: usize, rng: &mut Rng) -> Result<HashSet<PathBuf>> {
    let all: Vec<&PathBuf> = files.values().flatten().collect();
    let mut changed = HashSet::new();
    if kind == 0 {
        while changed.len() < all.len().div_ceil(SCATTERED) {
            changed.insert(all[rng.below(all.len() as u64) as usize].clone());
        }
    } else {
        let long: Vec<_> = files.values().filter(|files| files.len() >= FOLDER_MIN).collect();
        let folder = long.get(rng.below(long.len().max(1) as u64) as usize);
        changed.extend(folder.into_iter().copied().flatten().cloned());
    }
    let mut in_order: Vec<_> = changed.iter().collect();
    in_order.sort();
    for path in in_order {
        let line = format!("# {:016x}\n", rng.below(u64::MAX));
        let data = fs::read(path)?;
        fs::write(path, [line.as_bytes(), &data].concat())?;
    }
    Ok(changed)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
