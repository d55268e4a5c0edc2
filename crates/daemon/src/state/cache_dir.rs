//! The folder of the host's cache: `cache/` of the state directory, or one on another disk.
//!
//! ```text
//!   --cache-dir, cache.dir ─► supervisor ── before each server: settle ──► cache-dir.json ─► server
//!                                             check, note the earlier one
//! ```
//!
//! Invariants:
//! - A server gets the folder only if root alone can exchange it or write to it
//!   (`tests::a_folder_that_others_can_change_is_refused`), and no server can change the record.
//! - An earlier folder is named until it is removed (`tests::an_earlier_folder_is_remembered`).

use std::{
    env, fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_cache::is_own_name;
use rustix::fs::StatVfsMountFlags;
use serde::{Deserialize, Serialize};

use super::{cache::Bounds, files, paths::StateDir};
use crate::host::backing_devices;

/// Most earlier folders that are remembered.
const EARLIER_MAX: usize = 16;
/// Bits of a mode: others may write; only owners may rename (`/tmp`).
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;
/// The folder in which `fsck` puts files.
const LOST_AND_FOUND: &str = "lost+found";

/// The record of the folder that the last server got.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Default, Debug)]
#[serde(default)]
pub(crate) struct CacheDir {
    /// The folder, if it is not that of the state directory.
    dir: Option<PathBuf>,
    /// The reason why the server did not get it, or that of the state directory: it caches nothing
    /// then.
    pub(crate) problem: Option<String>,
    /// Folders of earlier caches.
    earlier: Vec<PathBuf>,
    /// True if an option named the folder: a daemon that replaces this one needs the option, too.
    is_by_option: bool,
}

/// The variable of `--cache-dir`.
pub const CACHE_DIR: &str = "BURGEON_CACHE_DIR";

/// The folder that this process's options or configuration name.
static CONFIGURED: OnceLock<PathBuf> = OnceLock::new();

/// Takes the absolute path of the cache's folder; only the first call in a process has an effect.
pub fn configure(dir: PathBuf) {
    let _ = CONFIGURED.set(dir);
}

/// An error if the cache cannot be in `dir`, which an option names.
pub fn check(state: &StateDir, dir: &Path) -> Result<()> {
    let dir = usable(state, dir)?;
    match lack_of_space(state, &dir)? {
        None => Ok(()),
        Some(why) => Err(refused(ErrorKind::NoSpace, &dir, &why)),
    }
}

/// The reason, with its remedy, why a cache in the existing folder `dir` would keep nothing.
pub(crate) fn lack_of_space(state: &StateDir, dir: &Path) -> Result<Option<String>> {
    let (_, keep_free) = Bounds::read(state).unwrap_or_default().amounts();
    let failed = |e| Error::io(format!("cannot ask {} for its free space", dir.display()), e);
    let disk = rustix::fs::statvfs(dir).map_err(|e| failed(e.into()))?;
    let [size, free] = [disk.f_blocks, disk.f_bavail].map(|it| it.saturating_mul(disk.f_frsize));
    let floor = keep_free.of(size);
    let is_full = free.saturating_add(allocated(dir)) <= floor;
    Ok(is_full.then(|| {
        format!(
            "its disk is full: {free} bytes are free, and the cache leaves {floor} free; free some, \
             or lower the floor (`burgeon cache resize --keep-free`, cache.keep-free)"
        )
    }))
}

/// The folder of the cache of the running server, or of the last one; and the one that a new server
/// would get, if that is another.
pub fn current_and_next(state: &StateDir) -> (PathBuf, Option<PathBuf>) {
    let current = CacheDir::read(state).folder(state);
    let next = wanted(state).unwrap_or_else(|| state.cache());
    let next = (next != current).then_some(next);
    (current, next)
}

/// The folder that a new server would get, and the reason why it would not.
pub(crate) fn next(state: &StateDir) -> (PathBuf, Option<String>) {
    let Some(dir) = wanted(state) else { return (state.cache(), None) };
    let problem = usable(state, &dir).err().map(|error| error.to_string());
    (dir, problem)
}

/// The configured folder; `None` for that of the state directory.
fn wanted(state: &StateDir) -> Option<PathBuf> {
    let dir = CONFIGURED.get()?;
    let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
    (dir != state.cache()).then_some(dir)
}

impl CacheDir {
    /// The record. A damaged one is that of a cache in the state directory.
    pub(crate) fn read(state: &StateDir) -> Self {
        let path = state.cache_dir_record();
        match files::read_json(&path) {
            Ok(record) => record,
            Err(error) if error.kind() == ErrorKind::NotFound => Self::default(),
            Err(error) => {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    "cannot read the record of the cache's folder: using the state directory"
                );
                Self::default()
            }
        }
    }

    /// The folder, whether the server got it or not.
    pub(crate) fn folder(&self, state: &StateDir) -> PathBuf {
        self.dir.clone().unwrap_or_else(|| state.cache())
    }

    /// The folder that an option named.
    pub(crate) fn given(&self, state: &StateDir) -> Option<PathBuf> {
        self.is_by_option.then(|| self.folder(state))
    }

    /// The folder outside of the state directory, if the server gets one.
    pub(crate) fn elsewhere(&self) -> Option<&Path> {
        self.dir.as_deref().filter(|_| self.problem.is_none())
    }

    /// Folders of earlier caches that still take space.
    pub(crate) fn earlier(&self) -> Vec<PathBuf> {
        self.earlier.iter().filter(|dir| holds_a_cache(dir)).cloned().collect()
    }

    /// Decides which folder the next server gets, and records it. After an error, that is the one
    /// in the state directory.
    pub(crate) fn settle(state: &StateDir) -> Result<Self> {
        let is_by_option = env::var_os(CACHE_DIR).is_some_and(|dir| !dir.is_empty());
        Self::settle_at(state, wanted(state), is_by_option)
    }

    fn settle_at(state: &StateDir, dir: Option<PathBuf>, is_by_option: bool) -> Result<Self> {
        let before = Self::read(state);
        let problem = match &dir {
            Some(dir) => usable(state, dir).and_then(|dir| readable(&dir)).err(),
            None => readable(&state.cache()).err(),
        };
        if let Some(error) = &problem {
            tracing::error!(
                path = %dir.as_deref().unwrap_or(&state.cache()).display(),
                %error,
                "the cache's folder is unusable: fetched data is not cached"
            );
        }
        let mut earlier = before.earlier();
        let [was, is] = [before.folder(state), dir.clone().unwrap_or_else(|| state.cache())];
        earlier.retain(|folder| *folder != is);
        if was != is && holds_a_cache(&was) && !earlier.contains(&was) {
            tracing::warn!(
                earlier = %was.display(),
                now = %is.display(),
                "the cache has another folder now: the earlier one stays until somebody removes it"
            );
            earlier.push(was);
        }
        earlier.drain(..earlier.len().saturating_sub(EARLIER_MAX));
        let problem = problem.map(|error| error.to_string());
        let now = Self { dir, problem, earlier, is_by_option };
        if now != before {
            let path = state.cache_dir_record();
            // The earlier record names a folder that may be missing or unsafe by now.
            files::publish_json(&path, &now).inspect_err(|_| {
                let _ = files::remove_file(&path);
            })?;
        }
        Ok(now)
    }
}

fn refused(kind: ErrorKind, dir: &Path, why: &str) -> Error {
    Error::new(kind, format!("the cache cannot be in {}: {why}", dir.display()))
}

/// An error if the disk of `dir` has died: a server could not even enter its sandbox.
fn readable(dir: &Path) -> Result<()> {
    match fs::read_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            let what = format!(
                "the cache cannot be in {}: check its disk (`dmesg`), and mount it again",
                dir.display()
            );
            Err(Error::io(what, e))
        }
        _ => Ok(()),
    }
}

/// The real path of `dir`, if a server may have it.
fn usable(state: &StateDir, dir: &Path) -> Result<PathBuf> {
    let path = fs::canonicalize(dir).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            let why = format!(
                "it is not there; mount its disk, or make it: `install -d -m 700 {}`",
                dir.display()
            );
            refused(ErrorKind::NotFound, dir, &why)
        }
        _ => Error::io(format!("the cache cannot be in {}", dir.display()), e),
    })?;
    if path == state.cache() {
        return Ok(path);
    }
    let invalid = |why: &str| Err(refused(ErrorKind::Invalid, &path, why));
    // Its record is JSON.
    if path.to_str().is_none() {
        return invalid("its name is not UTF-8");
    }
    if path.starts_with(state.root()) || state.root().starts_with(&path) {
        return invalid(
            "it may neither be in the state directory nor hold it; take another folder",
        );
    }
    backing_devices::refuse_burgeon(&path, "the cache's folder")?;
    let owner = rustix::process::geteuid().as_raw();
    for part in path.ancestors() {
        let failed = |e| Error::io(format!("cannot look at {}", part.display()), e);
        let metadata = part.symlink_metadata().map_err(failed)?;
        let shown = part.display();
        if !metadata.is_dir() {
            return invalid("it is not a folder");
        }
        if metadata.uid() != 0 && metadata.uid() != owner {
            let why = format!("{shown} belongs to user {}; chown it to root", metadata.uid());
            return invalid(&why);
        }
        let is_shared = part != path && metadata.mode() & STICKY != 0;
        if metadata.mode() & WRITABLE_BY_OTHERS != 0 && !is_shared {
            let why = format!("others can write to {shown}; `chmod go-w {shown}`");
            return invalid(&why);
        }
    }
    let failed =
        |e: rustix::io::Errno| Error::io(format!("cannot use {}", path.display()), e.into());
    if rustix::fs::statvfs(&path).map_err(failed)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        let why = "its file system is mounted read-only; mount it with -o rw";
        return Err(refused(ErrorKind::LocalIo, &path, why));
    }
    if path.file_name().is_some_and(|name| name == LOST_AND_FOUND) {
        return invalid("`fsck` puts files there; take another folder");
    }
    let is_foreign = |name: &String| name != LOST_AND_FOUND && !is_own_name(name);
    if let Some(name) = names_in(&path).find(is_foreign) {
        let why = format!("it holds other files, such as {name:?}; take an empty folder");
        return invalid(&why);
    }
    Ok(path)
}

fn names_in(dir: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

fn holds_a_cache(dir: &Path) -> bool {
    names_in(dir).any(|name| is_own_name(&name))
}

/// Bytes that the cache's files in `dir` take.
pub(crate) fn allocated(dir: &Path) -> u64 {
    let own = names_in(dir).filter(|name| is_own_name(name));
    let sizes = own.filter_map(|name| dir.join(name).symlink_metadata().ok());
    sizes.map(|metadata| metadata.blocks().saturating_mul(512)).sum()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
        path::Path,
    };

    use burgeon_block::ErrorKind;

    use super::{CacheDir, check, usable};
    use crate::state::paths::StateDir;

    #[test]
    fn a_folder_that_others_can_change_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        let dir = temp.path().join("cache");
        let said = |path: &Path| usable(&state, path).unwrap_err().to_string();
        assert_eq!(usable(&state, &dir).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(said(&dir).contains("install -d -m 700"), "{}", said(&dir));
        fs::create_dir(&dir).unwrap();
        let mode = |mode| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o770);
        assert!(said(&dir).contains("chmod go-w"), "{}", said(&dir));
        // The mode of /tmp is fine above it, and not for itself.
        mode(0o1777);
        assert!(said(&dir).contains("chmod go-w"), "{}", said(&dir));
        fs::create_dir(dir.join("inner")).unwrap();
        usable(&state, &dir.join("inner")).unwrap();
        mode(0o777);
        assert!(said(&dir.join("inner")).contains("chmod go-w"), "{}", said(&dir.join("inner")));
        mode(0o700);
        fs::remove_dir(dir.join("inner")).unwrap();
        fs::create_dir(dir.join("lost+found")).unwrap();
        let lost = dir.join("lost+found");
        assert!(said(&lost).contains("fsck"), "{}", said(&lost));
        fs::write(dir.join("arena-00000001"), b"").unwrap();
        assert_eq!(usable(&state, &dir).unwrap(), fs::canonicalize(&dir).unwrap());
        // The disk of the tests may be nearly full.
        fs::write(state.cache_settings(), r#"{"keep_free":{"bytes":0}}"#).unwrap();
        check(&state, &dir).unwrap();
        fs::write(state.cache_settings(), r#"{"keep_free":{"bytes":18446744073709551615}}"#)
            .unwrap();
        assert_eq!(check(&state, &dir).unwrap_err().kind(), ErrorKind::NoSpace);
        let link = temp.path().join("link");
        symlink(&dir, &link).unwrap();
        assert_eq!(usable(&state, &link).unwrap(), fs::canonicalize(&dir).unwrap());
        fs::write(dir.join("letters"), b"").unwrap();
        assert!(said(&dir).contains("letters"), "{}", said(&dir));
        for other in [state.root(), temp.path(), &state.images()] {
            assert!(said(other).contains("state directory"), "{}", said(other));
        }
        let file = temp.path().join("file");
        fs::write(&file, b"").unwrap();
        assert!(said(&file).contains("not a folder"), "{}", said(&file));
    }

    #[test]
    fn an_earlier_folder_is_remembered() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        let dirs = ["one", "two"].map(|name| fs::canonicalize(temp.path()).unwrap().join(name));
        let fill = |dir: &Path| fs::write(dir.join("lock"), b"").unwrap();
        assert_eq!(CacheDir::settle_at(&state, None, false).unwrap(), CacheDir::default());
        fill(&state.cache());
        let missing = CacheDir::settle_at(&state, Some(dirs[0].clone()), true).unwrap();
        assert!(missing.problem.is_some() && missing.elsewhere().is_none());
        for dir in &dirs {
            fs::create_dir(dir).unwrap();
            fill(dir);
            let now = CacheDir::settle_at(&state, Some(dir.clone()), true).unwrap();
            assert_eq!((now.elsewhere(), &now.problem), (Some(&**dir), &None));
            assert_eq!(CacheDir::read(&state), now);
        }
        let earlier = [state.cache(), dirs[0].clone()];
        assert_eq!(CacheDir::read(&state).earlier(), earlier);
        fs::remove_file(dirs[0].join("lock")).unwrap();
        let back = CacheDir::settle_at(&state, None, false).unwrap();
        assert_eq!(back.folder(&state), state.cache());
        assert_eq!(back.earlier(), [dirs[1].clone()]);
    }
}
