//! `push` and `pull`: copy images between the store, registries and this host.

use std::{process::ExitCode, time::Instant};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind};
use burgeon_image::catalog::{self, ImageRecord, Provenance};
use burgeon_oci::{ImageForm, Pull, Pushed};
use burgeon_source::{Access, Location, Store, registry::Name};
use serde_json::json;

use super::{Context, mistakes, named, oci_image, reading, room};
use crate::{
    args,
    output::{self, bytes},
    progress::Progress,
};

pub(super) fn push(context: &Context, args: &args::Push) -> Result<ExitCode> {
    let args::Push { name, to } = args;
    if Name::parse(to).is_none() && Name::parse(name).is_some() {
        return Err(mistakes::swapped("push", to, name).into());
    }
    let to = Name::parse(to).unwrap_or_else(|| {
        let what = format!("{to} is not a place for an image: oci://REGISTRY/REPOSITORY:TAG");
        Err(Error::new(ErrorKind::Invalid, what))
    })?;
    let (pushed, seconds) = send(context, name, &to)?;
    if context.json {
        output::print_json(&json!({
            "image": name, "reference": pushed.name.to_string(),
            "new_bytes": pushed.new_bytes, "there_bytes": pushed.there_bytes, "seconds": seconds,
        }))?;
    } else {
        describe(name, &to, &pushed, seconds);
    }
    Ok(ExitCode::SUCCESS)
}

/// Pushes the image `name` of the store; returns the seconds that it took.
pub(super) fn send(context: &Context, name: &str, to: &Name) -> Result<(Pushed, f64)> {
    let store = context.open_store()?;
    let record = named::trusted(context, &store, name)?;
    let access = Access::from_env().for_registry(to)?;
    let progress = Progress::new(format!("pushing {name}"));
    let show = |done, total| progress.update(done, Some(total));
    let pushed = burgeon_oci::push(&store, &record, to, &access, &show);
    let seconds = progress.finish().as_secs_f64();
    Ok((pushed?, seconds))
}

pub(super) fn describe(name: &str, to: &Name, pushed: &Pushed, seconds: f64) {
    let (new, there) = (bytes(pushed.new_bytes), bytes(pushed.there_bytes));
    println!("pushed {name} to {to} in {seconds:.1} s: {new} sent, {there} were there already");
    println!("it is {}", pushed.name);
}

pub(super) fn pull(context: &Context, args: args::Pull) -> Result<ExitCode> {
    let want = if args.eager { ImageForm::Whole } else { ImageForm::Any };
    if let Some(name) = &args.name {
        catalog::check_given_name(name)?;
    }
    let mut place = oci_image::find(context, args.source.clone(), want, Pull::Always)?;
    let own = context.state.store().into();
    let record = place.record()?;
    if place.store == own && burgeon_oci::is_whole(&context.open_store()?, &record)? {
        // A found OCI image is complete, unless it is only an index or tables of contents. It gets
        // its name here.
        return whole(context, &place, &record, &args);
    }
    let shown = &place.shown;
    if !args.eager {
        let digest = record.digest()?;
        room::make(context, context.state.root(), room::for_metadata(&record));
        burgeon_daemon::make_ready(&context.state, &place.store, &place.access, digest)?;
        if context.json {
            output::print_json(&json!({ "image": shown, "store": place.store }))?;
        } else {
            println!("{shown} is ready to mount; its data comes when it is read");
        }
        return Ok(ExitCode::SUCCESS);
    }
    if place.store == own {
        // The image is here, but its data is elsewhere: the error says so.
        catalog::parts(&Store::open(&place.store, &place.access)?, &record)?;
    }
    let to = Store::create(&own, &Access::default())?;
    let name = args.name.clone().map_or_else(|| named::name_of(&args.source), Ok)?;
    // From here on it is a local name.
    let provenance = Provenance::new(context.state.provenance(), own.to_string());
    check_free(&to, &provenance, &name, shown, &record, args.replace)?;
    room::make(
        context,
        &context.state.store(),
        record.stored_bytes.saturating_add(record.manifest_bytes),
    );
    let begun = Instant::now();
    let copied = match &place.store {
        Location::Registry(artifact) => reading::copy(context, artifact, &record)?,
        Location::Folder(_) | Location::Remote(_) => {
            let progress = Progress::new(format!("pulling {name}"));
            let show = |done, total| progress.update(done, Some(total));
            let from = Store::open(&place.store, &place.access)?;
            let copied = catalog::copy(&from, &to, &record, &show);
            progress.finish();
            copied?
        }
    };
    let seconds = begun.elapsed().as_secs_f64();
    // Check again: the copy took time, and another process may have taken the name.
    check_free(&to, &provenance, &name, shown, &record, args.replace)?;
    catalog::publish_alias(&to, &record, &name)?;
    provenance.refer(shown, &record.digest()?)?;
    if context.json {
        output::print_json(&json!({
            "image": name, "digest": record.digest()?.to_string(), "complete": true,
            "new_bytes": copied.new_bytes, "there_bytes": copied.there_bytes, "seconds": seconds,
        }))?;
    } else {
        let (new, there) = (bytes(copied.new_bytes), bytes(copied.there_bytes));
        println!("pulled {name} in {seconds:.1} s: {new} fetched, {there} were there already");
        println!("it is complete: `burgeon mount {name}` needs nothing but this host");
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses to take `name` from another image than `record`. The exception is an older version by
/// the same reference, which the user wants to update.
fn check_free(
    store: &Store,
    provenance: &Provenance,
    name: &str,
    reference: &str,
    record: &ImageRecord,
    replace: bool,
) -> Result<()> {
    let digest = record.digest()?;
    let is_older =
        |taken: &Digest| *taken == digest || provenance.of(taken).references.contains(reference);
    named::check_free(store, name, replace, is_older).map(drop)
}

/// Reports that an image is complete in this host's own store, and gives it the requested name.
fn whole(
    context: &Context,
    place: &oci_image::ImageLocation,
    record: &ImageRecord,
    args: &args::Pull,
) -> Result<ExitCode> {
    let store = context.open_store()?;
    if let Some(list) = burgeon_oci::layer_list(&store, record)? {
        burgeon_daemon::keep_layers(&context.state, &list)?;
        // From here on none is evicted.
        if !burgeon_oci::is_whole(&store, record)? {
            let what = format!("a layer of {} was evicted just now: try again", place.shown);
            return Err(Error::new(ErrorKind::Unavailable, what).into());
        }
    }
    if let Some(name) = &args.name {
        let provenance = context.provenance();
        check_free(&store, &provenance, name, &place.shown, record, args.replace)?;
        catalog::publish_alias(&store, record, name)?;
    }
    let name = args.name.clone().unwrap_or_else(|| place.shown.clone());
    if context.json {
        let digest = record.digest()?.to_string();
        output::print_json(&json!({ "image": name, "digest": digest, "complete": true }))?;
    } else {
        println!("{name} is complete: `burgeon mount {name}` needs nothing but this host");
    }
    Ok(ExitCode::SUCCESS)
}
