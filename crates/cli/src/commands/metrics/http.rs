//! The least of HTTP/1.1 that Prometheus needs: `GET /metrics`, an answer, the end of the
//! connection.
//!
//! Invariants: at most [`CLIENTS_MAX`] connections, each for at most [`CLIENT_TIME`]; of a request
//! at most [`REQUEST_MAX`] bytes are read, and only its first line matters.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

const CLIENTS_MAX: usize = 8;
const CLIENT_TIME: Duration = Duration::from_secs(10);
const REQUEST_MAX: usize = 8 << 10;

/// Pause after a failed accept, most likely for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `text` for ever.
pub(super) fn serve<T>(listener: &TcpListener, text: &(dyn Fn() -> String + Sync)) -> Result<T> {
    let clients = AtomicUsize::new(0);
    thread::scope(|scope| {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                thread::sleep(PAUSE);
                continue;
            };
            if clients.fetch_add(1, SeqCst) >= CLIENTS_MAX {
                clients.fetch_sub(1, SeqCst);
                continue;
            }
            let clients = &clients;
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                // A client that goes away, or asks nonsense, is none of our concern.
                let _ = answer(stream, text);
                clients.fetch_sub(1, SeqCst);
            });
            if spawned.is_err() {
                clients.fetch_sub(1, SeqCst);
            }
        }
    })
}

fn answer(mut stream: TcpStream, text: &(dyn Fn() -> String + Sync)) -> io::Result<()> {
    let end = Instant::now() + CLIENT_TIME;
    let request = request(&mut stream, end)?;
    let (status, body) = match asked(&request) {
        Asked::Metrics => ("200 OK", text()),
        Asked::Elsewhere => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        Asked::Otherwise => ("405 Method Not Allowed", "only GET and HEAD\n".to_owned()),
        Asked::Nonsense => ("400 Bad Request", "no request of HTTP/1\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let body = if request.starts_with(b"HEAD ") { "" } else { &body };
    write(&mut stream, head.as_bytes(), end)?;
    write(&mut stream, body.as_bytes(), end)
}

/// The time left, or an error at the end.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The bytes of a request up to its empty line.
fn request(stream: &mut TcpStream, end: Instant) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 1024];
    while !bytes.windows(4).any(|four| four == b"\r\n\r\n") && bytes.len() < REQUEST_MAX {
        stream.set_read_timeout(Some(left(end)?))?;
        match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes.extend_from_slice(&piece[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(bytes)
}

fn write(stream: &mut TcpStream, mut bytes: &[u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(end)?))?;
        match stream.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[derive(PartialEq, Eq, Debug)]
enum Asked {
    Metrics,
    Elsewhere,
    Otherwise,
    Nonsense,
}

fn asked(request: &[u8]) -> Asked {
    let Some(end) = request.windows(2).position(|two| two == b"\r\n") else {
        return Asked::Nonsense;
    };
    let Ok(line) = str::from_utf8(&request[..end]) else { return Asked::Nonsense };
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words.as_slice() else { return Asked::Nonsense };
    if !version.starts_with("HTTP/1.") {
        return Asked::Nonsense;
    }
    let path = target.split('?').next().unwrap_or_default();
    match (*method, path) {
        ("GET" | "HEAD", "/metrics") => Asked::Metrics,
        ("GET" | "HEAD", _) => Asked::Elsewhere,
        _ => Asked::Otherwise,
    }
}

#[cfg(test)]
mod tests {
    use super::{Asked, asked};

    #[test]
    fn only_the_first_line_matters() {
        assert_eq!(asked(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Asked::Metrics);
        assert_eq!(asked(b"HEAD /metrics?a=b HTTP/1.0\r\n\r\n"), Asked::Metrics);
        assert_eq!(asked(b"GET /../etc/shadow HTTP/1.1\r\n\r\n"), Asked::Elsewhere);
        assert_eq!(asked(b"POST /metrics HTTP/1.1\r\n\r\n"), Asked::Otherwise);
        let nonsense: [&[u8]; 4] =
            [b"", b"GET /metrics\r\n", b"GET  / HTTP/1.1\r\n", b"\xff\xff \xff HTTP/1.1\r\n"];
        nonsense.iter().for_each(|bytes| assert_eq!(asked(bytes), Asked::Nonsense, "{bytes:?}"));
    }
}
