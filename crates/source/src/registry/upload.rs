//! Writes blobs and manifests to a registry.
//!
//! ```text
//!   HEAD blobs/<digest> ──► exists: done        missing: POST blobs/uploads/ ──► PUT …?digest=
//!   PUT manifests/<tag or digest> ──► OCI-Subject: the registry lists it as a referrer
//! ```
//!
//! Invariants: a blob is sent whole, in one request, and the registry checks its digest; an upload
//! that breaks off starts over, a bounded number of times; credentials go to no other server.

use std::time::Duration;

use burgeon_block::{Error, ErrorKind, Result};
use bytes::Bytes;
use reqwest::{
    Client, Method, RequestBuilder, StatusCode, Url,
    header::{CONTENT_LENGTH, CONTENT_TYPE, LOCATION},
};

use super::{Name, OciDigest, Registry, resource::Resource, token::Operation};
use crate::{Access, waiting, web};

/// Longest time for sending one blob: four packs of 32 MiB at a time, at 1 Mbit/s in all.
const UPLOAD_MAX: Duration = Duration::from_secs(1200);
/// Answer header: the digest of the image that lists the artifact as a referrer.
const SUBJECT: &str = "oci-subject";

/// A repository open for writing. Cheap to clone.
#[derive(Clone)]
pub struct Uploads {
    registry: Registry,
    client: Client,
}

/// A document that was written.
#[derive(Clone, Debug)]
pub struct Put {
    /// Its digest.
    pub digest: OciDigest,
    /// The image for which the registry itself lists it as a referrer.
    pub subject: Option<OciDigest>,
}

/// The result of a try.
enum Tried {
    Done,
    /// Another try may help.
    Again(Error),
}

impl Uploads {
    /// Opens the repository of `name` for writing with the credentials in `access`. Sends nothing.
    pub fn open(name: &Name, access: &Access) -> Result<Self> {
        let registry = Registry::open_to(Operation::Push, name, access)?;
        Ok(Self { registry, client: web::uploading_client(UPLOAD_MAX)? })
    }

    /// True if the repository has the blob.
    pub fn has(&self, digest: &OciDigest) -> Result<bool> {
        let what = format!("look for blob {digest} of {}", self.registry.name());
        let blob = Resource::Blob(digest.clone());
        let plain = |request: RequestBuilder| request;
        match waiting(self.registry.ask(&what, Method::HEAD, &blob, web::RETRIES, plain)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Uploads the blob `bytes`, which has `digest`.
    pub fn put(&self, digest: &OciDigest, bytes: &Bytes) -> Result<()> {
        let what = format!("write blob {digest} of {}", self.registry.name());
        waiting(async {
            // A try is two requests, because a registry forgets the place that the first one gave.
            let mut tries = web::Tries::new(web::RETRIES);
            while let Tried::Again(error) = self.try_put(&what, digest, bytes).await? {
                tries.again(error).await?;
            }
            Ok(())
        })
    }

    async fn try_put(&self, what: &str, digest: &OciDigest, bytes: &Bytes) -> Result<Tried> {
        let begun =
            self.registry.ask(what, Method::POST, &Resource::Uploads, web::RETRIES, |request| {
                request.header(CONTENT_LENGTH, 0)
            });
        let begun = begun.await?;
        let place = begun.headers().get(LOCATION).and_then(|place| place.to_str().ok());
        let server = self.registry.server()?;
        let place = place.and_then(|place| server.base.join(place).ok());
        let url = place.filter(|url| self.may_go_to(url)).ok_or_else(|| {
            let why = "the registry gave no location for the upload, or an unencrypted one";
            Error::new(ErrorKind::Invalid, format!("cannot {what}: {why}"))
        })?;
        let mut url = url;
        url.query_pairs_mut().append_pair("digest", &digest.to_string());
        let is_here = url.origin() == self.registry.server()?.base.origin();
        let request = self.client.request(Method::PUT, url).body(bytes.clone());
        let request = request.header(CONTENT_TYPE, "application/octet-stream");
        let request = if is_here {
            self.registry.server()?.logins.now(None, web::RETRIES).await?.apply(request)
        } else {
            request
        };
        let answer = match request.send().await {
            Ok(answer) => answer,
            Err(error) => return Ok(Tried::Again(web::unreachable(what, error))),
        };
        let status = answer.status();
        let passes = status.is_server_error() && status != StatusCode::INSUFFICIENT_STORAGE
            || matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::NOT_FOUND
                    | StatusCode::RANGE_NOT_SATISFIABLE
                    | StatusCode::UNAUTHORIZED
            );
        if status.is_success() {
            Ok(Tried::Done)
        } else if passes {
            // Includes an upload that the registry forgot, and a token that has expired meanwhile.
            Ok(Tried::Again(web::refused(what, status)))
        } else {
            Err(web::refused(what, status))
        }
    }

    fn may_go_to(&self, url: &Url) -> bool {
        url.scheme() == "https" || url.scheme() == "http" && self.registry.name().is_plain()
    }

    /// Writes the manifest or index `bytes` of type `kind`, under `tag` or, without one, under its
    /// digest alone.
    pub fn put_document(&self, tag: Option<&str>, kind: &str, bytes: &[u8]) -> Result<Put> {
        let digest = OciDigest::of(bytes);
        let document = match tag {
            Some(tag) => Resource::Tag(tag.to_owned()),
            None => Resource::Manifest(digest.clone()),
        };
        let what = format!("write {document} of {}", self.registry.name());
        let put = self.registry.ask(&what, Method::PUT, &document, web::RETRIES, |request| {
            request.header(CONTENT_TYPE, kind).body(bytes.to_vec())
        });
        let answer = waiting(put)?;
        let subject = answer.headers().get(SUBJECT).and_then(|subject| subject.to_str().ok());
        Ok(Put { digest, subject: subject.and_then(|subject| subject.parse().ok()) })
    }
}
