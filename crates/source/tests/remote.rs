//! Remote stores against real servers, and against a proxy that spoils their answers.

#![allow(clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener},
    sync::{atomic::Ordering::Relaxed, mpsc},
    thread,
    time::Duration,
};

use burgeon_block::{BlockSource, ByteRange, ErrorKind, ObjectId, ObjectStore};
use burgeon_source::{Access, Directory, Location, RemoteStore, Store};
use bytes::Bytes;
use testkit::{Fault, Proxy, Rng, S3, Shape, WebServer};
use tokio::runtime::Runtime;

const LEN: usize = 300_000;

fn id(name: &str) -> ObjectId {
    ObjectId::new(name).unwrap()
}

fn range(start: u64, len: u64) -> ByteRange {
    ByteRange::at(start, len).unwrap()
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn remote(location: &str, access: &Access) -> RemoteStore {
    match Store::open(&Location::parse(location).unwrap(), access).unwrap() {
        Store::Remote(remote) => remote,
        _ => panic!("{location} is no remote store"),
    }
}

fn access(address: SocketAddr) -> Access {
    let variables = S3::environment(address).map(|(name, value)| (name.to_owned(), value));
    serde_json::from_value(variables.into_iter().collect()).unwrap()
}

/// A folder with the object `packs/a`, served by nginx behind a proxy.
struct Web {
    folder: tempfile::TempDir,
    server: WebServer,
    proxy: Proxy,
    data: Vec<u8>,
}

impl Web {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Directory::create(folder.path().join("files/sto re")).unwrap();
        let data = Rng::new(7).bytes(LEN);
        store.publish(&id("packs/a"), &data).unwrap();
        store.publish(&id("images/debian%3a12"), b"record").unwrap();
        let server =
            WebServer::nginx(&folder.path().join("files"), &folder.path().join("nginx")).unwrap();
        let proxy = Proxy::new(server.address(), 1).unwrap();
        Self { folder, server, proxy, data }
    }

    fn open(&self) -> RemoteStore {
        remote(&format!("http://{}/sto%20re/", self.proxy.address()), &Access::default())
    }

    fn expected(&self, range: ByteRange) -> &[u8] {
        &self.data[range.start() as usize..range.end() as usize]
    }
}

#[test]
fn a_web_server_is_read_and_never_written() {
    let (web, runtime) = (Web::new(), runtime());
    let store = web.open();
    for (start, len) in [(0, 1), (4095, 8193), (0, LEN as u64), (LEN as u64 - 1, 1), (5, 0)] {
        let range = range(start, len);
        let read = runtime.block_on(store.read(&id("packs/a"), range)).unwrap();
        assert_eq!(read, web.expected(range), "{range}");
    }
    let beyond = |start, len| {
        runtime.block_on(store.read(&id("packs/a"), range(start, len))).unwrap_err().kind()
    };
    assert_eq!(beyond(LEN as u64 - 1, 2), ErrorKind::Corrupt);
    assert_eq!(beyond(LEN as u64 + 5, 2), ErrorKind::Corrupt);
    let missing = runtime.block_on(store.read(&id("packs/b"), range(0, 1))).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
    assert_eq!(store.get(&id("images/debian%3a12"), 6).unwrap(), b"record"[..]);
    assert_eq!(store.get(&id("images/debian%3a12"), 5).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(store.len(&id("packs/a")).unwrap(), Some(LEN as u64));
    assert_eq!(store.len(&id("packs/b")).unwrap(), None);
    for error in [
        store.list("images").unwrap_err(),
        store.publish(&id("packs/c"), b"c").unwrap_err(),
        store.remove(&id("packs/a")).unwrap_err(),
        store.begin_write().err().unwrap(),
        store.begin_collect().err().unwrap(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    assert_eq!(web.server.errors().matches("open()").count(), 2, "only packs/b was missing");
    assert!(web.folder.path().join("files/sto re/packs/a").exists());
}

#[test]
fn every_fault_gives_its_error_kind_or_has_no_effect() {
    let (web, runtime) = (Web::new(), runtime());
    let wanted = range(1000, 150_000);
    let read = |store: &RemoteStore| runtime.block_on(store.read(&id("packs/a"), wanted));
    for (fault, kind, said) in [
        (Fault::Reset, ErrorKind::Unavailable, "broke off"),
        (Fault::Truncate, ErrorKind::Unavailable, "broke off"),
        (Fault::Status(401), ErrorKind::Unavailable, "401"),
        (Fault::Status(403), ErrorKind::Unavailable, "(Spoilt)"),
        (Fault::Status(404), ErrorKind::NotFound, "does not exist"),
        (Fault::Status(416), ErrorKind::Corrupt, "truncated"),
        (Fault::Status(429), ErrorKind::Unavailable, "429"),
        (Fault::Status(500), ErrorKind::Unavailable, "500"),
        (Fault::Status(503), ErrorKind::Unavailable, "503"),
        (Fault::IgnoreRange, ErrorKind::Invalid, "range requests"),
        (Fault::OtherRange, ErrorKind::Corrupt, "request for bytes 1000-150999"),
        (Fault::ShortRange, ErrorKind::Corrupt, "truncated"),
        (Fault::LongBody, ErrorKind::Corrupt, "more than 150000 bytes"),
        (Fault::RedirectLoop, ErrorKind::Unavailable, "redirect"),
    ] {
        let store = web.open();
        web.proxy.spoil(1000, &[fault]);
        let before = web.proxy.requests();
        let error = read(&store).unwrap_err();
        assert_eq!(error.kind(), kind, "{fault:?}: {error}");
        assert!(error.to_string().contains(said), "{fault:?}: {error}");
        assert!(error.to_string().len() < 400, "{fault:?}: {error}");
        // The volume retries, not the store. A redirect is followed ten times.
        let most = if fault == Fault::RedirectLoop { 12 } else { 1 };
        let asked = web.proxy.requests() - before;
        assert!((1..=most).contains(&asked), "{fault:?}: {asked} requests");
        let figures = store.traffic().figures();
        assert!(figures.iter().filter(|(_, n)| *n > 0).count() >= 2, "{fault:?}: {figures:?}");
        web.proxy.spoil(0, &[]);
        assert_eq!(read(&store).unwrap(), web.expected(wanted), "after {fault:?}");
    }
    web.proxy.spoil(1000, &[Fault::Redirect]);
    assert_eq!(read(&web.open()).unwrap(), web.expected(wanted));
    assert_eq!(web.proxy.counts()[&Fault::Redirect], 1);
}

#[test]
fn a_stalled_request_is_hedged() {
    let (web, runtime) = (Web::new(), runtime());
    let store = web.open();
    let read = |start| runtime.block_on(store.read(&id("packs/a"), range(start, 4096)));
    for n in 0..20 {
        read(n * 4096).unwrap();
    }
    // The first of two requests stalls; only the order of the requests decides which one that is.
    let proxy = &web.proxy;
    proxy.spoil(1000, &[Fault::Stall]);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(0).unwrap());
        assert!(testkit::wait_until(Duration::from_secs(30), || {
            proxy.counts().contains_key(&Fault::Stall)
        }));
        proxy.spoil(0, &[]);
        assert_eq!(reader.join().unwrap(), web.data[..4096]);
    });
    assert!(store.traffic().hedges.load(Relaxed) >= 1);
}

#[test]
fn commands_retry_and_then_give_up() {
    let web = Web::new();
    let store = web.open();
    web.proxy.spoil(400, &[Fault::Reset, Fault::Status(500), Fault::Status(503)]);
    for _ in 0..10 {
        assert_eq!(store.get(&id("packs/a"), LEN as u64).unwrap(), web.data[..]);
    }
    assert!(!web.proxy.counts().is_empty());
    let runtime = runtime();
    // Nobody has port 1; a port that was let go may be another test's by now.
    let store = remote("http://127.0.0.1:1/sto%20re", &Access::default());
    let error = runtime.block_on(store.read(&id("packs/a"), range(0, 1))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("no connection"), "{error}");
}

#[test]
fn the_proxy_shapes_latency_and_bandwidth() {
    let (web, runtime) = (Web::new(), runtime());
    web.proxy.shape(Shape { latency: Duration::from_millis(20), bandwidth: 25_000_000 });
    let store = web.open();
    let begun = std::time::Instant::now();
    let all = range(0, LEN as u64);
    assert_eq!(runtime.block_on(store.read(&id("packs/a"), all)).unwrap(), web.data[..]);
    assert!(begun.elapsed() >= Duration::from_millis(20 + LEN as u64 / 25_000));
}

#[test]
fn a_bucket_keeps_published_objects() {
    let (s3, runtime) = (S3::start().unwrap(), runtime());
    let store = remote("s3://bucket/some/where", &access(s3.address()));
    let data = Rng::new(3).bytes(LEN);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pack");
    std::fs::write(&file, &data).unwrap();
    let lease = store.begin_write().unwrap();
    store.publish_file(&id("packs/a"), &file).unwrap();
    assert!(!file.exists());
    store.publish(&id("images/debian%3a12"), b"record").unwrap();
    store.publish(&id("images/debian%3a12"), b"newer").unwrap();
    drop(lease);
    assert_eq!(store.get(&id("images/debian%3a12"), 100).unwrap(), b"newer"[..]);
    assert_eq!(store.list("images").unwrap(), [id("images/debian%3a12")]);
    assert_eq!(store.list("packs/").unwrap(), [id("packs/a")]);
    assert_eq!(store.list("leases").unwrap(), []);
    assert_eq!(store.len(&id("packs/a")).unwrap(), Some(LEN as u64));
    assert_eq!(store.len(&id("packs/b")).unwrap(), None);
    let (part, whole) = (range(4095, 10_000), range(0, LEN as u64 + 1));
    let read = |range| -> burgeon_block::Result<Bytes> {
        runtime.block_on(store.read(&id("packs/a"), range))
    };
    assert_eq!(read(part).unwrap(), data[4095..14_095]);
    assert_eq!(read(whole).unwrap_err().kind(), ErrorKind::Corrupt);
    // Another prefix is another store.
    let other = remote("s3://bucket/some", &access(s3.address()));
    assert_eq!(other.list("packs").unwrap(), []);
    store.remove(&id("packs/a")).unwrap();
    store.remove(&id("packs/a")).unwrap();
    assert_eq!(read(part).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn writers_and_collectors_of_a_bucket_see_each_other() {
    let s3 = S3::start().unwrap();
    let (one, two) = (
        remote("s3://bucket/x", &access(s3.address())),
        remote("s3://bucket/x", &access(s3.address())),
    );
    let writing = one.begin_write().unwrap();
    assert!(writing.scratch().is_dir());
    assert_eq!(two.begin_collect().unwrap().writers, 1);
    drop(writing);
    let collecting = two.begin_collect().unwrap();
    assert_eq!(collecting.writers, 0);
    let second = one.begin_collect().err().unwrap();
    assert_eq!(second.kind(), ErrorKind::Unavailable, "{second}");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| one.begin_write().map(drop));
        // The writer has put its mark, and waits.
        assert!(testkit::wait_until(Duration::from_secs(30), || {
            two.list("leases").unwrap().iter().any(|mark| mark.as_str().contains("/write-"))
        }));
        assert!(!writer.is_finished());
        drop(collecting);
        writer.join().unwrap().unwrap();
    });
    assert_eq!(one.list("leases").unwrap(), []);
}

#[test]
fn no_message_holds_a_secret() {
    let s3 = S3::start().unwrap();
    let proxy = Proxy::new(s3.address(), 5).unwrap();
    let (access, runtime) = (access(proxy.address()), runtime());
    let store = remote("s3://bucket/x", &access);
    for fault in [Fault::Status(403), Fault::Status(500), Fault::Reset, Fault::IgnoreRange] {
        proxy.spoil(1000, &[fault]);
        let error = runtime.block_on(store.read(&id("packs/a"), range(0, 1))).unwrap_err();
        let shown = format!("{error} {error:?} {store:?} {access:?}");
        assert!(!shown.contains("test-secret"), "{fault:?}: {shown}");
        assert!(error.to_string().contains("s3://bucket/x"), "{fault:?}: {error}");
    }
}

/// Answers every request with `head` and `body`.
fn answering(head: &'static str, body: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let lines = BufReader::new(client.try_clone().unwrap()).lines().map_while(Result::ok);
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let len = body.len();
            let head = format!("{head}\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n");
            let _ = client.write_all(format!("{head}{body}").as_bytes());
        }
    });
    address
}

#[test]
fn a_list_has_an_end() {
    let body = "<ListBucketResult><IsTruncated>true</IsTruncated>\
        <NextContinuationToken>x</NextContinuationToken></ListBucketResult>";
    let server = answering("HTTP/1.1 200 OK", body.to_owned());
    let (send, receive) = mpsc::channel();
    thread::spawn(move || send.send(remote("s3://bucket", &access(server)).list("packs")));
    let listed = receive.recv_timeout(Duration::from_secs(60)).expect("it goes on for ever");
    let error = listed.unwrap_err();
    assert!(error.to_string().contains("pages without end"), "{error}");
}

#[test]
fn a_list_has_a_length() {
    let list = |padding: usize| {
        let padding = " ".repeat(padding);
        let server = answering("HTTP/1.1 207 Multi-Status", format!("{padding}<multistatus/>"));
        let store = remote(&format!("http://{server}/"), &Access::default());
        store.list("packs").unwrap_err().to_string()
    };
    assert!(list(1 << 20).contains("decoding PROPFIND"), "it was read whole");
    assert!(list(33 << 20).contains("more than 33554432 bytes"));
    let body = "<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>".to_owned();
    let server = answering("HTTP/1.1 200 OK", body + &" ".repeat(33 << 20));
    let error = remote("s3://bucket", &access(server)).list("packs").unwrap_err();
    assert!(error.to_string().contains("more than 33554432 bytes"), "{error}");
}
