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
mod fill;
mod plain_file;
mod room;
mod sums;

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use burgeon_image::AddressMap;

use self::{
    copy::{Device, copy, data_device, start_daemon},
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
    client: &'a Client,
    id: MountId,
    map: &'a AddressMap,
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
    let record = read_record(state, id)?;
    if record.plain {
        return Ok(LetGone::default());
    }
    record.check_copy()?;
    let map = AddressMap::open(&record.attach.seed.join("map"))?;
    let begin = |reserve| match client.call(&Request::BeginLetGo { id, reserve })? {
        (Reply::LetGo { later }, _) => Ok(later),
        _ => Err(unexpected()),
    };
    // Its seed may have been prepared with the checksums of an earlier copy.
    let has_checksums = record.attach.seed == complete::folder(state, &record.digest.0);
    let later = match map.lacks_checksums() && !has_checksums {
        true => Some(NO_CHECKSUMS.to_owned()),
        false => begin(false)?,
    };
    let job = |device| Job { state, client, id, map: &map, device, progress, done: 0.into() };
    fill::wait(client, id, progress);
    if later.is_some() {
        return Ok(LetGone { later, ..keep_for_next(&record, job)? });
    }
    let writes = match &record.writes {
        WritesState::Sprout(sprout) if sprout.thin => sprout.limit.saturating_sub(sprout.reserved),
        _ => 0,
    };
    let (device, superblocks) = data_device(&record)?;
    let job = job(device);
    let path = state.plain_file(id);
    let gone = make(&job, (&path, None), superblocks, |copied| {
        make_room(state, client, copied, writes)?;
        // Before the copy, which takes long: this fails if the writes' space is not there.
        begin(true).map(drop)
    })?;
    match client.call(&Request::LetGo { id })? {
        (Reply::Done, _) => Ok(gone),
        _ => Err(unexpected()),
    }
}

const NO_CHECKSUMS: &str = "btrfs has no checksums of this mount's files, because only the tables of contents of its image \
     were known; the next mount has them";

/// Makes a plain file for the next mount of the image.
fn keep_for_next<'a>(record: &MountRecord, job: impl FnOnce(Device) -> Job<'a>) -> Result<LetGone> {
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
    make(&job, (&path, sums.as_ref()), Vec::new(), |copied| make_room(state, job.client, copied, 0))
}

/// Makes the plain file at `path` with all data and the other ranges of the device in `also`, and
/// the checksums of the data. `room` has to make room for so many copied bytes.
fn make(
    job: &Job<'_>,
    (path, sums): (&Path, Option<&Sums>),
    also: Vec<ByteRange>,
    room: impl FnOnce(u64) -> Result<()>,
) -> Result<LetGone> {
    let new = NewPlain::begin(path, job.device.size)?;
    let cloned = clone::resident(job, &new, sums)?;
    let data = job.map.data_range().len();
    // It needs the daemon, as the copy does.
    room(data - cloned.bytes()).inspect_err(|_| start_daemon(job.state))?;
    copy(job, also.into_iter().chain(cloned.rest(job.map)), &new.file, sums)?;
    new.publish(sums)?;
    Ok(LetGone { later: None, cloned: cloned.bytes(), copied: data - cloned.bytes() })
}

fn unexpected() -> Error {
    let what = "unexpected answer from the daemon: is it of another version? `burgeon upgrade` \
                replaces it";
    Error::new(ErrorKind::Unavailable, what)
}
