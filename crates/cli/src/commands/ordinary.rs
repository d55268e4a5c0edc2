//! Ordinary images, by `mount` and `build`: made images of the store at first sight.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_image::build::{self, Options, Report};
use burgeon_oci::{Source, Work};
use burgeon_source::Access;

use serde_json::json;

use super::{Context, images};
use crate::{args, output, progress::Progress};

/// The name in the store of what `text` says. If that is no name but a source of ordinary images,
/// the image is found there by its digest, or built.
///
/// Returns also what it takes to read its layers, if they are read again. With `index`, the digest of one, the image's index of that digest is used instead of a build.
pub(super) fn find(
    context: &Context,
    text: String,
    index: Option<&str>,
) -> Result<(String, Access)> {
    let Some(source) = Source::parse(&text) else {
        if index.is_some() {
            anyhow::bail!(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{text} is no ordinary image: only those of oci://… and oci-layout:… have an index"
                ),
            ));
        }
        return Ok((text, Access::default()));
    };
    let (source, store) = (source?, context.create_store()?);
    if index.is_some() {
        need_own_store(context)?;
    }
    let begun = Instant::now();
    let found = work(context, &text, &Options::default(), |work| {
        store.check_writable()?;
        burgeon_oci::find_or_build(&store, &source, index, work)
    })?;
    if let Some(report) = found.report.filter(|_| !context.json) {
        images::describe(&report, begun.elapsed().as_secs_f64());
    }
    for digest in found.unused {
        eprintln!(
            "note: beside the image lies the index {digest}, which was not used, because nobody \
             here vouches for it: --index {digest} would"
        );
    }
    Ok((found.name, found.access))
}

/// Images that are read from layers elsewhere are believed in the state directory's own store.
fn need_own_store(context: &Context) -> Result<()> {
    if context.store.is_none() {
        return Ok(());
    }
    let what = "an index is kept in the state directory's own store: leave --store out";
    Err(Error::new(ErrorKind::Invalid, what).into())
}

/// `burgeon index`: makes the index of an ordinary image.
pub(super) fn index(context: &Context, args: &args::Index) -> Result<ExitCode> {
    let Some(source) = Source::parse(&args.source) else {
        anyhow::bail!(Error::new(
            ErrorKind::Invalid,
            format!("{} is no ordinary image: oci://… or oci-layout:…", args.source),
        ));
    };
    need_own_store(context)?;
    let (source, store) = (source?, context.create_store()?);
    let made = work(context, &args.source, &Options::default(), |work| {
        burgeon_oci::index(&store, &source, args.push, work)
    })?;
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
            "it lies beside the image: burgeon mount {} PATH --index {}",
            args.source, made.digest
        ),
        false => {
            println!("mounts on this host use it; --push puts it beside the image, for others")
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the image `name` of the source `text`; says how long it took.
pub(super) fn build(
    context: &Context,
    text: &str,
    name: &str,
    options: &Options,
) -> Result<(Report, Duration)> {
    let Some(source) = Source::parse(text) else { anyhow::bail!("{text} is no source of images") };
    let (source, store) = (source?, context.create_store()?);
    store.check_writable()?;
    let begun = Instant::now();
    let report =
        work(context, text, options, |work| burgeon_oci::build(&store, &source, name, work));
    Ok((report?, begun.elapsed()))
}

/// Does `what` with something to show how far it is.
fn work<T>(
    context: &Context,
    text: &str,
    options: &Options,
    what: impl FnOnce(&Work<'_>) -> burgeon_block::Result<T>,
) -> Result<T> {
    let (fetch, made) =
        (Progress::new(format!("fetching {text}")), Progress::new(format!("building {text}")));
    let fetching = |done, total| fetch.update(done, Some(total));
    let building = |now: &build::Progress| made.update(now.bytes, now.bytes_total);
    let spool = context.state.root();
    let access = Access::from_env();
    let done =
        what(&Work { access: &access, spool, options, fetching: &fetching, building: &building });
    fetch.finish();
    made.finish();
    Ok(done?)
}
