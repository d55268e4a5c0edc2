//! `mount --fast`: what it promises, what it does not, and what happens where the kernel does not
//! allow it.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use testkit::{Burgeon, FuseRings, Mounted, PATIENCE, Rng, Space, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

const FILE_LEN: usize = 8 << 20;
const O_DIRECT: i32 = 0o40000;
const EIO: i32 = 5;

struct Set {
    burgeon: Burgeon,
    at: PathBuf,
    mounted: Mounted,
    expected: Vec<u8>,
    said: String,
}

/// A fast mount with kept writes, and the output of the command.
fn set_up(space: &Space) -> Set {
    let tree = space.make_folder("tree");
    let mut expected = vec![0; FILE_LEN];
    Rng::new(21).fill(&mut expected);
    fs::write(tree.join("data"), &expected).unwrap();
    let burgeon = Burgeon::new(PROGRAM, space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let options = ["--fast", "--writes", "w", "--write-limit", "256M"];
    let (mounted, said) = burgeon.mount_and_listen("sample", &at, &options);
    Set { burgeon, at, mounted, expected, said }
}

fn pid(burgeon: &Burgeon, which: &str) -> u32 {
    burgeon.status()[which].as_u64().unwrap().try_into().unwrap()
}

/// Reads the file around the page cache, so that the daemon has to answer.
fn read_direct(at: &Path) -> std::io::Result<Vec<u8>> {
    let file = File::options().read(true).custom_flags(O_DIRECT).open(at.join("data"))?;
    let mut memory = vec![0u8; FILE_LEN + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    file.read_exact_at(&mut memory[skip..skip + FILE_LEN], 0)?;
    Ok(memory[skip..skip + FILE_LEN].to_vec())
}

/// Waits until the file reads right again. Until then there may be EIO, and nothing else.
fn comes_back(set: &Set, after: &str) {
    let back = wait_until(PATIENCE, || match read_direct(&set.at) {
        Ok(bytes) => {
            assert!(bytes == set.expected, "wrong bytes after {after}");
            true
        }
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(EIO), "after {after}: {error}");
            false
        }
    });
    assert!(back, "still EIO after {after}: {:#}", set.burgeon.status());
    // The server answers before the supervisor has heard that it serves.
    let serves = wait_until(PATIENCE, || set.burgeon.status()["mounts"][0]["state"] == "serving");
    assert!(serves, "after {after}: {:#}", set.burgeon.status());
}

fn kill_server(burgeon: &Burgeon) {
    let server = pid(burgeon, "server_pid");
    kill(server);
    let next = wait_until(PATIENCE, || {
        burgeon.status()["server_pid"].as_u64().is_some_and(|pid| pid != u64::from(server))
    });
    assert!(next, "no new server");
}

#[test]
fn a_fast_mount_comes_back_after_its_server_its_supervisor_and_both() {
    let space = Space::new("fast");
    let Some(_switch) = FuseRings::set(true) else { return falls_back(&space) };
    let set = set_up(&space);
    assert!(
        set.said.contains("FUSE file over io_uring") && set.said.contains("EIO"),
        "{}",
        set.said
    );
    let transport = |set: &Set| set.burgeon.status()["mounts"][0]["transport"].clone();
    assert_eq!(transport(&set), "FUSE file over io_uring + loop");
    assert!(set.burgeon.ok(&["doctor"]).contains("the kernel allows it"));
    assert!(read_direct(&set.at).unwrap() == set.expected);
    fs::write(set.at.join("kept"), "by the sprout").unwrap();

    kill_server(&set.burgeon);
    comes_back(&set, "the server's death");
    // The next one dies while the mount is on its way to it.
    kill_server(&set.burgeon);
    kill_server(&set.burgeon);
    comes_back(&set, "two deaths in a row");
    assert_eq!(transport(&set), "FUSE file over io_uring + loop");

    let server = pid(&set.burgeon, "server_pid");
    kill(pid(&set.burgeon, "supervisor_pid"));
    assert!(read_direct(&set.at).unwrap() == set.expected, "the orphan does not serve");
    set.burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(pid(&set.burgeon, "server_pid"), server, "the server was not adopted");
    kill_server(&set.burgeon);
    comes_back(&set, "the death of an adopted server");

    let server = pid(&set.burgeon, "server_pid");
    let said = set.burgeon.ok(&["upgrade"]);
    assert!(said.contains("--fast"), "{said}");
    assert_eq!(pid(&set.burgeon, "server_pid"), server, "its death would cost reads");
    assert!(read_direct(&set.at).unwrap() == set.expected);

    set.burgeon.kill_daemon();
    assert_eq!(read_direct(&set.at).unwrap_err().raw_os_error(), Some(EIO));
    assert_eq!(fs::read(set.at.join("kept")).unwrap(), b"by the sprout");
    set.burgeon.ok(&["doctor", "--repair"]);
    comes_back(&set, "the death of both");

    assert_eq!(fs::read(set.at.join("kept")).unwrap(), b"by the sprout");
    set.burgeon.umount(set.mounted);
}

#[test]
fn a_fast_mount_falls_back_where_the_kernel_does_not_allow_it() {
    let space = Space::new("fast-fallback");
    let _switch = FuseRings::set(false);
    falls_back(&space);
}

fn falls_back(space: &Space) {
    let set = set_up(space);
    assert!(set.said.contains("--fast is not possible"), "{}", set.said);
    assert!(set.said.contains("enable_uring") || set.said.contains("6.14"), "{}", set.said);
    assert!(set.burgeon.ok(&["doctor"]).contains("not for `burgeon mount --fast`"));
    assert_eq!(set.burgeon.status()["mounts"][0]["transport"], "FUSE file + loop");
    assert!(read_direct(&set.at).unwrap() == set.expected);
    // And it has what mounts without --fast have: no error when its server dies.
    let server = pid(&set.burgeon, "server_pid");
    kill(server);
    assert!(read_direct(&set.at).unwrap() == set.expected);
    set.burgeon.umount(set.mounted);
}
