//! As much of HTTP/1.1 as a proxy has to know.

use std::io::{self, BufRead, Read};

/// Longest head and line that is read.
const HEAD_MAX: u64 = 64 << 10;
/// Longest body of an answer: a pack, and some.
const BODY_MAX: u64 = 256 << 20;

/// The first line and the headers of a message, as they came.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) first: String,
    pub(super) headers: Vec<(String, String)>,
}

impl Head {
    /// The next message's head; `None` where the stream ends.
    pub(super) fn read(stream: &mut impl BufRead) -> io::Result<Option<Self>> {
        let mut stream = stream.take(HEAD_MAX);
        let line = |stream: &mut dyn BufRead| -> io::Result<String> {
            let mut line = String::new();
            stream.read_line(&mut line)?;
            Ok(line.trim_end().to_owned())
        };
        let first = line(&mut stream)?;
        if first.is_empty() {
            return Ok(None);
        }
        let mut headers = Vec::new();
        loop {
            let line = line(&mut stream)?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
        Ok(Some(Self { first, headers }))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| &**value)
    }

    pub(super) fn set(&mut self, name: &str, value: impl ToString) {
        self.headers.retain(|(known, _)| known != name);
        self.headers.push((name.to_owned(), value.to_string()));
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut text = format!("{}\r\n", self.first);
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += "\r\n";
        text.into_bytes()
    }

    /// The method of a request, or the version of an answer.
    pub(super) fn method(&self) -> &str {
        self.first.split(' ').next().unwrap_or_default()
    }

    /// The second word: a request's target, an answer's status.
    pub(super) fn second(&self) -> &str {
        self.first.split(' ').nth(1).unwrap_or_default()
    }

    /// The body that follows. Without a length it is all until the stream ends, if `to_the_end`.
    pub(super) fn body(&self, stream: &mut impl BufRead, to_the_end: bool) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        if self.get("transfer-encoding").is_some_and(|coding| coding.contains("chunked")) {
            loop {
                let mut line = String::new();
                stream.by_ref().take(HEAD_MAX).read_line(&mut line)?;
                let size = line.trim().split(';').next().unwrap_or_default();
                let size = u64::from_str_radix(size, 16).map_err(io::Error::other)?;
                stream.by_ref().take(size.min(BODY_MAX)).read_to_end(&mut body)?;
                stream.by_ref().take(HEAD_MAX).read_line(&mut line)?;
                if size == 0 {
                    return Ok(body);
                }
            }
        }
        match self.get("content-length").and_then(|len| len.parse::<u64>().ok()) {
            Some(len) => stream.take(len.min(BODY_MAX)).read_to_end(&mut body)?,
            None if to_the_end => stream.take(BODY_MAX).read_to_end(&mut body)?,
            None => 0,
        };
        Ok(body)
    }
}
