//! Pinned data is fetched, is known to the next mount, and is fetched again when it was lost.
//! Needs root.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path};

use serde_json::Value;
use testkit::{Burgeon, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An image `name` of one file, `data`, and the file's content.
fn build(space: &Space, burgeon: &Burgeon, name: &str, len: usize) -> Vec<u8> {
    let tree = space.make_folder(name);
    let bytes = Rng::new(len as u64).bytes(len);
    fs::write(tree.join("data"), &bytes).unwrap();
    burgeon.build(&tree, name);
    bytes
}

fn mount(burgeon: &Burgeon) -> Value {
    burgeon.status()["mounts"][0].clone()
}

/// Waits until all that is pinned is local; how much that is.
fn pinned(burgeon: &Burgeon) -> u64 {
    // A server that has just been started does not know yet.
    let mut pinned = Value::Null;
    assert!(wait_until(PATIENCE, || {
        pinned = mount(burgeon)["pinned"].clone();
        pinned["state"] == "done"
    }));
    assert_eq!(pinned["done_bytes"], pinned["total_bytes"], "{pinned}");
    pinned["done_bytes"].as_u64().unwrap()
}

#[test]
fn pinned_files_are_local_and_are_fetched_again_after_a_loss() {
    let space = Space::new("pin");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let own = build(&space, &burgeon, "own", 900_000);
    let other = build(&space, &burgeon, "other", 1_500_000);
    let at = space.path("at");
    let options = ["--virtual", "16P", "--writes", "w", "--write-limit", "256M"];
    let mounted = burgeon.mount("own", &at, &options);
    burgeon.ok(&["map", text(&at.join("other")), "--from", "other"]);
    burgeon.ok(&["map", text(&at.join("zeros")), "--computed", "zeros", "--size", "3T"]);
    fs::write(at.join("local"), &own).unwrap();
    // Computed or local data costs nothing; a whole tree is pinned at once.
    burgeon.ok(&["pin", text(&at.join("zeros"))]);
    assert_eq!(pinned(&burgeon), 0);
    let said = burgeon.ok(&["pin", text(&at)]);
    assert!(said.contains("2.29 MiB"), "{said}");
    let all =
        (own.len() as u64).next_multiple_of(4096) + (other.len() as u64).next_multiple_of(4096);
    assert_eq!(pinned(&burgeon), all);
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    assert_eq!(pinned(&burgeon), all);
    burgeon.fails(&["pin", text(&at.join("none"))], 3, "none");

    // The caches are lost; the next mount fetches the pinned data, which then needs no store.
    burgeon.umount(mounted);
    burgeon.lose_cache();
    let mounted = burgeon.mount("own", &at, &["--writes", "w"]);
    assert_eq!(pinned(&burgeon), all);
    let said = burgeon.ok(&["status"]);
    assert!(said.contains("pinned     done") && said.contains("2 paths"), "{said}");
    let (store, away) = (burgeon.state().join("store"), space.path("away"));
    fs::rename(&store, &away).unwrap();
    drop_caches();
    assert_eq!(fs::read(at.join("data")).unwrap(), own);
    assert_eq!(fs::read(at.join("other/data")).unwrap(), other);
    fs::rename(&away, &store).unwrap();

    burgeon.fails(&["pin", "--remove", text(&at.join("data"))], 3, "is not pinned: pinned are ");
    let said = burgeon.ok(&["pin", "--remove", text(&at)]);
    assert!(said.contains("is no longer pinned"), "{said}");
    burgeon.fails(&["pin", "--remove", text(&at)], 3, "is not pinned");
    assert_eq!(mount(&burgeon)["pins"].as_array().unwrap().len(), 1);
    assert_eq!(pinned(&burgeon), 0);
    burgeon.umount(mounted);
}

#[test]
fn a_fetch_limit_holds_for_what_no_reader_waits_for() {
    let space = Space::new("pin-limit");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let own = build(&space, &burgeon, "own", 24 << 20);
    let at = space.path("at");
    let data = at.join("data");
    let limited = ["--writes", "w", "--write-limit", "256M", "--fetch-limit", "1M"];
    let mounted = burgeon.mount("own", &at, &[&limited[..], &["--fill"]].concat());
    let stopped = |what: &str, kind: &str, over: bool| {
        let state = if over { "over-limit" } else { "done" };
        assert!(wait_until(PATIENCE, || mount(&burgeon)[kind]["state"] == state));
        // The server that said so may have died meanwhile, and the next one has to find it out.
        assert!(wait_until(PATIENCE, || burgeon.ok(&["status"]).contains(what) == over));
        let fetched = mount(&burgeon)["reads"]["background_bytes"].as_u64().unwrap();
        // Besides the in-flight fetches: 24 chunks.
        assert!(!over || (1 << 20..8 << 20).contains(&fetched), "{fetched}");
    };
    stopped("filling has stopped", "fill", true);
    assert!(burgeon.ok(&["status"]).contains("ALARM"));
    // It is the mount's limit, with any server.
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    stopped("filling has stopped", "fill", true);
    burgeon.fails(&["pin", text(&data)], 1, "--fetch-limit");
    stopped("pinned data is not fetched further", "pinned", true);
    drop_caches();
    assert_eq!(fs::read(&data).unwrap_err().raw_os_error(), Some(5));
    let profile = space.path("profile");
    burgeon.umount(mounted);
    burgeon.lose_cache();

    // Without a limit the same goes to its end.
    let mounted = burgeon.mount("own", &at, &["--writes", "w"]);
    stopped("pinned data is not fetched further", "pinned", false);
    assert_eq!(pinned(&burgeon), own.len() as u64);
    burgeon.ok(&["record", text(&at), "--output", text(&profile), "--", "cat", text(&data)]);
    burgeon.ok(&["pin", "--remove", text(&data)]);
    burgeon.umount(mounted);
    burgeon.lose_cache();
    let mounted = burgeon.mount("own", &at, &["--profile", text(&profile), "--fetch-limit", "1M"]);
    stopped("the profile is not prefetched further", "profile", true);
    burgeon.umount(mounted);
}

#[test]
fn a_pin_that_the_cache_cannot_keep_is_refused_with_numbers() {
    let space = Space::new("pin-full");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    for (name, len) in [("small", 2 << 20), ("large", 16 << 20)] {
        fs::write(tree.join(name), Rng::new(len).bytes(len as usize)).unwrap();
    }
    burgeon.build(&tree, "image");
    let at = space.path("at");
    let mounted = burgeon.mount("image", &at, &["--profile", "none"]);
    burgeon.ok(&["cache", "resize", "12M"]);
    burgeon.ok(&["pin", text(&at.join("small"))]);
    let large = at.join("large");
    let refusal = "cannot pin 16.0 MiB more: pins take at most 80 % of the cache's limit of 12.0 MiB, \
                   and 2.00 MiB are pinned: set a limit of at least 23M";
    burgeon.fails(&["pin", text(&large)], 6, refusal);
    // The pin that fits is held as before.
    assert_eq!(mount(&burgeon)["pins"].as_array().unwrap().len(), 1);
    assert_eq!(pinned(&burgeon), 2 << 20);
    burgeon.ok(&["cache", "resize", "64M", "--limit", "image=4M"]);
    burgeon.fails(&["pin", text(&large)], 6, "a limit of the image or of its store is smaller");
    burgeon.ok(&["cache", "resize", "--limit", "image=none"]);
    burgeon.ok(&["pin", text(&large)]);
    assert_eq!(pinned(&burgeon), 18 << 20);

    // A limit below the pins: the status tells, and a higher one has them fetched again. So does
    // dropping the image.
    burgeon.ok(&["cache", "resize", "8M"]);
    assert!(wait_until(PATIENCE, || mount(&burgeon)["pinned"]["state"] == "cache-full"));
    let now = mount(&burgeon)["pinned"].clone();
    assert!(now["done_bytes"].as_u64().unwrap() <= 8 << 20, "{now}");
    burgeon.ok(&["cache", "resize", "64M"]);
    assert_eq!(pinned(&burgeon), 18 << 20);
    burgeon.ok(&["cache", "drop", "image"]);
    assert_eq!(pinned(&burgeon), 18 << 20);
    assert!(mount(&burgeon)["materialised_bytes"].as_u64().unwrap() >= 18 << 20);
    burgeon.umount(mounted);
}
