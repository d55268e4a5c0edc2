//! A command's child process that reads untrusted data: archives, layers, documents of registries.
//!
//! ```text
//!   burgeon build, index, mount, pull ── job, an open archive ──────► burgeon __read: sandbox, job
//!        ▲   ◄── request: the login for a registry ─────────────────────┤
//!        │   ─── the login, if the user named that registry ───────────►│
//!        │   ◄── request: room for what it stores next ─────────────────┤
//!        │   ─── the cache has evicted as much as it could ────────────►│
//!        │   ◄── request: a piece of a layer's file ────────────────────┤
//!        │   ─── allocated, or no room ────────────────────────────────►│
//!        └────── the result, or an error ───────────────────────────────┘
//! ```
//!
//! The command mounts, executes credential helpers and has the user's files; the child has the
//! store, and the network if the job needs it (`roles::Reach`).
//!
//! Invariants, held by `tests/roles.rs` of the command:
//! - The child is in its sandbox before it opens a store or reads a byte of an archive.
//! - It gets the settings of the one store, and the login for the one registry, that the job needs.
//!   Its environment has no others.
//! - It dies with the command.

use std::{
    ffi::OsString,
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, ExitCode, Stdio},
    sync::{Arc, Mutex, PoisonError},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::{
    Access, Location,
    registry::{Name, ask_for_credentials_by, serves},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    host::{
        harden,
        program::{dies_with_its_parent, this_program},
    },
    ipc::{protocol::WireError, wire},
    roles::{self, Reach},
};

#[derive(Serialize, Deserialize)]
struct Begin<J> {
    reach: Reach,
    /// The login from the variables of the command's environment.
    login: Access,
    job: J,
}

/// A message from the child.
#[derive(Serialize, Deserialize)]
enum Said<T> {
    Login(Name),
    /// So many bytes are stored next.
    Room(u64),
    /// This piece of the layer's file that comes along is written next.
    Piece {
        offset: u64,
        len: u64,
    },
    Done(T),
    Failed(WireError),
}

/// Runs `job` in a child that can reach only `reach`. `archive` is sent along. `make_room` gets the
/// bytes that the child, which is not to be trusted, says it will store; `allocate` the file,
/// offset and length of a piece, and returns false if there is no room for it.
pub fn read_elsewhere<J: Serialize, T: DeserializeOwned>(
    reach: Reach,
    job: J,
    archive: Option<BorrowedFd<'_>>,
    (make_room, allocate): (impl Fn(u64), impl Fn(&File, u64, u64) -> bool),
) -> Result<T> {
    let failed = |e| Error::io("cannot start a process that reads the image", e);
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let mut command = this_program("__read");
    let known = Access::from_env();
    // Credentials for other stores and registries must not reach a process that reads untrusted
    // data.
    for (name, _) in known.variables() {
        command.env_remove(name);
    }
    let of_store = match reach.store {
        Location::Remote(_) => known.for_location(&reach.store),
        Location::Folder(_) | Location::Registry(_) => Access::default(),
    };
    let child = command
        .envs(of_store.variables())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let mut child = Ended(child);
    let registry = reach.registry.clone();
    let login = registry.as_ref().map(|name| known.given_for_registry(name)).transpose()?;
    let begin = Begin { reach, login: login.unwrap_or_default(), job };
    wire::send(&ours, &begin, &archive.into_iter().collect::<Vec<_>>())?;
    loop {
        match wire::receive::<Said<T>>(&ours)? {
            Some((Said::Done(done), _)) => return Ok(done),
            Some((Said::Failed(failure), _)) => return Err(failure.into()),
            Some((Said::Login(asked), _)) => {
                let login = log_in(&known, registry.as_ref(), &asked).map_err(WireError::from);
                wire::send(&ours, &login, &[])?;
            }
            Some((Said::Room(bytes), _)) => {
                make_room(bytes);
                wire::send(&ours, &(), &[])?;
            }
            Some((Said::Piece { offset, len }, mut files)) => {
                let file = files.pop().map(File::from);
                let has_room = file.is_some_and(|file| allocate(&file, offset, len));
                wire::send(&ours, &has_room, &[])?;
            }
            None => {
                let status = child.0.wait().map_err(failed)?;
                let what = format!(
                    "the process that reads the image ended early ({status}): it was killed, or needed \
                     more memory than an image of that size does"
                );
                return Err(Error::new(ErrorKind::LocalIo, what));
            }
        }
    }
}

/// This user's login for the registry `asked`, if the user named that registry.
fn log_in(known: &Access, named: Option<&Name>, asked: &Name) -> Result<Access> {
    match named.filter(|named| serves(named, asked)) {
        Some(_) => known.kept_for_registry(asked),
        None => Err(Error::new(
            ErrorKind::Invalid,
            format!("no login for {} is needed here", asked.registry()),
        )),
    }
}

/// A child that is killed with this value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have continued after its answer, or be stuck.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command that this process reads for.
#[derive(Clone)]
pub struct ReaderParent(Arc<Mutex<UnixStream>>);

impl ReaderParent {
    /// Has it make room for so many bytes, as far as it can, and waits until that is done.
    pub fn make_room(&self, bytes: u64) {
        // Without an answer the command has ended, which ends this process; storing tells the rest.
        let _ = self.ask::<()>(&Said::Room(bytes), &[]);
    }

    /// Has it allocate a piece of `file`; false if there is no room.
    pub fn allocate(&self, file: &File, offset: u64, len: u64) -> bool {
        self.ask(&Said::Piece { offset, len }, &[file.as_fd()]).unwrap_or(false)
    }

    /// Sends a request, and receives the answer to it.
    fn ask<T: DeserializeOwned>(&self, request: &Said<()>, files: &[BorrowedFd<'_>]) -> Result<T> {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        wire::send(&stream, request, files)?;
        match wire::receive(&stream)? {
            Some((answer, _)) => Ok(answer),
            None => Err(Error::new(
                ErrorKind::Unavailable,
                "the command that this is read for has ended",
            )),
        }
    }
}

/// The main function of the process `burgeon __read`: `perform` does the job, with the archive that
/// was sent along.
pub fn read_process<J: DeserializeOwned, T: Serialize>(
    arguments: &[OsString],
    perform: impl FnOnce(J, &Access, Option<File>, &ReaderParent) -> Result<T>,
) -> ExitCode {
    let stream = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let (Ok(stream), []) = (stream, arguments) else { return ExitCode::from(2) };
    let Ok(Some((begin, fds))) = wire::receive::<Begin<J>>(&stream) else {
        return ExitCode::FAILURE;
    };
    if !dies_with_its_parent(&stream) {
        return ExitCode::FAILURE;
    }
    let archive = fds.into_iter().next().map(File::from);
    let parent = ReaderParent(Arc::new(Mutex::new(stream)));
    let done = confine(&begin.reach, &parent).and_then(|()| {
        let access = Access::from_env().and(begin.login);
        perform(begin.job, &access, archive, &parent)
    });
    let (said, code) = match done {
        Ok(done) => (Said::Done(done), ExitCode::SUCCESS),
        Err(e) => (Said::Failed(e.into()), ExitCode::FAILURE),
    };
    let stream = parent.0.lock().unwrap_or_else(PoisonError::into_inner);
    match wire::send(&stream, &said, &[]) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Drops all rights that the job does not need.
fn confine(reach: &Reach, parent: &ReaderParent) -> Result<()> {
    burgeon_sandbox::accept_the_oom_killer()?;
    harden::bound_memory_of_readers();
    reach.sandbox().enter()?;
    roles::do_without_helpers();
    let parent = parent.clone();
    ask_for_credentials_by(Box::new(move |name| {
        let login = parent
            .ask::<std::result::Result<Access, WireError>>(&Said::Login(name.clone()), &[])?;
        Ok(login?)
    }));
    Ok(())
}
