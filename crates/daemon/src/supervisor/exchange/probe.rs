//! Finds out whether this kernel bears that the file below a mounted file system is exchanged, by
//! doing it to a scratch file system.
//!
//! ```text
//!   a seed with one file of one block, a sprout: in memory ─► loop devices ─► mount
//!     ─► freeze ─► LOOP_CHANGE_FD ─► thaw ─► the file reads as before, another one can be written?
//! ```
//!
//! Linux 6.19 and later may take the exchange for the end of the disk, and shut the file system
//! down. Distributions change kernels without changing their version, so only the attempt tells.
//! Its steps are those of a real exchange (`order.rs`).
//!
//! Invariants, held by the tests below:
//! - Only a file system that was read and written after the exchange counts as one that bears it.
//! - A killed attempt leaves nothing: its files have no names, and its loop devices detach
//!   themselves. One that was killed while its file system was frozen is thawed by the next
//!   attempt.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Digest, Error, ErrorKind, Result};
use burgeon_btrfs::{
    DATA_START, DeviceNo, Dirent, FileExtent, Identity, Inode, InodeBody, NodeSink, SUBVOLUME,
    SeedInfo, SeedOptions, Tree, Uuids, patch_nodes, superblock, superblock_offsets, write_seed,
};
use burgeon_frontend::{
    LoopDevice, LoopOptions,
    btrfs_mount::{Btrfs, MountAccess},
};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, openat};

use super::{Exchange, Live, order, thaw_at};
use crate::{id::Fsid, state::space::LIMIT_MIN};

/// Content of the file: a block, so that it lies on the device that is exchanged.
const CONTENT: [u8; BLOCK_SIZE as usize] = [0x5a; BLOCK_SIZE as usize];
const FILE: &str = "file";
/// Longest wait for the end of a loop device.
const DETACH_MAX: Duration = Duration::from_secs(10);
/// Name of the loop devices, before the identity of their process.
const NAME: &str = "burgeon trial ";

/// The namespace of this process's id: a host has several, and an id means a process in one alone.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// Name of the loop devices of the process `owner`.
fn name_of(owner: u32) -> String {
    format!("{NAME}{}-{owner}", namespace())
}

/// True if the kernel bears the exchange. Has its loop devices forgotten by `forget`. An error says
/// nothing about the kernel, such as one for a lack of loop devices.
pub(crate) fn probe(forget: impl FnOnce(&[PathBuf])) -> Result<bool> {
    thaw_leftovers(&format!("{NAME}{}-", namespace()));
    let scratch = Scratch::make(&name_of(std::process::id()))?;
    let tried = scratch.exchange_and_use();
    forget(&scratch.detach());
    tried
}

/// Thaws the scratch file systems of killed attempts, which end with that. Their loop devices have
/// names of this beginning, followed by the id of a process.
fn thaw_leftovers(beginning: &str) {
    for (number, name) in LoopDevice::names().unwrap_or_default() {
        let owner = name.strip_prefix(beginning);
        let is_dead = |owner: &str| !Path::new("/proc").join(owner).exists();
        if owner.is_none_or(|owner| !is_dead(owner)) {
            continue;
        }
        // It succeeds with the sprout alone, whose file system is the frozen one.
        let device = PathBuf::from(format!("/dev/loop{number}"));
        let root = Btrfs::mount(&device, SUBVOLUME, MountAccess::Writable)
            .and_then(|mounted| mounted.open_root());
        if let Ok(root) = root {
            thaw_at(&root, &device);
        }
    }
}

/// A scratch file system.
struct Scratch {
    metadata: LoopDevice,
    data: LoopDevice,
    sprout: LoopDevice,
    /// The same as below `data`.
    other: File,
}

impl Scratch {
    /// With this name of its loop devices.
    fn make(name: &str) -> Result<Self> {
        let identity = Identity { fsid: Fsid::random()?.0 };
        let nodes = Nodes::default();
        let info = describe(&nodes)?;
        let metadata = in_memory(info.metadata_device_size())?;
        for (address, mut bytes) in nodes.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
            patch_nodes(&info, &identity, address, &mut bytes)?;
            write(&metadata, &bytes, address)?;
        }
        write_superblocks(&metadata, &info, &identity, DeviceNo::Metadata)?;
        let attach = |file: &File, read_only| {
            LoopDevice::attach(file, LoopOptions { name, read_only, discard: false })
        };
        Ok(Self {
            metadata: attach(&metadata, true)?,
            data: attach(&data_file(&info, &identity)?, true)?,
            sprout: attach(&in_memory(LIMIT_MIN)?, false)?,
            other: data_file(&info, &identity)?,
        })
    }

    fn mount(&self) -> Result<Btrfs> {
        let seed = [self.metadata.path(), self.data.path()];
        Btrfs::mount_new_sprout(&seed, self.sprout.path(), SUBVOLUME)
    }

    fn exchange_and_use(&self) -> Result<bool> {
        let mounted = self.mount()?;
        let exchange = Exchange {
            fsid: Fsid(mounted.fsid()?),
            data_device: self.data.path().to_owned(),
            local_device: self.sprout.path().to_owned(),
            writable: true,
            // Nobody else knows this file system.
            lock: PathBuf::new(),
        };
        let loop_device = exchange.open_device()?;
        let file = self.other.try_clone();
        let file = file.map_err(|e| Error::io("cannot try an exchange", e))?;
        order::exchange(&Live { exchange: &exchange, loop_device, file, is_served: true })?;
        match use_it(&mounted) {
            Ok(is_right) => Ok(is_right),
            Err(error) if is_of_a_shutdown(&error) => {
                tracing::info!(%error, "this kernel shuts a file system down whose device is exchanged");
                Ok(false)
            }
            Err(error) => Err(Error::io("cannot use a scratch file system", error)),
        }
    }

    /// Returns the paths of the loop devices, which are free then.
    fn detach(self) -> Vec<PathBuf> {
        let devices = [self.metadata, self.data, self.sprout];
        let paths = devices.iter().map(|device| device.path().to_owned()).collect();
        for device in devices {
            if let Err(error) = device.detach(DETACH_MAX) {
                tracing::warn!(%error, "a loop device of a scratch file system stays");
            }
        }
        paths
    }
}

/// True for what a file system that was shut down answers; a lack of memory says nothing.
fn is_of_a_shutdown(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    errno.is_some_and(|errno| [libc::EIO, libc::EROFS, libc::ESHUTDOWN].contains(&errno))
}

/// Reads the file, which is in no page cache yet, and writes another.
fn use_it(mounted: &Btrfs) -> io::Result<bool> {
    let root = mounted.open_root().map_err(io::Error::other)?;
    let mut content = Vec::new();
    let file = openat(&root, FILE, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    File::from(file).take(2 * BLOCK_SIZE).read_to_end(&mut content)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    let mut new = File::from(openat(&root, "new", flags, Mode::RUSR | Mode::WUSR)?);
    new.write_all(&CONTENT)?;
    new.sync_all()?;
    Ok(content == CONTENT)
}

/// Template nodes, by address.
#[derive(Default)]
struct Nodes(Mutex<Vec<(u64, Vec<u8>)>>);

impl NodeSink for Nodes {
    fn write(&self, physical: u64, nodes: &[u8]) -> Result<()> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((physical, nodes.to_vec()));
        Ok(())
    }
}

fn describe(nodes: &Nodes) -> Result<SeedInfo> {
    let mut tree = Tree::default();
    tree.inodes.push(Inode { mode: 0o040_755, ..Inode::default() });
    let body = InodeBody::Extents { first: 0, count: 1 };
    let file = Inode { mode: 0o100_644, size: BLOCK_SIZE, body, ..Inode::default() };
    tree.inodes.push(file);
    tree.extents.push(FileExtent { file_offset: 0, address: DATA_START, len: BLOCK_SIZE });
    let name = tree.push_bytes(FILE.as_bytes());
    let name = name.ok_or_else(|| Error::new(ErrorKind::Invalid, "the scratch tree is full"))?;
    tree.dirents.push(Dirent { parent: 0, inode: 1, name });
    let checksum = (ChecksumKind::Crc32c.of(&CONTENT) as u32).to_le_bytes();
    let uuids = Uuids::derive(&Digest::of(b"burgeon exchange trial"));
    write_seed(&tree, &checksum, &SeedOptions::new(DATA_START + BLOCK_SIZE, uuids), nodes)
}

fn data_file(info: &SeedInfo, identity: &Identity) -> Result<File> {
    let file = in_memory(info.data_device_size())?;
    write_superblocks(&file, info, identity, DeviceNo::Data)?;
    write(&file, &CONTENT, DATA_START)?;
    Ok(file)
}

fn write_superblocks(
    file: &File,
    info: &SeedInfo,
    identity: &Identity,
    device: DeviceNo,
) -> Result<()> {
    for (mirror, offset) in superblock_offsets(info, device).iter().enumerate() {
        if let Some(block) = superblock(info, identity, device, mirror) {
            write(file, &block, *offset)?;
        }
    }
    Ok(())
}

fn write(file: &File, bytes: &[u8], offset: u64) -> Result<()> {
    let failed = |e| Error::io("cannot write a scratch file system to try an exchange", e);
    file.write_all_at(bytes, offset).map_err(failed)
}

/// A sparse file of `len` bytes without a name: a full disk is no obstacle, and nothing is left.
fn in_memory(len: u64) -> Result<File> {
    let made = memfd_create("burgeon-trial", MemfdFlags::CLOEXEC).map_err(io::Error::from);
    let made = made.map(File::from).and_then(|file| file.set_len(len).map(|()| file));
    made.map_err(|e| Error::io("cannot make a scratch file in memory", e))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use burgeon_frontend::LoopDevice;
    use rustix::process::geteuid;

    use super::{Scratch, name_of, probe, thaw_leftovers};
    use crate::supervisor::exchange::{FIFREEZE, number_ioctl};

    /// More than `/proc/sys/kernel/pid_max` can be.
    const DEAD: u32 = 1 << 30;

    fn devices(name: &str) -> usize {
        LoopDevice::names().unwrap().iter().filter(|(_, known)| known == name).count()
    }

    fn await_none(name: &str) {
        let begun = Instant::now();
        while devices(name) > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "loop devices of {name} stay");
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_attempt_leaves_nothing() {
        if !geteuid().is_root() {
            return;
        }
        let mut forgotten = Vec::new();
        probe(|devices| forgotten = devices.to_vec()).unwrap();
        assert_eq!(forgotten.len(), 3);
        await_none(&name_of(std::process::id()));
    }

    #[test]
    fn an_attempt_that_was_killed_while_frozen_is_thawed_by_the_next() {
        if !geteuid().is_root() {
            return;
        }
        // Of this test alone, so that no other attempt on this host thaws it.
        let beginning = format!("burgeon test {} ", std::process::id());
        let name = format!("{beginning}{DEAD}");
        let scratch = Scratch::make(&name).unwrap();
        let mounted = scratch.mount().unwrap();
        number_ioctl(&mounted.open_root().unwrap(), FIFREEZE, 0).unwrap();
        drop((mounted, scratch));
        assert!(devices(&name) > 0, "a frozen file system keeps its devices");
        thaw_leftovers(&beginning);
        await_none(&name);
    }
}
