//! Images in stores behind a network: built there, mounted from there, looked after there; and
//! what becomes of the credentials.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use testkit::{
    Burgeon, Fault, PATIENCE, Proxy, Registry, Rng, S3, Space, WebServer, compare, drop_caches,
    kill, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn tree(space: &Space) -> PathBuf {
    let root = space.make_folder("tree");
    fs::create_dir(root.join("folder")).unwrap();
    fs::write(root.join("folder/data"), Rng::new(11).bytes(3_000_000)).unwrap();
    fs::write(root.join("folder/text"), "line after line\n".repeat(100_000)).unwrap();
    fs::write(root.join("small"), "small").unwrap();
    root
}

/// Every file below `folder` that holds `needle`.
fn files_with(folder: &Path, needle: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files_with(&path, needle));
        } else if kind.is_file() {
            let bytes = fs::read(&path).unwrap_or_default();
            if bytes.windows(needle.len()).any(|window| window == needle.as_bytes()) {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn a_folder_behind_a_web_server_is_mounted() {
    let space = Space::new("web");
    let tree = tree(&space);
    let store = space.path("files/images");
    let builder = Burgeon::with_state(PROGRAM, space.path("builder")).option("--store");
    let builder = builder.option(&store);
    builder.build(&tree, "sample:1");
    let web = WebServer::nginx(&space.path("files"), &space.path("nginx")).unwrap();
    let url = format!("http://{}/images", web.address());
    let burgeon = Burgeon::new(PROGRAM, &space).option("--store").option(&url);
    burgeon.ok(&["verify", "sample:1"]);
    burgeon.fails(&["list"], 1, "gives no list");
    burgeon.fails(&["inspect", "sample:2"], 3, "there is no image");
    burgeon.fails(&["gc"], 1, "can only be read");
    burgeon.fails(&["rm", "sample:1"], 1, "can only be read");
    burgeon.fails(&["build", tree.to_str().unwrap(), "other"], 1, "can only be read");
    let mounted = burgeon.mount("sample:1", &space.path("mnt"), &["--writes", "kept"]);
    compare(&tree, mounted.path()).unwrap().assert_same();
    assert!(
        burgeon.status()["mounts"][0]["reads"]["fetched_bytes"]
            .as_u64()
            .is_some_and(|n| n > 3_000_000)
    );
    fs::write(mounted.path().join("mine"), "mine").unwrap();
    burgeon.umount(mounted);
    // The writes remember where their image is, by themselves.
    let plain = Burgeon::new(PROGRAM, &space);
    let mounted = plain.mount("sample:1", &space.path("mnt"), &["--writes", "kept"]);
    assert_eq!(fs::read_to_string(mounted.path().join("mine")).unwrap(), "mine");
    plain.umount(mounted);
}

#[test]
fn an_image_lives_in_a_bucket() {
    let space = Space::new("bucket");
    let tree = tree(&space);
    let s3 = S3::start().unwrap();
    let mut burgeon = Burgeon::new(PROGRAM, &space).option("--store").option("s3://bucket/team/a");
    for (name, value) in S3::environment(s3.address()) {
        burgeon = burgeon.env(name, value);
    }
    burgeon.build(&tree, "sample:1");
    assert!(burgeon.ok(&["list"]).contains("sample:1"));
    burgeon.ok(&["inspect", "sample:1"]);
    burgeon.ok(&["verify", "sample:1"]);
    burgeon.fails(&["inspect", "sample:2"], 3, "did you mean sample:1?");
    // Without a sprout there is no large file to look for secrets in.
    let mounted = burgeon.mount("sample:1", &space.path("mnt"), &["--read-only"]);
    let profile = || burgeon.status()["mounts"][0]["profile"]["state"].clone();
    assert!(wait_until(PATIENCE, || profile() == "none"));
    let text = mounted.path().join("folder/text");
    burgeon.ok(&["record", mounted.path().to_str().unwrap(), "--", "cat", text.to_str().unwrap()]);
    assert_eq!(profile(), "recorded");
    burgeon.ok(&["profile", "rm", "sample:1"]);
    assert_eq!(profile(), "none");
    // Half of it by one server, the rest by its successor, who needs the credentials, too.
    assert_eq!(fs::read(mounted.path().join("small")).unwrap(), b"small");
    let server = burgeon.status()["server_pid"].as_u64().unwrap();
    kill(server as u32);
    compare(&tree, mounted.path()).unwrap().assert_same();
    let holders = files_with(burgeon.state(), "test-secret");
    assert_eq!(holders.len(), 1, "{holders:?}");
    assert!(holders[0].ends_with("access.json"), "{holders:?}");
    assert_eq!(fs::metadata(&holders[0]).unwrap().permissions().mode() & 0o777, 0o600);
    for line in burgeon.processes() {
        let line = fs::read(format!("/proc/{line}/cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&line).contains("test-secret"));
    }
    assert!(!burgeon.ok(&["status", "--json"]).contains("test-secret"));
    // A mounted image is never collected.
    burgeon.fails(&["rm", "sample:2"], 3, "sample:1");
    burgeon.ok(&["rm", "sample:1"]);
    assert!(burgeon.ok(&["gc"]).contains("removed 0 manifests and 0 packs"));
    burgeon.umount(mounted);
    assert!(wait_until(std::time::Duration::from_secs(20), || {
        files_with(burgeon.state(), "test-secret").is_empty()
    }));
    assert!(burgeon.ok(&["gc"]).contains("removed 1 manifest and 1 pack"));
}

/// `burgeon` with the settings for a bucket of `s3`.
fn with_keys(mut burgeon: Burgeon, s3: &S3) -> Burgeon {
    for (name, value) in S3::environment(s3.address()) {
        burgeon = burgeon.env(name, value);
    }
    burgeon
}

#[test]
fn an_image_in_a_bucket_is_mapped_into_a_mount_of_another_store() {
    let space = Space::new("map-bucket");
    let tree = tree(&space);
    let s3 = S3::start().unwrap();
    let state = space.path("state");
    let there = with_keys(Burgeon::with_state(PROGRAM, state.clone()), &s3);
    let there = there.option("--store").option("s3://bucket");
    there.build(&tree, "sample:1");
    // Neither the mount nor its daemon knows of the bucket.
    let plain = Burgeon::with_state(PROGRAM, state);
    let at = space.make_folder("at");
    let mount = ["create-empty", at.to_str().unwrap(), "--writes", "w", "--write-limit", "256M"];
    plain.ok(&mount);
    let mapped = at.join("mapped");
    let map = ["map", mapped.to_str().unwrap(), "--from", "sample:1"];
    plain.fails(&map, 3, "neither a path");
    there.ok(&map);
    let same = || {
        drop_caches();
        compare(&tree, &mapped).unwrap().assert_same();
    };
    same();
    // A successor fetches unread data with the same credentials.
    let lose_caches = || {
        plain.lose_cache();
        kill(plain.status()["server_pid"].as_u64().unwrap() as u32);
    };
    lose_caches();
    same();
    let secrets = || {
        let state = plain.state();
        let folders = ["mounts", "images", "run", "writes/w/area"].map(|name| state.join(name));
        let found = folders.iter().flat_map(|folder| files_with(folder, "test-secret"));
        found.filter(|path| !path.ends_with("sprout")).collect::<Vec<_>>()
    };
    let holders = secrets();
    assert!(holders.len() == 1 && holders[0].ends_with("access.json"), "{holders:?}");
    assert_eq!(fs::metadata(&holders[0]).unwrap().permissions().mode() & 0o777, 0o600);
    // They go with the mount. The next one has none until somebody brings them.
    plain.ok(&["umount", at.to_str().unwrap()]);
    assert!(wait_until(PATIENCE, || secrets().is_empty()), "{:?}", secrets());
    plain.ok(&["shutdown"]);
    plain.ok(&mount);
    lose_caches();
    assert!(secrets().is_empty(), "{:?}", secrets());
    let again = at.join("again");
    there.ok(&["map", again.to_str().unwrap(), "--from", "sample:1:small"]);
    same();
    // Others than those that the mount has would be of no use to its server.
    let other = S3::start().unwrap();
    let elsewhere = with_keys(Burgeon::with_state(PROGRAM, plain.state().into()), &other);
    let elsewhere = elsewhere.option("--store").option("s3://bucket");
    elsewhere.build(&tree, "other");
    let new = at.join("new");
    elsewhere.fails(&["map", new.to_str().unwrap(), "--from", "other"], 1, "AWS_ENDPOINT_URL");
    plain.ok(&["umount", at.to_str().unwrap()]);
    // Those of the mount command also serve mapped content.
    let with_keys = with_keys(Burgeon::with_state(PROGRAM, plain.state().into()), &s3);
    with_keys.ok(&mount);
    lose_caches();
    same();
    plain.ok(&["umount", at.to_str().unwrap()]);
}

#[test]
fn a_shared_bucket_keeps_what_another_host_has_mounted() {
    let space = Space::new("shared");
    let tree = tree(&space);
    let s3 = S3::start().unwrap();
    let host = |name: &str| {
        let mut host = Burgeon::with_state(PROGRAM, space.path(name));
        host = host.option("--store").option("s3://bucket");
        for (name, value) in S3::environment(s3.address()) {
            host = host.env(name, value);
        }
        host
    };
    let (one, two) = (host("one"), host("two"));
    one.build(&tree, "sample");
    let mounted = two.mount("sample", &space.path("mnt"), &["--read-only"]);
    one.fails(&["rm", "sample"], 1, "has mounts or writes of it");
    one.build(&tree, "other");
    one.ok(&["rm", "sample"]);
    assert!(one.ok(&["gc"]).contains("removed 0 manifests"));
    compare(&tree, mounted.path()).unwrap().assert_same();
    two.umount(mounted);
    two.ok(&["gc"]);
}

#[test]
fn wrong_credentials_and_typos_say_what_to_do() {
    let space = Space::new("typos");
    let burgeon = Burgeon::new(PROGRAM, &space);
    for (store, said) in [
        ("s3:/bucket", "s3://"),
        ("https://me:hunter2@host/x", "no user or password"),
        ("ftp://host/x", "https://HOST/PATH"),
    ] {
        burgeon.fails(&["list", "--store", store], 2, said);
    }
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{nobody}/x");
    burgeon.fails(&["verify", "sample", "--store", &url], 5, "no connection");
}

#[test]
fn without_an_answer_of_the_store_the_image_that_is_here_will_do() {
    let space = Space::new("away");
    let tree = tree(&space);
    let s3 = S3::start().unwrap();
    let proxy = Proxy::new(s3.address(), 1).unwrap();
    let mut burgeon = Burgeon::new(PROGRAM, &space).option("--store").option("s3://bucket");
    for (name, value) in S3::environment(proxy.address()) {
        burgeon = burgeon.env(name, value);
    }
    burgeon.build(&tree, "sample:1");
    let at = space.make_folder("at");
    let path = at.to_str().unwrap();
    let mount =
        |policy: &str| burgeon.run(&["mount", "sample:1", path, "--read-only", "--pull", policy]);
    let works = |policy: &str| {
        let finished = mount(policy);
        assert_eq!(finished.code, Some(0), "{policy}: {finished:#?}");
        compare(&tree, &at).unwrap().assert_same();
        burgeon.ok(&["umount", path]);
        finished.stderr
    };
    assert_eq!(mount("never").code, Some(3));
    assert_eq!(works("newer"), "");
    let digest = burgeon.ok(&["inspect", "sample:1", "--json"]);
    let digest: serde_json::Value = serde_json::from_str(&digest).unwrap();
    let digest = digest["image"]["manifest"].as_str().unwrap();
    for unanswered in [Fault::Status(503), Fault::Reset] {
        proxy.spoil(1000, &[unanswered]);
        let note = works("newer");
        let said = ["using the local image ", digest, " ago"];
        assert!(said.iter().all(|said| note.contains(said)), "{note}");
    }
    assert_eq!(works("never"), "");
    assert_eq!(mount("always").code, Some(5));
    // A refusal is an answer.
    proxy.spoil(1000, &[Fault::Status(403)]);
    assert_eq!(mount("newer").code, Some(5));
    proxy.spoil(0, &[]);
    fs::write(tree.join("more"), "more").unwrap();
    burgeon.build(&tree, "sample:1");
    assert_eq!(works("newer"), "");
    // The record of a name is removed with the image.
    let known = || fs::read_dir(burgeon.state().join("tags")).unwrap().count();
    burgeon.ok(&["gc"]);
    assert_eq!(known(), 1);
    burgeon.ok(&["rm", "sample:1"]);
    burgeon.ok(&["gc"]);
    assert_eq!(known(), 0);
}

/// The kernel reads a page a second time when its read-ahead has failed. A reader waits for one
/// deadline all the same: the log has one read that was given up.
#[test]
fn a_read_waits_for_one_deadline_when_the_registry_stops_answering() {
    let space = Space::new("silent");
    let tree = space.make_folder("tree");
    // All of it is one chunk.
    let content = Rng::new(3).bytes(200_000);
    fs::write(tree.join("data"), &content).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let proxy = Proxy::new(registry.address(), 1).unwrap();
    let at = format!("oci://{}/app:1", proxy.address());
    let maker = Burgeon::with_state(PROGRAM, space.path("maker"));
    maker.build(&tree, "app");
    maker.ok(&["push", "app", &at]);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let mounted = burgeon.mount(&at, &space.path("mnt"), &["--read-only", "--profile", "none"]);
    proxy.spoil(1000, &[Fault::Stall]);
    let error = fs::read(mounted.path().join("data")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    let log = fs::read_to_string(burgeon.state().join("run/daemon.log")).unwrap();
    let lines = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    assert_eq!(lines("readers get an I/O error"), 1, "{log}");
    assert_eq!(lines("the source fails: trying again"), 1, "{log}");
    proxy.spoil(0, &[]);
    let read = || fs::read(mounted.path().join("data")).is_ok_and(|read| read == content);
    assert!(wait_until(PATIENCE, read));
    burgeon.umount(mounted);
}

#[test]
fn buckets_share_cached_data_only_if_the_host_says_so() {
    let space = Space::new("bucket-sharing");
    let tree = tree(&space);
    let s3 = S3::start().unwrap();
    let config = space.path("config.toml");
    let fetched = |sharing: &str, store: &str| {
        fs::write(&config, format!("[cache]\nsharing = '{sharing}'\n")).unwrap();
        let burgeon = Burgeon::with_state(PROGRAM, space.path(sharing))
            .option("--store")
            .option(format!("s3://bucket/{sharing}/{store}"))
            .envs(S3::environment(s3.address()))
            .env("BURGEON_CONFIG", &config);
        burgeon.build(&tree, "sample:1");
        let options = ["--read-only", "--profile", "none"];
        let mounted = burgeon.mount("sample:1", &space.path("mnt"), &options);
        compare(&tree, mounted.path()).unwrap().assert_same();
        let fetched = burgeon.status()["mounts"][0]["reads"]["fetched_bytes"].as_u64().unwrap();
        burgeon.umount(mounted);
        fetched
    };
    assert!(fetched("credentials", "one") > 3_000_000);
    assert!(fetched("credentials", "two") > 3_000_000, "the login may be another one");
    assert!(fetched("host", "one") > 3_000_000);
    assert_eq!(fetched("host", "two"), 0);
}
