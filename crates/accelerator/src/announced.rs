//! The marks and links by which others know an attached device.
//!
//! ```text
//!   /dev/burgeon/NAME ─► /dev/loopN
//!   /run/burgeon-accelerated/MAJOR:MINOR    the slow device has a cache: dist/65-burgeon.rules tells systemd
//!                                           that it is not ready, and takes its links by UUID and label away
//! ```
//!
//! The slow device and the device in front of it hold one file system with one UUID. Whoever mounts
//! it by that UUID must get the one in front: behind the cache, a write would be lost or undone.
//!
//! Invariant: the mark is there before the device in front is, and stays while the cache has newer
//! content, also without a device in front.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use crate::disk::Disk;

const LINKS: &str = "/dev/burgeon";
const MARKS: &str = "/run/burgeon-accelerated";

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
            let mark = Path::new(MARKS).join(numbers);
            let made = fs::create_dir_all(MARKS).and_then(|()| fs::write(mark, name));
            if let Err(error) = made {
                tracing::warn!(device = name, %error, "udev is not told that the slow device has a cache");
            }
            tell_udev(numbers);
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
        symlink(path, &self.link)
    }

    /// Removes the link.
    pub(crate) fn unlink(&self) {
        let _ = fs::remove_file(&self.link);
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

/// Has udev look at the device once more. Without udev nobody listens.
fn tell_udev(numbers: &str) {
    let _ = fs::write(format!("/sys/dev/block/{numbers}/uevent"), "change");
}
