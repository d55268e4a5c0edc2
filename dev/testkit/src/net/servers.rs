//! Real servers on loopback, each on a port of its own and gone when dropped.

use std::{
    fs,
    io::{BufReader, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use super::head::Head;
use crate::{space::base, wait_until};

/// How long a server may take to listen: Python on a busy machine.
const START: Duration = Duration::from_secs(60);
/// How often another port is tried, should somebody take the free one first.
const TRIES: usize = 5;
/// The S3 server: `moto`, from PyPI, because Debian 12 has none.
const MOTO: [&str; 3] = ["moto[s3]==5.1.22", "flask==3.1.2", "flask-cors==6.0.1"];

/// A process that listens.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    /// Starts what `command` makes for a free port, and waits until it listens there.
    fn start(name: &str, mut command: impl FnMut(u16) -> Result<Command>) -> Result<Self> {
        for _ in 0..TRIES {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let mut command = command(port)?;
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
            let mut server = Self { child, address };
            let listens = wait_until(START, || {
                let ended = server.child.try_wait().is_ok_and(|status| status.is_some());
                ended || TcpStream::connect(address).is_ok()
            });
            if listens && server.child.try_wait()?.is_none() {
                return Ok(server);
            }
        }
        bail!("{name} does not listen on any port: start it by hand to see why")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that it has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// nginx, serving a folder.
pub struct WebServer {
    server: Server,
    folder: PathBuf,
}

impl WebServer {
    /// Serves the files below `files`; configuration and logs go to the new folder `own`.
    pub fn nginx(files: &Path, own: &Path) -> Result<Self> {
        fs::create_dir_all(own)?;
        let (files, shown) = (files.canonicalize()?, own.canonicalize()?);
        let server = Server::start("nginx", |port| {
            let (files, own) = (files.display(), shown.display());
            let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
                .map(|kind| format!("{kind}_temp_path {own}/{kind};\n"))
                .concat();
            // One process, with the rights of the test: the folder is the test's own.
            let text = format!(
                "daemon off; master_process off; pid {own}/pid; error_log {own}/error.log;\n\
                 events {{}}\n\
                 http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port}; root {files}; }} }}\n"
            );
            let config = shown.join("nginx.conf");
            fs::write(&config, text)?;
            let mut command = Command::new("nginx");
            let path = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{path}:/usr/sbin"));
            command.arg("-p").arg(&shown).arg("-c").arg(&config);
            Ok(command)
        })?;
        Ok(Self { server, folder: own.to_owned() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// What it has complained about.
    pub fn errors(&self) -> String {
        fs::read_to_string(self.folder.join("error.log")).unwrap_or_default()
    }
}

/// A registry of images, `docker-registry`, without encryption.
pub struct Registry {
    server: Server,
}

impl Registry {
    /// Starts an empty one that keeps what it has in the new folder `own`. With `passwords`, a
    /// file as `htpasswd -B` makes it, it wants to be logged in to.
    pub fn start(own: &Path, passwords: Option<&Path>) -> Result<Self> {
        fs::create_dir_all(own)?;
        let own = own.canonicalize()?;
        let server = Server::start("docker-registry", |port| {
            let folder = own.display();
            let auth = passwords.map_or(String::new(), |path| {
                format!("auth: {{htpasswd: {{realm: test, path: {}}}}}\n", path.display())
            });
            let text = format!(
                "version: 0.1\nlog: {{level: error}}\n{auth}\
                 storage: {{filesystem: {{rootdirectory: {folder}}}}}\n\
                 http: {{addr: \"127.0.0.1:{port}\"}}\n"
            );
            let config = own.join("config.yml");
            fs::write(&config, text)?;
            let mut command = Command::new("docker-registry");
            command.arg("serve").arg(&config);
            Ok(command)
        })?;
        Ok(Self { server })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }
}

/// An S3 server with one empty bucket, `bucket`. It keeps everything in memory.
pub struct S3 {
    server: Server,
}

impl S3 {
    /// Starts it.
    pub fn start() -> Result<Self> {
        let modules = moto()?;
        let server = Server::start("moto", |port| {
            let mut command = Command::new("python3");
            command.env("PYTHONPATH", &modules).args(["-m", "moto.server", "-H", "127.0.0.1"]);
            command.arg("-p").arg(port.to_string());
            Ok(command)
        })?;
        let s3 = Self { server };
        let put = "PUT /bucket HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\
                   authorization: AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request\r\n\
                   connection: close\r\n\r\n";
        let mut stream = TcpStream::connect(s3.address())?;
        stream.write_all(put.as_bytes())?;
        let head = Head::read(&mut BufReader::new(stream))?;
        match head {
            Some(head) if head.second() == "200" => Ok(s3),
            head => bail!("the S3 server made no bucket: {head:?}"),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// The environment of a program that uses it, by way of `address`.
    pub fn environment(address: SocketAddr) -> [(&'static str, String); 4] {
        [
            ("AWS_ENDPOINT_URL", format!("http://{address}")),
            ("AWS_ACCESS_KEY_ID", "test-id".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test-secret".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
    }
}

/// The folder with the server's modules. The first call installs them from PyPI; they are kept.
fn moto() -> Result<PathBuf> {
    let base = base();
    fs::create_dir_all(&base)?;
    let lock = fs::File::create(base.join("moto.lock"))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
    let kept = base.join("moto-5.1");
    let complete = kept.join("complete");
    if complete.exists() {
        return Ok(kept);
    }
    let mut install = Command::new("python3");
    install
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"])
        .arg(&kept)
        .args(MOTO);
    let output = install.output().context("cannot run python3: install python3-pip")?;
    if !output.status.success() {
        bail!("{install:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    fs::write(complete, "")?;
    Ok(kept)
}
