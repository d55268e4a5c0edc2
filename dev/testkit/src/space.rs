//! A place for one test: a mount namespace of the test's thread and a folder of its own, both
//! gone when it ends.

use std::{
    ffi::CString,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};

/// A private mount namespace of the calling thread and a temporary folder.
///
/// Programs that the thread starts inherit the namespace; other threads do not see its mounts.
pub struct Space {
    folder: PathBuf,
}

impl Space {
    /// Makes both. `label` names the folder. Panics without root: the tests mount for real.
    pub fn new(label: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        // SAFETY: changes this thread's own view of mounts and its own current folder only.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }
            .expect("cannot make a mount namespace: kernel tests need root (CAP_SYS_ADMIN)");
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", private).expect("cannot make the mounts private");
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = base().join(format!("{label}-{}-{count}", process::id()));
        fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
        Self { folder }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A new, empty folder.
    pub fn make_folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        path
    }

    /// A small file system of `size` bytes in memory: a disk that is easily full.
    pub fn small_disk(&self, name: &str, size: u64) -> Mounted {
        let path = self.make_folder(name);
        let options = CString::new(format!("size={size},mode=755")).unwrap_or_default();
        mount("tmpfs", &path, "tmpfs", MountFlags::empty(), Some(options.as_c_str()))
            .unwrap_or_else(|error| panic!("tmpfs on {path:?}: {error}"));
        Mounted(path)
    }

    /// Mount points below the folder, the innermost last.
    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_below(&self.folder)
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        for path in self.mounts().iter().rev() {
            let _ = unmount(path, UnmountFlags::DETACH);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Shows `from` at `at`, to this thread and what it starts.
pub fn bind_mount(from: &Path, at: &Path) -> Mounted {
    rustix::mount::mount_bind(from, at)
        .unwrap_or_else(|error| panic!("cannot show {from:?} at {at:?}: {error}"));
    Mounted(at.to_path_buf())
}

/// Something mounted by a test, unmounted when dropped.
pub struct Mounted(pub(crate) PathBuf);

impl Mounted {
    /// Where.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Where tests put their folders: `BURGEON_TEST_DIR`, or `target/tmp` of the workspace.
pub(crate) fn base() -> PathBuf {
    if let Some(folder) = std::env::var_os("BURGEON_TEST_DIR") {
        return folder.into();
    }
    // A test program lies in target/<profile>/deps.
    let program = std::env::current_exe().unwrap_or_default();
    let target = program.ancestors().nth(3).unwrap_or(Path::new("/tmp"));
    target.join("tmp")
}

/// Mount points at or below `folder` in this thread's namespace, in mount order.
pub(crate) fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let table = fs::read("/proc/thread-self/mountinfo").unwrap_or_default();
    let points = table.split(|b| *b == b'\n').filter_map(|line| line.split(|b| *b == b' ').nth(4));
    let paths = points.map(|point| PathBuf::from(std::ffi::OsStr::from_bytes(&unescape(point))));
    paths.filter(|path| path.starts_with(folder)).collect()
}

/// Undoes the kernel's octal escapes (`\040` is a space).
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        if *first == b'\\' && tail.len() >= 3 {
            out.push(tail[..3].iter().fold(0u8, |n, d| n.wrapping_mul(8).wrapping_add(d - b'0')));
            rest = &tail[3..];
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{Space, unescape};

    #[test]
    fn mounts_are_seen_here_only_and_go_with_the_space() {
        let space = Space::new("space");
        let disk = space.small_disk("a disk", 1 << 20);
        assert_eq!(space.mounts(), [disk.path()]);
        let folder = space.folder().to_path_buf();
        let elsewhere = std::thread::spawn({
            let path = disk.path().to_path_buf();
            move || std::fs::write(path.join("x"), "y").is_ok() && path.join("x").exists()
        });
        // A thread started from here shares the namespace; the process's other threads do not.
        assert!(elsewhere.join().unwrap());
        std::mem::forget(disk);
        drop(space);
        assert!(!folder.exists());
    }

    #[test]
    fn the_kernels_escapes_are_undone() {
        assert_eq!(unescape(br"/a\040b\134"), b"/a b\\");
    }
}
