//! The child's side: `burgeon __read` does one task, in its sandbox.

use std::{ffi::OsString, fs::File, process::ExitCode};

use burgeon_block::{ChecksumKind, Error, ErrorKind, Result};
use burgeon_daemon::{ReaderParent, StateDir, read_process};
use burgeon_image::{
    builder::{self, BuildOptions, BuildReport},
    catalog::{self, Copied, ImageRecord},
};
use burgeon_oci::{Found, ImageForm, Pull, ReadLayers, Source, Unpacked, Work};
use burgeon_source::{
    Access, Location, Store,
    registry::{Checked, Name, OciDigest, Registry, body_error},
};

use super::job::{Done, Elsewhere, Job, Made, Task, something_else};
use crate::{
    commands::{
        Context,
        room::StepByStep,
        work::{Rooms, with_work},
    },
    config::Config,
    progress::Progress,
};
/// The result of `task` with the source `text`. An error names that image, if it does not already.
/// (An archive's URL may hold a secret, and its errors name it without.)
fn named<T>(text: &str, task: impl FnOnce(&Source) -> Result<T>) -> Result<T> {
    let source = parse(text)?;
    let end_of_path = text.rfind('/').map_or(0, |slash| slash + 1);
    let end = text[end_of_path..].find(['@', ':', '#']).map_or(text.len(), |at| end_of_path + at);
    task(&source).map_err(|error| {
        if source.is_archive() || error.to_string().contains(&text[..end]) {
            return error;
        }
        Error::with_source(error.kind(), format!("cannot use {text}"), error)
    })
}

fn parse(text: &str) -> Result<Source> {
    Source::parse(text).unwrap_or_else(|| Err(something_else()))
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
    let rooms = Rooms {
        make: &|bytes| parent.make_room(bytes),
        allocate: &|file, offset, len| parent.allocate(file, offset, len),
    };
    let made = make(job, archive, (access, &read, &rooms));
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
    (access, read, rooms): (&Access, &ReadLayers, &Rooms<'_>),
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
    let child = Child { context, store, options, access, read, rooms };
    let done = match job.task {
        Task::Find { text, form, pull } => child.find(&text, form.want(), pull)?,
        Task::Documents { text } => {
            let documents = |source: &Source| burgeon_oci::documents(source, access);
            let (digest, documents) = named(&text, documents)?;
            Done::Documents(digest, documents)
        }
        Task::Unpack { text } => {
            child.read_whole(&text, burgeon_oci::unpack)?;
            Done::Unpacked
        }
        Task::Blob { text, digest, size } => {
            let pipe = archive.ok_or_else(something_else)?;
            write_blob(&parse(&text)?, (digest.parse()?, size), pipe, access)?;
            Done::Written
        }
        Task::Index { text, push, content } => {
            let index = |source: &Source, work: &Work<'_>| {
                let work = Work { content: content.as_deref(), ..*work };
                burgeon_oci::index(&child.store, source, push, &work)
            };
            Done::Indexed(child.read_whole(&text, index)?)
        }
        Task::Build { text, name } => {
            let build = |source: &Source, work: &Work<'_>| {
                burgeon_oci::build(&child.store, source, &name, work)
            };
            Done::Built(Box::new(child.read_whole(&text, build)?))
        }
        Task::Copy { from, record } => Done::Copied(child.copy(&from, &record)?),
        Task::BuildArchive { path, len, name } => {
            let archive = archive.ok_or_else(something_else)?;
            let built = child.build_archive((archive, len), &name);
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

/// The state that the tasks of a child share.
struct Child<'a> {
    context: Context,
    store: Store,
    options: BuildOptions,
    access: &'a Access,
    read: &'a ReadLayers,
    rooms: &'a Rooms<'a>,
}

impl Child<'_> {
    fn find(&self, text: &str, want: ImageForm<'_>, pull: Pull) -> Result<Done> {
        let find = |source: &Source, work: &Work<'_>| {
            burgeon_oci::find_or_build(&self.store, source, want, work)
        };
        Ok(Done::Found(match self.with_source(text, pull, find)? {
            Found::Image(image) => Elsewhere::Made(image),
            Found::Ours(name) => {
                let record = only_record(&name, self.access)?;
                Elsewhere::Ours(name, Box::new(record))
            }
        }))
    }

    /// Does `task` with the current image of `text`.
    fn read_whole<T>(
        &self,
        text: &str,
        task: impl FnOnce(&Source, &Work<'_>) -> Result<T>,
    ) -> Result<T> {
        self.with_source(text, Pull::Always, task)
    }

    fn with_source<T>(
        &self,
        text: &str,
        pull: Pull,
        task: impl FnOnce(&Source, &Work<'_>) -> Result<T>,
    ) -> Result<T> {
        named(text, |source| {
            let reach = (self.access, self.read, self.rooms);
            with_work(&self.context, text, pull, &self.options, reach, |work| task(source, work))
        })
    }

    /// Copies the image of `record` from another store, and shows the progress.
    fn copy(&self, from: &Location, record: &ImageRecord) -> Result<Copied> {
        let progress = Progress::new(format!("pulling {from}"));
        let stored = StepByStep::new(self.rooms.make);
        let show = |done, total| {
            stored.reached(done);
            progress.update(done, Some(total));
        };
        let from = Store::open(from, self.access)?;
        let copied = catalog::copy(&from, &self.store, record, &show);
        progress.finish();
        copied
    }

    /// Builds the image `name` of an open archive, and shows the progress.
    fn build_archive(
        &self,
        (archive, len): (File, Option<u64>),
        name: &str,
    ) -> Result<BuildReport> {
        let progress = Progress::new(format!("building {name}"));
        let stored = StepByStep::new(self.rooms.make);
        let show = |now: &builder::Progress| {
            stored.reached(now.stored_bytes);
            progress.update(now.bytes, now.bytes_total);
        };
        let built = builder::from_tar(&self.store, name, archive, len, &self.options, &show);
        progress.finish();
        built
    }
}

/// Writes a blob of the repository of `source` to `pipe`.
fn write_blob(
    source: &Source,
    (digest, size): (OciDigest, u64),
    mut pipe: File,
    access: &Access,
) -> Result<()> {
    let name = source.registry_name().ok_or_else(something_else)?;
    let blob = Registry::open(name, access)?.blob(&digest, 0)?;
    let mut blob = Checked::new(blob, digest, size);
    let failed = |e| body_error("fetch a layer", e);
    std::io::copy(&mut blob, &mut pipe).map(drop).map_err(failed)
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

/// The record of the Burgeon image `name`, the only one in its store.
fn only_record(name: &Name, access: &Access) -> Result<ImageRecord> {
    let store = Store::open(&Location::Registry(Box::new(name.clone())), access)?;
    let (_, record) = catalog::list(&store)?.pop().ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, format!("{name} is an image without a record"))
    })?;
    record
}
