//! Logging in: turns credentials into the authorization of requests.
//!
//! Most anonymous reads need no login, and a login takes as many round trips as the rest of a
//! start. So a client without credentials sends its first request unauthenticated, and meanwhile
//! logs in anonymously in case that request is refused.
//!
//! Invariants: at most one login at a time, and others that need one wait for it, and for its error
//! if the registry is out of reach; credentials that
//! came with the request are tried first, those of this process's environment when the registry
//! refuses them, because a password may be valid for hours only, and a mount lives longer.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use docker_credential::DockerCredential;
use reqwest::{RequestBuilder, StatusCode};
use tokio::{sync::Semaphore, task::JoinHandle};

use super::{
    Name, credentials,
    token::{Granted, Operation, exchange},
};
use crate::{Access, web};

/// Longest time for a whole login.
const LOGIN_MAX: Duration = Duration::from_secs(60);

/// The logins to a repository.
pub(super) struct Logins {
    scope: LoginScope,
    access: Access,
    /// Held during a login.
    turn: Semaphore,
    /// The last login; `None` before the first.
    known: Mutex<Option<Login>>,
    /// An anonymous login in progress.
    ahead: Mutex<Option<Ahead>>,
    unreached: Mutex<Unreached>,
}

/// Logins that have not reached the registry.
#[derive(Default)]
struct Unreached {
    count: u64,
    /// The last one's error.
    error: String,
}

/// The repository and operation to log in for.
#[derive(Clone)]
struct LoginScope {
    operation: Operation,
    name: Name,
    trust: web::Trust,
}

/// A login in progress; dropping it cancels it.
struct Ahead(JoinHandle<Result<With>>);

impl Drop for Ahead {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The authorization that requests are sent with.
#[derive(Clone)]
pub(super) struct Login {
    /// Sequence number.
    number: u64,
    with: With,
    /// True if its credentials came with the request.
    given: bool,
    /// True if it was made with any credentials.
    is_named: bool,
}

#[derive(Clone)]
enum With {
    Nothing,
    /// No authorization; the registry has not confirmed yet that this suffices.
    Unconfirmed,
    Password(String, String),
    Token(String),
}

impl Logins {
    pub(super) fn new(
        operation: Operation,
        name: &Name,
        access: &Access,
        trust: web::Trust,
    ) -> Self {
        let (name, access) = (name.clone(), access.clone());
        let (turn, known, ahead) = (Semaphore::new(1), Mutex::default(), Mutex::default());
        let (scope, unreached) = (LoginScope { operation, name, trust }, Mutex::default());
        Self { scope, access, turn, known, ahead, unreached }
    }

    fn known(&self) -> MutexGuard<'_, Option<Login>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ahead(&self) -> MutexGuard<'_, Option<Ahead>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unreached(&self) -> MutexGuard<'_, Unreached> {
        self.unreached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a request with the tentative `login` succeeded.
    pub(super) fn fulfilled(&self, login: &Login) {
        let mut known = self.known();
        if let Some(known) = known.as_mut().filter(|known| known.number == login.number) {
            known.with = With::Nothing;
            *self.ahead() = None;
        }
    }

    /// Returns the last login, or makes a new one if there is none or it is `refused`.
    pub(super) async fn now(&self, refused: Option<&Login>, retries: u32) -> Result<Login> {
        let good = |login: &Login| refused.is_none_or(|refused| refused.number != login.number);
        if let Some(login) = self.known().clone().filter(good) {
            return Ok(login);
        }
        let what = format!("log in to {}", self.scope.name.registry());
        let ended = |_| {
            Error::new(ErrorKind::Unavailable, format!("cannot {what}: the client is being closed"))
        };
        let unreached = self.unreached().count;
        let _turn = self.turn.acquire().await.map_err(ended)?;
        // Another task may have logged in meanwhile.
        if let Some(login) = self.known().clone().filter(good) {
            return Ok(login);
        }
        // Or it has tried in vain as long as this one would.
        {
            let last = self.unreached();
            if last.count != unreached {
                return Err(Error::new(ErrorKind::Unavailable, last.error.clone()));
            }
        }
        let made = tokio::time::timeout(LOGIN_MAX, self.make(&what, refused, retries));
        let made = made.await.unwrap_or_else(|_| {
            let why = format!("no answer within {} s", LOGIN_MAX.as_secs());
            Err(Error::new(ErrorKind::Unavailable, format!("cannot {what}: {why}")))
        });
        let login = made.inspect_err(|error| {
            let is_refusal = error.cause::<web::AccessDenied>().is_some();
            if error.kind() == ErrorKind::Unavailable && !is_refusal {
                let mut unreached = self.unreached();
                unreached.count += 1;
                unreached.error = error.to_string();
            }
        })?;
        *self.known() = Some(login.clone());
        Ok(login)
    }

    async fn make(&self, what: &str, refused: Option<&Login>, retries: u32) -> Result<Login> {
        let number = refused.map_or(0, |login| login.number + 1);
        // An error in a credential file matters only if a login is needed and no credentials are
        // found.
        let (given, mut wrong) = match credentials::given(&self.scope.name, &self.access) {
            Ok(given) => (given, None),
            Err(error) => (None, Some(error)),
        };
        // A password is sent with each request, so the refused request has tried it.
        let is_used_up =
            refused.is_some_and(|login| login.given && matches!(login.with, With::Password(_, _)));
        let mut why = None;
        if let Some(given) = given.filter(|_| !is_used_up) {
            match self.scope.log_in(what, Some(given), retries).await {
                Ok(with) => return Ok(Login { number, with, given: true, is_named: true }),
                Err(error) => why = Some(error),
            }
        }
        let own = credentials::own(&self.scope.name, refused.is_some());
        let own = own.await.unwrap_or_else(|error| {
            wrong.get_or_insert(error);
            None
        });
        let needs_login = refused.is_some() || self.scope.operation != Operation::Pull;
        match (own, why, wrong) {
            (Some(own), ..) => {
                let with = self.scope.log_in(what, Some(own), retries).await?;
                Ok(Login { number, with, given: false, is_named: true })
            }
            // No other credentials: report why the given ones failed.
            (None, Some(why), _) => Err(why),
            (None, None, Some(wrong)) if needs_login => Err(wrong),
            (None, None, _) => {
                let with = self.as_nobody(what, refused.is_some(), retries).await?;
                Ok(Login { number, with, given: false, is_named: false })
            }
        }
    }

    /// Logs in without credentials.
    async fn as_nobody(&self, what: &str, is_refused: bool, retries: u32) -> Result<With> {
        let ahead = self.ahead().take();
        if let Some(mut ahead) = ahead.filter(|_| is_refused)
            && let Ok(made) = (&mut ahead.0).await
        {
            return made;
        }
        if is_refused || self.scope.operation != Operation::Pull {
            return self.scope.log_in(what, None, retries).await;
        }
        let (scope, what) = (self.scope.clone(), what.to_owned());
        let login = async move { scope.log_in(&what, None, retries).await };
        *self.ahead() = Some(Ahead(tokio::spawn(login)));
        Ok(With::Unconfirmed)
    }
}

impl LoginScope {
    async fn log_in(
        &self,
        what: &str,
        credentials: Option<DockerCredential>,
        retries: u32,
    ) -> Result<With> {
        let granted =
            exchange(what, &self.name, self.operation, credentials, &self.trust, retries).await?;
        Ok(match granted {
            Granted::Nothing => With::Nothing,
            Granted::Password(user, password) => With::Password(user, password),
            Granted::Token(token) => With::Token(token),
        })
    }
}

impl Login {
    /// True if the registry has not confirmed it yet.
    pub(super) fn is_unconfirmed(&self) -> bool {
        matches!(self.with, With::Unconfirmed)
    }

    /// True if a login ended without an authorization to send.
    pub(super) fn is_nothing(&self) -> bool {
        matches!(self.with, With::Nothing)
    }

    /// The error for an answer `status` to a request with this login.
    pub(super) fn refused(&self, what: &str, registry: &str, status: StatusCode) -> Error {
        let why = match (status, self.is_named) {
            (StatusCode::UNAUTHORIZED, true) => format!(
                "{registry} refuses the user or the password: log in again, with docker login \
                 {registry}"
            ),
            (StatusCode::FORBIDDEN, true) => format!(
                "{registry} denies this user access (403): check the name, or docker login \
                 {registry} as another user"
            ),
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, false) => format!(
                "{registry} requires a login, and DOCKER_AUTH_CONFIG, config.json and auth.json have \
                 none: check the name, then docker login {registry} or skopeo login {registry}"
            ),
            _ => return web::refused(what, status),
        };
        Error::with_source(ErrorKind::Unavailable, format!("cannot {what}"), web::AccessDenied(why))
    }

    pub(super) fn apply(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.with {
            With::Nothing | With::Unconfirmed => request,
            With::Password(user, password) => request.basic_auth(user, Some(password)),
            With::Token(token) => request.bearer_auth(token),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;

    use super::{Logins, Name, Operation};
    use crate::{Access, waiting};

    /// The server closes each connection at once.
    #[test]
    fn those_who_wait_for_a_login_get_its_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = format!("oci://{}/team/app:7", listener.local_addr().unwrap());
        let name = Name::parse(&name).unwrap().unwrap();
        let logins = Logins::new(Operation::Push, &name, &Access::default(), Default::default());
        let server = listener.try_clone().unwrap();
        std::thread::spawn(move || drop(server.accept().unwrap()));
        let (first, second) = waiting(async {
            let first = logins.now(None, 0);
            let second = logins.now(None, 0);
            futures_util::join!(first, second)
        });
        let told = [first, second].map(|result| result.err().unwrap().to_string());
        assert_eq!(told[0], told[1]);
        // Nobody has connected a second time.
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err());
    }
}
