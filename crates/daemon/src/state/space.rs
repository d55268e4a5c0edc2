//! The sprout's file, reserved before btrfs sees it.
//!
//! A sparse sprout on a full host lost data: writes returned success, then btrfs aborted. So the
//! file is allocated in full before btrfs sees it, without copy on write if the host's file system
//! is btrfs itself, and its loop device passes no discard (which would release the reservation). A
//! growing sprout is allocated in steps, ahead of btrfs's usage (`supervisor/thin.rs`).

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};
use rustix::fs::{FallocateFlags, IFlags, fallocate, fstatvfs, ioctl_getflags, ioctl_setflags};

use crate::{id::Fsid, state::files};

/// Upper limit of the default for `--write-limit`, in bytes.
pub(crate) const LIMIT_DEFAULT_MAX: u64 = 10 << 30;

/// That default is at most the free space divided by this.
pub(crate) const LIMIT_DEFAULT_SHARE: u64 = 4;

/// The smallest sprout: btrfs refuses to work below about 110 MiB.
pub const LIMIT_MIN: u64 = 256 << 20;

/// Initial size of a growing sprout: the free space divided by this.
const FIRST_SHARE: u64 = 128;

/// Upper limit of the initial size: btrfs allocates data space in chunks of at most 1 GiB.
const FIRST_MAX: u64 = 1 << 30;

/// Bytes that growing sprouts leave free on the host, for Burgeon's records and other programs.
pub(crate) const HOST_LEFT: u64 = 64 << 20;

/// True if both folders lie in one file system.
pub(crate) fn shares_disk(a: &Path, b: &Path) -> bool {
    let disk = |folder: &Path| fs::metadata(folder).ok().map(|metadata| metadata.dev());
    disk(a) == disk(b)
}

/// Size limit of a sprout in the file system of `folder`: `wanted`, or the default.
pub(crate) fn limit(folder: &Path, wanted: Option<u64>) -> Result<u64> {
    if let Some(wanted) = wanted {
        if wanted < LIMIT_MIN {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "a write limit of {wanted} bytes is too small: btrfs needs {} MiB",
                    LIMIT_MIN >> 20
                ),
            ));
        }
        return Ok(wanted / BLOCK_SIZE * BLOCK_SIZE);
    }
    let free = free_space(folder)?;
    if free < LIMIT_MIN + HOST_LEFT {
        return Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "only {} MiB are free in {}: writes need {} MiB, and {} MiB are left to the host; \
                 free some, or mount --read-only",
                free >> 20,
                folder.display(),
                LIMIT_MIN >> 20,
                HOST_LEFT >> 20
            ),
        ));
    }
    let limit = (free / LIMIT_DEFAULT_SHARE).clamp(LIMIT_MIN, LIMIT_DEFAULT_MAX);
    Ok(limit / BLOCK_SIZE * BLOCK_SIZE)
}

/// Bytes that this process could still allocate in the file system of `folder`.
pub(crate) fn free_space(folder: &Path) -> Result<u64> {
    let failed = |e| Error::io(format!("cannot ask {} for its free space", folder.display()), e);
    let file = File::open(folder).map_err(failed)?;
    let stat = fstatvfs(&file).map_err(|e| failed(e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Initial size of a growing sprout of at most `limit` bytes, given `free` bytes.
fn first_size(free: u64, limit: u64) -> u64 {
    let first = (free / FIRST_SHARE).clamp(LIMIT_MIN, FIRST_MAX);
    first.min(limit) / BLOCK_SIZE * BLOCK_SIZE
}

/// Makes a new sprout of `limit` bytes, or of the first step if `thin`, fully allocated. Returns
/// the reserved bytes.
pub(crate) fn create_sprout(path: &Path, limit: u64, thin: bool) -> Result<u64> {
    let failed = |e| Error::io(format!("cannot make the sprout {}", path.display()), e);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = files::open(path, &mut options).map_err(failed)?;
    forbid_copy_on_write(&file);
    // Checked first: on a full disk some file systems report that the file is too large.
    let free = free_space(path.parent().unwrap_or(path))?;
    let reserved = if thin { first_size(free, limit) } else { limit };
    if reserved > free {
        return Err(Error::new(ErrorKind::NoSpace, no_room(reserved, path, thin)));
    }
    reserve(&file, 0, reserved, path)?;
    file.sync_all().map_err(failed)?;
    Ok(reserved)
}

/// Allocates the holes of an existing sprout: a copy that a backup has made is sparse.
pub(crate) fn reserve_holes(path: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("cannot open the sprout {}", path.display()), e);
    let file = files::open(path, OpenOptions::new().read(true).write(true)).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    // In units of 512 bytes, whatever the file system's blocks are. A sprout without holes takes no
    // space, so it can be mounted on a full disk.
    if metadata.blocks().saturating_mul(512) >= metadata.len() {
        return Ok(());
    }
    reserve(&file, 0, metadata.len(), path)?;
    file.sync_all().map_err(failed)
}

/// Allocates `len` bytes from `offset` of a sprout.
pub(crate) fn reserve(file: &File, offset: u64, len: u64, path: &Path) -> Result<()> {
    loop {
        match fallocate(file, FallocateFlags::empty(), offset, len) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io(no_room(len, path, true), e.into())),
        }
    }
}

fn no_room(len: u64, path: &Path, thin: bool) -> String {
    let way_out = match thin {
        false => "free some space, take a smaller --write-limit, or leave --reserve out",
        true => "free some space, or mount --read-only",
    };
    format!("cannot reserve {} MiB for writes in {}: {way_out}", len >> 20, path.display())
}

/// The size of a user's block device.
pub(crate) fn device_size(path: &Path) -> Result<u64> {
    let failed = |e| Error::io(format!("cannot use {} for writes", path.display()), e);
    let file = files::open_at_once(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.file_type().is_block_device() {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{} is not a block device, as --writes-device needs it", path.display()),
        ));
    }
    let size =
        rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(|e| failed(e.into()))?;
    if size < LIMIT_MIN {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{} has {size} bytes, too few: btrfs needs {LIMIT_MIN}", path.display()),
        ));
    }
    Ok(size)
}

/// The fsid of the btrfs on a device or file, from its first superblock; `None` if there is none.
pub(crate) fn btrfs_on(path: &Path) -> Result<Option<Fsid>> {
    /// Offset of the superblock, and the positions of fsid and magic in it.
    const SUPERBLOCK: u64 = 64 << 10;
    const FSID: usize = 0x20;
    const MAGIC: usize = 0x40;
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let mut block = [0; 0x48];
    match files::open_at_once(path).and_then(|file| file.read_exact_at(&mut block, SUPERBLOCK)) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(failed(e)),
    }
    let mut fsid = [0; 16];
    fsid.copy_from_slice(&block[FSID..FSID + 16]);
    Ok((block[MAGIC..] == *b"_BHRfS_M").then_some(Fsid(fsid)))
}

/// On btrfs a rewritten block of a copy-on-write file needs new space, which would void the
/// reservation. Other file systems do not know the flag and do not need it.
pub(crate) fn forbid_copy_on_write(file: &File) {
    if let Ok(flags) = ioctl_getflags(file) {
        let _ = ioctl_setflags(file, flags | IFlags::NOCOW);
    }
}

/// Bytes reserved for the sprout at `path`: the length of its file.
pub(crate) fn reserved(path: &Path) -> Result<u64> {
    let metadata = path
        .symlink_metadata()
        .map_err(|e| Error::io(format!("cannot look at {}", path.display()), e))?;
    Ok(metadata.len())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use burgeon_block::ErrorKind;

    use super::{FIRST_MAX, LIMIT_MIN, create_sprout, first_size, limit, reserved};

    #[test]
    fn a_sprout_is_allocated_in_full_and_a_growing_one_in_part() {
        let temp = tempfile::tempdir().unwrap();
        let (full, thin) = (temp.path().join("full"), temp.path().join("thin"));
        assert_eq!(create_sprout(&full, LIMIT_MIN, false).unwrap(), LIMIT_MIN);
        let allocated = |path| std::fs::metadata(path).unwrap().blocks() * 512;
        assert!(allocated(&full) >= LIMIT_MIN);
        std::fs::remove_file(&full).unwrap();
        let first = create_sprout(&thin, 8 << 30, true).unwrap();
        assert!((LIMIT_MIN..=FIRST_MAX).contains(&first), "{first}");
        assert_eq!(reserved(&thin).unwrap(), first);
        assert!((first..2 * first).contains(&allocated(&thin)));
    }

    #[test]
    fn a_growing_sprout_begins_with_a_small_share_of_the_host() {
        assert_eq!(first_size(1 << 30, 10 << 30), LIMIT_MIN);
        assert_eq!(first_size(64 << 30, 10 << 30), 512 << 20);
        assert_eq!(first_size(1 << 40, 10 << 30), FIRST_MAX);
        assert_eq!(first_size(1 << 40, 300 << 20), 300 << 20);
    }

    #[test]
    fn more_than_the_free_space_cannot_be_reserved() {
        let temp = tempfile::tempdir().unwrap();
        let error = create_sprout(&temp.path().join("s"), 1 << 50, false).unwrap_err();
        assert!(error.to_string().contains("--write-limit"), "{error}");
        assert_eq!(limit(temp.path(), Some(1 << 20)).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(limit(temp.path(), Some((1 << 30) + 1)).unwrap(), 1 << 30);
    }
}
