//! Takes over a cache that another host has made, on a device that both reach: after the death of
//! the host that used it, or as a rescue.
//!
//! ```text
//!   superblock of the device ─► accelerate/NAME/device      its log ─► dirty/DEVICE, a document each
//! ```
//!
//! Invariants: nothing is written to the device; documents of dirty blocks are there before the
//! cache is, and none outlives the blocks that it is about.

use std::path::Path;

use burgeon_accelerate::Dirty;
use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    dirty::{Owners, refuse_elsewhere},
    disk::Disk,
    folder::{CacheFolder, hex},
    replace::settle,
};

/// The result of [`adopt`].
pub struct Adopted {
    /// Bytes of the device; `None` if the cache is in use on this host, and was left alone.
    pub size: Option<u64>,
    /// The blocks that only the cache has, by device.
    pub dirty: Vec<Dirty>,
}

/// Records the cache on the device at `path` as that of `folder`, with its dirty blocks. A cache
/// that this host knows already gets the records that the device has now.
///
/// `NotFound` if the device holds no cache, `Unavailable` if another program has it, and `Invalid`
/// if the name is that of another cache, or another name that of this one.
pub fn adopt(folder: &CacheFolder, path: &Path) -> Result<Adopted> {
    if folder.is_served() {
        let known = folder.cache()?;
        return match known == path {
            true => Ok(Adopted { size: None, dirty: Vec::new() }),
            false => Err(taken(folder, &known)),
        };
    }
    if folder.exists() {
        settle(folder)?;
    }
    let disk = Disk::open(path)?;
    let id = burgeon_accelerate::read_super(&disk, disk.size())?.id;
    if folder.exists() && !folder.is_its_cache(id) {
        return Err(taken(folder, &folder.cache()?));
    }
    let is_same = |other: &CacheFolder| {
        other.path() != folder.path() && other.recorded_id().is_ok_and(|known| known == hex(id))
    };
    if let Some(other) = folder.siblings().iter().find(|other| is_same(other)) {
        let (shown, other) = (path.display(), other.name());
        let what = format!("{shown} has the cache that this host knows as {other}: use that name");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    refuse_elsewhere(folder, "", &disk)?;
    let dirty = burgeon_accelerate::dirty_in(&disk, disk.size())?;
    folder.make()?;
    let owners = Owners::at(&folder.owners());
    dirty.iter().try_for_each(|dirty| owners.note(&dirty.name, id))?;
    if !folder.exists() {
        folder.record(path, id)?;
    } else if folder.cache()? != path {
        folder.put_device(path, &hex(id))?;
    }
    // Another host has written them back.
    let is_done = |(name, _): &&(_, _)| !dirty.iter().any(|dirty| dirty.name == *name);
    owners.all().iter().filter(is_done).for_each(|(name, _)| owners.remove(name));
    Ok(Adopted { size: Some(disk.size()), dirty })
}

fn taken(folder: &CacheFolder, known: &Path) -> Error {
    let what = format!(
        "{} is the name of another cache, on {}: take another name, or remove that one with `burgeon \
         accelerate destroy`",
        folder.name(),
        known.display()
    );
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use burgeon_accelerate::create;
    use burgeon_block::ErrorKind;

    use super::adopt;
    use crate::{
        dirty::{DirtyOwner, Owners},
        disk::Disk,
        folder::{CacheFolder, hex},
    };

    #[test]
    fn a_cache_is_taken_over_by_its_content() {
        let state = tempfile::tempdir().unwrap();
        let folder = CacheFolder::of(state.path(), "fast").unwrap();
        let path = state.path().join("disk");
        fs::write(&path, vec![0; 16 << 20]).unwrap();
        let refused = |folder: &CacheFolder| adopt(folder, &path).map(drop).unwrap_err();
        assert_eq!(refused(&folder).kind(), ErrorKind::NotFound);
        assert!(!folder.exists(), "it is known without a cache on its device");
        let make = |id| {
            let disk = Disk::open(&path).unwrap();
            create(&disk, disk.size(), [id; 16]).unwrap();
        };
        make(1);
        let before = fs::read(&path).unwrap();
        assert!(adopt(&folder, &path).unwrap().dirty.is_empty());
        assert_eq!(folder.cache().unwrap(), path);
        // Another host has written back what this one knew to be dirty.
        let owner = DirtyOwner { cache: hex([1; 16]), ..DirtyOwner::default() };
        Owners::at(&folder.owners()).put("data", &owner).unwrap();
        assert_eq!(adopt(&folder, &path).unwrap().size, Some(16 << 20));
        assert!(folder.dirty().is_empty(), "written back, and still known as dirty");
        assert!(fs::read(&path).unwrap() == before, "the device was written to");
        // Its device has another path since.
        let moved = state.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        adopt(&folder, &moved).unwrap();
        assert_eq!(folder.cache().unwrap(), moved);
        fs::rename(&moved, &path).unwrap();
        adopt(&folder, &path).unwrap();

        let other = CacheFolder::of(state.path(), "other").unwrap();
        let said = refused(&other);
        assert!(said.kind() == ErrorKind::Invalid && said.to_string().contains("fast"), "{said}");
        make(2);
        let said = refused(&folder).to_string();
        assert!(said.contains("name of another cache"), "{said}");
        assert!(folder.is_its_cache([1; 16]), "another cache has its name");
    }
}
