//! A file for node_exporter, replaced as a whole.

use std::{
    fs::{self, OpenOptions, Permissions},
    io::Write,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::OFlags;

/// Writes the file for ever. A first failure ends it: the path is wrong; a later one may pass.
pub(super) fn write_for_ever<T>(
    path: &Path,
    interval: Duration,
    text: &dyn Fn() -> String,
) -> anyhow::Result<T> {
    publish(path, text().as_bytes(), 0o644)?;
    loop {
        thread::sleep(interval);
        if let Err(error) = publish(path, text().as_bytes(), 0o644) {
            eprintln!("burgeon: {error}");
        }
    }
}

/// Replaces `path` by a file with `bytes`: a reader sees the old one or the new one.
fn publish(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    publish_and(path, bytes, mode, |_| Ok(()))
}

/// The same; `prepare` may change the new file before it has its name.
pub(crate) fn publish_and(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    prepare: impl Fn(&Path) -> Result<()>,
) -> Result<()> {
    let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
    // Renaming would replace a device such as /dev/full.
    let kind = fs::symlink_metadata(path).map(|found| found.file_type());
    if kind.is_ok_and(|kind| !kind.is_file() && !kind.is_symlink()) {
        let what =
            format!("cannot write {}: it is not a regular file, and not replaced", path.display());
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    // node_exporter reads names that end in .prom.
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut file = options.custom_flags(flags.bits() as i32).open(&new).map_err(failed)?;
    let mut write = || {
        file.write_all(bytes).map_err(failed)?;
        file.set_permissions(Permissions::from_mode(mode)).map_err(failed)?;
        prepare(&new)?;
        fs::rename(&new, path).map_err(failed)
    };
    let written = write();
    if written.is_err() {
        // Half a file on a full disk helps nobody.
        let _ = fs::remove_file(&new);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use burgeon_block::{Error, ErrorKind};

    use super::{publish, publish_and};

    #[test]
    fn the_file_is_replaced_and_no_symlink_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("burgeon.prom");
        publish(&path, b"one", 0o644).unwrap();
        publish(&path, b"two", 0o644).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let precious = folder.path().join("precious");
        fs::write(&precious, "x").unwrap();
        symlink(&precious, folder.path().join("burgeon.prom.new")).unwrap();
        publish(&path, b"three", 0o644).unwrap_err();
        assert_eq!(fs::read(&precious).unwrap(), b"x");
    }

    #[test]
    fn a_file_that_cannot_be_finished_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("burgeon.prom");
        publish(&path, b"one", 0o644).unwrap();
        let full = || Error::new(ErrorKind::NoSpace, "the disk is full");
        publish_and(&path, b"two", 0o644, |_| Err(full())).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_a_file_is_replaced() {
        use std::os::unix::{fs::FileTypeExt, net::UnixListener};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let refused = publish(&path, b"one", 0o644).unwrap_err();
        assert!(refused.to_string().contains("not a regular file"), "{refused}");
        assert!(fs::metadata(&path).unwrap().file_type().is_socket());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
