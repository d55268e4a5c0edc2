//! Reads foreign images in a sandboxed child process: the command's side.
//!
//! ```text
//!   command: find, index, build, copy ─► Job ──► burgeon __read: perform ─► Made ─┐
//!            records: provenance of the image, digest of its tag               ◄──┘
//! ```
//!
//! Invariant: the command records only statements of the child about the requested image. A child
//! under the control of a hostile image vouches for no other image, and records no other tag.

mod child;
mod job;

use std::{
    fs::File,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use burgeon_block::{ChecksumKind, Error, ErrorKind, Result};
use burgeon_daemon::{Reach, read_elsewhere};
use burgeon_image::{
    builder::{BuildOptions, BuildReport},
    catalog::{Copied, ImageProvenance, ImageRecord},
};
use burgeon_oci::{ImageForm, Indexed, OciImage, Pull, Source, Tags, Unpacked};
use burgeon_source::{
    Location,
    registry::{Name, OciDigest},
};

use self::job::{Done, Job, Made, Task, something_else};
pub(crate) use self::{child::process, job::Elsewhere};
use super::{Context, room};

/// Finds or makes the image of `source`. `text` is the user's name for it.
pub(super) fn find(
    context: &Context,
    text: &str,
    source: &Source,
    want: ImageForm<'_>,
    pull: Pull,
) -> Result<Elsewhere> {
    let task = Task::Find { text: text.to_owned(), form: want.into(), pull };
    let made = have_done(context, Some(source), &context.build_options(), task, None)?;
    let Done::Found(found) = made.done else { return Err(something_else()) };
    match (&found, source.registry_name()) {
        (Elsewhere::Made(image), _) => {
            remember(context, Some(source), &image.image, made.noted, None)?;
            let tags = Tags { folder: &context.state.tags(), pull: Pull::default() };
            tags.remember_of(source, image)?;
            context.documents().keep(&image.documents)?;
            Ok(found)
        }
        (Elsewhere::Ours(name, _), Some(asked))
            if name.digest().is_some_and(|digest| *name == asked.at(digest.clone())) =>
        {
            Ok(found)
        }
        _ => Err(something_else()),
    }
}

/// Copies the objects of the image of `record` from the registry `from` to the store.
pub(super) fn copy(context: &Context, from: &Name, record: &ImageRecord) -> Result<Copied> {
    let location = Location::Registry(Box::new(from.clone()));
    let task = Task::Copy { from: location, record: record.clone() };
    let source = Source::parse(&from.to_string()).unwrap_or_else(|| Err(something_else()))?;
    let made = have_done(context, Some(&source), &context.build_options(), task, None)?;
    let Done::Copied(copied) = made.done else { return Err(something_else()) };
    Ok(copied)
}

/// Reads and keeps the documents of the OCI image `source`, and none of its layers; returns the
/// digest of the image or index.
pub(super) fn documents(context: &Context, text: &str, source: &Source) -> Result<OciDigest> {
    let task = Task::Documents { text: text.to_owned() };
    let made = have_done(context, Some(source), &context.build_options(), task, None)?;
    let Done::Documents(digest, documents) = made.done else { return Err(something_else()) };
    context.documents().keep(&documents)?;
    digest.parse()
}

/// Makes the index of the image of `source`. Layers may also be read from `content`, a folder with
/// blobs by their digests.
pub(super) fn index(
    context: &Context,
    text: &str,
    source: &Source,
    push: bool,
    content: Option<&Path>,
) -> Result<Indexed> {
    let content = content.map(Path::to_owned);
    let task = Task::Index { text: text.to_owned(), push, content };
    let made = have_done(context, Some(source), &context.build_options(), task, None)?;
    let Done::Indexed(indexed) = made.done else { return Err(something_else()) };
    remember(context, Some(source), &indexed.record, made.noted, None)?;
    context.documents().keep(&indexed.documents)?;
    Ok(indexed)
}

/// Builds the image `name` of the source `text`; returns the time it took.
pub(super) fn build(
    context: &Context,
    text: &str,
    name: &str,
    options: &BuildOptions,
) -> Result<(BuildReport, Duration)> {
    let source = Source::parse(text).unwrap_or_else(|| Err(something_else()))?;
    let task = Task::Build { text: text.to_owned(), name: name.to_owned() };
    build_by(context, Some(&source), name, options, task, None)
}

/// Builds the image `name` of an open archive, at `path` and of length `len` if these are known.
pub(super) fn build_archive(
    context: &Context,
    (archive, path, len): (impl AsFd, Option<&Path>, Option<u64>),
    name: &str,
    options: &BuildOptions,
) -> Result<(BuildReport, Duration)> {
    let path = path.map(Path::to_owned);
    let task = Task::BuildArchive { path, len, name: name.to_owned() };
    build_by(context, None, name, options, task, Some(&archive))
}

fn build_by(
    context: &Context,
    source: Option<&Source>,
    name: &str,
    options: &BuildOptions,
    task: Task,
    archive: Option<&dyn AsFd>,
) -> Result<(BuildReport, Duration)> {
    let begun = Instant::now();
    let made = have_done(context, source, options, task, archive)?;
    let Done::Built(report) = made.done else { return Err(something_else()) };
    remember(context, source, &report.image, made.noted, Some(name))?;
    // The files are not this host's own.
    Ok((BuildReport { honours: None, ..*report }, begun.elapsed()))
}

fn have_done(
    context: &Context,
    source: Option<&Source>,
    options: &BuildOptions,
    task: Task,
    archive: Option<&dyn AsFd>,
) -> Result<Made> {
    let absolute = |folder| {
        std::path::absolute(folder)
            .map_err(|e| Error::io(format!("cannot find {}", Path::display(folder)), e))
    };
    let layout = source.and_then(Source::folder).map(absolute).transpose()?;
    let reach = Reach {
        records: vec![context.state.provenance(), context.state.tags(), context.state.documents()],
        scratch: context.state.scratch()?,
        store: context.store_location(),
        is_remote: source.is_some() && layout.is_none(),
        layout,
        content: match &task {
            Task::Index { content, .. } => content.clone(),
            _ => None,
        },
        writes_layout: matches!(task, Task::Index { push: true, .. }),
        registry: source.and_then(Source::registry_name).cloned(),
    };
    let job = Job {
        state: context.state.root().to_owned(),
        store: context.store.clone(),
        level: options.level,
        xxhash64: options.checksum == ChecksumKind::Xxhash64,
        task,
    };
    let folders =
        [context.store_location().folder().map(Path::to_owned), Some(context.state.scratch()?)];
    let make_room = |bytes: u64| {
        // A hostile image must not empty the cache by what it says of itself.
        folders.iter().flatten().for_each(|it| room::make(context, it, bytes.min(room::STEP)));
    };
    let allocate = |file: &File, offset, len| room::allocate(context, file, (offset, len));
    let rooms = (make_room, allocate);
    let made: Made = read_elsewhere(reach, job, archive.map(AsFd::as_fd), rooms)?;
    let recorded = record_read(context, source, &made);
    match (made.done, recorded) {
        (Done::Differs(why), _) => Err(Error::new(ErrorKind::Corrupt, why)),
        (Done::Unpacked, Err(error)) => Err(error),
        (done, recorded) => {
            // The image can be used, and the layers are read another time.
            if let Err(error) = recorded {
                eprintln!("note: {error}");
            }
            Ok(Made { done, ..made })
        }
    }
}

/// Records the layers of the requested image that the child has read to their end. Nothing is
/// recorded of an image whose documents are not known: others may have the layer, too.
fn record_read(context: &Context, source: Option<&Source>, made: &Made) -> Result<()> {
    if made.read.is_empty() {
        return Ok(());
    }
    let (digest, documents) = match &made.done {
        Done::Found(Elsewhere::Made(found)) => (found.oci_digest.clone(), &found.documents),
        Done::Indexed(indexed) => (Some(indexed.image.clone()), &indexed.documents),
        _ => (source.and_then(Source::pinned).map(OciDigest::to_string), &Vec::new()),
    };
    context.documents().keep(documents)?;
    let digest = digest.and_then(|digest| digest.parse().ok());
    let image: Option<OciImage> = digest.and_then(|digest| context.documents().image(&digest));
    let is_of = |one: &&Unpacked| {
        image.as_ref().is_some_and(|image| {
            image.layers.iter().any(|layer| {
                layer.digest == one.layer && (one.stated.is_none() || layer.diff_id == one.stated)
            })
        })
    };
    let read: Vec<Unpacked> = made.read.iter().filter(is_of).cloned().collect();
    context.unpackings().record(&read)
}

/// Reads all layers of the OCI image `source`, which names its digest and whose documents are kept,
/// and records what they unpack to. Keeps nothing of them.
pub(super) fn unpack(context: &Context, text: &str, source: &Source) -> Result<()> {
    let task = Task::Unpack { text: text.to_owned() };
    have_done(context, Some(source), &context.build_options(), task, None).map(drop)
}

/// Writes a blob of the repository of `source` to `pipe`. Keeps nothing of it.
pub(super) fn blob(
    context: &Context,
    text: &str,
    source: &Source,
    (digest, size): (&OciDigest, u64),
    pipe: &dyn AsFd,
) -> Result<()> {
    let task = Task::Blob { text: text.to_owned(), digest: digest.to_string(), size };
    have_done(context, Some(source), &context.build_options(), task, Some(pipe)).map(drop)
}

/// Records the child's notes on the image that it made.
fn remember(
    context: &Context,
    source: Option<&Source>,
    image: &ImageRecord,
    noted: Option<ImageProvenance>,
    built_as: Option<&str>,
) -> Result<()> {
    let Some(noted) = noted else { return Ok(()) };
    let may_be = |name: &str| source.is_some_and(|source| source.may_be_named(name));
    context.provenance().adopt(&image.digest()?, noted, built_as, may_be)
}
