//! The static program where there is nothing else: no library, no resolver's configuration but
//! `resolv.conf`, no certificates but one. It resolves a name by DNS and speaks TLS.
//!
//! `make try-tarball` runs this with the program of the tarball, which `BURGEON_STATIC` names.
//! Needs root, and the Debian packages docker-registry and openssl.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    net::UdpSocket,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use testkit::{Certificate, Registry, RegistryOptions, Rng, Space, copy_program};

const HOST: &str = "registry.static.test";
/// The name server: an address of this machine that nobody else uses.
const NAME_SERVER: &str = "127.77.53.1";
/// The type of an IPv4 address, in a question.
const TYPE_A: [u8; 2] = [0, 1];

/// Answers questions of DNS: [`HOST`] is this machine, other names are none.
fn serve_names() {
    let socket = UdpSocket::bind((NAME_SERVER, 53)).unwrap();
    thread::spawn(move || {
        let mut question = [0; 512];
        while let Ok((len, from)) = socket.recv_from(&mut question) {
            if let Some(answer) = answer(&question[..len]) {
                let _ = socket.send_to(&answer, from);
            }
        }
    });
}

/// A head of 12 bytes; labels, each after its length, up to an empty one; type and class.
fn answer(message: &[u8]) -> Option<Vec<u8>> {
    let (head, rest) = message.split_at_checked(12)?;
    let end = rest.iter().position(|byte| *byte == 0)? + 1;
    let question = rest.get(..end + 4)?;
    let expected: Vec<u8> = HOST
        .split('.')
        .flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat())
        .collect();
    let is_known = question[..end - 1].eq_ignore_ascii_case(&expected);
    let is_address = is_known && question[end..end + 2] == TYPE_A;
    let flags = if is_known { [0x81, 0x80] } else { [0x81, 0x83] };
    let counts = [0, 1, 0, u8::from(is_address), 0, 0, 0, 0];
    let mut answer = [&head[..2], &flags, &counts, question].concat();
    if is_address {
        // The name of the question, type, class, a minute to live, four bytes.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 1]);
    }
    Some(answer)
}

/// A root with the program, and little else.
struct Root(PathBuf);

impl Root {
    fn new(space: &Space, authority: &Path) -> Self {
        let program = std::env::var_os("BURGEON_STATIC");
        let program = program.expect("BURGEON_STATIC names a static program: `make try-tarball`");
        let root = space.make_folder("root");
        copy_program(Path::new(&program), &root.join("burgeon"));
        for folder in ["dev", "proc", "etc", "tree"] {
            fs::create_dir(root.join(folder)).unwrap();
        }
        fs::write(root.join("dev/null"), "").unwrap();
        fs::write(root.join("etc/resolv.conf"), format!("nameserver {NAME_SERVER}\n")).unwrap();
        fs::copy(authority, root.join("authority.pem")).unwrap();
        fs::write(root.join("tree/data"), Rng::new(1).bytes(600_000)).unwrap();
        Self(root)
    }

    fn run(&self, authority: &str, arguments: &[&str]) -> Output {
        // The program starts itself anew by /proc/self/exe, with /dev/null as a stream.
        let script = r#"mount -t proc proc "$0/proc" && mount --bind /dev/null "$0/dev/null" &&
            exec chroot "$0" /burgeon "$@""#;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script]).arg(&self.0);
        command.args(arguments).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("HOME", "/").env("BURGEON_CONFIG", "none").env("SSL_CERT_FILE", authority);
        command.output().unwrap()
    }

    #[track_caller]
    fn ok(&self, arguments: &[&str]) {
        let output = self.run("/authority.pem", arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    #[track_caller]
    fn fails(&self, authority: &str, arguments: &[&str], says: &str) {
        let output = self.run(authority, arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{arguments:?}: {said}");
    }
}

#[test]
fn the_static_program_resolves_names_and_speaks_tls_in_an_empty_chroot() {
    let space = Space::new("static");
    serve_names();
    let made = Certificate::new(&space.path("certificate"), HOST).unwrap();
    let options = RegistryOptions {
        certificate: Some((&made.certificate, &made.key)),
        ..RegistryOptions::default()
    };
    let registry = Registry::with(&space.path("registry"), options).unwrap();
    let port = registry.address().port();
    let root = Root::new(&space, &made.authority);
    let image = format!("oci://{HOST}:{port}/app:1");
    let [first, second] = [["--state-dir", "/first"], ["--state-dir", "/second"]];
    root.ok(&[&first[..], &["build", "/tree", "app"]].concat());
    root.ok(&[&first[..], &["push", "app", &image]].concat());
    root.ok(&[&second[..], &["pull", &image]].concat());

    // By that name server, and by that certificate.
    let unknown = image.replace(HOST, "other.static.test");
    root.fails("/authority.pem", &[&second[..], &["pull", &unknown]].concat(), "other.static.test");
    let stranger = Certificate::new(&space.path("stranger"), HOST).unwrap();
    fs::copy(&stranger.authority, root.0.join("stranger.pem")).unwrap();
    let pull = [&second[..], &["pull", &image]].concat();
    root.fails("/stranger.pem", &pull, "certificate is not trusted");
}
