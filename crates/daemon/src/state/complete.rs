//! Images whose data is all in a plain file, over which the next mount is made.
//!
//! ```text
//!   images/<digest>/complete/   plain    all lazy data, at its addresses
//!                               summed   the same of an image that has no checksums of blocks
//!                               plain.lent, summed.lent   the chunks that it shares (`loans.rs`)
//!                               sums     these checksums
//!                               seed …   prepared with them
//!
//!   mount:      complete/plain ── rename ──► mounts/<id>/plain    gets the superblocks of the mount
//!   its end:    complete/plain ◄── rename ── mounts/<id>/plain
//! ```
//!
//! `burgeon let-go` makes the file where it cannot be put below the mount that it was made from
//! (`let_go.rs`). One mount at a time has it, because each mount has superblocks of its own; others
//! are served.
//!
//! Invariants, held by the tests below and `crates/cli/tests/let_go.rs`:
//! - Losing a file of this folder costs another copy, and nothing else.
//! - Less privileged processes write to the folders of images (`roles.rs`: the opener, and the
//!   preparing process). So no symlink is followed to a file of this folder, and nothing in it is
//!   parsed here.
//! - A plain file that is not whole, not this user's alone, or has another name is not used.
//! - The kernel verifies all data of a plain file: `summed` is used only below a seed that was
//!   prepared with `sums`, which named writes that are older do not have.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_btrfs::{DeviceNo, Identity, SeedInfo, superblock, superblock_offsets};
use burgeon_image::{remove_own, rename_own};
use rustix::{fs::RenameFlags, process::geteuid};

use crate::{
    id::{Fsid, MountId},
    state::{
        files, loans,
        paths::StateDir,
        prepared::Prepared,
        record::{MountRecord, Plain},
    },
};

/// The folder of a complete image.
pub(crate) fn folder(state: &StateDir, image: &Digest) -> PathBuf {
    state.image(image).join("complete")
}

impl Plain {
    /// Its place while no mount has it.
    pub(crate) fn path(self, state: &StateDir, image: &Digest) -> PathBuf {
        folder(state, image).join(match self {
            Self::Described => "plain",
            Self::WithChecksums => "summed",
        })
    }
}

/// The file with the checksum of each block, if the image's description has none.
pub(crate) fn sums(state: &StateDir, image: &Digest) -> PathBuf {
    folder(state, image).join(SUMS)
}

/// The name of [`sums`].
pub(crate) const SUMS: &str = "sums";

/// True if the image has checksums in [`sums`].
pub(crate) fn has_sums(state: &StateDir, image: &Digest) -> bool {
    is_file(&sums(state, image))
}

/// True if the next mount of the image can be made over its plain file.
pub(crate) fn is_here(state: &StateDir, image: &Digest) -> bool {
    [Plain::Described, Plain::WithChecksums].iter().any(|plain| is_file(&plain.path(state, image)))
}

fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|file| file.is_file())
}

/// Takes the plain file of an image for the mount `id`, whose seed is made from `base`, described
/// by `info`, under `fsid`. `None` if there is none, another mount has it, or it cannot be used.
pub(crate) fn take(
    state: &StateDir,
    base: &Prepared,
    id: MountId,
    (info, fsid): (&SeedInfo, Fsid),
) -> Option<(File, Plain)> {
    let plain = match base.folder == folder(state, &base.digest) {
        true => Plain::WithChecksums,
        false => Plain::Described,
    };
    let path = state.plain_file(id);
    let from = plain.path(state, &base.digest);
    rename_own(&from, &path, RenameFlags::NOREPLACE).ok()?;
    loans::follow(&from, &path);
    match open(&path, info, fsid) {
        Ok(file) => Some((file, plain)),
        Err(error) => {
            tracing::warn!(mount = %id, %error, "the mount is served: the image's plain file is unusable");
            let removed = loans::forget(&path).and_then(|()| files::remove_file(&path));
            removed.unwrap_or_else(|error| {
                tracing::warn!(
                    mount = %id,
                    path = %path.display(),
                    %error,
                    "the unusable plain file stays"
                );
            });
            None
        }
    }
}

fn open(path: &Path, info: &SeedInfo, fsid: Fsid) -> Result<File> {
    let failed = |e| Error::io(format!("cannot use {}", path.display()), e);
    let file = files::open(path, File::options().read(true).write(true)).map_err(failed)?;
    let is = file.metadata().map_err(failed)?;
    // Another user's file, or one with a second name, is not of `let-go`.
    if is.uid() != geteuid().as_raw() || is.mode() & 0o077 != 0 || is.nlink() != 1 {
        return Err(failed(io::ErrorKind::PermissionDenied.into()));
    }
    // Filling up a short one would turn lost data into zeros.
    if is.len() != info.data_device_size() {
        let what = format!(
            "{} has {} bytes in place of {}",
            path.display(),
            is.len(),
            info.data_device_size()
        );
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let identity = Identity { fsid: fsid.0 };
    for (mirror, offset) in superblock_offsets(info, DeviceNo::Data).iter().enumerate() {
        if let Some(block) = superblock(info, &identity, DeviceNo::Data, mirror) {
            file.write_all_at(&block, *offset).map_err(failed)?;
        }
    }
    // The loop device reads it directly.
    file.sync_data().map_err(failed)?;
    Ok(file)
}

/// Gives the plain file of a mount that has ended back to its image, if it is the image's.
pub(crate) fn give_back(state: &StateDir, record: &MountRecord) {
    if let Some(plain) = record.plain_of_image {
        give_back_as(state, record.attach.id, &record.digest.0, plain);
    }
}

fn give_back_as(state: &StateDir, id: MountId, image: &Digest, plain: Plain) {
    let to = plain.path(state, image);
    let from = state.plain_file(id);
    // Not over one that was made meanwhile. The image may have been collected, too.
    match rename_own(&from, &to, RenameFlags::NOREPLACE) {
        Ok(()) => loans::follow(&from, &to),
        Err(error) => {
            tracing::debug!(mount = %id, %error, "the image's plain file goes with the mount");
        }
    }
}

/// Forgets the plain file of `image`, if no mount has it. Returns the bytes that it took.
pub(crate) fn forget(state: &StateDir, image: &Digest) -> Result<u64> {
    let mut freed = 0;
    for path in [Plain::Described, Plain::WithChecksums].map(|plain| plain.path(state, image)) {
        let bytes = path.symlink_metadata().map_or(0, |file| file.blocks().saturating_mul(512));
        loans::forget(&path)?;
        match remove_own(&path) {
            Ok(()) => freed += bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io(format!("cannot remove {}", path.display()), e)),
        }
    }
    Ok(freed)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
        path::Path,
    };

    use burgeon_block::{BLOCK_SIZE, Digest, Result};
    use burgeon_btrfs::{
        DATA_START, Inode, NodeSink, SeedInfo, SeedOptions, Tree, Uuids, write_seed,
    };

    use super::{folder, forget, give_back_as, is_here, take};
    use crate::{
        id::{Fsid, MountId},
        state::{files, paths::StateDir, prepared::Prepared, record::Plain},
    };

    /// A state directory with the folder of a complete image.
    fn complete(temp: &Path) -> (StateDir, Digest) {
        let (state, image) = (StateDir::open(&temp.join("state")).unwrap(), Digest::of(b"image"));
        files::make_folder(&state.image(&image)).unwrap();
        files::make_folder(&folder(&state, &image)).unwrap();
        (state, image)
    }

    fn mount(state: &StateDir) -> MountId {
        let id = MountId::random().unwrap();
        files::make_folder(&state.mount(id)).unwrap();
        id
    }

    #[test]
    fn a_file_goes_back_to_its_image_unless_there_is_another() {
        let temp = tempfile::tempdir().unwrap();
        let (state, image) = complete(temp.path());
        let [one, two] = [mount(&state), mount(&state)];
        fs::write(state.plain_file(one), "one").unwrap();
        fs::write(state.plain_file(two), "two").unwrap();
        give_back_as(&state, one, &image, Plain::Described);
        give_back_as(&state, two, &image, Plain::Described);
        let plain = Plain::Described.path(&state, &image);
        assert_eq!(fs::read_to_string(&plain).unwrap(), "one");
        assert!(state.plain_file(two).exists(), "it goes with its mount");
        assert!(!state.plain_file(one).exists() && is_here(&state, &image));
        assert!(forget(&state, &image).unwrap() > 0 && !is_here(&state, &image));
        assert_eq!(forget(&state, &image).unwrap(), 0);
        // An image that is collected meanwhile.
        files::remove_folder(&state.image(&image)).unwrap();
        give_back_as(&state, two, &image, Plain::Described);
        assert!(!is_here(&state, &image) && state.plain_file(two).exists());
    }

    #[test]
    fn a_plain_file_that_anyone_may_have_meddled_with_is_not_used() {
        let temp = tempfile::tempdir().unwrap();
        let (state, image) = complete(temp.path());
        let info = info();
        let base = Prepared { folder: state.image(&image), digest: image };
        let with_checksums = Prepared { folder: folder(&state, &image), digest: image };
        let plain = Plain::Described.path(&state, &image);
        let make = |len: u64| {
            let file = fs::File::create(&plain).unwrap();
            file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
            file.set_len(len).unwrap();
        };
        let seed = (&info, Fsid([7; 16]));
        let taken = |base: &Prepared| take(&state, base, mount(&state), seed).map(|taken| taken.1);
        let whole = info.data_device_size();

        make(whole);
        assert_eq!(taken(&with_checksums), None, "its seed knows no checksums of this file");
        assert_eq!(taken(&base), Some(Plain::Described));
        assert_eq!(taken(&base), None, "a mount has it");
        for len in [0, whole - 4096, whole + 4096] {
            make(len);
            assert_eq!(taken(&base), None, "{len} bytes");
            assert!(!plain.exists());
        }
        make(whole);
        fs::set_permissions(&plain, fs::Permissions::from_mode(0o620)).unwrap();
        assert_eq!(taken(&base), None);
        make(whole);
        fs::hard_link(&plain, temp.path().join("other")).unwrap();
        assert_eq!(taken(&base), None);
        if rustix::process::geteuid().is_root() {
            make(whole);
            std::os::unix::fs::chown(&plain, Some(1), None).unwrap();
            assert_eq!(taken(&base), None);
        }
        // Neither the file nor a folder above it may be a symlink.
        let elsewhere = temp.path().join("elsewhere");
        make(whole);
        fs::rename(&plain, &elsewhere).unwrap();
        symlink(&elsewhere, &plain).unwrap();
        assert_eq!(taken(&base), None);
        assert_eq!(fs::metadata(&elsewhere).unwrap().blocks(), 0, "no superblock was written");
        make(whole);
        fs::rename(folder(&state, &image), temp.path().join("moved")).unwrap();
        symlink(temp.path().join("moved"), folder(&state, &image)).unwrap();
        assert_eq!(taken(&base), None);
        assert!(forget(&state, &image).is_err());
        assert!(temp.path().join("moved/plain").exists());
    }

    /// The description of a seed with data of one block.
    fn info() -> SeedInfo {
        struct Nowhere;
        impl NodeSink for Nowhere {
            fn write(&self, _: u64, _: &[u8]) -> Result<()> {
                Ok(())
            }
        }
        let mut tree = Tree::default();
        tree.inodes.push(Inode { mode: 0o040_755, ..Inode::default() });
        let uuids = Uuids::derive(&Digest::of(b"image"));
        let options = SeedOptions::new(DATA_START + BLOCK_SIZE, uuids);
        write_seed(&tree, &[0; 4], &options, &Nowhere).unwrap()
    }
}
