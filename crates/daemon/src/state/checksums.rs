//! The files of recorded checksums: of images and of mapped files that have none of their own.
//!
//! ```text
//!   images/<digest>/checksums
//!   writes/<name>/area/checksums, mounts/<id>/area/checksums
//! ```
//!
//! The server writes them, but not the folders that they lie in, because others rely on the rest of
//! these. So the opener opens them for it, and asks [`ChecksumPath::new`] for each path that comes.
//!
//! Invariant: a [`ChecksumPath`] leads to one of these files, below the state directory.

use std::{
    fs::File,
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Component, Path, PathBuf},
};

use burgeon_block::Digest;

use super::{
    files,
    images::AREA,
    paths::{StateDir, make_private},
};
use crate::id::MountId;

/// The name of such a file.
pub(crate) const CHECKSUMS: &str = "checksums";

/// The path of such a file, below the state directory.
#[derive(PartialEq, Eq, Clone, Debug)]
pub(crate) struct ChecksumPath(PathBuf);

impl ChecksumPath {
    /// `None` for any other file.
    pub(crate) fn new(path: &Path) -> Option<Self> {
        // At most five matter.
        let mut names = Vec::new();
        for part in path.components().take(5) {
            let Component::Normal(name) = part else { return None };
            names.push(name.to_str()?);
        }
        let is_one = match names[..] {
            ["images", digest, CHECKSUMS] => digest.parse::<Digest>().is_ok(),
            ["mounts", id, AREA, CHECKSUMS] => id.parse::<MountId>().is_ok(),
            ["writes", _, AREA, CHECKSUMS] => true,
            _ => false,
        };
        is_one.then(|| Self(names.iter().collect()))
    }

    pub(crate) fn as_path(&self) -> &Path {
        &self.0
    }

    /// Opens it for reading and writing; makes it, and the folder of an image, if they are missing.
    /// `InvalidData` if something else has its name.
    pub(crate) fn open(&self, state: &StateDir) -> io::Result<File> {
        let path = state.root().join(&self.0);
        if self.0.starts_with("images") {
            // A failure is one to open the file.
            let _ = path.parent().map_or(Ok(()), make_private);
        }
        // A file that cannot be removed is refused below.
        let _ = files::make_way(&path);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        files::open(&path, &mut options)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write, path::Path};

    use super::ChecksumPath;
    use crate::state::paths::StateDir;

    #[test]
    fn only_files_of_checksums_are_such_paths() {
        let digest = burgeon_block::Digest::of(b"it");
        let good = [
            format!("images/{digest}/checksums"),
            "mounts/0a1b2c3d/area/checksums".to_owned(),
            "writes/w/area/checksums".to_owned(),
        ];
        for path in &good {
            assert_eq!(ChecksumPath::new(Path::new(path)).unwrap().as_path(), Path::new(path));
        }
        let others = [
            format!("images/{digest}/map"),
            format!("images/{digest}/checksums/more"),
            format!("images/{digest}/../checksums"),
            format!("/images/{digest}/checksums"),
            "images/other/checksums".to_owned(),
            "mounts/0a1b2c3d/checksums".to_owned(),
            "mounts/../area/checksums".to_owned(),
            "writes/w/record.json".to_owned(),
            "writes/w/area/extents".to_owned(),
            "grants/0a1b2c3d".to_owned(),
            String::new(),
        ];
        for path in &others {
            assert_eq!(ChecksumPath::new(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn they_are_made_where_they_are_missing_and_are_regular_files() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap().join("state");
        let state = StateDir::open(&root).unwrap();
        let name = format!("images/{}/checksums", burgeon_block::Digest::of(b"it"));
        let path = ChecksumPath::new(Path::new(&name)).unwrap();
        path.open(&state).unwrap().write_all(b"first").unwrap();
        assert_eq!(
            fs::metadata(path.open(&state).map(|_| root.join(&name)).unwrap()).unwrap().len(),
            5
        );
        // A link to a file of others is replaced, and a folder with files is refused.
        fs::remove_file(root.join(&name)).unwrap();
        let other = temp.path().join("other");
        fs::write(&other, "other").unwrap();
        std::os::unix::fs::symlink(&other, root.join(&name)).unwrap();
        path.open(&state).unwrap().write_all(b"mine!").unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"other");
        fs::remove_file(root.join(&name)).unwrap();
        fs::create_dir_all(root.join(&name).join("more")).unwrap();
        assert!(path.open(&state).is_err());
    }
}
