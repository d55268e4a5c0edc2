//! An image in a registry, by the OCI distribution protocol.
//!
//! The library gets tokens and knows how images are named. Documents and blobs are asked for here,
//! because here they have a bound, and a body that breaks off goes on.

use std::{
    io::Read,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use oci_client::{
    Client as Library, Reference, RegistryOperation,
    client::{ClientConfig, ClientProtocol},
    errors::OciDistributionError,
    secrets::RegistryAuth,
};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url, header::ACCEPT};

use crate::{
    credentials::credentials, digest::Digest, document::DOCUMENT_MAX, http, source::Wanted,
};

/// How long logging in may take, all of it.
const LOGIN_MAX: Duration = Duration::from_secs(60);

const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// A repository.
#[derive(Clone)]
pub(crate) struct Registry(Arc<Inner>);

struct Inner {
    reference: Reference,
    /// With a slash at the end.
    base: Url,
    client: Client,
    library: Library,
    credentials: RegistryAuth,
    /// What requests are sent with; `None` before the first.
    login: Mutex<Option<Login>>,
}

#[derive(Clone)]
enum Login {
    Anonymous,
    Basic(String, String),
    Token(String),
}

impl Registry {
    /// The repository of `reference`. Nothing is sent yet.
    pub(crate) fn open(reference: &Reference, plain: bool) -> Result<Self> {
        let host = reference.resolve_registry();
        let scheme = if plain { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2/{}/", reference.repository());
        let base = Url::parse(&base).map_err(|error| {
            Error::with_source(ErrorKind::Invalid, format!("{host} is no registry"), error)
        })?;
        let client = http::client()?;
        let protocol = if plain { ClientProtocol::Http } else { ClientProtocol::Https };
        let config = ClientConfig {
            protocol,
            connect_timeout: Some(http::CONNECT_TIMEOUT),
            read_timeout: Some(http::SILENCE_MAX),
            ..ClientConfig::default()
        };
        let library = Library::try_from(config)
            .map_err(|error| failed(&format!("speak to {host}"), &error))?;
        let credentials = credentials(reference.registry())?;
        let (reference, login) = (reference.clone(), Mutex::new(None));
        Ok(Self(Arc::new(Inner { reference, base, client, library, credentials, login })))
    }

    /// An index or manifest, at most [`DOCUMENT_MAX`] bytes, with its digest.
    pub(crate) fn document(&self, wanted: &Wanted) -> Result<(Vec<u8>, Digest)> {
        let name = match wanted {
            Wanted::Digest(digest) => digest.to_string(),
            Wanted::Tag(tag) => tag.clone(),
            Wanted::Only => "latest".to_owned(),
        };
        let what = format!("read {}", self.0.reference);
        let mut tries = 0;
        // A document is short: where it breaks off, it is asked for anew.
        let bytes = loop {
            let mut answer = Some(self.get(&what, &format!("manifests/{name}"), 0)?);
            let broke_off = || {
                let what = format!("cannot {what}: the answer broke off");
                Error::new(ErrorKind::Unavailable, what)
            };
            let body = http::Body::new(what.clone(), |_| answer.take().ok_or_else(broke_off))?;
            let mut bytes = Vec::new();
            match body.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes) {
                Ok(_) => break bytes,
                Err(_) if tries < http::RETRIES => http::pause(tries),
                Err(error) => return Err(ours(&what, error)),
            }
            tries += 1;
        };
        if bytes.len() as u64 > DOCUMENT_MAX {
            let why = format!("its manifest has more than {DOCUMENT_MAX} bytes");
            return Err(Error::new(ErrorKind::Corrupt, format!("cannot {what}: {why}")));
        }
        let digest = Digest::of(&bytes);
        match wanted {
            Wanted::Digest(wanted) if *wanted != digest => {
                let why = format!("the registry gave {digest} instead");
                Err(Error::new(ErrorKind::Corrupt, format!("cannot {what}: {why}")))
            }
            _ => Ok((bytes, digest)),
        }
    }

    /// The bytes of a blob, not yet checked.
    pub(crate) fn blob(&self, digest: &Digest) -> Result<impl Read + Send + 'static> {
        let (this, path) = (self.clone(), format!("blobs/{digest}"));
        let what = format!("read {path} of {}", self.0.reference);
        http::Body::new(what.clone(), move |offset| this.get(&what, &path, offset))
    }

    /// Asks for `path` of the repository, from `offset` on. Logs in where that is missing.
    fn get(&self, what: &str, path: &str, offset: u64) -> Result<Response> {
        let bad = |error| Error::with_source(ErrorKind::Invalid, format!("cannot {what}"), error);
        // Not joined: a digest has a colon, and would be a scheme.
        let url = Url::parse(&format!("{}{path}", self.0.base)).map_err(bad)?;
        let mut login = self.login(false)?;
        for fresh in [false, true] {
            let answer = http::send(what, || {
                let request = http::get(&self.0.client, &url).header(ACCEPT, MANIFESTS);
                login.apply(http::from(request, offset))
            })?;
            match answer.status() {
                StatusCode::UNAUTHORIZED if !fresh => login = self.login(true)?,
                status if status.is_success() => return Ok(answer),
                status => return Err(http::refused(what, status)),
            }
        }
        Err(http::refused(what, StatusCode::UNAUTHORIZED))
    }

    /// What to send requests with; asked for anew if it is `stale`.
    fn login(&self, stale: bool) -> Result<Login> {
        let inner = &self.0;
        let known = inner.login.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(login) = known.filter(|_| !stale) {
            return Ok(login);
        }
        let host = inner.reference.registry();
        let work = async {
            let mut tries = 0;
            let trying = async {
                loop {
                    let (reference, known) = (&inner.reference, &inner.credentials);
                    match inner.library.auth(reference, known, RegistryOperation::Pull).await {
                        Err(OciDistributionError::RequestError(_)) if tries < http::RETRIES => {
                            tokio::time::sleep(http::pause_len(tries)).await;
                            tries += 1;
                        }
                        answer => return answer,
                    }
                }
            };
            tokio::time::timeout(LOGIN_MAX, trying).await
        };
        let what = format!("log in to {host}");
        let token = match http::runtime().block_on(work) {
            Ok(answer) => answer.map_err(|error| failed(&what, &error))?,
            Err(_) => {
                let why = format!("it takes more than {} s", LOGIN_MAX.as_secs());
                return Err(Error::new(ErrorKind::Unavailable, format!("cannot {what}: {why}")));
            }
        };
        let login = match (token, &inner.credentials) {
            (Some(token), _) => Login::Token(token),
            (None, RegistryAuth::Basic(user, password)) => {
                Login::Basic(user.clone(), password.clone())
            }
            (None, _) => Login::Anonymous,
        };
        *inner.login.lock().unwrap_or_else(PoisonError::into_inner) = Some(login.clone());
        Ok(login)
    }
}

impl Login {
    fn apply(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::Anonymous => request,
            Self::Basic(user, password) => request.basic_auth(user, Some(password)),
            Self::Token(token) => request.bearer_auth(token),
        }
    }
}

/// The library's error as ours; it may quote the server at length.
fn failed(what: &str, error: &OciDistributionError) -> Error {
    let (kind, why) = match error {
        OciDistributionError::AuthenticationFailure(_)
        | OciDistributionError::UnauthorizedError { .. } => (
            ErrorKind::Unavailable,
            "user or password are refused: log in with docker login or skopeo login".to_owned(),
        ),
        OciDistributionError::RequestError(error) => {
            let mut cause: &dyn std::error::Error = error;
            while let Some(deeper) = cause.source() {
                cause = deeper;
            }
            (ErrorKind::Unavailable, cause.to_string())
        }
        error => (ErrorKind::Unavailable, error.to_string().chars().take(200).collect()),
    };
    Error::new(kind, format!("cannot {what}: {why}"))
}

/// The error that a body ended with.
pub(crate) fn ours(what: &str, error: std::io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => Error::io(format!("cannot {what}"), error),
    }
}
