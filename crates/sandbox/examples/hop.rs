//! Cost that a process between the server and the network would add to a miss:
//!
//! ```text
//! cargo run --release -p burgeon-sandbox --example hop -- [rounds]
//! ```
//!
//! ```text
//!   this process ── request ──► a child with the bytes in memory
//!                ◄── copied: through the socket, through a pipe, or in a memfd that both have mapped
//! ```
//!
//! Beside it the same number of bytes from a web server on the loopback device, without TLS and
//! without a library: no miss of a remote store is faster. And the descriptor of a file, opened
//! here and by the child. Each figure is a median. It leaves nothing behind.

use std::{
    env,
    error::Error,
    fs::File,
    hint::black_box,
    io::{BufRead, BufReader, Read, Write},
    mem::MaybeUninit,
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const SIZES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
const SIZE_MAX: usize = 1 << 20;
const FILE: &str = "/etc/hosts";

/// The ways in which the child answers.
#[derive(Clone, Copy)]
enum By {
    Socket,
    Pipe,
    Memory,
    Descriptor,
}

fn main() -> Outcome<()> {
    if env::args().nth(1).as_deref() == Some("child") {
        return child();
    }
    let rounds = env::args().nth(1).map_or(Ok(2000), |text| text.parse())?;
    let mut hop = Hop::new()?;
    let mut web = Web::connect(&serve()?)?;
    println!("medians of {rounds}, in µs");
    println!("{:>8} {:>8} {:>8} {:>8} {:>10}", "KiB", "socket", "pipe", "memfd", "loopback");
    for size in SIZES {
        let mut row = vec![(size >> 10) as f64];
        for by in [By::Socket, By::Pipe, By::Memory] {
            row.push(median(rounds, || hop.ask(by, size))?);
        }
        row.push(median(rounds, || web.get(size))?);
        let [kib, socket, pipe, memory, loopback] = row[..] else { continue };
        println!("{kib:>8} {socket:>8.0} {pipe:>8.0} {memory:>8.0} {loopback:>10.0}");
    }
    let here = median(rounds, || {
        black_box(File::open(FILE)?);
        Ok(())
    })?;
    let there = median(rounds, || hop.ask(By::Descriptor, 0))?;
    println!("a file is opened here in {here:.1}, by another process in {there:.1}");
    Ok(())
}

/// The median of as many `rounds` of `work`, in microseconds.
fn median(rounds: usize, mut work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let mut took = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let begun = Instant::now();
        work()?;
        took.push(begun.elapsed());
    }
    took.sort();
    Ok(took.get(rounds / 2).map_or(0.0, Duration::as_secs_f64) * 1e6)
}

/// Bytes that differ from page to page.
fn contents(size: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u8
    };
    (0..size).map(|_| next() & 0x0f).collect()
}

/// The two ends of the ways between the processes.
struct Hop {
    socket: UnixStream,
    pipe: File,
    memory: File,
    bytes: Vec<u8>,
}

impl Hop {
    fn new() -> Outcome<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let (pipe, their_pipe) = std::io::pipe()?;
        let memory: File = rustix::fs::memfd_create("hop", rustix::fs::MemfdFlags::CLOEXEC)?.into();
        memory.set_len(SIZE_MAX as u64)?;
        Command::new("/proc/self/exe")
            .arg("child")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::inherit())
            .spawn()?;
        send(&socket, &[0; 9], &[their_pipe.as_fd(), memory.as_fd()])?;
        Ok(Self { socket, pipe: OwnedFd::from(pipe).into(), memory, bytes: vec![0; SIZE_MAX] })
    }

    /// Asks for `size` bytes, and has them in this process's memory.
    fn ask(&mut self, by: By, size: usize) -> Outcome<()> {
        let mut request = [by as u8; 9];
        request[1..].copy_from_slice(&(size as u64).to_le_bytes());
        self.socket.write_all(&request)?;
        let bytes = &mut self.bytes[..size];
        match by {
            By::Socket => self.socket.read_exact(bytes)?,
            By::Pipe => self.pipe.read_exact(bytes)?,
            By::Memory => {
                self.socket.read_exact(&mut [0])?;
                // The check may read where the bytes lie, but the child can change them until
                // they are copied.
                self.memory.read_exact_at(bytes, 0)?;
            }
            By::Descriptor => drop(receive(&self.socket)?),
        }
        black_box(bytes);
        Ok(())
    }
}

/// Answers until this process's parent ends.
fn child() -> Outcome<()> {
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut fds = receive(&socket)?.into_iter().map(File::from);
    let (Some(mut pipe), Some(memory)) = (fds.next(), fds.next()) else {
        return Err("no descriptors".into());
    };
    let bytes = contents(SIZE_MAX);
    let mut request = [0; 9];
    while socket.read_exact(&mut request).is_ok() {
        let mut size = [0; 8];
        size.copy_from_slice(&request[1..]);
        let bytes = &bytes[..u64::from_le_bytes(size) as usize];
        match request[0] {
            by if by == By::Socket as u8 => socket.write_all(bytes)?,
            by if by == By::Pipe as u8 => pipe.write_all(bytes)?,
            by if by == By::Memory as u8 => {
                memory.write_all_at(bytes, 0)?;
                socket.write_all(&[0])?;
            }
            _ => send(&socket, &[0; 9], &[File::open(FILE)?.as_fd()])?,
        }
    }
    Ok(())
}

fn send(socket: &UnixStream, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> Outcome<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(fds));
    sendmsg(socket, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::empty())?;
    Ok(())
}

fn receive(socket: &UnixStream) -> Outcome<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 9];
    let mut slices = [std::io::IoSliceMut::new(&mut bytes)];
    recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    Ok(rights.flatten().collect())
}

/// A connection to a web server, kept as by any client.
struct Web {
    stream: BufReader<TcpStream>,
    bytes: Vec<u8>,
}

impl Web {
    fn connect(address: &str) -> Outcome<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufReader::new(stream), bytes: vec![0; SIZE_MAX] })
    }

    fn get(&mut self, size: usize) -> Outcome<()> {
        let last = size - 1;
        let request = format!("GET /packs/00 HTTP/1.1\r\nRange: bytes=0-{last}\r\n\r\n");
        self.stream.get_mut().write_all(request.as_bytes())?;
        let mut line = String::new();
        while self.stream.read_line(&mut line)? > 2 {
            line.clear();
        }
        self.stream.read_exact(&mut self.bytes[..size])?;
        black_box(&self.bytes);
        Ok(())
    }
}

/// Serves ranges of one file over HTTP in threads of this process; returns its address.
fn serve() -> Outcome<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    Ok(address.to_string())
}

fn answer(stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let bytes = contents(SIZE_MAX);
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    loop {
        let mut last = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.to_ascii_lowercase().starts_with("range:") {
                last = line.rsplit('-').next().and_then(|end| end.trim().parse().ok()).unwrap_or(0);
            }
            if line.trim().is_empty() {
                break;
            }
        }
        write!(
            stream,
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes 0-{last}/{SIZE_MAX}\r\n\r\n",
            last + 1
        )?;
        stream.write_all(&bytes[..=last])?;
    }
}
