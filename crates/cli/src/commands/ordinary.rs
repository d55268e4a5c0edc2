//! Ordinary images, by `mount` and `build`: made images of the store at first sight.

use std::time::{Duration, Instant};

use anyhow::Result;
use burgeon_image::build::{self, Options, Report};
use burgeon_oci::{Source, Work};
use burgeon_source::Access;

use super::{Context, images};
use crate::progress::Progress;

/// The name in the store of what `text` says. If that is no name but a source of ordinary images,
/// the image is found there by its digest, or built.
pub(super) fn find(context: &Context, text: String) -> Result<String> {
    let Some(source) = Source::parse(&text) else { return Ok(text) };
    let (source, store) = (source?, context.create_store()?);
    let (mut name, begun) = (String::new(), Instant::now());
    let report = work(context, &text, &Options::default(), |work| {
        store.check_writable()?;
        let (found, report) = burgeon_oci::find_or_build(&store, &source, work)?;
        name = found;
        Ok(report)
    })?;
    if let Some(report) = report.filter(|_| !context.json) {
        images::describe(&report, begun.elapsed().as_secs_f64());
    }
    Ok(name)
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
