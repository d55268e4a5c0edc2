//! Removes rights from a mapped foreign source: set-user-ID bits, capabilities and devices.
//!
//! ```text
//!   an image that was not built here, a tree on a nosuid,nodev mount
//!       │ into a mount whose programs and devices work (now, or by default the next time)
//!       └─► no set-user-ID, no set-group-ID, no capabilities; devices for root alone
//! ```

use std::fs::File;

use anyhow::Result;
use burgeon_daemon::{Honours, honoured, protocol::MountStatus};
use rustix::fs::FileType;

use super::tree::{Kind, Origin, TreeEntry, Xattrs};
use crate::{commands::Context, output::counted};

/// The rights that a source loses when it is mapped.
#[derive(Clone, Copy)]
pub(super) struct Disarm {
    suid: bool,
    dev: bool,
}

impl Disarm {
    /// From the rights that this host honours of the source, and those that the mount honours.
    pub(super) fn new(source: Honours, mount: Honours) -> Self {
        Self { suid: mount.suid && !source.suid, dev: mount.dev && !source.dev }
    }

    /// Changes `entries`; returns a sentence if an entry loses something.
    pub(super) fn apply(self, entries: &mut [TreeEntry]) -> Option<String> {
        let (mut programs, mut devices) = (0u64, 0u64);
        for entry in entries {
            if self.takes_device(entry) {
                (entry.mode, entry.owner) = (entry.mode & !0o7777, (0, 0));
                devices += 1;
            } else if self.suid && matches!(entry.kind, Kind::File(_)) && entry.mode & 0o6000 != 0 {
                entry.mode &= !0o6000;
                programs += 1;
            }
        }
        (programs + devices > 0).then(|| {
            format!(
                "{} lost set-user-ID, set-group-ID and capabilities, and {} can be opened by \
                 root alone, because this host has not built the mapped files from its own; \
                 chmod gives the rights back",
                counted(programs, "program"),
                counted(devices, "device")
            )
        })
    }

    /// The remaining attributes of `entry`.
    fn xattrs(self, entry: &TreeEntry, mut xattrs: Xattrs) -> Xattrs {
        if self.takes_device(entry) {
            // An ACL would give access again.
            xattrs.clear();
        } else if self.suid {
            xattrs.retain(|(name, _)| **name != *b"security.capability");
        }
        xattrs
    }

    fn takes_device(self, entry: &TreeEntry) -> bool {
        let kind = FileType::from_raw_mode(entry.mode);
        let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
        // 0,0 is not a device but overlayfs's whiteout.
        self.dev && is_device && matches!(entry.kind, Kind::Node(number) if number != 0)
    }
}

/// The rights that the mount honours now, or by default at its next mount.
pub(super) fn honours_of(context: &Context, status: &MountStatus) -> Honours {
    let by_default = honoured(&context.state, &status.digest.0);
    let now = &status.attributes;
    Honours { suid: now.suid || by_default.suid, dev: now.dev || by_default.dev }
}

/// An origin whose entries have lost these rights.
pub(super) struct Disarmed<'a, O>(pub(super) &'a O, pub(super) Disarm);

impl<O: Origin> Origin for Disarmed<'_, O> {
    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn fill(&self, entry: &TreeEntry, file: &File) -> Result<()> {
        self.0.fill(entry, file)
    }

    fn xattrs(&self, entry: &TreeEntry) -> Result<Xattrs> {
        Ok(self.1.xattrs(entry, self.0.xattrs(entry)?))
    }
}
