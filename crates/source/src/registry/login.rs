//! Logging in: credentials become what requests are sent with.
//!
//! Invariants: one login at a time, whoever else needs one waits for it; credentials that came with
//! the request come first, those of this process's own environment when the registry refuses them,
//! because a password may be valid for hours only, and a mount lives longer.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use oci_client::{
    Client as Library, RegistryOperation,
    client::{ClientConfig, ClientProtocol},
    errors::OciDistributionError,
    secrets::RegistryAuth,
};
use reqwest::RequestBuilder;
use tokio::sync::Semaphore;

use super::{Name, credentials};
use crate::{Access, choose_cryptography, web};

/// How long logging in may take, all of it.
const LOGIN_MAX: Duration = Duration::from_secs(60);

/// The logins of a repository.
pub(super) struct Logins {
    operation: RegistryOperation,
    name: Name,
    access: Access,
    library: Library,
    /// Whoever logs in.
    turn: Semaphore,
    /// `None` before the first.
    known: Mutex<Option<Login>>,
}

/// What requests are sent with.
#[derive(Clone)]
pub(super) struct Login {
    /// Counts the logins.
    number: u64,
    with: With,
    /// Whether it was made with what came with the request.
    given: bool,
}

#[derive(Clone)]
enum With {
    Nothing,
    Password(String, String),
    Token(String),
}

impl Logins {
    pub(super) fn new(operation: RegistryOperation, name: &Name, access: &Access) -> Result<Self> {
        choose_cryptography();
        let config = ClientConfig {
            protocol: match name.is_plain() {
                true => ClientProtocol::Http,
                false => ClientProtocol::Https,
            },
            connect_timeout: Some(web::CONNECT_TIMEOUT),
            read_timeout: Some(web::SILENCE_MAX),
            ..ClientConfig::default()
        };
        let library = Library::try_from(config)
            .map_err(|error| failed(&format!("speak to {}", name.registry()), &error))?;
        let (name, access) = (name.clone(), access.clone());
        let (turn, known) = (Semaphore::new(1), Mutex::new(None));
        Ok(Self { operation, name, access, library, turn, known })
    }

    fn known(&self) -> MutexGuard<'_, Option<Login>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last login, or a new one: where there is none yet, or it is `refused`.
    pub(super) async fn now(&self, refused: Option<&Login>, retries: u32) -> Result<Login> {
        let good = |login: &Login| refused.is_none_or(|refused| refused.number != login.number);
        if let Some(login) = self.known().clone().filter(good) {
            return Ok(login);
        }
        let what = format!("log in to {}", self.name.registry());
        let ended = |_| Error::new(ErrorKind::Unavailable, format!("cannot {what}: it ends"));
        let _turn = self.turn.acquire().await.map_err(ended)?;
        // Somebody else may have done it meanwhile.
        if let Some(login) = self.known().clone().filter(good) {
            return Ok(login);
        }
        let made = tokio::time::timeout(LOGIN_MAX, self.make(&what, refused, retries));
        let login = made.await.map_err(|_| {
            let why = format!("it takes more than {} s", LOGIN_MAX.as_secs());
            Error::new(ErrorKind::Unavailable, format!("cannot {what}: {why}"))
        })??;
        *self.known() = Some(login.clone());
        Ok(login)
    }

    async fn make(&self, what: &str, refused: Option<&Login>, retries: u32) -> Result<Login> {
        let number = refused.map_or(0, |login| login.number + 1);
        let given = credentials::given(&self.name, &self.access)?;
        // A password is sent as it is, so that it was refused with the request.
        let is_used_up =
            refused.is_some_and(|login| login.given && matches!(login.with, With::Password(_, _)));
        let mut why = None;
        if let Some(given) = given.filter(|_| !is_used_up) {
            match self.try_with(what, &given, retries).await {
                Ok(with) => return Ok(Login { number, with, given: true }),
                Err(error) => why = Some(error),
            }
        }
        let own = credentials::own(&self.name).await;
        match (own, why) {
            // Nobody here knows better.
            (Ok(None) | Err(_), Some(why)) => Err(why),
            (Err(error), None) => Err(error),
            (Ok(own), _) => {
                let own = own.unwrap_or(RegistryAuth::Anonymous);
                let with = self.try_with(what, &own, retries).await?;
                Ok(Login { number, with, given: false })
            }
        }
    }

    async fn try_with(&self, what: &str, credentials: &RegistryAuth, retries: u32) -> Result<With> {
        let mut tries = 0;
        let token = loop {
            let reference = self.name.reference();
            match self.library.auth(reference, credentials, self.operation).await {
                Err(OciDistributionError::RequestError(error))
                    if tries < retries && !web::is_untrusted(&error) =>
                {
                    web::pause(tries).await;
                    tries += 1;
                }
                answer => break answer.map_err(|error| failed(what, &error))?,
            }
        };
        Ok(match (token, credentials) {
            (Some(token), _) => With::Token(token),
            (None, RegistryAuth::Basic(user, password)) => {
                With::Password(user.clone(), password.clone())
            }
            (None, _) => With::Nothing,
        })
    }
}

impl Login {
    pub(super) fn apply(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.with {
            With::Nothing => request,
            With::Password(user, password) => request.basic_auth(user, Some(password)),
            With::Token(token) => request.bearer_auth(token),
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
        OciDistributionError::RequestError(error) => (ErrorKind::Unavailable, web::why_not(error)),
        error => (ErrorKind::Unavailable, error.to_string().chars().take(200).collect()),
    };
    Error::new(kind, format!("cannot {what}: {why}"))
}
