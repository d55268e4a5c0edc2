//! The hosts that serve a registry, from containerd's `hosts.toml`.
//!
//! ```text
//!   DIR/r.example_5000_/hosts.toml, DIR/r.example:5000/…, DIR/_default/…   the first that exists
//!     └► Hosts: mirrors in the order of the file, the server last ─► Access ─► daemon, child
//! ```
//! Only commands read the files. Processes in a sandbox get the hosts with the login, since headers
//! and keys are secrets; `ca` and `client` files are replaced by their contents.
//!
//! Invariants: files have bounds; an unknown or unsupported key is an error that names it; no error
//! repeats a header's value
//! or a key.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use burgeon_block::{Error, ErrorKind, Result};
use reqwest::{
    Url,
    header::{HeaderName, HeaderValue},
};
use serde::{Deserialize, Serialize};
use toml::de::{DeTable, DeValue};

use super::Name;
use crate::{
    opening::{Manner, opened_now},
    web::{ClientPem, Trust},
};

/// Longest `hosts.toml`, and longest `ca` file, in bytes.
const FILE_MAX: u64 = 256 << 10;
/// Most hosts, and most headers or `ca` files of each.
const HOSTS_MAX: usize = 32;
/// Longest hosts of one registry, as text, in bytes.
const ALL_MAX: usize = 1 << 20;

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Makes this process read the hosts of registries from `folder`. Only the first call has an
/// effect.
pub fn use_hosts_of(folder: PathBuf) {
    let _ = FOLDER.set(folder);
}

/// The hosts that serve one registry, in the order in which they are asked; the server is last.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Hosts {
    pub(super) registry: String,
    pub(super) hosts: Vec<Host>,
}

/// A host. `Debug` is for tests: headers may be secrets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Host {
    /// The root of the API, mostly `…/v2`, without a slash at the end.
    pub(super) root: String,
    pub(super) pull: bool,
    pub(super) resolve: bool,
    /// Lists of referrers, apart from [`Self::resolve`], which allows them, too.
    #[serde(default)]
    pub(super) referrers: bool,
    pub(super) headers: Vec<(String, String)>,
    pub(super) trust: Trust,
}

impl Host {
    /// The image `name` at this host.
    pub(super) fn name(&self, name: &Name) -> Option<Name> {
        let url = Url::parse(&self.root).ok()?;
        let host = match url.port() {
            Some(port) => format!("{}:{port}", url.host_str()?),
            None => url.host_str()?.to_owned(),
        };
        name.served_by(&host, url.scheme() == "http")
    }
}

/// The configured hosts for the registry of `name`; `None` without any.
pub(super) fn of(name: &Name) -> Result<Option<Hosts>> {
    FOLDER.get().map_or(Ok(None), |folder| read(folder, name))
}

fn read(folder: &Path, name: &Name) -> Result<Option<Hosts>> {
    let registry = name.registry();
    let escaped = registry.rsplit_once(':').map(|(host, port)| format!("{host}_{port}_"));
    let names = [escaped.as_deref(), Some(registry), Some("_default")];
    for one in names.into_iter().flatten() {
        let folder = folder.join(one);
        match fs::symlink_metadata(&folder) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            _ => {}
        }
        let path = folder.join("hosts.toml");
        let failed = |why: String| {
            let what = format!("cannot use {} for {registry}: {why}", path.display());
            Error::new(ErrorKind::Invalid, what)
        };
        let text = contents(&path).map_err(failed)?;
        let hosts = parse(&text, &folder, name).map_err(failed)?;
        return Ok(Some(Hosts { registry: registry.to_owned(), hosts }));
    }
    Ok(None)
}

fn contents(path: &Path) -> std::result::Result<String, String> {
    let file = opened_now(path, Manner::Stored)
        .map_err(|e| format!("{} cannot be opened: {e}", path.display()))?;
    let mut text = String::new();
    let read = file.take(FILE_MAX + 1).read_to_string(&mut text);
    read.map_err(|e| format!("{} cannot be read: {e}", path.display()))?;
    match text.len() as u64 > FILE_MAX {
        true => Err(format!("{} has more than {FILE_MAX} bytes", path.display())),
        false => Ok(text),
    }
}

type Parsed<T> = std::result::Result<T, String>;

fn parse(text: &str, folder: &Path, name: &Name) -> Parsed<Vec<Host>> {
    let table = DeTable::parse(text).map_err(|e| {
        let before = e.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        format!("line {}: {}", before.matches('\n').count() + 1, e.message())
    })?;
    let (mut mirrors, mut server) = (Vec::new(), None);
    for (key, value) in table.get_ref() {
        match (&**key.get_ref(), value.get_ref()) {
            ("host", DeValue::Table(hosts)) => mirrors.extend(hosts),
            ("host", _) => return Err("host is not a table: write [host.\"https://…\"]".to_owned()),
            ("server", value) => server = Some(string("server", value)?),
            _ => {}
        }
    }
    if mirrors.len() > HOSTS_MAX {
        return Err(format!("it has more than {HOSTS_MAX} hosts"));
    }
    // The parser sorts by name; the order of the file counts.
    mirrors.sort_by_key(|(key, _)| key.span().start);
    let mut hosts = Vec::new();
    for (url, value) in mirrors {
        let DeValue::Table(table) = value.get_ref() else {
            return Err(format!("host.{:?} is not a table", url.get_ref()));
        };
        hosts.push(host(url.get_ref(), table, folder, false)?);
    }
    let scheme = if name.is_plain() { "http" } else { "https" };
    let own = format!("{scheme}://{}", name.registry());
    hosts.push(host(server.unwrap_or(&own), table.get_ref(), folder, true)?);
    let length: usize = hosts.iter().flat_map(|host| &host.trust.ca).map(String::len).sum();
    match length > ALL_MAX {
        true => Err(format!("its ca files have more than {ALL_MAX} bytes")),
        false => Ok(hosts),
    }
}

fn host(url: &str, table: &DeTable<'_>, folder: &Path, is_server: bool) -> Parsed<Host> {
    let mut host = Host {
        root: String::new(),
        pull: true,
        resolve: true,
        referrers: true,
        headers: Vec::new(),
        trust: Trust::default(),
    };
    let mut overrides = false;
    for (key, value) in table {
        let (key, value) = (&**key.get_ref(), value.get_ref());
        match key {
            "server" | "host" if is_server => {}
            "capabilities" => {
                let all = strings(key, value)?;
                let known = ["pull", "resolve", "referrers", "push"];
                if let Some(other) = all.iter().find(|it| !known.contains(it)) {
                    let known = known.join(", ");
                    return Err(format!("unknown capability {other:?}: there are {known}"));
                }
                let [pull, resolve, referrers, _] = known.map(|one| all.contains(&one));
                (host.pull, host.resolve, host.referrers) = (pull, resolve, referrers);
            }
            "ca" => {
                for path in strings(key, value)? {
                    host.trust.ca.push(contents(&folder.join(path))?);
                }
            }
            "skip_verify" => host.trust.skip_verify = boolean(key, value)?,
            "override_path" => overrides = boolean(key, value)?,
            "dial_timeout" => host.trust.connect_ms = Some(milliseconds(string(key, value)?)?),
            "header" => host.headers = headers(value)?,
            "client" => host.trust.client = client(value, folder)?,
            "proxy" => {
                return Err("containerd ignores the key \"proxy\": remove it; HTTPS_PROXY in the \
                            environment names a proxy"
                    .to_owned());
            }
            _ => {
                let known =
                    "capabilities, ca, client, skip_verify, header, override_path, dial_timeout";
                return Err(format!("unknown key {key:?}: there are {known}"));
            }
        }
    }
    host.root = root(url, overrides)?;
    Ok(host)
}

/// The root of the API at `url`.
fn root(url: &str, overrides: bool) -> Parsed<String> {
    let with_scheme = match url.contains("://") {
        true => url.to_owned(),
        false => format!("https://{url}"),
    };
    // Not quoted: it could hold a password.
    let bad = || "a host is no URL such as https://mirror.example".to_owned();
    let parsed = Url::parse(&with_scheme).map_err(|_| bad())?;
    let is_plain_url = parsed.username().is_empty()
        && parsed.password().is_none()
        && parsed.query().is_none()
        && parsed.fragment().is_none()
        && parsed.has_host();
    if !is_plain_url || !matches!(parsed.scheme(), "http" | "https") {
        return Err(bad());
    }
    let root = parsed.as_str().trim_end_matches('/');
    Ok(match parsed.path() != "/" && (overrides || root.ends_with("/v2")) {
        true => root.to_owned(),
        false => format!("{root}/v2"),
    })
}

/// The certificate and key of a file, a list with one file, or a list with one pair of files, of
/// which the second may be `""`.
fn client(value: &DeValue<'_>, folder: &Path) -> Parsed<Option<ClientPem>> {
    let mut files = match value {
        DeValue::Array(all) if all.len() > 1 => {
            return Err("client has more than one certificate: keep the one of this host".into());
        }
        DeValue::Array(all) => match all.first().map(|one| one.get_ref()) {
            None => return Ok(None),
            Some(pair) => strings("client", pair)?,
        },
        value => strings("client", value)?,
    };
    files.retain(|file| !file.is_empty());
    let texts = files.iter().map(|file| contents(&folder.join(file)));
    let text = texts.collect::<Parsed<Vec<_>>>()?.join("\n");
    let named = || format!("no certificate with its key in {}", files.join(", "));
    ClientPem::new(text).map(Some).ok_or_else(named)
}

fn headers(value: &DeValue<'_>) -> Parsed<Vec<(String, String)>> {
    let DeValue::Table(table) = value else { return Err("header is not a table".to_owned()) };
    let mut headers = Vec::new();
    for (key, value) in table {
        let key = &**key.get_ref();
        for value in strings(key, value.get_ref())? {
            if HeaderName::try_from(key).is_err() || HeaderValue::from_str(value).is_err() {
                return Err(format!("the header {key:?} is not valid in HTTP"));
            }
            headers.push((key.to_owned(), value.to_owned()));
        }
    }
    match headers.len() > HOSTS_MAX {
        true => Err(format!("a host has more than {HOSTS_MAX} headers")),
        false => Ok(headers),
    }
}

fn string<'a>(key: &str, value: &'a DeValue<'_>) -> Parsed<&'a str> {
    value.as_str().ok_or_else(|| format!("{key} is not a string"))
}

fn boolean(key: &str, value: &DeValue<'_>) -> Parsed<bool> {
    value.as_bool().ok_or_else(|| format!("{key} is neither true nor false"))
}

/// A string, or an array of strings.
fn strings<'a>(key: &str, value: &'a DeValue<'_>) -> Parsed<Vec<&'a str>> {
    let DeValue::Array(array) = value else { return Ok(vec![string(key, value)?]) };
    if array.len() > HOSTS_MAX {
        return Err(format!("{key} has more than {HOSTS_MAX} values"));
    }
    array.iter().map(|value| string(key, value.get_ref())).collect()
}

/// A duration as Go writes it, with one unit.
fn milliseconds(text: &str) -> Parsed<u64> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000)];
    let parsed = units.into_iter().find_map(|(unit, factor)| {
        text.strip_suffix(unit)?.parse::<u32>().ok().map(|count| u64::from(count) * factor)
    });
    parsed.ok_or_else(|| format!("dial_timeout {text:?} is not a time such as \"1s\" or \"500ms\""))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::{FILE_MAX, Name, parse, read};

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap().unwrap()
    }

    #[test]
    fn hosts_keep_the_order_of_the_file_and_the_server_is_last() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.pem"), "authority").unwrap();
        let text = r#"
            server = "https://registry-1.docker.io"
            [host."http://z.example:30020"]
            capabilities = ["pull"]
            dial_timeout = "200ms"
            [host."https://a.example/proxy/"]
            ca = ["a.pem"]
            skip_verify = true
            header = { x-key = ["secret", "two"] }
            [host."https://b.example/own"]
            override_path = true
        "#;
        let docker = name("oci://docker.io/debian");
        let hosts = parse(text, folder.path(), &docker).unwrap();
        let roots: Vec<_> = hosts.iter().map(|host| host.root.as_str()).collect();
        let expected = [
            "http://z.example:30020/v2",
            "https://a.example/proxy/v2",
            "https://b.example/own",
            "https://registry-1.docker.io/v2",
        ];
        assert_eq!(roots, expected);
        assert!(hosts[0].pull && !hosts[0].resolve && hosts[1].resolve);
        assert_eq!(hosts[0].trust.connect_ms, Some(200));
        assert_eq!(hosts[1].trust.ca, ["authority"]);
        assert!(hosts[1].trust.skip_verify && !hosts[3].trust.skip_verify);
        assert_eq!(hosts[1].headers.len(), 2);
        assert!(hosts[3].headers.is_empty());
        let own = hosts[3].name(&docker).unwrap();
        assert_eq!(own, docker, "its credentials are those of docker.io");
    }

    #[test]
    fn a_faulty_file_is_named_without_its_secrets() {
        let folder = tempfile::tempdir().unwrap();
        let image = name("oci://r.example:5000/a");
        let dir = folder.path();
        assert!(read(dir, &image).unwrap().is_none());
        fs::create_dir_all(dir.join("_default")).unwrap();
        let file = dir.join("_default/hosts.toml");
        fs::write(dir.join("_default/empty.pem"), "hunter2").unwrap();
        for (text, said) in [
            ("[host.'https://m']\nmirror = true", "unknown key \"mirror\""),
            ("serve = 'https://m'", "unknown key \"serve\""),
            ("client = 'x.pem'", "x.pem cannot be opened"),
            ("client = [['empty.pem', '']]", "no certificate with its key in empty.pem"),
            ("client = ['a.pem', 'b.pem']", "more than one certificate"),
            ("proxy = 'http://hunter2'", "ignores the key \"proxy\""),
            ("capabilities = ['read']", "unknown capability \"read\""),
            ("\nserver = ", "line 2"),
            ("server = 'https://me:hunter2@m'", "no URL"),
            ("[header]\nx-key = \"hunter2\\u007f\"", "\"x-key\" is not valid"),
            ("ca = 'missing.pem'", "missing.pem cannot be opened"),
            (&format!("#{}", "x".repeat(FILE_MAX as usize)), "more than 262144 bytes"),
        ] {
            fs::write(&file, text).unwrap();
            let error = read(dir, &image).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains("_default/hosts.toml"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        // The registry's own folder comes before the default.
        for own in ["r.example:5000", "r.example_5000_"] {
            fs::create_dir(dir.join(own)).unwrap();
            let text = if own.contains('_') { "http://underscore" } else { "http://colon" };
            fs::write(dir.join(own).join("hosts.toml"), format!("server = '{text}'")).unwrap();
            let hosts = read(dir, &image).unwrap().unwrap().hosts;
            assert_eq!(hosts[0].root, format!("{text}/v2"));
        }
    }
}
