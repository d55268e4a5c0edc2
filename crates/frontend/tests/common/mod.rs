//! A device whose every block can be told from its number, and that can be made to misbehave.
#![allow(dead_code)] // each test binary uses a part

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc::RecvTimeoutError,
    },
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Error, ErrorKind, Now, Result, Shape};
use burgeon_frontend::{
    Connection, FuseServer, LoopDevice, LoopOptions, ServeOptions, Slots, serve,
    ublk::{self, Control, Queues},
};
use tokio::{runtime::Runtime, sync::watch};

/// Each 8 bytes of a block hold the block's number, spread over the bits.
pub(crate) fn fill(offset: u64, buf: &mut [u8]) {
    for (index, block) in buf.chunks_exact_mut(BLOCK_SIZE as usize).enumerate() {
        let word = word(offset / BLOCK_SIZE + index as u64).to_le_bytes();
        block.chunks_exact_mut(8).for_each(|bytes| bytes.copy_from_slice(&word));
    }
}

pub(crate) fn block_ok(bytes: &[u8], block: u64) -> bool {
    let word = word(block).to_le_bytes();
    bytes.len() == BLOCK_SIZE as usize && bytes.chunks_exact(8).all(|bytes| bytes == word)
}

fn word(block: u64) -> u64 {
    block.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ 0x5bd1_e995
}

pub(crate) struct Computed {
    size: u64,
    absent: AtomicBool,
    gate: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
    inside: AtomicUsize,
    inside_max: AtomicUsize,
}

impl Computed {
    pub(crate) const FAILING_BLOCK: u64 = 1_000_001;
    pub(crate) const PANICKING_BLOCK: u64 = 1_000_002;

    /// Everything is a hit until told otherwise; the gate is open.
    pub(crate) fn hits(size: u64) -> Self {
        Self {
            size,
            absent: AtomicBool::new(false),
            gate: watch::Sender::new(true),
            waiting: watch::Sender::new(0),
            inside: AtomicUsize::new(0),
            inside_max: AtomicUsize::new(0),
        }
    }

    /// True if `try_read` says that everything is absent.
    pub(crate) fn set_absent(&self, absent: bool) {
        self.absent.store(absent, SeqCst);
    }

    pub(crate) fn close_gate(&self) {
        self.gate.send_replace(false);
    }

    pub(crate) fn open_gate(&self) {
        self.gate.send_replace(true);
    }

    /// Waits until `count` reads have come to the gate since the start.
    pub(crate) fn wait_for_waiting(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while *self.waiting.borrow() < count {
            assert!(Instant::now() < deadline, "only {} came", *self.waiting.borrow());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The most calls of `read` at one time so far.
    pub(crate) fn inside_max(&self) -> usize {
        self.inside_max.load(SeqCst)
    }

    fn answer(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match offset / BLOCK_SIZE {
            Self::FAILING_BLOCK => Err(Error::new(ErrorKind::Corrupt, "as told")),
            Self::PANICKING_BLOCK => panic!("as told"),
            _ => {
                fill(offset, buf);
                Ok(())
            }
        }
    }
}

impl BlockDevice for Computed {
    fn shape(&self) -> Shape {
        Shape::read_only(self.size)
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        if self.absent.load(SeqCst) {
            return Ok(Now::Absent);
        }
        self.answer(offset, buf).map(|()| Now::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let inside = self.inside.fetch_add(1, SeqCst) + 1;
        self.inside_max.fetch_max(inside, SeqCst);
        self.waiting.send_modify(|count| *count += 1);
        let _ = self.gate.subscribe().wait_for(|open| *open).await;
        self.inside.fetch_sub(1, SeqCst);
        self.answer(offset, buf)
    }
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Aborts a FUSE connection that a failed test leaves hanging: without it the process could not
/// even be killed, for it waits for itself.
pub(crate) struct Watchdog(#[expect(dead_code)] std::sync::mpsc::Sender<()>);

impl Watchdog {
    pub(crate) fn new(connection: &Connection) -> Self {
        let number = connection.number().unwrap();
        let (cancel, cancelled) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            if cancelled.recv_timeout(Duration::from_secs(300)) == Err(RecvTimeoutError::Timeout) {
                eprintln!("hanging: aborting FUSE connection {number}");
                Connection::abort(number).unwrap();
            }
        });
        Self(cancel)
    }
}

pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// A block device as mounts have it: over ublk where the kernel has that, else a loop device on a
/// FUSE file. The lab's newer kernel has it.
pub(crate) enum Lazy {
    // Dropped in this order: the server, then its device.
    Ublk { path: PathBuf, _server: ublk::UblkServer, _device: Removed },
    Fuse { device: LoopDevice, server: FuseServer, _watchdog: Watchdog },
}

impl Lazy {
    const OWNER: u64 = 0x7465_7374_0000_0001;

    pub(crate) fn serve<D: BlockDevice>(device: D, slots: &Arc<Slots>, runtime: &Runtime) -> Self {
        let options = ServeOptions::new(runtime.handle().clone());
        let device = Arc::new(device);
        let in_lab = std::env::var("LAB_KERNEL").is_ok_and(|kernel| kernel != "6.1");
        if in_lab || Path::new("/dev/ublk-control").exists() {
            let mut control = Control::open().unwrap();
            let number =
                control.add(&device.shape(), Self::OWNER, Queues::default()).unwrap().number;
            let server = ublk::serve(number, slots.clone(), device, &options).unwrap();
            let path = control.start(number, std::process::id()).unwrap();
            return Self::Ublk { path, _server: server, _device: Removed(number) };
        }
        let connection = Connection::new("burgeon-test").unwrap();
        let watchdog = Watchdog::new(&connection);
        let fuse = connection.device().try_clone_to_owned().unwrap();
        let server = serve(fuse, slots.clone(), device, &options).unwrap();
        let file = connection.open_file().unwrap();
        let options = LoopOptions { name: "burgeon-test/lazy", read_only: true, discard: false };
        let device = LoopDevice::attach(file, options).unwrap();
        Self::Fuse { device, server, _watchdog: watchdog }
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Ublk { path, .. } => path,
            Self::Fuse { device, .. } => device.path(),
        }
    }

    /// Ends it after its last user; waits, at most `limit`, for that.
    pub(crate) fn end(self, limit: Duration) {
        match self {
            Self::Ublk { .. } => {}
            Self::Fuse { device, server, .. } => {
                device.detach(limit).unwrap();
                assert_eq!(server.stop(Duration::ZERO), 0);
            }
        }
    }
}

/// A ublk device that is removed when this is dropped.
pub(crate) struct Removed(pub(crate) u32);

impl Drop for Removed {
    fn drop(&mut self) {
        Control::open().unwrap().remove(self.0).unwrap();
    }
}
