//! Trees that exist only as a stream: a million files need no disk to be built from.

use std::io::{self, Write};

/// Files in one folder.
const FOLDER: u64 = 256;
/// Every so many files one is larger than fits in metadata.
const LARGE_EVERY: u64 = 16;
const LARGE: usize = 6000;

/// Writes `files` files as a tar archive: mostly a few hundred bytes each, some of 6,000, all
/// different.
pub(crate) fn small_files(out: &mut impl Write, files: u64) -> io::Result<()> {
    entries(
        out,
        files,
        |index| if index % LARGE_EVERY == 0 { LARGE } else { 40 + index as usize % 360 },
    )
}

/// Writes `files` files of `len` bytes each, all different.
pub(crate) fn equal_files(out: &mut impl Write, files: u64, len: usize) -> io::Result<()> {
    entries(out, files, |_| len)
}

fn entries(out: &mut impl Write, files: u64, len: impl Fn(u64) -> usize) -> io::Result<()> {
    let mut content = Vec::new();
    for index in 0..files {
        let folder = index / FOLDER;
        if index % FOLDER == 0 {
            out.write_all(&header(&format!("d{folder:05}/"), 0, b'5'))?;
        }
        let len = len(index);
        fill(&mut content, index, len);
        out.write_all(&header(&format!("d{folder:05}/file-{index:07}"), len, b'0'))?;
        out.write_all(&content)?;
        out.write_all(&[0; 512][..len.next_multiple_of(512) - len])?;
    }
    out.write_all(&[0; 1024])
}

/// `len` bytes that do not compress and differ for every `index` (a 64-bit linear generator).
fn fill(content: &mut Vec<u8>, index: u64, len: usize) {
    content.clear();
    let mut state = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while content.len() < len {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        content.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    content.truncate(len);
}

/// A ustar header. `kind` is `b'0'` for a file, `b'5'` for a folder.
fn header(name: &str, len: usize, kind: u8) -> [u8; 512] {
    let mut header = [0; 512];
    let mut put =
        |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, if kind == b'5' { "0000755\0" } else { "0000644\0" });
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{len:011o}\0"));
    put(136, "14000000000\0");
    put(148, "        ");
    put(156, char::from(kind).encode_utf8(&mut [0; 4]));
    put(257, "ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    #[test]
    fn tar_lists_the_stream() {
        let mut archive = Vec::new();
        super::small_files(&mut archive, 300).unwrap();
        let mut tar = Command::new("tar");
        let mut child =
            tar.args(["-tf", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&archive).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success());
        assert_eq!(text.lines().count(), 302);
        assert_eq!(text.lines().last(), Some("d00001/file-0000299"));
    }
}
