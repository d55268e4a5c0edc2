//! Tar archives on web servers.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    time::Duration,
};

use burgeon_block::{Error, ObjectStore, Result};
use burgeon_image::{
    builder::{self, BuildOptions, BuildReport, OnProgress},
    catalog::ReservedName,
};
use burgeon_source::{Directory, Partial, layer_object, registry::OciDigest, waiting, web};
use reqwest::{
    Response, StatusCode, Url,
    header::{ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED},
};

use crate::spool::given_up;

/// Longest archive without a content length: an endless one would fill the store.
const UNTOLD_MAX: u64 = 64 << 30;

/// Requests the archive from an offset on.
type Ask = Box<dyn FnMut(u64) -> Result<Response> + Send>;

/// An HTTP response whose body is the archive.
pub(crate) struct Archive {
    url: Url,
    answer: Response,
    ask: Ask,
    len: Option<u64>,
    /// ETag or date of the version.
    version: Option<String>,
}

impl Archive {
    /// Requests the archive; the body is read later. The response must begin within `limit`.
    pub(crate) fn open(url: &Url, limit: Option<Duration>) -> Result<Self> {
        let client = web::client()?;
        let doing = format!("read {}", shown(url));
        let to = url.clone();
        let send = move |offset, version: Option<&String>, limit: Option<Duration>| {
            let answer = waiting(web::send_within(limit, &doing, web::RETRIES, || {
                let request = web::from(web::get(&client, &to), offset);
                // Without this the rest could come from another version.
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
        let answer = send(0, None, limit)?;
        let (len, version) = (answer.content_length(), version_of(answer.headers()));
        let known = version.clone();
        let ask = Box::new(move |offset| send(offset, known.as_ref(), None));
        Ok(Self { url: url.clone(), answer, ask, len, version })
    }

    /// The image name for this version of the archive; `None` if the server gives no version.
    pub(crate) fn name(&self) -> Option<String> {
        let text = format!("{}\n{}\n{:?}", self.url, self.version.as_ref()?, self.len);
        Some(name_of(&text))
    }

    /// The image name for an archive without a version.
    pub(crate) fn unversioned_name(&self) -> String {
        name_of(self.url.as_str())
    }

    /// Builds the image `name` of the archive. With `own`, fetched bytes are kept there until the
    /// image is built, so that the next build after an interrupted one does not fetch them again.
    pub(crate) fn build(
        self,
        store: &impl ObjectStore,
        name: &str,
        (options, own): (&BuildOptions, Option<&Directory>),
        building: OnProgress<'_>,
    ) -> Result<BuildReport> {
        let what = format!("cannot build from {}", shown(&self.url));
        let (len, partial) = (self.len, own.and_then(|own| self.partial(own)));
        let build = |body| builder::from_tar(store, name, body, len, options, building);
        let built = self.body(partial.as_ref()).and_then(build);
        match (built, partial) {
            (Ok(report), partial) => {
                partial.into_iter().for_each(Partial::remove);
                Ok(report)
            }
            (Err(error), partial) => {
                let error = given_up(partial, error);
                Err(Error::with_source(error.kind(), what, error))
            }
        }
    }

    /// The file with the fetched beginning of this version. `None` if the version or length is
    /// unknown, or another process is fetching it.
    fn partial(&self, own: &Directory) -> Option<Partial> {
        let (name, len) = (self.name()?, self.len?);
        let object = layer_object("", &OciDigest::of(name.as_bytes()).bytes()).ok()?;
        own.partial(&object, len.saturating_sub(1)).ok()?
    }

    /// The whole archive: the beginning from `partial`, then the rest from the server.
    fn body(self, partial: Option<&Partial>) -> Result<Box<dyn Read + Send>> {
        let Self { url, answer, mut ask, len, .. } = self;
        let (what, len_max) = (format!("read {}", shown(&url)), len.unwrap_or(UNTOLD_MAX));
        let Some(partial) = partial else {
            return Ok(Box::new(web::BlockingBody::new(what, answer, len_max, ask)));
        };
        let cannot = |error| Error::io(format!("cannot use {}", partial.path().display()), error);
        let mut file = partial.file().try_clone().map_err(cannot)?;
        let mut left = partial.len();
        let goes_on = |answer: &Response| answer.status() == StatusCode::PARTIAL_CONTENT;
        let rest: Box<dyn Read + Send> = match left {
            0 => Box::new(web::BlockingBody::new(what, answer, len_max, ask)),
            _ => match ask(left)? {
                rest if goes_on(&rest) => {
                    Box::new(web::BlockingBody::after(what, left, rest, len_max, ask)?)
                }
                // The server does not support ranges, or has another version.
                all => {
                    file.set_len(0).map_err(cannot)?;
                    left = 0;
                    Box::new(web::BlockingBody::new(what, all, len_max, ask))
                }
            },
        };
        file.rewind().map_err(cannot)?;
        Ok(Box::new(Kept { file: Some(file), left, rest }))
    }
}

/// Reads the kept beginning of an archive, then the rest, which it appends to the file.
struct Kept {
    /// Read first, then appended to.
    file: Option<File>,
    /// Bytes of the file that are still to be read.
    left: u64,
    rest: Box<dyn Read + Send>,
}

impl Read for Kept {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if let Some(file) = self.file.as_mut().filter(|_| self.left > 0) {
            let len = usize::try_from(self.left).unwrap_or(usize::MAX).min(buf.len());
            let len = file.read(&mut buf[..len])?;
            if len == 0 && !buf.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.left -= len as u64;
            return Ok(len);
        }
        let len = self.rest.read(buf)?;
        if let Some(file) = &mut self.file
            && file.write_all(&buf[..len]).is_err()
        {
            // The disk may be full; the image may still fit.
            let _ = file.set_len(0);
            self.file = None;
        }
        Ok(len)
    }
}

/// The store's name for the archive that `text` identifies.
fn name_of(text: &str) -> String {
    ReservedName::Archive { hex: OciDigest::of(text.as_bytes()).hex() }.to_string()
}

/// The version of a response: a strong ETag, or the date of the last change.
fn version_of(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name)?.to_str().ok().map(str::to_owned);
    text(ETAG).filter(|tag| !tag.starts_with("W/")).or_else(|| text(LAST_MODIFIED))
}

/// A URL without query and fragment, which may hold secrets.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}
