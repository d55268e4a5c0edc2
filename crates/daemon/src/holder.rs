//! A third process that holds the descriptors on which readers depend, so that they go on waiting
//! when supervisor and server are killed together.
//!
//! ```text
//!   supervisor ── Hold + /dev/fuse, slots ──► systemd's descriptor store, or a process of ours
//!   both are killed: the kernel keeps the requests, because /dev/fuse is still open
//!   next supervisor ◄── every Hold again ──┘  then it starts a server, which answers them
//! ```
//!
//! systemd's store (`store.rs`) is used if the unit has one; otherwise the supervisor starts the
//! process `burgeon __hold` (`process.rs`). Only regular mounts over FUSE are held. The kernel
//! itself keeps the requests of a ublk device, and those of a `--fast` mount cannot be kept.
//!
//! Invariants (`crates/cli/tests/kill_held.rs`):
//! - A mount is held only once it is made: the helper that makes it waits for its FUSE file, and
//!   must be able to die with the supervisor (`helper.rs`).
//! - Descriptors are taken over before a server is started, and released when the mount is over.
//! - The process reads messages of [`MESSAGE_LEN`] bytes and nothing else.

mod process;
mod store;

use std::{
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    process::Child,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use self::process::hold;
pub(crate) use self::store::{Store, inherited};
use crate::{
    host::program,
    id::MountId,
    ipc::{
        client::{connect_to, socket_path},
        wire,
    },
    state::{
        files::{self, Lock},
        paths::StateDir,
    },
};

/// Limit of held mounts, with two descriptors each; `FileDescriptorStoreMax=` of the unit is twice
/// this. Mounts beyond it are served as well, and give `EIO` while both processes are dead.
pub(crate) const HELD_MAX: usize = 2048;

/// The name of the process's socket in `run/`.
const SOCKET: &str = "hold.sock";

/// Time limit for the process's answer. It does nothing but wait for messages.
const ANSWER_MAX: Duration = Duration::from_secs(5);

const MESSAGE_LEN: usize = 8;

/// A message to the process or from it: a number, and the mount it is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Message {
    /// Hold the descriptors sent along. From the process: this mount is held; its descriptors are
    /// sent along if requested.
    Hold(MountId),
    /// Release a mount.
    LetGo(MountId),
    /// Release all mounts.
    LetAllGo,
    /// List all mounts with copies of their descriptors: a `Hold` for each mount, then `Done`.
    List,
    /// The same without descriptors.
    Name,
    /// From the process: success.
    Done,
    /// From the process: failure.
    Refused,
}

impl Message {
    fn encode(self) -> [u8; MESSAGE_LEN] {
        let (kind, id) = match self {
            Self::Hold(id) => (1, id.number()),
            Self::LetGo(id) => (2, id.number()),
            Self::LetAllGo => (3, 0),
            Self::List => (4, 0),
            Self::Name => (5, 0),
            Self::Done => (6, 0),
            Self::Refused => (7, 0),
        };
        (kind << 32 | id).to_le_bytes()
    }

    fn decode(bytes: [u8; MESSAGE_LEN]) -> Option<Self> {
        let number = u64::from_le_bytes(bytes);
        let id = MountId::from_number(number as u32);
        Some(match number >> 32 {
            1 => Self::Hold(id),
            2 => Self::LetGo(id),
            3 => Self::LetAllGo,
            4 => Self::List,
            5 => Self::Name,
            6 => Self::Done,
            7 => Self::Refused,
            _ => return None,
        })
    }
}

/// The held descriptors of a mount.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) id: MountId,
    pub(crate) fuse: OwnedFd,
    pub(crate) slots: OwnedFd,
}

impl Held {
    /// True if the kernel has released the FUSE file, or the connection was aborted.
    pub(crate) fn is_over(&self) -> bool {
        let mut end = [PollFd::new(&self.fuse, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut end, Some(&now)).is_ok() && end[0].revents().contains(PollFlags::ERR)
    }

    fn new(id: MountId, fds: Vec<OwnedFd>) -> Option<Self> {
        let [fuse, slots] = <[OwnedFd; 2]>::try_from(fds).ok()?;
        Some(Self { id, fuse, slots })
    }
}

/// A connection to the holder process. Threads may share it: each waits for its turn to ask.
#[derive(Debug)]
pub(crate) struct Line {
    stream: UnixStream,
    /// Taken for one exchange, because answers do not name their message. One that takes longer
    /// than [`ANSWER_MAX`] closes the connection, so that those who wait fail at once.
    turn: Mutex<()>,
}

impl Line {
    /// Connects to an earlier supervisor's process; `None` if there is none.
    pub(crate) fn connect(state: &StateDir) -> Result<Option<Self>> {
        match connect_to(state, SOCKET) {
            Ok(stream) => Self::new(stream).map(Some),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Starts a process. The caller must have the state directory's lock.
    pub(crate) fn start(state: &StateDir) -> Result<(Self, Child)> {
        let failed = |e| Error::io("cannot start the holder process", e);
        let (_folder, path) = socket_path(state, SOCKET)?;
        files::remove_file(&path)?;
        let listener = UnixListener::bind(&path).map_err(failed)?;
        // It may be asked before it runs: messages wait in the socket.
        let stream = UnixStream::connect(&path).map_err(failed)?;
        let child = program::start("__hold", state.root(), listener).map_err(failed)?;
        Ok((Self::new(stream)?, child))
    }

    pub(crate) fn new(stream: UnixStream) -> Result<Self> {
        let failed = |e| Error::io("cannot set up the socket to the holder process", e);
        stream.set_read_timeout(Some(ANSWER_MAX)).map_err(failed)?;
        stream.set_write_timeout(Some(ANSWER_MAX)).map_err(failed)?;
        Ok(Self { stream, turn: Mutex::new(()) })
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of the process or of the connection.
    pub(crate) fn wait_for_end(&self) {
        let mut end = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        while matches!(poll(&mut end, None), Err(rustix::io::Errno::INTR)) {}
    }

    /// Holds a mount's descriptors, in place of those held so far.
    pub(crate) fn hold(&self, id: MountId, fuse: impl AsFd, slots: impl AsFd) -> Result<()> {
        self.ask(Message::Hold(id), &[fuse.as_fd(), slots.as_fd()])
    }

    /// Closes a mount's descriptors.
    pub(crate) fn let_go(&self, id: MountId) -> Result<()> {
        self.ask(Message::LetGo(id), &[])
    }

    /// Closes all descriptors.
    pub(crate) fn let_all_go(&self) -> Result<()> {
        self.ask(Message::LetAllGo, &[])
    }

    /// Everything that the process holds.
    pub(crate) fn list(&self) -> Result<Vec<Held>> {
        let answers = self.ask_for_all(Message::List)?;
        Ok(answers.into_iter().filter_map(|(id, fds)| Held::new(id, fds)).collect())
    }

    /// The held mounts.
    fn names(&self) -> Result<Vec<MountId>> {
        Ok(self.ask_for_all(Message::Name)?.into_iter().map(|(id, _)| id).collect())
    }

    /// Ends the connection, and waits for the process to end, if it holds nothing.
    pub(crate) fn end(&self) {
        let _turn = self.turn();
        let _ = self.stream.shutdown(Shutdown::Write);
        let _ = self.receive();
    }

    /// Sends `message`. If the process does not answer, closes the connection: the thread that
    /// waits for its end then replaces the process.
    fn ask(&self, message: Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let _turn = self.turn();
        let sent = wire::send_bytes(&self.stream, &message.encode(), fds);
        let answer = sent.and_then(|()| self.receive());
        match answer.inspect_err(|_| drop(self.stream.shutdown(Shutdown::Both)))?.0 {
            Message::Done => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Unavailable,
                "the holder process takes no more descriptors",
            )),
        }
    }

    fn ask_for_all(&self, message: Message) -> Result<Vec<(MountId, Vec<OwnedFd>)>> {
        let _turn = self.turn();
        wire::send_bytes(&self.stream, &message.encode(), &[])?;
        let mut all = Vec::new();
        while let (Message::Hold(id), fds) = self.receive()? {
            all.push((id, fds));
        }
        Ok(all)
    }

    fn receive(&self) -> Result<(Message, Vec<OwnedFd>)> {
        let gone = || Error::new(ErrorKind::Unavailable, "the holder process has ended");
        let (bytes, fds) = wire::receive_bytes(&self.stream)?.ok_or_else(gone)?;
        let odd = || Error::new(ErrorKind::Invalid, "the holder process sent an unknown message");
        Ok((Message::decode(bytes).ok_or_else(odd)?, fds))
    }
}

/// The mounts whose readers wait for the next daemon: their descriptors are held, and no server
/// lives. systemd's store is not asked, because systemd itself starts the next daemon.
pub fn waiting(state: &StateDir) -> Vec<MountId> {
    let no_server = Lock::try_take(&state.run().join("server.lock"));
    if !no_server.is_ok_and(|lock| lock.is_some()) {
        return Vec::new();
    }
    let line = Line::connect(state).ok().flatten();
    line.and_then(|line| line.names().ok()).unwrap_or_default()
}

/// Makes readers that wait for the next daemon fail with `EIO`.
pub fn give_up(state: &StateDir) -> Result<()> {
    match Line::connect(state)? {
        Some(line) => line.let_all_go(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{HELD_MAX, Message};
    use crate::{id::MountId, start::UNIT_PROPERTIES};

    #[test]
    fn the_unit_has_room_for_all_held_descriptors() {
        let room = format!("FileDescriptorStoreMax={}", 2 * HELD_MAX);
        assert!(UNIT_PROPERTIES.contains(&room.as_str()), "{room}");
    }

    #[test]
    fn messages_round_trip_and_others_are_refused() {
        let id = MountId::from_number(0xfedc_ba98);
        let all = [
            Message::Hold(id),
            Message::LetGo(id),
            Message::LetAllGo,
            Message::List,
            Message::Name,
            Message::Done,
            Message::Refused,
        ];
        for message in all {
            assert_eq!(Message::decode(message.encode()), Some(message));
        }
        assert_eq!(Message::decode([0; 8]), None);
        assert_eq!(Message::decode([0xff; 8]), None);
    }
}
