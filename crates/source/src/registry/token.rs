//! Exchanges credentials for the token that a registry wants instead of a password.
//!
//! ```text
//!   GET /v2/ ──► no challenge: no login needed     Basic: the password goes with each request
//!           └──► 401, Bearer realm=…, service=…
//!                  anonymous, user and password:  GET  realm?service=…&scope=…  ──► a token
//!                  identity token:                POST realm, as a form         ──► a token
//! ```
//!
//! Sources: *Token Authentication Specification* and *Docker Registry v2 authentication using
//! OAuth2*.
//!
//! Invariants: credentials go only to the registry and to the realm that it names, encrypted
//! unless both are on this machine or the user named the registry `oci+http://`; an identity token
//! follows no redirect; an answer has at most [`ANSWER_MAX`] bytes; no error text contains a
//! secret.

use burgeon_block::{Error, ErrorKind, Result};
use docker_credential::DockerCredential;
use http_auth::{ChallengeRef, parse_challenges};
use reqwest::{
    Client, RequestBuilder, Response, StatusCode, Url,
    header::{CONTENT_TYPE, HeaderMap, WWW_AUTHENTICATE},
};
use serde::Deserialize;
use url::form_urlencoded;

use super::{Name, name::is_loopback};
use crate::{
    body::{Bounded, Failed},
    web,
};

/// Longest answer with a token, in bytes.
const ANSWER_MAX: u64 = 64 << 10;
/// Most characters of a server's address in an error.
const SHOWN_MAX: usize = 100;

/// The access that a token grants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Operation {
    Pull,
    Push,
}

/// The authorization to send with requests.
pub(super) enum Granted {
    /// None: the registry asks for none, or there are no credentials.
    Nothing,
    /// User and password.
    Password(String, String),
    Token(String),
}

/// The authorization that a registry asks for.
#[derive(PartialEq, Eq, Debug)]
enum Challenge {
    Nothing,
    Password,
    Token(TokenServer),
}

/// The server that issues tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
struct TokenServer {
    realm: Url,
    service: String,
}

#[derive(Deserialize)]
struct Answer {
    access_token: Option<String>,
    token: Option<String>,
}

/// One login.
struct Exchange<'a> {
    /// The operation, for errors.
    what: &'a str,
    name: &'a Name,
    scope: String,
    retries: u32,
    /// For the registry itself; a token server elsewhere has the system's authorities alone.
    trust: &'a web::Trust,
}

/// Obtains the authorization for `operation` on the repository `name`; anonymously, if there are
/// no `credentials`.
pub(super) async fn exchange(
    what: &str,
    name: &Name,
    operation: Operation,
    credentials: Option<DockerCredential>,
    trust: &web::Trust,
    retries: u32,
) -> Result<Granted> {
    let actions = match operation {
        Operation::Pull => "pull",
        Operation::Push => "pull,push",
    };
    let scope = format!("repository:{}:{actions}", name.repository());
    let exchange = Exchange { what, name, scope, retries, trust };
    let challenge = exchange.challenge().await?;
    match (challenge, credentials) {
        (Challenge::Nothing, Some(DockerCredential::UsernamePassword(user, password)))
        | (Challenge::Password, Some(DockerCredential::UsernamePassword(user, password))) => {
            Ok(Granted::Password(user, password))
        }
        (Challenge::Nothing, _) | (Challenge::Password, None) => Ok(Granted::Nothing),
        (Challenge::Password, Some(DockerCredential::IdentityToken(_))) => {
            let why = "the registry accepts no identity tokens: log in again, with a user and a password or \
                       access token";
            Err(exchange.cannot(ErrorKind::Invalid, why))
        }
        (Challenge::Token(server), credentials) => {
            exchange.token(&server, credentials).await.map(Granted::Token)
        }
    }
}

impl Exchange<'_> {
    fn cannot(&self, kind: ErrorKind, why: &str) -> Error {
        Error::new(kind, format!("cannot {}: {why}", self.what))
    }

    /// The client for `server`: with the trust of the registry's own host only at that host.
    fn client(&self, server: &TokenServer, other: fn() -> Result<Client>) -> Result<Client> {
        match server.realm.origin() == self.name.base()?.origin() {
            true if *self.trust != web::Trust::default() => web::client_with(self.trust),
            _ => other(),
        }
    }

    async fn challenge(&self) -> Result<Challenge> {
        let root = self.name.base()?.join("/v2/");
        let root =
            root.map_err(|_| self.cannot(ErrorKind::Invalid, "the registry's address is invalid"))?;
        let client = web::client_with(self.trust)?;
        let answer = web::send(self.what, self.retries, || client.get(root.clone())).await?;
        let challenge = Challenge::read(answer.headers());
        if challenge == Challenge::Nothing && answer.status().is_server_error() {
            return Err(web::refused(self.what, answer.status()));
        }
        Ok(challenge)
    }

    async fn token(
        &self,
        server: &TokenServer,
        credentials: Option<DockerCredential>,
    ) -> Result<String> {
        let has_secret = credentials.is_some();
        if has_secret && !server.may_have_secrets(self.name) {
            let why = format!(
                "the registry asks for the password to go to {}, unencrypted, and it was not sent: \
                 tell the registry's operator that its token realm has to be https",
                server.shown()
            );
            return Err(self.cannot(ErrorKind::Invalid, &why));
        }
        let answer = match &credentials {
            Some(DockerCredential::IdentityToken(identity)) => {
                let client = self.client(server, web::client_that_stays)?;
                let form = self.form(server, identity);
                let ask = || self.posted(&client, server, &form);
                web::send(self.what, self.retries, ask).await?
            }
            Some(DockerCredential::UsernamePassword(user, password)) => {
                let (client, url) = (self.client(server, web::client)?, self.query(server));
                let ask = || client.get(url.clone()).basic_auth(user, Some(password));
                web::send(self.what, self.retries, ask).await?
            }
            None => {
                let (client, url) = (self.client(server, web::client)?, self.query(server));
                web::send(self.what, self.retries, || client.get(url.clone())).await?
            }
        };
        if !answer.status().is_success() {
            return Err(self.refused(server, answer.status(), credentials.as_ref()));
        }
        self.read(answer).await
    }

    fn query(&self, server: &TokenServer) -> Url {
        let mut url = server.realm.clone();
        url.query_pairs_mut().append_pair("scope", &self.scope);
        if !server.service.is_empty() {
            url.query_pairs_mut().append_pair("service", &server.service);
        }
        url
    }

    fn form(&self, server: &TokenServer, identity: &str) -> String {
        form_urlencoded::Serializer::new(String::new())
            .append_pair("grant_type", "refresh_token")
            .append_pair("service", &server.service)
            .append_pair("client_id", "burgeon")
            .append_pair("scope", &self.scope)
            .append_pair("refresh_token", identity)
            .finish()
    }

    fn posted(&self, client: &Client, server: &TokenServer, form: &str) -> RequestBuilder {
        let request = client.post(server.realm.clone()).body(form.to_owned());
        request.header(CONTENT_TYPE, "application/x-www-form-urlencoded")
    }

    fn refused(
        &self,
        server: &TokenServer,
        status: StatusCode,
        credentials: Option<&DockerCredential>,
    ) -> Error {
        let is_refusal = matches!(status.as_u16(), 400 | 401 | 403);
        let refusal = |why: &str| {
            let what = format!("cannot {}", self.what);
            Error::with_source(ErrorKind::Unavailable, what, web::AccessDenied(why.to_owned()))
        };
        match credentials {
            Some(DockerCredential::IdentityToken(_)) if is_refusal => {
                refusal("the identity token is refused: log in again, with docker login")
            }
            Some(_) if is_refusal => {
                refusal("user or password are refused: log in with docker login or skopeo login")
            }
            None if is_refusal => refusal(
                "the registry gives no token without a user and a password: log in with docker login or \
                 skopeo login",
            ),
            _ => {
                let why = format!("asked for a token, {} says {status}", server.shown());
                self.cannot(ErrorKind::Unavailable, &why)
            }
        }
    }

    async fn read(&self, answer: Response) -> Result<String> {
        let body = Bounded::new(reqwest::Body::from(answer), ANSWER_MAX);
        let answer = body.gather().await.map_err(|error| match error {
            Failed::Excess(excess) => {
                self.cannot(excess.kind(), &format!("asked for a token, {excess}"))
            }
            Failed::Broken(error) => web::unreachable(self.what, error),
        })?;
        let answer: Option<Answer> = serde_json::from_slice(&answer).ok();
        let tokens = answer.map(|answer| [answer.access_token, answer.token]);
        let token = tokens.into_iter().flatten().flatten().find(|token| !token.is_empty());
        token.ok_or_else(|| {
            self.cannot(ErrorKind::Corrupt, "the answer of the token server has no token")
        })
    }
}

impl Challenge {
    /// Reads the challenges of an answer. A token takes precedence over a password.
    fn read(headers: &HeaderMap) -> Self {
        let values = headers.get_all(WWW_AUTHENTICATE).iter();
        let mut challenge = Self::Nothing;
        for value in values.filter_map(|value| value.to_str().ok()) {
            match TokenServer::read(value) {
                Some(server) => return Self::Token(server),
                None => challenge = Self::Password,
            }
        }
        challenge
    }
}

impl TokenServer {
    /// The token server that the challenges of a header name, if any.
    fn read(header: &str) -> Option<Self> {
        let challenges = parse_challenges(header).ok()?;
        let is_bearer = |it: &&ChallengeRef<'_>| it.scheme.eq_ignore_ascii_case("bearer");
        let bearer = challenges.iter().find(is_bearer)?;
        let parameter = |name: &str| {
            let mut all = bearer.params.iter();
            all.find(|(key, _)| key.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.to_unescaped())
        };
        let realm = Url::parse(&parameter("realm")?).ok()?;
        let is_web = matches!(realm.scheme(), "https" | "http");
        is_web.then(|| Self { realm, service: parameter("service").unwrap_or_default() })
    }

    /// True if credentials for the registry `name` may be sent there: encrypted, to this machine,
    /// or in clear if the user allows that for this registry.
    fn may_have_secrets(&self, name: &Name) -> bool {
        let host = self.realm.host_str().unwrap_or_default();
        self.realm.scheme() == "https" || name.is_plain() && (is_loopback(host) || !name.is_local())
    }

    /// Its origin, short enough for an error.
    fn shown(&self) -> String {
        self.realm.origin().ascii_serialization().chars().take(SHOWN_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use reqwest::header::{HeaderMap, HeaderValue, WWW_AUTHENTICATE};

    use super::{Challenge, Name, TokenServer};

    #[test]
    fn challenges_name_the_wanted_authorization() {
        let read = |challenges: &[&str]| {
            let mut headers = HeaderMap::new();
            for challenge in challenges {
                headers.append(WWW_AUTHENTICATE, HeaderValue::from_str(challenge).unwrap());
            }
            Challenge::read(&headers)
        };
        let challenge = r#"Basic realm="x", bearer Realm="https://r.example/token",service="a\"b""#;
        let realm = "https://r.example/token".parse().unwrap();
        let there = Challenge::Token(TokenServer { realm, service: "a\"b".to_owned() });
        assert_eq!(read(&[challenge]), there);
        assert_eq!(read(&["Basic realm=\"x\"", challenge]), there);
        assert_eq!(read(&[]), Challenge::Nothing);
        for none in [
            "Basic realm=\"x\"",
            "Bearer service=\"x\"",
            "Bearer",
            "",
            r#"Bearer realm="file:///etc/passwd""#,
        ] {
            assert_eq!(read(&[none]), Challenge::Password, "{none}");
        }
    }

    #[test]
    fn credentials_go_in_clear_only_on_loopback_or_by_choice() {
        for (name, realm, may) in [
            ("oci://r.example/a", "https://auth.example/token", true),
            ("oci://r.example/a", "http://r.example/token", false),
            ("oci://r.example/a", "http://127.0.0.1/token", false),
            ("oci://127.evil.example/a", "http://127.evil.example/token", false),
            ("oci+http://r.example/a", "http://auth.example/token", true),
            ("oci://localhost:5000/a", "http://127.0.0.1:5001/token", true),
            ("oci://localhost:5000/a", "http://[::1]:5001/token", true),
            ("oci://127.0.0.1:5000/a", "http://localhost/token", true),
            ("oci://127.0.0.1:5000/a", "http://auth.example/token", false),
            ("oci://127.0.0.1:5000/a", "https://auth.example/token", true),
        ] {
            let name = Name::parse(name).unwrap().unwrap();
            let server = TokenServer { realm: realm.parse().unwrap(), service: String::new() };
            assert_eq!(server.may_have_secrets(&name), may, "{name} {realm}");
        }
    }
}
