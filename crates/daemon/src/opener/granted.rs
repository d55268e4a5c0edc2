//! The records of the mounts' grants, as the opener knows them.
//!
//! ```text
//!   a request ─► a known record permits it, and is still linked? ─► open
//!                     └─ no ─► read the folder again ─► a record permits it? ─► open, else refuse
//! ```
//!
//! A record is replaced as a whole and removed with its mount, so a known one that no name leads to
//! any more is void: its open file tells that, with no clock and no notification.

use std::{
    fs::{self, File},
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use burgeon_source::{
    beneath::{link_to, open_beneath, open_without_symlinks},
    opening::{Manner, not_granted, open_checked, open_checked_beneath},
};
use rustix::fs::OFlags;

use crate::{
    id::MountId,
    state::grants::{self, Grants, OpenRule},
};

/// The grants of all living mounts.
pub(super) struct Granted {
    /// The folder with the records.
    path: PathBuf,
    known: Mutex<Known>,
    begun: Instant,
    /// The second, since the beginning, until which refusals are not logged.
    silent_until: AtomicU64,
}

#[derive(Default)]
struct Known {
    /// The folder, which stays open, because its path may come to lead to another one.
    folder: Option<Arc<OwnedFd>>,
    records: Arc<Vec<Arc<OpenRecord>>>,
}

struct OpenRecord {
    file: File,
    /// Device and inode, which no other file has while this one is open.
    identity: (u64, u64),
    grants: Grants,
}

impl OpenRecord {
    fn is_current(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.nlink() > 0)
    }
}

impl Granted {
    /// The records in the folder `path`.
    pub(super) fn new(path: PathBuf) -> Self {
        let (known, silent_until) = (Mutex::default(), AtomicU64::default());
        Self { path, known, begun: Instant::now(), silent_until }
    }

    /// Opens `path` if a living mount may read it; `PermissionDenied`, without an errno, otherwise.
    pub(super) fn open(&self, path: &Path, manner: Manner) -> io::Result<File> {
        let opened = self.first(|grants| {
            let opened = match grants.permit(path, manner)? {
                OpenRule::Exactly => open_checked(path, manner),
                OpenRule::Beneath { folder, name } => open_checked_beneath(folder, name, manner),
            };
            // It leads out of the folder; another mount may have been granted that place by name.
            let is_out = |e: &io::Error| e.raw_os_error() == Some(libc::EXDEV);
            if opened.as_ref().is_err_and(is_out) {
                return None;
            }
            Some(opened)
        });
        opened.unwrap_or_else(|| {
            self.log_refusal(&path.display());
            Err(not_granted())
        })
    }

    /// True if the ublk device `number` is a living mount's.
    pub(super) fn has_device(&self, number: u32) -> bool {
        let has = |grants: &Grants| grants.has_device(number).then_some(());
        let has = self.first(has).is_some();
        if !has {
            self.log_refusal(&format_args!("/dev/ublkc{number}"));
        }
        has
    }

    /// The first result of `look` at the grants of a mount that lives now.
    fn first<T>(&self, look: impl Fn(&Grants) -> Option<T>) -> Option<T> {
        let known = Arc::clone(&self.known().records);
        let look = |records: &[Arc<OpenRecord>]| {
            records
                .iter()
                .filter(|record| record.is_current())
                .find_map(|record| look(&record.grants))
        };
        look(&known).or_else(|| look(&self.read_again(&known)))
    }

    /// The records that are there now. Waits for nobody: each caller reads for itself.
    fn read_again(&self, known: &[Arc<OpenRecord>]) -> Arc<Vec<Arc<OpenRecord>>> {
        let Some(folder) = self.folder() else { return Arc::default() };
        let entries = fs::read_dir(link_to(&*folder)).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name());
        let is_record = |name: &std::ffi::OsString| {
            name.to_str().is_some_and(|name| name.parse::<MountId>().is_ok())
        };
        let records = names.filter(is_record).filter_map(|name| {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK;
            let file = File::from(open_beneath(&*folder, Path::new(&name), flags).ok()?);
            let metadata = file.metadata().ok().filter(fs::Metadata::is_file)?;
            let identity = (metadata.dev(), metadata.ino());
            if let Some(record) = known.iter().find(|record| record.identity == identity) {
                return Some(Arc::clone(record));
            }
            match grants::read(&file) {
                Ok(grants) => Some(Arc::new(OpenRecord { file, identity, grants })),
                Err(error) => {
                    tracing::error!(mount = ?name, %error, "cannot use the record of the files that the mount may read");
                    None
                }
            }
        });
        let records = Arc::new(records.collect::<Vec<_>>());
        self.known().records = Arc::clone(&records);
        records
    }

    /// The open folder; opened by its path if it is the first time, or if it was removed.
    fn folder(&self) -> Option<Arc<OwnedFd>> {
        let open = self.known().folder.clone();
        let is_there = |folder: &Arc<OwnedFd>| {
            rustix::fs::fstat(&**folder).is_ok_and(|folder| folder.st_nlink > 0)
        };
        if let Some(folder) = open.filter(is_there) {
            return Some(folder);
        }
        match open_without_symlinks(&self.path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(folder) => Some(Arc::clone(self.known().folder.insert(Arc::new(folder)))),
            Err(error) => {
                tracing::error!(folder = %self.path.display(), %error, "cannot see which files mounts may read");
                None
            }
        }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At most one line a second: the server may be under control of others.
    fn log_refusal(&self, what: &dyn std::fmt::Display) {
        let now = self.begun.elapsed().as_secs();
        let until = self.silent_until.load(Relaxed);
        let is_silent = now < until;
        if !is_silent
            && self.silent_until.compare_exchange(until, now + 1, Relaxed, Relaxed).is_ok()
        {
            let why = not_granted();
            tracing::error!(file = %what, error = %why, "refused to open a file for the server");
        }
    }
}
