//! A seed of two devices, mounted for real: metadata in a file on a loop of its own, lazy data
//! served over FUSE. It is grown into a sprout, written to, unmounted and mounted again. Needs
//! root.

#![allow(clippy::unwrap_used)]

mod common;
mod seed;

use std::{
    fs::{self, File},
    io::ErrorKind::{NotFound, ReadOnlyFilesystem},
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::{
    Connection, FuseServer, LoopDevice, LoopOptions, ServeOptions, Slots,
    btrfs_mount::{Btrfs, MountAccess, attach, forget},
    serve,
};
use common::{Watchdog, runtime};
use seed::{LazyData, Seed};
use tempfile::TempDir;

const SPROUT_LEN: u64 = 256 << 20;
const GONE_MAX: Duration = Duration::from_secs(60);

/// The devices of one mount; those that are in use at a drop go with their last user.
struct Devices {
    metadata: LoopDevice,
    data: LoopDevice,
    server: FuseServer,
    slots: Arc<Slots>,
    _watchdog: Watchdog,
    _runtime: tokio::runtime::Runtime,
}

impl Devices {
    fn of(seed: &Seed, folder: &Path) -> Self {
        let runtime = runtime();
        let slots = Arc::new(Slots::create().unwrap());
        let connection = Connection::new("burgeon-test").unwrap();
        let watchdog = Watchdog::new(&connection);
        let fuse = connection.device().try_clone_to_owned().unwrap();
        let device = Arc::new(LazyData::of(seed));
        let options = ServeOptions::new(runtime.handle().clone());
        let server = serve(fuse, slots.clone(), device, &options).unwrap();
        let data = attach_loop(&connection.open_file().unwrap(), true);
        let metadata = attach_loop(&File::open(folder.join("metadata")).unwrap(), true);
        Self { metadata, data, server, slots, _watchdog: watchdog, _runtime: runtime }
    }

    fn seed(&self) -> [&Path; 2] {
        [self.metadata.path(), self.data.path()]
    }

    /// Everything has to be gone after the unmount.
    fn dismantle(self) {
        for device in [self.metadata, self.data] {
            forget(device.path()).unwrap();
            device.detach(GONE_MAX).unwrap();
        }
        assert_eq!(self.server.stop(Duration::ZERO), 0);
        assert_eq!(self.slots.counters().failed_reads.get(), 0);
    }
}

fn attach_loop(file: &File, read_only: bool) -> LoopDevice {
    let options = LoopOptions { name: "burgeon-test/btrfs", read_only, discard: false };
    LoopDevice::attach(file, options).unwrap()
}

fn sprout(folder: &Path) -> LoopDevice {
    let path = folder.join("sprout");
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, SPROUT_LEN).unwrap();
    attach_loop(&file, false)
}

/// A path into a detached mount.
fn path_of(mount: &Btrfs, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", mount.as_fd().as_raw_fd()))
}

#[test]
fn a_seed_sprouts_and_its_sprout_mounts_again() {
    let folder = TempDir::new().unwrap();
    let seed = Seed::write(folder.path());
    let devices = Devices::of(&seed, folder.path());

    let mount = Btrfs::mount_seed(&devices.seed(), SUBVOLUME).unwrap();
    assert_eq!(mount.fsid().unwrap(), seed.identity.fsid);
    assert_eq!(fs::read(path_of(&mount, "lazy")).unwrap(), seed.content());
    let refused = fs::write(path_of(&mount, "new"), b"x").unwrap_err();
    assert_eq!(refused.kind(), ReadOnlyFilesystem);
    drop(mount);

    let sprout_device = sprout(folder.path());
    let discard = format!("/sys/block/loop{}/queue/discard_max_bytes", sprout_device.number());
    assert_eq!(fs::read_to_string(discard).unwrap().trim(), "0");
    let mount = Btrfs::mount_new_sprout(&devices.seed(), sprout_device.path(), SUBVOLUME).unwrap();
    let fsid = mount.fsid().unwrap();
    assert_ne!(fsid, seed.identity.fsid);
    fs::write(path_of(&mount, "new"), seed.content()).unwrap();
    rustix::fs::ioctl_ficlone(
        File::create(path_of(&mount, "clone")).unwrap(),
        File::open(path_of(&mount, "lazy")).unwrap(),
    )
    .unwrap();
    fs::rename(path_of(&mount, "inline"), path_of(&mount, "renamed")).unwrap();
    assert_eq!(fs::read(path_of(&mount, "clone")).unwrap(), seed.content());
    drop(mount);
    forget(sprout_device.path()).unwrap();
    sprout_device.detach(GONE_MAX).unwrap();
    devices.dismantle();

    // All of it again, as after a reboot.
    let devices = Devices::of(&seed, folder.path());
    let sprout_device = sprout(folder.path());
    let again = Btrfs::mount_sprout(
        &devices.seed(),
        sprout_device.path(),
        SUBVOLUME,
        MountAccess::Writable,
    )
    .unwrap();
    assert_eq!(again.fsid().unwrap(), fsid);
    for name in ["new", "clone", "lazy"] {
        assert_eq!(fs::read(path_of(&again, name)).unwrap(), seed.content(), "{name}");
    }
    assert_eq!(fs::read(path_of(&again, "renamed")).unwrap(), seed::INLINE);
    assert_eq!(fs::metadata(path_of(&again, "inline")).unwrap_err().kind(), NotFound);
    fs::write(path_of(&again, "more"), b"written later").unwrap();
    grow(&again, &sprout_device, &folder.path().join("sprout"));
    drop(again);
    forget(sprout_device.path()).unwrap();
    sprout_device.detach(GONE_MAX).unwrap();
    devices.dismantle();
}

/// Doubles the sprout under the mounted file system, by a second mount of the same.
fn grow(mounted: &Btrfs, device: &LoopDevice, file: &Path) {
    let size = |mount: &Btrfs| {
        let devices = mount.devices().unwrap();
        let sprout = devices.iter().find(|info| info.path == device.path()).unwrap().clone();
        assert_eq!((devices.len(), sprout.id), (3, 3));
        assert!(0 < sprout.allocated && sprout.allocated <= sprout.size);
        sprout.size
    };
    assert_eq!(size(mounted), SPROUT_LEN);
    File::options().write(true).open(file).unwrap().set_len(2 * SPROUT_LEN).unwrap();
    device.grow().unwrap();
    let second = Btrfs::mount(device.path(), SUBVOLUME, MountAccess::Writable).unwrap();
    second.grow_device(3).unwrap();
    assert_eq!(size(mounted), 2 * SPROUT_LEN);
}

#[test]
fn a_detached_mount_is_attached_in_another_namespace() {
    let folder = TempDir::new().unwrap();
    let seed = Seed::write(folder.path());
    let devices = Devices::of(&seed, folder.path());
    let target = folder.path().join("mnt");
    let mount = Btrfs::mount_seed(&devices.seed(), SUBVOLUME).unwrap();

    std::thread::scope(|scope| {
        let (target, seed) = (&target, &seed);
        let attached = scope.spawn(move || {
            private_namespace();
            fs::create_dir(target).unwrap();
            let removed = fs::File::open(target).unwrap();
            fs::remove_dir(target).unwrap();
            fs::create_dir(target).unwrap();
            let missing = attach(&mount, removed).unwrap_err();
            assert!(missing.to_string().contains("mkdir"), "{missing}");
            attach(&mount, fs::File::open(target).unwrap()).unwrap();
            drop(mount);
            assert_eq!(fs::read(target.join("lazy")).unwrap(), seed.content());
            rustix::mount::unmount(target, rustix::mount::UnmountFlags::empty()).unwrap();
        });
        attached.join().unwrap();
    });
    assert!(!target.join("lazy").exists(), "not in this namespace");
    devices.dismantle();
}

/// Fewer times than a mount scans: each can cost it one try.
#[test]
fn a_device_that_was_forgotten_is_scanned_again() {
    let folder = TempDir::new().unwrap();
    let devices = Devices::of(&Seed::write(folder.path()), folder.path());
    let seed = devices.seed();
    for _ in 0..60 {
        let mounted = std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                for _ in 0..2 {
                    // It is mounted by then.
                    let _ = seed.iter().try_for_each(|device| forget(device));
                }
            });
            let mounted = Btrfs::mount_seed(&seed, SUBVOLUME);
            others.join().unwrap();
            mounted
        });
        drop(mounted.unwrap());
    }
    devices.dismantle();
}

#[test]
fn a_missing_part_is_named() {
    let folder = TempDir::new().unwrap();
    let seed = Seed::write(folder.path());
    let devices = Devices::of(&seed, folder.path());
    let error = Btrfs::mount_seed(&[devices.metadata.path()], SUBVOLUME).err().unwrap();
    assert!(error.to_string().contains("missing"), "{error}");
    let error = Btrfs::mount_seed(&[Path::new("/dev/null")], SUBVOLUME).err().unwrap();
    assert!(error.to_string().contains("/dev/null"), "{error}");
    devices.dismantle();
}

/// Gives the calling thread a mount namespace of its own.
fn private_namespace() {
    use rustix::mount::{MountPropagationFlags as Flags, mount_change};
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    // SAFETY: no memory is unshared, and this thread alone has the new file system context.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
    mount_change("/", Flags::PRIVATE | Flags::REC).unwrap();
}
