//! Shared by the fuzz targets of archives: a store that forgets, and checksums of headers.

use std::{
    fs,
    io::Cursor,
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{Collecting, Error, ErrorKind, Lease, ObjectId, ObjectStore, Result};
use burgeon_image::builder::{self, BuildOptions};

/// Build options of the targets: one thread, so that an input does the same each time.
pub fn options() -> BuildOptions {
    BuildOptions { level: 1, threads: Some(1), reuse: false, ..BuildOptions::default() }
}

/// Builds an image of an archive, or does not.
pub fn build(archive: Vec<u8>) {
    let _ = builder::from_tar(&Oblivion, "x", Cursor::new(archive), None, &options(), &|_| ());
}

/// `archive` with the checksums that its headers need.
pub fn sealed(mut archive: Vec<u8>) -> Vec<u8> {
    seal(&mut archive);
    archive
}

/// A store that forgets.
pub struct Oblivion;

/// Removes a scratch folder.
struct Scratch(std::path::PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("a temporary folder");
    }
}

static NEXT: AtomicU64 = AtomicU64::new(0);

impl ObjectStore for Oblivion {
    fn publish_file(&self, _: &ObjectId, from: &Path) -> Result<()> {
        fs::remove_file(from).map_err(|error| Error::io("a temporary file", error))
    }

    fn publish(&self, _: &ObjectId, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn get(&self, object: &ObjectId, _: u64) -> Result<bytes::Bytes> {
        Err(Error::new(ErrorKind::NotFound, object.as_str()))
    }

    fn len(&self, _: &ObjectId) -> Result<Option<u64>> {
        Ok(None)
    }

    fn list(&self, _: &str) -> Result<Vec<ObjectId>> {
        Ok(Vec::new())
    }

    fn remove(&self, _: &ObjectId) -> Result<()> {
        Ok(())
    }

    fn begin_write(&self) -> Result<Lease> {
        let name = format!("fuzz-tar-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).map_err(|error| Error::io("a temporary folder", error))?;
        Ok(Lease::new(folder.clone(), Box::new(Scratch(folder))))
    }

    fn begin_collect(&self) -> Result<Collecting> {
        Err(Error::new(ErrorKind::Invalid, "nothing is collected here"))
    }
}

/// Gives every block that could be a header the checksum it needs.
pub fn seal(archive: &mut [u8]) {
    for header in archive.as_chunks_mut::<512>().0 {
        if header[257..262] == *b"ustar" {
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        }
    }
}
