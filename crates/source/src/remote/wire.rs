//! Sits between the library and the network, and checks every answer before the library sees it.
//!
//! Invariants: at most [`REFUSAL_MAX`] bytes of a refusal's body are read; an answer to a range
//! request is passed on only if it declares exactly that range; the library never sees more of a
//! body than was requested, nor a body that arrives too slowly.

use std::{
    error, fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use async_trait::async_trait;
use burgeon_block::ErrorKind;
use bytes::{Bytes, BytesMut};
use object_store::{
    ClientOptions, HeaderMap,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
        HttpResponseBody, HttpService, ReqwestConnector,
    },
};

use crate::body::{Bounded, Excess, Within};

/// Most bytes of a refusal that are read: an S3 error document is below 1 KiB.
const REFUSAL_MAX: usize = 4 << 10;

/// Longest answer that the library reads whole, in bytes: a web server's listing of 40,000 packs
/// (1.2 TiB), a page of a bucket's listing (1000 objects), credentials.
pub(super) const WHOLE_MAX: u64 = 32 << 20;

/// Request extension: the maximum length of a whole object.
#[derive(Clone, Copy)]
pub(super) struct LenMax(pub(super) u64);

/// Counters of the requests to a store and their results. Each try counts.
#[derive(Default, Debug)]
pub struct Traffic {
    /// Requests sent.
    pub requests: AtomicU64,
    /// Of these, sent because another was slow.
    pub hedges: AtomicU64,
    /// Answers 429 and 503: the server wants fewer requests.
    pub throttled: AtomicU64,
    /// Answers 401 and 403: credentials are missing, wrong or expired.
    pub denied: AtomicU64,
    /// Other refusals (4xx, 5xx), a missing object among them.
    pub refused: AtomicU64,
    /// Requests without a complete answer: no connection, reset, timed out.
    pub broken: AtomicU64,
    /// Answers that do not match the request.
    pub lies: AtomicU64,
}

impl Traffic {
    /// The counter of answers with this status.
    pub(crate) fn refusal(&self, status: u16) -> &AtomicU64 {
        match status {
            429 | 503 => &self.throttled,
            401 | 403 => &self.denied,
            _ => &self.refused,
        }
    }

    /// The counter of bodies that exceed this bound.
    pub(crate) fn excess(&self, excess: Excess) -> &AtomicU64 {
        match excess {
            Excess::TooLong(_) => &self.lies,
            Excess::TooSlow => &self.broken,
        }
    }

    /// Every counter with its name.
    pub fn figures(&self) -> [(&'static str, u64); 7] {
        [
            ("requests", self.requests.load(Relaxed)),
            ("hedges", self.hedges.load(Relaxed)),
            ("throttled", self.throttled.load(Relaxed)),
            ("denied", self.denied.load(Relaxed)),
            ("refused", self.refused.load(Relaxed)),
            ("broken", self.broken.load(Relaxed)),
            ("lies", self.lies.load(Relaxed)),
        ]
    }
}

/// Why an answer was rejected.
#[derive(Debug)]
pub(crate) enum Wrong {
    /// The server sent the whole object, or says that it cannot do ranges.
    NoRanges,
    /// The object ends before the range does.
    Ends,
    /// The answer declares another range.
    Other { asked: Range<u64>, said: String },
    /// The server cannot list.
    NoListing(u16),
    /// Its body exceeds a bound.
    Excess(Excess),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRanges => f.write_str("the server does not answer range requests"),
            Self::Ends => f.write_str("it is shorter than the range asked for: truncated?"),
            Self::Other { asked, said } => {
                write!(
                    f,
                    "the answer to a request for bytes {}-{} has the range {said:?}",
                    asked.start,
                    asked.end - 1
                )
            }
            Self::NoListing(status) => {
                write!(f, "the server gives no list of its files (it answered {status})")
            }
            Self::Excess(excess) => excess.fmt(f),
        }
    }
}

impl Wrong {
    /// The error kind for the caller.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Ends | Self::Other { .. } => ErrorKind::Corrupt,
            Self::NoRanges | Self::NoListing(_) => ErrorKind::Invalid,
            Self::Excess(excess) => excess.kind(),
        }
    }
}

impl error::Error for Wrong {}

/// Makes clients that check every answer.
#[derive(Debug)]
pub(super) struct Connector(pub(super) Arc<Traffic>);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Looking { inner, traffic: Arc::clone(&self.0) }))
    }
}

#[derive(Debug)]
struct Looking {
    inner: HttpClient,
    traffic: Arc<Traffic>,
}

#[async_trait]
impl HttpService for Looking {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let traffic = &self.traffic;
        traffic.requests.fetch_add(1, Relaxed);
        let asked = asked_range(request.headers());
        let lists = request.method().as_str() == "PROPFIND";
        let whole = request.extensions().get().map_or(WHOLE_MAX, |LenMax(len_max)| *len_max);
        let len_max = asked.as_ref().map_or(whole, |asked| asked.end.saturating_sub(asked.start));
        let answer = self.inner.execute(request).await.inspect_err(|_| {
            traffic.broken.fetch_add(1, Relaxed);
        })?;
        let status = answer.status().as_u16();
        if answer.status().is_success() {
            if let Some(Err(wrong)) =
                asked.map(|asked| check_range(status, answer.headers(), asked))
            {
                traffic.lies.fetch_add(1, Relaxed);
                return Err(HttpError::new(HttpErrorKind::Unknown, wrong));
            }
            return Ok(bounded(answer, len_max, traffic));
        }
        traffic.refusal(status).fetch_add(1, Relaxed);
        if asked.is_some() && status == 416 {
            return Err(HttpError::new(HttpErrorKind::Unknown, Wrong::Ends));
        }
        if lists && matches!(status, 400 | 405 | 501) {
            return Err(HttpError::new(HttpErrorKind::Unknown, Wrong::NoListing(status)));
        }
        let (parts, body) = answer.into_parts();
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(clip(body).await)))
    }
}

/// Bounds the body of `answer`.
fn bounded(answer: HttpResponse, len_max: u64, traffic: &Arc<Traffic>) -> HttpResponse {
    let traffic = Arc::clone(traffic);
    let excess = move |excess| {
        traffic.excess(excess).fetch_add(1, Relaxed);
        HttpError::new(HttpErrorKind::Unknown, Wrong::Excess(excess))
    };
    answer.map(|body| HttpResponseBody::new(Within::new(Bounded::new(body, len_max), excess)))
}

/// The byte range of a request, if it has one.
fn asked_range(headers: &HeaderMap) -> Option<Range<u64>> {
    let (first, last) =
        headers.get("range")?.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<u64>().ok()?.checked_add(1)?)
}

/// Checks that an answer is exactly the range `asked`.
pub(crate) fn check_range(
    status: u16,
    headers: &HeaderMap,
    asked: Range<u64>,
) -> Result<(), Wrong> {
    if status != 206 {
        return Err(Wrong::NoRanges);
    }
    let said = headers.get("content-range").and_then(|value| value.to_str().ok()).unwrap_or("");
    let parsed = said.strip_prefix("bytes ").and_then(|rest| {
        let (range, _size) = rest.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?))
    });
    match parsed {
        Some((first, last)) if first == asked.start && last == asked.end - 1 => Ok(()),
        // RFC 9110, 14.2: a range beyond the end is answered up to the end.
        Some((first, last)) if first == asked.start && last < asked.end => Err(Wrong::Ends),
        _ => Err(Wrong::Other { asked, said: said.chars().take(80).collect() }),
    }
}

/// The beginning of a refusal's body; a refusal that breaks off is still one.
async fn clip(body: HttpResponseBody) -> Bytes {
    let mut body = Bounded::new(body, u64::MAX);
    let mut clipped = BytesMut::new();
    while let Ok(Some(part)) = body.part().await {
        let room = REFUSAL_MAX - clipped.len();
        clipped.extend_from_slice(&part[..part.len().min(room)]);
        if clipped.len() == REFUSAL_MAX {
            break;
        }
    }
    clipped.freeze()
}

#[cfg(test)]
mod tests {
    use object_store::{HeaderMap, HeaderValue};

    use super::{Wrong, asked_range, check_range};

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn only_the_exact_range_is_passed_on() {
        assert_eq!(asked_range(&headers("range", "bytes=4-7")), Some(4..8));
        assert_eq!(asked_range(&HeaderMap::new()), None);
        let check = |status, said: &str| check_range(status, &headers("content-range", said), 4..8);
        assert!(check(206, "bytes 4-7/100").is_ok() && check(206, "bytes 4-7/*").is_ok());
        assert!(matches!(check(200, "bytes 4-7/100"), Err(Wrong::NoRanges)));
        assert!(matches!(check(206, "bytes 4-6/7"), Err(Wrong::Ends)));
        for lie in ["bytes 3-7/9", "bytes 4-8/9", "bytes 0-3/9", "bytes */9", "4-7/9", ""] {
            assert!(matches!(check(206, lie), Err(Wrong::Other { .. })), "{lie}");
        }
    }
}
