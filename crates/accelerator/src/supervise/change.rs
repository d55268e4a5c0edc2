//! Changes of a served cache: it grows, or moves to another device. The server ends in order; the
//! next one makes the change before it serves, and its devices wait that long.
//!
//! Invariants:
//! - A change is asked of one server. If that ends before it serves, the change is settled, made or
//!   not, before another server begins, and before it is told.
//! - A replacement that is not asked for any more leaves the modes of the devices as they were.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::Path,
    time::{Duration, Instant},
};

use burgeon_accelerate::Mode;
use burgeon_block::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use super::{Device, Supervisor};
use crate::{
    control::{Attach, ControlRequest, Set},
    disk::Disk,
    folder::CacheFolder,
    plan::CacheChange,
    replace::settle_with,
};

/// Time between two questions of a command that waits for dirty blocks; one that stays away longer
/// was interrupted.
const DRAINING_MAX: Duration = Duration::from_secs(10);

/// A change of the cache, which a server makes before it serves.
pub(super) enum Change {
    /// The bytes that the file of the cache gets before.
    Grow(Option<u64>),
    /// The new device, and the bytes of its log.
    Replace(Disk, Option<u64>),
}

/// A replacement that waits for dirty blocks to be written back.
pub(super) struct Draining {
    /// Nobody else gets it meanwhile.
    new: Disk,
    until: Instant,
}

/// A replacement within which a server has ended.
pub(super) struct Unsettled {
    new: Disk,
    /// The recorded id of the former device.
    before: String,
}

impl Change {
    /// A change that may have been made in part, by a server that has ended.
    pub(super) fn unsettled(self, before: String) -> Option<Unsettled> {
        match self {
            // It is one write of the superblock.
            Self::Grow(_) => None,
            Self::Replace(new, _) => Some(Unsettled { new, before }),
        }
    }

    pub(super) fn plan(&self, folder: &CacheFolder) -> CacheChange {
        match self {
            Self::Grow(size) => CacheChange::Grow { size: *size },
            Self::Replace(new, log_size) => CacheChange::Replace {
                folder: folder.path().to_owned(),
                cache: new.path().to_owned(),
                cache_fd: new.as_fd().as_raw_fd(),
                log_size: *log_size,
            },
        }
    }

    /// The descriptor that the server inherits for it.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Grow(_) => None,
            Self::Replace(new, _) => Some(new.as_fd()),
        }
    }
}

impl Supervisor {
    /// Has the cache take the space that its device has got.
    pub(super) fn grow(&mut self, size: Option<u64>) -> Result<Value> {
        self.change(Change::Grow(size))
    }

    /// Puts another device under the cache; or tells how many dirty bytes are left to be written
    /// back before. What becomes dirty later is written back while the server ends.
    pub(super) fn replace(&mut self, path: &Path, log_size: Option<u64>) -> Result<Value> {
        let new = match self.draining.take() {
            Some(draining) if draining.new.path() == path => Ok(draining.new),
            _ => Disk::open(path),
        };
        let names: Vec<_> = self.devices.iter().map(|it| it.options.name.clone()).collect();
        let left = new.and_then(|new| {
            let mut left = 0u64;
            for name in names {
                left = left.saturating_add(self.write_back(&name)?);
            }
            Ok((new, left))
        });
        match left {
            Ok((new, 0)) => self.change(Change::Replace(new, log_size)),
            Ok((new, left)) => {
                self.draining = Some(Draining { new, until: Instant::now() + DRAINING_MAX });
                Ok(json!({ "is_replaced": false, "dirty_bytes": left }))
            }
            Err(error) => {
                self.resume_write_back();
                Err(error)
            }
        }
    }

    /// A command that was interrupted asks no more: the devices go on as they were.
    pub(super) fn end_draining(&mut self) {
        if self.draining.take_if(|draining| Instant::now() > draining.until).is_some() {
            let cache = self.folder.name();
            tracing::warn!(%cache, "the command that replaces the cache device does not go on");
            self.resume_write_back();
        }
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.server.as_mut().is_some_and(|server| matches!(server.try_wait(), Ok(None)))
    }

    /// Has dirty blocks of a device without users written back for a moment; returns the bytes that
    /// are left.
    pub(super) fn write_back(&mut self, name: &str) -> Result<u64> {
        if !self.is_running() {
            let may_be_dirty = self.folder.dirty().iter().any(|(dirty, _)| dirty == name);
            let what =
                || Error::new(ErrorKind::Unavailable, "the server of the cache does not run");
            return if may_be_dirty { Err(what()) } else { Ok(0) };
        }
        let question =
            ControlRequest::WriteBack { name: name.to_owned(), before: None, ends: true };
        let answer = self.folder.ask_server(&question)?;
        Ok(answer["dirty_bytes"].as_u64().unwrap_or(u64::MAX))
    }

    /// Devices that were put into write-through to be written back go on as they were. So does
    /// every server that starts.
    fn resume_write_back(&mut self) {
        if !self.is_running() {
            return;
        }
        let modes = self.devices.iter().filter(|it| it.options.mode == Mode::WriteBack.name());
        for Device { options: Attach { name, mode, .. }, .. } in modes {
            let set = Set { name: name.clone(), mode: Some(mode.clone()), ..Set::default() };
            if let Err(error) = self.folder.ask_server(&ControlRequest::Set(set)) {
                tracing::warn!(device = name, %error, "the device goes on in write-through");
            }
        }
    }

    /// Restarts the server, which makes a change of the cache before it serves.
    fn change(&mut self, change: Change) -> Result<Value> {
        self.stop_server();
        self.change = Some(change);
        let error = match self.start_server() {
            Ok(Some(changed)) => return changed,
            Ok(None) => Error::new(ErrorKind::Unavailable, "the server says nothing of the change"),
            Err(error) => error,
        };
        // Told or done: no later server makes it.
        let is_moved = self.settle_change()?;
        if !self.is_running()
            && let Err(error) = self.start_server()
        {
            self.tell_no_server(&error);
        }
        match is_moved {
            true => Ok(json!({ "cache": self.cache.path(), "size": self.cache.size() })),
            false => {
                let what = format!("the cache stays as it was: {error}");
                Err(Error::with_source(error.kind(), what, error))
            }
        }
    }

    /// Ends a replacement within which a server has ended. True if the cache has moved. After an
    /// error it is settled later, and the devices wait.
    pub(super) fn settle_change(&mut self) -> Result<bool> {
        let Some(Unsettled { new, before }) = self.unsettled.take() else { return Ok(false) };
        let settled = settle_with(&self.folder, &[&self.cache, &new]);
        match settled.and_then(|()| self.folder.recorded_id()) {
            Ok(id) if id == before => Ok(false),
            Ok(_) => {
                // The claim on the former device ends; nothing is cached.
                (self.cache, self.warm) = (new, false);
                Ok(true)
            }
            Err(error) => {
                self.unsettled = Some(Unsettled { new, before });
                Err(error)
            }
        }
    }
}
