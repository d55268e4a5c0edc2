//! kill -9 of the serving process costs no I/O error and no wrong byte: the supervisor (this
//! process) keeps `/dev/fuse` and the slots, a successor answers the requests in them. Without
//! FUSE_NOTIFY_RESEND, so on every kernel. The bytes of a write are not in the slots: Linux 6.9
//! sends them again, and on older kernels the write fails. Needs root.

#![allow(clippy::unwrap_used)]

mod common;
mod scratch;
mod victims;

use std::{
    fs::OpenOptions,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::Arc,
    thread,
    time::Duration,
};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, ByteRange, Erase, Now, Result, Shape, WritableDevice,
};
use burgeon_frontend::{
    Connection, LoopDevice, LoopOptions, ServeOptions, Slots, serve, serve_writable,
};
use common::{Watchdog, runtime};
use scratch::Scratch;
use testkit::scaled;
use victims::{Misses, READERS, Server, Victim, inherited, kill_under_load, read_ok, wait_for};

const FUSE_FD: i32 = 100;
const SLOTS_FD: i32 = 101;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("serve-never") => child(Misses::Never),
        Some("serve") => child(Misses::Soon),
        Some("write-never") => writing_child(true),
        Some("write") => writing_child(false),
        _ => {
            let seed = victims::seed();
            every_reader_in_flight_gets_its_bytes();
            println!("test every_reader_in_flight_gets_its_bytes ... ok");
            killed_again_and_again_under_load(seed);
            println!("test killed_again_and_again_under_load ... ok");
            writes_in_flight_are_sent_again();
            println!("test writes_in_flight_are_sent_again ... ok");
            println!("test result: ok. 3 passed; 0 failed; 0 ignored");
        }
    }
}

/// The life of the process that is killed.
fn child(misses: Misses) {
    let runtime = runtime();
    let slots = Arc::new(Slots::from_fd(inherited(SLOTS_FD)).unwrap());
    let options = ServeOptions::new(runtime.handle().clone());
    let victim = Arc::new(Victim { misses, slots: slots.clone() });
    let server = serve(inherited(FUSE_FD), slots, victim, &options).unwrap();
    runtime.block_on(server.ended());
}

/// Holds the descriptors and slots that must survive a server.
struct Supervisor {
    connection: Connection,
    slots: Slots,
    _watchdog: Watchdog,
}

impl Supervisor {
    fn new() -> Self {
        let connection = Connection::new("burgeon-test").unwrap();
        let watchdog = Watchdog::new(&connection);
        Self { connection, slots: Slots::create().unwrap(), _watchdog: watchdog }
    }

    fn start(&self, mode: &str) -> Server {
        self.start_with(&[mode])
    }

    fn start_with(&self, arguments: &[&str]) -> Server {
        let descriptors = [(self.connection.device(), FUSE_FD), (self.slots.fd(), SLOTS_FD)];
        Server::start(arguments, descriptors)
    }
}

fn every_reader_in_flight_gets_its_bytes() {
    let supervisor = Supervisor::new();
    let mut first = supervisor.start("serve-never");
    let file = supervisor.connection.open_file().unwrap();
    // A slot is emptied after its reply: that of the open may still count.
    wait_for(|| supervisor.slots.unanswered() == 0, "the end of what opening takes");
    thread::scope(|scope| {
        let file = &file;
        let readers: Vec<_> =
            (0..READERS).map(|n| scope.spawn(move || read_ok(file, 1000 + n, 1))).collect();
        // Every request is with the server: in its slots, and nowhere else.
        wait_for(|| supervisor.slots.unanswered() == READERS as usize, "all requests");
        first.kill();
        assert_eq!(supervisor.slots.unanswered(), READERS as usize);
        let _second = supervisor.start("serve");
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(supervisor.slots.counters().replayed.get(), READERS);
        assert_eq!(supervisor.slots.counters().failed_reads.get(), 0);
    });
}

fn killed_again_and_again_under_load(seed: u64) {
    let supervisor = Supervisor::new();
    let server = supervisor.start("serve");
    let options = LoopOptions { name: "burgeon-test/kill", read_only: true, discard: false };
    let file = supervisor.connection.open_file().unwrap();
    let device = LoopDevice::attach(file.as_fd(), options).unwrap();
    drop(file);
    let number = device.number();
    let start = || supervisor.start("serve");
    let server =
        kill_under_load(device.path(), &supervisor.slots, seed, scaled(100, 25), start, server);
    let replayed = supervisor.slots.counters().replayed.get();
    println!("{replayed} requests replayed");
    assert!(replayed > 0, "no kill met a request in flight: this shows nothing");
    device.detach(Duration::from_secs(60)).unwrap();
    assert!(!std::fs::exists(format!("/sys/block/loop{number}/loop")).unwrap());
    // The connection ends with the mount, and so does the server, in good order.
    let Supervisor { connection, .. } = supervisor;
    let _device = connection.into_device();
    server.await_end();
}

/// A device that keeps every request for ever, if told so.
struct Holding {
    inner: Scratch,
    holds: bool,
}

impl Holding {
    async fn pass(&self) {
        if self.holds {
            std::future::pending().await
        }
    }
}

impl BlockDevice for Holding {
    fn shape(&self) -> Shape {
        self.inner.shape()
    }

    fn try_read(&self, _offset: u64, _buf: &mut [u8]) -> Result<Now> {
        Ok(Now::Absent)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.pass().await;
        self.inner.read(offset, buf).await
    }
}

impl WritableDevice for Holding {
    async fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> Result<()> {
        self.pass().await;
        self.inner.write(offset, bytes, fua).await
    }

    async fn erase(&self, range: ByteRange, how: Erase) -> Result<()> {
        self.pass().await;
        self.inner.erase(range, how).await
    }

    async fn flush(&self) -> Result<()> {
        self.pass().await;
        self.inner.flush().await
    }
}

/// The life of a process that serves the file of its second argument for writing.
fn writing_child(holds: bool) {
    let path = std::env::args().nth(2).unwrap();
    let truth = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let runtime = runtime();
    let slots = Arc::new(Slots::from_fd(inherited(SLOTS_FD)).unwrap());
    let options = ServeOptions::new(runtime.handle().clone());
    let device = Arc::new(Holding { inner: Scratch::new(truth), holds });
    let server = serve_writable(inherited(FUSE_FD), slots, device, &options).unwrap();
    runtime.block_on(server.ended());
}

/// Linux 6.9 or later.
fn kernel_sends_again() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut parts = release.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next(), parts.next()) >= (Some(6), Some(9))
}

fn writes_in_flight_are_sent_again() {
    let truth = tempfile::NamedTempFile::new().unwrap();
    truth.as_file().set_len(1 << 20).unwrap();
    let connection = Connection::writable("burgeon-test").unwrap();
    let watchdog = Watchdog::new(&connection);
    let supervisor =
        Supervisor { connection, slots: Slots::create().unwrap(), _watchdog: watchdog };
    let path = truth.path().to_str().unwrap();
    let mut first = supervisor.start_with(&["write-never", path]);
    let file = supervisor.connection.open_file().unwrap();
    wait_for(|| supervisor.slots.unanswered() == 0, "the end of what opening takes");
    let bytes: Vec<u8> = (0..16 * BLOCK_SIZE).map(|n| (n * 7 % 251) as u8).collect();
    thread::scope(|scope| {
        let (file, bytes) = (&file, &bytes);
        let writer = scope.spawn(move || file.write_all_at(bytes, 2 * BLOCK_SIZE));
        wait_for(|| supervisor.slots.unanswered() == 1, "the write");
        let reader = scope.spawn(move || file.read_exact_at(&mut [0; 4096], 60 * BLOCK_SIZE));
        wait_for(|| supervisor.slots.unanswered() == 2, "the read");
        first.kill();
        let _second = supervisor.start_with(&["write", path]);
        reader.join().unwrap().unwrap();
        let (written, mut read) = (writer.join().unwrap(), vec![0; bytes.len()]);
        if kernel_sends_again() {
            written.unwrap();
            file.read_exact_at(&mut read, 2 * BLOCK_SIZE).unwrap();
            assert!(read == *bytes, "the write is not there");
        } else {
            assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EIO));
        }
        wait_for(|| supervisor.slots.unanswered() == 0, "empty slots");
    });
}
