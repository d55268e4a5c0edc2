//! The part of the torture tree that is about content: sizes, holes, twins and links.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, symlink},
    path::Path,
};

use anyhow::{Context, Result};

use crate::{Torture, torture::set_time};

/// Sizes around every boundary: inline (2 KiB), block, group of small files and chunk (256 KiB).
const SIZES: &[usize] = &[
    0, 1, 2, 100, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 65_535, 65_536, 131_073, 262_143,
    262_144, 262_145, 524_287, 524_288, 524_289, 1_000_003,
];

/// One step of a run of zeros or of an incompressible run inside a mixed file.
const STRIPE: usize = 10_000;

impl Torture {
    /// `len` bytes of one of four kinds: random, text, zeros, stripes of all three.
    pub(crate) fn content(&mut self, len: usize) -> Vec<u8> {
        match self.rng.below(4) {
            0 => self.rng.bytes(len),
            1 => self.text(len),
            2 => vec![0; len],
            _ => {
                let mut bytes = Vec::with_capacity(len + STRIPE);
                while bytes.len() < len {
                    bytes.extend(self.rng.bytes(STRIPE));
                    bytes.extend(self.text(STRIPE));
                    bytes.extend([0; STRIPE]);
                }
                bytes.truncate(len);
                bytes
            }
        }
    }

    fn text(&mut self, len: usize) -> Vec<u8> {
        let words = ["seed ", "sprout ", "leaf ", "root\n", "bough ", "bud "];
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(self.rng.pick(&words).as_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    pub(crate) fn sizes(&mut self) -> Result<()> {
        let root = self.root.clone();
        let folder = self.folder(&root, b"sizes")?;
        for size in SIZES {
            let random = self.rng.bytes(*size);
            self.file(&folder, format!("random-{size}").as_bytes(), &random)?;
            let text = self.text(*size);
            self.file(&folder, format!("text-{size}").as_bytes(), &text)?;
            self.file(&folder, format!("zeros-{size}").as_bytes(), &vec![0; *size])?;
            self.file(&folder, format!("twin-of-random-{size}").as_bytes(), &random)?;
        }
        let large = self.content(self.size.choose(3_000_000, 40_000_000));
        self.file(&folder, b"large", &large)?;
        // Same chunks at the start and at the end, other bytes between.
        let mut edited = large;
        let middle = edited.len() / 2;
        edited[middle] ^= 1;
        self.file(&folder, b"large-edited", &edited)?;
        // One chunk over and over.
        let chunk = self.rng.bytes(262_144);
        self.file(&folder, b"repeated", &chunk.repeat(5))?;
        Ok(())
    }

    pub(crate) fn sparse(&mut self) -> Result<()> {
        let root = self.root.clone();
        let folder = self.folder(&root, b"sparse")?;
        const TIB: u64 = 1 << 40;
        // Name, size, where some bytes are.
        let shapes: &[(&str, u64, &[u64])] = &[
            ("only-hole", 1 << 20, &[]),
            ("tiny-hole", 1000, &[]),
            ("hole-first", 1 << 20, &[(1 << 20) - 4096]),
            ("hole-last", 10_000_000, &[0]),
            ("unaligned-end", 5_000_001, &[4096]),
            ("gaps", 3 << 20, &[0, 8192, 262_144, 524_288 + 4096, 2 << 20]),
            ("tebibyte", TIB, &[0, 1 << 30, TIB / 2, TIB - 4096]),
            ("tebibyte-hole", TIB - 1, &[]),
        ];
        for (name, size, places) in shapes {
            let path = folder.join(name);
            let file = File::create_new(&path).with_context(|| format!("{path:?}"))?;
            file.set_len(*size)?;
            for place in *places {
                file.write_all_at(&self.rng.bytes(4096), *place)?;
            }
            // Delayed allocation may report unwritten data as data or as a hole.
            file.sync_all()?;
            self.stamp(&path)?;
        }
        Ok(())
    }

    pub(crate) fn links(&mut self) -> Result<()> {
        let root = self.root.clone();
        let folder = self.folder(&root, b"links")?;
        let other = self.folder(&root, b"links-elsewhere")?;
        let original = self.file(&folder, b"original", &b"many names".repeat(900))?;
        // One INODE_REF item holds less than 16 KiB: 75 names of this length.
        for index in 0..self.size.choose(200, 2000) {
            let name = format!("{index:0200}");
            fs::hard_link(&original, folder.join(&name))?;
            if index % 10 == 0 {
                fs::hard_link(&original, other.join(&name))?;
            }
        }
        for len in [1, 59, 60, 2047, 2048, 2049, 3000, 4094, 4095] {
            let mut target = self.rng.bytes(len);
            target.iter_mut().filter(|b| **b == 0).for_each(|b| *b = b'0');
            self.symlink(&folder, &format!("symlink-{len}"), &target)?;
        }
        self.symlink(&folder, "to-original", b"original")?;
        self.symlink(&folder, "to-nowhere", b"../no/such/file")?;
        self.symlink(&folder, "to-itself", b"to-itself")?;
        fs::hard_link(folder.join("to-original"), other.join("same-symlink"))?;
        Ok(())
    }

    fn symlink(&mut self, folder: &Path, name: &str, target: &[u8]) -> Result<()> {
        use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
        let path = folder.join(name);
        symlink(OsStr::from_bytes(target), &path).with_context(|| format!("{path:?}"))?;
        set_time(&path, target.len() as i64, 999_999_999)
    }
}
