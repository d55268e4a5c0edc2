//! `burgeon let-go`: a mount gets all of its lazy data in a plain file, and needs no process any
//! more.
//!
//! ```text
//!   chunks in the cache ─► cloned (FICLONERANGE), read again, verified ─► lent: no room of the cache's
//!   room in the cache's disk for the rest, and for writes: reserved
//!   the rest ─► threads: read the mount's data device, write ─► sync ─► rename
//!               (superblocks, lazy data: fetched and verified           │
//!                by the server; zeros elsewhere)                        │
//!   mounts/<id>/plain  ◄── its device can be exchanged ─────────────────┤
//!   supervisor: freeze, exchange the file, thaw                         │
//!   images/<digest>/complete/plain, sums  ◄── it cannot, or btrfs knows no checksums
//!   the next mount of the image begins with it
//! ```
//!
//! The file is made by the command, so the supervisor never waits for a store. One command at a
//! time makes a file; one that was interrupted is begun again.

mod clone;
mod copy;
mod daemon;
mod fill;
mod plain_file;
mod room;
mod sums;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use burgeon_image::AddressMap;

use self::{
    copy::{Device, copy, data_device},
    daemon::Daemon,
    plain_file::{NewPlain, another},
    room::make_room,
    sums::Sums,
};
use crate::{
    id::MountId,
    ipc::{
        client::Client,
        protocol::{Reply, Request},
    },
    state::{
        complete,
        files::{self, Lock},
        paths::StateDir,
        record::{MountRecord, Plain, WritesState, read_record},
    },
};

/// A mount that was let go.
#[derive(Default)]
pub struct LetGone {
    /// The reason why only the next mount of the image has the plain file.
    pub later: Option<String>,
    /// Bytes that the plain file shares with the cache.
    pub cloned: u64,
    /// Bytes that were copied.
    pub copied: u64,
}

/// The making of one plain file.
struct Job<'a> {
    state: &'a StateDir,
    map: &'a Arc<AddressMap>,
    device: Device,
    progress: &'a (dyn Fn(u64) + Sync),
    done: AtomicU64,
}

impl Job<'_> {
    /// These bytes more are there.
    fn done(&self, bytes: u64) {
        (self.progress)(self.done.fetch_add(bytes, Relaxed) + bytes);
    }
}

/// Lets mount `id` go; calls `progress` with the bytes that are there.
pub fn let_go(
    state: &StateDir,
    client: &Client,
    id: MountId,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<LetGone> {
    let mut daemon = Daemon::new(state, client, id);
    attempt(state, &mut daemon, id, progress).inspect_err(|_| daemon.leave())
}

fn attempt(
    state: &StateDir,
    daemon: &mut Daemon<'_>,
    id: MountId,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<LetGone> {
    let record = read_record(state, id)?;
    if record.plain {
        return Ok(LetGone::default());
    }
    record.check_copy()?;
    let map = Arc::new(AddressMap::open(&record.attach.seed.join("map"))?);
    let begin = |daemon: &mut Daemon<'_>, reserve| match daemon
        .call(&Request::BeginLetGo { id, reserve })?
    {
        Reply::LetGo { later } => Ok(later),
        _ => Err(unexpected()),
    };
    // Its seed may have been prepared with the checksums of an earlier copy.
    let has_checksums = record.attach.seed == complete::folder(state, &record.digest.0);
    let later = match map.lacks_checksums() && !has_checksums {
        true => Some(NO_CHECKSUMS.to_owned()),
        false => begin(daemon, false)?,
    };
    let job = |device| Job { state, map: &map, device, progress, done: 0.into() };
    // Only then is it of use that chunks get into the cache.
    if clone::is_possible(state) {
        fill::wait(daemon, progress);
    }
    if later.is_some() {
        return Ok(LetGone { later, ..keep_for_next(&record, daemon, job)? });
    }
    let writes = match &record.writes {
        WritesState::Sprout(sprout) if sprout.thin => sprout.limit.saturating_sub(sprout.reserved),
        _ => 0,
    };
    let (device, superblocks) = data_device(&record)?;
    let job = job(device);
    let path = state.plain_file(id);
    let gone = make(&job, daemon, (&path, None), superblocks, |daemon, copied| {
        make_room(state, daemon, copied, writes)?;
        // Before the copy, which takes long: this fails if the writes' space is not there.
        begin(daemon, true).map(drop)
    })?;
    match daemon.call(&Request::LetGo { id })? {
        Reply::Done => Ok(gone),
        _ => Err(unexpected()),
    }
}

const NO_CHECKSUMS: &str = "btrfs has no checksums of this mount's files, because only the tables of contents of its image \
     were known; the next mount has them";

/// Makes a plain file for the next mount of the image.
fn keep_for_next<'a>(
    record: &MountRecord,
    daemon: &mut Daemon<'_>,
    job: impl FnOnce(Device) -> Job<'a>,
) -> Result<LetGone> {
    let (image, job) = (record.digest.0, job(data_device(record)?.0));
    let (state, map) = (job.state, job.map);
    if complete::is_here(state, &image) {
        return Ok(LetGone::default());
    }
    let folder = complete::folder(state, &image);
    files::make_folder(&folder)?;
    let _lock = Lock::try_take(&folder.join("copy.lock"))?.ok_or_else(another)?;
    let (plain, sums) = match map.lacks_checksums() {
        true => (Plain::WithChecksums, Some(Sums::create(complete::sums(state, &image), map)?)),
        false => (Plain::Described, None),
    };
    let path = plain.path(state, &image);
    make(&job, daemon, (&path, sums.as_ref()), Vec::new(), |daemon, copied| {
        make_room(state, daemon, copied, 0)
    })
}

/// Makes the plain file at `path` with all data and the other ranges of the device in `also`, and
/// the checksums of the data. `room` has to make room for so many copied bytes.
fn make(
    job: &Job<'_>,
    daemon: &mut Daemon<'_>,
    (path, sums): (&Path, Option<&Sums>),
    also: Vec<ByteRange>,
    room: impl FnOnce(&mut Daemon<'_>, u64) -> Result<()>,
) -> Result<LetGone> {
    let new = NewPlain::begin(path, job.device.size)?;
    let cloned = clone::resident(job, daemon, &new, sums)?;
    let data = job.map.data_range().len();
    room(daemon, data - cloned.bytes())?;
    copy(job, also.into_iter().chain(cloned.rest(job.map)), &new.file, sums)?;
    new.publish(sums)?;
    Ok(LetGone { later: None, cloned: cloned.bytes(), copied: data - cloned.bytes() })
}

fn unexpected() -> Error {
    let what = "unexpected answer from the daemon: is it of another version? `burgeon upgrade` \
                replaces it";
    Error::new(ErrorKind::Unavailable, what)
}
