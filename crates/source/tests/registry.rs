//! Blobs of a real registry, through a proxy that spoils its answers, and with expiring tokens.

#![allow(clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::Path,
    sync::atomic::Ordering::Relaxed,
    thread,
};

use burgeon_block::{BlockSource, ByteRange, ErrorKind, ObjectId, ObjectStore};
use burgeon_source::{
    Access, Location, Store,
    registry::{ARTIFACT_TYPE, Blob, Name, ObjectBlobs, OciDigest, Registry},
    waiting,
};
use testkit::{Fault, OciLayout, Proxy, Rng, TokenGate, skopeo_copy};

const LEN: usize = 300_000;
/// "user:hunter2" and "user:hunter3" in base 64.
const PASSWORDS: [&str; 2] = ["dXNlcjpodW50ZXIy", "dXNlcjpodW50ZXIz"];

/// A registry with one blob.
struct Served {
    _folder: tempfile::TempDir,
    server: testkit::Registry,
    data: Vec<u8>,
    digest: OciDigest,
}

impl Served {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = testkit::Registry::start(&folder.path().join("registry"), None).unwrap();
        let data = Rng::new(7).bytes(LEN);
        let layout = folder.path().join("layout");
        push(&layout, &data, &format!("docker://{}/app:1", server.address()));
        let digest = OciDigest::of(&data);
        Self { _folder: folder, server, data, digest }
    }

    fn check(&self, registry: &Registry, start: usize, len: usize) {
        let range = ByteRange::at(start as u64, len as u64).unwrap();
        let read = waiting(registry.blob_range(&self.digest, range)).unwrap();
        assert!(read == self.data[start..start + len], "{range}");
    }
}

fn push(layout: &Path, data: &[u8], to: &str) {
    // A type that skopeo does not compress.
    let layer = ("application/vnd.test", data.to_vec());
    OciLayout::by_hand(layout, None, &[layer], |_| ()).unwrap();
    skopeo_copy(&[], &format!("oci:{}", layout.display()), to).unwrap();
}

fn open(address: impl std::fmt::Display, access: &Access) -> Registry {
    let name = Name::parse(&format!("oci://{address}/app:1")).unwrap().unwrap();
    Registry::open(&name, access).unwrap()
}

fn access(host: impl std::fmt::Display, password: &str) -> Access {
    let config = format!(r#"{{"auths": {{"{host}": {{"auth": "{password}"}}}}}}"#);
    serde_json::from_value(serde_json::json!({ "DOCKER_AUTH_CONFIG": config })).unwrap()
}

#[test]
fn a_range_read_returns_exactly_the_range_or_an_error() {
    let served = Served::new();
    let registry = open(served.server.address(), &Access::default());
    for (start, len) in [(0, 1), (4095, 8193), (0, LEN), (LEN - 1, 1), (5, 0)] {
        served.check(&registry, start, len);
    }
    let fails = |digest: &OciDigest, start: usize, len: u64| {
        let range = ByteRange::at(start as u64, len).unwrap();
        waiting(registry.blob_range(digest, range)).unwrap_err().kind()
    };
    assert_eq!(fails(&served.digest, LEN - 1, 2), ErrorKind::Corrupt);
    assert_eq!(fails(&served.digest, LEN + 5, 2), ErrorKind::Corrupt);
    assert_eq!(fails(&OciDigest::of(b"none"), 0, 1), ErrorKind::NotFound);
    // Every fault but stalls, and flipped or exchanged bytes, which the reader detects.
    let proxy = Proxy::new(served.server.address(), 5).unwrap();
    let faults: Vec<Fault> = Fault::ALL
        .into_iter()
        .filter(|fault| !matches!(fault, Fault::Stall | Fault::FlipBit | Fault::OtherBytes))
        .collect();
    let registry = open(proxy.address(), &Access::default());
    served.check(&registry, 0, 1);
    proxy.spoil(500, &faults);
    let (mut good, mut bad) = (0, 0);
    let mut rng = Rng::new(3);
    for _ in 0..300 {
        let start = rng.below(LEN as u64 - 1);
        let range = ByteRange::at(start, 1 + rng.below(LEN as u64 - start)).unwrap();
        match waiting(registry.blob_range(&served.digest, range)) {
            Ok(bytes) => {
                assert!(bytes == served.data[range.start() as usize..range.end() as usize]);
                good += 1;
            }
            Err(_) => bad += 1,
        }
    }
    assert!(good >= 100 && bad >= 50, "{good} good, {bad} bad");
    let traffic = registry.traffic();
    for counter in
        [&traffic.throttled, &traffic.denied, &traffic.refused, &traffic.broken, &traffic.lies]
    {
        assert!(counter.load(Relaxed) > 0, "{:?}", traffic.figures());
    }
}

#[test]
fn a_token_that_expires_is_renewed_and_shared() {
    let served = Served::new();
    let gate = TokenGate::new(served.server.address(), PASSWORDS[0], 3).unwrap();
    let known = access(gate.address(), PASSWORDS[0]);
    let registry = open(gate.address(), &known);
    for n in 0..10 {
        served.check(&registry, n * 1000, 500);
    }
    assert_eq!(gate.tokens(), 4, "a token is good for three requests");
    assert!(gate.scopes().iter().all(|scope| scope.contains("repository:app:pull")));
    gate.change(PASSWORDS[1]);
    let range = ByteRange::at(0, 1).unwrap();
    let error = waiting(registry.blob_range(&served.digest, range)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.to_string().contains("log in") && !error.to_string().contains("hunter"),
        "{error}"
    );
    assert!(!format!("{registry:?} {known:?}").contains("dXNl"));
    // Concurrent readers share one login.
    let gate = TokenGate::new(served.server.address(), PASSWORDS[0], 1000).unwrap();
    let registry = open(gate.address(), &access(gate.address(), PASSWORDS[0]));
    let readers: Vec<_> = (0..30)
        .map(|_| {
            let (registry, digest) = (registry.clone(), served.digest.clone());
            std::thread::spawn(move || waiting(registry.blob_range(&digest, range)).unwrap())
        })
        .collect();
    for reader in readers {
        assert!(reader.join().unwrap() == served.data[..1]);
    }
    assert_eq!(gate.tokens(), 1);
}

/// A login takes as many round trips as the rest of a start.
#[test]
fn anonymous_requests_do_not_wait_for_a_login() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut kept = Vec::new();
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let lines = BufReader::new(client.try_clone().unwrap()).lines().map_while(Result::ok);
            let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
            if head.first().is_some_and(|first| first.starts_with("GET /v2/app/blobs/")) {
                let range = "content-range: bytes 0-2/3\r\ncontent-length: 3";
                let answer = format!("HTTP/1.1 206 Partial Content\r\n{range}\r\n\r\nabc");
                client.write_all(answer.as_bytes()).unwrap();
            }
            // Other requests get no answer.
            kept.push(client);
        }
    });
    let registry = open(address, &Access::default());
    let whole = ByteRange::at(0, 3).unwrap();
    let read = waiting(registry.blob_range(&OciDigest::of(b"abc"), whole)).unwrap();
    assert_eq!(&read[..], b"abc");
}

#[test]
fn anonymous_clients_get_a_token_if_the_registry_wants_one() {
    let served = Served::new();
    for hides in [false, true] {
        let gate = TokenGate::for_anybody(served.server.address(), 3, hides).unwrap();
        let registry = open(gate.address(), &Access::default());
        served.check(&registry, 0, LEN);
        served.check(&registry, 5, 5000);
        assert_eq!(gate.tokens(), 1, "hidden: {hides}");
        assert_eq!(registry.traffic().denied.load(Relaxed), 0, "it was only tried");
        if !hides {
            (0..5).for_each(|n| served.check(&registry, n, 500));
            assert_eq!(gate.tokens(), 3, "a token is good for three requests");
        }
        let missing = OciDigest::of(b"none");
        let range = ByteRange::at(0, 1).unwrap();
        let error = waiting(open(gate.address(), &Access::default()).blob_range(&missing, range));
        assert_eq!(error.unwrap_err().kind(), ErrorKind::NotFound, "hidden: {hides}");
    }
}

#[test]
fn only_settings_of_the_registry_go_with_a_request() {
    let config = r#"{"auths": {
        "r.example": {"auth": "dXNlcjpodW50ZXIy"}, "other.example": {"auth": "dXNlcjpodW50ZXIz"}}}"#;
    let all: Access = serde_json::from_value(
        serde_json::json!({ "DOCKER_AUTH_CONFIG": config, "AWS_SECRET_ACCESS_KEY": "hunter4" }),
    )
    .unwrap();
    let name = Name::parse("oci://r.example/app:1").unwrap().unwrap();
    let access = all.for_registry(&name).unwrap();
    let sent = serde_json::to_string(&access).unwrap();
    assert!(sent.contains("hunter2") && !sent.contains("hunter4") && !sent.contains("other"));
    assert!(!sent.contains("dXNlcjpodW50ZXIz"), "{sent}");
    // The receiver reads back the same settings.
    assert_eq!(access.for_registry(&name).unwrap(), access);
    let wrong = serde_json::json!({ "DOCKER_AUTH_CONFIG": "hunter5" });
    let wrong: Access = serde_json::from_value(wrong).unwrap();
    let error = wrong.for_registry(&name).err();
    assert!(error.is_none_or(|error| !error.to_string().contains("hunter5")));
}

fn id(name: &str) -> ObjectId {
    ObjectId::new(name).unwrap()
}

#[test]
fn a_burgeon_image_is_a_read_only_store() {
    let folder = tempfile::tempdir().unwrap();
    let server = testkit::Registry::start(&folder.path().join("registry"), None).unwrap();
    let data = Rng::new(7).bytes(LEN);
    let blobs = [("application/vnd.test", data.clone()), ("application/vnd.test", b"{}".to_vec())];
    let layout = folder.path().join("layout");
    OciLayout::by_hand(&layout, None, &blobs, |manifest| {
        manifest["artifactType"] = ARTIFACT_TYPE.into();
        for (number, object) in ["packs/aa", "images/x"].into_iter().enumerate() {
            let annotations = serde_json::json!({ "vnd.burgeon.object": object });
            manifest["layers"][number]["annotations"] = annotations;
        }
    })
    .unwrap();
    let at = format!("{}/app", server.address());
    skopeo_copy(&[], &format!("oci:{}", layout.display()), &format!("docker://{at}:1")).unwrap();
    let (_, digest) = open(server.address(), &Access::default()).document(None).unwrap();
    let untold = Location::parse(&format!("oci://{at}:1")).unwrap_err();
    assert!(untold.to_string().contains("burgeon pull"), "{untold}");
    let location = Location::parse(&format!("oci://{at}@{digest}")).unwrap();
    assert_eq!(Location::parse(&location.to_string()).unwrap(), location);
    let again: Location = serde_json::from_str(&serde_json::to_string(&location).unwrap()).unwrap();
    let store = Store::open(&again, &Access::default()).unwrap();
    assert_eq!(store.list("packs").unwrap(), [id("packs/aa")]);
    assert_eq!(store.list("manifests").unwrap(), []);
    assert_eq!(store.len(&id("packs/aa")).unwrap(), Some(LEN as u64));
    assert_eq!(store.len(&id("packs/bb")).unwrap(), None);
    assert_eq!(store.get(&id("images/x"), 2).unwrap(), b"{}"[..]);
    assert_eq!(store.get(&id("images/x"), 1).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(store.get(&id("packs/aa"), LEN as u64).unwrap() == data);
    let read = |object: &str, start: u64, len| {
        waiting(store.read(&id(object), ByteRange::at(start, len).unwrap()))
    };
    assert!(read("packs/aa", 4000, 9000).unwrap() == data[4000..13_000]);
    assert_eq!(read("packs/aa", LEN as u64 - 1, 2).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(read("packs/bb", 0, 1).unwrap_err().kind(), ErrorKind::NotFound);
    for error in [
        store.check_writable().unwrap_err(),
        store.publish(&id("packs/c"), b"c").unwrap_err(),
        store.publish_file(&id("packs/c"), folder.path()).unwrap_err(),
        store.remove(&id("packs/aa")).unwrap_err(),
        store.begin_write().err().unwrap(),
        store.begin_collect().err().unwrap(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    // No document has this digest.
    let other = Location::parse(&format!("oci://{at}@{}", OciDigest::of(b"x"))).unwrap();
    let other = Store::open(&other, &Access::default()).unwrap();
    assert_eq!(other.list("packs").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn manifests_are_deterministic_and_within_the_length_limit() {
    let blob = Blob { digest: OciDigest::of(b"x"), size: 1 };
    let names = ["images/x", "packs/b", "packs/a", "manifests/m", "profiles/m"];
    let manifest = |names: &[&str]| {
        let mut objects = ObjectBlobs::default();
        for name in names {
            objects.add(id(name), blob.clone()).unwrap();
        }
        (objects.encode().unwrap(), objects)
    };
    let (bytes, objects) = manifest(&names);
    let mut reversed = names;
    reversed.reverse();
    assert_eq!(manifest(&reversed).0, bytes);
    assert_eq!(ObjectBlobs::decode(&bytes).unwrap(), objects);
    let mut many = objects;
    assert!(many.add(id("packs/a"), blob.clone()).is_err());
    assert!(many.add(id("file/etc/passwd"), blob.clone()).is_err());
    let pack = Blob { size: 32 << 20, ..blob };
    for number in 0..17_000 {
        if number == 16_000 {
            assert!(many.encode().is_ok(), "docs/cli.md says that so many are possible");
        }
        many.add(id(&format!("packs/{number:064x}")), pack.clone()).unwrap();
    }
    assert_eq!(many.encode().unwrap_err().kind(), ErrorKind::Invalid);
    let digest = OciDigest::of(b"{}");
    let config = serde_json::json!({ "mediaType": "", "digest": digest.to_string(), "size": 2 });
    let image =
        serde_json::json!({ "schemaVersion": 2, "config": config, "layers": [] }).to_string();
    assert_eq!(
        ObjectBlobs::decode(image.as_bytes()).unwrap_err().kind(),
        ErrorKind::UnsupportedFormat
    );
    assert_eq!(ObjectBlobs::decode(b"[").unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn an_identity_token_is_exchanged_for_tokens() {
    let served = Served::new();
    let gate = TokenGate::for_identity(served.server.address(), "hunter-7", 3).unwrap();
    let known = |identity: &str| -> Access {
        let auths =
            serde_json::json!({ gate.address().to_string(): { "identitytoken": identity } });
        let config = serde_json::json!({ "auths": auths }).to_string();
        serde_json::from_value(serde_json::json!({ "DOCKER_AUTH_CONFIG": config })).unwrap()
    };
    // As it reaches the daemon.
    let name = Name::parse(&format!("oci://{}/app:1", gate.address())).unwrap().unwrap();
    let sent = known("hunter-7").for_registry(&name).unwrap();
    let registry = open(gate.address(), &sent);
    for n in 0..10 {
        served.check(&registry, n * 1000, 500);
    }
    assert_eq!(gate.tokens(), 4, "a token is good for three requests");
    assert!(gate.scopes().iter().all(|scope| scope.contains("scope=repository:app:pull&")));
    let range = ByteRange::at(0, 1).unwrap();
    let refused = open(gate.address(), &known("hunter-8"));
    let error = waiting(refused.blob_range(&served.digest, range)).unwrap_err();
    let shown = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(shown.contains("identity token is refused") && !shown.contains("hunter"), "{error}");
    // A registry that wants a user's password.
    let basic = TokenGate::new(served.server.address(), PASSWORDS[0], 3).unwrap();
    let config = serde_json::json!({ "auths": {
        basic.address().to_string(): { "identitytoken": "hunter-7" } } });
    let config = serde_json::json!({ "DOCKER_AUTH_CONFIG": config.to_string() });
    let registry = open(basic.address(), &serde_json::from_value(config).unwrap());
    let error = waiting(registry.blob_range(&served.digest, range)).unwrap_err();
    assert!(error.to_string().contains("log in again"), "{error}");
}

/// Answers each request with `answer` of its first line; sends nothing if that is empty.
fn answering(
    answer: impl Fn(&str, std::net::SocketAddr) -> String + Send + 'static,
) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let lines = BufReader::new(client.try_clone().unwrap()).lines().map_while(Result::ok);
            let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
            let Some(first) = head.first() else { continue };
            let answer = answer(first, address);
            let _ = client
                .write_all(format!("HTTP/1.1 {answer}\r\nconnection: close\r\n\r\n").as_bytes());
        }
    });
    address
}

#[test]
fn an_identity_token_goes_only_to_the_realm_of_the_registry() {
    let (told, asked) = std::sync::mpsc::channel();
    let elsewhere = answering(move |first, _| {
        told.send(first.to_owned()).unwrap();
        "200 OK\r\ncontent-length: 0".to_owned()
    });
    for status in [301, 302, 307, 308] {
        let registry = answering(move |first, own| match first.starts_with("POST") {
            true => format!("{status} Away\r\nlocation: http://{elsewhere}/\r\ncontent-length: 0"),
            false => {
                let realm = format!("www-authenticate: Bearer realm=\"http://{own}/token\"");
                format!("401 Unauthorized\r\n{realm}\r\ncontent-length: 0")
            }
        });
        let auths = serde_json::json!({ registry.to_string(): { "identitytoken": "hunter" } });
        let config = serde_json::json!({ "auths": auths }).to_string();
        let config = serde_json::json!({ "DOCKER_AUTH_CONFIG": config });
        let registry = open(registry, &serde_json::from_value(config).unwrap());
        let range = ByteRange::at(0, 1).unwrap();
        let error = waiting(registry.blob_range(&OciDigest::of(b"x"), range)).unwrap_err();
        assert!(error.to_string().contains(&status.to_string()), "{error}");
        assert!(!error.to_string().contains("hunter"), "{error}");
    }
    assert!(asked.try_recv().is_err(), "it was sent elsewhere");
}

#[test]
fn a_broken_next_page_leaves_a_partial_list() {
    let page = |link: &str| format!("200 OK\r\nlink: <{link}>; rel=\"next\"\r\ncontent-length: 0");
    for (next, second) in [("x", "404 Not Found\r\ncontent-length: 0"), ("", "")] {
        let registry = answering(move |first, _| match first.contains("/referrers/sha256") {
            // A page that links to itself, if there is no second one.
            true if next.is_empty() => page(first.split(' ').nth(1).unwrap()),
            true => page("/v2/app/referrers/x"),
            false => second.to_owned(),
        });
        let registry = open(registry, &Access::default());
        let pages = registry.referrers(&OciDigest::of(b"x"), "kind").unwrap().unwrap();
        assert_eq!(pages.len(), 1, "{next}");
    }
}

#[test]
fn an_answer_with_a_token_has_a_length() {
    let served = answering(|first, own| match first.contains("/token") {
        true => {
            // A good token, after a megabyte of spaces.
            let body = format!("{}{{\"token\": \"good\"}}", " ".repeat(1 << 20));
            format!("200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        }
        false => {
            let realm = format!("www-authenticate: Bearer realm=\"http://{own}/token\"");
            format!("401 Unauthorized\r\n{realm}\r\ncontent-length: 0")
        }
    });
    let given = |entry: serde_json::Value| -> Access {
        let config = serde_json::json!({ "auths": { served.to_string(): entry } }).to_string();
        serde_json::from_value(serde_json::json!({ "DOCKER_AUTH_CONFIG": config })).unwrap()
    };
    for access in [
        Access::default(),
        given(serde_json::json!({ "auth": PASSWORDS[0] })),
        given(serde_json::json!({ "identitytoken": "hunter-7" })),
    ] {
        let range = ByteRange::at(0, 1).unwrap();
        let (registry, digest) = (open(served, &access), OciDigest::of(b"x"));
        let error = waiting(registry.blob_range(&digest, range)).unwrap_err();
        assert!(error.to_string().contains("more than 65536 bytes"), "{access:?}: {error}");
    }
}

#[test]
fn documents_have_a_time_limit() {
    // Accepts connections, and sends nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let registry = open(listener.local_addr().unwrap(), &Access::default());
    registry.answer_within(Some(std::time::Duration::from_millis(50)));
    let error = registry.document(None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("no answer in time"), "{error}");
}
