//! The work on an OCI image: what it needs of this host, and a display of its progress.

use burgeon_image::builder::{self, BuildOptions};
use burgeon_oci::{Allocate, Pull, ReadLayers, Tags, Work};
use burgeon_source::{Access, Directory};

use super::{Context, named, room::StepByStep};
use crate::progress::Progress;

/// The command that this process stores for.
pub(super) struct Rooms<'a> {
    /// Has room made for bytes that are stored next.
    pub(super) make: &'a (dyn Fn(u64) + Sync),
    /// Allocates pieces of layers.
    pub(super) allocate: Allocate<'a>,
}

impl Rooms<'_> {
    /// For work that stores nothing.
    pub(super) const NONE: Self = Self { make: &|_| (), allocate: &|_, _, _| false };
}

/// Does `what` with a progress display. Room is asked for ahead of what is stored.
pub(super) fn with_work<T>(
    context: &Context,
    text: &str,
    pull: Pull,
    options: &BuildOptions,
    (access, read, rooms): (&Access, &ReadLayers, &Rooms<'_>),
    what: impl FnOnce(&Work<'_>) -> burgeon_block::Result<T>,
) -> burgeon_block::Result<T> {
    let shown = named::public(text);
    let (fetch, made) =
        (Progress::new(format!("fetching {shown}")), Progress::new(format!("building {shown}")));
    let (fetched, built) = (StepByStep::new(rooms.make), StepByStep::new(rooms.make));
    let fetching = |done, total| {
        fetched.reached(done);
        fetch.update(done, Some(total));
    };
    let building = |now: &builder::Progress| {
        built.reached(now.stored_bytes);
        made.update(now.bytes, now.bytes_total);
    };
    let own = match context.store {
        None => Some(Directory::open(context.state.store())?),
        Some(_) => None,
    };
    let done = what(&Work {
        access,
        tags: Tags { folder: &context.state.tags(), pull },
        documents: &context.documents(),
        read,
        spool: &context.state.scratch()?,
        own: own.as_ref(),
        content: None,
        allocate: rooms.allocate,
        options,
        fetching: &fetching,
        building: &building,
    });
    fetch.finish();
    made.finish();
    done
}
