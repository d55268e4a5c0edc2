//! Images elsewhere, for `mount`, `pull` and `build`. Burgeon images stay where they are; OCI
//! images become images of the store on their first mount on a host.

use std::{process::ExitCode, time::Instant};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind};
use burgeon_image::catalog::{self, ImageRecord};
use burgeon_oci::{FoundImage, How, ImageForm, Pull, ReadLayers, Source};
use burgeon_source::{Access, Location, Store};
use serde_json::json;

use super::{
    Context, built, far, mistakes, named,
    reading::{self, Elsewhere},
    work::{Rooms, with_work},
};
use crate::{args, output};

/// The location of an image.
pub(super) struct ImageLocation {
    pub(super) store: Location,
    /// Settings and credentials for the store.
    pub(super) access: Access,
    /// The name in its kept writes: that in the store, or the reference of an artifact.
    pub(super) name: String,
    /// The image's record, if known: writers of the store cannot change it.
    pub(super) image: Option<ImageRecord>,
    /// Its digest, if only that is known.
    digest: Option<Digest>,
    /// The store does not answer, or must not be asked.
    pub(super) store_away: bool,
    /// Why the record is unknown. Kept writes need neither their image's name nor its store.
    pub(super) missing: Option<anyhow::Error>,
    /// The user's input.
    pub(super) shown: String,
}

impl ImageLocation {
    /// The image's record; reads it from the store if necessary.
    pub(super) fn record(&mut self) -> Result<ImageRecord> {
        match (&self.image, self.missing.take()) {
            (Some(image), _) => Ok(image.clone()),
            (None, Some(missing)) => Err(missing),
            (None, None) => self.read_record(),
        }
    }

    fn read_record(&self) -> Result<ImageRecord> {
        let found = catalog::resolve(&Store::open(&self.store, &self.access)?, &self.name);
        Ok(found.map_err(|e| mistakes::explain(&self.name, e))?)
    }

    /// Explains `error` of the daemon: returns a more specific error if the image was not found.
    pub(super) fn explain(self, error: Error) -> anyhow::Error {
        match self.missing {
            _ if error.kind() != ErrorKind::NotFound => error.into(),
            Some(missing) => missing,
            None if self.image.is_none() => mistakes::explain(&self.name, error).into(),
            None => error.into(),
        }
    }

    pub(super) fn digest(&self) -> Result<Option<Digest>> {
        let of_record = self.image.as_ref().map(ImageRecord::digest).transpose()?;
        Ok(of_record.or(self.digest))
    }
}

/// Finds the image `text`: a name in the store, or a source of images. A Burgeon image stays where
/// it is. Any other is looked up in the store by its digest, or made there as far as `want` asks.
pub(super) fn find(
    context: &Context,
    text: String,
    want: ImageForm<'_>,
    pull: Pull,
) -> Result<ImageLocation> {
    let text = match context.in_repository(&text)? {
        Some(image) => image.to_string(),
        None => text,
    };
    let shown = named::canonical(&text);
    let here = |name, image, layers| {
        let (store, access) = (context.store_location(), Access::from_env().and(layers));
        let (shown, digest, store_away) = (shown.clone(), None, false);
        ImageLocation { store, access, name, image, digest, store_away, missing: None, shown }
    };
    let pinned = matches!(want, ImageForm::Index(_));
    let Some(source) = Source::parse(&text) else {
        if pinned {
            anyhow::bail!(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{text} is not an OCI image: only images of oci://… and oci-layout:… have an \
                     index"
                ),
            ));
        }
        return find_named(context, text, pull, here);
    };
    let (source, store) = (source?, context.create_store()?);
    if pinned {
        need_own_store(context)?;
    }
    let begun = Instant::now();
    store.check_writable()?;
    let options = context.build_options();
    // An image that is here stores nothing.
    let none = (&Access::default(), &ReadLayers::default(), &Rooms::NONE);
    let found = with_work(context, &text, pull, &options, none, |work| {
        burgeon_oci::find_here(&store, &source, want, work)
    })?;
    let found = match found {
        Some(found) => Elsewhere::Made(Box::new(found)),
        None => reading::find(context, &text, &source, want, pull)?,
    };
    let found = match found {
        Elsewhere::Made(found) => found,
        Elsewhere::Ours(artifact, record) => {
            let access = Access::from_env().for_registry(&artifact)?;
            let store = Location::Registry(Box::new(artifact));
            // The record has its author's name; the user's input counts.
            let (image, name) = (Some(*record), shown.clone());
            let (digest, store_away, missing) = (None, false, None);
            return Ok(ImageLocation {
                store,
                access,
                name,
                image,
                digest,
                store_away,
                missing,
                shown,
            });
        }
    };
    if let Some(report) = found.report.as_ref().filter(|_| !context.json) {
        let stored = burgeon_oci::stored_bytes(&store, &found.image)?;
        let (done, seconds) = (done(found.how), begun.elapsed().as_secs_f64());
        built::describe(done, named::public(&text), report, stored, seconds);
    }
    print_notes(&found);
    // If this fails, only commands that name the image by this reference miss it.
    let digest = found.image.digest()?;
    let _ = context.provenance().refer(&shown, &digest);
    let layers = match source.registry_name().filter(|_| found.is_lazy) {
        Some(name) => Access::from_env().for_registry(name)?,
        None => Access::default(),
    };
    Ok(here(found.image.name.clone(), Some(found.image), layers))
}

/// Finds the image `text`, a name in the store. `located` completes a location.
fn find_named(
    context: &Context,
    text: String,
    pull: Pull,
    located: impl Fn(String, Option<ImageRecord>, Access) -> ImageLocation,
) -> Result<ImageLocation> {
    // A remote record is read only where it is needed, which saves a round trip.
    let is_near = context.store_location().folder().is_some();
    if !is_near && !catalog::is_reserved(&text) {
        let (digest, store_away) = far::find(context, &text, pull)?;
        let location = located(text, None, Access::default());
        return Ok(ImageLocation { digest, store_away, ..location });
    }
    let found = context.open_store().and_then(|store| named::trusted(context, &store, &text));
    Ok(match found {
        Ok(image) => {
            let location = located(image.name.clone(), Some(image), Access::default());
            match location.name == text {
                true => ImageLocation { shown: text, ..location },
                false => location,
            }
        }
        Err(e) => ImageLocation { missing: Some(e), ..located(text, None, Access::default()) },
    })
}

/// The work that has put the image here.
fn done(how: How) -> &'static str {
    match how {
        How::Built => "built",
        How::Fetched => "fetched",
        How::Listed => "listed",
    }
}

fn print_notes(found: &FoundImage) {
    for note in &found.notes {
        eprintln!("note: {note}");
    }
    for digest in &found.unused {
        eprintln!(
            "note: the image has the published index {digest}, which was not used, because its \
             author is not known to be trusted; --index {digest} uses it"
        );
    }
}

/// The OCI image `text`, or its index, made without tables of contents, if the state directory's
/// own store has it.
pub(super) fn checked(context: &Context, text: &str) -> burgeon_block::Result<Option<FoundImage>> {
    need_own_store(context).map_err(|e| Error::new(ErrorKind::Invalid, e.to_string()))?;
    let not_oci = || Error::new(ErrorKind::Invalid, format!("{text} is not an OCI image"));
    let source = Source::parse(text).ok_or_else(not_oci)??;
    let store = Store::open(&context.store_location(), &Access::default())?;
    let (options, access, read) =
        (context.build_options(), Access::default(), ReadLayers::default());
    with_work(context, text, Pull::default(), &options, (&access, &read, &Rooms::NONE), |work| {
        burgeon_oci::find_here(&store, &source, ImageForm::Checked, work)
    })
}

/// Images that are read from layers elsewhere are trusted only in the state directory's own store.
pub(super) fn need_own_store(context: &Context) -> Result<()> {
    if context.store.is_none() {
        return Ok(());
    }
    let what = "an index is kept in the state directory's own store: leave out --store, or give --store '' if the configuration has a default";
    Err(Error::new(ErrorKind::Invalid, what).into())
}

/// `burgeon index`: makes the index of an OCI image.
pub(super) fn index(context: &Context, args: &args::Index) -> Result<ExitCode> {
    let Some(source) = Source::parse(&args.source) else {
        anyhow::bail!(Error::new(
            ErrorKind::Invalid,
            match mistakes::meant(&args.source) {
                Some(meant) => format!("{} is not an OCI image: {meant}", args.source),
                None => format!("{} is not an OCI image, as oci://… or oci-layout:…", args.source),
            },
        ));
    };
    need_own_store(context)?;
    context.create_store()?;
    let made = reading::index(context, &args.source, &source?, args.push, None)?;
    if context.json {
        output::print_json(&json!({
            "index": made.digest, "image": made.image, "bytes": made.bytes,
            "image_bytes": made.image_bytes, "pushed": made.pushed,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let percent = made.bytes as f64 * 100.0 / (made.image_bytes.max(1)) as f64;
    println!(
        "index {}: {}, {percent:.1} % of the image's {}",
        made.digest,
        output::bytes(made.bytes),
        output::bytes(made.image_bytes)
    );
    match made.pushed {
        true => println!(
            "published with the image: burgeon mount {} PATH --index {}",
            args.source, made.digest
        ),
        false => {
            println!("mounts on this host use it; --push publishes it for other hosts")
        }
    }
    Ok(ExitCode::SUCCESS)
}
