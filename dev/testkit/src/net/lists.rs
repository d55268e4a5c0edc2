//! A proxy that makes Debian's registry one of OCI 1.1: it lists the referrers of an image.
//!
//! ```text
//!   PUT manifests/…, with a subject ──► the registry ──► its answer, and OCI-Subject
//!   GET referrers/<digest>?artifactType=…            ──► nothing, and where the next page is
//!   GET that, of so many kinds                       ──► stored manifests with that subject and type
//! ```

use std::{
    io::{self, BufReader, Write},
    net::{SocketAddr, TcpStream},
    sync::{Mutex, PoisonError},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{front::Front, head::Head};

/// Subject and descriptor of each stored manifest.
type Known = Mutex<Vec<(String, Value)>>;

/// The front of a registry that lists referrers. It ends when dropped.
pub struct ReferrerLists(Front);

impl ReferrerLists {
    /// One before `server`.
    pub fn new(server: SocketAddr) -> io::Result<Self> {
        let known = Known::default();
        Front::start(move |client, _| serve(&client, server, &known)).map(Self)
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.0.address()
    }
}

fn serve(mut client: &TcpStream, server: SocketAddr, known: &Known) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let Some(mut request) = Head::read(&mut reader)? else { return Ok(()) };
    let body = request.body(&mut reader, false)?;
    if let Some((_, wanted)) = request.second().split_once("/referrers/") {
        let (subject, kind) = wanted.split_once("?artifactType=").unwrap_or((wanted, ""));
        // As of one that looks for the type when it has cut the list into pages.
        let (kind, is_second) = match kind.strip_suffix("&page=2") {
            Some(kind) => (kind, true),
            None => (kind, false),
        };
        let link = match is_second {
            true => String::new(),
            false => format!("link: <{}&page=2>; rel=\"next\"\r\n", request.second()),
        };
        let known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let of_kind = known.iter().filter(|(of, one)| of == subject && one["artifactType"] == kind);
        let list: Vec<&Value> = of_kind.filter(|_| is_second).map(|(_, one)| one).collect();
        let text = json!({ "schemaVersion": 2, "manifests": list }).to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/vnd.oci.image.index.v1+json\r\n\
             {link}content-length: {}\r\nconnection: close\r\n\r\n{text}",
            text.len()
        );
        return client.write_all(head.as_bytes());
    }
    request.set("connection", "close");
    let mut upstream = TcpStream::connect(server)?;
    upstream.write_all(&request.encode())?;
    upstream.write_all(&body)?;
    let is_put = request.method() == "PUT" && request.second().contains("/manifests/");
    let document: Value = serde_json::from_slice(&body).unwrap_or_default();
    let Some(subject) = document["subject"]["digest"].as_str().filter(|_| is_put) else {
        return io::copy(&mut upstream, &mut client).map(drop);
    };
    let mut answers = BufReader::new(upstream);
    let Some(mut answer) = Head::read(&mut answers)? else { return Ok(()) };
    if answer.second() == "201" {
        let hex: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
        let one = json!({
            "mediaType": document["mediaType"], "artifactType": document["artifactType"],
            "digest": format!("sha256:{hex}"), "size": body.len(),
        });
        answer.set("OCI-Subject", subject);
        known.lock().unwrap_or_else(PoisonError::into_inner).push((subject.to_owned(), one));
    }
    client.write_all(&answer.encode())?;
    io::copy(&mut answers, &mut client).map(drop)
}
