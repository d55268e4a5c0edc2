//! HTTP requests with retries, and bodies that resume.
//!
//! ```text
//!   send: retries until there is an answer ──► BlockingBody: reads it; resumes if it breaks off
//! ```
//!
//! Invariants: waits, bodies and retries have bounds; an error quotes little of a server's answer;
//! a redirect never leaves TLS.

use std::{
    error, fmt,
    io::{self, Read},
    sync::Once,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use bytes::Bytes;
use reqwest::{
    Certificate, Client, ClientBuilder, Identity, Method, RequestBuilder, Response, StatusCode,
    Url,
    header::{CONTENT_RANGE, RANGE},
    redirect::Policy,
};
use serde::{Deserialize, Serialize};

use crate::{
    body::{Bounded, Excess, Failed},
    waiting,
};

/// Longest time to connect. A lost SYN is sent again after 1 s and 3 s.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time without data from the server.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(20);
/// Retries of a request: with pauses of 0.1, 0.2, … 3.2 s, about 6 s.
pub const RETRIES: u32 = 6;
/// Most times that one request may meet silence: each costs [`SILENCE_MAX`], and one lost
/// connection is likelier than two.
pub(crate) const SILENT_MAX: u32 = 2;
/// Most times that one request's connection may be refused, which takes 3 s: a server that is
/// restarted listens again soon, and at a wrong address nobody ever will.
const REFUSED_MAX: u32 = 6;
/// Most times that a body may break off; each costs a request.
const RESUMES_MAX: u32 = 20;
/// Most times that a body may be too slow: each costs [`crate::body::WINDOW`], and the next request
/// may reach a faster server.
const SLOW_MAX: u32 = 3;
/// Most redirects of one request.
const REDIRECTS_MAX: usize = 10;

/// A client that follows redirects. Opens no connection yet.
pub fn client() -> Result<Client> {
    build(Client::builder().read_timeout(SILENCE_MAX))
}

/// A client that follows no redirects, for requests that contain secrets.
pub(crate) fn client_that_stays() -> Result<Client> {
    let builder = Client::builder().read_timeout(SILENCE_MAX);
    finish(builder.redirect(Policy::none()))
}

/// A client for uploads: a request may take `time_max`, without a limit on the server's silence.
pub(crate) fn uploading_client(time_max: Duration) -> Result<Client> {
    build(Client::builder().timeout(time_max))
}

/// The checks of a server's certificate beyond the system's, the certificate that it is shown, and
/// the time to connect to it.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Trust {
    /// More authorities, as PEM.
    pub(crate) ca: Vec<String>,
    pub(crate) skip_verify: bool,
    /// Longest time to connect, in milliseconds.
    pub(crate) connect_ms: Option<u64>,
    /// The certificate to show, and its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client: Option<ClientPem>,
}

/// A certificate and its key, as PEM. Shows nobody the key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct ClientPem(String);

impl ClientPem {
    /// `None` if the text has no certificate with its key.
    pub(crate) fn new(text: String) -> Option<Self> {
        Identity::from_pem(text.as_bytes()).is_ok().then_some(Self(text))
    }
}

impl fmt::Debug for ClientPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientPem")
    }
}

/// A client with `trust`. It follows no redirects, because `trust` concerns one server.
pub(crate) fn client_with(trust: &Trust) -> Result<Client> {
    let mut builder = Client::builder().read_timeout(SILENCE_MAX).redirect(Policy::none());
    for ca in &trust.ca {
        let parsed = Certificate::from_pem_bundle(ca.as_bytes()).map_err(|_| {
            let what = "a ca file of hosts.toml has no certificate in PEM form";
            Error::new(ErrorKind::Invalid, what)
        })?;
        builder = builder.tls_certs_merge(parsed);
    }
    if let Some(ClientPem(text)) = &trust.client {
        let identity = Identity::from_pem(text.as_bytes()).map_err(|_| {
            let what = "a client file of hosts.toml has no certificate with its key";
            Error::new(ErrorKind::Invalid, what)
        })?;
        builder = builder.identity(identity);
    }
    if trust.skip_verify {
        builder = builder.tls_danger_accept_invalid_certs(true);
    }
    let limit = trust.connect_ms.map_or(CONNECT_TIMEOUT, Duration::from_millis);
    finish_within(builder, limit.min(CONNECT_TIMEOUT))
}

fn build(builder: ClientBuilder) -> Result<Client> {
    let redirects = Policy::custom(|attempt| {
        let leaves_tls = attempt.previous().last().is_some_and(|url| url.scheme() == "https")
            && attempt.url().scheme() != "https";
        if leaves_tls {
            attempt.error("it redirects from https to http")
        } else if attempt.previous().len() > REDIRECTS_MAX {
            attempt.error("it redirects again and again")
        } else {
            attempt.follow()
        }
    });
    finish(builder.redirect(redirects))
}

fn finish(builder: ClientBuilder) -> Result<Client> {
    finish_within(builder, CONNECT_TIMEOUT)
}

fn finish_within(builder: ClientBuilder, connect_max: Duration) -> Result<Client> {
    choose_cryptography();
    let builder = builder.connect_timeout(connect_max);
    let builder = builder.user_agent(concat!("burgeon/", env!("CARGO_PKG_VERSION")));
    builder.build().map_err(|error| {
        let what = "cannot make connections; are the system's certificates there?";
        Error::with_source(ErrorKind::Unavailable, what, error.without_url())
    })
}

/// Selects rustls with ring for TLS, and the system's root certificates. Call before making a
/// client; only the first call has an effect.
pub(crate) fn choose_cryptography() {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        // An error means that a provider is installed already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// Sends the request of `make`, with up to `retries` retries while the server is unreachable, fails
/// or asks for a pause, fewer if nobody listens there, and one if it is silent. `what` names the
/// operation, for errors. Returns answers of any status.
pub async fn send(what: &str, retries: u32, make: impl Fn() -> RequestBuilder) -> Result<Response> {
    let (mut tries, mut silent, mut refused) = (Tries::new(retries), 0, 0);
    loop {
        let answer = make().send().await;
        silent += u32::from(answer.as_ref().is_err_and(is_silence));
        refused += u32::from(answer.as_ref().is_err_and(|error| is_refusal(error)));
        let again = match &answer {
            Ok(answer) => {
                answer.status().is_server_error()
                    && answer.status() != StatusCode::INSUFFICIENT_STORAGE
                    || answer.status() == StatusCode::TOO_MANY_REQUESTS
            }
            Err(e) => !e.is_redirect() && !e.is_builder() && !is_untrusted(e),
        };
        if !again || tries.is_last() || silent == SILENT_MAX || refused == REFUSED_MAX {
            return answer.map_err(|error| unreachable(what, error));
        }
        let error = match answer {
            Ok(answer) => self::refused(what, answer.status()),
            Err(error) => unreachable(what, error),
        };
        tries.again(error).await?;
    }
}

/// The tries of one operation, a bounded number: before each but the first there is a pause, twice
/// as long as the one before it.
pub(crate) struct Tries {
    done: u32,
    retries: u32,
}

impl Tries {
    pub(crate) fn new(retries: u32) -> Self {
        Self { done: 0, retries }
    }

    /// True if no other follows the one under way.
    pub(crate) fn is_last(&self) -> bool {
        self.done == self.retries
    }

    /// Waits for the next try; the last one's error is returned.
    pub(crate) async fn again(&mut self, error: Error) -> Result<()> {
        if self.is_last() {
            return Err(error);
        }
        tracing::debug!(%error, tries = self.done + 1, "a request failed and is sent again");
        tokio::time::sleep(Duration::from_millis(100 << self.done.min(5))).await;
        self.done += 1;
        Ok(())
    }
}

/// [`send`] with a time limit; `Unavailable` once it has passed.
pub async fn send_within(
    limit: Option<Duration>,
    what: &str,
    retries: u32,
    make: impl Fn() -> RequestBuilder,
) -> Result<Response> {
    let sent = send(what, retries, make);
    let Some(limit) = limit else { return sent.await };
    tokio::time::timeout(limit, sent).await.unwrap_or_else(|_| {
        let what = format!("cannot {what}: no answer within {} s", limit.as_secs());
        Err(Error::new(ErrorKind::Unavailable, what))
    })
}

/// True if a connected server has sent nothing for [`SILENCE_MAX`].
pub(crate) fn is_silence(error: &reqwest::Error) -> bool {
    error.is_timeout() && !error.is_connect()
}

pub(crate) fn unreachable(what: &str, error: reqwest::Error) -> Error {
    let is_refused = is_refusal(&error);
    let address = error
        .url()
        .filter(|_| is_refused)
        .and_then(|url| Some(format!("{}:{}", url.host_str()?, url.port_or_known_default()?)));
    let remedy = address.map(|address| format!(": {}", nobody_listens(&address)));
    let why = why_not(&error.without_url());
    let remedy = remedy.unwrap_or_default();
    Error::new(ErrorKind::Unavailable, format!("cannot {what}: {why}{remedy}"))
}

/// True if nobody listens at the address that was connected to.
pub(crate) fn is_refusal(error: &(dyn error::Error + 'static)) -> bool {
    let is = |cause: &(dyn error::Error + 'static)| {
        let cause = cause.downcast_ref::<io::Error>();
        cause.is_some_and(|cause| cause.kind() == io::ErrorKind::ConnectionRefused)
    };
    chain(error).any(is)
}

/// The remedy for a refused connection to `address`.
pub(crate) fn nobody_listens(address: &str) -> String {
    format!("is the server running, and is {address} its address?")
}

/// Why there is no answer: the deepest cause is the most specific.
pub(crate) fn why_not(error: &(dyn error::Error + 'static)) -> String {
    let why = chain(error).last().unwrap_or(error);
    if !is_untrusted(error) {
        return why.to_string();
    }
    format!(
        "its certificate is not trusted ({why}): add the authority that has signed it to the \
         system's, or name a file with it in SSL_CERT_FILE (the daemon has that from the command that \
         starts it, or from its unit)"
    )
}

/// True if the server's certificate is untrusted, which a retry does not change.
pub(crate) fn is_untrusted(error: &(dyn error::Error + 'static)) -> bool {
    let is = |cause: &(dyn error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(rustls::Error::InvalidCertificate(_)))
    };
    chain(error).any(is)
}

/// The error and its causes, the deepest last.
fn chain<'a>(
    error: &'a (dyn error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn error::Error + 'static)> {
    std::iter::successors(Some(error), |error| {
        // `io::Error::source` skips the error that it wraps.
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        inner.map(|inner| inner as &(dyn error::Error + 'static)).or_else(|| error.source())
    })
}

/// Why a registry or store denies access: a definite answer, unlike silence or a server error.
#[derive(Debug)]
pub struct AccessDenied(pub(crate) String);

impl fmt::Display for AccessDenied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl error::Error for AccessDenied {}

/// The error for an answer that is not a success.
pub fn refused(what: &str, status: StatusCode) -> Error {
    let (kind, why) = match status {
        StatusCode::NOT_FOUND => (ErrorKind::NotFound, "it does not exist (404)".to_owned()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            let why = format!(
                "it is refused ({status}): check the name, and log in with docker login or skopeo login"
            );
            return Error::with_source(
                ErrorKind::Unavailable,
                format!("cannot {what}"),
                AccessDenied(why),
            );
        }
        StatusCode::METHOD_NOT_ALLOWED => (
            ErrorKind::Invalid,
            format!(
                "the server takes no writes ({status}): it is a mirror, or closed for maintenance"
            ),
        ),
        StatusCode::INSUFFICIENT_STORAGE => {
            (ErrorKind::NoSpace, format!("the server has no room for it ({status})"))
        }
        StatusCode::PAYLOAD_TOO_LARGE => (
            ErrorKind::NoSpace,
            format!(
                "the server refuses bodies of this size ({status}): its operator sets the limit, \
                 for example client_max_body_size of nginx"
            ),
        ),
        StatusCode::RANGE_NOT_SATISFIABLE => {
            (ErrorKind::Corrupt, "it is shorter than the range asked for: truncated?".to_owned())
        }
        status if status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS => {
            (ErrorKind::Invalid, format!("the server answered {status}"))
        }
        status => (ErrorKind::Unavailable, format!("the server answered {status}")),
    };
    Error::new(kind, format!("cannot {what}: {why}"))
}

/// The body of an answer, read by blocking this thread.
pub struct BlockingBody<F> {
    what: String,
    /// Requests the rest of the body, from this offset on.
    ask: F,
    answer: Option<Bounded<reqwest::Body>>,
    part: Bytes,
    offset: u64,
    len_max: u64,
    resumes: Tries,
    slow: u32,
}

impl<F: FnMut(u64) -> Result<Response>> BlockingBody<F> {
    /// The body of `answer`, of at most `len_max` bytes; `ask(offset)` requests the rest if it
    /// breaks off. `what` names the operation, for errors.
    pub fn new(what: String, answer: Response, len_max: u64, ask: F) -> Self {
        let answer = Some(Bounded::new(answer.into(), len_max));
        let (part, resumes) = (Bytes::new(), Tries::new(RESUMES_MAX));
        Self { what, ask, answer, part, offset: 0, len_max, resumes, slow: 0 }
    }

    /// A body that begins at `offset`.
    pub(crate) fn starting(what: String, offset: u64, len_max: u64, ask: F) -> Result<Self> {
        let (part, resumes) = (Bytes::new(), Tries::new(RESUMES_MAX));
        let mut body = Self { what, ask, answer: None, part, offset, len_max, resumes, slow: 0 };
        body.resume()?;
        Ok(body)
    }

    /// A body that begins at `offset` with `answer`.
    pub fn after(
        what: String,
        offset: u64,
        answer: Response,
        len_max: u64,
        ask: F,
    ) -> Result<Self> {
        check_resumed(&what, &answer, offset)?;
        let left = len_max.saturating_sub(offset);
        Ok(Self { offset, len_max, ..Self::new(what, answer, left, ask) })
    }

    fn resume(&mut self) -> Result<&mut Bounded<reqwest::Body>> {
        let answer = (self.ask)(self.offset)?;
        check_resumed(&self.what, &answer, self.offset)?;
        let left = self.len_max.saturating_sub(self.offset);
        Ok(self.answer.insert(Bounded::new(answer.into(), left)))
    }

    fn next_part(&mut self) -> Result<()> {
        loop {
            let answer = match self.answer.take() {
                Some(answer) => self.answer.insert(answer),
                None => self.resume()?,
            };
            match waiting(answer.part()) {
                Ok(part) => {
                    self.part = part.unwrap_or_default();
                    self.offset += self.part.len() as u64;
                    return Ok(());
                }
                Err(Failed::Excess(Excess::TooSlow)) if self.slow + 1 < SLOW_MAX => self.slow += 1,
                Err(Failed::Excess(excess)) => {
                    let excess = match excess {
                        Excess::TooLong(_) => Excess::TooLong(self.len_max),
                        slow => slow,
                    };
                    let what = format!("cannot {}: {excess}", self.what);
                    return Err(Error::new(excess.kind(), what));
                }
                Err(Failed::Broken(error)) => {
                    waiting(self.resumes.again(unreachable(&self.what, error)))?;
                }
            }
            self.answer = None;
        }
    }
}

impl<F: FnMut(u64) -> Result<Response>> Read for BlockingBody<F> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.part.is_empty() {
            self.next_part().map_err(io::Error::other)?;
        }
        let part = self.part.split_to(buf.len().min(self.part.len()));
        buf[..part.len()].copy_from_slice(&part);
        Ok(part.len())
    }
}

/// Makes `request` ask for the bytes from `offset` on.
pub fn from(request: RequestBuilder, offset: u64) -> RequestBuilder {
    match offset {
        0 => request,
        _ => request.header(RANGE, format!("bytes={offset}-")),
    }
}

/// Checks that an answer starts at `offset`.
fn check_resumed(what: &str, answer: &Response, offset: u64) -> Result<()> {
    let range = answer.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
    let goes_on = range.is_some_and(|range| range.starts_with(&format!("bytes {offset}-")));
    if offset == 0 || answer.status() == StatusCode::PARTIAL_CONTENT && goes_on {
        return Ok(());
    }
    let why = format!(
        "the server does not continue from byte {offset}: it does not answer range requests"
    );
    Err(Error::new(ErrorKind::Unavailable, format!("cannot {what}: {why}")))
}

/// A GET of `url`.
pub fn get(client: &Client, url: &Url) -> RequestBuilder {
    client.request(Method::GET, url.clone())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_refused_connection_is_tried_for_a_short_time_and_has_a_remedy() {
        let client = client().unwrap();
        // Nothing has port 1.
        let url = Url::parse("http://127.0.0.1:1/x").unwrap();
        let tries = std::cell::Cell::new(0);
        let error = waiting(send("read x", REFUSED_MAX, || {
            tries.set(tries.get() + 1);
            get(&client, &url)
        }));
        let error = error.unwrap_err();
        assert_eq!((error.kind(), tries.get()), (ErrorKind::Unavailable, REFUSED_MAX));
        assert!(error.to_string().ends_with("is 127.0.0.1:1 its address?"), "{error}");
    }

    /// The kernel accepts the connections; nobody reads them.
    #[test]
    fn a_silent_server_is_asked_twice() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Url::parse(&format!("http://{}/x", silent.local_addr().unwrap())).unwrap();
        let builder = Client::builder().read_timeout(Duration::from_millis(50));
        let client = build(builder).unwrap();
        let error = waiting(send("read x", RETRIES, || get(&client, &url))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        silent.set_nonblocking(true).unwrap();
        let asked = std::iter::from_fn(|| silent.accept().ok()).count();
        assert_eq!(asked, 2, "{error}");
    }
}
