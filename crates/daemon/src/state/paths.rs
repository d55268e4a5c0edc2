//! The layout of the state directory.
//!
//! ```text
//!   store/                     the local store, unless --store names another
//!   images/<digest>/           seed, seed.info, map, manifest,   made from the store, may be lost
//!                              checksums
//!   images/<digest>/complete/  plain, sums, seed …               all of its data, may be lost
//!   cache/                     chunks of all images              may be lost
//!   cache.json                 its limits, as the user set them
//!   cache-dir.json             its folder, if that is on another disk; not the server's to write
//!   built/<digest>             record that this host built the image from its own files
//!   profiles/<digest>          profile of an image whose store is read-only
//!   provenance/<digest>        facts about an image that its store is not trusted for
//!   scratch/                   temporary copies of data that a build reads twice
//!   writes/<name>/             record.json, seed…, map, manifest, sprout   user data: removed only
//!                                                                          by `writes rm`
//!   mounts/<id>/               mount.json, seed, sprout, plain         one running mount
//!   grants/<id>                what may be opened for it; not the server's to write
//!   exchange.json              whether a device can be exchanged in this boot
//!   totals                     lifetime totals of all mounts, for metrics
//!   run/                       lock, api.sock, adopt.sock, daemon.log, reads-<id>  gone with the daemon
//! ```
//!
//! Only its owner can enter the directory, because it holds the contents of all users' files. A
//! directory that belongs to another user is refused, and no file in it is opened through a
//! symlink.

use std::{
    env,
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_source::beneath::link_to;
use rustix::{fs::OFlags, io::Errno};

use crate::id::MountId;

/// A state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDir {
    root: PathBuf,
}

impl StateDir {
    /// The default state directory: `/var/lib/burgeon` for root, else `$XDG_STATE_HOME/burgeon` or
    /// `~/.local/state/burgeon`.
    pub fn default_path() -> Result<PathBuf> {
        if rustix::process::geteuid().is_root() {
            return Ok(PathBuf::from("/var/lib/burgeon"));
        }
        let absolute =
            |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        if let Some(path) = absolute("XDG_STATE_HOME") {
            return Ok(path.join("burgeon"));
        }
        match absolute("HOME") {
            Some(home) => Ok(home.join(".local/state/burgeon")),
            None => Err(Error::new(
                ErrorKind::Invalid,
                "neither XDG_STATE_HOME nor HOME is set: name a directory with --state-dir",
            )),
        }
    }

    /// Opens `path`; makes it and its folders if they are missing.
    pub fn open(path: &Path) -> Result<Self> {
        let root = match own_directory(path)? {
            Some(directory) => directory,
            None => {
                make_private(path)?;
                own_directory(path)?.ok_or_else(|| gone(path))?
            }
        };
        close(path, &root)?;
        let state = Self::at(path, &root)?;
        state.refuse_symlinks()?;
        // Only a new state directory gets a store. A missing store may be on a disk that is not
        // mounted now: an empty one in its place would hide it when it comes back.
        if !state.run().is_dir() && !state.writes().is_dir() {
            make_private(&state.store())?;
        }
        let caches = [state.images(), state.cache(), state.profiles()];
        let records =
            [state.all_built(), state.writes(), state.mounts(), state.grants(), state.run()];
        for folder in caches.iter().chain(&records) {
            match make_private(folder).and_then(|()| own_directory(folder)) {
                // A disk of the cache that has died keeps nobody from `status` and `umount`.
                Err(error) if *folder == state.cache() && is_of_a_dead_disk(&error) => {
                    tracing::debug!(%error, "the folder of the cache cannot be used");
                }
                made => drop(made?),
            }
        }
        Ok(state)
    }

    /// Opens `path` for reading only: makes nothing, and nothing needs to exist.
    pub fn find(path: &Path) -> Result<Self> {
        match own_directory(path)? {
            Some(directory) => {
                let state = Self::at(path, &directory)?;
                state.refuse_symlinks()?;
                Ok(state)
            }
            None => Ok(Self { root: path.to_owned() }),
        }
    }

    /// A directory that another process has opened and checked, for a process that may read only
    /// parts of it.
    pub fn looked_at(root: PathBuf) -> Self {
        Self { root }
    }

    fn at(path: &Path, directory: &File) -> Result<Self> {
        let failed =
            |e| Error::io(format!("cannot open the state directory {}", path.display()), e);
        Ok(Self { root: fs::read_link(link_to(directory)).map_err(failed)? })
    }

    /// Refuses a folder that is a symlink, by name: no file below it could be opened.
    fn refuse_symlinks(&self) -> Result<()> {
        let records = [self.all_built(), self.writes(), self.mounts(), self.grants(), self.run()];
        let others = [self.images(), self.cache(), self.profiles(), self.provenance(), self.tags()];
        for folder in records.iter().chain(&others).chain([&self.documents(), &self.unpacked()]) {
            if folder.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink()) {
                let what = format!(
                    "cannot use the state directory {}: {} is a symlink, and Burgeon follows none inside \
                     its state directory, except for store; put the folder itself there, or move the \
                     whole state directory and name it with --state-dir",
                    self.root.display(),
                    folder.display()
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        }
        Ok(())
    }

    /// True if the directory exists.
    pub fn exists(&self) -> bool {
        self.root.is_dir()
    }

    /// The absolute path of the directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Cache of resolved registry tags.
    pub fn tags(&self) -> PathBuf {
        self.root.join("tags")
    }

    /// The documents of OCI images, such as their configurations.
    pub fn documents(&self) -> PathBuf {
        self.root.join("documents")
    }

    /// The digests of unpacked layers, as this host has computed them.
    pub fn unpacked(&self) -> PathBuf {
        self.root.join("unpacked")
    }

    /// The number of layers that unpack to another digest than an image states; the commands that
    /// read layers record them.
    pub(crate) fn differing_layers(&self) -> u64 {
        /// Most entries that are looked at; the commands keep fewer.
        const ENTRIES_MAX: usize = 200_000;
        let Ok(entries) = fs::read_dir(self.unpacked()) else { return 0 };
        let names = entries.take(ENTRIES_MAX).flatten().map(|entry| entry.file_name());
        names.filter(|name| name.to_string_lossy().ends_with(".differs")).count() as u64
    }

    /// The default store.
    pub fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The folder of prepared images.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// One prepared image.
    pub fn image(&self, digest: &Digest) -> PathBuf {
        self.images().join(digest.to_string())
    }

    /// The folder of the host's cache.
    pub fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }

    /// The reads of a mount that a server has recorded, for the supervisor.
    pub(crate) fn recorded_reads(&self, id: MountId) -> PathBuf {
        self.run().join(format!("reads-{id}"))
    }

    /// The record of the cache's folder, if that is or was another one.
    pub(crate) fn cache_dir_record(&self) -> PathBuf {
        self.root.join("cache-dir.json")
    }

    /// The settings of that cache.
    pub(crate) fn cache_settings(&self) -> PathBuf {
        self.root.join("cache.json")
    }

    /// The bounds of the host's cache in the configuration that the supervisor has read.
    pub(crate) fn configured_cache(&self) -> PathBuf {
        self.run().join("cache.json")
    }

    /// The folder that names images whose stored layers stay.
    pub(crate) fn kept_layers(&self) -> PathBuf {
        self.root.join("kept")
    }

    /// The file with the part of the host's cache that stored layers take.
    pub(crate) fn layer_share(&self) -> PathBuf {
        self.run().join("layers.json")
    }

    /// The folder of profiles whose images' stores are read-only.
    pub fn profiles(&self) -> PathBuf {
        self.root.join("profiles")
    }

    /// One profile.
    pub fn profile(&self, digest: &Digest) -> PathBuf {
        self.profiles().join(digest.to_string())
    }

    /// The folder of records of images built here.
    pub(crate) fn all_built(&self) -> PathBuf {
        self.root.join("built")
    }

    /// One such record.
    pub(crate) fn built(&self, digest: &Digest) -> PathBuf {
        self.all_built().join(digest.to_string())
    }

    /// Facts about images that do not depend on the writers of their stores.
    pub fn provenance(&self) -> PathBuf {
        self.root.join("provenance")
    }

    /// The folder for temporary copies of a build; made if it is missing.
    pub fn scratch(&self) -> Result<PathBuf> {
        let folder = self.root.join("scratch");
        make_private(&folder)?;
        own_directory(&folder)?;
        Ok(folder)
    }

    /// The folder of named writes.
    pub fn writes(&self) -> PathBuf {
        self.root.join("writes")
    }

    /// The folder of running mounts.
    pub fn mounts(&self) -> PathBuf {
        self.root.join("mounts")
    }

    /// One running mount.
    pub fn mount(&self, id: MountId) -> PathBuf {
        self.mounts().join(id.to_string())
    }

    /// The folder of the records of what the opener may open.
    pub(crate) fn grants(&self) -> PathBuf {
        self.root.join("grants")
    }

    /// The record of one mount.
    pub(crate) fn grant(&self, id: MountId) -> PathBuf {
        self.grants().join(id.to_string())
    }

    /// The lazy data of a mount that needs no server any more.
    pub(crate) fn plain_file(&self, id: MountId) -> PathBuf {
        self.mount(id).join("plain")
    }

    /// The record of what this kernel did to a scratch file system whose file was exchanged. Not in
    /// `run`, which is the server's to write.
    pub(crate) fn exchange_trial(&self) -> PathBuf {
        self.root.join("exchange.json")
    }

    /// The lock that keeps apart exchanges of a mount's device and our own umounts of it.
    pub(crate) fn exchange_lock(&self, id: MountId) -> PathBuf {
        self.mount(id).join("exchange.lock")
    }

    /// The lock of commands that allocate space for layers. Not in `run`, where the server could
    /// hold it.
    pub fn room_lock(&self) -> PathBuf {
        self.root.join("room.lock")
    }

    /// Locks, sockets and the log of the running daemon.
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Lifetime totals of all mounts, for metrics.
    pub(crate) fn totals(&self) -> PathBuf {
        self.root.join("totals")
    }

    /// The lock that the supervisor holds for life.
    pub fn lock_file(&self) -> PathBuf {
        self.run().join("lock")
    }

    /// The log file of a daemon that is not a systemd unit.
    pub fn log_file(&self) -> PathBuf {
        self.run().join("daemon.log")
    }

    /// A short name for this directory, the same on every start; used in names of cgroups and
    /// units.
    pub fn tag(&self) -> String {
        use std::os::unix::ffi::OsStrExt;
        Digest::of(self.root.as_os_str().as_bytes()).to_string()[..8].to_owned()
    }
}

/// True if the file system, or the disk below it, failed; not if this process lacks something.
fn is_of_a_dead_disk(error: &Error) -> bool {
    const DEAD: [Errno; 8] = [
        Errno::IO,
        Errno::NXIO,
        Errno::NODEV,
        Errno::ROFS,
        Errno::STALE,
        Errno::UCLEAN,
        Errno::NOTCONN,
        Errno::SHUTDOWN,
    ];
    let errno = error.cause::<io::Error>().and_then(Errno::from_io_error);
    errno.is_some_and(|errno| DEAD.contains(&errno))
}

/// Makes a directory and its parents; only the owner can enter the last one.
pub(crate) fn make_private(path: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("cannot make the directory {}", path.display()), e);
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(e)),
        _ => Ok(()),
    }
}

/// Opens the directory `path` of this user; `None` if there is none. Refuses those of other users,
/// who could change the contents while the directory is in use.
fn own_directory(path: &Path) -> Result<Option<File>> {
    let shown = path.display();
    // Records and messages are JSON.
    if path.to_str().is_none() {
        let what = format!("the name of the state directory {shown} is not UTF-8");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits() as i32;
    let directory = match File::options().read(true).custom_flags(flags).open(path) {
        Ok(directory) => directory,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) if e.kind() == std::io::ErrorKind::NotADirectory => {
            let part = path.ancestors().find(|part| part.symlink_metadata().is_ok());
            let part = part.unwrap_or(path).display();
            let what = format!(
                "cannot use the state directory {shown}: {part} is not a directory; name a directory with \
                 --state-dir"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Err(e) => return Err(Error::io(format!("cannot open the state directory {shown}"), e)),
    };
    let failed = |e| Error::io(format!("cannot look at the state directory {shown}"), e);
    let owner = directory.metadata().map_err(failed)?.uid();
    if owner == rustix::process::geteuid().as_raw() {
        return Ok(Some(directory));
    }
    let what = format!(
        "cannot use the state directory {shown}: it belongs to another user (uid {owner}), who can change \
         what is in it; run burgeon as that user, or name a directory of your own with --state-dir"
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

fn gone(path: &Path) -> Error {
    let what = format!("the state directory {} was removed just now", path.display());
    Error::new(ErrorKind::Unavailable, what)
}

/// Makes a state directory private that was made by hand, say by `mkdir /var/lib/burgeon`. A
/// directory with foreign contents is left alone: `--state-dir /tmp` must not lock all users out of
/// `/tmp`.
fn close(path: &Path, directory: &File) -> Result<()> {
    let failed = |e| Error::io(format!("cannot use the state directory {}", path.display()), e);
    let mode = directory.metadata().map_err(failed)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    // A restored backup may have only these two.
    let is_ours = path.join("writes").is_dir() && path.join("store").is_dir();
    let mut entries = fs::read_dir(path).map_err(failed)?.flatten();
    if !is_ours && entries.any(|entry| entry.file_name() != "lost+found") {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{} is accessible to other users and holds files that are not Burgeon's: name a \
                 new or an empty directory with --state-dir",
                path.display()
            ),
        ));
    }
    directory.set_permissions(fs::Permissions::from_mode(0o700)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::{fs, io, os::unix::fs::PermissionsExt};

    use burgeon_block::Error;

    use super::{StateDir, is_of_a_dead_disk};

    #[test]
    fn only_a_disk_that_died_is_done_without() {
        let of = |errno| {
            is_of_a_dead_disk(&Error::io("cannot make", io::Error::from_raw_os_error(errno)))
        };
        assert!([libc::EIO, libc::EROFS, libc::ENODEV, libc::ESTALE].map(of).iter().all(|it| *it));
        let of_this_process = [libc::EACCES, libc::EPERM, libc::EMFILE, libc::ENOMEM, libc::ENOSPC];
        assert!(!of_this_process.map(of).iter().any(|it| *it));
    }

    #[test]
    fn only_the_owner_can_enter() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("deep/state");
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let state = StateDir::open(&path).unwrap();
        for folder in [state.root().to_owned(), state.store(), state.writes(), state.run()] {
            assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        }
    }

    #[test]
    fn a_store_that_is_away_is_not_made_anew() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        fs::remove_dir(state.store()).unwrap();
        StateDir::open(temp.path()).unwrap();
        assert!(!state.store().exists());
    }

    #[test]
    fn a_directory_with_something_else_in_it_is_refused_and_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let like_tmp = temp.path().join("tmp");
        fs::create_dir_all(like_tmp.join("somebody")).unwrap();
        fs::set_permissions(&like_tmp, fs::Permissions::from_mode(0o1777)).unwrap();
        let error = StateDir::open(&like_tmp).unwrap_err();
        assert!(error.to_string().contains("--state-dir"), "{error}");
        assert_eq!(mode(&like_tmp), 0o1777);
        assert_eq!(fs::read_dir(&like_tmp).unwrap().count(), 1);
        // A state directory with open permissions is made private again.
        let ours = temp.path().join("ours");
        StateDir::open(&ours).unwrap();
        fs::set_permissions(&ours, fs::Permissions::from_mode(0o755)).unwrap();
        StateDir::open(&ours).unwrap();
        assert_eq!(mode(&ours), 0o700);
    }

    #[test]
    fn one_directory_has_one_tag() {
        let temp = tempfile::tempdir().unwrap();
        let a = StateDir::open(&temp.path().join("a")).unwrap();
        let again = StateDir::open(&temp.path().join("b/../a/")).err();
        assert!(
            again.is_none() || a.tag() == StateDir::open(&temp.path().join("a")).unwrap().tag()
        );
        assert_eq!(a.tag().len(), 8);
    }
}
