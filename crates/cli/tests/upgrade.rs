//! Named writes of every released version, with the store they were made on, mount and hold what
//! was written. A release adds its own to `fixtures/` and to [`RELEASES`]; none is ever taken out.
//!
//! How one is made: build an image `base` of the tree that the test describes, mount it with
//! `--writes kept --write-limit 256M`, do what the test finds done, unmount, shut down, and pack
//! `writes` and `store` of the state directory: `tar -S --zstd -cf writes-VERSION.tar.zst writes store`.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

use testkit::{Burgeon, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const RELEASES: [&str; 1] = ["0.1.0"];

/// The bytes of `dir/large`.
fn large() -> Vec<u8> {
    (0..300_000u64).map(|i| ((i * i / 7 + i) % 251) as u8).collect()
}

#[test]
fn writes_of_every_release_mount() {
    for release in RELEASES {
        let space = Space::new("upgrade");
        let burgeon = Burgeon::new(PROGRAM, &space);
        unpack(release, burgeon.state());
        let at = space.path("at");
        let mounted = burgeon.mount("base", &at, &["--writes", "kept"]);
        assert_eq!(fs::read_to_string(at.join("note")).unwrap(), "written under 0.1.0\n");
        assert_eq!(fs::read(at.join("dir/large")).unwrap(), large());
        let mut clone = large();
        clone[100_000] = b'X';
        assert_eq!(fs::read(at.join("clone")).unwrap(), clone);
        assert!(!at.join("small").exists(), "it was removed");
        assert_eq!(fs::read_link(at.join("link")).unwrap(), Path::new("small"));
        fs::write(at.join("added"), "by this version").unwrap();
        burgeon.umount(mounted);

        // The image's name goes; the writes keep what they need of it.
        burgeon.ok(&["rm", "base"]);
        burgeon.ok(&["gc"]);
        let mounted = burgeon.mount("base", &at, &["--writes", "kept"]);
        assert_eq!(fs::read_to_string(at.join("added")).unwrap(), "by this version");
        assert_eq!(fs::read(at.join("dir/large")).unwrap(), large());
        burgeon.umount(mounted);
        burgeon.ok(&["shutdown"]);
    }
}

fn unpack(release: &str, state: &Path) {
    fs::create_dir_all(state).unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let archive = fixtures.join(format!("writes-{release}.tar.zst"));
    let status =
        Command::new("tar").args(["--zstd", "-xf"]).arg(archive).arg("-C").arg(state).status();
    assert!(status.unwrap().success(), "cannot unpack the writes of {release}");
}
