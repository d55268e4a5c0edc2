//! `burgeon profile`: lists, shows and removes recorded profiles.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind};
use burgeon_daemon::{forget_profile, kept_profile, kept_profiles};
use burgeon_image::{Profile, list_profiles, load_profile, remove_profile};
use serde_json::json;

use super::{Context, named, record};
use crate::{
    args::ProfileCommand,
    output::{self, bytes, counted},
};

pub(super) fn profile(context: &Context, command: ProfileCommand) -> Result<ExitCode> {
    match command {
        ProfileCommand::List => list(context),
        ProfileCommand::Show { name } => show(context, &name),
        ProfileCommand::Rm { name } => remove(context, &name),
    }
}

fn list(context: &Context) -> Result<ExitCode> {
    let store = context.open_store()?;
    let images = named::Images::read(&store, &context.provenance())?;
    let mut rows = vec![["IMAGE", "FILES", "DATA", "RUNS", "WHERE"].map(String::from).to_vec()];
    let mut documents = Vec::new();
    let mut add = |place: &str, image: Digest, profile: Result<Option<Profile>>| {
        let known = images.get(&image).map(|image| image.titles().join(", "));
        let known = known.unwrap_or_else(|| image.to_string()[..16].to_owned());
        match profile {
            Ok(Some(profile)) => {
                let (files, runs) = (profile.files.len(), profile.runs);
                let cells = [files.to_string(), bytes(profile.bytes()), runs.to_string()];
                let cells = [known.clone()].into_iter().chain(cells).chain([place.to_owned()]);
                rows.push(cells.collect());
                documents.push(json!({
                    "image": known, "digest": image.to_string(), "files": files, "runs": runs,
                    "bytes": profile.bytes(), "where": place,
                }));
            }
            Ok(None) => {}
            Err(e) => {
                rows.push(vec![known.clone(), e.to_string()]);
                documents.push(json!({ "image": known, "where": place, "error": e.to_string() }));
            }
        }
    };
    for image in list_profiles(&store)? {
        add("store", image, load_profile(&store, &image).map_err(Into::into));
    }
    for image in kept_profiles(&context.state) {
        add("this host", image, kept_profile(&context.state, &image).map_err(Into::into));
    }
    if context.json {
        output::print_json(&json!({ "profiles": documents }))?;
    } else if documents.is_empty() {
        println!("no profiles; `burgeon record PATH -- COMMAND` makes one of a mounted image");
    } else {
        output::table(&rows);
    }
    Ok(ExitCode::SUCCESS)
}

fn show(context: &Context, name: &str) -> Result<ExitCode> {
    let profile = record::find(context, name)?;
    let path = |file: u32| &profile.files[file as usize];
    if context.json {
        let reads = profile.reads.iter().map(|read| {
            let path = String::from_utf8_lossy(path(read.file));
            json!({ "path": path, "offset": read.offset, "bytes": read.len, "age": read.age })
        });
        let reads: Vec<_> = reads.collect();
        output::print_json(&json!({
            "image": profile.image.to_string(), "runs": profile.runs, "reads": reads,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let runs = counted(profile.runs.into(), "run");
    println!("image {}, {runs}, {}", profile.image, bytes(profile.bytes()));
    let mut out = BufWriter::new(io::stdout().lock());
    output::note(profile.reads.iter().try_for_each(|read| {
        write!(out, "{:>12} {:>10}  ", read.offset, read.len)?;
        out.write_all(path(read.file))?;
        writeln!(out)
    }));
    output::note(out.flush());
    Ok(ExitCode::SUCCESS)
}

fn remove(context: &Context, name: &str) -> Result<ExitCode> {
    let store = context.open_store()?;
    let image = named::resolve(context, &store, name)?.digest()?;
    let kept = forget_profile(&context.state, &image)?;
    // A read-only store has no profile to remove, if this host has kept one.
    let stored = match store.check_writable() {
        Err(_) if kept => false,
        writable => writable.and_then(|()| remove_profile(&store, &image))?,
    };
    if !kept && !stored {
        let what = format!("the image {name:?} has no profile");
        return Err(Error::new(ErrorKind::NotFound, what).into());
    }
    record::note(context, &image, false)?;
    if context.json {
        output::print_json(&json!({ "image": name, "digest": image.to_string() }))?;
    } else {
        println!("removed the profile of {name}");
    }
    Ok(ExitCode::SUCCESS)
}
