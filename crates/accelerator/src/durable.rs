//! Files of the state directory that are old or new after a power failure, never half of either.
//!
//! An error may come after the new file has its name: then a reader finds the new one, and a power
//! failure may bring the old one back. A caller that must know writes the file once more.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Replaces a file and makes it durable, with its name and the name of its folder.
pub(crate) fn put_durably(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = temporary(path);
    let mut file = File::create(&new)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    path.ancestors().skip(1).take(2).try_for_each(|folder| File::open(folder)?.sync_all())
}

/// Removes a file, durably. It need not be there.
pub(crate) fn remove_durably(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// The name of a file until it is whole. Names may have dots, so nothing of it is cut off; and none
/// ends in `~` (`folder::check_name`).
fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new~");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::{put_durably, remove_durably, temporary};

    #[test]
    fn names_with_dots_share_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["a.b", "a.c"].map(|name| folder.path().join(name));
        assert_ne!(temporary(&one), temporary(&two));
        // That of the other one is being written.
        std::fs::create_dir(temporary(&two)).unwrap();
        put_durably(&one, b"one").unwrap();
        assert_eq!(std::fs::read(&one).unwrap(), b"one");
        put_durably(&two, b"two").unwrap_err();
        assert!(!temporary(&one).exists());
        remove_durably(&one).unwrap();
        remove_durably(&one).unwrap();
        assert!(!one.exists());
    }
}
