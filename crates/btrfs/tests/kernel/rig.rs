//! Real devices and mounts for a test, in a private mount namespace; all undone on drop.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::Command,
};

use burgeon_btrfs::Identity;
use tempfile::TempDir;

const SCAN_DEV: libc::c_ulong = 0x5000_9404;
const FORGET_DEV: libc::c_ulong = 0x5000_9405;
const ADD_DEV: libc::c_ulong = 0x5000_940a;

/// A folder, a mount point in it, and the calling thread in a private mount namespace.
pub(crate) struct Rig {
    loops: Vec<Loop>,
    mounted: bool,
    pub(crate) dir: TempDir,
}

impl Rig {
    pub(crate) fn new() -> Self {
        // SAFETY: no pointers; affects this thread alone.
        let done = unsafe { libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) };
        assert_eq!(done, 0, "kernel tests need root: {}", io::Error::last_os_error());
        mount("none", Path::new("/"), "", libc::MS_REC | libc::MS_PRIVATE, "").unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        Self { loops: Vec::new(), mounted: false, dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn mnt(&self) -> PathBuf {
        self.path("mnt")
    }

    /// Attaches a loop device to `name`, a file in the folder.
    pub(crate) fn attach(&mut self, name: &str, read_only: bool) -> PathBuf {
        let device = Loop::new(&self.path(name), read_only);
        let path = device.0.clone();
        self.loops.push(device);
        path
    }

    /// Creates a sparse file for a sprout.
    pub(crate) fn sprout(&mut self, bytes: u64) -> PathBuf {
        File::create(self.path("sprout")).unwrap().set_len(bytes).unwrap();
        self.attach("sprout", false)
    }

    pub(crate) fn mount(&mut self, device: &Path, flags: libc::c_ulong, options: &str) {
        let device = device.to_str().unwrap();
        mount(device, &self.mnt(), "btrfs", flags, options)
            .unwrap_or_else(|error| panic!("mount {device}: {error}\n{}", kernel_log()));
        self.mounted = true;
    }

    pub(crate) fn remount_rw(&self) {
        mount("none", &self.mnt(), "", libc::MS_REMOUNT, "").unwrap();
    }

    /// Makes the mounted seed writable: writes go to `device`.
    pub(crate) fn add_device(&self, device: &Path) {
        ioctl(&self.mnt(), ADD_DEV, device).unwrap();
    }

    pub(crate) fn unmount(&mut self) {
        let path = c_string(&self.mnt());
        // SAFETY: a valid path.
        let done = unsafe { libc::umount2(path.as_ptr(), 0) };
        assert_eq!(done, 0, "umount: {}", io::Error::last_os_error());
        self.mounted = false;
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if self.mounted {
            let path = c_string(&self.mnt());
            // SAFETY: a valid path.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        }
        self.loops.clear();
    }
}

/// A loop device, detached on drop.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path, read_only: bool) -> Self {
        let mut command = Command::new("losetup");
        command.args(["--find", "--show"]).args(read_only.then_some("--read-only"));
        let output = command.arg(file).output().unwrap();
        assert!(output.status.success(), "losetup: {output:?}");
        Self(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // Clean up as far as possible: a panic during a panic would hide the first.
        let _ = ioctl(Path::new("/dev/btrfs-control"), FORGET_DEV, &self.0);
        let status = Command::new("losetup").arg("--detach").arg(&self.0).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("cannot detach {}", self.0.display());
        }
    }
}

/// A filesystem id that no other test has: the kernel identifies filesystems by it.
pub(crate) fn identity() -> Identity {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    let number = u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap();
    Identity { fsid: number.to_be_bytes() }
}

/// Makes btrfs scan a device.
pub(crate) fn scan(device: &Path) {
    ioctl(Path::new("/dev/btrfs-control"), SCAN_DEV, device).unwrap();
}

/// Runs `btrfs check`, including the data, and asserts that it finds nothing.
pub(crate) fn btrfs_check(device: &Path) {
    let output = Command::new("btrfs")
        .args(["check", "--readonly", "--check-data-csum"])
        .arg(device)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).to_lowercase();
    let bad = ["error", "warning", "wrong", "mismatch", "missing", "incorrect", "exceed"];
    // It scans every block device; those of other tests come and go meanwhile.
    let checked = device.to_str().unwrap();
    let of_others = |line: &str| line.contains("cannot open") && !line.contains(checked);
    let innocent = |line: &&str| {
        line.contains("no error found") || line.contains("cannot scan") || of_others(line)
    };
    let found = text
        .lines()
        .filter(|line| !innocent(line))
        .any(|line| bad.iter().any(|word| line.contains(word)));
    assert!(output.status.success() && !found, "btrfs check:\n{text}");
}

fn ioctl(on: &Path, request: libc::c_ulong, device: &Path) -> io::Result<()> {
    let file = File::open(on)?;
    let mut arguments = [0u8; 4096];
    let name = device.to_str().unwrap().as_bytes();
    arguments[8..8 + name.len()].copy_from_slice(name);
    // SAFETY: `arguments` is a `btrfs_ioctl_vol_args`: an fd and a name of up to 4087 bytes.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request, arguments.as_ptr()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn mount(from: &str, to: &Path, kind: &str, flags: libc::c_ulong, options: &str) -> io::Result<()> {
    let [from, kind, options] = [from, kind, options].map(|text| CString::new(text).unwrap());
    let to = c_string(to);
    // SAFETY: valid strings that outlive the call.
    let done = unsafe {
        libc::mount(from.as_ptr(), to.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast())
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn c_string(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

/// The end of the kernel log, to explain a refused mount.
fn kernel_log() -> String {
    let output = Command::new("dmesg").output().map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&output).into_owned();
    let lines: Vec<&str> = text.lines().rev().take(15).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
