//! Users and passwords of registries, from where other programs keep them: `config.json` of
//! Docker and its credential helpers, `auth.json` of Podman and Skopeo.

use std::{sync::mpsc, thread, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};
use docker_credential::{
    CredentialRetrievalError as Failed, DockerCredential, get_credential, get_podman_credential,
};
use oci_client::secrets::RegistryAuth;

/// How long a credential helper may take: it may ask somebody.
const HELPER_MAX: Duration = Duration::from_secs(60);

/// What `registry` is to be used with.
pub(crate) fn credentials(registry: &str) -> Result<RegistryAuth> {
    let (send, receive) = mpsc::channel();
    let name = registry.to_owned();
    thread::spawn(move || send.send(look_up(&name)));
    let found = receive.recv_timeout(HELPER_MAX).map_err(|_| {
        let seconds = HELPER_MAX.as_secs();
        let why = format!("the credential helper does not answer within {seconds} s");
        Error::new(ErrorKind::Unavailable, format!("cannot log in to {registry}: {why}"))
    })?;
    match found {
        None => Ok(RegistryAuth::Anonymous),
        Some(Ok(DockerCredential::UsernamePassword(user, password))) => {
            Ok(RegistryAuth::Basic(user, password))
        }
        Some(Ok(DockerCredential::IdentityToken(_))) => Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{registry} is logged in to with an identity token, which is not supported: \
                     log in with a user and a password or access token"
            ),
        )),
        Some(Err(why)) => Err(Error::new(
            ErrorKind::Invalid,
            format!("the credentials for {registry} cannot be read: {why}; log in again"),
        )),
    }
}

/// Docker's first; `None` if nobody has any.
fn look_up(registry: &str) -> Option<std::result::Result<DockerCredential, String>> {
    for get in [get_credential, get_podman_credential] {
        match get(registry) {
            Ok(credential) => return Some(Ok(credential)),
            Err(
                Failed::ConfigNotFound | Failed::ConfigReadError | Failed::NoCredentialConfigured,
            ) => {}
            // It says that there is none for this registry.
            Err(Failed::HelperFailure { stdout, .. })
                if stdout.contains("credentials not found") => {}
            // What it has printed could be a secret.
            Err(Failed::HelperFailure { helper, .. }) => {
                return Some(Err(format!("{helper} failed")));
            }
            Err(error) => return Some(Err(error.to_string())),
        }
    }
    None
}
