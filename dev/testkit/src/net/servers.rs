//! Real servers on loopback, each on a port of its own and gone when dropped.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::wait_until;

/// Time limit for a server to listen, on a busy machine.
const START: Duration = Duration::from_secs(60);
/// Number of ports to try, in case somebody else takes the free one first.
const TRIES: usize = 5;

/// A process that listens.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    /// Starts the command that `command` makes for a free port, and waits until it listens there.
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
                .map(|kind| format!("{kind}_temp_path \"{own}/{kind}\";\n"))
                .concat();
            // One process, with the rights of the test: the folder is the test's own.
            let text = format!(
                "daemon off; master_process off; pid \"{own}/pid\"; error_log \"{own}/error.log\";\n\
                 events {{}}\n\
                 http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port}; root \"{files}\"; }} }}\n"
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

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Its complaints.
    pub fn errors(&self) -> String {
        fs::read_to_string(self.folder.join("error.log")).unwrap_or_default()
    }
}

/// A registry of images, `docker-registry`.
pub struct Registry {
    server: Server,
}

/// The properties of a registry.
#[derive(Clone, Copy, Default)]
pub struct RegistryOptions<'a> {
    /// A file as `htpasswd -B` makes it: it wants to be logged in to.
    pub passwords: Option<&'a Path>,
    /// It wants tokens, from this URL.
    pub realm: Option<&'a str>,
    /// It takes no writes.
    pub read_only: bool,
    /// Files with a certificate and its key: it encrypts.
    pub certificate: Option<(&'a Path, &'a Path)>,
    /// A file with an authority: it serves only clients with a certificate of it.
    pub clients_of: Option<&'a Path>,
}

impl Registry {
    /// Starts an empty one that stores its data in the new folder `own`, without encryption.
    /// With `passwords` it wants to be logged in to.
    pub fn start(own: &Path, passwords: Option<&Path>) -> Result<Self> {
        Self::with(own, RegistryOptions { passwords, ..RegistryOptions::default() })
    }

    /// Starts one that stores its data in the folder `own`.
    pub fn with(own: &Path, options: RegistryOptions<'_>) -> Result<Self> {
        fs::create_dir_all(own)?;
        let own = own.canonicalize()?;
        let server = Server::start("docker-registry", |port| {
            let (folder, read_only) = (own.display(), options.read_only);
            let mut auth = options.passwords.map_or(String::new(), |path| {
                format!(
                    "auth: {{htpasswd: {{realm: test, path: \"{}\"}}}}
",
                    path.display()
                )
            });
            if let (Some(realm), Some((certificate, _))) = (options.realm, options.certificate) {
                let signed_by = certificate.display();
                auth = format!(
                    "auth: {{token: {{realm: \"{realm}\", service: test, issuer: test, \
                     rootcertbundle: \"{signed_by}\"}}}}\n"
                );
            }
            let tls = options.certificate.map_or(String::new(), |(certificate, key)| {
                let (certificate, key) = (certificate.display(), key.display());
                let clients = options.clients_of.map_or(String::new(), |authority| {
                    format!(", clientcas: [\"{}\"]", authority.display())
                });
                format!(", tls: {{certificate: \"{certificate}\", key: \"{key}\"{clients}}}")
            });
            let text = format!(
                "version: 0.1\nlog: {{level: error}}\n{auth}\
                 storage: {{filesystem: {{rootdirectory: \"{folder}\"}}, \
                 maintenance: {{readonly: {{enabled: {read_only}}}}}}}\n\
                 http: {{addr: \"127.0.0.1:{port}\"{tls}}}\n"
            );
            let config = own.join("config.yml");
            fs::write(&config, text)?;
            let mut command = Command::new("docker-registry");
            command.arg("serve").arg(&config);
            Ok(command)
        })?;
        Ok(Self { server })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }
}
