//! An S3 server on loopback: the requests of object stores, by the REST API of Amazon S3
//! (2006-03-01), with signatures (AWS Signature Version 4) that are checked. Debian 12 has no S3
//! server.
//!
//! Objects lie in memory. A listing comes in pages, and shows the objects written before it.
//!
//! The crates `s3s` and `s3s-fs` do not pay: their current release (0.17) needs Rust 1.96 while
//! this workspace builds with 1.88, releases for 1.88 are alphas, and `s3s-fs` calls itself
//! experimental. A store in memory and pages of a few keys would be code of ours behind them, too.

use std::{
    collections::BTreeMap,
    io::{self, BufReader, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::SystemTime,
};

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};

use super::head::Head;

const BUCKET: &str = "bucket";
const REGION: &str = "us-east-1";
const KEY_ID: &str = "test-id";
const SECRET: &str = "test-secret";
/// Keys in a page of a listing: few, so that there are several.
const PAGE: usize = 20;
/// The block of SHA-256, for HMAC.
const HMAC_BLOCK: usize = 64;

struct Object {
    bytes: Arc<[u8]>,
    modified: SystemTime,
}

type Objects = Mutex<BTreeMap<String, Object>>;

/// An S3 server with one empty bucket, `bucket`. It ends when dropped.
pub struct S3 {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
}

impl S3 {
    /// Starts it.
    pub fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (address, ended) = (listener.local_addr()?, Arc::new(AtomicBool::new(false)));
        let (objects, over) = (Arc::new(Objects::default()), Arc::clone(&ended));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Relaxed) {
                    return;
                }
                let objects = Arc::clone(&objects);
                // An error concerns only the client, which is gone.
                thread::spawn(move || stream.and_then(|stream| serve(&stream, &objects)));
            }
        });
        Ok(Self { address, ended })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The environment of a program that uses it, by way of `address`.
    pub fn environment(address: SocketAddr) -> [(&'static str, String); 4] {
        [
            ("AWS_ENDPOINT_URL", format!("http://{address}")),
            ("AWS_ACCESS_KEY_ID", KEY_ID.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_REGION", REGION.to_owned()),
        ]
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect(self.address);
    }
}

fn lock(objects: &Objects) -> MutexGuard<'_, BTreeMap<String, Object>> {
    objects.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers a connection's requests.
fn serve(stream: &TcpStream, objects: &Objects) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    while let Some(head) = Head::read(&mut reader)? {
        let body = head.body(&mut reader, false)?;
        let request = Request::new(&head, body);
        let (mut answer, body) = match request.check_signature() {
            Ok(()) => request.answer(objects),
            Err(why) => error("403 Forbidden", "SignatureDoesNotMatch", why),
        };
        answer.set("content-length", body.len());
        // The length is the object's, the body of a HEAD is none.
        let body = if head.method() == "HEAD" { &[] } else { &body[..] };
        (&*stream).write_all(&[&answer.encode(), body].concat())?;
    }
    Ok(())
}

type Answer = (Head, Arc<[u8]>);

fn plain(status: &str) -> Answer {
    let headers = vec![("server".to_owned(), "testkit".to_owned())];
    (Head { first: format!("HTTP/1.1 {status}"), headers }, Arc::default())
}

fn xml(status: &str, body: &str) -> Answer {
    let mut answer = plain(status).0;
    answer.set("content-type", "application/xml");
    let body = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{body}");
    (answer, body.into_bytes().into())
}

fn error(status: &str, code: &str, why: &str) -> Answer {
    xml(status, &format!("<Error><Code>{code}</Code><Message>{why}</Message></Error>"))
}

struct Request<'a> {
    head: &'a Head,
    body: Vec<u8>,
    /// As it was sent, which is how it is signed.
    path: &'a str,
    /// Decoded, in order.
    query: BTreeMap<String, String>,
}

impl<'a> Request<'a> {
    fn new(head: &'a Head, body: Vec<u8>) -> Self {
        let (path, query) = head.second().split_once('?').unwrap_or((head.second(), ""));
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        let query = pairs.map(|(name, value)| (decoded(name), decoded(value))).collect();
        Self { head, body, path, query }
    }

    fn answer(self, objects: &Objects) -> Answer {
        let path = decoded(self.path);
        let path = path.trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        if bucket != BUCKET {
            return error("404 Not Found", "NoSuchBucket", "there is one bucket");
        }
        match (self.head.method(), key) {
            ("GET", "") => self.list(objects),
            ("POST", "") if self.query.contains_key("delete") => self.delete(objects),
            ("GET" | "HEAD", key) => self.get(objects, key),
            ("PUT", key) if !key.is_empty() => self.put(objects, key),
            _ => error("501 Not Implemented", "NotImplemented", "no test asks for this"),
        }
    }

    fn put(self, objects: &Objects, key: &str) -> Answer {
        let mut objects = lock(objects);
        if self.head.get("if-none-match") == Some("*") && objects.contains_key(key) {
            return error("412 Precondition Failed", "PreconditionFailed", "it is there");
        }
        let mut answer = plain("200 OK");
        answer.0.set("etag", etag(&self.body));
        let object = Object { bytes: self.body.into(), modified: SystemTime::now() };
        objects.insert(key.to_owned(), object);
        answer
    }

    fn get(&self, objects: &Objects, key: &str) -> Answer {
        let objects = lock(objects);
        let Some(object) = objects.get(key) else {
            return error("404 Not Found", "NoSuchKey", "there is no such object");
        };
        let (mut answer, mut body) = (plain("200 OK").0, Arc::clone(&object.bytes));
        if let Some(range) = self.head.get("range") {
            let len = body.len();
            let Some((start, end)) = range_of(range, len) else {
                return error("416 Range Not Satisfiable", "InvalidRange", "it is not so long");
            };
            answer.first = "HTTP/1.1 206 Partial Content".to_owned();
            answer.set("content-range", format!("bytes {start}-{}/{len}", end - 1));
            body = body[start..end].into();
        }
        answer.set("etag", etag(&object.bytes));
        answer.set("last-modified", http_date(object.modified));
        (answer, body)
    }

    /// Several at once, which is how the library removes one.
    fn delete(&self, objects: &Objects) -> Answer {
        let (text, mut objects) = (String::from_utf8_lossy(&self.body), lock(objects));
        let keys = text.split("<Key>").skip(1).filter_map(|rest| rest.split_once("</Key>"));
        let mut body = String::from("<DeleteResult>");
        for (key, _) in keys {
            objects.remove(&unescaped(key));
            body += &format!("<Deleted><Key>{key}</Key></Deleted>");
        }
        xml("200 OK", &(body + "</DeleteResult>"))
    }

    fn list(&self, objects: &Objects) -> Answer {
        let word = |name: &str| self.query.get(name).map_or("", |value| value.as_str());
        if word("list-type") != "2" || !word("delimiter").is_empty() {
            return error("501 Not Implemented", "NotImplemented", "no test asks for this");
        }
        let objects = lock(objects);
        let (prefix, after) = (word("prefix"), word("continuation-token").to_owned());
        let rest = objects.range((Bound::Excluded(after), Bound::Unbounded));
        let rest: Vec<_> = rest.filter(|(key, _)| key.starts_with(prefix)).take(PAGE + 1).collect();
        let page = &rest[..rest.len().min(PAGE)];
        let mut body = String::from("<ListBucketResult>");
        for (key, object) in page {
            let (time, size) = (iso(object.modified), object.bytes.len());
            let tag = escaped(&etag(&object.bytes));
            body += &format!(
                "<Contents><Key>{}</Key><LastModified>{time}</LastModified><ETag>{tag}</ETag>\
                 <Size>{size}</Size></Contents>",
                escaped(key)
            );
        }
        if let Some((last, _)) = page.last().filter(|_| rest.len() > PAGE) {
            let token = escaped(last);
            body += &format!("<NextContinuationToken>{token}</NextContinuationToken>");
        }
        body += &format!("<IsTruncated>{}</IsTruncated>", rest.len() > PAGE);
        xml("200 OK", &(body + "</ListBucketResult>"))
    }

    /// Checks that the request was signed with the secret.
    fn check_signature(&self) -> Result<(), &'static str> {
        let given = self.head.get("authorization").ok_or("it is not signed")?;
        let given = given.strip_prefix("AWS4-HMAC-SHA256 ").ok_or("it is signed in another way")?;
        let word = |name: &str| {
            let words = given.split(',').filter_map(|word| word.trim().split_once('='));
            words.clone().find(|(known, _)| *known == name).map(|(_, value)| value)
        };
        let scope = word("Credential").and_then(|credential| credential.split_once('/'));
        let (id, scope) = scope.ok_or("it names no key")?;
        let date = scope.split('/').next().unwrap_or_default();
        if id != KEY_ID || scope != format!("{date}/{REGION}/s3/aws4_request") {
            return Err("the key is not known");
        }
        let header = |name: &str| self.head.get(name).unwrap_or_default();
        let names = word("SignedHeaders").ok_or("no headers are signed")?;
        let headers: String =
            names.split(';').map(|name| format!("{name}:{}\n", header(name))).collect();
        let query: Vec<_> =
            self.query.iter().map(|(n, v)| format!("{}={}", encoded(n), encoded(v))).collect();
        let payload = header("x-amz-content-sha256");
        if payload != "UNSIGNED-PAYLOAD" && payload != hex(&Sha256::digest(&self.body)) {
            return Err("the body is another");
        }
        let canonical = [self.head.method(), self.path, &query.join("&"), &headers, names, payload];
        let digest = hex(&Sha256::digest(canonical.join("\n")));
        let text = ["AWS4-HMAC-SHA256", header("x-amz-date"), scope, &digest].join("\n");
        let mut key = hmac(format!("AWS4{SECRET}").as_bytes(), date.as_bytes());
        for part in [REGION, "s3", "aws4_request", &text] {
            key = hmac(&key, part.as_bytes());
        }
        if word("Signature") == Some(&hex(&key)) { Ok(()) } else { Err("the signature is wrong") }
    }
}

/// HMAC-SHA256 (RFC 2104).
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut block = [0; HMAC_BLOCK];
    match key.len() {
        0..=HMAC_BLOCK => block[..key.len()].copy_from_slice(key),
        _ => block[..32].copy_from_slice(&Sha256::digest(key)),
    }
    let digest = |pad: u8, message: &[u8]| -> [u8; 32] {
        let padded = block.map(|byte| byte ^ pad);
        Sha256::new().chain_update(padded).chain_update(message).finalize().into()
    };
    digest(0x5c, &digest(0x36, message))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn etag(bytes: &[u8]) -> String {
    format!("\"{}\"", &hex(&Sha256::digest(bytes))[..32])
}

/// Start and end of `bytes=A-B`, `bytes=A-` or `bytes=-N` in `len` bytes.
fn range_of(range: &str, len: usize) -> Option<(usize, usize)> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let (start, end) = match (first, last) {
        ("", count) => (len.saturating_sub(count.parse().ok()?), len),
        (first, "") => (first.parse().ok()?, len),
        (first, last) => {
            (first.parse().ok()?, last.parse::<usize>().ok()?.checked_add(1)?.min(len))
        }
    };
    (start < end).then_some((start, end))
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((byte, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()).filter(|_| *byte == b'%') {
            Some(code) => (bytes.push(code), rest = &after[2..]).1,
            None => (bytes.push(*byte), rest = after).1,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let code = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(code).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn unescaped(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
    text.replace("&apos;", "'").replace("&amp;", "&")
}

/// A moment as in listings.
fn iso(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// A moment as in headers.
fn http_date(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).format("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::{decoded, encoded, hex, hmac, http_date, iso, range_of};

    #[test]
    fn times_are_written_as_others_do() {
        for (seconds, date, http) in [
            (0, "1970-01-01T00:00:00.000Z", "Thu, 01 Jan 1970 00:00:00 GMT"),
            (951_782_400, "2000-02-29T00:00:00.000Z", "Tue, 29 Feb 2000 00:00:00 GMT"),
            (1_795_301_999, "2026-11-21T22:59:59.000Z", "Sat, 21 Nov 2026 22:59:59 GMT"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!((&*iso(time), &*http_date(time)), (date, http));
        }
    }

    #[test]
    fn messages_are_signed_as_rfc_4231_says() {
        let digest = hex(&hmac(b"Jefe", b"what do ya want for nothing?"));
        assert_eq!(digest, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn ranges_and_codes() {
        assert_eq!(range_of("bytes=2-4", 10), Some((2, 5)));
        assert_eq!(range_of("bytes=8-99", 10), Some((8, 10)));
        assert_eq!(range_of("bytes=7-", 10), Some((7, 10)));
        assert_eq!(range_of("bytes=-3", 10), Some((7, 10)));
        assert_eq!(range_of("bytes=10-12", 10), None);
        assert_eq!(decoded("a%2Fb%20c%"), "a/b c%");
        assert_eq!(encoded("a/b c~"), "a%2Fb%20c~");
    }
}
