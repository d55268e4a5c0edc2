//! The files that the opener may open for the server: a record for each mount.
//!
//! ```text
//!   plan of a mount, map ──► supervisor ──► grants/<id> ──► opener: is it named there, or beneath?
//! ```
//!
//! Invariants: only the supervisor writes here, because the server asks for the files and may be
//! under control of others (`roles.rs`); a record is replaced as a whole, has at most
//! [`RECORD_MAX`] bytes, and goes with its mount. It is not synced: mounts end with the machine.
//!
//! Files that are mapped or referred to can be millions. Beyond [`FILES_MAX`] bytes of paths, a
//! record names their folders instead, the deepest first.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Read,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, ObjectId, ObjectKind, Result};
use burgeon_source::opening::Manner;
use serde::{Deserialize, Serialize};

use crate::{
    id::MountId,
    state::{files, paths::StateDir},
};

/// The version of [`GrantRecord`] that this program writes and reads.
const FORMAT: u32 = 1;

/// The remedy for an unusable record: a new supervisor takes it from the mount's own record.
const RENEWED: &str = "`burgeon upgrade` makes it anew";

/// Longest record, in bytes.
const RECORD_MAX: u64 = 1 << 20;

/// Longest sum of the paths of files, and of the folders in their place, in bytes.
const FILES_MAX: usize = 128 << 10;

/// The paths and devices granted to one mount.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Grants {
    /// Folders of stores and layouts: everything beneath them.
    stores: BTreeSet<PathBuf>,
    /// Files with credentials.
    credentials: BTreeSet<PathBuf>,
    /// Files that an image refers to, and mapped ones.
    files: BTreeSet<PathBuf>,
    /// Folders of such files: everything beneath them.
    folders: BTreeSet<PathBuf>,
    /// Numbers of ublk devices.
    devices: BTreeSet<u32>,
}

/// Contents of `grants/<id>`.
#[derive(Serialize, Deserialize)]
struct GrantRecord {
    format: u32,
    #[serde(flatten)]
    grants: Grants,
}

/// The way to open a path.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum OpenRule<'a> {
    /// The path itself.
    Exactly,
    /// `name` in or beneath `folder`, and nothing outside of it.
    Beneath { folder: &'a Path, name: &'a Path },
}

impl Grants {
    /// Allows everything in a store or layout.
    pub(crate) fn store(&mut self, folder: &Path) {
        self.stores.insert(folder.to_owned());
    }

    /// Allows a file with credentials.
    pub(crate) fn credentials(&mut self, file: &Path) {
        // Records are JSON, and no such file had to be read so far.
        if file.is_absolute() && file.to_str().is_some() {
            self.credentials.insert(file.to_owned());
        }
    }

    /// Allows a file that is mapped or referred to.
    pub(crate) fn file(&mut self, file: &Path) {
        if !self.is_covered(file) && self.files.insert(file.to_owned()) {
            self.shorten();
        }
    }

    /// Allows the file that `object` stands for, if it stands for one.
    pub(crate) fn object(&mut self, object: &ObjectId) {
        if let Some(path) = object.below(ObjectKind::File) {
            self.file(&Path::new("/").join(path));
        }
    }

    /// Allows the files of a folder that is mapped.
    pub(crate) fn folder(&mut self, folder: &Path) {
        if !self.is_covered(folder) && self.folders.insert(folder.to_owned()) {
            self.shorten();
        }
    }

    /// Allows a ublk device.
    pub(crate) fn device(&mut self, number: u32) {
        self.devices.insert(number);
    }

    /// Adds all that `other` allows.
    pub(crate) fn add(&mut self, other: Self) {
        let Self { stores, credentials, files, folders, devices } = other;
        self.stores.extend(stores);
        self.credentials.extend(credentials);
        self.devices.extend(devices);
        folders.iter().for_each(|folder| self.folder(folder));
        files.iter().for_each(|file| self.file(file));
    }

    /// The way to open `path`; `None` if it is not allowed.
    pub(crate) fn permit<'a>(&self, path: &'a Path, manner: Manner) -> Option<OpenRule<'a>> {
        let (exact, above) = match manner {
            Manner::Stored | Manner::Folder => (&self.credentials, &self.stores),
            Manner::Referred | Manner::Identified => (&self.files, &self.folders),
        };
        if exact.contains(path) {
            return Some(OpenRule::Exactly);
        }
        let folder = path.ancestors().filter(|folder| above.contains(*folder)).last()?;
        Some(OpenRule::Beneath { folder, name: path.strip_prefix(folder).ok()? })
    }

    /// True if the ublk device `number` may be opened.
    pub(crate) fn has_device(&self, number: u32) -> bool {
        self.devices.contains(&number)
    }

    fn is_covered(&self, path: &Path) -> bool {
        path.ancestors().any(|folder| self.folders.contains(folder))
    }

    /// Replaces the deepest files and folders by the folder above, until the rest is short enough.
    fn shorten(&mut self) {
        let len = |all: &BTreeSet<PathBuf>| -> usize {
            all.iter().map(|path| path.as_os_str().len()).sum()
        };
        let depth = |path: &PathBuf| path.components().count();
        while len(&self.files) + len(&self.folders) > FILES_MAX {
            let Some(deepest) = self.files.iter().chain(&self.folders).map(depth).max() else {
                return;
            };
            let is_deep = |path: &PathBuf| depth(path) == deepest && deepest > 1;
            let deep: BTreeSet<PathBuf> = self
                .files
                .iter()
                .chain(&self.folders)
                .filter(|path| is_deep(path))
                .cloned()
                .collect();
            if deep.is_empty() {
                return;
            }
            self.folders.extend(deep.iter().filter_map(|path| path.parent().map(Path::to_owned)));
            self.folders.retain(|path| !deep.contains(path));
            let files = std::mem::take(&mut self.files);
            self.files = files.into_iter().filter(|path| !self.is_covered(path)).collect();
        }
    }
}

/// Replaces the record of mount `id`.
pub(crate) fn publish(state: &StateDir, id: MountId, grants: &Grants) -> Result<()> {
    let path = state.grant(id);
    let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
    let record = GrantRecord { format: FORMAT, grants: grants.clone() };
    let bytes = serde_json::to_vec(&record).map_err(|e| {
        Error::with_source(ErrorKind::Invalid, format!("cannot describe {}", path.display()), e)
    })?;
    if bytes.len() as u64 > RECORD_MAX {
        let what = format!(
            "the mount {id} would read from so many stores and folders that their names do not fit \
             into {RECORD_MAX} bytes: use another mount for some of them"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let new = path.with_extension("new");
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = files::open(&new, &mut options).map_err(failed)?;
    std::io::Write::write_all(&mut file, &bytes).map_err(failed)?;
    fs::rename(&new, &path).map_err(failed)
}

/// The record of mount `id`. `NotFound` without one.
pub(crate) fn find(state: &StateDir, id: MountId) -> Result<Grants> {
    let path = state.grant(id);
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let file = files::open(&path, File::options().read(true)).map_err(failed)?;
    read(&file)
        .map_err(|e| Error::with_source(e.kind(), format!("cannot use {}", path.display()), e))
}

/// Reads an open record. `Corrupt` if it is too long or damaged, `UnsupportedFormat` if a later
/// version has written it.
pub(crate) fn read(file: &File) -> Result<Grants> {
    let mut bytes = Vec::new();
    let read = file.take(RECORD_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|e| Error::io("cannot read the record of a mount's files", e))?;
    if bytes.len() as u64 > RECORD_MAX {
        let what = format!(
            "the record of a mount's files is damaged, it is longer than {RECORD_MAX} bytes: \
             {RENEWED}"
        );
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let record: GrantRecord = serde_json::from_slice(&bytes).map_err(|e| {
        let what = format!("the record of a mount's files is damaged: {RENEWED}");
        Error::with_source(ErrorKind::Corrupt, what, e)
    })?;
    if record.format != FORMAT {
        let what = format!(
            "the record of a mount's files has the format {}, which this version does not know: \
             {RENEWED}",
            record.format
        );
        return Err(Error::new(ErrorKind::UnsupportedFormat, what));
    }
    Ok(record.grants)
}

/// Removes the record of mount `id`: nothing is opened for it any more.
pub(crate) fn revoke(state: &StateDir, id: MountId) {
    if let Err(error) = files::remove_file(&state.grant(id)) {
        tracing::error!(mount = %id, %error, "files may still be opened for a mount that has ended");
    }
}

/// Removes the records of all mounts that are not in `living`, and remains of interrupted ones.
pub(crate) fn sweep(state: &StateDir, living: &[MountId]) {
    let entries = fs::read_dir(state.grants()).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let id = name.to_str().and_then(|name| name.parse::<MountId>().ok());
        if !id.is_some_and(|id| living.contains(&id)) {
            // A later start tries again.
            let _ = files::remove_file(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use burgeon_block::ErrorKind;
    use burgeon_source::opening::Manner;

    use super::{FILES_MAX, Grants, OpenRule, RECORD_MAX, find, publish, revoke, sweep};
    use crate::{id::MountId, state::paths::StateDir};

    fn beneath<'a>(folder: &'a str, name: &'a str) -> Option<OpenRule<'a>> {
        Some(OpenRule::Beneath { folder: Path::new(folder), name: Path::new(name) })
    }

    #[test]
    fn a_path_is_allowed_exactly_or_beneath_a_folder_of_its_kind() {
        let mut grants = Grants::default();
        grants.store(Path::new("/srv/store"));
        grants.credentials(Path::new("/home/me/key"));
        grants.credentials(Path::new("relative"));
        grants.file(Path::new("/data/file"));
        grants.folder(Path::new("/data/tree"));
        grants.device(7);
        let stored = |path| grants.permit(Path::new(path), Manner::Stored);
        assert_eq!(stored("/srv/store/packs/x"), beneath("/srv/store", "packs/x"));
        assert_eq!(stored("/srv/store"), beneath("/srv/store", ""));
        assert_eq!(stored("/home/me/key"), Some(OpenRule::Exactly));
        for path in ["/etc/passwd", "/srv/store2/x", "/srv", "/data/file", "/data/tree/x"] {
            assert_eq!(stored(path), None, "{path}");
        }
        // The opener resolves it in that folder, where it leads nowhere.
        assert_eq!(stored("/srv/store/../x"), beneath("/srv/store", "../x"));
        for manner in [Manner::Referred, Manner::Identified] {
            let allowed = |path| grants.permit(Path::new(path), manner);
            assert_eq!(allowed("/data/file"), Some(OpenRule::Exactly));
            assert_eq!(allowed("/data/tree/a/b"), beneath("/data/tree", "a/b"));
            for path in ["/data", "/data/file/x", "/home/me/key", "/srv/store/packs/x"] {
                assert_eq!(allowed(path), None, "{path}");
            }
        }
        assert!(grants.has_device(7) && !grants.has_device(8));
    }

    #[test]
    fn many_files_are_allowed_by_their_folders() {
        let mut grants = Grants::default();
        grants.store(Path::new("/srv/store"));
        grants.file(Path::new("/b"));
        for number in 0..100_000 {
            grants.file(Path::new(&format!(
                "/a/{}/{number}/a-file-of-a-name-of-some-length",
                number % 7
            )));
        }
        let allows = |path| grants.permit(Path::new(path), Manner::Referred).is_some();
        assert!(allows("/a/3/3/a-file-of-a-name-of-some-length") && allows("/b"));
        assert!(!allows("/c") && !allows("/a/9/x"), "{grants:?}");
        let bytes: usize =
            grants.files.iter().chain(&grants.folders).map(|path| path.as_os_str().len()).sum();
        assert!(bytes <= FILES_MAX, "{bytes}");
        assert_eq!(grants.stores.len(), 1, "stores are never widened");
    }

    #[test]
    fn records_are_replaced_bounded_and_removed() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let [one, other] = [1, 2].map(MountId::from_number);
        let mut grants = Grants::default();
        for number in 0..2 {
            grants.device(number);
            publish(&state, one, &grants).unwrap();
            assert_eq!(find(&state, one).unwrap(), grants);
        }
        assert_eq!(find(&state, other).unwrap_err().kind(), ErrorKind::NotFound);
        publish(&state, other, &grants).unwrap();
        fs::write(state.grants().join("00000001.new"), "").unwrap();
        sweep(&state, &[other]);
        assert_eq!(fs::read_dir(state.grants()).unwrap().count(), 1);
        for bytes in [&b"{"[..], &vec![b' '; RECORD_MAX as usize + 1], br#"{"format":2}"#] {
            fs::write(state.grant(other), bytes).unwrap();
            assert_eq!(find(&state, other).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        revoke(&state, other);
        assert_eq!(find(&state, other).unwrap_err().kind(), ErrorKind::NotFound);
        for number in 0..20_000 {
            grants.store(Path::new(&format!(
                "/a-store-of-a-name-of-considerable-length/{number:099}"
            )));
        }
        let refused = publish(&state, one, &grants).unwrap_err();
        assert!(refused.to_string().contains("use another mount"), "{refused}");
    }
}
