//! The process that holds descriptors on a host without systemd.
//!
//! ```text
//!   burgeon __hold STATE-DIR, its standard input a listening socket
//!     poll: a message ─► hold, release, send copies
//!           1 s without a supervisor ─► ended mounts are released
//!     ends when it holds nothing and no client is connected, or GIVE_UP_AFTER without a supervisor
//! ```
//!
//! An umount, or the end of a mount namespace, waits for requested blocks, and so does any process
//! that then visits all file systems (`sync`). Without systemd no supervisor is started
//! automatically, so that wait has a bound.
//!
//! It polls `/dev/fuse` descriptors only while there is no supervisor: the kernel wakes a poller
//! for each request of the mount.

use std::{
    collections::BTreeMap,
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    process::ExitCode,
    time::{Duration, Instant},
};

use burgeon_block::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{HELD_MAX, Held, Message};
use crate::{host::namespace, id::MountId, ipc::wire, log, roles};

/// Interval of looking for ended mounts while there is no supervisor to report them.
const INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Readers wait this long for a supervisor; then they get `EIO`.
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);

/// Time limit for a client to send or receive a message: all clients are this program.
const PATIENCE: Duration = Duration::from_secs(1);

/// Concurrent clients: a supervisor, and commands that look.
const CLIENTS_MAX: usize = 16;

/// The main function of the process `burgeon __hold STATE-DIR`.
pub fn hold() -> ExitCode {
    match begin() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            log::prepare_to_end();
            tracing::error!(error = %e, "the holder process cannot continue");
            ExitCode::FAILURE
        }
    }
}

fn begin() -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io("cannot set up the holder process", e.into());
    // The end of the supervisor's session or terminal must not end this process.
    let _ = rustix::process::setsid();
    let listener = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(failed)?;
    // A namespace shared with the daemon would keep the daemon's mounts in use.
    if let Err(e) = namespace::enter_bare() {
        tracing::warn!(error = %e, "the holder shares the namespace of the daemon");
    }
    roles::holding().enter()?;
    run(&UnixListener::from(listener), GIVE_UP_AFTER)
}

type AllHeld = BTreeMap<MountId, Held>;

struct Client {
    stream: UnixStream,
    /// It has sent a `Hold` or a `List`.
    is_supervisor: bool,
}

fn run(listener: &UnixListener, give_up_after: Duration) -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io("cannot wait for messages", e.into());
    let (mut held, mut clients) = (AllHeld::new(), Vec::<Client>::new());
    let mut supervised = Instant::now();
    loop {
        let streams = clients.iter().map(|client| client.stream.as_fd());
        let all = std::iter::once(listener.as_fd()).chain(streams);
        let mut ready: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let limit = (!is_supervised(&clients)).then_some(&INTERVAL);
        match poll(&mut ready, limit) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other.map_err(failed)?,
        };
        let ready: Vec<_> = ready.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut of_client = ready[1..].iter();
        clients.retain_mut(|client| {
            let is_ready = of_client.next().is_some_and(|ready| *ready);
            !is_ready || answer(client, &mut held)
        });
        if ready[0]
            && let Ok((stream, _)) = listener.accept()
            && clients.len() < CLIENTS_MAX
            && is_welcome(&stream)
        {
            clients.push(Client { stream, is_supervisor: false });
        }
        if is_supervised(&clients) {
            supervised = Instant::now();
            continue;
        }
        held.retain(|_, held| !held.is_over());
        if held.is_empty() && clients.is_empty() {
            return Ok(());
        }
        if !held.is_empty() && supervised.elapsed() > give_up_after {
            tracing::error!(mounts = held.len(), "no daemon has come: readers get I/O errors");
            held.clear();
        }
    }
}

fn is_supervised(clients: &[Client]) -> bool {
    clients.iter().any(|client| client.is_supervisor)
}

fn is_welcome(client: &UnixStream) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(client);
    let is_own = peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid());
    is_own
        && client.set_read_timeout(Some(PATIENCE)).is_ok()
        && client.set_write_timeout(Some(PATIENCE)).is_ok()
}

/// Answers one message; false ends the connection.
fn answer(client: &mut Client, held: &mut AllHeld) -> bool {
    let stream = &client.stream;
    let Ok(Some((bytes, fds))) = wire::receive_bytes(stream) else { return false };
    let Some(message) = Message::decode(bytes) else { return false };
    client.is_supervisor |= matches!(message, Message::Hold(_) | Message::List);
    let mut reply = Message::Done;
    match message {
        Message::Hold(id) => {
            let has_room = held.len() < HELD_MAX || held.contains_key(&id);
            match Held::new(id, fds).filter(|_| has_room) {
                Some(new) => drop(held.insert(id, new)),
                None => reply = Message::Refused,
            }
        }
        Message::LetGo(id) => drop(held.remove(&id)),
        Message::LetAllGo => held.clear(),
        Message::List | Message::Name => {
            let all = held.values().try_for_each(|one| {
                let fds = [one.fuse.as_fd(), one.slots.as_fd()];
                let fds = if message == Message::List { &fds[..] } else { &[] };
                wire::send_bytes(stream, &Message::Hold(one.id).encode(), fds)
            });
            if all.is_err() {
                return false;
            }
        }
        Message::Done | Message::Refused => return false,
    }
    wire::send_bytes(stream, &reply.encode(), &[]).is_ok()
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::net::UnixListener, thread, time::Duration};

    use super::{super::Line, run};
    use crate::{id::MountId, state::paths::StateDir};

    #[test]
    fn the_next_client_gets_the_held_descriptors_and_ends_the_process() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let listener = UnixListener::bind(state.run().join("hold.sock")).unwrap();
        let process = thread::spawn(move || run(&listener, Duration::MAX));
        let [first, second] = [1, 2].map(MountId::from_number);
        let file = tempfile::tempfile().unwrap();
        let line = Line::connect(&state).unwrap().unwrap();
        for id in [first, second] {
            line.hold(id, &file, &file).unwrap();
        }
        drop(line);
        // The next supervisor takes the mounts it knows and releases the rest.
        let line = Line::connect(&state).unwrap().unwrap();
        line.let_go(first).unwrap();
        let held = line.list().unwrap();
        assert_eq!(held.iter().map(|held| held.id).collect::<Vec<_>>(), [second]);
        let same = |file: &File| {
            use std::os::unix::fs::MetadataExt;
            file.metadata().unwrap().ino()
        };
        assert!(held.into_iter().all(|held| same(&File::from(held.fuse)) == same(&file)));
        assert_eq!(line.names().unwrap(), [second]);
        line.let_all_go().unwrap();
        line.end();
        process.join().unwrap().unwrap();
        assert!(Line::connect(&state).unwrap().is_none());
    }

    #[test]
    fn descriptors_without_a_supervisor_are_released() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let listener = UnixListener::bind(state.run().join("hold.sock")).unwrap();
        let process = thread::spawn(move || run(&listener, Duration::ZERO));
        let line = Line::connect(&state).unwrap().unwrap();
        let file = tempfile::tempfile().unwrap();
        let id = MountId::from_number(1);
        line.hold(id, &file, &file).unwrap();
        // While a supervisor is connected, mounts stay held; a command that looks does not count.
        let command = Line::connect(&state).unwrap().unwrap();
        assert_eq!(command.names().unwrap(), [id]);
        drop(line);
        while command.names().unwrap() == [id] {}
        drop(command);
        process.join().unwrap().unwrap();
    }
}
