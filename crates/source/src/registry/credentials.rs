//! Users, passwords and identity tokens for registries, read from the files of other programs:
//! Docker's `config.json` and its credential helpers, `auth.json` of Podman and Skopeo.
//!
//! ```text
//!   command: DOCKER_AUTH_CONFIG, config.json, helper, auth.json, kubelet's plugins
//!            ──► Access: for one registry
//!   daemon:  credentials of the request; if refused or absent, the same places as the command,
//!            from its own environment
//!   sandboxed process: credentials of the request; then those that another process returns
//! ```
//! A damaged file or a missing helper is no failure if no login is needed: the caller gets the
//! error and decides.

use std::{
    env,
    io::Read,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use burgeon_block::{Error, ErrorKind, Result};
use docker_credential::{
    CredentialRetrievalError as Failed, DockerCredential, get_credential_from_reader,
};
use serde_json::{Map, Value, json};

use super::{
    Name, helper,
    hosts::{self, Hosts},
    kubelet,
};
use crate::{
    Access,
    opening::{Manner, opened_now},
};

/// Longest configuration that is read, in bytes.
const CONFIG_MAX: u64 = 1 << 20;

/// `None` if there are no credentials, which is not an error.
type Found = std::result::Result<Option<DockerCredential>, String>;

/// Asks another process for the credentials of a registry; the result holds nothing else.
pub type AskForCredentials = Box<dyn Fn(&Name) -> Result<Access> + Send + Sync>;

static ASK: OnceLock<AskForCredentials> = OnceLock::new();

/// Makes `ask` find the credentials from now on, in a process that cannot open the files that hold
/// them. Only the first call has an effect.
pub fn ask_for_credentials_by(ask: AskForCredentials) {
    let _ = ASK.set(ask);
}

impl Access {
    /// Only the settings for the registry of `name`: those known, or else those that Docker,
    /// Podman or their helpers keep for this user. Blocks on a helper. An error in finding
    /// credentials is reported when a login fails for lack of them.
    pub fn for_registry(&self, name: &Name) -> Result<Self> {
        let find = |name: &Name| find(name, self).unwrap_or_default();
        let hosts = hosts::of(name)?;
        let others = others(name, hosts.as_ref()).map(|other| (find(&other), other));
        let logins = others.chain([(find(name), name.clone())]);
        Ok(with_hosts(logins_at(logins), hosts))
    }

    /// The known settings for the registry of `name`.
    pub fn given_for_registry(&self, name: &Name) -> Result<Self> {
        let given = |name: &Name| given(name, self).unwrap_or_default();
        let hosts = hosts::of(name)?;
        let others = others(name, hosts.as_ref()).map(|other| (given(&other), other));
        let logins = others.chain([(given(name), name.clone())]);
        Ok(with_hosts(logins_at(logins), hosts))
    }

    /// Only the settings that Docker, Podman or their helpers keep for this user and the registry
    /// of `name`. Blocks on a helper. Without any, an error names the fault of the known
    /// settings or of the files of other programs.
    pub fn kept_for_registry(&self, name: &Name) -> Result<Self> {
        match look_up(name, true)? {
            None => given(name, self).map(|_| Self::default()),
            kept => Ok(login_at(name, kept)),
        }
    }
}

/// The settings for a login at the registry of `name`.
fn login_at(name: &Name, credentials: Option<DockerCredential>) -> Access {
    logins_at([(credentials, name.clone())])
}

/// The settings for logins, each at its own registry.
fn logins_at(logins: impl IntoIterator<Item = (Option<DockerCredential>, Name)>) -> Access {
    let mut auths = Map::new();
    for (credentials, name) in logins {
        let entry = match credentials {
            None => continue,
            Some(DockerCredential::UsernamePassword(user, password)) => {
                json!({ "username": user, "password": password })
            }
            Some(DockerCredential::IdentityToken(token)) => json!({ "identitytoken": token }),
        };
        auths.insert(name.registry().to_owned(), entry);
    }
    match auths.is_empty() {
        true => Access::default(),
        false => Access::of_registries(json!({ "auths": auths }).to_string()),
    }
}

/// The image `name` at the other hosts that serve it.
fn others(name: &Name, hosts: Option<&Hosts>) -> impl Iterator<Item = Name> {
    let hosts = hosts.into_iter().flat_map(|hosts| &hosts.hosts);
    let other = hosts.filter_map(|host| host.name(name));
    other.filter(|other| other.registry() != name.registry()).collect::<Vec<_>>().into_iter()
}

fn with_hosts(access: Access, hosts: Option<Hosts>) -> Access {
    match hosts.and_then(|hosts| serde_json::to_string(&hosts).ok()) {
        Some(hosts) => access.with_hosts(hosts),
        None => access,
    }
}

/// True if the login of `asked` may be needed for an image of `named`: its registry or a mirror.
pub fn serves(named: &Name, asked: &Name) -> bool {
    named.registry() == asked.registry()
        || hosts::of(named).is_ok_and(|hosts| {
            others(named, hosts.as_ref()).any(|other| other.registry() == asked.registry())
        })
}

/// The credentials in `access` for the registry of `name`.
pub(super) fn given(name: &Name, access: &Access) -> Result<Option<DockerCredential>> {
    let Some(config) = access.registries() else { return Ok(None) };
    let registry = name.registry();
    understood(registry, configured(config.as_bytes(), registry))
}

/// The credentials in this process's environment for the registry of `name`.
/// None that a registry has just refused are used again.
pub(super) async fn own(name: &Name, is_refused: bool) -> Result<Option<DockerCredential>> {
    let name = name.clone();
    crate::blocking(move || look_up(&name, is_refused)).await
}

/// The credentials in this process's environment for the registry of `name`, or those of kubelet's
/// plugins. Blocks on a helper or a plugin.
fn look_up(name: &Name, is_refused: bool) -> Result<Option<DockerCredential>> {
    if let Some(ask) = ASK.get() {
        return given(name, &ask(name)?);
    }
    let registry = name.registry();
    match understood(registry, search(registry)) {
        Ok(Some(found)) => Ok(Some(found)),
        nothing => match kubelet::credentials(name, is_refused) {
            Ok(Some(found)) => Ok(Some(found)),
            Ok(None) => nothing,
            // The first fault is that of the place that is searched first.
            Err(why) => nothing.and_then(|_| understood(registry, Err(why))),
        },
    }
}

/// The credentials for the registry of `name`: from `access`, else from this process's
/// environment.
fn find(name: &Name, access: &Access) -> Result<Option<DockerCredential>> {
    match given(name, access)? {
        None => look_up(name, false),
        given => Ok(given),
    }
}

fn understood(registry: &str, found: Found) -> Result<Option<DockerCredential>> {
    found.map_err(|why| {
        let what = format!(
            "cannot get the credentials for {registry}: {why}; mend that, or log in again with docker login"
        );
        Error::new(ErrorKind::Invalid, what)
    })
}

/// Searches Docker's file first. Reports an error in one file only if neither has credentials.
fn search(registry: &str) -> Found {
    let mut wrong = None;
    for path in [docker_config(), podman_config()].into_iter().flatten() {
        let Ok(file) = opened_now(&path, Manner::Stored) else { continue };
        let mut config = Vec::new();
        if file.take(CONFIG_MAX).read_to_end(&mut config).is_err() {
            continue;
        }
        match configured(&config, registry) {
            Ok(Some(found)) => return Ok(Some(found)),
            Ok(None) => {}
            Err(why) => {
                wrong.get_or_insert(format!("{}: {why}", path.display()));
            }
        }
    }
    wrong.map_or(Ok(None), Err)
}

fn docker_folder() -> Option<PathBuf> {
    let home = || Some(Path::new(&env::var_os("HOME")?).join(".docker"));
    env::var_os("DOCKER_CONFIG").map(PathBuf::from).or_else(home)
}

fn docker_config() -> Option<PathBuf> {
    Some(docker_folder()?.join("config.json"))
}

/// The files that a process with this environment may read a login from.
pub fn login_files() -> Vec<PathBuf> {
    let other = match env::var_os("REGISTRY_AUTH_FILE") {
        Some(path) => vec![Some(path.into())],
        None => vec![runtime_config(), docker_folder().map(|it| it.join("containers/auth.json"))],
    };
    let all = [docker_config()].into_iter().chain(other).flatten();
    all.filter(|path| path.is_absolute()).collect()
}

fn runtime_config() -> Option<PathBuf> {
    Some(Path::new(&env::var_os("XDG_RUNTIME_DIR")?).join("containers/auth.json"))
}

/// The file that `podman login` and `skopeo login` write.
fn podman_config() -> Option<PathBuf> {
    if let Some(path) = env::var_os("REGISTRY_AUTH_FILE") {
        return Some(path.into());
    }
    let runtime = runtime_config()?;
    if runtime.is_file() {
        Some(runtime)
    } else {
        Some(docker_folder()?.join("containers/auth.json"))
    }
}

/// The credentials in `config` for `registry`: from the helper for this registry, then from
/// `config` itself, then from the helper for all others. The library is given no helper: it would
/// run it without bounds.
fn configured(config: &[u8], registry: &str) -> Found {
    // Quotes nothing of the file: it could be a secret.
    let damaged = |error: serde_json::Error| {
        format!("the file is damaged (line {}, column {})", error.line(), error.column())
    };
    let mut config: Map<String, Value> = serde_json::from_slice(config).map_err(damaged)?;
    let helpers = config.remove("credHelpers").unwrap_or_default();
    let store = config.remove("credsStore").unwrap_or_default();
    if let Some(name) = helpers[registry].as_str().filter(|name| !name.is_empty()) {
        return helper::credentials(name, registry);
    }
    let plain = Value::Object(config).to_string();
    match get_credential_from_reader(plain.as_bytes(), registry) {
        Ok(credential) => return Ok(Some(credential)),
        Err(Failed::NoCredentialConfigured | Failed::ConfigReadError) => {}
        Err(error) => return Err(error.to_string()),
    }
    match store.as_str().filter(|name| !name.is_empty()) {
        Some(name) => helper::credentials(name, registry),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::{DockerCredential, configured};

    #[test]
    fn configured_credentials_are_found_and_helper_names_are_checked() {
        let config =
            br#"{"auths": {"r.example": {"auth": "dXNlcjpodW50ZXIy"}}, "credsStore": "a/b"}"#;
        let found = configured(config, "r.example").unwrap();
        let expected = DockerCredential::UsernamePassword("user".into(), "hunter2".into());
        assert_eq!(found, Some(expected));
        assert!(configured(config, "other.example").unwrap_err().contains("not a name"));
        assert_eq!(configured(b"{}", "r.example"), Ok(None));
        let why = configured(br#"{"auths": {"r.example": {"auth": "hunter2" "#, "r.example");
        let why = why.unwrap_err();
        assert!(why.contains("damaged (line 1") && !why.contains("hunter2"), "{why}");
    }
}
