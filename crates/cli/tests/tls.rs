//! Registries as servers: with a certificate that the system knows nothing of, with a token realm
//! that is not encrypted, and without an answer.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::Path,
    process::Command,
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use testkit::{
    Burgeon, Certificate, Fault, OciLayout, Proxy, Registry, RegistryOptions, Rng, Space,
    bind_mount, compare, skopeo_copy,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const HOST: &str = "registry.test";

/// Makes [`HOST`] this machine: one of its own names would be spoken to without encryption.
fn named_host(space: &Space) -> impl Sized + use<> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let hosts = space.path("hosts");
    let known = fs::read_to_string("/etc/hosts").unwrap_or_default();
    fs::write(&hosts, format!("127.0.0.1 {HOST}\n{known}")).unwrap();
    (bind_mount(&hosts, Path::new("/etc/hosts")), turn)
}

#[test]
fn a_registry_is_trusted_by_its_certificate_or_not_at_all() {
    let space = Space::new("tls");
    let hosts = space.path("hosts");
    let known = fs::read_to_string("/etc/hosts").unwrap_or_default();
    let _hosts = named_host(&space);
    let made = Certificate::new(&space.path("certificate"), HOST).unwrap();
    let passwords = space.path("passwords");
    let bcrypt = Command::new("htpasswd").args(["-Bbn", "user", "hunter2"]).output().unwrap();
    fs::write(&passwords, bcrypt.stdout).unwrap();
    let options = RegistryOptions {
        passwords: Some(&passwords),
        certificate: Some((&made.certificate, &made.key)),
        ..RegistryOptions::default()
    };
    let registry = Registry::with(&space.path("registry"), options).unwrap();
    let port = registry.address().port();
    // "user:hunter2" in base 64.
    let auths = format!(r#"{{"auths": {{"{HOST}:{port}": {{"auth": "dXNlcjpodW50ZXIy"}}}}}}"#);
    let burgeon = |name: &str| {
        let burgeon = Burgeon::with_state(PROGRAM, space.path(name));
        burgeon.env("DOCKER_AUTH_CONFIG", &auths)
    };
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(1).bytes(600_000)).unwrap();
    let at = format!("oci://{HOST}:{port}/app:1");
    let target = space.path("at");

    let believing = burgeon("believing").env("SSL_CERT_FILE", &made.authority);
    believing.build(&tree, "app");
    believing.ok(&["push", "app", &at]);
    let mounted = believing.mount(&at, &target, &["--read-only"]);
    compare(&tree, mounted.path()).unwrap().assert_same();
    believing.umount(mounted);

    // Clients that do not know the authority, or only another one; a certificate of another host.
    let stranger = Certificate::new(&space.path("stranger"), HOST).unwrap();
    let doubting = burgeon("doubting");
    let misled = burgeon("misled").env("SSL_CERT_FILE", &stranger.authority);
    for burgeon in [&doubting, &misled] {
        burgeon.build(&tree, "app");
        let target = target.to_str().unwrap();
        for command in [&["push", "app", &at][..], &["mount", &at, target], &["pull", &at]] {
            let finished = burgeon.run(command);
            let says_so = ["certificate is not trusted", "SSL_CERT_FILE"];
            let all = says_so.iter().all(|said| finished.stderr.contains(said));
            assert!(finished.code == Some(5) && all, "{command:?}: {finished:#?}");
        }
    }
    fs::write(&hosts, format!("127.0.0.1 {HOST} other.test\n{known}")).unwrap();
    let other = at.replace(HOST, "other.test");
    believing.fails(&["pull", &other], 5, "certificate is not trusted");
    // Not encrypted, because somebody says so: the registry takes no such thing.
    let plain = at.replace("oci://", "oci+http://");
    let finished = believing.run(&["pull", &plain]);
    assert_ne!(finished.code, Some(0), "{finished:?}");
}

#[test]
fn a_password_is_not_sent_to_a_token_realm_without_encryption() {
    let space = Space::new("realm");
    let _hosts = named_host(&space);
    let made = Certificate::new(&space.path("certificate"), HOST).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let realm = format!("http://{}/token", listener.local_addr().unwrap());
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        for client in listener.incoming() {
            let lines = BufReader::new(client.unwrap()).lines().map_while(Result::ok);
            let _ = tell.send(lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>());
        }
    });
    let options = RegistryOptions {
        realm: Some(&realm),
        certificate: Some((&made.certificate, &made.key)),
        ..RegistryOptions::default()
    };
    let registry = Registry::with(&space.path("registry"), options).unwrap();
    let host = format!("{HOST}:{}", registry.address().port());
    for secret in [r#""auth": "dXNlcjpodW50ZXIy""#, r#""identitytoken": "hunter3""#] {
        let burgeon = Burgeon::with_state(PROGRAM, space.path("state"))
            .env("DOCKER_AUTH_CONFIG", format!(r#"{{"auths": {{"{host}": {{{secret}}}}}}}"#))
            .env("SSL_CERT_FILE", &made.authority);
        let finished = burgeon.run(&["pull", &format!("oci://{host}/app:1")]);
        let heads: Vec<_> = told.try_iter().flatten().collect();
        assert!(heads.is_empty(), "the realm was asked: {heads:?}");
        assert!(finished.code != Some(0), "{finished:#?}");
        let says_so = format!("to go to {}, unencrypted", realm.trim_end_matches("/token"));
        assert!(finished.stderr.contains(&says_so), "{says_so}: {finished:#?}");
    }
}

#[test]
fn without_an_answer_of_the_registry_the_image_that_is_here_will_do() {
    let space = Space::new("pull");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let proxy = Proxy::new(registry.address(), 1).unwrap();
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let publish = |text: &str| {
        layout.change(|root| fs::write(root.join("text"), text).unwrap()).unwrap();
        let from = format!("oci:{}:latest", layout.folder().display());
        let to = format!("docker://{}/app:1", registry.address());
        skopeo_copy(&["--dest-tls-verify=false"], &from, &to).unwrap();
    };
    let (source, at) = (format!("oci://{}/app:1", proxy.address()), space.make_folder("at"));
    let target = at.to_str().unwrap();
    let mount = |policy: &str| {
        ["mount", &source, target, "--read-only", "--pull", policy].map(str::to_owned)
    };
    let is = |policy: &str, text: &str| {
        let finished = burgeon.run(&mount(policy));
        assert_eq!(finished.code, Some(0), "{policy}: {finished:#?}");
        assert_eq!(fs::read_to_string(at.join("text")).unwrap(), text, "{policy}");
        burgeon.ok(&["umount", target]);
        finished.stderr
    };
    let fails = |policy: &str, code| {
        let finished = burgeon.run(&mount(policy));
        assert_eq!(finished.code, Some(code), "{policy}: {finished:#?}");
    };
    publish("old");
    fails("never", 3);
    assert_eq!(proxy.requests(), 0);
    assert_eq!(is("missing", "old"), "");
    publish("new");
    for unanswered in [Fault::Status(503), Fault::Reset] {
        proxy.spoil(1000, &[unanswered]);
        let note = is("newer", "old");
        assert!(note.contains("using the local image sha256:") && note.contains(" ago"), "{note}");
    }
    fails("always", 5);
    for (answer, code) in [(401, 5), (403, 5), (404, 3)] {
        proxy.spoil(1000, &[Fault::Status(answer)]);
        fails("newer", code);
    }
    let asked = proxy.requests();
    is("missing", "old");
    is("never", "old");
    assert_eq!(proxy.requests(), asked);
    proxy.spoil(0, &[]);
    assert_eq!(is("newer", "new"), "");
    assert_eq!(is("never", "new"), "");
    // The record of a tag is removed with the image.
    let tags = || fs::read_dir(burgeon.state().join("tags")).unwrap().count();
    burgeon.ok(&["gc"]);
    assert_eq!(tags(), 1);
    burgeon.ok(&["rm", &source]);
    burgeon.ok(&["gc"]);
    assert_eq!(tags(), 0);
    fails("never", 3);
}
