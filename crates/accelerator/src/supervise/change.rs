//! Changes of a served cache: it grows, or moves to another device. The server ends in order; the
//! next one makes the change before it serves, and its devices wait that long.
//!
//! Invariant: a change that a server has not reported is asked of the next one.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::Path,
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
};

/// A change of the cache, which a server makes before it serves.
pub(super) enum Change {
    Grow,
    /// The new device, and the bytes of its log.
    Replace(Disk, Option<u64>),
}

impl Change {
    pub(super) fn plan(&self, folder: &CacheFolder) -> CacheChange {
        match self {
            Self::Grow => CacheChange::Grow,
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
            Self::Grow => None,
            Self::Replace(new, _) => Some(new.as_fd()),
        }
    }
}

impl Supervisor {
    /// Has the cache take the space that its device has got.
    pub(super) fn grow(&mut self, size: Option<u64>) -> Result<Value> {
        size.map_or(Ok(()), |size| self.cache.extend(size))?;
        self.change(Change::Grow)
    }

    /// Puts another device under the cache; or tells how many dirty bytes are left to be written
    /// back before. What becomes dirty later is written back while the server ends.
    pub(super) fn replace(&mut self, path: &Path, log_size: Option<u64>) -> Result<Value> {
        let new = Disk::open(path)?;
        let names: Vec<_> = self.devices.iter().map(|it| it.options.name.clone()).collect();
        let left = names.iter().try_fold(0u64, |left, name| {
            Ok::<_, Error>(left.saturating_add(self.write_back(name)?))
        });
        match left {
            Ok(0) => {}
            Ok(left) => return Ok(json!({ "is_replaced": false, "dirty_bytes": left })),
            Err(error) => {
                self.resume_write_back();
                return Err(error);
            }
        }
        self.change(Change::Replace(new, log_size))
    }

    /// Devices that were put into write-through to be written back go on as they were.
    fn resume_write_back(&self) {
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
        self.start_server()?.unwrap_or_else(|| {
            Err(Error::new(ErrorKind::Unavailable, "the server says nothing about the change"))
        })
    }
}
