//! Paths through other people's folders: whoever owns a folder may change what a path through it
//! leads to while root works there, and root must not be led elsewhere.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use testkit::{Burgeon, OpensOf, PATIENCE, Space, wait_until};

const BURGEON: &str = env!("CARGO_BIN_EXE_burgeon");
const LIMIT: [&str; 2] = ["--write-limit", "300M"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn small_image(space: &Space, burgeon: &Burgeon) {
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), "content").unwrap();
    burgeon.build(&tree, "image:1");
}

/// A stopped process goes on when this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn supervisor_of(burgeon: &Burgeon) -> Self {
        let id = burgeon.status()["supervisor_pid"].as_i64().unwrap();
        let pid = Pid::from_raw(i32::try_from(id).unwrap()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

fn start(burgeon: &Burgeon, arguments: &[&str]) -> Child {
    let mut command = burgeon.command(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Whether some process holds a lock (flock) on `path`; asking takes none.
fn is_locked(path: &Path) -> bool {
    let inode = format!(":{} ", fs::metadata(path).unwrap().ino());
    let locks = fs::read_to_string("/proc/locks").unwrap();
    locks.lines().any(|line| line.contains("FLOCK") && line.contains(&inode))
}

/// Puts a symlink to `other` in the place of `folder`; returns where that is now.
fn swap(folder: &Path, other: &Path) -> PathBuf {
    let moved = folder.with_extension("moved");
    fs::rename(folder, &moved).unwrap();
    symlink(other, folder).unwrap();
    moved
}

#[test]
fn a_mount_lands_on_the_directory_that_was_checked() {
    let space = Space::new("checked");
    let burgeon = Burgeon::new(BURGEON, &space);
    small_image(&space, &burgeon);
    let first = burgeon.mount("image:1", &space.path("first"), &LIMIT);
    let (parent, elsewhere) = (space.make_folder("parent"), space.make_folder("elsewhere"));
    fs::create_dir(parent.join("at")).unwrap();
    fs::create_dir(elsewhere.join("at")).unwrap();
    // While the supervisor stands still, the command is between its checks and the move.
    let stopped = Stopped::supervisor_of(&burgeon);
    let at = parent.join("at");
    let mount = start(&burgeon, &["mount", "image:1", text(&at), LIMIT[0], LIMIT[1]]);
    assert!(wait_until(PATIENCE, || is_locked(&at)), "the command never locks {at:?}");
    let moved = swap(&parent, &elsewhere);
    drop(stopped);
    let output = mount.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_dir(elsewhere.join("at")).unwrap().count(), 0, "it landed elsewhere");
    assert_eq!(fs::read_to_string(moved.join("at/file")).unwrap(), "content");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains(text(&moved.join("at"))), "{said}");
    burgeon.ok(&["umount", text(&moved.join("at"))]);
    burgeon.umount(first);
}

/// An empty file system to map into.
fn empty(space: &Space, burgeon: &Burgeon) -> PathBuf {
    let at = space.make_folder("mapped");
    burgeon.ok(&["create-empty", text(&at), "--writes", "w", "--write-limit", "300M"]);
    at
}

#[test]
fn a_tree_whose_owner_swaps_a_folder_for_a_symlink_shows_nothing_from_outside() {
    let space = Space::new("raced-tree");
    let burgeon = Burgeon::new(BURGEON, &space);
    let mounted = empty(&space, &burgeon);
    let (tree, secrets) = (space.make_folder("tree"), space.make_folder("secrets"));
    fs::write(secrets.join("secret"), "secret").unwrap();
    let folders = ["one", "two"].map(|name| tree.join(name));
    for folder in &folders {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("own"), "own").unwrap();
    }
    let to = mounted.join("tree");
    let arguments = ["map", text(&to), "--from", text(&tree)];
    // Both folders have been looked at when the first of them is opened; then the other is swapped.
    let opens = OpensOf::directories(&folders);
    let map = start(&burgeon, &arguments);
    let first = opens.next();
    let other = folders.iter().find(|folder| **folder != first.path()).unwrap();
    let moved = swap(other, &secrets);
    drop(first);
    drop(opens);
    let output = map.wait_with_output().unwrap();
    let seen: Vec<_> =
        ["one/secret", "two/secret"].iter().filter(|p| to.join(p).exists()).collect();
    assert!(seen.is_empty(), "{seen:?} came from outside the tree: {output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("was changed while it was mapped"), "{output:?}");
    assert!(!to.exists());
    // With nobody about, all of it is there.
    fs::remove_file(other).unwrap();
    fs::rename(moved, other).unwrap();
    burgeon.ok(&arguments);
    for name in ["one/own", "two/own"] {
        assert_eq!(fs::read_to_string(to.join(name)).unwrap(), "own");
    }
    burgeon.ok(&["umount", text(&mounted)]);
}

#[test]
fn a_folder_that_is_made_beside_its_place_is_filled_wherever_its_name_leads() {
    let space = Space::new("raced-target");
    let burgeon = Burgeon::new(BURGEON, &space);
    let mounted = empty(&space, &burgeon);
    let (tree, victim) = (space.make_folder("tree"), space.make_folder("victim"));
    for number in 0..3000 {
        fs::write(tree.join(number.to_string()), "small").unwrap();
    }
    // Anybody may own the folder that is mapped into, and put something else beside the place.
    let folder = mounted.join("folder");
    fs::create_dir(&folder).unwrap();
    let to = folder.join("here");
    let mut map = start(&burgeon, &["map", text(&to), "--from", text(&tree)]);
    let mut hidden = None;
    while hidden.is_none() && map.try_wait().unwrap().is_none() {
        hidden = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).next();
    }
    let hidden = hidden.expect("the folder is made beside its place");
    fs::rename(&hidden, folder.join("stolen")).unwrap();
    symlink(&victim, &hidden).unwrap();
    let output = map.wait_with_output().unwrap();
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0, "files were made elsewhere");
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("in the place of"), "{said}");
    assert!(hidden.is_symlink(), "what somebody else has put there stays");
    assert_eq!(fs::read_dir(folder.join("stolen")).unwrap().count(), 0, "half of it stays");
    burgeon.ok(&["umount", text(&mounted)]);
}
