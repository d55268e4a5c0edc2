//! The checksums of all blocks of an image whose description has none.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Error, Result};
use burgeon_image::{AddressMap, rename_own};
use rustix::fs::RenameFlags;

use crate::state::files;

/// The checksums of all blocks of an image, in a new file.
pub(super) struct Sums {
    file: File,
    path: PathBuf,
    start: u64,
    kind: ChecksumKind,
}

impl Sums {
    pub(super) fn create(path: PathBuf, map: &AddressMap) -> Result<Self> {
        let (data, kind) = (map.data_range(), map.checksum_kind());
        let new = path.with_extension("new");
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let made = files::open(&new, &mut options).and_then(|file| {
            file.set_len(data.len() / BLOCK_SIZE * kind.size() as u64).map(|()| file)
        });
        let failed = |e| Error::io(format!("cannot make {}", new.display()), e);
        Ok(Self { file: made.map_err(failed)?, path, start: data.start(), kind })
    }

    /// Adds those of the blocks of `piece`.
    pub(super) fn add(&self, piece: ByteRange, bytes: &[u8]) -> Result<()> {
        let size = self.kind.size();
        let mut sums = Vec::with_capacity(bytes.len() / BLOCK_SIZE as usize * size);
        for block in bytes.chunks(BLOCK_SIZE as usize) {
            sums.extend_from_slice(&self.kind.of(block).to_le_bytes()[..size]);
        }
        let at = (piece.start() - self.start) / BLOCK_SIZE * size as u64;
        let failed = |e| Error::io("cannot write the checksums of the mount's data", e);
        self.file.write_all_at(&sums, at).map_err(failed)
    }

    /// All are there.
    pub(super) fn publish(&self) -> Result<()> {
        let new = self.path.with_extension("new");
        let published = self.file.sync_all().and_then(|()| publish_own(&new, &self.path));
        published.map_err(|e| Error::io(format!("cannot write {}", self.path.display()), e))?;
        files::sync_parent(&self.path)
    }
}

/// Less privileged processes can write to these folders, so no symlink is followed.
pub(super) fn publish_own(new: &Path, path: &Path) -> io::Result<()> {
    rename_own(new, path, RenameFlags::empty())
}
