//! The process `burgeon __help STATE-DIR`: performs one task and ends.

use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::ExitCode,
};

use burgeon_block::{Error, ErrorKind, Result};

use super::{Outcome, Task};
use crate::{
    host::{program::dies_with_its_parent, signals},
    ipc::wire,
    roles,
    supervisor::{exchange, grow, map, plumbing, release},
    transport,
};

/// The main function of the process `burgeon __help STATE-DIR`.
pub fn help() -> ExitCode {
    // The end of the supervisor's session or terminal must not interrupt a thaw.
    let _ = rustix::process::setsid();
    let _ = signals::block_termination();
    let Ok(stream) = std::io::stdin().as_fd().try_clone_to_owned() else {
        return ExitCode::FAILURE;
    };
    let stream = UnixStream::from(stream);
    let Ok(Some((task, fds))) = wire::receive::<Task>(&stream) else { return ExitCode::FAILURE };
    // The next supervisor removes the leftovers of an unfinished mount. That removal would wait for
    // ever for a ublk device whose start in this process waits for a server that was told to stop.
    if matches!(task, Task::Plumb(_)) && !dies_with_its_parent(&stream) {
        return ExitCode::FAILURE;
    }
    let confined = roles::helping(transport::uses_ublk()).enter();
    let (outcome, fd) = match confined.and_then(|_| perform(&stream, task, fds)) {
        Ok(done) => done,
        Err(e) => (Outcome::Failed(e.into()), None),
    };
    let fds: Vec<_> = fd.as_ref().map(AsFd::as_fd).into_iter().collect();
    // If the supervisor has died, this fails, and the mount ends with this process.
    match wire::send(&stream, &outcome, &fds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn perform(
    stream: &UnixStream,
    task: Task,
    fds: Vec<OwnedFd>,
) -> Result<(Outcome, Option<OwnedFd>)> {
    let sent = fds.into_iter().next();
    match task {
        Task::Plumb(parts) => {
            let (plumbed, mount) = plumbing::assemble(&parts, sent, || may_proceed(stream))?;
            Ok((Outcome::Plumbed(plumbed), Some(mount)))
        }
        Task::Proceed => Err(Error::new(ErrorKind::Invalid, "there is nothing to go on with")),
        Task::Exchange(exchange) => {
            let fuse = sent.ok_or_else(|| missing("the FUSE file's mount"))?;
            exchange::change_over(&exchange, &fuse)?;
            Ok((Outcome::Done, None))
        }
        Task::ChangeToPlain(exchange) => {
            let file = sent.ok_or_else(|| missing("the plain file"))?;
            exchange::change_to_plain(&exchange, file)?;
            Ok((Outcome::Done, None))
        }
        Task::TryExchange => {
            let can_exchange = exchange::probe::probe(release::forget_loops)?;
            Ok((Outcome::Tried { can_exchange }, None))
        }
        Task::Thaw(exchange) => {
            exchange::thaw(&exchange)?;
            Ok((Outcome::Done, None))
        }
        Task::Grow(task) => Ok((Outcome::Grown { step: grow::grow(&task)? }, None)),
        Task::OpenArea { device } => Ok((Outcome::Done, Some(map::open_area(&device)?.into()))),
        Task::Forget { id, loops } => {
            release::forget_loops(&loops);
            transport::remove_devices(id);
            Ok((Outcome::Done, None))
        }
    }
}

/// Asks the supervisor whether the server of the device that was just started lives.
fn may_proceed(stream: &UnixStream) -> Result<()> {
    wire::send(stream, &Outcome::Started, &[])?;
    match wire::receive(stream)? {
        Some((Task::Proceed, _)) => Ok(()),
        _ => Err(Error::new(ErrorKind::Unavailable, "the mount was given up")),
    }
}

fn missing(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("the request lacks its descriptor: {what}"))
}
