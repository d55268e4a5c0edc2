//! A proxy on loopback that shapes and spoils.
//!
//! ```text
//!   client ──► Proxy ──► a real server          one request a connection, so that every fault
//!          ◄── late, slow, broken, wrong ◄──    is one request's
//! ```
//!
//! A seed decides which requests are spoilt, and how: a failure can be repeated if the client asks
//! in the same order.

use std::{
    collections::BTreeMap,
    io::{self, BufReader, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use super::head::Head;
use crate::{PATIENCE, Rng, wait_until};

/// Time for which a stalled answer is held back: longer than any client of the tests waits, and a
/// bound for the thread that holds it.
const STALL: Duration = Duration::from_secs(60);
/// Bytes that are sent at once when the bandwidth is limited.
const PIECE: usize = 16 << 10;
/// Interval at which a stalled answer checks that the proxy still exists.
const LOOK: Duration = Duration::from_millis(20);

/// A fault of an answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// The connection is closed before the answer.
    Reset,
    /// Half of the body comes, then the connection is closed.
    Truncate,
    /// Half of the body comes, then nothing.
    Stall,
    /// The server refuses with this status.
    Status(u16),
    /// All of the object comes, with status 200, for any range.
    IgnoreRange,
    /// `Content-Range` tells of another range.
    OtherRange,
    /// Other bytes than those asked for, under the right headers.
    OtherBytes,
    /// `Content-Range` and body end one byte early.
    ShortRange,
    /// The body goes on after the length that was promised by `Content-Range`.
    LongBody,
    /// One bit of the body is another.
    FlipBit,
    /// The client is sent here again: once, by a target of its own.
    Redirect,
    /// The client is sent here again, for ever.
    RedirectLoop,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::Reset,
        Self::Truncate,
        Self::Stall,
        Self::Status(401),
        Self::Status(403),
        Self::Status(404),
        Self::Status(416),
        Self::Status(429),
        Self::Status(500),
        Self::Status(503),
        Self::IgnoreRange,
        Self::OtherRange,
        Self::OtherBytes,
        Self::ShortRange,
        Self::LongBody,
        Self::FlipBit,
        Self::Redirect,
    ];
}

/// Properties of the path to the server.
#[derive(Clone, Copy, Default, Debug)]
pub struct Shape {
    /// Time before each answer.
    pub latency: Duration,
    /// Bytes a second of each answer; 0 is no limit.
    pub bandwidth: u64,
}

struct State {
    rng: Rng,
    shape: Shape,
    faults: Vec<Fault>,
    /// Requests in a thousand that are spoilt.
    per_mille: u64,
    counts: BTreeMap<Fault, u64>,
    requests: u64,
    /// Answers that are being spoilt.
    spoiling: u64,
}

/// One answer that is being spoilt.
struct Spoiling<'a>(&'a Mutex<State>);

impl Drop for Spoiling<'_> {
    fn drop(&mut self) {
        lock(self.0).spoiling -= 1;
    }
}

/// A running proxy. It ends when dropped.
pub struct Proxy {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    ended: Arc<AtomicBool>,
}

impl Proxy {
    /// A proxy in front of `server`, which spoils nothing yet.
    pub fn new(server: SocketAddr, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(Mutex::new(State {
            rng: Rng::new(seed),
            shape: Shape::default(),
            faults: Vec::new(),
            per_mille: 0,
            counts: BTreeMap::new(),
            requests: 0,
            spoiling: 0,
        }));
        let ended = Arc::new(AtomicBool::new(false));
        let (shared, over) = (Arc::clone(&state), Arc::clone(&ended));
        thread::spawn(move || {
            for client in listener.incoming() {
                if over.load(Relaxed) {
                    break;
                }
                let Ok(client) = client else { continue };
                let (shared, over) = (Arc::clone(&shared), Arc::clone(&over));
                // After any error here, the client sees a broken connection, which it must bear.
                thread::spawn(move || drop(serve(client, server, address, &shared, &over)));
            }
        });
        Ok(Self { address, state, ended })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Spoils `per_mille` of a thousand answers from now on, each with one of `faults`.
    pub fn spoil(&self, per_mille: u64, faults: &[Fault]) {
        let mut state = lock(&self.state);
        state.per_mille = per_mille;
        state.faults = faults.to_vec();
    }

    /// Waits until no answer is being spoilt any more: [`Proxy::spoil`] does not change those whose
    /// requests came before. False if that takes too long.
    pub fn settle(&self) -> bool {
        wait_until(PATIENCE, || lock(&self.state).spoiling == 0)
    }

    /// From now on the way is like this.
    pub fn shape(&self, shape: Shape) {
        lock(&self.state).shape = shape;
    }

    /// Number of times that each fault has happened.
    pub fn counts(&self) -> BTreeMap<Fault, u64> {
        lock(&self.state).counts.clone()
    }

    /// Requests that have come.
    pub fn requests(&self) -> u64 {
        lock(&self.state).requests
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers one request, well or badly.
fn serve(
    client: TcpStream,
    server: SocketAddr,
    own: SocketAddr,
    state: &Mutex<State>,
    ended: &AtomicBool,
) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let Some(mut request) = Head::read(&mut reader)? else { return Ok(()) };
    if request.get("expect").is_some() {
        (&client).write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    let body = request.body(&mut reader, false)?;
    let (fault, shape, dice) = {
        let mut state = lock(state);
        state.requests += 1;
        let hit = state.rng.below(1000) < state.per_mille && !state.faults.is_empty();
        let faults = state.faults.clone();
        let fault = hit.then(|| *state.rng.pick(&faults));
        (fault, state.shape, state.rng.bits())
    };
    let ranged = request.get("range").is_some();
    let is_redirected = request.second().ends_with("?again");
    let fault = fault.filter(|fault| match fault {
        Fault::IgnoreRange | Fault::OtherRange | Fault::OtherBytes | Fault::ShortRange => ranged,
        Fault::LongBody => ranged,
        Fault::Redirect => request.method() == "GET" && !request.second().contains('?'),
        _ => true,
    });
    let _spoiling = fault.map(|fault| {
        let mut counted = lock(state);
        *counted.counts.entry(fault).or_default() += 1;
        counted.spoiling += 1;
        Spoiling(state)
    });
    if is_redirected {
        request.first = request.first.replace("?again", "");
    }
    thread::sleep(shape.latency);
    match fault {
        Some(Fault::Reset) => return client.shutdown(Shutdown::Both),
        Some(Fault::Status(status)) => {
            let body = "<Error><Code>Spoilt</Code></Error>";
            let len = body.len();
            let text = format!(
                "HTTP/1.1 {status} Spoilt\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}"
            );
            return (&client).write_all(text.as_bytes());
        }
        Some(Fault::Redirect | Fault::RedirectLoop) => {
            let target = request.second();
            let again = if fault == Some(Fault::Redirect) { "?again" } else { "" };
            let text = format!(
                "HTTP/1.1 307 Elsewhere\r\nlocation: http://{own}{target}{again}\r\n\
                 content-length: 0\r\nconnection: close\r\n\r\n"
            );
            return (&client).write_all(text.as_bytes());
        }
        Some(Fault::IgnoreRange) => request.headers.retain(|(name, _)| name != "range"),
        Some(Fault::OtherBytes) => shift_range(&mut request),
        _ => {}
    }
    let asked = range_of(&request);
    request.set("connection", "close");
    let upstream = TcpStream::connect(server)?;
    (&upstream).write_all(&request.encode())?;
    (&upstream).write_all(&body)?;
    let mut answers = BufReader::new(upstream);
    let Some(mut answer) = Head::read(&mut answers)? else { return Ok(()) };
    let has_body = request.method() != "HEAD" && !matches!(answer.second(), "204" | "304");
    let mut body = if has_body { answer.body(&mut answers, true)? } else { Vec::new() };
    spoil(fault, dice, asked, &mut answer, &mut body);
    answer.headers.retain(|(name, _)| name != "transfer-encoding");
    answer.set("connection", "close");
    if has_body {
        answer.set("content-length", body.len());
    }
    (&client).write_all(&answer.encode())?;
    let sent = match fault {
        Some(Fault::Truncate | Fault::Stall) => &body[..body.len() / 2],
        _ => &body[..],
    };
    send(&client, sent, shape)?;
    let mut waited = Duration::ZERO;
    while fault == Some(Fault::Stall) && waited < STALL && !ended.load(Relaxed) {
        thread::sleep(LOOK);
        waited += LOOK;
    }
    client.shutdown(Shutdown::Both)
}

/// Changes the answer.
fn spoil(
    fault: Option<Fault>,
    dice: u64,
    asked: Option<(u64, u64)>,
    answer: &mut Head,
    body: &mut Vec<u8>,
) {
    let said = |first: u64, last: u64| format!("bytes {first}-{last}/1099511627776");
    match (fault, asked) {
        (Some(Fault::OtherRange), Some((first, last))) => {
            answer.set("content-range", said(first + 4096, last + 4096));
        }
        (Some(Fault::OtherBytes), Some((first, last))) => {
            // The request was shifted, the answer is what it would have been.
            answer.set("content-range", said(first - SHIFT, last - SHIFT));
        }
        (Some(Fault::ShortRange), Some((first, last))) if last > first => {
            body.pop();
            answer.set("content-range", said(first, last - 1));
        }
        (Some(Fault::LongBody), _) => body.extend_from_slice(&[0x5a; 4096]),
        (Some(Fault::FlipBit), _) if !body.is_empty() => {
            let at = dice as usize % body.len();
            body[at] ^= 1 << (dice >> 61);
        }
        _ => {}
    }
}

/// Distance in bytes between the range asked for and that of [`Fault::OtherBytes`].
const SHIFT: u64 = 1;

fn shift_range(request: &mut Head) {
    if let Some((first, last)) = range_of(request) {
        request.set("range", format!("bytes={}-{}", first + SHIFT, last + SHIFT));
    }
}

fn range_of(request: &Head) -> Option<(u64, u64)> {
    let (first, last) = request.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?))
}

fn send(mut client: &TcpStream, bytes: &[u8], shape: Shape) -> io::Result<()> {
    if shape.bandwidth == 0 {
        return client.write_all(bytes);
    }
    for piece in bytes.chunks(PIECE) {
        client.write_all(piece)?;
        let nanos = piece.len() as u64 * 1_000_000_000 / shape.bandwidth;
        thread::sleep(Duration::from_nanos(nanos));
    }
    Ok(())
}
