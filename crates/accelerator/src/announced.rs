//! The marks and links by which others know an attached device.
//!
//! ```text
//!   /dev/burgeon/NAME ─► /dev/loopN
//!   /run/burgeon-accelerated/MAJOR:MINOR    the slow device has a cache: dist/65-burgeon.rules tells systemd
//!                                           that it is not ready, and takes its links by UUID and label away
//!                    front-MAJOR:MINOR      the device in front: the rule gives it these links, also over ublk
//! ```
//!
//! The slow device and the device in front of it hold one file system with one UUID. Whoever mounts
//! it by that UUID must get the one in front: behind the cache, a write would be lost or undone.
//!
//! Invariant: the mark is there before the device in front is, and stays while the cache has newer
//! content, also without a device in front.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
};

use rustix::fs::{major, minor};

use crate::disk::{Disk, file_below};

const LINKS: &str = "/dev/burgeon";
const MARKS: &str = "/run/burgeon-accelerated";
/// Attempts to make a mark while others remove their folder.
const MARK_TRIES: usize = 10;
/// The begin of the name of a device in front.
const FRONT: &str = "front-";

/// The link and the mark of a device; both go with it.
pub(crate) struct Announced {
    link: PathBuf,
    /// The numbers of the slow device; `None` of a regular file, which udev does not know.
    slow: Option<String>,
    stays_marked: bool,
}

impl Announced {
    /// Marks the slow device of the device `name`.
    pub(crate) fn begin(name: &str, slow: &Disk) -> Self {
        let this = Self::of(name, slow);
        if let Some(numbers) = &this.slow {
            this.mark(numbers, numbers);
        }
        this
    }

    /// Those of the device `name` that a supervisor has made, which is dead.
    pub(crate) fn of(name: &str, slow: &Disk) -> Self {
        let slow = slow.numbers().map(|(major, minor)| format!("{major}:{minor}"));
        Self { link: Path::new(LINKS).join(name), slow, stays_marked: false }
    }

    /// Points the link to the device at `path`.
    pub(crate) fn link_to(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(LINKS)?;
        self.unlink();
        symlink(path, &self.link)?;
        self.mark_front(path);
        Ok(())
    }

    /// Marks the device in front, which udev may have looked at already.
    fn mark_front(&self, path: &Path) {
        let Ok(front) = fs::metadata(path).map(|found| found.rdev()) else { return };
        let numbers = format!("{}:{}", major(front), minor(front));
        self.mark(&format!("{FRONT}{numbers}"), &numbers);
    }

    /// Makes a mark about the device with these numbers, and has udev see it.
    fn mark(&self, mark: &str, numbers: &str) {
        let make = || {
            fs::create_dir_all(MARKS)?;
            fs::write(Path::new(MARKS).join(mark), self.name())
        };
        // The end of another device may have removed the empty folder in between.
        let is_gone = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
        let made = (0..MARK_TRIES).map(|_| make()).find(|made| !made.as_ref().is_err_and(is_gone));
        if let Some(Err(error)) = made {
            tracing::warn!(link = ?self.link, mark, %error, "udev is not told of the device");
        }
        tell_udev(numbers);
    }

    fn name(&self) -> &[u8] {
        self.link.file_name().unwrap_or_default().as_encoded_bytes()
    }

    /// Removes the link, and the mark of the device that it leads to.
    pub(crate) fn unlink(&self) {
        let _ = fs::remove_file(&self.link);
        let fronts = fs::read_dir(MARKS).into_iter().flatten().flatten().filter(|mark| {
            let is_front = mark.file_name().as_encoded_bytes().starts_with(FRONT.as_bytes());
            is_front && fs::read(mark.path()).is_ok_and(|name| name == self.name())
        });
        fronts.for_each(|mark| drop(fs::remove_file(mark.path())));
        // Only if it was the last one.
        let _ = fs::remove_dir(MARKS);
    }

    /// The link's path.
    pub(crate) fn link(&self) -> &Path {
        &self.link
    }

    /// Leaves the mark: the cache has newer content of the slow device.
    pub(crate) fn stay_marked(&mut self) {
        self.stays_marked = true;
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.unlink();
        let Some(numbers) = self.slow.take().filter(|_| !self.stays_marked) else { return };
        let _ = fs::remove_file(Path::new(MARKS).join(&numbers));
        // Only if it was the last one.
        let _ = fs::remove_dir(MARKS);
        tell_udev(&numbers);
    }
}

/// Removes the marks of the device `name`, of which nothing is in a cache alone any more. A loop
/// device may be known by its file alone.
pub(crate) fn withdraw(name: &str, slow: &Disk) {
    let (own, origin) = (Announced::of(name, slow), slow.origin());
    for mark in fs::read_dir(MARKS).into_iter().flatten().flatten() {
        let numbers = mark.file_name().to_string_lossy().into_owned();
        let is_of_file = file_below(&numbers).is_some_and(|file| file == origin);
        if is_of_file && fs::read(mark.path()).is_ok_and(|known| known == name.as_bytes()) {
            let _ = fs::remove_file(mark.path());
            tell_udev(&numbers);
        }
    }
    drop(own);
    let _ = fs::remove_dir(MARKS);
}

/// Has udev look at the device once more. Without udev nobody listens.
fn tell_udev(numbers: &str) {
    let _ = fs::write(format!("/sys/dev/block/{numbers}/uevent"), "change");
}
