//! Tar archives: made by `tar`, or header by header.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use burgeon_block::Result;
use burgeon_image::{Manifest, builder};
use burgeon_source::Directory;

use super::{load, noise, options};

/// `tar` of the directory with `options`.
pub fn archive(root: &Path, options: &[&str]) -> Vec<u8> {
    let mut command = Command::new("tar");
    command.args(["-C", root.to_str().unwrap(), "-cf", "-"]).args(options).arg(".");
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{command:?}");
    output.stdout
}

pub fn from_tar(store: &Directory, bytes: Vec<u8>) -> Result<Manifest> {
    let reader = std::io::Cursor::new(bytes);
    let report = builder::from_tar(store, "tar", reader, None, &options(), &|_| ())?;
    Ok(load(store, &report))
}

/// An archive of one incompressible file, and the image that it makes in `store`. The file is made
/// in `folder`.
pub fn one_file(folder: &Path, store: &Directory) -> (Vec<u8>, Manifest) {
    let root = folder.join("tree");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("file"), noise(1, 100_000)).unwrap();
    let plain = archive(&root, &["--format=pax"]);
    let manifest = from_tar(store, plain.clone()).unwrap();
    (plain, manifest)
}

pub fn pipe(bytes: &[u8], program: &str) -> Vec<u8> {
    let mut child = Command::new(program)
        .arg("-c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    output.stdout
}

/// A header of an archive.
pub fn header(name: &[u8], kind: u8, size: u64, link: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name);
    header[100..108].copy_from_slice(b"0000644\0");
    header[108..116].copy_from_slice(b"0000000\0");
    header[116..124].copy_from_slice(b"0000000\0");
    header[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    header[136..148].copy_from_slice(b"00000000000\0");
    header[156] = kind;
    header[157..157 + link.len()].copy_from_slice(link);
    header[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut header);
    header
}

pub fn seal(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

pub fn ended(parts: &[Vec<u8>]) -> Vec<u8> {
    [parts.concat(), vec![0; 1024]].concat()
}
