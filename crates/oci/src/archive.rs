//! A tar archive behind a web server.

use std::io::Read;

use burgeon_block::{Error, ObjectStore, Result};
use burgeon_image::builder::{self, OnProgress, Options, Report};
use burgeon_source::{registry::Digest, waiting, web};
use reqwest::{
    Response, Url,
    header::{ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED},
};

/// Longest archive of which the server does not say how long it is: one that never ends would fill the
/// store.
const UNTOLD_MAX: u64 = 64 << 30;

/// An answer whose body is the archive.
pub(crate) struct Archive {
    url: Url,
    body: Box<dyn Read + Send>,
    len: Option<u64>,
    /// What the server knows the archive's version by.
    version: Option<String>,
}

impl Archive {
    /// Asks for the archive; its bytes come when they are read.
    pub(crate) fn open(url: &Url) -> Result<Self> {
        let client = web::client()?;
        let what = format!("read {}", shown(url));
        let (to, doing) = (url.clone(), what.clone());
        let ask = move |offset, version: Option<&String>| -> Result<Response> {
            let answer = waiting(web::send(&doing, web::RETRIES, || {
                let request = web::from(web::get(&client, &to), offset);
                // The rest of another version would be no rest.
                match version {
                    Some(version) => request.header(IF_RANGE, version),
                    None => request,
                }
            }))?;
            match answer.status().is_success() {
                true => Ok(answer),
                false => Err(web::refused(&doing, answer.status())),
            }
        };
        let answer = ask(0, None)?;
        let (len, version) = (answer.content_length(), version_of(answer.headers()));
        let known = version.clone();
        let rest = move |offset| ask(offset, known.as_ref());
        let body = web::Body::new(what, answer, len.unwrap_or(UNTOLD_MAX), rest);
        Ok(Self { url: url.clone(), body: Box::new(body), len, version })
    }

    /// The name that the image of this very version has; `None` where the server does not say
    /// which version it is.
    pub(crate) fn name(&self) -> Option<String> {
        let text = format!("{}\n{}\n{:?}", self.url, self.version.as_ref()?, self.len);
        Some(format!("url:{}", Digest::of(text.as_bytes()).hex()))
    }

    /// The name of an archive without a version.
    pub(crate) fn unversioned_name(&self) -> String {
        format!("url:{}", Digest::of(self.url.as_str().as_bytes()).hex())
    }

    pub(crate) fn build(
        self,
        store: &impl ObjectStore,
        name: &str,
        options: &Options,
        building: OnProgress<'_>,
    ) -> Result<Report> {
        let shown = shown(&self.url);
        builder::from_tar(store, name, self.body, self.len, options, building).map_err(|error| {
            let what = format!("cannot build from {shown}");
            Error::with_source(error.kind(), what, error)
        })
    }
}

/// A strong validator.
fn version_of(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name)?.to_str().ok().map(str::to_owned);
    text(ETAG).filter(|tag| !tag.starts_with("W/")).or_else(|| text(LAST_MODIFIED))
}

/// A URL without what could be a secret.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}
