//! The slow devices whose newest content may lie in a cache alone, as the state directory knows
//! them.
//!
//! ```text
//!   accelerate/NAME/  dirty/DEVICE   a document, from before the first dirty block until after the last
//!                     distrust       the cache device has failed: the bytes that were dirty then
//! ```
//!
//! So `status`, `doctor` and the supervisor know of dirty blocks when the cache device cannot be
//! read, and a server that follows a dead one knows which bytes went with it.
//!
//! Invariant: while a cache has a dirty block of a device, its document is there, durably.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::{Path, PathBuf},
};

use burgeon_accelerate::{Dirty, SlowDevice};
use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::{
    disk::{Disk, PARTITION},
    durable::put_durably,
    folder::{CacheFolder, hex},
};

/// The most ranges of a device that are recorded; more are joined to fewer, longer ones.
const RANGES_MAX: usize = 100_000;

/// A slow device that a cache may have newer content of.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug, Default)]
pub struct DirtyOwner {
    /// Its place when it was attached ([`Disk::origin`]); empty if that is not known.
    pub slow: PathBuf,
    /// Its serial number, if it has one.
    pub serial: Option<String>,
    /// The id of the cache device.
    pub cache: String,
    /// It was written to without the cache, whose device had failed: its content tells nothing.
    #[serde(default)]
    pub changed: bool,
}

impl DirtyOwner {
    /// Of a slow device, with the id of its cache device.
    pub(crate) fn of(slow: &Disk, cache: [u8; 16]) -> Self {
        Self { slow: slow.origin(), serial: slow.serial(), cache: hex(cache), changed: false }
    }

    /// True if `slow` is probably this device, its disk, or a partition of it.
    fn overlaps(&self, slow: &Disk) -> bool {
        let (Some(known), Some(serial)) = (&self.serial, slow.serial()) else {
            return self.is(slow);
        };
        let parts = |serial: &str| {
            let (disk, partition) = match serial.split_once(PARTITION) {
                Some((disk, number)) => (disk, Some(number)),
                None => (serial, None),
            };
            (disk.to_owned(), partition.map(str::to_owned))
        };
        let ((disk, one), (other_disk, other)) = (parts(known), parts(&serial));
        disk == other_disk && (one.is_none() || other.is_none() || one == other)
    }

    /// True if `slow` is probably this device.
    pub(crate) fn is(&self, slow: &Disk) -> bool {
        match (&self.serial, slow.serial()) {
            (Some(known), Some(serial)) => *known == serial,
            _ => self.slow == slow.origin(),
        }
    }
}

/// The documents of a cache.
pub(crate) struct Owners(PathBuf);

impl Owners {
    pub(crate) fn at(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// The document of a device.
    pub(crate) fn get(&self, name: &str) -> Option<DirtyOwner> {
        read(&self.0.join(name))
    }

    /// Records a device, durably.
    pub(crate) fn put(&self, name: &str, owner: &DirtyOwner) -> Result<()> {
        let path = self.0.join(name);
        let failed = |e: io::Error| Error::io(format!("cannot write {}", path.display()), e);
        if read(&path).is_some_and(|known| known == *owner) {
            return Ok(());
        }
        fs::create_dir_all(&self.0).map_err(failed)?;
        let text = serde_json::to_vec(owner).map_err(|e| failed(e.into()))?;
        put_durably(&path, &text).map_err(failed)
    }

    /// Records the `name` of a device alone, unless its record has more already.
    pub(crate) fn note(&self, name: &str, cache: [u8; 16]) -> Result<()> {
        match self.get(name) {
            Some(_) => Ok(()),
            None => self.put(name, &DirtyOwner { cache: hex(cache), ..DirtyOwner::default() }),
        }
    }

    /// Records that every device that was ever attached may be written to without the cache.
    pub(crate) fn note_changed(&self) -> Result<()> {
        let attached = |(_, owner): &(String, DirtyOwner)| !owner.slow.as_os_str().is_empty();
        self.all()
            .into_iter()
            .filter(attached)
            .try_for_each(|(name, owner)| self.put(&name, &DirtyOwner { changed: true, ..owner }))
    }

    /// True if `slow` is the device `name`, and its content tells nothing. `Invalid` if only its
    /// content could tell whether it is, unless a loss is accepted: then its content decides.
    pub(crate) fn is_changed(&self, name: &str, slow: &Disk, accepts_loss: bool) -> Result<bool> {
        match self.get(name).filter(|owner| owner.changed) {
            Some(owner) if !owner.is(slow) && !accepts_loss => {
                let what = format!(
                    "the cache has newer content of {}, which was written to without the cache, so its \
                     content does not show whether {} is that device: attach the original one, or \
                     give the cache's content up (--accept-loss)",
                    owner.slow.display(),
                    slow.path().display()
                );
                Err(Error::new(ErrorKind::Invalid, what))
            }
            Some(owner) => Ok(owner.is(slow)),
            None => Ok(false),
        }
    }

    /// The cache has nothing of the device any more.
    pub(crate) fn remove(&self, name: &str) {
        let path = self.0.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "cannot remove what was known of a device");
            }
            _ => {}
        }
    }

    /// The cache has nothing of any device, durably.
    pub(crate) fn remove_all(&self) -> Result<()> {
        self.all().iter().for_each(|(name, _)| self.remove(name));
        match File::open(&self.0).and_then(|folder| folder.sync_all()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format!("cannot write {}", self.0.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// `Invalid` if the dirty blocks of a device are on another cache device than this one, unless
    /// `is_lost` says that their loss is accepted.
    pub(crate) fn check(&self, cache: [u8; 16], is_lost: impl Fn(&str) -> bool) -> Result<()> {
        let (known, id) = (self.all(), hex(cache));
        for (name, _) in known.into_iter().filter(|(_, owner)| owner.cache != id) {
            if !is_lost(&name) {
                let what = format!(
                    "newer content of the slow device {name} is on another cache device: give the \
                     cache that device back; or accept the loss (`burgeon accelerate attach \
                     --accept-loss` of {name})"
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            self.remove(&name);
        }
        Ok(())
    }
}

/// `Unavailable` if `slow` is a device that a cache has newer content of, but for
/// `name` in the cache of `own`: whoever used it would use old content, and change it.
pub fn refuse_elsewhere(own: &CacheFolder, name: &str, slow: &Disk) -> Result<()> {
    for folder in own.siblings() {
        for (other, owner) in folder.dirty() {
            let is_own = folder.path() == own.path() && other == name;
            if !is_own && owner.overlaps(slow) {
                let (cache, slow) = (folder.name(), slow.path().display());
                let what = format!(
                    "the cache {cache} has newer content of {slow}: attach it there as {other}, and detach \
                     it (`burgeon accelerate attach {cache} {slow} --name {other}`)"
                );
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        }
    }
    Ok(())
}

/// A document that cannot be read is one of an unknown device.
fn read(path: &Path) -> Option<DirtyOwner> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        text => Some(serde_json::from_slice(&text.unwrap_or_default()).unwrap_or_default()),
    }
}

impl CacheFolder {
    /// The folder of the documents.
    pub(crate) fn owners(&self) -> PathBuf {
        self.path().join("dirty")
    }

    /// Names of the slow devices that the cache may have newer content of.
    pub fn dirty(&self) -> Vec<(String, DirtyOwner)> {
        Owners::at(&self.owners()).all()
    }
}

impl Owners {
    /// All of them, by name.
    pub(crate) fn all(&self) -> Vec<(String, DirtyOwner)> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let known = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            (!name.ends_with('~')).then_some(())?;
            Some((name, read(&entry.path())?))
        });
        let mut known: Vec<_> = known.collect();
        known.sort_by(|a, b| a.0.cmp(&b.0));
        known
    }
}

#[derive(Serialize, Deserialize)]
struct Gone {
    name: String,
    ranges: Vec<(u64, u64)>,
}

/// Records, durably and not on the cache device, that the content must not be used, and which bytes
/// the slow devices lack.
pub(crate) fn record_distrust(place: &Path, dirty: &[Dirty]) -> Result<()> {
    let failed = |e: io::Error| Error::io(format!("cannot write {}", place.display()), e);
    let gone = dirty.iter().map(|dirty| Gone {
        name: dirty.name.clone(),
        ranges: joined(&dirty.ranges).iter().map(|range| (range.start, range.end)).collect(),
    });
    let text = serde_json::to_vec(&gone.collect::<Vec<_>>()).map_err(|e| failed(e.into()))?;
    put_durably(place, &text).map_err(failed)
}

/// The record of [`record_distrust`]; `Corrupt` if it cannot be read.
pub(crate) fn gone(place: &Path) -> Result<Vec<Dirty>> {
    let text =
        fs::read(place).map_err(|e| Error::io(format!("cannot read {}", place.display()), e))?;
    let gone: Vec<Gone> = serde_json::from_slice(&text).map_err(|e| {
        Error::with_source(ErrorKind::Corrupt, format!("{} is damaged", place.display()), e)
    })?;
    let dirty = gone.into_iter().map(|gone| Dirty {
        name: gone.name,
        ranges: gone.ranges.into_iter().map(|(start, end)| start..end).collect(),
    });
    Ok(dirty.collect())
}

/// At most [`RANGES_MAX`] ranges that cover all of these.
fn joined(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let step = ranges.len().div_ceil(RANGES_MAX).max(1);
    let join = |ranges: &[Range<u64>]| match ranges {
        [first, .., last] => first.start..last.end,
        [only] => only.clone(),
        [] => 0..0,
    };
    ranges.chunks(step).map(join).collect()
}

#[cfg(test)]
mod tests {
    use burgeon_accelerate::Dirty;

    use super::{DirtyOwner, Owners, RANGES_MAX, gone, joined, record_distrust, refuse_elsewhere};
    use crate::{disk::Disk, folder::CacheFolder};

    #[test]
    fn devices_are_known_until_they_are_removed() {
        let state = tempfile::tempdir().unwrap();
        let folder = CacheFolder::of(state.path(), "fast").unwrap();
        assert!(folder.dirty().is_empty());
        std::fs::create_dir_all(folder.path()).unwrap();
        let slow = state.path().join("slow");
        std::fs::write(&slow, [0; 8192]).unwrap();
        let slow = Disk::open(&slow).unwrap();
        let owner = DirtyOwner::of(&slow, [7; 16]);
        let owners = Owners::at(&folder.owners());
        owners.put("data", &owner).unwrap();
        owners.put("data", &owner).unwrap();
        std::fs::write(folder.owners().join("broken"), "{").unwrap();
        assert_eq!(
            folder.dirty(),
            [("broken".into(), DirtyOwner::default()), ("data".into(), owner.clone())]
        );
        // It is on another cache device, until that is lost.
        assert!(owners.check([7; 16], |_| false).unwrap_err().to_string().contains("broken"));
        owners.check([7; 16], |name| name == "broken").unwrap();
        assert!(owners.check([8; 16], |_| false).unwrap_err().to_string().contains("data"));
        owners.note_changed().unwrap();
        owners.note("data", [9; 16]).unwrap();
        assert!(owners.is_changed("data", &slow, false).unwrap());
        assert!(owners.is_changed("data", &slow, true).unwrap());
        // Another device is never taken for one whose content tells nothing.
        let other = state.path().join("other");
        std::fs::write(&other, [0; 8192]).unwrap();
        let other = Disk::open(&other).unwrap();
        assert!(owners.is_changed("data", &other, false).is_err());
        assert!(!owners.is_changed("data", &other, true).unwrap());
        owners.note("new", [7; 16]).unwrap();
        owners.note_changed().unwrap();
        assert!(!owners.is_changed("new", &other, false).unwrap());
        owners.remove("new");
        assert_eq!(folder.dirty(), [("data".into(), DirtyOwner { changed: true, ..owner })]);
        owners.remove("data");
        owners.remove("data");
        assert!(folder.dirty().is_empty());
    }

    #[test]
    fn a_device_goes_to_the_cache_that_has_its_newer_content() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join("slow");
        std::fs::write(&path, [0; 8192]).unwrap();
        let folders = ["fast", "other"].map(|name| CacheFolder::of(state.path(), name).unwrap());
        folders.iter().for_each(|folder| folder.record(&path, [1; 16]).unwrap());
        assert_eq!(folders[0].cache().unwrap(), path);
        assert!(folders[0].is_its_cache([1; 16]) && !folders[0].is_its_cache([2; 16]));
        let slow = Disk::open(&path).unwrap();
        refuse_elsewhere(&folders[0], "data", &slow).unwrap();
        Owners::at(&folders[1].owners()).put("data", &DirtyOwner::of(&slow, [7; 16])).unwrap();
        let refused = |folder, name| refuse_elsewhere(folder, name, &slow).unwrap_err().to_string();
        assert!(refused(&folders[0], "data").contains("the cache other has newer content of"));
        assert!(refused(&folders[1], "else").contains("--name data"));
        refuse_elsewhere(&folders[1], "data", &slow).unwrap();
    }

    #[test]
    fn gone_bytes_come_back_and_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("distrust");
        let dirty = [Dirty { name: "data".into(), ranges: vec![0..4096, 8192..16384] }];
        record_distrust(&place, &dirty).unwrap();
        assert_eq!(gone(&place).unwrap(), dirty);
        std::fs::write(&place, "").unwrap();
        assert!(gone(&place).is_err());
        let many: Vec<_> = (0..2 * RANGES_MAX as u64 + 1).map(|at| at * 8..at * 8 + 4).collect();
        let joined = joined(&many);
        assert!(joined.len() <= RANGES_MAX && joined.is_sorted_by(|a, b| a.end < b.start));
        assert_eq!((joined[0].start, joined.last().unwrap().end), (0, many.last().unwrap().end));
    }
}
