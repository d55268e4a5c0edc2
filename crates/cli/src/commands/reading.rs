//! Reads foreign images in a sandboxed child process: the command's side and the child's side.
//!
//! ```text
//!   command: find, index, build, copy ─► Job ──► burgeon __read: perform ─► Made ─┐
//!            records: provenance of the image, digest of its tag               ◄──┘
//! ```
//!
//! Invariant: the command records only statements of the child about the requested image. A child
//! under the control of a hostile image vouches for no other image, and records no other tag.

use std::{
    ffi::OsString,
    fs::File,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use burgeon_block::{ChecksumKind, Error, ErrorKind, Result};
use burgeon_daemon::{Reach, ReaderParent, StateDir, read_elsewhere, read_process};
use burgeon_image::{
    builder::{self, BuildOptions, Report},
    catalog::{self, Copied, ImageProvenance, ImageRecord},
};
use burgeon_oci::{
    Found, FoundImage, ImageForm, Indexed, OciImage, Pull, ReadLayers, Source, Tags, Unpacked,
};
use burgeon_source::{
    Access, Location, Store,
    registry::{Checked, Name, OciDigest, Registry, body_error},
};
use serde::{Deserialize, Serialize};

use super::{
    Context,
    room::{self, StepByStep},
    work::{MakeRoom, with_work},
};
use crate::{config::Config, progress::Progress};

/// The child's task.
#[derive(Serialize, Deserialize)]
struct Job {
    state: PathBuf,
    /// `None` means the state directory's own store.
    store: Option<Location>,
    level: i32,
    xxhash64: bool,
    task: Task,
}

/// The form of an image, where its index is not given.
#[derive(Serialize, Deserialize)]
enum Form {
    Any,
    Checked,
    Whole,
}

#[derive(Serialize, Deserialize)]
enum Task {
    Find {
        text: String,
        index: Option<String>,
        form: Form,
        pull: Pull,
    },
    Index {
        text: String,
        push: bool,
    },
    /// From an OCI image.
    Build {
        text: String,
        name: String,
    },
    /// From the archive that is passed along, with its path and length if they are known.
    BuildArchive {
        path: Option<PathBuf>,
        len: Option<u64>,
        name: String,
    },
    /// The documents of an OCI image.
    Documents {
        text: String,
    },
    /// The digests of an OCI image's unpacked layers.
    Unpack {
        text: String,
    },
    /// A blob of the repository of an OCI image, written to the pipe that is passed along.
    Blob {
        text: String,
        digest: String,
        size: u64,
    },
    /// All objects of an image, except its name, from the store `from`.
    Copy {
        from: Location,
        record: ImageRecord,
    },
}

/// The child's result, and its notes on the image.
#[derive(Serialize, Deserialize)]
struct Made {
    done: Done,
    noted: Option<ImageProvenance>,
    /// Layers that were read to their end.
    #[serde(default)]
    read: Vec<Unpacked>,
}

#[derive(Serialize, Deserialize)]
enum Done {
    Found(Elsewhere),
    /// The digest of an OCI image or index, and its documents.
    Documents(String, Vec<String>),
    Copied(Copied),
    Indexed(Indexed),
    Built(Box<Report>),
    Unpacked,
    Written,
    /// A layer unpacks to another digest than the image states, as `read` tells; the error.
    Differs(String),
}

/// An image that was not in the store.
#[derive(Serialize, Deserialize)]
pub(super) enum Elsewhere {
    /// Made there meanwhile.
    Made(Box<FoundImage>),
    /// A Burgeon image in a registry, with the record that its author gave it.
    Ours(Name, Box<ImageRecord>),
}

/// Finds or makes the image of `source`. `text` is the user's name for it.
pub(super) fn find(
    context: &Context,
    text: &str,
    source: &Source,
    want: ImageForm<'_>,
    pull: Pull,
) -> Result<Elsewhere> {
    let (index, form) = match want {
        ImageForm::Index(digest) => (Some(digest.to_owned()), Form::Any),
        ImageForm::Any => (None, Form::Any),
        ImageForm::Checked => (None, Form::Checked),
        ImageForm::Whole => (None, Form::Whole),
    };
    let task = Task::Find { text: text.to_owned(), index, form, pull };
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

/// Makes the index of the image of `source`.
pub(super) fn index(context: &Context, text: &str, source: &Source, push: bool) -> Result<Indexed> {
    let task = Task::Index { text: text.to_owned(), push };
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
) -> Result<(Report, Duration)> {
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
) -> Result<(Report, Duration)> {
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
) -> Result<(Report, Duration)> {
    let begun = Instant::now();
    let made = have_done(context, source, options, task, archive)?;
    let Done::Built(report) = made.done else { return Err(something_else()) };
    remember(context, source, &report.image, made.noted, Some(name))?;
    // The files are not this host's own.
    Ok((Report { honours: None, ..*report }, begun.elapsed()))
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
    let made: Made = read_elsewhere(reach, job, archive.map(AsFd::as_fd), make_room)?;
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

fn something_else() -> Error {
    Error::new(ErrorKind::LocalIo, "unexpected answer from the process that reads the image")
}

/// The error, with the image that the user has named if the error does not name it. (An archive's
/// URL may hold a secret, and its errors name it without.)
fn named(source: &Source, text: &str, error: Error) -> Error {
    let end_of_path = text.rfind('/').map_or(0, |slash| slash + 1);
    let end = text[end_of_path..].find(['@', ':', '#']).map_or(text.len(), |at| end_of_path + at);
    if source.is_archive() || error.to_string().contains(&text[..end]) {
        return error;
    }
    Error::with_source(error.kind(), format!("cannot use {text}"), error)
}

/// The main function of the process `burgeon __read`.
pub(crate) fn process(arguments: &[OsString]) -> ExitCode {
    read_process(arguments, perform)
}

fn perform(
    job: Job,
    access: &Access,
    archive: Option<File>,
    parent: &ReaderParent,
) -> Result<Made> {
    let read = ReadLayers::default();
    let made = make(job, archive, (access, &read, &|bytes| parent.make_room(bytes)));
    let read = read.into_inner();
    match made {
        // The command records the layer, and then fails.
        Err(error) if read.iter().any(Unpacked::differs) => {
            Ok(Made { done: Done::Differs(error.to_string()), noted: None, read })
        }
        made => Ok(Made { read, ..made? }),
    }
}

fn make(
    job: Job,
    archive: Option<File>,
    (access, read, make_room): (&Access, &ReadLayers, MakeRoom<'_>),
) -> Result<Made> {
    let context = Context {
        state: StateDir::looked_at(job.state),
        store: job.store,
        repository: None,
        config: Config::default(),
        json: false,
    };
    let provenance = context.provenance().noting();
    let options = BuildOptions {
        level: job.level,
        checksum: if job.xxhash64 { ChecksumKind::Xxhash64 } else { ChecksumKind::Crc32c },
        provenance: Some(provenance.clone()),
        ..BuildOptions::default()
    };
    let store = Store::create(&context.store_location(), access)?;
    let parse = |text: &str| Source::parse(text).unwrap_or_else(|| Err(something_else()));
    let done = match job.task {
        Task::Find { text, index, form, pull } => {
            let want = match (&index, form) {
                (Some(digest), _) => ImageForm::Index(digest),
                (None, Form::Any) => ImageForm::Any,
                (None, Form::Checked) => ImageForm::Checked,
                (None, Form::Whole) => ImageForm::Whole,
            };
            let source = parse(&text)?;
            let found =
                with_work(&context, &text, pull, &options, (access, read, make_room), |work| {
                    burgeon_oci::find_or_build(&store, &source, want, work)
                });
            Done::Found(match found.map_err(|e| named(&source, &text, e))? {
                Found::Image(image) => Elsewhere::Made(image),
                Found::Ours(name) => {
                    let record = only_record(&name, access)?;
                    Elsewhere::Ours(name, Box::new(record))
                }
            })
        }
        Task::Documents { text } => {
            let source = parse(&text)?;
            let read = burgeon_oci::documents(&source, access);
            let (digest, documents) = read.map_err(|e| named(&source, &text, e))?;
            Done::Documents(digest, documents)
        }
        Task::Unpack { text } => {
            let (source, pull) = (parse(&text)?, Pull::Always);
            let read =
                with_work(&context, &text, pull, &options, (access, read, make_room), |work| {
                    burgeon_oci::unpack(&source, work)
                });
            read.map_err(|e| named(&source, &text, e))?;
            Done::Unpacked
        }
        Task::Blob { text, digest, size } => {
            let source = parse(&text)?;
            let name = source.registry_name().ok_or_else(something_else)?;
            let digest: OciDigest = digest.parse()?;
            let blob = Registry::open(name, access)?.blob(&digest, 0)?;
            let mut blob = Checked::new(blob, digest, size);
            let failed = |e| body_error("fetch a layer", e);
            let mut pipe = archive.ok_or_else(something_else)?;
            std::io::copy(&mut blob, &mut pipe).map_err(failed)?;
            Done::Written
        }
        Task::Index { text, push } => {
            let (source, pull) = (parse(&text)?, Pull::Always);
            let indexed =
                with_work(&context, &text, pull, &options, (access, read, make_room), |work| {
                    burgeon_oci::index(&store, &source, push, work)
                });
            Done::Indexed(indexed.map_err(|e| named(&source, &text, e))?)
        }
        Task::Build { text, name } => {
            let (source, pull) = (parse(&text)?, Pull::Always);
            let built =
                with_work(&context, &text, pull, &options, (access, read, make_room), |work| {
                    burgeon_oci::build(&store, &source, &name, work)
                });
            Done::Built(Box::new(built.map_err(|e| named(&source, &text, e))?))
        }
        Task::Copy { from, record } => {
            Done::Copied(copy_here((&from, access), &store, &record, make_room)?)
        }
        Task::BuildArchive { path, len, name } => {
            let archive = archive.ok_or_else(something_else)?;
            let built = build_here(&store, (archive, len), &name, &options, make_room);
            Done::Built(Box::new(built.map_err(|e| {
                let of =
                    path.map_or("standard input".to_owned(), |path| path.display().to_string());
                Error::with_source(e.kind(), format!("cannot build from {of}"), e)
            })?))
        }
    };
    let image = image_of(&done);
    let digest = image.map(ImageRecord::digest).transpose()?;
    let noted = digest.and_then(|digest| provenance.noted(&digest));
    Ok(Made { done, noted, read: Vec::new() })
}

/// The image that a task has made or found here.
fn image_of(done: &Done) -> Option<&ImageRecord> {
    match done {
        Done::Found(Elsewhere::Made(found)) => Some(&found.image),
        Done::Found(Elsewhere::Ours(..)) | Done::Copied(_) | Done::Documents(..) => None,
        Done::Unpacked | Done::Written | Done::Differs(_) => None,
        Done::Indexed(indexed) => Some(&indexed.record),
        Done::Built(report) => Some(&report.image),
    }
}

/// Copies the image of `record` from another store, and shows the progress.
fn copy_here(
    (from, access): (&Location, &Access),
    store: &Store,
    record: &ImageRecord,
    make_room: MakeRoom<'_>,
) -> Result<Copied> {
    let progress = Progress::new(format!("pulling {from}"));
    let stored = StepByStep::new(make_room);
    let show = |done, total| {
        stored.reached(done);
        progress.update(done, Some(total));
    };
    let copied = catalog::copy(&Store::open(from, access)?, store, record, &show);
    progress.finish();
    copied
}

/// Builds the image `name` of an open archive, and shows the progress.
fn build_here(
    store: &Store,
    (archive, len): (File, Option<u64>),
    name: &str,
    options: &BuildOptions,
    make_room: MakeRoom<'_>,
) -> Result<Report> {
    let progress = Progress::new(format!("building {name}"));
    let stored = StepByStep::new(make_room);
    let show = |now: &builder::Progress| {
        stored.reached(now.stored_bytes);
        progress.update(now.bytes, now.bytes_total);
    };
    let built = builder::from_tar(store, name, archive, len, options, &show);
    progress.finish();
    built
}

/// The record of the Burgeon image `name`, the only one in its store.
fn only_record(name: &Name, access: &Access) -> Result<ImageRecord> {
    let store = Store::open(&Location::Registry(Box::new(name.clone())), access)?;
    let (_, record) = catalog::list(&store)?.pop().ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, format!("{name} is an image without a record"))
    })?;
    record
}
