//! A client's patience: it waits for an answer as long as the daemon gives signs of life.
//!
//! ```text
//!   request ──► an answer within `quiet`? ── yes ──► that is it
//!      ▲             │ no
//!      │             ▼
//!      │        another connection asks something small
//!      │             │ answered, or closed: a sign of life
//!      └─────────────┤
//!                    └ nothing on either within `limit` ──► silent
//! ```
//!
//! So work that takes minutes (an umount that writes back) is not cut short, and a daemon that was
//! stopped, or hangs, keeps nobody for ever. The thread of a request may wait for a disk while the
//! daemon answers others: that wait is the request's, and has no limit here.
//!
//! Invariants: no call waits longer than its limit; an answer that comes while the other connection
//! is asked is taken.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

use super::{protocol::Request, wire};

/// The time that a client waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Time without an answer after which a sign of life is asked for.
    pub(crate) quiet: Duration,
    /// Time for that.
    pub(crate) limit: Duration,
}

impl Patience {
    /// The patience of commands.
    pub(crate) const USUAL: Self =
        Self { quiet: Duration::from_secs(10), limit: Duration::from_secs(20) };

    /// Waits until there is something to read from `stream`, which may be its end. False if nothing
    /// came of the connections that `ask` made, either.
    pub(crate) fn await_answer(
        &self,
        stream: &UnixStream,
        ask: impl Fn() -> Option<UnixStream>,
    ) -> io::Result<bool> {
        loop {
            if first_readable(&[stream], self.quiet)?.is_some() {
                return Ok(true);
            }
            let other = ask();
            let both = [Some(stream), other.as_ref()].into_iter().flatten().collect::<Vec<_>>();
            match first_readable(&both, self.limit)? {
                Some(0) => return Ok(true),
                Some(_) => {}
                None => return Ok(false),
            }
        }
    }
}

/// True if there is something to read from `stream` within `limit`, which may be its end.
pub(crate) fn is_readable(stream: &UnixStream, limit: Duration) -> io::Result<bool> {
    Ok(first_readable(&[stream], limit)?.is_some())
}

/// True if the process at the other end has closed the connection.
pub(crate) fn has_gone(stream: &UnixStream) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut end = [PollFd::new(stream, PollFlags::RDHUP)];
    let gone = PollFlags::RDHUP | PollFlags::HUP;
    poll(&mut end, Some(&now)).is_ok() && end[0].revents().intersects(gone)
}

/// The first of `streams` from which there is something to read within `limit`.
fn first_readable(streams: &[&UnixStream], limit: Duration) -> io::Result<Option<usize>> {
    let end = Instant::now() + limit;
    loop {
        let mut wanted: Vec<_> =
            streams.iter().map(|stream| PollFd::new(stream, PollFlags::IN)).collect();
        let left = Timespec::try_from(end.saturating_duration_since(Instant::now()));
        match poll(&mut wanted, left.ok().as_ref()) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(wanted.iter().position(|it| !it.revents().is_empty())),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Another connection to the daemon at `socket`, with a small question on it. `None` if it takes no
/// connection: it has ended, or so many wait that the kernel would make this one wait, too.
pub(crate) fn ask(socket: &Path) -> Option<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let other: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    connect(other.as_fd(), &SocketAddrUnix::new(socket).ok()?).ok()?;
    let other = UnixStream::from(other);
    // A failure to send is seen as the end of the connection: it was taken, and closed.
    let _ = wire::send(&other, &Request::Log { level: None, json: None }, &[]);
    Some(other)
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::unix::net::{UnixListener, UnixStream},
        path::PathBuf,
        thread,
        time::Duration,
    };

    use super::{Patience, ask, is_readable};
    use crate::ipc::{protocol::Request, wire};

    /// Longer than any machine takes for a thread's turn.
    const LONG: Duration = Duration::from_secs(120);
    const SHORT: Duration = Duration::from_millis(5);

    /// A daemon's socket, the client's connection and the daemon's end of it.
    struct Rig {
        _folder: tempfile::TempDir,
        path: PathBuf,
        listener: UnixListener,
        client: UnixStream,
        daemon: UnixStream,
    }

    fn rig() -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let daemon = listener.accept().unwrap().0;
        Rig { _folder: folder, path, listener, client, daemon }
    }

    #[test]
    fn an_answer_and_an_end_are_taken_at_once() {
        let mut rig = rig();
        let patience = Patience { quiet: LONG, limit: LONG };
        rig.daemon.write_all(b"!").unwrap();
        assert!(patience.await_answer(&rig.client, || ask(&rig.path)).unwrap());
        let rig = self::rig();
        drop(rig.daemon);
        assert!(patience.await_answer(&rig.client, || ask(&rig.path)).unwrap());
    }

    #[test]
    fn long_work_is_waited_for_while_others_are_answered() {
        let Rig { path, listener, client, mut daemon, _folder } = rig();
        let patience = Patience { quiet: SHORT, limit: LONG };
        let waits = thread::spawn(move || patience.await_answer(&client, || ask(&path)).unwrap());
        for sign in 0..4 {
            let (mut other, _) = listener.accept().unwrap();
            let (request, _) = wire::receive::<Request>(&other).unwrap().unwrap();
            assert!(matches!(request, Request::Log { level: None, json: None }), "{request:?}");
            // An answer, and the end of the connection, as of a daemon with too many clients. The
            // client may have seen its answer already, and be gone.
            if sign % 2 == 0 {
                let _ = other.write_all(b"!");
            }
        }
        assert!(!waits.is_finished());
        // The client may be asking again: its answer comes while it waits on both connections.
        daemon.write_all(b"!").unwrap();
        assert!(waits.join().unwrap());
    }

    #[test]
    fn an_answer_is_taken_while_nothing_comes_of_the_other_connection() {
        let Rig { path, listener, client, mut daemon, _folder } = rig();
        let patience = Patience { quiet: SHORT, limit: LONG };
        let waits = thread::spawn(move || patience.await_answer(&client, || ask(&path)).unwrap());
        let _never_answered = listener.accept().unwrap();
        daemon.write_all(b"!").unwrap();
        assert!(waits.join().unwrap());
    }

    #[test]
    fn a_daemon_that_takes_no_connection_is_silent() {
        let patience = Patience { quiet: SHORT, limit: SHORT };
        let rig = rig();
        let answered = || patience.await_answer(&rig.client, || ask(&rig.path)).unwrap();
        assert!(!answered(), "it was stopped");
        // As many connections as the kernel keeps for it.
        let mut kept = Vec::new();
        while let Some(other) = ask(&rig.path) {
            kept.push(other);
            assert!(kept.len() < 100_000, "a connection always fits");
        }
        assert!(!answered(), "nor waits the client");
        assert!(!is_readable(&rig.client, SHORT).unwrap());
    }
}
