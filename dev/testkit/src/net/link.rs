//! A network on loopback: latency and a bandwidth that all connections share.
//!
//! ```text
//!   client ──► half of the latency ──────────────────────► server     a new connection's first
//!          ◄── half of the latency ◄── one after another ◄──          bytes: a round trip more
//! ```
//!
//! The kernel for development has no netem. The bytes are not parsed, so connections are kept and
//! used again as between any two hosts. TCP's slow start is not imitated.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Bytes that have the link for themselves at a time: 0.7 ms at 200 Mbit/s.
const PIECE: usize = 16 << 10;
/// Pieces on their way in one connection: 4 MiB, more than any link of a test holds.
const PIECES_MAX: usize = 256;
/// Delay of a thread's wake-up that does not count as an idle link.
const LATE: Duration = Duration::from_millis(5);

struct Shared {
    server: SocketAddr,
    latency: Duration,
    bytes_per_second: u64,
    /// Time when the link has sent all bytes that it was given.
    free: Mutex<Instant>,
    bytes: AtomicU64,
    requests: AtomicU64,
    ended: AtomicBool,
}

/// A running link. It ends when dropped.
pub struct Link {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Link {
    /// A link to `server` with this round trip time and this bandwidth towards the client.
    pub fn new(server: SocketAddr, latency: Duration, bytes_per_second: u64) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            server,
            latency,
            bytes_per_second,
            free: Mutex::new(Instant::now()),
            bytes: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.ended.load(Relaxed) {
                    break;
                }
                // After any error here, the client sees a broken connection.
                let _ = client.and_then(|client| accepting.connect(client));
            }
        });
        Ok(Self { address, shared })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that went to clients so far.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Relaxed)
    }

    /// HTTP requests that went to the server so far, as long as each comes in one piece.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Relaxed)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.ended.store(true, Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn connect(self: &Arc<Self>, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(self.server)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (up, down) = (Arc::clone(self), Arc::clone(self));
        let handshake = Instant::now() + self.latency;
        let (from, to) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || {
            carry(from, to, |piece| {
                if [&b"GET "[..], b"HEAD ", b"PUT ", b"POST "].iter().any(|m| piece.starts_with(m))
                {
                    up.requests.fetch_add(1, Relaxed);
                }
                Instant::now().max(handshake) + up.latency / 2
            })
        });
        thread::spawn(move || carry(server, client, |piece| down.take_turn(piece)));
        Ok(())
    }

    /// Waits until `piece` has been sent; when it arrives.
    fn take_turn(&self, piece: &[u8]) -> Instant {
        self.bytes.fetch_add(piece.len() as u64, Relaxed);
        let nanos = piece.len() as u64 * 1_000_000_000 / self.bytes_per_second;
        let sent = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            *free = (*free).max(now - LATE) + Duration::from_nanos(nanos);
            *free
        };
        thread::sleep(sent.saturating_duration_since(Instant::now()));
        sent + self.latency / 2
    }
}

/// Carries everything that comes, each piece at the time that `due` says.
fn carry(mut from: TcpStream, to: TcpStream, due: impl Fn(&[u8]) -> Instant) {
    let (pieces, arriving) = sync_channel::<(Instant, Vec<u8>)>(PIECES_MAX);
    let deliver = thread::spawn(move || deliver(to, &arriving));
    let mut buffer = vec![0; PIECE];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let piece = &buffer[..len];
        if pieces.send((due(piece), piece.to_vec())).is_err() {
            break;
        }
    }
    drop(pieces);
    let _ = deliver.join();
    let _ = from.shutdown(Shutdown::Read);
}

fn deliver(mut to: TcpStream, arriving: &Receiver<(Instant, Vec<u8>)>) {
    for (at, piece) in arriving {
        thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        thread,
        time::{Duration, Instant},
    };

    use super::Link;

    #[test]
    fn it_is_late_and_narrow_and_changes_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let sent: Vec<u8> = (0..1_000_000).map(|n| (n / 7) as u8).collect();
        let answer = sent.clone();
        thread::spawn(move || {
            for stream in listener.incoming().take(2) {
                let (mut stream, answer) = (stream.unwrap(), answer.clone());
                thread::spawn(move || {
                    stream.read_exact(&mut [0; 4]).unwrap();
                    stream.write_all(&answer).unwrap();
                });
            }
        });
        let link = Link::new(address, Duration::from_millis(20), 10_000_000).unwrap();
        let begun = Instant::now();
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let mut stream = TcpStream::connect(link.address()).unwrap();
                stream.write_all(b"GET ").unwrap();
                thread::spawn(move || {
                    let mut bytes = Vec::new();
                    stream.read_to_end(&mut bytes).unwrap();
                    bytes
                })
            })
            .collect();
        for client in clients {
            assert!(client.join().unwrap() == sent);
        }
        // 2 MB at 10 MB/s, for both together, and two round trips; a busy machine takes longer.
        assert!(begun.elapsed() >= Duration::from_millis(230), "{:?}", begun.elapsed());
        assert_eq!((link.bytes(), link.requests()), (2_000_000, 2));
    }
}
