//! `build` and `list`: need neither root nor a daemon.

use std::{fs::File, os::unix::fs::FileTypeExt, path::Path, process::ExitCode};

use anyhow::Result;
use burgeon_block::{ChecksumKind, Digest, Error, ErrorKind};
use burgeon_image::{
    builder::{self, BuildOptions, BuildReport, Pattern},
    catalog::{self, ImageRecord},
};
use burgeon_oci::Source;
use serde_json::json;

use super::{Context, built::describe, mistakes, named, push, reading, record, room};
use crate::{
    args::{self, Checksum, Computed},
    output::{self, bytes},
    progress::Progress,
};

pub(super) fn build(context: &Context, args: args::Build) -> Result<ExitCode> {
    if let Some(source) = &args.source {
        refuse_mistakes(source, &args.name)?;
    }
    // Refuse a bad name before building anything.
    let to = context.in_repository(&args.name)?;
    let profile = args.profile.as_deref().map(|name| record::find(context, name)).transpose()?;
    let options = BuildOptions {
        profile,
        level: args.level,
        checksum: match args.checksum {
            Checksum::Crc32c => ChecksumKind::Crc32c,
            Checksum::Xxhash64 => ChecksumKind::Xxhash64,
        },
        ..context.build_options()
    };
    let input = match (args.computed, args.source, args.by_reference) {
        (Some(pattern), _, _) => Input::Computed(pattern, args.size.unwrap_or(0)),
        (None, Some(path), true) => Input::Reference(path),
        (None, Some(path), false) if Source::parse(&path.to_string_lossy()).is_some() => {
            Input::Elsewhere(path.to_string_lossy().into_owned())
        }
        (None, Some(path), false) if path == Path::new("-") => Input::Stdin,
        (None, Some(path), false) if path.is_dir() => Input::Tree(path),
        (None, Some(path), false) => Input::Archive(path),
        (None, None, _) => anyhow::bail!(
            "nothing to build from: name a directory, an archive or \
            an OCI image"
        ),
    };
    if options.profile.is_some() && !matches!(input, Input::Tree(_)) {
        let what =
            "--profile orders the files of a directory: unpack the archive, and build from there";
        return Err(Error::new(ErrorKind::Invalid, what).into());
    }
    let provenance = context.provenance();
    // A build may replace its own earlier image of this name. It must not replace a pulled image
    // or one that another host put into the store.
    let built_it = |taken: &Digest| provenance.of(taken).built_as.contains(&args.name);
    let store = context.create_store()?;
    store.check_writable()?;
    let before = named::check_free(&store, &args.name, args.replace, built_it)?;
    let input = input.open()?;
    let (report, took) = make(context, &input, &args.name, &options)?;
    let seconds = took.as_secs_f64();
    if !context.json {
        let stored = burgeon_oci::stored_bytes(&context.open_store()?, &report.image)?;
        describe("built", &args.name, &report, stored, seconds);
        say_replaced(before.as_ref(), &report)?;
    }
    let pushed = to.as_ref().map(|to| push::send(context, &args.name, to)).transpose()?;
    if context.json {
        output::print_json(&json!({
            "image": report.image,
            "reference": pushed.map(|(pushed, _)| pushed.name.to_string()),
            "new_bytes": report.new_bytes,
            "reused_bytes": report.reused_bytes,
            "changed": report.changed,
            "mounts_left_out": report.mounts_left_out,
            "acls_left_out": report.acls_left_out,
            "seconds": seconds,
        }))?;
    } else if let (Some(to), Some((pushed, seconds))) = (to, pushed) {
        push::describe(&args.name, &to, &pushed, seconds);
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses a missing source, with a suggestion if the mistake can be guessed.
fn refuse_mistakes(source: &Path, name: &str) -> Result<()> {
    let text = source.to_string_lossy();
    if text == "-" || Source::parse(&text).is_some() || source.symlink_metadata().is_ok() {
        return Ok(());
    }
    let is_place = Source::parse(name).is_some() || Path::new(name).exists();
    if is_place && catalog::check_given_name(&text).is_ok() {
        return Err(mistakes::swapped("build", name, &text).into());
    }
    let Some(meant) = mistakes::meant(&text) else { return Ok(()) };
    let what = format!("there is nothing to build from at {text}: {meant}");
    Err(Error::new(ErrorKind::NotFound, what).into())
}

/// Reports the image that had the name before, if it was another one.
fn say_replaced(before: Option<&ImageRecord>, report: &BuildReport) -> Result<()> {
    let Some(before) = before else { return Ok(()) };
    let (before, after) = (before.digest()?, report.image.digest()?);
    if before != after {
        println!(
            "before, the name meant the image {}; the next `burgeon gc` removes it unless \
             something needs it",
            &before.to_string()[..named::DIGITS_SHOWN]
        );
    }
    Ok(())
}

/// The source of a build.
enum Input {
    Tree(std::path::PathBuf),
    Archive(std::path::PathBuf),
    /// An archive, open.
    Opened(std::path::PathBuf, File),
    Stdin,
    Reference(std::path::PathBuf),
    /// An OCI image or archive elsewhere.
    Elsewhere(String),
    Computed(Computed, u64),
}

impl Input {
    /// Opens an archive while this process still can.
    fn open(self) -> Result<Self> {
        let Self::Archive(path) = self else { return Ok(self) };
        refuse_special(&path)?;
        let file = File::open(&path)
            .map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
        Ok(Self::Opened(path, file))
    }
}

/// Refuses files whose opening or reading may wait for ever, or never ends. A pipe of a shell
/// (`<(…)`, `/dev/stdin`) has no path of its own and has a writer.
fn refuse_special(path: &Path) -> Result<()> {
    let Ok(kind) = path.metadata().map(|metadata| metadata.file_type()) else { return Ok(()) };
    let shown = path.display();
    let (what, instead) = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_fifo() => match path.canonicalize() {
            Ok(_) => {
                ("a FIFO", format!("to read an archive from it: burgeon build - NAME < {shown}"))
            }
            Err(_) => return Ok(()),
        },
        kind if kind.is_block_device() => (
            "a block device",
            format!(
                "for an image of its bytes: --by-reference; to read an archive from it: burgeon build - \
                 NAME < {shown}"
            ),
        ),
        kind if kind.is_char_device() => (
            "a character device",
            format!("to read an archive from it: burgeon build - NAME < {shown}"),
        ),
        _ => ("a socket", "name a directory or an archive".to_owned()),
    };
    let message = format!("cannot build from {shown}: it is {what}; {instead}");
    Err(Error::new(ErrorKind::Invalid, message).into())
}

/// Builds an image of the directory `tree` with the default options, and reports it.
pub(crate) fn build_tree(context: &Context, tree: &Path, name: &str) -> Result<()> {
    let input = Input::Tree(tree.to_owned());
    let (report, took) = make(context, &input, name, &context.build_options())?;
    let stored = burgeon_oci::stored_bytes(&context.open_store()?, &report.image)?;
    describe("built", name, &report, stored, took.as_secs_f64());
    Ok(())
}

/// Like [`build_tree`], without output.
pub(crate) fn build_quietly(context: &Context, tree: &Path, name: &str) -> Result<()> {
    let (report, _) = make(context, &Input::Tree(tree.to_owned()), name, &context.build_options())?;
    if catalog::is_reserved(name) {
        context.provenance().vouch(&report.image)?;
    }
    Ok(())
}

fn make(
    context: &Context,
    input: &Input,
    name: &str,
    options: &BuildOptions,
) -> Result<(BuildReport, std::time::Duration)> {
    let store = context.create_store()?;
    store.check_writable()?;
    if let Some(folder) = context.store_location().folder() {
        match input {
            Input::Tree(path) => room::make_for_tree(context, folder, path),
            Input::Opened(_, file) => room::make_for_file(context, folder, file),
            // The sizes of others are not known yet, or they store no data.
            _ => {}
        }
    }
    let progress = Progress::new(format!("building {name}"));
    let show = |now: &builder::Progress| progress.update(now.bytes, now.bytes_total);
    let report = match input {
        Input::Tree(path) => builder::from_directory(&store, name, path, options, &show),
        Input::Archive(path) => Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "cannot build from the archive {}: this process may no longer open it; give the \
                 archive on the standard input, burgeon build - NAME",
                path.display()
            ),
        )),
        Input::Opened(path, file) => {
            let len = file.metadata().map(|metadata| metadata.len()).ok();
            progress.finish();
            let archive = (file, Some(path.as_path()), len);
            return Ok(reading::build_archive(context, archive, name, options)?);
        }
        Input::Stdin => {
            progress.finish();
            let archive = (std::io::stdin(), None, None);
            return Ok(reading::build_archive(context, archive, name, options)?);
        }
        Input::Elsewhere(text) => {
            progress.finish();
            return Ok(reading::build(context, text, name, options)?);
        }
        Input::Reference(path) => builder::by_reference(&store, name, path, options, &show),
        Input::Computed(pattern, size) => {
            let pattern = match pattern {
                Computed::Zeros => Pattern::Byte(0),
                Computed::Byte => Pattern::Byte(0x5a),
                Computed::BlockNumber => Pattern::BlockNumber,
            };
            builder::computed(&store, name, pattern, *size, options, &show)
        }
    };
    let took = progress.finish();
    let report = report?;
    if let Some(honours) = report.honours {
        let (location, digest) = (context.store_location(), report.image.digest()?);
        let kept = burgeon_daemon::remember_built(&context.state, &location, &digest, honours);
        if let Err(e) = kept {
            // The image exists all the same.
            eprintln!("note: mounts of {name} will be nosuid,nodev: {e}");
        }
    }
    Ok((report, took))
}

pub(super) fn list(context: &Context) -> Result<ExitCode> {
    let store = context.open_store()?;
    let all = catalog::list(&store)?;
    let good = all.iter().filter_map(|(_, record)| record.as_ref().ok().cloned());
    let images = named::Images::of(good, &context.provenance());
    let mut rows = Vec::new();
    for (digest, image) in images.iter() {
        let Some(record) = image.records.first() else { continue };
        let stored = burgeon_oci::stored_bytes(&store, record)?;
        for title in image.titles() {
            let (files, data) = (record.inodes.to_string(), bytes(record.file_bytes));
            let digest = digest.to_string()[..named::DIGITS_SHOWN].to_owned();
            rows.push(vec![title, files, data, bytes(stored), digest]);
        }
    }
    let mut documents = Vec::new();
    for (name, record) in &all {
        match record {
            Ok(record) => {
                let image = images.get(&record.digest()?);
                let mut document = serde_json::to_value(record)?;
                document["references"] = json!(image.map(|image| &image.references));
                document["on_disk_bytes"] = burgeon_oci::stored_bytes(&store, record)?.into();
                documents.push(document);
            }
            Err(e) => {
                rows.push(vec![name.clone(), e.to_string()]);
                documents.push(json!({ "name": name, "error": e.to_string() }));
            }
        }
    }
    rows.sort();
    rows.insert(0, ["NAME", "FILES", "DATA", "STORED", "DIGEST"].map(String::from).to_vec());
    if context.json {
        output::print_json(&json!({ "images": documents }))?;
    } else if all.is_empty() {
        println!("no images in {}; `burgeon build DIR NAME` makes one", context.store_location());
    } else {
        output::table(&rows);
    }
    let damaged = all.iter().any(|(_, record)| record.is_err());
    Ok(if damaged { ExitCode::from(4) } else { ExitCode::SUCCESS })
}
