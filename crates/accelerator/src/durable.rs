//! Files of the state directory that are old or new after a power failure, never half of either.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

/// Replaces a file and makes it durable, with its name and the name of its folder.
pub(crate) fn put_durably(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new~");
    let mut file = File::create(&new)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    path.ancestors().skip(1).take(2).try_for_each(|folder| File::open(folder)?.sync_all())
}
