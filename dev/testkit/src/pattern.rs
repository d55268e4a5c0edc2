//! Files whose every block is known without reading the original.

use std::{
    fs::File,
    io::{BufWriter, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::Rng;

/// Bytes of a block.
const BLOCK: usize = 4096;

/// A file of blocks that do not compress and that all differ.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    /// Makes it different from other patterns.
    pub seed: u64,
    /// Its length in blocks.
    pub blocks: u64,
}

impl Pattern {
    /// Writes the file.
    pub fn write(self, path: &Path) -> Result<()> {
        let file = File::create(path).with_context(|| format!("{path:?}"))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        for block in 0..self.blocks {
            out.write_all(&self.block(block))?;
        }
        Ok(out.into_inner()?.sync_all()?)
    }

    /// The content of block `number`.
    pub fn block(self, number: u64) -> Vec<u8> {
        Rng::new(self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ number).bytes(BLOCK)
    }

    /// Opens a copy of the file past the page cache.
    pub fn open_direct(path: &Path) -> Result<File> {
        let mut options = File::options();
        let options = options.read(true).custom_flags(libc_o_direct());
        options.open(path).with_context(|| format!("{path:?}"))
    }

    /// Reads block `number` of a copy opened by [`Self::open_direct`], checks it, and gives the
    /// time the read took.
    pub fn check(self, file: &File, number: u64, buffer: &mut AlignedBlock) -> Result<Duration> {
        let started = Instant::now();
        let read = file.read_exact_at(&mut buffer.0, number * BLOCK as u64);
        let took = started.elapsed();
        read.with_context(|| format!("block {number} after {took:?}"))?;
        if buffer.0[..] != self.block(number) {
            bail!("block {number} is not what was written");
        }
        Ok(took)
    }
}

/// A buffer that direct I/O accepts.
#[repr(align(4096))]
pub struct AlignedBlock(
    /// Its bytes.
    pub [u8; BLOCK],
);

impl Default for AlignedBlock {
    fn default() -> Self {
        Self([0; BLOCK])
    }
}

fn libc_o_direct() -> i32 {
    rustix::fs::OFlags::DIRECT.bits() as i32
}

#[cfg(test)]
mod tests {
    use std::{fs::OpenOptions, os::unix::fs::FileExt};

    use super::{AlignedBlock, Pattern};
    use crate::Space;

    #[test]
    fn a_changed_block_is_found() {
        let space = Space::new("pattern");
        let path = space.path("file");
        let pattern = Pattern { seed: 5, blocks: 8 };
        pattern.write(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"!", 5 * 4096).unwrap();
        let (file, mut buffer) = (Pattern::open_direct(&path).unwrap(), AlignedBlock::default());
        pattern.check(&file, 4, &mut buffer).unwrap();
        assert!(pattern.check(&file, 5, &mut buffer).is_err());
    }
}
