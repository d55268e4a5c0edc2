//! Shows that a daemon of this program can start here, before the running one is killed for it.
//!
//! ```text
//!   records of the mounts ─► this program can read them
//!   run/rehearsal, an empty state directory ─► a supervisor of this program ─► its server answers
//!     ─► shut down ─► removed
//! ```
//!
//! It finds what makes every start fail: a record or a configuration that this version refuses, a
//! feature of the kernel that is missing, a sandbox that cannot be made, a full disk. The mounts
//! and the running daemon notice nothing.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    host::backing_devices,
    ipc::{
        client::Client,
        protocol::{CacheRequest, Reply, Request},
    },
    start,
    state::{
        paths::StateDir,
        record::{mount_ids, read_record},
    },
};

/// Time limit for the new daemon's server to answer: one that starts takes less than a second.
const SERVER_TIMEOUT: Duration = Duration::from_secs(30);
/// Servers that may die before one answers.
const DEATHS_MAX: u64 = 3;
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes that a daemon writes when it starts, and some more.
const ROOM: usize = 256 << 10;

/// An error if a daemon of this program could not take over the mounts of `state`: a record that it
/// cannot read, or what keeps a daemon from starting.
pub(crate) fn rehearse(state: &StateDir) -> Result<()> {
    read_records(state).and_then(|()| start_scratch_daemon(state)).map_err(|e| {
        let what =
            "a daemon of this program cannot take over here, so the running one is left as it is";
        Error::with_source(e.kind(), what, e)
    })
}

fn read_records(state: &StateDir) -> Result<()> {
    for id in mount_ids(state) {
        match read_record(state, id) {
            // It is being made or removed.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            // Damaged, and in no use: a leftover, which the next daemon removes.
            Err(e)
                if e.kind() != ErrorKind::UnsupportedFormat
                    && backing_devices::loop_below(&state.mount(id)).is_none() => {}
            Err(e) => {
                let what = format!(
                    "the record of the mount {id} cannot be read: unmount it, and mount it again"
                );
                return Err(Error::with_source(e.kind(), what, e));
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

fn start_scratch_daemon(state: &StateDir) -> Result<()> {
    let folder = state.run().join("rehearsal");
    remove(&folder)?;
    let result = StateDir::open(&folder)
        .and_then(|scratch| need_room(&folder).and_then(|()| start_and_end(&scratch)));
    let removed = remove(&folder);
    result.and(removed)
}

/// Fails on a disk that is full: a daemon that cannot write its records and its log ends without a
/// word.
fn need_room(folder: &Path) -> Result<()> {
    let path = folder.join("room");
    File::create(&path)
        .and_then(|mut file| file.write_all(&[1; ROOM]).and_then(|()| file.sync_all()))
        .map_err(|e| Error::io(format!("cannot write {}", path.display()), e))
}

fn start_and_end(scratch: &StateDir) -> Result<()> {
    start::start_directly(scratch)?;
    let client = Client::connect(scratch)?
        .ok_or_else(|| Error::new(ErrorKind::Unavailable, "it was started and ended at once"))?;
    client.wait_at_most(SERVER_TIMEOUT);
    let answered = await_server(&client);
    end(client)?;
    answered
}

/// Waits until the server has answered a question that the supervisor hands on.
fn await_server(client: &Client) -> Result<()> {
    let begun = Instant::now();
    loop {
        match client.call(&Request::Cache(CacheRequest::Show)) {
            Ok(_) => return Ok(()),
            Err(e) if begun.elapsed() > SERVER_TIMEOUT || deaths(client)? > DEATHS_MAX => {
                let what = "its serving process does not start";
                return Err(Error::with_source(ErrorKind::Unavailable, what, e));
            }
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// The servers that have died so far.
fn deaths(client: &Client) -> Result<u64> {
    match client.call(&Request::Status)?.0 {
        Reply::Status(status) => Ok(status.server_restarts),
        _ => Err(Error::new(ErrorKind::Corrupt, "its supervisor answers something else")),
    }
}

fn end(client: Client) -> Result<()> {
    client.call(&Request::Shutdown { force: true })?;
    client.wait_for_end()
}

/// Removes the folder, and ends the daemon that an interrupted rehearsal has left there.
fn remove(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    if let Some(client) = Client::connect(&StateDir::find(folder)?)? {
        client.wait_at_most(SERVER_TIMEOUT);
        end(client)?;
    }
    let failed = |e| Error::io(format!("cannot remove {}", folder.display()), e);
    fs::remove_dir_all(folder).map_err(failed)
}
