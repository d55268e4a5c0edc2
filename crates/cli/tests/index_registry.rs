//! Indexes in registries: put beside their image there, found, pinned, refused.

#![allow(clippy::unwrap_used)]

mod layered;

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use testkit::{
    Burgeon, Fault, Link, OciLayout, Proxy, ReferrerLists, Registry, RegistryOptions, Space,
    compare, skopeo_copy,
};

use self::layered::{layered, text};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LIST: &str = "application/vnd.oci.image.index.v1+json";
const INDEX: &str = "application/vnd.burgeon.index.v1";

/// Makes the index of an image and pushes it as a referrer.
fn push(burgeon: &Burgeon, source: &str) -> Value {
    serde_json::from_str(&burgeon.ok(&["index", source, "--push", "--json"])).unwrap()
}

/// The digest of the index, or of the image, of which `push` has said something.
fn digest<'a>(made: &'a Value, of: &str) -> &'a str {
    made[of].as_str().unwrap()
}

/// Copies the image of `layout` to `to`.
fn publish(layout: &OciLayout, to: &str, options: &[&str]) {
    let from = format!("oci:{}:latest", layout.folder().display());
    skopeo_copy(options, &from, &format!("docker://{to}")).unwrap();
}

/// Status and body of the answer to a request for `path` of the repository `app`.
fn ask(registry: SocketAddr, method: &str, path: &str, kind: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(registry).unwrap();
    let len = body.len();
    let head = format!("accept: {kind}\r\ncontent-type: {kind}\r\ncontent-length: {len}\r\n");
    let first = format!("{method} /v2/app/{path} HTTP/1.0\r\nhost: {registry}\r\n");
    stream.write_all(format!("{first}{head}\r\n{body}").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn document(registry: SocketAddr, reference: &str, kind: &str) -> Value {
    let (status, body) = ask(registry, "GET", &format!("manifests/{reference}"), kind, "");
    assert_eq!(status, 200, "{reference}: {body}");
    serde_json::from_str(&body).unwrap()
}

fn put(registry: SocketAddr, reference: &str, kind: &str, document: &Value) {
    let path = format!("manifests/{reference}");
    let (status, body) = ask(registry, "PUT", &path, kind, &document.to_string());
    assert_eq!(status, 201, "{reference}: {body}");
}

/// The digests on the list of an image's referrers.
fn listed(registry: SocketAddr, image: &str) -> Vec<String> {
    let list = document(registry, &image.replace(':', "-"), LIST);
    let all = list["manifests"].as_array().unwrap().iter();
    all.map(|one| one["digest"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn another_host_reads_an_indexed_image_of_a_registry_lazily() {
    let space = Space::new("index-registry");
    let layout = layered(&space.path("layout"));
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let passwords = space.path("passwords");
    let made = Command::new("htpasswd").args(["-Bbn", "user", "hunter2"]).output().unwrap();
    fs::write(&passwords, made.stdout).unwrap();
    let registry = Registry::start(&space.path("registry"), Some(&passwords)).unwrap();
    let link = Link::new(registry.address(), Duration::ZERO, 1 << 30).unwrap();
    let host = link.address().to_string();
    publish(&layout, &format!("{}/app:1", registry.address()), &["--dest-creds=user:hunter2"]);
    // As `docker login` writes it ("user:hunter2" in base 64): the server gets it from the command.
    let docker = space.make_folder("docker");
    let auths = format!(r#"{{"auths": {{"{host}": {{"auth": "dXNlcjpodW50ZXIy"}}}}}}"#);
    fs::write(docker.join("config.json"), auths).unwrap();
    let burgeon =
        |name: &str| Burgeon::with_state(PROGRAM, space.path(name)).env("DOCKER_CONFIG", &docker);
    let (maker, user) = (burgeon("maker"), burgeon("user"));
    let source = format!("oci://{host}/app:1");
    let made = push(&maker, &source);
    let (bytes, whole) = (made["bytes"].as_u64().unwrap(), made["image_bytes"].as_u64().unwrap());
    assert!(bytes < whole / 20, "{bytes} of {whole}");
    assert!(link.bytes() >= whole, "{} of {whole}", link.bytes());
    // Both read in the layers: who has made the index, and who was told of it.
    let options = ["--read-only", "--index", digest(&made, "index")];
    for (burgeon, options) in [(&maker, &options[..1]), (&user, &options[..])] {
        let before = link.bytes();
        let mounted = burgeon.mount(&source, &space.path("at"), options);
        let read = fs::read(mounted.path().join("last")).unwrap();
        assert!(read == fs::read(unpacked.join("last")).unwrap());
        let fetched = link.bytes() - before;
        assert!(fetched < whole / 2, "{fetched} of {whole}");
        compare(&unpacked, mounted.path()).unwrap().assert_same();
        burgeon.umount(mounted);
    }
    // Once more, by the image's digest, and there is nothing new.
    let pinned = format!("oci://{host}/app@{}", digest(&made, "image"));
    let before = link.bytes();
    assert_eq!(push(&maker, &pinned), made);
    assert!(link.bytes() - before < 100_000);
}

/// The command has no credentials for the registry: only the server logs in, and may execute
/// nothing.
#[test]
fn the_supervisor_runs_a_credential_helper_for_the_server() {
    let space = Space::new("index-helper");
    let layout = layered(&space.path("layout"));
    let passwords = space.path("passwords");
    let made = Command::new("htpasswd").args(["-Bbn", "user", "hunter2"]).output().unwrap();
    fs::write(&passwords, made.stdout).unwrap();
    let registry = Registry::start(&space.path("registry"), Some(&passwords)).unwrap();
    let source = format!("{}/app:1", registry.address());
    publish(&layout, &source, &["--dest-creds=user:hunter2"]);
    let (helped, empty) = (space.make_folder("helped"), space.make_folder("empty"));
    fs::write(helped.join("config.json"), r#"{"credsStore": "of-a-test"}"#).unwrap();
    let helper = helped.join("docker-credential-of-a-test");
    let (asked, answer) = (space.path("asked"), r#"{"Username": "user", "Secret": "hunter2"}"#);
    let script = format!(
        "#!/bin/sh\ncat /proc/$PPID/cmdline >> '{}'\ncat > /dev/null\necho '{answer}'\n",
        asked.display()
    );
    fs::write(&helper, script).unwrap();
    fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", helped.display(), std::env::var("PATH").unwrap());
    let burgeon = Burgeon::new(PROGRAM, &space).env("DOCKER_CONFIG", &helped).env("PATH", path);
    let made = burgeon.ok(&["index", &format!("oci://{source}"), "--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    // Starts the daemon, with the helper in its environment.
    let pinned = format!("oci://{}/app@{}", registry.address(), digest(&made, "image"));
    let mounted = burgeon.mount(&pinned, &space.path("first"), &["--read-only"]);
    fs::write(&asked, "").unwrap();
    let burgeon = burgeon.env("DOCKER_CONFIG", &empty).env("HOME", &empty);
    let second = burgeon.mount(&pinned, &space.path("second"), &["--read-only"]);
    burgeon.umount(mounted);
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let read = fs::read(second.path().join("last")).unwrap();
    assert!(read == fs::read(unpacked.join("last")).unwrap());
    let asked = fs::read_to_string(&asked).unwrap();
    assert!(asked.contains("__supervise"), "{asked:?}");
    burgeon.umount(second);
}

/// The file in which a registry keeps a blob.
fn blob(registry: &Path, digest: &str) -> PathBuf {
    let hex = digest.strip_prefix("sha256:").unwrap();
    registry.join("docker/registry/v2/blobs/sha256").join(&hex[..2]).join(hex).join("data")
}

#[test]
fn only_the_pinned_index_is_used_and_others_stay_on_the_list() {
    let space = Space::new("index-registry-forged");
    let layout = layered(&space.path("layout"));
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let evil = OciLayout::new(&space.path("evil")).unwrap();
    evil.change(|root| fs::write(root.join("large"), text(7, 5_000_000)).unwrap()).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let host = registry.address();
    publish(&layout, &format!("{host}/app:1"), &[]);
    publish(&evil, &format!("{host}/app:evil"), &[]);
    let publisher = Burgeon::with_state(PROGRAM, space.path("publisher"));
    let victim = Burgeon::with_state(PROGRAM, space.path("victim"));
    let at = format!("oci://{host}/app:1");
    let good = push(&publisher, &at);
    let bad = push(&publisher, &format!("oci://{host}/app:evil"));
    let (good, bad, image) =
        (digest(&good, "index"), digest(&bad, "index"), digest(&good, "image"));
    assert_eq!(listed(host, image), [good]);
    // The other image's index says that it is of this one, and is on its list; so is a signature.
    let sound = document(host, good, MANIFEST);
    let mut forged = document(host, bad, MANIFEST);
    forged["subject"] = sound["subject"].clone();
    let text = forged.to_string();
    let hex: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
    let digest_of_forged = format!("sha256:{hex}");
    put(host, &digest_of_forged, MANIFEST, &forged);
    let tag = image.replace(':', "-");
    let mut list = document(host, &tag, LIST);
    let entry = |digest: &str, kind: &str, len: usize| json!({ "mediaType": MANIFEST, "artifactType": kind, "digest": digest, "size": len });
    let all = list["manifests"].as_array_mut().unwrap();
    all.clear();
    all.push(entry(bad, "application/vnd.test.signature", 1));
    all.push(entry(&digest_of_forged, INDEX, text.len()));
    put(host, &tag, LIST, &list);
    push(&publisher, &at);
    assert_eq!(listed(host, image), [bad, &digest_of_forged, good]);

    let target = space.make_folder("at");
    let target = target.to_str().unwrap();
    let fails = |index: &str, code, said: &str| {
        victim.fails(&["mount", &at, target, "--index", index], code, said);
    };
    fails(&digest_of_forged, 4, "its table describes other layers");
    fails(bad, 4, "not of");
    fails(&format!("sha256:{}", "0".repeat(64)), 3, "cannot use the index");
    // A part of the right one is another: its digest says so.
    let table = blob(&space.path("registry"), sound["layers"][1]["digest"].as_str().unwrap());
    let bytes = fs::read(&table).unwrap();
    let mut spoilt = bytes.clone();
    spoilt[200] ^= 1;
    fs::write(&table, &spoilt).unwrap();
    fails(good, 4, "does not match its digest");
    fs::write(&table, &bytes).unwrap();
    // Nobody vouches for them: they are told of, and all is made of the layers.
    let output = victim.command(&["mount", &at, target, "--read-only"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains(good) && said.contains(&digest_of_forged) && !said.contains(bad),
        "{said}"
    );
    compare(&unpacked, Path::new(target)).unwrap().assert_same();
    victim.ok(&["umount", target]);
    // A document that is no list of referrers stays: it belongs to somebody.
    put(host, &tag, MANIFEST, &sound);
    publisher.fails(&["index", &at, "--push"], 4, "list of referrers is invalid");
    assert_eq!(document(host, &tag, MANIFEST), sound);
}

#[test]
fn a_registry_that_lists_referrers_is_asked_for_them() {
    let space = Space::new("index-referrers");
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout.change(|root| fs::write(root.join("large"), text(7, 3_000_000)).unwrap()).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let lists = ReferrerLists::new(registry.address()).unwrap();
    publish(&layout, &format!("{}/app:1", registry.address()), &[]);
    let publisher = Burgeon::with_state(PROGRAM, space.path("publisher"));
    let at = format!("oci://{}/app:1", lists.address());
    let made = push(&publisher, &at);
    // So there is no tag that says it a second time.
    let path = format!("manifests/{}", digest(&made, "image").replace(':', "-"));
    assert_eq!(ask(registry.address(), "GET", &path, LIST, "").0, 404);
    let index = digest(&made, "index");
    let unasked = Burgeon::with_state(PROGRAM, space.path("unasked"));
    let pulled = unasked.run(&["pull", &at]);
    assert!(pulled.code == Some(0) && pulled.stderr.contains(index), "{pulled:?}");
    let user = Burgeon::with_state(PROGRAM, space.path("user"));
    let mounted = user.mount(&at, &space.path("at"), &["--read-only", "--index", index]);
    assert!(fs::read(mounted.path().join("large")).unwrap() == text(7, 3_000_000));
    user.umount(mounted);
}

#[test]
fn a_registry_that_takes_no_writes_says_so_before_the_image_is_fetched() {
    let space = Space::new("index-refused");
    let layout = layered(&space.path("layout"));
    let folder = space.path("registry");
    let open = Registry::start(&folder, None).unwrap();
    publish(&layout, &format!("{}/app:1", open.address()), &[]);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let proxy = Proxy::new(open.address(), 1).unwrap();
    let refused = |at: SocketAddr, code, said: &[&str]| {
        let finished = burgeon.run(&["index", &format!("oci://{at}/app:1"), "--push"]);
        let all = said.iter().all(|said| finished.stderr.contains(said));
        assert!(finished.code == Some(code) && all, "{said:?}: {finished:#?}");
    };
    for (fault, code, said) in [
        (Fault::Status(401), 5, "docker login"),
        (Fault::Status(403), 5, "docker login"),
        (Fault::Status(507), 6, "no room"),
    ] {
        proxy.spoil(1000, &[fault]);
        refused(proxy.address(), code, &[said]);
    }
    drop((proxy, open));
    let options = RegistryOptions { read_only: true, ..RegistryOptions::default() };
    let registry = Registry::with(&folder, options).unwrap();
    let link = Link::new(registry.address(), Duration::ZERO, 1 << 30).unwrap();
    refused(link.address(), 1, &["takes no writes", "405", "without --push", "skopeo"]);
    assert!(link.bytes() < 10_000, "{}", link.bytes());
    // Without --push nothing is written.
    burgeon.ok(&["index", &format!("oci://{}/app:1", link.address())]);
}
