//! Identity tokens, which some registries give instead of a password: exchanged for one that requests
//! are sent with.
//!
//! ```text
//!   GET /v2/ ──► 401, Bearer realm=…, service=…     POST realm: the identity token, the scope ──► a token
//! ```
//!
//! The library that logs in has none of this. Source: *Docker Registry v2 authentication using OAuth2*.
//! Invariants: the identity token goes to where the registry itself sends for tokens, and from there nowhere,
//! encrypted unless nothing of the registry is; no error has it, or the token, in its text.

use burgeon_block::{Error, ErrorKind, Result};
use http_auth::{ChallengeRef, parse_challenges};
use oci_client::RegistryOperation;
use reqwest::{
    StatusCode, Url,
    header::{CONTENT_TYPE, WWW_AUTHENTICATE},
};
use serde::Deserialize;
use url::form_urlencoded;

use super::{Gathering, Name, gather};
use crate::web;

/// Longest answer with a token, in bytes.
const ANSWER_MAX: u64 = 64 << 10;

/// What a token is for, and where to ask for it.
struct TokenServer {
    realm: Url,
    service: String,
}

#[derive(Deserialize)]
struct Answer {
    access_token: Option<String>,
    token: Option<String>,
}

/// A token for `operation` on the repository `name`; `None` where nobody wants one.
pub(super) async fn exchange(
    what: &str,
    name: &Name,
    operation: RegistryOperation,
    identity: &str,
    retries: u32,
) -> Result<Option<String>> {
    let cannot = |kind, why: &str| Error::new(kind, format!("cannot {what}: {why}"));
    let client = web::client_that_stays()?;
    let root =
        name.base()?.join("/v2/").map_err(|_| cannot(ErrorKind::Invalid, "it has no /v2/"))?;
    let asked = web::send(what, retries, || client.get(root.clone())).await?;
    if asked.status().is_success() {
        return Ok(None);
    }
    if asked.status() != StatusCode::UNAUTHORIZED {
        let why = format!("asked who is let in, it says {}", asked.status());
        return Err(cannot(ErrorKind::Unavailable, &why));
    }
    let challenges = asked.headers().get_all(WWW_AUTHENTICATE).iter();
    let mut challenges = challenges.filter_map(|challenge| challenge.to_str().ok());
    let server = challenges.find_map(|challenge| TokenServer::read(challenge, name.is_plain()));
    let server = server.ok_or_else(|| {
        let why = "it takes no identity tokens: log in with a user and a password or access token";
        cannot(ErrorKind::Invalid, why)
    })?;
    let actions = match operation {
        RegistryOperation::Pull => "pull",
        RegistryOperation::Push => "pull,push",
    };
    let form = form_urlencoded::Serializer::new(String::new())
        .append_pair("grant_type", "refresh_token")
        .append_pair("service", &server.service)
        .append_pair("client_id", "burgeon")
        .append_pair("scope", &format!("repository:{}:{actions}", name.repository()))
        .append_pair("refresh_token", identity)
        .finish();
    let ask = || {
        let request = client.post(server.realm.clone()).body(form.clone());
        request.header(CONTENT_TYPE, "application/x-www-form-urlencoded")
    };
    let answer = web::send(what, retries, ask).await?;
    let status = answer.status();
    if !status.is_success() {
        let why = match status.as_u16() {
            400 | 401 | 403 => {
                "the identity token is refused: log in again, with docker login".to_owned()
            }
            _ => {
                let host: String =
                    server.realm.host_str().unwrap_or_default().chars().take(100).collect();
                format!("asked for a token, {host} says {status}")
            }
        };
        return Err(cannot(ErrorKind::Unavailable, &why));
    }
    let answer = gather(answer, ANSWER_MAX).await.map_err(|error| match error {
        Gathering::TooLong => cannot(ErrorKind::Corrupt, "its token is too long"),
        Gathering::Broken(error) => web::unreachable(what, error),
    })?;
    let answer: Option<Answer> = serde_json::from_slice(&answer).ok();
    let tokens = answer.map(|answer| [answer.access_token, answer.token]);
    let token = tokens.into_iter().flatten().flatten().find(|token| !token.is_empty());
    token.map(Some).ok_or_else(|| cannot(ErrorKind::Corrupt, "it answered with no token"))
}

impl TokenServer {
    /// Where a challenge sends for tokens, if it does.
    fn read(challenge: &str, plain: bool) -> Option<Self> {
        let challenges = parse_challenges(challenge).ok()?;
        let is_bearer = |it: &&ChallengeRef<'_>| it.scheme.eq_ignore_ascii_case("bearer");
        let bearer = challenges.iter().find(is_bearer)?;
        let parameter = |name: &str| {
            let mut all = bearer.params.iter();
            all.find(|(key, _)| key.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.to_unescaped())
        };
        let realm = Url::parse(&parameter("realm")?).ok()?;
        let is_kept = realm.scheme() == "https" || realm.scheme() == "http" && plain;
        is_kept.then(|| Self { realm, service: parameter("service").unwrap_or_default() })
    }
}

#[cfg(test)]
mod tests {
    use super::TokenServer;

    #[test]
    fn tokens_are_asked_for_where_the_registry_says_and_never_in_clear_for_others() {
        let read = |challenge: &str, plain| {
            TokenServer::read(challenge, plain)
                .map(|server| (server.realm.to_string(), server.service))
        };
        let challenge = r#"Basic realm="x", bearer Realm="https://r.example/token",service="a\"b""#;
        let there = ("https://r.example/token".to_owned(), "a\"b".to_owned());
        assert_eq!(read(challenge, false), Some(there));
        let http = r#"Bearer realm="http://r.example/token""#;
        assert_eq!(read(http, true), Some(("http://r.example/token".to_owned(), String::new())));
        for none in
            [http, "Basic realm=\"x\"", "Bearer service=\"x\"", "Bearer", "", "realm=\"\u{7f}"]
        {
            assert_eq!(read(none, false), None, "{none}");
        }
        assert_eq!(read(r#"Bearer realm="file:///etc/passwd""#, true), None);
    }
}
