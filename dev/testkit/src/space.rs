//! A place for one test: a mount namespace and a table of open files of the test's thread, and a
//! folder of its own, all gone when it ends.
//!
//! Tests of one program run side by side in its threads. A program that one of them starts begins
//! as a copy of the process, with everything that all threads have open, and keeps that until it
//! executes; on a busy machine that takes a while. Meanwhile a file that another test has closed
//! is still open: its mount is busy, and when it is removed its room stays taken. So each test
//! has open files of its own, which the others' programs do not inherit.

use std::{
    cell::Cell,
    ffi::CString,
    fs, io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};

use crate::{mountinfo::mounts_of, scaled};

/// A private mount namespace and open files of the calling thread, and a temporary folder.
///
/// Programs that the thread starts inherit the namespace; other threads do not see its mounts.
pub struct Space {
    folder: PathBuf,
}

impl Space {
    /// Makes them. `label` names the folder. Panics without root: the tests mount for real.
    ///
    /// Nothing but the standard streams is open in this thread afterwards, so it comes first in a
    /// test; threads that the test starts share its files.
    pub fn new(label: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        own_files();
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

    /// An ext4 of `size` bytes on `at`, on a loop device that goes with it: a disk that can be
    /// broken by [`break_disk`].
    pub fn disk(&self, at: &Path, size: u64) -> Mounted {
        self.disk_with(at, size, &["mkfs.ext4", "-q", "-F"])
    }

    /// The same with the file system that the command `mkfs` makes on a file; `tmpfs` needs none.
    pub fn disk_with(&self, at: &Path, size: u64, mkfs: &[&str]) -> Mounted {
        let file = self.path("disk.img");
        fs::create_dir_all(at).unwrap_or_else(|error| panic!("{at:?}: {error}"));
        if mkfs == ["tmpfs"] {
            let options = format!("size={size},mode=700");
            run(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at));
            return Mounted(at.to_path_buf());
        }
        let made = fs::File::create(&file).and_then(|file| file.set_len(size));
        made.unwrap_or_else(|error| panic!("{file:?}: {error}"));
        run(Command::new(mkfs[0]).args(&mkfs[1..]).arg(&file));
        run(Command::new("mount").args(["-o", "loop"]).arg(&file).arg(at));
        Mounted(at.to_path_buf())
    }

    /// An overlayfs of 256 MiB in memory.
    pub fn overlay(&self, name: &str) -> Mounted {
        // Gone with the namespace.
        let disk = std::mem::ManuallyDrop::new(self.small_disk(&format!("{name}-disk"), 256 << 20));
        let folders = ["lower", "upper", "work"].map(|name| disk.path().join(name));
        for folder in &folders {
            fs::create_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
        }
        let [lower, upper, work] = folders.map(|folder| folder.display().to_string());
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        let at = self.make_folder(name);
        run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&at));
        Mounted(at)
    }

    /// Mount points below the folder, the innermost last.
    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_below(&self.folder)
    }
}

/// Takes room on a disk by writing `bytes` to `file` at `offset`, durably; gives how much is taken.
/// On emulated machines it is 16 times as much, if there is so much: allocated, and not written.
pub fn take_room(file: &fs::File, offset: u64, bytes: &[u8]) -> io::Result<u64> {
    file.write_all_at(bytes, offset)?;
    let written = bytes.len() as u64;
    let (end, more) = (offset + written, scaled(0, 15 * written));
    let allocated = more > 0 && fallocate(file, FallocateFlags::empty(), end, more).is_ok();
    file.sync_data()?;
    Ok(written + if allocated { more } else { 0 })
}

/// From now on every read and write of the [`Space::disk`] on `at` fails with EIO, except for
/// what is in memory.
pub fn break_disk(at: &Path) {
    /// `linux/ext4.h`, `_IOR('X', 125, u32)`, and its argument `EXT4_GOING_FLAGS_NOLOGFLUSH`.
    const SHUTDOWN: libc::c_ulong = 0x8004_587d;
    const NO_LOG_FLUSH: u32 = 2;
    let root = fs::File::open(at).unwrap_or_else(|error| panic!("{at:?}: {error}"));
    // SAFETY: the ioctl reads the number it is given and touches no other memory of ours.
    let done = unsafe { libc::ioctl(root.as_raw_fd(), SHUTDOWN as _, &NO_LOG_FLUSH) };
    assert_eq!(done, 0, "cannot break {at:?}: {}", std::io::Error::last_os_error());
}

/// From now on nothing can be written to the [`Space::disk`] on `at`: the kernel is told of an
/// error after which it makes the file system read-only. What is open goes on being read.
pub fn make_read_only_by_an_error(at: &Path) {
    run(Command::new("mount").args(["-o", "remount,errors=remount-ro"]).arg(at));
    let output = Command::new("findmnt").args(["-n", "-o", "SOURCE"]).arg(at).output();
    let source = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let source = source.unwrap_or_else(|error| panic!("{at:?}: {error}"));
    let name = source.trim().trim_start_matches("/dev/");
    let trigger = format!("/sys/fs/ext4/{name}/trigger_fs_error");
    fs::write(&trigger, "1").unwrap_or_else(|error| panic!("{trigger}: {error}"));
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
}

/// Leaves the table of open files that the process's threads share, once a thread.
fn own_files() {
    thread_local!(static DONE: Cell<bool> = const { Cell::new(false) });
    if DONE.replace(true) {
        return;
    }
    // Both in one call: a copy of what other tests have open would hold it for the whole test.
    // SAFETY: what this thread's table loses is open on in the others' table; nothing that this
    // thread still uses was opened before, as tests begin with this.
    let done = unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)
    };
    assert_eq!(done, 0, "close_range: {}", std::io::Error::last_os_error());
}

impl Drop for Space {
    fn drop(&mut self) {
        for path in self.mounts().iter().rev() {
            let _ = unmount(path, UnmountFlags::DETACH);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Shows `from` at `at`, to this thread and its children.
pub fn bind_mount(from: &Path, at: &Path) -> Mounted {
    rustix::mount::mount_bind(from, at)
        .unwrap_or_else(|error| panic!("cannot show {from:?} at {at:?}: {error}"));
    Mounted(at.to_path_buf())
}

/// Something mounted by a test, unmounted when dropped.
pub struct Mounted(pub(crate) PathBuf);

impl Mounted {
    /// Takes charge of a mount on `at` that commands of the test make by themselves.
    pub fn at(at: &Path) -> Self {
        Self(at.to_path_buf())
    }

    /// The place.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// The folder for the folders of tests: `BURGEON_TEST_DIR`, or `target/tmp` of the workspace.
pub(crate) fn base() -> PathBuf {
    if let Some(folder) = std::env::var_os("BURGEON_TEST_DIR") {
        return folder.into();
    }
    target_folder()
}

/// `target/tmp` of the workspace, which keeps files that take long to make. The lab's guests can
/// read it.
pub(crate) fn target_folder() -> PathBuf {
    target_of(&std::env::current_exe().unwrap_or_default()).join("tmp")
}

/// The target folder that cargo built `program` in.
fn target_of(program: &Path) -> &Path {
    // Cargo marks the folder when it makes it, so one that was there before has no mark. Then
    // programs lie in target/<profile>, and those of tests and examples one folder below that.
    let marked = |folder: &&Path| folder.join("CACHEDIR.TAG").exists();
    let below = |name: &str| program.parent().is_some_and(|folder| folder.ends_with(name));
    let depth = if below("deps") || below("examples") { 3 } else { 2 };
    let target = program.ancestors().find(marked).or_else(|| program.ancestors().nth(depth));
    target.unwrap_or(Path::new("/tmp"))
}

/// Mount points at or below `folder` in this thread's namespace, in mount order.
pub(crate) fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let mounts = mounts_of("thread-self").unwrap_or_default();
    mounts.into_iter().map(|mount| mount.at).filter(|path| path.starts_with(folder)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Space, target_of};

    #[test]
    fn all_programs_know_the_target_folder_even_without_cargos_mark() {
        for program in ["deps/kernel-0123", "examples/restart", "xtask", "xtask (deleted)"] {
            let program = Path::new("/nowhere/target/debug").join(program);
            assert_eq!(target_of(&program), Path::new("/nowhere/target"), "{program:?}");
        }
    }

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
    fn no_program_inherits_the_open_files_of_another_test() {
        let space = Space::new("files");
        let path = space.path("open");
        let _file = std::fs::File::create(&path).unwrap();
        let holds = |entry: std::fs::DirEntry| {
            std::fs::read_link(entry.path()).is_ok_and(|target| target == path)
        };
        let is_open = || {
            let files = std::fs::read_dir("/proc/thread-self/fd").unwrap();
            files.flatten().any(holds)
        };
        assert!(is_open());
        std::thread::scope(|scope| {
            let own = scope.spawn(is_open).join().unwrap();
            assert!(own, "a test's own threads share its files");
            let other = scope.spawn(|| {
                let _other = Space::new("other-files");
                is_open()
            });
            assert!(!other.join().unwrap(), "another test's thread would hand the file on");
        });
    }
}
