//! The same file in a btrfs without seed, reached in the ways that others offer.
//!
//! ```text
//!   loop   btrfs on a loop device, direct I/O, on a file                  (no server at all)
//!   qemu   btrfs on a loop device on qemu-storage-daemon's FUSE export of such a file
//! ```

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use super::{
    Bench,
    machine::{Background, Loop, Mount, mount, run, wait_until},
};

/// A mounted peer. Fields are dropped in this order: the mount, and with it its device, the server.
pub(crate) struct Peer {
    mount: Mount,
    _server: Option<Background>,
}

impl Peer {
    /// The file `name` in it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.mount.path().join(name)
    }
}

/// btrfs on a direct-I/O loop device on a file in `folder`.
pub(crate) fn plain_loop(folder: &Path, at: &Path, tree: &Path, mib: u64) -> Result<Peer> {
    let image = make_btrfs(&folder.join("loop.btrfs"), tree, mib)?;
    attach(&image, at, None)
}

/// The same behind qemu-storage-daemon's FUSE export.
pub(crate) fn qemu(bench: &Bench, tree: &Path, mib: u64) -> Result<Peer> {
    let image = make_btrfs(&bench.path("qemu.btrfs"), tree, mib)?;
    let export = bench.path("qemu.export");
    File::create(&export)?;
    let mut command = Command::new("qemu-storage-daemon");
    let file = image.display();
    command.arg(format!(
        "--blockdev=driver=file,node-name=disk,filename={file},cache.direct=on,read-only=on"
    ));
    let point = export.display();
    command.arg(format!("--export=type=fuse,id=export,node-name=disk,mountpoint={point}"));
    let server = Background::start(&mut command)?;
    let exported = || std::fs::metadata(&export).is_ok_and(|m| m.len() > 0);
    wait_until("the FUSE export of qemu-storage-daemon", exported)?;
    attach(&export, &bench.path("qemu"), Some(server))
}

/// mkfs.btrfs with the content of `tree`; each call gives another fsid.
fn make_btrfs(image: &Path, tree: &Path, mib: u64) -> Result<PathBuf> {
    File::create(image)?.set_len((mib * 5 / 4 + 512) << 20)?;
    let (tree, path) = (tree.display().to_string(), image.display().to_string());
    run("mkfs.btrfs", &["--quiet", "--rootdir", &tree, &path])?;
    Ok(image.to_path_buf())
}

fn attach(file: &Path, at: &Path, server: Option<Background>) -> Result<Peer> {
    // Left to the mount: a benchmark that is killed detaches nothing itself.
    let device = Loop::new(file)?;
    let mount = mount(&["-t", "btrfs", "-o", "ro", device.device()], at)?;
    Ok(Peer { mount, _server: server })
}
