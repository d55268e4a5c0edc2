//! Putting another device under a cache.
//!
//! ```text
//!   `replacing` names both devices ─► new cache ─► `device` names it ─► old superblocks cleared ─► gone
//!               └──────────────── each durable before the next ───────────────┘
//! ```
//!
//! The old cache has no dirty blocks by then, and nobody serves it. The new one knows the same slow
//! devices, with their counters, and has no content.
//!
//! An error before `device` names the new cache undoes all of it. If `device` cannot be made
//! durable once it does, nobody knows which of the two a power failure leaves, so neither is used:
//! `replacing` stays, and [`settle`] writes `device` once more before anything else.
//!
//! Invariants (held by the tests below):
//! - After an end at any moment and [`settle`], `device` names a cache, and the other device holds
//!   none.
//! - After an error, the former device has the cache, or [`is_unsettled`].

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use burgeon_accelerate::{
    Dirty,
    format::{Layout, Super},
};
use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::{
    dirty::{Owners, gone},
    disk::Disk,
    durable::{put_durably, remove_durably},
    folder::{CacheFolder, hex},
};

/// A device, and the id of the cache on it.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
struct Side {
    path: PathBuf,
    id: String,
}

/// The document `replacing`.
#[derive(Serialize, Deserialize, Debug)]
struct Replacing {
    new: Side,
    old: Side,
}

/// The moments at which a test ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Begun,
    Made,
    Switched,
    Cleared,
}

/// The layout of a cache of `size` bytes, with a log of `log` bytes, or of the usual length.
/// `Invalid` if it is too small, or the log does not fit.
pub fn layout_of(size: u64, log: Option<u64>) -> Result<Layout> {
    let Some(log) = log else { return Layout::new(size) };
    let blocks = u32::try_from(log / BLOCK_SIZE).unwrap_or(u32::MAX);
    Layout::with_log(size, 0)?;
    Layout::with_log(size, blocks).map_err(|_| {
        let what = format!(
            "a log of {log} bytes does not fit into a cache of {size} bytes: 0, or 256 KiB to a quarter of the \
             cache, at most 16 GiB"
        );
        Error::new(ErrorKind::Invalid, what)
    })
}

/// Moves the cache of `folder` from `old` to `new`, whose content is overwritten. Nobody serves it.
/// `Unavailable` if it has dirty blocks. After an error, `old` has the cache, unless
/// [`is_unsettled`].
pub fn replace(folder: &CacheFolder, old: &Disk, new: &Disk, layout: Layout) -> Result<()> {
    replace_until(folder, old, new, layout, &|_| Ok(()))
}

fn replace_until(
    folder: &CacheFolder,
    old: &Disk,
    new: &Disk,
    layout: Layout,
    reached: &dyn Fn(Step) -> Result<()>,
) -> Result<()> {
    settle_with(folder, &[old, new])?;
    let is_done = |id| folder.recorded_id().is_ok_and(|recorded| recorded == hex(id));
    if burgeon_accelerate::read_super(new, new.size()).is_ok_and(|head| is_done(head.id)) {
        return Ok(());
    }
    let known = former(folder, old)?;
    refuse_dirty(folder, old, known.is_some())?;
    let id = new_id()?;
    let former = match &known {
        Some(head) => hex(head.id),
        None => folder.recorded_id()?,
    };
    let replacing = Replacing {
        new: Side { path: new.path().to_owned(), id: hex(id) },
        old: Side { path: old.path().to_owned(), id: former },
    };
    let begun = put(folder, &replacing);
    begun.inspect_err(|_| undo(folder, new, &replacing))?;
    reached(Step::Begun)?;
    let made = burgeon_accelerate::create_for(new, layout, id, known.as_ref());
    made.inspect_err(|_| undo(folder, new, &replacing))?;
    reached(Step::Made)?;
    // Nothing is dirty; and they name the former device.
    let forgotten = Owners::at(&folder.owners()).remove_all();
    let named = forgotten.and_then(|()| folder.put_device(new.path(), &replacing.new.id));
    named.inspect_err(|_| undo(folder, new, &replacing))?;
    reached(Step::Switched)?;
    clear(old, &replacing.old);
    reached(Step::Cleared)?;
    forget(folder);
    Ok(())
}

/// The superblock of the cache on `old`; `None` of a dead device, with which nothing is lost.
fn former(folder: &CacheFolder, old: &Disk) -> Result<Option<Super>> {
    match burgeon_accelerate::read_super(old, old.size()) {
        Ok(head) if !folder.is_its_cache(head.id) => {
            let what = format!("{} is not the device of the cache", old.path().display());
            Err(Error::new(ErrorKind::Invalid, what))
        }
        Ok(head) => Ok(Some(head)),
        Err(error) if folder.dirty().is_empty() => {
            let old = old.path().display();
            tracing::warn!(%old, %error, "the cache device cannot be read: its counters are lost");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Forgets a replacement that failed, unless the new device may be the one that is named.
fn undo(folder: &CacheFolder, new: &Disk, replacing: &Replacing) {
    if folder.recorded_id().is_ok_and(|id| id != replacing.new.id) {
        clear(new, &replacing.new);
        forget(folder);
    }
}

/// Random bytes: the id of a new cache.
pub fn new_id() -> Result<[u8; 16]> {
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("cannot get random bytes", e.into()))?;
    Ok(id)
}

fn refuse_dirty(folder: &CacheFolder, old: &Disk, is_readable: bool) -> Result<()> {
    let refuse = |name: &str, why: &str| {
        let what = format!(
            "the cache {} has newer content of {name}: {why}. Then replace its device",
            folder.name()
        );
        Err(Error::new(ErrorKind::Unavailable, what))
    };
    if folder.distrust().exists() {
        if let Some(Dirty { name, .. }) = gone(&folder.distrust())?.first() {
            return refuse(name, "it went with the device; `detach` and `attach` tell which bytes");
        }
    } else if is_readable
        && let Some(dirty) = burgeon_accelerate::dirty_in(old, old.size())?.first()
    {
        return refuse(&dirty.name, "attach it, or `flush --offline`");
    }
    match folder.dirty().first() {
        Some((name, _)) if !folder.is_served() => refuse(name, "attach it, or `flush --offline`"),
        _ => Ok(()),
    }
}

/// True if a replacement has neither been done nor undone: neither device may be used before
/// [`settle`].
pub fn is_unsettled(folder: &CacheFolder) -> bool {
    !matches!(read(folder), Ok(None))
}

/// Ends a replacement that a death or an error left in the middle. After an error, nobody knows
/// which device has the cache.
pub fn settle(folder: &CacheFolder) -> Result<()> {
    let Some(replacing) = read(folder)? else { return Ok(()) };
    let loser = replacing.loser(folder)?;
    match Disk::open(&loser.path) {
        Ok(disk) => return settle_with(folder, &[&disk]),
        Err(error) if error.kind() == ErrorKind::NotFound => return settle_with(folder, &[]),
        Err(error) => {
            let path = loser.path.display();
            tracing::warn!(%path, %error, "a former cache device is not cleared yet");
        }
    }
    confirm(folder, &replacing)
}

/// [`settle`] by the process that has the devices in `held`: clears the one without the cache.
pub(crate) fn settle_with(folder: &CacheFolder, held: &[&Disk]) -> Result<()> {
    let Some(replacing) = read(folder)? else { return Ok(()) };
    confirm(folder, &replacing)?;
    let loser = replacing.loser(folder)?;
    held.iter().for_each(|disk| clear(disk, loser));
    forget(folder);
    Ok(())
}

/// Makes the record of the new device durable: the process that wrote it may have died before, or
/// failed to. All of it is written once more, because the kernel tells a failed sync once.
fn confirm(folder: &CacheFolder, Replacing { new, .. }: &Replacing) -> Result<()> {
    if folder.recorded_id()? != new.id {
        return Ok(());
    }
    folder.put_device(&new.path, &new.id).map_err(|error| {
        let what = format!(
            "{error}: nobody knows which device has the cache {} after a power failure, so it is not \
             used before that file can be written; keep both devices",
            folder.name()
        );
        Error::with_source(error.kind(), what, error)
    })
}

/// Clears the superblocks of a cache, if it is that one.
fn clear(disk: &Disk, side: &Side) {
    let is_it =
        burgeon_accelerate::read_super(disk, disk.size()).is_ok_and(|head| hex(head.id) == side.id);
    if is_it && let Err(error) = burgeon_accelerate::destroy(disk) {
        let path = disk.path().display();
        tracing::warn!(%path, %error, "cannot clear the former cache device");
    }
}

impl Replacing {
    /// The device that has no cache in the end.
    fn loser(&self, folder: &CacheFolder) -> Result<&Side> {
        Ok(if folder.recorded_id()? == self.new.id { &self.old } else { &self.new })
    }
}

/// `None` if nothing is replaced. A document that cannot be read is an error, because nobody knows
/// then which device has the cache; one that is damaged was never durable, so nothing followed it.
fn read(folder: &CacheFolder) -> Result<Option<Replacing>> {
    let path = place(folder);
    match fs::read(&path) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(format!("cannot read {}", path.display()), error)),
    }
}

fn put(folder: &CacheFolder, replacing: &Replacing) -> Result<()> {
    let path = place(folder);
    let failed = |e: io::Error| Error::io(format!("cannot write {}", path.display()), e);
    let text = serde_json::to_vec(replacing).map_err(|e| failed(e.into()))?;
    put_durably(&path, &text).map_err(failed)
}

fn forget(folder: &CacheFolder) {
    // One that comes back names ids that no device has, or a device that is to be cleared.
    if let Err(error) = remove_durably(&place(folder)) {
        let path = place(folder);
        tracing::warn!(path = %path.display(), %error, "a replacement that is over is not forgotten");
    }
}

fn place(folder: &CacheFolder) -> PathBuf {
    Path::new(folder.path()).join("replacing")
}

#[cfg(test)]
mod tests {
    use burgeon_accelerate::{create_with, read_super};
    use burgeon_block::{Error, ErrorKind};

    use super::{Dirty, Owners, Step, is_unsettled, layout_of, replace_until, settle};
    use crate::{
        dirty::{DirtyOwner, record_distrust},
        disk::Disk,
        folder::CacheFolder,
    };

    struct Files {
        state: tempfile::TempDir,
        folder: CacheFolder,
    }

    impl Files {
        fn new() -> Self {
            let state = tempfile::tempdir().unwrap();
            let folder = CacheFolder::of(state.path(), "fast").unwrap();
            for (name, mib) in [("old", 4), ("new", 8)] {
                std::fs::write(state.path().join(name), vec![7; mib << 20]).unwrap();
            }
            let files = Self { state, folder };
            let old = files.open("old");
            create_with(&old, layout_of(old.size(), None).unwrap(), [5; 16]).unwrap();
            files.folder.record(old.path(), [5; 16]).unwrap();
            files
        }

        fn open(&self, name: &str) -> Disk {
            Disk::open(&self.state.path().join(name)).unwrap()
        }

        fn replace(&self, last: Option<Step>) -> bool {
            let (old, new) = (self.open("old"), self.open("new"));
            let layout = layout_of(new.size(), None).unwrap();
            let dies = |step| match Some(step) == last {
                true => Err(Error::new(ErrorKind::Unavailable, "it dies here")),
                false => Ok(()),
            };
            replace_until(&self.folder, &old, &new, layout, &dies).is_ok()
        }

        /// The device that the folder names is the one that has a cache.
        fn the_one(&self) -> String {
            let caches = ["old", "new"].map(|name| {
                let disk = self.open(name);
                read_super(&disk, disk.size())
                    .is_ok_and(|head| self.folder.is_its_cache(head.id))
                    .then_some(name)
                    .or_else(|| {
                        assert!(
                            read_super(&disk, disk.size()).is_err(),
                            "{name} has a second cache"
                        );
                        None
                    })
            });
            let only: Vec<&str> = caches.into_iter().flatten().collect();
            assert_eq!(only.len(), 1, "{only:?}");
            assert_eq!(self.folder.cache().unwrap(), self.state.path().join(only[0]));
            only[0].to_owned()
        }
    }

    #[test]
    fn an_end_at_any_step_leaves_exactly_one_cache() {
        let steps = [Step::Begun, Step::Made, Step::Switched, Step::Cleared];
        for (at, step) in steps.into_iter().enumerate() {
            let left = if at < 2 { "old" } else { "new" };
            let files = Files::new();
            assert!(!files.replace(Some(step)));
            assert!(is_unsettled(&files.folder));
            settle(&files.folder).unwrap();
            assert_eq!(files.the_one(), left, "{step:?}");
            assert!(!is_unsettled(&files.folder));
            settle(&files.folder).unwrap();
            // Another attempt settles it, too.
            let files = Files::new();
            assert!(!files.replace(Some(step)));
            assert!(files.replace(None), "{step:?}");
            assert_eq!(files.the_one(), "new", "{step:?}");
            assert!(!is_unsettled(&files.folder));
            let id = || read_super(&files.open("new"), 8 << 20).unwrap().id;
            let before = id();
            assert!(files.replace(None));
            assert_eq!((files.the_one().as_str(), id()), ("new", before), "it is made anew");
        }
    }

    /// A folder in the place of its temporary file has each writing of a file fail.
    fn fail(files: &Files, name: &str, fails: bool) {
        let place = files.folder.path().join(format!("{name}.new~"));
        let done = if fails { std::fs::create_dir(place) } else { std::fs::remove_dir(place) };
        done.unwrap();
    }

    #[test]
    fn an_error_before_the_new_device_is_named_is_undone() {
        for name in ["replacing", "device"] {
            let files = Files::new();
            fail(&files, name, true);
            assert!(!files.replace(None), "{name}");
            assert!(!is_unsettled(&files.folder), "{name} is tried again later");
            assert_eq!(files.the_one(), "old", "{name}");
            fail(&files, name, false);
            assert!(files.replace(None));
            assert_eq!(files.the_one(), "new");
        }
    }

    #[test]
    fn a_record_that_may_not_be_durable_is_written_anew_before_a_device_is_cleared() {
        let files = Files::new();
        // As if the sync of the folder failed behind the renaming.
        assert!(!files.replace(Some(Step::Switched)));
        fail(&files, "device", true);
        let error = settle(&files.folder).unwrap_err().to_string();
        assert!(error.contains("keep both devices"), "{error}");
        assert!(!files.replace(None));
        let is_there = |name: &str| {
            let disk = files.open(name);
            read_super(&disk, disk.size()).is_ok()
        };
        assert!(is_there("old") && is_there("new") && is_unsettled(&files.folder));
        fail(&files, "device", false);
        settle(&files.folder).unwrap();
        assert_eq!(files.the_one(), "new");
    }

    #[test]
    fn an_error_leaves_the_old_one() {
        let files = Files::new();
        assert!(layout_of(8 << 20, Some(3 << 20)).is_err());
        // Newer content of a slow device, as the state directory knows.
        let owner = DirtyOwner::default();
        Owners::at(&files.folder.owners()).put("data", &owner).unwrap();
        assert!(!files.replace(None));
        assert_eq!(files.the_one(), "old");
        Owners::at(&files.folder.owners()).remove("data");
        // Another cache took the place of the device.
        let old = files.open("old");
        create_with(&old, layout_of(old.size(), None).unwrap(), [6; 16]).unwrap();
        drop(old);
        assert!(!files.replace(None));
        assert!(read_super(&files.open("new"), 8 << 20).is_err());
    }

    #[test]
    fn a_dead_device_is_replaced_unless_dirty_blocks_went_with_it() {
        let files = Files::new();
        burgeon_accelerate::destroy(&files.open("old")).unwrap();
        let gone = Dirty { name: "data".into(), ranges: std::iter::once(0..4096).collect() };
        record_distrust(&files.folder.distrust(), &[gone]).unwrap();
        assert!(!files.replace(None));
        record_distrust(&files.folder.distrust(), &[]).unwrap();
        assert!(files.replace(None));
        assert_eq!(files.the_one(), "new");
    }
}
