//! `push` and `pull`: images between the store, registries and this host.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_image::catalog;
use burgeon_oci::{Pushed, Want};
use burgeon_source::{Access, Store, registry::Name};
use serde_json::json;

use super::{Context, ordinary};
use crate::{
    args,
    output::{self, bytes},
    progress::Progress,
};

pub(super) fn push(context: &Context, args: &args::Push) -> Result<ExitCode> {
    let args::Push { name, to } = args;
    let to = Name::parse(to).unwrap_or_else(|| {
        let what = format!("{to} is no place for an image: oci://REGISTRY/REPOSITORY:TAG");
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

/// Pushes the image `name` of the store; says how many seconds that took.
pub(super) fn send(context: &Context, name: &str, to: &Name) -> Result<(Pushed, f64)> {
    let store = context.open_store()?;
    let access = Access::from_env().for_registry(to)?;
    let progress = Progress::new(format!("pushing {name}"));
    let show = |done, total| progress.update(done, Some(total));
    let pushed = burgeon_oci::push(&store, name, to, &access, &show);
    let seconds = progress.finish().as_secs_f64();
    Ok((pushed?, seconds))
}

pub(super) fn describe(name: &str, to: &Name, pushed: &Pushed, seconds: f64) {
    let (new, there) = (bytes(pushed.new_bytes), bytes(pushed.there_bytes));
    println!("pushed {name} to {to} in {seconds:.1} s: {new} sent, {there} were there already");
    println!("it is {}", pushed.name);
}

pub(super) fn pull(context: &Context, args: args::Pull) -> Result<ExitCode> {
    let want = if args.eager { Want::Whole } else { Want::Any };
    let place = ordinary::find(context, args.source, want)?;
    let own = context.state.store().into();
    if place.store == own && burgeon_oci::is_whole(&context.open_store()?, &place.name)? {
        // An ordinary image is whole once it is found, unless it is by an index or by tables of
        // contents; it gets its name here.
        return whole(context, &place, args.name);
    }
    if !args.eager {
        burgeon_daemon::make_ready(&context.state, &place.store, &place.access, &place.name)?;
        if context.json {
            output::print_json(&json!({ "image": place.name, "store": place.store }))?;
        } else {
            println!("{} is ready to mount; its data comes when it is read", place.name);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let from = Store::open(&place.store, &place.access)?;
    let to = Store::create(&own, &Access::default())?;
    let record = catalog::resolve(&from, &place.name)?;
    let name = args.name.unwrap_or(place.name);
    let progress = Progress::new(format!("pulling {name}"));
    let show = |done, total| progress.update(done, Some(total));
    let copied = catalog::copy(&from, &to, &record, &name, &show);
    let seconds = progress.finish().as_secs_f64();
    let copied = copied?;
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

/// Says that an image is in this host's own store, where it gets the name `name`, too.
fn whole(context: &Context, place: &ordinary::Place, name: Option<String>) -> Result<ExitCode> {
    let store = context.open_store()?;
    let record = catalog::resolve(&store, &place.name)?;
    if let Some(name) = &name {
        catalog::publish_alias(&store, &record, name)?;
    }
    let name = name.unwrap_or_else(|| place.name.clone());
    if context.json {
        let digest = record.digest()?.to_string();
        output::print_json(&json!({ "image": name, "digest": digest, "complete": true }))?;
    } else {
        println!("{name} is complete: `burgeon mount {name}` needs nothing but this host");
    }
    Ok(ExitCode::SUCCESS)
}
