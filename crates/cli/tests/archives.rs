//! Archives behind a web server: fetched once, from where an interrupted mount has left them, and
//! mounted without an answer of the server.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use testkit::{Burgeon, Fault, Link, PATIENCE, Proxy, Rng, Space, WebServer, compare, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn images(burgeon: &Burgeon) -> usize {
    let list: serde_json::Value = serde_json::from_str(&burgeon.ok(&["list", "--json"])).unwrap();
    list["images"].as_array().unwrap().len()
}

/// Bytes of the archive that is coming.
fn came(burgeon: &Burgeon) -> u64 {
    let tmp = fs::read_dir(burgeon.state().join("store/tmp")).into_iter().flatten().flatten();
    let parts = tmp.filter(|entry| entry.file_name().to_string_lossy().starts_with("partial-"));
    parts.filter_map(|part| part.metadata().ok()).map(|part| part.len()).max().unwrap_or(0)
}

#[test]
fn an_archive_behind_a_web_server_is_fetched_once() {
    let space = Space::new("web-archive");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let files = space.make_folder("files");
    let tree = space.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("data"), Rng::new(7).bytes(3_000_000)).unwrap();
    let pack = || {
        let mut tar = Command::new("tar");
        tar.args(["--format=pax", "--gzip", "-cf"]).arg(files.join("root.tar.gz"));
        assert!(tar.arg("-C").arg(&tree).arg(".").status().unwrap().success());
    };
    pack();
    let web = WebServer::nginx(&files, &space.path("nginx")).unwrap();
    let proxy = Proxy::new(web.address(), 3).unwrap();
    proxy.spoil(300, &[Fault::Truncate, Fault::Status(503)]);
    let source = format!("http://{}/root.tar.gz", proxy.address());
    let check = || {
        let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
        compare(&tree, mounted.path()).unwrap().assert_same();
        burgeon.umount(mounted);
    };
    check();
    proxy.spoil(0, &[]);
    check();
    assert_eq!(images(&burgeon), 1);
    // Another version is another image.
    fs::write(tree.join("more"), "more").unwrap();
    pack();
    check();
    assert_eq!(images(&burgeon), 2);
    // A server that does not answer has one that will do; 404 is an answer.
    let at = space.make_folder("at");
    let path = at.to_str().unwrap();
    let mount = |policy: &str| {
        let finished = burgeon.run(&["mount", &source, path, "--read-only", "--pull", policy]);
        if finished.code == Some(0) {
            compare(&tree, &at).unwrap().assert_same();
            burgeon.ok(&["umount", path]);
        }
        (finished.code, finished.stderr)
    };
    proxy.spoil(1000, &[Fault::Status(503)]);
    let (code, note) = mount("newer");
    assert!(code == Some(0) && note.contains("using the local image "), "{note}");
    assert_eq!(mount("always").0, Some(5));
    proxy.spoil(1000, &[Fault::Status(404)]);
    assert_eq!(mount("newer").0, Some(3));
    let asked = proxy.requests();
    assert_eq!(mount("missing"), (Some(0), String::new()));
    assert_eq!(mount("never"), (Some(0), String::new()));
    assert_eq!(proxy.requests(), asked);
    proxy.spoil(0, &[]);
    let missing = format!("http://{}/none.tar", proxy.address());
    burgeon.fails(&["build", &missing, "x"], 3, "it does not exist (404)");
}

/// Files below `folder` that contain `text`.
fn files_with(folder: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (kind, path) = (entry.file_type().unwrap(), entry.path());
        if kind.is_dir() {
            found.extend(files_with(&path, text));
        } else if kind.is_file()
            && fs::read(&path).unwrap().windows(text.len()).any(|bytes| bytes == text.as_bytes())
        {
            found.push(path);
        }
    }
    found
}

#[test]
fn the_query_of_an_archive_is_shown_nowhere() {
    let space = Space::new("web-query");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (files, tree) = (space.make_folder("files"), space.make_folder("tree"));
    fs::write(tree.join("data"), Rng::new(7).bytes(100_000)).unwrap();
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(files.join("root.tar")).arg("-C").arg(&tree).arg(".");
    assert!(tar.status().unwrap().success());
    fs::write(files.join("damaged.tar"), "no archive").unwrap();
    let web = WebServer::nginx(&files, &space.path("nginx")).unwrap();
    let source = |file: &str| format!("http://{}/{file}?token=SECRETTOK", web.address());
    let (sound, damaged, missing) = (source("root.tar"), source("damaged.tar"), source("none.tar"));
    let nobody = "http://127.0.0.1:1/root.tar?token=SECRETTOK".to_owned();
    let at = space.make_folder("at");
    let at = at.to_str().unwrap();
    let unreached = burgeon.run(&["--log-level", "debug", "build", &nobody, "image"]);
    assert!(!unreached.stderr.contains("SECRETTOK"), "{unreached:?}");
    for archive in [&sound, &damaged, &missing] {
        let is_sound = *archive == sound;
        let commands: [(&[&str], bool); 7] = [
            (&["mount", archive, at, "--read-only"], true),
            (&["umount", at], true),
            (&["pull", archive], true),
            (&["build", archive, "image"], true),
            (&["pull", "--eager", archive], false),
            (&["index", archive], false),
            (&["inspect", archive], false),
        ];
        for (command, works) in commands {
            let done = burgeon.run(&[&["--log-level", "debug"], command].concat());
            let said = format!("{}{}", done.stdout, done.stderr);
            assert!(!said.contains("SECRETTOK"), "{command:?}: {said}");
            if is_sound && works {
                assert_eq!(done.code, Some(0), "{command:?}: {said}");
            }
        }
    }
    assert_eq!(files_with(burgeon.state(), "SECRETTOK"), Vec::<PathBuf>::new());
}

#[test]
fn an_interrupted_mount_of_an_archive_goes_on_where_it_was() {
    let space = Space::new("interrupted-archive");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let files = space.make_folder("files");
    let tree = space.make_folder("tree");
    fs::write(tree.join("large"), Rng::new(2).bytes(30 << 20)).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--format=pax", "-cf"]).arg(files.join("root.tar")).arg("-C").arg(&tree).arg(".");
    assert!(tar.status().unwrap().success());
    let web = WebServer::nginx(&files, &space.path("nginx")).unwrap();
    let link = Link::new(web.address(), Duration::ZERO, 8 << 20).unwrap();
    let source = format!("http://{}/root.tar", link.address());
    let at = space.make_folder("at");
    let arguments = ["mount", &source, at.to_str().unwrap(), "--read-only"];
    for point in [8 << 20, 20 << 20] {
        let mut mount = burgeon.command(&arguments).spawn().unwrap();
        assert!(wait_until(PATIENCE, || came(&burgeon) >= point), "{point}: {}", came(&burgeon));
        mount.kill().unwrap();
        assert!(!mount.wait().unwrap().success(), "{point}");
    }
    let mounted = burgeon.mount(&source, &at, &["--read-only"]);
    compare(&tree, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    let bytes = link.bytes() >> 20;
    assert!(bytes < 31 + 20, "the archive was fetched again: {bytes} MiB of 31");
    assert_eq!(fs::read_dir(burgeon.state().join("store/tmp")).unwrap().count(), 0);
}
