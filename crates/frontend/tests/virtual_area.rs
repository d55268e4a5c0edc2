//! A mounted virtual area of 4 EiB: clones from it read right, cost next to nothing, and behave as
//! any file does. A command that would read all of it meets a limit. Needs root.

#![allow(clippy::unwrap_used)]

mod common;
mod seed;

use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::{FileExt, MetadataExt},
    },
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, ByteRange};
use burgeon_btrfs::{SUBVOLUME, SeedOptions, VIRTUAL_FILE};
use burgeon_frontend::{
    LoopDevice, LoopOptions, Slots,
    btrfs_mount::{Btrfs, MountAccess, attach, forget},
    reflink::{clone_blocks, make_nodatasum},
};
use common::{Lazy, block_ok, runtime};
use seed::{LazyData, Seed};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const EIB: u64 = 1 << 60;
const AREA: u64 = 4 * EIB;
const CHUNK: u64 = (256 << 40) - (128 << 10);
const TOP_LEVEL: u64 = 5;
const GONE_MAX: Duration = Duration::from_secs(20);

/// A mounted sprout with a virtual area, in a mount namespace of the calling thread.
struct Rig {
    seed: Seed,
    limit: Arc<AtomicU64>,
    slots: Arc<Slots>,
    metadata: LoopDevice,
    data: Lazy,
    sprout: LoopDevice,
    _runtime: tokio::runtime::Runtime,
    folder: TempDir,
}

impl Rig {
    fn new() -> Self {
        private_namespace();
        let folder = TempDir::new().unwrap();
        let options = |options| SeedOptions { virtual_bytes: AREA, ..options };
        let seed = Seed::write_with(folder.path(), options);
        fs::create_dir(folder.path().join("mnt")).unwrap();
        // Sparse, so that its allocated size shows the written data.
        File::create(folder.path().join("sprout")).unwrap().set_len(512 * MIB).unwrap();
        let rig = Self::serve(seed, folder);
        let seed = [rig.metadata.path(), rig.data.path()];
        let mount = Btrfs::mount_new_sprout(&seed, rig.sprout.path(), SUBVOLUME).unwrap();
        attach(&mount, File::open(rig.mnt()).unwrap()).unwrap();
        rig
    }

    fn serve(seed: Seed, folder: TempDir) -> Self {
        let runtime = runtime();
        let slots = Arc::new(Slots::create().unwrap());
        let device = LazyData::of(&seed);
        let limit = device.limit();
        let data = Lazy::serve(device, &slots, &runtime);
        let metadata = attach_loop(&File::open(folder.path().join("metadata")).unwrap(), true);
        let sprout = File::options().read(true).write(true).open(folder.path().join("sprout"));
        let sprout = attach_loop(&sprout.unwrap(), false);
        Self { seed, limit, slots, metadata, data, sprout, _runtime: runtime, folder }
    }

    fn mnt(&self) -> PathBuf {
        self.folder.path().join("mnt")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.mnt().join(name)
    }

    /// The virtual area's file, by a detached mount of the top level: it is in no mounted tree.
    fn area(&self) -> File {
        let top = Btrfs::mount(self.sprout.path(), TOP_LEVEL, MountAccess::Writable).unwrap();
        let path = format!("/proc/self/fd/{}/{VIRTUAL_FILE}", top.as_fd().as_raw_fd());
        File::open(path).unwrap()
    }

    /// A new file whose content is `range` of the area.
    fn clone(&self, name: &str, range: ByteRange) -> File {
        let path = self.path(name);
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        make_nodatasum(&file).unwrap();
        clone_blocks(&self.area(), range, &file, 0).unwrap();
        file
    }

    /// Checks that `file` has at `offset` the bytes of the area at `address`.
    fn check(&self, file: &File, offset: u64, address: u64) {
        let mut block = vec![0; BLOCK_SIZE as usize];
        file.read_exact_at(&mut block, offset).unwrap();
        let start = self.seed.info.virtual_area.unwrap().start();
        assert!(block_ok(&block, (start + address) / BLOCK_SIZE), "{offset} is not {address}");
    }

    fn sync(&self) {
        rustix::fs::syncfs(File::open(self.mnt()).unwrap()).unwrap();
    }

    fn sprout_bytes(&self) -> u64 {
        self.sync();
        fs::metadata(self.folder.path().join("sprout")).unwrap().blocks() * 512
    }

    fn fetched_blocks(&self) -> u64 {
        u64::MAX - self.limit.load(SeqCst)
    }

    fn unmount(&self) {
        rustix::mount::unmount(self.mnt(), rustix::mount::UnmountFlags::empty()).unwrap();
        for device in [self.sprout.path(), self.metadata.path(), self.data.path()] {
            forget(device).unwrap();
        }
    }

    /// As after a reboot: other devices, another server, the same files.
    fn remount(self) -> Self {
        self.unmount();
        let Self { seed, folder, metadata, data, sprout, slots, .. } = self;
        [sprout, metadata].into_iter().for_each(|device| device.detach(GONE_MAX).unwrap());
        data.end(GONE_MAX);
        assert_eq!(slots.counters().failed_reads.get(), 0);
        let rig = Self::serve(seed, folder);
        let devices = [rig.metadata.path(), rig.data.path()];
        let sprout = rig.sprout.path();
        let mount =
            Btrfs::mount_sprout(&devices, sprout, SUBVOLUME, MountAccess::Writable).unwrap();
        attach(&mount, File::open(rig.mnt()).unwrap()).unwrap();
        rig
    }
}

fn attach_loop(file: &File, read_only: bool) -> LoopDevice {
    let options = LoopOptions { name: "burgeon-test/virtual", read_only, discard: false };
    LoopDevice::attach(file, options).unwrap()
}

fn range(start: u64, len: u64) -> ByteRange {
    ByteRange::at(start, len).unwrap()
}

/// Ranges all over the area, and 120 GiB more.
fn ranges() -> Vec<(&'static str, ByteRange)> {
    vec![
        ("start", range(0, 5 * GIB)),
        ("border", range(CHUNK - MIB, 3 * MIB)),
        ("chunks", range(7 * CHUNK + 4096, 3 * CHUNK)),
        ("middle", range(AREA / 2 - 20 * MIB, 40 * MIB)),
        ("end", range(AREA - 64 * GIB, 64 * GIB)),
        ("last block", range(AREA - BLOCK_SIZE, BLOCK_SIZE)),
        ("huge", range(AREA / 4, 120 * GIB)),
        ("all", range(0, AREA)),
    ]
}

fn check_all(rig: &Rig) {
    for (name, range) in ranges() {
        let file = File::open(rig.path(name)).unwrap();
        assert_eq!(file.metadata().unwrap().len(), range.len());
        let last = range.len() - BLOCK_SIZE;
        let middle = range.len() / 2 / BLOCK_SIZE * BLOCK_SIZE;
        for offset in [0, middle, last] {
            rig.check(&file, offset, range.start() + offset);
        }
    }
    let border = File::open(rig.path("border")).unwrap();
    (0..3 * MIB / BLOCK_SIZE).for_each(|block| {
        rig.check(&border, block * BLOCK_SIZE, CHUNK - MIB + block * BLOCK_SIZE);
    });
}

#[test]
fn clones_from_everywhere_read_right_and_cost_next_to_nothing() {
    let rig = Rig::new();
    assert_eq!(fs::read(rig.path("lazy")).unwrap(), rig.seed.content());
    assert!(!rig.path("virtual").exists(), "the area is in no mounted tree");
    let before = statvfs(&rig);
    for (name, range) in ranges() {
        rig.clone(name, range);
    }
    assert_eq!(rig.fetched_blocks(), 0, "nothing is read to clone");
    fs::write(rig.path("local"), rig.seed.content()).unwrap();
    let written = rig.sprout_bytes();
    assert!(written < 10 * MIB + rig.seed.content().len() as u64, "{written} bytes were written");
    check_all(&rig);
    assert_eq!(before.0, statvfs(&rig).0, "df's size does not change");
    assert!(before.1 - statvfs(&rig).1 < 64 * MIB, "df: what is mapped is not local");

    let rig = rig.remount();
    check_all(&rig);
    assert_eq!(fs::read(rig.path("local")).unwrap(), rig.seed.content());
    rig.unmount();
    for device in [&rig.metadata, &rig.sprout] {
        let mut check = Command::new("btrfs");
        let output = check.args(["check", "--readonly"]).arg(device.path()).output().unwrap();
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success() && text.contains("no error found"), "{text}");
    }
}

/// Size and free bytes, as `df` shows them.
fn statvfs(rig: &Rig) -> (u64, u64) {
    let stat = rustix::fs::statvfs(rig.mnt()).unwrap();
    (stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)
}

#[test]
fn mapped_files_are_files_like_others() {
    let rig = Rig::new();
    let area = range(AREA / 2, GIB);
    let file = rig.clone("file", area);
    // A file with checksums is refused, and stays as it was.
    let with_checksums = File::create_new(rig.path("with-checksums")).unwrap();
    let error = clone_blocks(&rig.area(), area, &with_checksums, 0).unwrap_err();
    assert!(error.to_string().contains("checksums"), "{error}");
    assert_eq!(with_checksums.metadata().unwrap().len(), 0);
    // Beyond the end.
    let beyond = range(AREA - BLOCK_SIZE, 2 * BLOCK_SIZE);
    let error = clone_blocks(&rig.area(), beyond, &file, 2 * GIB).unwrap_err();
    assert!(error.to_string().contains("end"), "{error}");

    let copy = File::options().read(true).write(true).create_new(true).open(rig.path("copy"));
    let copy = copy.unwrap();
    make_nodatasum(&copy).unwrap();
    rustix::fs::ioctl_ficlone(&copy, &file).unwrap();
    let snapshot = ["subvolume", "snapshot", "-r", ".", "snapshot"];
    assert!(btrfs(&rig, &snapshot).status.success());
    assert_eq!(rig.fetched_blocks(), 0);

    // Overwritten, appended to, cut: the others do not change.
    file.write_all_at(b"changed", 10 * MIB + 5).unwrap();
    file.write_all_at(&rig.seed.content(), GIB).unwrap();
    copy.set_len(100 * MIB).unwrap();
    drop((file, copy, with_checksums));
    let rig = rig.remount();
    let file = File::open(rig.path("file")).unwrap();
    let mut bytes = [0; 7];
    file.read_exact_at(&mut bytes, 10 * MIB + 5).unwrap();
    assert_eq!(&bytes, b"changed");
    rig.check(&file, 10 * MIB + 4096, AREA / 2 + 10 * MIB + 4096);
    rig.check(&file, GIB - 4096, AREA / 2 + GIB - 4096);
    let mut appended = vec![0; rig.seed.content().len()];
    file.read_exact_at(&mut appended, GIB).unwrap();
    assert_eq!(appended, rig.seed.content());
    let copy = File::open(rig.path("copy")).unwrap();
    assert_eq!(copy.metadata().unwrap().len(), 100 * MIB);
    rig.check(&copy, 10 * MIB, AREA / 2 + 10 * MIB);
    let old = File::open(rig.path("snapshot/file")).unwrap();
    assert_eq!(old.metadata().unwrap().len(), GIB);
    rig.check(&old, 10 * MIB, AREA / 2 + 10 * MIB);
    drop((file, copy, old));
    fs::remove_file(rig.path("file")).unwrap();
    assert!(rig.sprout_bytes() < 32 * MIB);
    rig.unmount();
}

/// A command that would read everything fails at the limit, or goes on without end and reads
/// nothing more; after it is cancelled, the file system is as before.
#[test]
fn a_command_that_would_read_everything_meets_the_limit() {
    const LIMIT: u64 = 64 * MIB / BLOCK_SIZE;
    let rig = Rig::new();
    rig.clone("file", range(AREA / 2, 8 * GIB));
    assert!(btrfs(&rig, &["subvolume", "snapshot", "-r", ".", "snapshot"]).status.success());
    let data = rig.data.path().to_str().unwrap();
    let guards: [(&[&str], &[&str]); 5] = [
        (&["device", "remove", data, "."], &["device", "remove", "cancel", "."]),
        (&["balance", "start", "-d", "."], &["balance", "cancel", "."]),
        (&["scrub", "start", "-B", "-r", "."], &["scrub", "cancel", "."]),
        (&["filesystem", "defragment", "-czstd", "file"], &[]),
        (&["send", "--quiet", "-f", "/dev/null", "snapshot"], &[]),
    ];
    for (guard, cancel) in guards {
        rig.limit.store(LIMIT, SeqCst);
        let done = run_for_a_while(&rig, guard, cancel);
        let read = LIMIT - rig.limit.load(SeqCst);
        println!("{guard:?}: {done}, {} MiB read", read * BLOCK_SIZE / MIB);
        rig.limit.store(u64::MAX, SeqCst);
        // It is whole, and still writable.
        rig.check(&File::open(rig.path("file")).unwrap(), 5 * GIB, AREA / 2 + 5 * GIB);
        fs::write(rig.path("local"), rig.seed.content()).unwrap();
        rig.sync();
    }
    rig.unmount();
}

/// Runs `btrfs` in the mount, and cancels it if it has not ended after two seconds: how it ended.
fn run_for_a_while(rig: &Rig, arguments: &[&str], cancel: &[&str]) -> String {
    const STEP: Duration = Duration::from_millis(100);
    let mut command = Command::new("btrfs");
    let quiet = command.args(arguments).current_dir(rig.mnt()).stdout(Stdio::null());
    let mut child = quiet.stderr(Stdio::null()).spawn().unwrap();
    for _ in 0..20 {
        if let Some(status) = child.try_wait().unwrap() {
            return status.to_string();
        }
        std::thread::sleep(STEP);
    }
    if cancel.is_empty() {
        child.kill().unwrap();
        return format!("killed, {}", child.wait().unwrap());
    }
    // Nothing but `cancel` ends the kernel's work, and on a busy machine it may not have begun.
    for _ in 0..1200 {
        btrfs(rig, cancel);
        if let Some(status) = child.try_wait().unwrap() {
            return format!("cancelled, {status}");
        }
        std::thread::sleep(STEP);
    }
    panic!("{arguments:?} cannot be cancelled");
}

fn btrfs(rig: &Rig, arguments: &[&str]) -> Output {
    Command::new("btrfs").args(arguments).current_dir(rig.mnt()).output().unwrap()
}

/// Gives the calling thread a mount namespace of its own.
fn private_namespace() {
    use rustix::mount::{MountPropagationFlags as Flags, mount_change};
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    // SAFETY: no memory is unshared, and this thread alone has the new file system context.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
    mount_change("/", Flags::PRIVATE | Flags::REC).unwrap();
}
