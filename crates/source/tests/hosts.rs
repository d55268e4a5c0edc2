//! Registries that are served by the hosts of containerd's `hosts.toml`.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::{Arc, LazyLock, Mutex},
    thread,
    time::Duration,
};

use burgeon_block::ByteRange;
use burgeon_source::{
    Access,
    registry::{Name, OciDigest, Registry, use_hosts_of},
    waiting,
};
use serde_json::json;
use testkit::{Certificate, OciLayout, Proxy, RegistryOptions, skopeo_copy};

/// The folder of all tests: each has a registry of its own in it.
static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    use_hosts_of(folder.path().to_owned());
    folder
});

/// A server that keeps the heads of all requests, and gives every one the same answer.
struct Recorder {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    fn start(answer: String) -> Self {
        Self::answering(vec![answer])
    }

    /// One answer after another; the last one for ever.
    fn answering(answers: Vec<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let heads = Arc::<Mutex<Vec<String>>>::default();
        let kept = Arc::clone(&heads);
        thread::spawn(move || {
            let last = answers.len() - 1;
            let answers = (0..).map(|n: usize| answers[n.min(last)].clone());
            for (client, answer) in listener.incoming().zip(answers) {
                let Ok(mut client) = client else { return };
                let Ok(reader) = client.try_clone() else { return };
                let lines = BufReader::new(reader).lines().map_while(Result::ok);
                let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
                if !head.is_empty() {
                    kept.lock().unwrap().push(head.join("\n").to_lowercase());
                }
                let _ = write!(client, "HTTP/1.1 {answer}");
            }
        });
        Self { address, heads }
    }

    /// A server whose blobs are all `abc`.
    fn serving() -> Self {
        let head = "206 Partial Content\r\ncontent-range: bytes 0-2/3\r\ncontent-length: 3";
        Self::start(format!("{head}\r\nconnection: close\r\n\r\nabc"))
    }

    fn failing(status: &str) -> Self {
        Self::start(format!("{status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"))
    }

    fn said(&self, what: &str) -> bool {
        self.heads.lock().unwrap().iter().any(|head| head.contains(what))
    }
}

/// The registry at `address`, served as `hosts` says, with the logins of `auths`.
fn open(address: SocketAddr, hosts: &str, auths: serde_json::Value) -> Registry {
    let folder = FOLDER.path().join(address.to_string());
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("hosts.toml"), hosts).unwrap();
    let name = Name::parse(&format!("oci://{address}/app:1")).unwrap().unwrap();
    let config = serde_json::json!({ "auths": auths }).to_string();
    let all: Access =
        serde_json::from_value(serde_json::json!({ "DOCKER_AUTH_CONFIG": config })).unwrap();
    // As it is kept beside a mount.
    let kept = serde_json::to_string(&all.for_registry(&name).unwrap()).unwrap();
    Registry::open(&name, &serde_json::from_str(&kept).unwrap()).unwrap()
}

fn reads_abc(registry: &Registry) {
    let whole = ByteRange::at(0, 3).unwrap();
    let read = waiting(registry.blob_range(&OciDigest::of(b"abc"), whole)).unwrap();
    assert_eq!(&read[..], b"abc");
}

fn push(layout: &Path, to: SocketAddr) {
    let layer = ("application/vnd.test", b"abc".to_vec());
    OciLayout::by_hand(layout, None, &[layer], |_| ()).unwrap();
    let to = format!("docker://{to}/app:1");
    skopeo_copy(&[], &format!("oci:{}", layout.display()), &to).unwrap();
}

#[test]
fn mirrors_are_asked_in_order_and_a_dead_one_falls_back() {
    let folder = tempfile::tempdir().unwrap();
    let server = testkit::Registry::start(&folder.path().join("registry"), None).unwrap();
    push(&folder.path().join("layout"), server.address());
    let mirror = Proxy::new(server.address(), 1).unwrap();
    let lying =
        Recorder::start("200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}".into());
    // Nothing has port 1. The registry of the image is never asked: `server` stands for it.
    let (own, away) = (TcpListener::bind("127.0.0.1:0").unwrap(), "http://127.0.0.1:1");
    let hosts = format!(
        "server = 'http://{}'\n[host.'{away}']\n[host.'http://{}']\ncapabilities = ['pull']\n\
         [host.'http://{}']\ncapabilities = 'pull'\n",
        server.address(),
        lying.address,
        mirror.address()
    );
    let registry = open(own.local_addr().unwrap(), &hosts, serde_json::json!({}));
    let (_, digest) = registry.document(None).unwrap();
    assert_eq!(mirror.requests(), 0, "a mirror that may only pull resolves no tag");
    assert!(lying.heads.lock().unwrap().is_empty());
    // The lying host gives a wrong manifest: the next one has the right one.
    registry.document(Some(&digest)).unwrap();
    let own_port = own.local_addr().unwrap().port();
    assert!(lying.said(&format!("?ns=127.0.0.1%3a{own_port}")));
    let asked = mirror.requests();
    assert!(asked > 0);
    reads_abc(&registry);
    assert!(mirror.requests() > asked, "the mirror serves blobs");
    own.set_nonblocking(true).unwrap();
    assert!(own.accept().is_err());
}

#[test]
fn a_password_goes_only_to_its_own_host() {
    let refusal = "401 Unauthorized\r\nwww-authenticate: Basic realm=\"x\"";
    for knows_mirror in [false, true] {
        let (mirror, server) = (Recorder::failing(refusal), Recorder::serving());
        // "user:hunter2" and "user:hunter3"
        let mut auths = serde_json::json!({
            server.address.to_string(): { "auth": "dXNlcjpodW50ZXIy" },
        });
        if knows_mirror {
            auths[mirror.address.to_string()] = serde_json::json!({ "auth": "dXNlcjpodW50ZXIz" });
        }
        let hosts = format!("[host.'http://{}']\n", mirror.address);
        reads_abc(&open(server.address, &hosts, auths));
        assert!(mirror.said("get /v2/app/blobs/"), "the mirror was asked");
        assert!(!mirror.said("dxnlcjpodw50zxiy"), "the registry's password");
        assert!(server.said("basic dxnlcjpodw50zxiy"));
        assert_eq!(mirror.said("basic dxnlcjpodw50zxiz"), knows_mirror);
        assert!(!server.said("dxnlcjpodw50zxiz") && !server.said("ns="));
    }
}

#[test]
fn a_header_reaches_only_its_host() {
    let (store, server) = (Recorder::serving(), Recorder::serving());
    let place = format!("307 Temporary Redirect\r\nlocation: http://{}/x", store.address);
    let mirror = Recorder::failing(&place);
    let hosts = format!("[host.'http://{}'.header]\nx-key = 'hunter2'\n", mirror.address);
    reads_abc(&open(server.address, &hosts, serde_json::json!({})));
    assert!(mirror.said("x-key: hunter2"));
    assert!(store.said("get /x") && !store.said("hunter2"));
    assert!(!server.said("get /v2/app/blobs"), "the mirror has served it");
    // Without the mirror's data the server is asked, without the header.
    let (mirror, server) = (Recorder::failing("404 Not Found"), Recorder::serving());
    let hosts = format!("[host.'http://{}'.header]\nx-key = 'hunter2'\n", mirror.address);
    reads_abc(&open(server.address, &hosts, serde_json::json!({})));
    assert!(mirror.said("x-key: hunter2"));
    assert!(server.said("get /v2/app/blobs") && !server.said("hunter2"));
}

#[test]
fn a_mirror_that_failed_is_asked_again_where_the_server_is_away() {
    let head = "206 Partial Content\r\ncontent-range: bytes 0-2/3\r\ncontent-length: 3";
    let mirror = Recorder::answering(vec![
        "503 Busy\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned(),
        format!("{head}\r\nconnection: close\r\n\r\nabc"),
    ]);
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    let hosts = format!("server = 'http://127.0.0.1:1'\n[host.'http://{}']\n", mirror.address);
    let registry = open(own.local_addr().unwrap(), &hosts, serde_json::json!({}));
    // As readers of a volume do; a slow request is sent twice, so the first may succeed.
    let (whole, digest) = (ByteRange::at(0, 3).unwrap(), OciDigest::of(b"abc"));
    let read = || waiting(registry.blob_range(&digest, whole)).is_ok();
    assert!((0..3).any(|_| read()), "the mirror was left out");
}

#[test]
fn a_mirror_that_keeps_others_waiting_is_asked_last() {
    let (silent, server) = (TcpListener::bind("127.0.0.1:0").unwrap(), Recorder::serving());
    let hosts = format!("[host.'http://{}']\n", silent.local_addr().unwrap());
    let registry = open(server.address, &hosts, serde_json::json!({}));
    let whole = ByteRange::at(0, 3).unwrap();
    let digest = OciDigest::of(b"abc");
    let impatient = async {
        tokio::time::timeout(Duration::from_millis(300), registry.blob_range(&digest, whole)).await
    };
    assert!(waiting(impatient).is_err(), "the mirror does not answer");
    silent.set_nonblocking(true).unwrap();
    let connections = || std::iter::from_fn(|| silent.accept().ok()).count();
    assert!(connections() > 0);
    // At once: the mirror is not even connected to.
    reads_abc(&registry);
    assert_eq!(connections(), 0);
}

#[test]
fn a_client_certificate_is_shown_to_its_host_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let first = testkit::Registry::start(&path("registry"), None).unwrap();
    push(&path("layout"), first.address());
    drop(first);
    let [server, client] =
        ["localhost", "client"].map(|name| Certificate::new(&path(name), name).unwrap());
    let options = RegistryOptions {
        certificate: Some((&server.certificate, &server.key)),
        clients_of: Some(&client.authority),
        ..RegistryOptions::default()
    };
    let registry = testkit::Registry::with(&path("registry"), options).unwrap();
    let url = format!("https://localhost:{}", registry.address().port());
    let image: SocketAddr = "127.0.0.1:1".parse().unwrap();
    let hosts = |client: String| {
        format!("server = '{url}'\nca = '{}'\n{client}", server.authority.display())
    };
    let [certificate, key] = [&client.certificate, &client.key].map(|it| it.display());
    reads_abc(&open(image, &hosts(format!("client = [['{certificate}', '{key}']]")), json!({})));
    // In one file.
    let both = [&client.certificate, &client.key].map(|file| fs::read_to_string(file).unwrap());
    fs::write(path("both.pem"), both.concat()).unwrap();
    let one = format!("client = '{}'", path("both.pem").display());
    reads_abc(&open(image, &hosts(one), json!({})));
    let whole = ByteRange::at(0, 3).unwrap();
    let read = |registry: &Registry| waiting(registry.blob_range(&OciDigest::of(b"abc"), whole));
    let without = read(&open(image, &hosts(String::new()), json!({}))).unwrap_err();
    assert!(without.to_string().starts_with("cannot read"), "{without}");
    // Another host of the same registry is not shown it.
    let text = format!(
        "[host.'http://127.0.0.1:1']\nclient = '{}'\n[host.'{url}']\nca = '{}'\n",
        path("both.pem").display(),
        server.authority.display()
    );
    let other = read(&open(image, &text, json!({}))).unwrap_err();
    assert!(!other.to_string().contains("PRIVATE"), "{other}");
}
