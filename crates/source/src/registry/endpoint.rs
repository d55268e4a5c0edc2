//! One host that serves a repository: the registry itself, or a mirror of it.
//!
//! Invariants: a login is for one host, and goes to no other; the headers of a host do not follow a
//! redirect to another one; a mirror that failed, or kept others waiting, is asked after all others
//! for [`REST`].

use std::{
    sync::{Mutex, PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url, header::LOCATION};
use tokio::time::Instant;

use super::{
    Name,
    hosts::{Host, Hosts},
    login::Logins,
    resource::Resource,
    token::Operation,
};
use crate::{Access, Traffic, web};

/// Time for which a mirror that failed is asked last.
const REST: Duration = Duration::from_secs(30);

pub(super) struct Endpoint {
    /// The image at this host.
    name: Name,
    /// Ends with a slash.
    pub(super) base: Url,
    /// The registry that it is a mirror of.
    mirrored: Option<String>,
    pub(super) client: Client,
    /// For redirects to other hosts, if `client` or headers are for this one alone.
    elsewhere: Option<Client>,
    headers: Vec<(String, String)>,
    pub(super) logins: Logins,
    pull: bool,
    resolve: bool,
    referrers: bool,
    rests_until: Mutex<Option<Instant>>,
}

/// A host whose answer is awaited.
pub(super) struct Waiting<'a>(Option<&'a Endpoint>);

impl Waiting<'_> {
    /// It has answered, or failed.
    pub(super) fn end(mut self) {
        self.0 = None;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|host| host.rest());
    }
}

/// All endpoints for `operation`, in their order; never empty.
pub(super) fn all(operation: Operation, name: &Name, access: &Access) -> Result<Vec<Endpoint>> {
    let hosts = match (operation, access.hosts()) {
        // Only the registry itself takes writes.
        (Operation::Push, _) | (_, None) => None,
        (Operation::Pull, Some(text)) => {
            Some(serde_json::from_str::<Hosts>(text).map_err(|_| {
                Error::new(
                    ErrorKind::Invalid,
                    "the kept hosts of registries are damaged: mount again",
                )
            })?)
        }
    };
    let hosts = hosts.filter(|hosts| hosts.registry == name.registry() && !hosts.hosts.is_empty());
    match hosts {
        None => Ok(vec![Endpoint::of_registry(operation, name, access)?]),
        Some(hosts) => {
            hosts.hosts.into_iter().map(|host| Endpoint::of_host(name, access, host)).collect()
        }
    }
}

impl Endpoint {
    fn of_registry(operation: Operation, name: &Name, access: &Access) -> Result<Self> {
        Ok(Self {
            base: name.base()?,
            name: name.clone(),
            mirrored: None,
            client: web::client()?,
            elsewhere: None,
            headers: Vec::new(),
            logins: Logins::new(operation, name, access, web::Trust::default()),
            pull: true,
            resolve: true,
            referrers: true,
            rests_until: Mutex::default(),
        })
    }

    fn of_host(name: &Name, access: &Access, host: Host) -> Result<Self> {
        let bad = || {
            let what = format!("a host in hosts.toml for {} has no valid name", name.registry());
            Error::new(ErrorKind::Invalid, what)
        };
        let there = host.name(name).ok_or_else(bad)?;
        let is_same = there.registry() == name.registry();
        let base = match is_same && there.registry() == "docker.io" {
            true => there.base()?,
            false => {
                let base = format!("{}/{}/", host.root, name.repository());
                Url::parse(&base).map_err(|_| bad())?
            }
        };
        Ok(Self {
            base,
            mirrored: (!is_same).then(|| name.registry().to_owned()),
            client: web::client_with(&host.trust)?,
            elsewhere: Some(web::client()?),
            headers: host.headers,
            logins: Logins::new(Operation::Pull, &there, access, host.trust),
            name: there,
            pull: host.pull,
            resolve: host.resolve,
            referrers: host.referrers,
            rests_until: Mutex::default(),
        })
    }

    /// True if this host may answer for `resource`: a tag is resolved, and what is verified by its
    /// digest is pulled.
    pub(super) fn may_answer(&self, resource: &Resource) -> bool {
        match resource {
            Resource::Tag(_) => self.resolve,
            Resource::Manifest(_) | Resource::Blob(_) | Resource::Uploads => self.pull,
            Resource::Referrers(_) => self.resolve || self.referrers,
        }
    }

    pub(super) fn registry(&self) -> &str {
        self.name.registry()
    }

    pub(super) fn rests(&self) -> bool {
        let until = *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Has the host rest if the answer is not awaited to its end: it may never come.
    pub(super) fn waited_for(&self) -> Waiting<'_> {
        Waiting(Some(self))
    }

    /// Has the host asked last for a while.
    pub(super) fn rest(&self) {
        let until = Some(Instant::now() + REST);
        *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    /// Sends a request for `path` of the repository and returns the answer if it is a success.
    /// Logs in if needed.
    pub(super) async fn ask(
        &self,
        traffic: &Traffic,
        what: &str,
        method: Method,
        path: &str,
        retries: u32,
        change: &impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        let bad = |error| Error::with_source(ErrorKind::Invalid, format!("cannot {what}"), error);
        // Not `Url::join`: it would take the part of a digest before the colon for a scheme.
        let mut url = Url::parse(&format!("{}{path}", self.base)).map_err(bad)?;
        if let Some(mirrored) = &self.mirrored {
            url.query_pairs_mut().append_pair("ns", mirrored);
        }
        let mut login = self.logins.now(None, retries).await?;
        let mut logins_left = if login.is_unconfirmed() { 2 } else { 1 };
        loop {
            traffic.requests.fetch_add(1, Relaxed);
            let answer = web::send(what, retries, || {
                let request = change(self.client.request(method.clone(), url.clone()));
                let add = |request: RequestBuilder, (name, value): &(String, String)| {
                    request.header(name, value)
                };
                login.apply(self.headers.iter().fold(request, add))
            });
            let answer = answer.await.inspect_err(|_| {
                traffic.broken.fetch_add(1, Relaxed);
            })?;
            let answer = self.followed(what, retries, answer, &url, change).await?;
            let status = answer.status();
            let unconfirmed = login.is_unconfirmed();
            if status.is_success() {
                if unconfirmed {
                    self.logins.fulfilled(&login);
                }
                return Ok(answer);
            }
            // A registry may answer anonymous requests for a private repository with 403 or 404.
            let hides = matches!(status, StatusCode::FORBIDDEN | StatusCode::NOT_FOUND);
            let is_refused = status == StatusCode::UNAUTHORIZED;
            if !unconfirmed {
                traffic.refusal(status.as_u16()).fetch_add(1, Relaxed);
            }
            if logins_left == 0 || !(is_refused || unconfirmed && hides) {
                return Err(login.refused(what, self.registry(), status));
            }
            logins_left -= 1;
            login = self.logins.now(Some(&login), retries).await?;
            if login.is_nothing() && !is_refused {
                return Err(login.refused(what, self.registry(), status));
            }
        }
    }

    /// Follows a redirect of `answer`, without login and headers.
    async fn followed(
        &self,
        what: &str,
        retries: u32,
        answer: Response,
        url: &Url,
        change: &impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        let Some(client) = self.elsewhere.as_ref().filter(|_| answer.status().is_redirection())
        else {
            return Ok(answer);
        };
        let place = answer.headers().get(LOCATION).and_then(|place| place.to_str().ok());
        let place = place.and_then(|place| url.join(place).ok());
        let place = place.filter(|to| to.scheme() == "https" || url.scheme() == "http");
        let place = place.ok_or_else(|| {
            let why = format!("{} redirects to no place that may be asked", self.registry());
            Error::new(ErrorKind::Unavailable, format!("cannot {what}: {why}"))
        })?;
        let client = if place.origin() == url.origin() { &self.client } else { client };
        web::send(what, retries, || change(client.get(place.clone()))).await
    }
}
