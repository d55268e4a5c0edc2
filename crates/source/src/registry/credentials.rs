//! Users and passwords of registries, and identity tokens, from where other programs keep them: `config.json` of
//! Docker and its credential helpers, `auth.json` of Podman and Skopeo.
//!
//! ```text
//!   command: DOCKER_AUTH_CONFIG, config.json, helper, auth.json ──► Access: for one registry
//!   daemon:  what came with the request; refused, or nothing: the same places, as its own
//!            environment has them
//! ```

use std::{sync::mpsc, thread, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};
pub(crate) use docker_credential::DockerCredential;
use docker_credential::{
    CredentialRetrievalError as Failed, get_credential, get_credential_from_reader,
    get_podman_credential,
};

use super::Name;
use crate::Access;

/// How long a credential helper may take: it may ask somebody.
const HELPER_MAX: Duration = Duration::from_secs(60);

type Found = std::result::Result<DockerCredential, Failed>;

/// What `access` holds for the registry of `name`.
pub(super) fn given(name: &Name, access: &Access) -> Result<Option<DockerCredential>> {
    let Some(config) = access.registries() else { return Ok(None) };
    let registry = name.registry();
    understood(registry, known(get_credential_from_reader(config.as_bytes(), registry)))
}

/// What this process's environment has for the registry of `name`.
pub(super) async fn own(name: &Name) -> Result<Option<DockerCredential>> {
    let name = name.clone();
    crate::blocking(move || look_up(&name)).await
}

/// What this process's environment has for the registry of `name`; waits for a helper.
fn look_up(name: &Name) -> Result<Option<DockerCredential>> {
    let registry = name.registry();
    let (send, receive) = mpsc::channel();
    let asked = registry.to_owned();
    thread::spawn(move || send.send(search(&asked)));
    let found = receive.recv_timeout(HELPER_MAX).map_err(|_| {
        let seconds = HELPER_MAX.as_secs();
        let why = format!("the credential helper does not answer within {seconds} s");
        Error::new(ErrorKind::Unavailable, format!("cannot log in to {registry}: {why}"))
    })?;
    understood(registry, found)
}

/// What opens the registry of `name`: what `access` holds, else what this process's environment has.
pub(crate) fn find(name: &Name, access: &Access) -> Result<Option<DockerCredential>> {
    match given(name, access)? {
        None => look_up(name),
        given => Ok(given),
    }
}

fn understood(
    registry: &str,
    found: Option<std::result::Result<DockerCredential, String>>,
) -> Result<Option<DockerCredential>> {
    found.transpose().map_err(|why| {
        let what = format!("the credentials for {registry} cannot be read: {why}; log in again");
        Error::new(ErrorKind::Invalid, what)
    })
}

/// Docker's first; `None` if nobody has any.
fn search(registry: &str) -> Option<std::result::Result<DockerCredential, String>> {
    [get_credential, get_podman_credential].into_iter().find_map(|get| known(get(registry)))
}

/// `None` where there are no credentials, which is no failure.
fn known(found: Found) -> Option<std::result::Result<DockerCredential, String>> {
    match found {
        Ok(credential) => Some(Ok(credential)),
        Err(Failed::ConfigNotFound | Failed::ConfigReadError | Failed::NoCredentialConfigured) => {
            None
        }
        // It says that there is none for this registry.
        Err(Failed::HelperFailure { stdout, .. }) if stdout.contains("credentials not found") => {
            None
        }
        // What it has printed could be a secret.
        Err(Failed::HelperFailure { helper, .. }) => Some(Err(format!("{helper} failed"))),
        Err(error) => Some(Err(error.to_string())),
    }
}
