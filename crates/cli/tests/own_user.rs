//! The server as another user than root, in a root of its own, on each file system that a state
//! directory may lie on.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::AsRawFd,
        unix::{fs::MetadataExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    thread,
};

use rustix::{
    mount::{MountPropagationFlags, mount_change},
    process::Uid,
    thread::{CapabilitiesSecureBits, set_capabilities_secure_bits, set_thread_res_uid},
};
use testkit::{Burgeon, Mounted, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// The user of servers (`daemon/src/host/own_root.rs`), real, effective, saved, and for files.
const USERS: [&str; 4] = ["0", "2071294567", "2071294567", "2071294567"];

fn server(burgeon: &Burgeon) -> u32 {
    burgeon.status()["server_pid"].as_u64().unwrap_or_default() as u32
}

/// The users of a process.
fn users(process: u32) -> Vec<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

/// All files and folders in and below `folder`.
fn everything(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_owned()];
    let mut at = 0;
    while let Some(path) = found.get(at).cloned() {
        if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
            found.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        at += 1;
    }
    found
}

struct Installation<'a> {
    burgeon: Burgeon,
    space: &'a Space,
    files: Vec<Vec<u8>>,
}

impl<'a> Installation<'a> {
    /// With its state at `state`, and an image `tree` of four files.
    fn new(space: &'a Space, state: &Path) -> Self {
        let tree = space.make_folder("tree");
        let files: Vec<_> = (0..4).map(|seed| Rng::new(seed).bytes(600_000)).collect();
        for (number, content) in files.iter().enumerate() {
            fs::write(tree.join(number.to_string()), content).unwrap();
        }
        let burgeon = Burgeon::with_state(PROGRAM, state.to_owned());
        burgeon.build(&tree, "tree");
        Self { burgeon, space, files }
    }

    fn mount(&self, name: &str) -> Mounted {
        let options = ["--read-only", "--transport", "fuse"];
        self.burgeon.mount("tree", &self.space.path(name), &options)
    }

    fn reads(&self, mounted: &Mounted, number: usize) -> bool {
        drop_caches();
        let path = mounted.path().join(number.to_string());
        fs::read(path).is_ok_and(|content| content == self.files[number])
    }
}

fn serves_as_another_user(label: &str, mkfs: &[&str]) {
    let space = Space::new(label);
    let disk = space.disk_with(&space.path("disk"), 512 << 20, mkfs);
    let host = Installation::new(&space, &disk.path().join("state"));
    let burgeon = &host.burgeon;
    let mounted = host.mount("at");
    let first = server(burgeon);
    assert_eq!(users(first), USERS);
    assert!(host.reads(&mounted, 0));
    // Its root has what it needs, and of the disk its own folder.
    let listed = fs::read_dir(format!("/proc/{first}/root")).unwrap();
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let listed: BTreeSet<String> = listed.map(|entry| name(entry.unwrap())).collect();
    assert!(listed.contains("etc") && listed.contains("proc"), "{listed:?}");
    for foreign in ["home", "root", "dev", "boot", "srv"] {
        assert!(!listed.contains(foreign), "{listed:?}");
    }
    // For everybody else its files are root's.
    for path in everything(burgeon.state()) {
        assert_eq!(path.symlink_metadata().unwrap().uid(), 0, "{path:?}");
    }
    assert!(burgeon.ok(&["doctor"]).contains("a user of its own"));
    // The next supervisor takes it over; the next server is another user as well.
    kill(burgeon.status()["supervisor_pid"].as_u64().unwrap() as u32);
    burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(server(burgeon), first);
    assert!(host.reads(&mounted, 1));
    kill(first);
    assert!(wait_until(PATIENCE, || host.reads(&mounted, 2)));
    assert_eq!(users(server(burgeon)), USERS);
    burgeon.umount(mounted);
}

#[test]
fn the_server_is_another_user_on_ext4() {
    serves_as_another_user("own-user-ext4", &["mkfs.ext4", "-q", "-F"]);
}

#[test]
fn the_server_is_another_user_on_xfs() {
    serves_as_another_user("own-user-xfs", &["mkfs.xfs", "-q", "-f"]);
}

#[test]
fn the_server_is_another_user_on_btrfs() {
    serves_as_another_user("own-user-btrfs", &["mkfs.btrfs", "-q", "-f"]);
}

/// The answer of the API socket in `run` to a harmless request of `user`; empty if it is cut off.
fn answer_to(user: u32, run: &Path) -> Vec<u8> {
    // The path may be longer than an address.
    let run = File::open(run).unwrap();
    // Only this thread changes its user, and keeps the capability to reach the socket.
    let asked = thread::spawn(move || {
        set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP).unwrap();
        set_thread_res_uid(Uid::ROOT, Uid::from_raw(user), Uid::ROOT).unwrap();
        let path = format!("/proc/thread-self/fd/{}/api.sock", run.as_raw_fd());
        let mut stream = UnixStream::connect(path).unwrap();
        let request = br#"{"call":"status"}"#;
        // A client that is cut off at once cannot write.
        let length = (request.len() as u32).to_le_bytes();
        let _ = stream.write_all(&length).and_then(|()| stream.write_all(request));
        let mut answer = [0; 16];
        let len = stream.read(&mut answer).unwrap_or_default();
        answer[..len].to_vec()
    });
    asked.join().unwrap()
}

#[test]
fn the_api_socket_refuses_the_user_of_servers() {
    let space = Space::new("own-user-api");
    let host = Installation::new(&space, &space.path("state"));
    let mounted = host.mount("at");
    let run = host.burgeon.state().join("run");
    assert!(!answer_to(0, &run).is_empty());
    assert!(answer_to(USERS[1].parse().unwrap(), &run).is_empty());
    host.burgeon.umount(mounted);
}

/// The kernel maps no overlayfs.
#[test]
fn on_overlayfs_the_server_stays_root_and_says_so() {
    let space = Space::new("own-user-overlay");
    let overlay = space.overlay("merged");
    let host = Installation::new(&space, &overlay.path().join("state"));
    let mounted = host.mount("at");
    assert!(host.reads(&mounted, 0));
    assert_eq!(users(server(&host.burgeon)), ["0"; 4]);
    assert!(host.burgeon.ok(&["doctor"]).contains("root, without capabilities"));
    let log = fs::read_to_string(host.burgeon.state().join("run/daemon.log")).unwrap();
    assert!(log.contains("the server stays root") && log.contains("idmapped"), "{log}");
    host.burgeon.umount(mounted);
    host.burgeon.ok(&["shutdown"]);
    drop(overlay);
}

/// The server sees no mount that comes after it: the next mount has it replaced.
#[test]
fn a_disk_that_is_mounted_on_a_folder_of_the_state_is_written_to() {
    let space = Space::new("own-user-later");
    let below = space.small_disk("disk", 256 << 20);
    // The daemon's namespace follows that of this test only where mounts propagate.
    mount_change(below.path(), MountPropagationFlags::SHARED).unwrap();
    let host = Installation::new(&space, &below.path().join("state"));
    let mounted = host.mount("at");
    let first = server(&host.burgeon);
    let cache = host.burgeon.state().join("cache");
    let disk = space.disk_with(&cache, 256 << 20, &["tmpfs"]);
    let other = host.mount("other");
    assert!(wait_until(PATIENCE, || ![0, first].contains(&server(&host.burgeon))));
    assert!(host.reads(&other, 0) && host.reads(&mounted, 1));
    assert!(wait_until(PATIENCE, || fs::read_dir(&cache).unwrap().count() > 0));
    host.burgeon.umount(other);
    host.burgeon.umount(mounted);
    host.burgeon.ok(&["shutdown"]);
    drop((disk, below));
}
