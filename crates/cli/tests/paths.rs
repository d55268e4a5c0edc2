//! Paths through other people's folders: the owner of a folder may change what a path through it
//! leads to while root works there, and root must not be led elsewhere.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, Permissions},
    io::Read,
    net::Shutdown,
    os::{
        fd::AsRawFd,
        unix::{
            fs::{MetadataExt, PermissionsExt, symlink},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::Arc,
    thread,
};

use rustix::{
    fs::{CWD, Mode},
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
        socket_with,
    },
    process::{Pid, Signal, Uid, kill_process},
};
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

/// True if some process holds a lock (flock) on `path`; asking takes none.
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
    assert_eq!(fs::read_dir(elsewhere.join("at")).unwrap().count(), 0, "it was made elsewhere");
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
    // The symlink may come before the folder was opened.
    assert!(said.contains("has replaced") || said.contains("Not a directory"), "{said}");
    assert!(hidden.is_symlink(), "what somebody else has put there stays");
    assert_eq!(fs::read_dir(folder.join("stolen")).unwrap().count(), 0, "half of it stays");
    burgeon.ok(&["umount", text(&mounted)]);
}

#[test]
fn a_socket_of_another_user_gets_no_request() {
    let space = Space::new("foreign-socket");
    let burgeon = Burgeon::new(BURGEON, &space);
    small_image(&space, &burgeon);
    burgeon.ok(&["list"]);
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.unwrap();
    let path = burgeon.state().join("run/api.sock");
    // The path may be longer than an address.
    let run = fs::File::open(burgeon.state().join("run")).unwrap();
    let short = format!("/proc/thread-self/fd/{}/api.sock", run.as_raw_fd());
    bind(&socket, &SocketAddrUnix::new(short).unwrap()).unwrap();
    // A client connects to the user who has called `listen`. Only this thread changes its user.
    let (root, nobody) = (Uid::ROOT, Uid::from_raw(65534));
    rustix::thread::set_thread_res_uid(root, nobody, root).unwrap();
    let listened = listen(&socket, 16);
    rustix::thread::set_thread_res_uid(root, root, root).unwrap();
    listened.unwrap();
    let socket = Arc::new(socket);
    let listener = Arc::clone(&socket);
    // Hangs up on everybody, so that a client that has sent its request does not wait for ever.
    let received = thread::spawn(move || {
        let mut received = Vec::new();
        while let Ok(client) = accept_with(&listener, SocketFlags::CLOEXEC) {
            let mut client = UnixStream::from(client);
            client.shutdown(Shutdown::Write).unwrap();
            client.read_to_end(&mut received).unwrap();
        }
        received
    });
    let at = space.make_folder("at");
    let below = at.join("x");
    let map = ["map", text(&below), "--from", "/etc"];
    for arguments in [&["status"][..], &["mount", "image:1", text(&at)], &map, &["shutdown"]] {
        burgeon.fails(arguments, 1, "a process of another user (uid 65534) listens on");
    }
    rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
    let received = received.join().unwrap();
    assert!(received.is_empty(), "{}", String::from_utf8_lossy(&received));
    drop(socket);
    fs::remove_file(path).unwrap();
}

#[test]
fn a_state_directory_is_ones_own_and_a_directory() {
    let space = Space::new("state-directory");
    let foreign = space.make_folder("foreign");
    fs::set_permissions(&foreign, Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(&foreign, Some(65534), Some(65534)).unwrap();
    let foreign = Burgeon::with_state(BURGEON, foreign);
    for arguments in [&["list"][..], &["status"], &["build", "/etc", "x"]] {
        foreign.fails(arguments, 1, "belongs to another user (uid 65534)");
    }
    assert_eq!(fs::read_dir(foreign.state()).unwrap().count(), 0);
    let file = space.path("file");
    fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        let wrong = Burgeon::before_state(BURGEON, path);
        for arguments in [&["list"][..], &["status"], &["build", "/etc", "x"]] {
            let said = wrong.run(arguments).stderr;
            assert!(said.contains(&format!("{} is not a directory", file.display())), "{said}");
            assert!(!said.contains("CAP_"), "{said}");
        }
    }
}

#[test]
fn a_folder_of_the_state_directory_that_is_a_symlink_is_named() {
    let space = Space::new("linked-state");
    let burgeon = Burgeon::new(BURGEON, &space);
    burgeon.build(&space.make_folder("tree"), "image");
    let (run, elsewhere) = (burgeon.state().join("run"), space.path("elsewhere"));
    fs::rename(&run, &elsewhere).unwrap();
    symlink(&elsewhere, &run).unwrap();
    let at = space.make_folder("at");
    for arguments in [&["list"][..], &["status"], &["mount", "image", text(&at)]] {
        let said = burgeon.run(arguments);
        assert_eq!(said.code, Some(1), "{said:#?}");
        let named = format!("{} is a symlink", run.display());
        assert!(said.stderr.contains(&named) && said.stderr.contains("--state-dir"), "{said:#?}");
    }
}

#[test]
fn a_mistyped_state_directory_is_not_made() {
    let space = Space::new("mistyped");
    let typo = Burgeon::before_state(BURGEON, space.path("state"));
    let at = space.make_folder("at");
    assert!(typo.ok(&["status"]).contains("there is no state directory"));
    typo.fails(&["list"], 3, "there is no state directory");
    typo.fails(&["inspect", "image:1"], 3, "there is no state directory");
    typo.fails(&["writes", "list"], 3, "there is no state directory");
    // The first day begins with it.
    assert!(typo.ok(&["doctor"]).contains("state, which the first build or mount makes: "));
    typo.ok(&["shutdown"]);
    for arguments in [
        &["doctor"][..],
        &["writes", "list"],
        &["verify", "image:1"],
        &["rm", "image:1"],
        &["gc"],
        &["umount", text(&at)],
        &["map", "--list", text(&at)],
        &["pin", text(&at)],
        &["upgrade"],
    ] {
        let finished = typo.run(arguments);
        assert!(!typo.state().exists(), "{arguments:?} made the folder: {finished:?}");
    }
    // One that is there, and is another's folder, gets nothing put into it either.
    let other = space.make_folder("state");
    fs::set_permissions(&other, Permissions::from_mode(0o700)).unwrap();
    typo.ok(&["status"]);
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0);
}

#[test]
fn the_cache_file_of_an_earlier_version_goes_whatever_it_is() {
    let space = Space::new("no-cache");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), "content ".repeat(10_000)).unwrap();
    burgeon.build(&tree, "image:1");
    let mounted = burgeon.mount("image:1", &space.path("at"), &LIMIT);
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
    let image = fs::read_dir(burgeon.state().join("images")).unwrap().next().unwrap();
    let cache = image.unwrap().path().join("cache");
    assert!(cache.symlink_metadata().is_err());
    let make_fifo = || {
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(CWD, &cache, kind, Mode::RUSR | Mode::WUSR, 0).unwrap();
    };
    let outside = space.path("outside");
    fs::write(&outside, "mine").unwrap();
    let makers: [&dyn Fn(); 4] = [
        &|| fs::write(&cache, "an old one").unwrap(),
        &make_fifo,
        &|| symlink(&outside, &cache).unwrap(),
        &|| fs::create_dir(&cache).unwrap(),
    ];
    for make in makers {
        make();
        let mounted = burgeon.mount("image:1", &space.path("at"), &LIMIT);
        assert!(fs::read_to_string(mounted.path().join("file")).unwrap().starts_with("content"));
        burgeon.umount(mounted);
        burgeon.ok(&["shutdown"]);
        // A folder was none of ours.
        assert_eq!(cache.symlink_metadata().is_ok(), cache.is_dir());
    }
    assert_eq!(fs::read_to_string(&outside).unwrap(), "mine");
}

/// `path` becomes a symlink to a copy of it elsewhere.
fn lead_astray(space: &Space, path: &Path) -> PathBuf {
    let elsewhere = space.path("elsewhere");
    fs::create_dir_all(&elsewhere).unwrap();
    let elsewhere = elsewhere.join(path.file_name().unwrap());
    fs::rename(path, &elsewhere).unwrap();
    symlink(&elsewhere, path).unwrap();
    elsewhere
}

#[test]
fn no_file_of_a_mount_is_read_through_a_symlink() {
    let space = Space::new("astray");
    let burgeon = Burgeon::new(BURGEON, &space);
    small_image(&space, &burgeon);
    let at = space.make_folder("at");
    let mount = ["mount", "image:1", text(&at), "--writes", "w", LIMIT[0], LIMIT[1]];
    let options = ["--virtual", "1G", "--transport", "fuse"];
    burgeon.ok(&[&mount[..], &options].concat());
    let source = space.path("source");
    fs::write(&source, "mapped ".repeat(5000)).unwrap();
    burgeon.ok(&["map", text(&at.join("mapped")), "--from", text(&source)]);
    burgeon.ok(&["umount", text(&at)]);
    burgeon.ok(&["shutdown"]);
    let writes = burgeon.state().join("writes/w");
    // A sprout is nobody's to make again.
    let sprout = writes.join("sprout");
    let elsewhere = lead_astray(&space, &sprout);
    burgeon.fails(&mount, 1, "a part of its path is a symlink");
    fs::rename(elsewhere, &sprout).unwrap();
    // Only the mapped file cannot be read.
    for name in ["extents", "sources"] {
        let path = writes.join("area").join(name);
        let elsewhere = lead_astray(&space, &path);
        burgeon.ok(&mount);
        assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "content");
        assert!(fs::read(at.join("mapped")).is_err(), "{name} was read");
        burgeon.ok(&["umount", text(&at)]);
        burgeon.ok(&["shutdown"]);
        fs::rename(elsewhere, &path).unwrap();
    }
    // The names that the image gives again are made again.
    for name in ["seed", "seed.info", "map", "manifest"] {
        let path = writes.join(name);
        let before = fs::read(lead_astray(&space, &path)).unwrap();
        let mounted = burgeon.run(&mount);
        if mounted.code == Some(0) {
            assert!(path.symlink_metadata().unwrap().is_file(), "{name} is still a symlink");
            assert_eq!(fs::read_to_string(at.join("mapped")).unwrap(), "mapped ".repeat(5000));
            burgeon.ok(&["umount", text(&at)]);
        } else {
            assert!(mounted.stderr.contains("is a symlink"), "{name}: {mounted:#?}");
        }
        burgeon.ok(&["shutdown"]);
        let elsewhere = space.path("elsewhere").join(name);
        assert_eq!(fs::read(&elsewhere).unwrap(), before, "{name} was written elsewhere");
        fs::rename(elsewhere, &path).unwrap();
    }
    // The same for a folder.
    let images = burgeon.state().join("images");
    lead_astray(&space, &images);
    let mounted = burgeon.run(&["mount", "image:1", text(&at), "--read-only"]);
    assert!(mounted.code == Some(1) && mounted.stderr.contains("is a symlink"), "{mounted:#?}");
    fs::remove_file(&images).unwrap();
    burgeon.ok(&["mount", "image:1", text(&at), "--read-only"]);
    burgeon.ok(&["umount", text(&at)]);
}

/// The server's sandbox names the folder that was there when it began.
#[test]
fn a_folder_that_is_made_anew_below_a_running_daemon_is_used() {
    let space = Space::new("made-anew");
    let burgeon = Burgeon::new(BURGEON, &space);
    small_image(&space, &burgeon);
    let mount = || burgeon.mount("image:1", &space.path("at"), &["--read-only"]);
    burgeon.umount(mount());
    let process = |role: &str| burgeon.status()[role].clone();
    let before = ["supervisor_pid", "server_pid"].map(process);
    fs::remove_dir_all(burgeon.state().join("images")).unwrap();
    let mounted = mount();
    assert_eq!(fs::read_to_string(mounted.path().join("file")).unwrap(), "content");
    assert_eq!(process("supervisor_pid"), before[0]);
    assert_ne!(process("server_pid"), before[1], "its successor serves");
    burgeon.umount(mounted);
}

/// Of a backup, the writes and the store are enough.
#[test]
fn a_restored_backup_is_a_state_directory() {
    let space = Space::new("restored");
    let first = Burgeon::with_state(BURGEON, space.path("first"));
    small_image(&space, &first);
    let at = space.make_folder("at");
    first.ok(&["mount", "image:1", text(&at), "--writes", "w", LIMIT[0], LIMIT[1]]);
    fs::write(at.join("mine"), "written").unwrap();
    first.ok(&["umount", text(&at)]);
    first.ok(&["shutdown"]);
    let backup = space.make_folder("backup");
    for name in ["writes", "store"] {
        fs::rename(first.state().join(name), backup.join(name)).unwrap();
    }
    let restored = Burgeon::with_state(BURGEON, backup);
    // Commands that only look do not take it for a mistyped name: it gets the folders that it
    // lacks.
    assert!(restored.ok(&["writes", "list"]).contains('w'));
    assert!(restored.state().join("run").is_dir() && restored.state().join("mounts").is_dir());
    assert!(restored.ok(&["list"]).contains("image:1"));
    restored.ok(&["mount", "image:1", text(&at), "--writes", "w"]);
    assert_eq!(fs::read_to_string(at.join("mine")).unwrap(), "written");
    restored.ok(&["umount", text(&at)]);
}
