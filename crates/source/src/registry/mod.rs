//! Reads and writes images in a registry over the OCI distribution protocol.
//!
//! ```text
//!   Name ──► Registry ──► login: credentials ─► token ──► documents, blobs, ranges of blobs
//!            server:  ranges: one try each, hedged when slow (the volume retries)
//!            command: whole blobs and documents: retries for 6 s, resumes broken bodies
//!   Artifact: a Burgeon image there, as a store      Uploads: writes blobs and manifests
//! ```
//!
//! Invariants: a range read returns exactly the requested range or an error; every body has a
//! maximum size and a minimum rate; a refused request is repeated once after a new login; no
//! message contains a secret.

mod artifact;
mod credentials;
mod digest;
mod endpoint;
mod helper;
mod hosts;
mod kubelet;
mod login;
mod name;
mod plugins;
mod providers;
mod resource;
mod token;
mod upload;

use std::{
    fmt,
    io::Read,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use bytes::Bytes;
use reqwest::{
    Method, RequestBuilder, Response, Url,
    header::{ACCEPT, HeaderMap, LINK, RANGE},
};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};

pub use self::credentials::{AskForCredentials, ask_for_credentials_by, login_files, serves};
pub use self::helper::{AskHelper, NOT_FOUND, Said, ask_helper, ask_helpers_by};
pub use self::{
    artifact::{ARTIFACT_TYPE, Artifact, Blob, EMPTY, EMPTY_TYPE, MANIFEST_TYPE, ObjectBlobs},
    digest::{Checked, Digesting, OciDigest},
    hosts::use_hosts_of,
    name::Name,
    plugins::ask_plugins,
    providers::{PROVIDER_DIR, PROVIDERS, Providers, VERB as KUBELET_LOGIN},
    upload::{Put, Uploads},
};
use self::{
    endpoint::{Endpoint, Waiting},
    resource::Resource,
    token::Operation,
};
use crate::{
    Access, Traffic,
    body::{Bounded, Failed},
    remote::{Hedge, REQUESTS_MAX, check_range},
    waiting, web,
};

/// Longest index, manifest or configuration, in bytes. Registries accept no longer ones.
pub const DOCUMENT_MAX: u64 = 4 << 20;

/// Longest blob that is read, in bytes; no registry is known to hold a longer one. [`Checked`]
/// enforces the tighter bound: the size in the manifest.
const BLOB_MAX: u64 = 4 << 40;

/// Most pages of a list that are read.
const PAGES_MAX: usize = 16;

const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// A repository. Cheap to clone.
#[derive(Clone)]
pub struct Registry(Arc<Inner>);

struct Inner {
    name: Name,
    /// The hosts to ask, in this order; the server is last.
    endpoints: Vec<Endpoint>,
    requests: Semaphore,
    hedge: Hedge,
    traffic: Traffic,
    /// Deadline for documents.
    answer_by: Mutex<Option<Instant>>,
}

impl Registry {
    /// Opens the repository of `name` with the credentials in `access`. Sends nothing.
    pub fn open(name: &Name, access: &Access) -> Result<Self> {
        Self::open_to(Operation::Pull, name, access)
    }

    fn open_to(operation: Operation, name: &Name, access: &Access) -> Result<Self> {
        Ok(Self(Arc::new(Inner {
            endpoints: endpoint::all(operation, name, access)?,
            name: name.clone(),
            requests: Semaphore::new(REQUESTS_MAX),
            hedge: Hedge::new(),
            traffic: Traffic::default(),
            answer_by: Mutex::default(),
        })))
    }

    /// The name it was opened with.
    pub fn name(&self) -> &Name {
        &self.0.name
    }

    /// Counters of the requests sent and their results.
    pub fn traffic(&self) -> &Traffic {
        &self.0.traffic
    }

    /// Limits the total time for all documents, retries included, to `limit` from now. With
    /// `None`, only the number of retries limits it.
    pub fn answer_within(&self, limit: Option<Duration>) {
        let by = limit.map(|limit| Instant::now() + limit);
        *self.0.answer_by.lock().unwrap_or_else(PoisonError::into_inner) = by;
    }

    /// Fetches an index or manifest of at most [`DOCUMENT_MAX`] bytes and returns it with its
    /// digest: the one with `digest`, or else the one that the name refers to. Blocks this thread.
    pub fn document(&self, digest: Option<&OciDigest>) -> Result<(Vec<u8>, OciDigest)> {
        waiting(self.fetch_document(digest, web::RETRIES))
    }

    /// Fetches the document tagged `tag` in this repository, as [`Self::document`] does.
    pub fn document_tagged(&self, tag: &str) -> Result<(Vec<u8>, OciDigest)> {
        waiting(self.fetch_named(&Resource::Tag(tag.to_owned()), None, web::RETRIES))
    }

    /// Lists the referrers of the image `digest` with artifact type `kind` through the registry's
    /// referrers API: at most sixteen pages, each an index of at most [`DOCUMENT_MAX`] bytes.
    /// `None` if the registry has no such list. The list may include other types: not every
    /// registry filters.
    pub fn referrers(&self, digest: &OciDigest, kind: &str) -> Result<Option<Vec<Bytes>>> {
        let (mut pages, mut next) = (Vec::new(), Some(Resource::referrers(digest, kind)));
        while let Some(page) = next.take().filter(|_| pages.len() < PAGES_MAX) {
            match waiting(self.fetch_whole(&page, web::RETRIES)) {
                Ok((bytes, headers, _)) => {
                    pages.push(bytes);
                    next = self.next_page(&headers).filter(|next| *next != page);
                }
                // A partial list may suffice.
                Err(_) if !pages.is_empty() => break,
                // The registry has no referrers API.
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(pages))
    }

    async fn fetch_document(
        &self,
        digest: Option<&OciDigest>,
        retries: u32,
    ) -> Result<(Vec<u8>, OciDigest)> {
        let wanted = digest.or(self.0.name.digest());
        let resource = match wanted {
            Some(digest) => Resource::Manifest(digest.clone()),
            None => Resource::Tag(self.0.name.tag().to_owned()),
        };
        self.fetch_named(&resource, wanted, retries).await
    }

    async fn fetch_named(
        &self,
        resource: &Resource,
        wanted: Option<&OciDigest>,
        retries: u32,
    ) -> Result<(Vec<u8>, OciDigest)> {
        let by = *self.0.answer_by.lock().unwrap_or_else(PoisonError::into_inner);
        let mut others = self.0.endpoints.len();
        loop {
            let (bytes, _, host) = match by {
                None => self.fetch_whole(resource, retries).await?,
                Some(by) => {
                    timeout_at(by, self.fetch_whole(resource, retries)).await.map_err(|_| {
                        let what =
                            format!("cannot read {resource} of {}: no answer in time", self.0.name);
                        Error::new(ErrorKind::Unavailable, what)
                    })??
                }
            };
            let digest = OciDigest::of(&bytes);
            others -= 1;
            match wanted {
                // Another host may have the right one.
                Some(wanted) if *wanted != digest && others > 0 => host.rest(),
                Some(wanted) if *wanted != digest => {
                    let why = format!("the registry gave {digest} instead");
                    let what = format!("cannot read {resource} of {}: {why}", self.0.name);
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
                _ => return Ok((bytes.into(), digest)),
            }
        }
    }

    /// Fetches `resource`, with the headers of the answer and the host that gave it.
    async fn fetch_whole(
        &self,
        resource: &Resource,
        retries: u32,
    ) -> Result<(Bytes, HeaderMap, &Endpoint)> {
        let what = format!("read {resource} of {}", self.0.name);
        let (mut tries, mut silent) = (web::Tries::new(retries), 0);
        // Documents are short: one that breaks off is fetched again from its beginning.
        loop {
            let accepting = |request: RequestBuilder| request.header(ACCEPT, MANIFESTS);
            let asked = self.ask_hosts(&what, Method::GET, resource, retries, accepting).await?;
            let (host, answer) = asked;
            let headers = answer.headers().clone();
            match gather(answer, DOCUMENT_MAX).await {
                Ok(bytes) => return Ok((bytes, headers, host)),
                Err(Failed::Excess(excess)) => {
                    host.rest();
                    return Err(Error::new(excess.kind(), format!("cannot {what}: {excess}")));
                }
                Err(Failed::Broken(error)) => {
                    host.rest();
                    silent += u32::from(web::is_silence(&error));
                    let error = web::unreachable(&what, error);
                    if silent == web::SILENT_MAX {
                        return Err(error);
                    }
                    tries.again(error).await?;
                }
            }
        }
    }

    /// Streams a blob from `offset` on, unverified. Blocks the thread that reads.
    ///
    /// Errors: `Unavailable` also if the registry answers only with the whole blob.
    pub fn blob(&self, digest: &OciDigest, offset: u64) -> Result<impl Read + Send + use<>> {
        let (this, blob) = (self.clone(), Resource::Blob(digest.clone()));
        let what = format!("read {blob} of {}", self.0.name);
        web::BlockingBody::starting(what.clone(), offset, BLOB_MAX, move |offset| {
            waiting(this.get(&what, &blob, web::RETRIES, |request| web::from(request, offset)))
        })
    }

    /// Fetches `range` of a blob, unverified: exactly that many bytes, or an error. Tries once,
    /// and hedges the request when it is slow.
    pub async fn blob_range(&self, digest: &OciDigest, range: ByteRange) -> Result<Bytes> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let _place = self.0.requests.acquire().await.map_err(|_| {
            Error::new(ErrorKind::Unavailable, format!("{} is being closed", self.0.name))
        })?;
        let hedged = || {
            self.0.traffic.hedges.fetch_add(1, Relaxed);
        };
        self.0.hedge.ask(|| self.fetch_range(digest, range), hedged).await
    }

    async fn fetch_range(&self, digest: &OciDigest, range: ByteRange) -> Result<Bytes> {
        let what = format!("read {range} of blob {digest} of {}", self.0.name);
        let failed = |kind, why: String| Err(Error::new(kind, format!("cannot {what}: {why}")));
        let asked = range.start()..range.end();
        let header = format!("bytes={}-{}", asked.start, asked.end - 1);
        let blob = Resource::Blob(digest.clone());
        let change = |request: RequestBuilder| request.header(ACCEPT, MANIFESTS);
        let change = |request: RequestBuilder| change(request).header(RANGE, &header);
        let (host, answer) = self.ask_hosts(&what, Method::GET, &blob, 0, change).await?;
        let traffic = &self.0.traffic;
        if let Err(wrong) = check_range(answer.status().as_u16(), answer.headers(), asked) {
            traffic.lies.fetch_add(1, Relaxed);
            host.rest();
            return failed(wrong.kind(), wrong.to_string());
        }
        let gathered = gather(answer, range.len()).await;
        if gathered.as_ref().map_or(0, Bytes::len) as u64 != range.len() {
            // The next try asks another host, if there is one.
            host.rest();
        }
        match gathered {
            Ok(bytes) if bytes.len() as u64 == range.len() => Ok(bytes),
            Ok(bytes) => {
                traffic.broken.fetch_add(1, Relaxed);
                let why = format!("the answer broke off after {} bytes", bytes.len());
                failed(ErrorKind::Unavailable, why)
            }
            Err(Failed::Excess(excess)) => {
                traffic.excess(excess).fetch_add(1, Relaxed);
                failed(excess.kind(), excess.to_string())
            }
            Err(Failed::Broken(error)) => {
                traffic.broken.fetch_add(1, Relaxed);
                Err(web::unreachable(&what, error))
            }
        }
    }

    /// Sends a GET for `resource`.
    async fn get(
        &self,
        what: &str,
        resource: &Resource,
        retries: u32,
        change: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        let change = |request: RequestBuilder| change(request.header(ACCEPT, MANIFESTS));
        self.ask(what, Method::GET, resource, retries, change).await
    }

    /// Sends a request for `resource` and returns the answer if it is a success.
    /// Logs in if needed.
    async fn ask(
        &self,
        what: &str,
        method: Method,
        resource: &Resource,
        retries: u32,
        change: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        Ok(self.ask_hosts(what, method, resource, retries, change).await?.1)
    }

    /// [`Self::ask`], with the host that has answered.
    async fn ask_hosts(
        &self,
        what: &str,
        method: Method,
        resource: &Resource,
        retries: u32,
        change: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<(&Endpoint, Response)> {
        let (traffic, path) = (&self.0.traffic, resource.to_string());
        let able: Vec<_> = self.0.endpoints.iter().filter(|it| it.may_answer(resource)).collect();
        let Some((last, mirrors)) = able.split_last() else {
            let why = "no host in hosts.toml has the capability: add \"resolve\" for tags, \"pull\" for data";
            return Err(Error::new(ErrorKind::Invalid, format!("cannot {what}: {why}")));
        };
        let mirrors = mirrors.iter().copied();
        let (resting, awake): (Vec<&Endpoint>, Vec<&Endpoint>) = mirrors.partition(|it| it.rests());
        let mut refused = None;
        for host in awake.into_iter().chain([*last]).chain(resting) {
            let is_server = std::ptr::eq(host, *last);
            let waiting = (!is_server).then(|| host.waited_for());
            let tries = if is_server { retries } else { 0 };
            let answer = host.ask(traffic, what, method.clone(), &path, tries, &change).await;
            waiting.into_iter().for_each(Waiting::end);
            match answer {
                Ok(answer) => return Ok((host, answer)),
                // The registry itself does not have it, so no mirror that failed just now is asked
                // again.
                Err(error) if is_server && error.kind() == ErrorKind::NotFound => {
                    return Err(error);
                }
                Err(error) if is_server => refused = Some(error),
                Err(error) => {
                    // It may lack this image and have others.
                    if error.kind() != ErrorKind::NotFound {
                        host.rest();
                    }
                    tracing::debug!(%error, host = host.registry(), "a mirror failed");
                }
            }
        }
        Err(refused.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, format!("cannot {what}"))))
    }

    /// The host that takes writes.
    fn server(&self) -> Result<&Endpoint> {
        self.0.endpoints.last().ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("{} has no host", self.0.name.registry()))
        })
    }

    fn next_page(&self, headers: &HeaderMap) -> Option<Resource> {
        let next = |endpoint: &Endpoint| next_page(headers, &endpoint.base);
        self.0.endpoints.iter().find_map(next).map(Resource::Referrers)
    }
}

/// The body of `answer`; an error if it is longer than `len_max` bytes.
async fn gather(
    answer: Response,
    len_max: u64,
) -> std::result::Result<Bytes, Failed<reqwest::Error>> {
    Bounded::new(reqwest::Body::from(answer), len_max).gather().await
}

/// Path of the next page of a list, relative to `base`; `None` for any other place, because
/// credentials go nowhere else. (RFC 8288 and the OCI distribution specification.)
fn next_page(headers: &HeaderMap, base: &Url) -> Option<String> {
    let links = headers.get_all(LINK).iter().filter_map(|link| link.to_str().ok());
    let next = links.flat_map(|links| links.split(',')).find_map(|link| {
        let (target, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
        let is_next = |parameter: &str| matches!(parameter.trim(), "rel=\"next\"" | "rel=next");
        parameters.split(';').any(is_next).then_some(target)
    })?;
    let next = base.join(next).ok()?;
    Some(next.as_str().strip_prefix(base.as_str())?.to_owned())
}

/// Shows no credentials.
impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.0.name).finish()
    }
}

/// Converts the I/O error that ended a body.
pub fn body_error(what: &str, error: std::io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => Error::io(format!("cannot {what}"), error),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        net::TcpListener,
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering::SeqCst},
        },
        thread,
        time::Duration,
    };

    use reqwest::{
        Url,
        header::{HeaderMap, HeaderValue, LINK},
    };

    use super::{Name, Registry, next_page};
    use crate::Access;

    /// Answers every request with the beginning of a document, and counts those for manifests.
    fn breaks_off(listener: TcpListener, manifests: Arc<AtomicU32>) {
        for stream in listener.incoming().map_while(Result::ok) {
            let manifests = manifests.clone();
            thread::spawn(move || {
                let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let asked = lines.next().unwrap_or_default();
                lines.find(String::is_empty);
                manifests.fetch_add(u32::from(asked.contains("/manifests/")), SeqCst);
                let _ = (&stream).write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}");
                // Until the client closes the connection.
                lines.for_each(drop);
            });
        }
    }

    #[test]
    fn a_document_that_falls_silent_is_fetched_twice() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = format!("oci://{}/x/x:t", listener.local_addr().unwrap());
        let manifests = Arc::new(AtomicU32::new(0));
        let counted = manifests.clone();
        thread::spawn(|| breaks_off(listener, counted));
        let name = Name::parse(&name).unwrap().unwrap();
        let mut registry = Registry::open(&name, &Access::default()).unwrap();
        let inner = Arc::get_mut(&mut registry.0).unwrap();
        let client = reqwest::Client::builder().read_timeout(Duration::from_millis(200));
        inner.endpoints[0].client = client.build().unwrap();
        let error = registry.document(None).unwrap_err();
        assert_eq!(manifests.load(SeqCst), 2, "{error}");
    }

    #[test]
    fn next_page_stays_in_the_same_repository() {
        let base = Url::parse("https://r.example/v2/a/b/").unwrap();
        let next = |link: &str| {
            let link = HeaderValue::from_str(link).unwrap();
            next_page(&HeaderMap::from_iter([(LINK, link)]), &base)
        };
        let path = "referrers/sha256:00?n=2&last=x".to_owned();
        for there in [
            "</v2/a/b/referrers/sha256:00?n=2&last=x>; rel=\"next\"",
            "<https://r.example/x>; rel=prev, </v2/a/b/referrers/sha256:00?n=2&last=x>;title=a;rel=next",
        ] {
            assert_eq!(next(there).as_ref(), Some(&path), "{there}");
        }
        for nowhere in [
            "<https://s.example/v2/a/b/referrers/x>; rel=\"next\"",
            "<http://r.example/v2/a/b/referrers/x>; rel=\"next\"",
            "</v2/a/c/referrers/x>; rel=\"next\"",
            "</v2/a/b/../c/referrers/x>; rel=\"next\"",
            "</v2/a/b/referrers/x>; rel=\"prev\"",
            "/v2/a/b/referrers/x; rel=\"next\"",
        ] {
            assert_eq!(next(nowhere), None, "{nowhere}");
        }
    }
}
