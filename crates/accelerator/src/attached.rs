//! The attached devices of a cache, as the next supervisor finds them: a ublk device and its
//! requests outlive all processes of the cache.
//!
//! Invariants:
//! - The document is written before `attach` has its answer, and goes with the last device.
//! - One of another boot counts as none: the kernel's devices have gone with it.

use std::{fs, path::PathBuf};

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::{
    control::Attach,
    durable::put_durably,
    folder::CacheFolder,
    front::{known_device, owner_of},
    writing_back::WriteBackSettings,
};

const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The document.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Attached {
    boot: String,
    pub(crate) policy: String,
    pub(crate) writing_back: WriteBackSettings,
    pub(crate) devices: Vec<AttachedDevice>,
}

/// A device of it.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct AttachedDevice {
    pub(crate) options: Attach,
    /// The device in front.
    pub(crate) path: PathBuf,
    /// Over ublk.
    pub(crate) ublk: Option<u32>,
}

impl Attached {
    pub(crate) fn new(
        policy: &str,
        writing_back: WriteBackSettings,
        devices: Vec<AttachedDevice>,
    ) -> Self {
        Self { boot: boot(), policy: policy.to_owned(), writing_back, devices }
    }

    /// Replaces the document of the cache.
    pub(crate) fn record(&self, folder: &CacheFolder) -> Result<()> {
        let failed = |e| Error::io(format!("cannot record the devices of {}", folder.name()), e);
        let text = serde_json::to_vec(self)
            .map_err(|e| Error::with_source(ErrorKind::Invalid, "cannot write a document", e))?;
        put_durably(&folder.attached(), &text).map_err(failed)
    }

    /// The document of this boot, if there is one that can be read.
    pub(crate) fn read(folder: &CacheFolder) -> Option<Self> {
        let known: Self = serde_json::from_slice(&fs::read(folder.attached()).ok()?).ok()?;
        (known.boot == boot()).then_some(known)
    }

    /// Nothing is attached any more.
    pub(crate) fn forget(folder: &CacheFolder) {
        let _ = fs::remove_file(folder.attached());
    }
}

impl CacheFolder {
    /// `Unavailable` if a device waits for a supervisor: with the records of its cache, its users
    /// would wait for ever.
    pub fn refuse_waiting(&self) -> Result<()> {
        let known = Attached::read(self).into_iter().flat_map(|known| known.devices);
        for device in known {
            let Some(number) = device.ublk else { continue };
            let (name, cache) = (&device.options.name, self.name());
            if known_device(number, owner_of(self, name))? {
                let what = format!(
                    "the device {name} of the cache {cache} waits for its processes, which died: attach it \
                     again, and detach it (`burgeon accelerate attach {cache} {} --name {name}`)",
                    device.options.slow.display()
                );
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        }
        Ok(())
    }
}

fn boot() -> String {
    fs::read_to_string(BOOT).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::Attached;
    use crate::{folder::CacheFolder, writing_back::WriteBackSettings};

    #[test]
    fn the_devices_of_another_boot_are_forgotten() {
        let space = tempfile::tempdir().unwrap();
        let folder = CacheFolder::at(space.path());
        assert!(Attached::read(&folder).is_none());
        let mut known = Attached::new("clock", WriteBackSettings::default(), Vec::new());
        known.record(&folder).unwrap();
        assert_eq!(Attached::read(&folder).unwrap().policy, "clock");
        known.boot = "another".to_owned();
        known.record(&folder).unwrap();
        assert!(Attached::read(&folder).is_none());
        Attached::forget(&folder);
        assert!(!folder.attached().exists());
    }
}
