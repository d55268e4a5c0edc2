//! `verify`, `rm`, `gc`: maintenance of a store.

use std::{collections::HashSet, process::ExitCode};

use anyhow::Result;
use burgeon_block::{ByteRange, Digest, ObjectId, ObjectKind, ObjectStore};
use burgeon_daemon::{roots, sweep};
use burgeon_image::catalog::{self, Damage, ReservedName};
use burgeon_oci::{Pull, Tags};
use burgeon_source::{Access, Objects, References, Store};
use serde_json::json;

use super::{Context, named};
use crate::{
    output::{self, bytes, counted},
    progress::Progress,
};

/// Most files listed for a damaged object; there may be a million.
const FILES_MAX: usize = 100;

pub(super) fn verify(context: &Context, name: &str) -> Result<ExitCode> {
    let store = context.open_store()?;
    let digest = named::resolve(context, &store, name)?.digest()?;
    let progress = Progress::new(format!("verifying {name}"));
    // Writers of a remote store must not choose which files of this machine are read.
    let references = match &store {
        Store::Directory(_) => References::Allow,
        Store::Remote(_) | Store::Artifact(_) => References::Refuse,
    };
    let objects = Objects::new(store.clone(), references).with_access(&Access::from_env());
    let read = |object: &ObjectId, range: ByteRange| objects.read_blocking(object, range);
    let show = |done, total| progress.update(done, Some(total));
    let verified = catalog::verify(&store, &digest, &read, &show);
    progress.finish();
    let verified = verified?;
    let damaged = !verified.damage.is_empty();
    // Decides whether later builds reuse its chunks. No state directory is created for this.
    if context.state.root().exists() {
        let recorded = context.provenance().update(&digest, |known| {
            known.verified = !damaged;
            known.made_here &= !damaged;
        });
        if let Err(error) = recorded {
            eprintln!("note: the result is not recorded, so builds do not know it: {error}");
        }
    }
    if context.json {
        let damage: Vec<_> = verified.damage.iter().map(damage_json).collect();
        output::print_json(&json!({
            "image": name, "digest": digest.to_string(), "chunks": verified.chunks,
            "bytes": verified.bytes, "damage": damage,
        }))?;
    } else {
        verified.damage.iter().for_each(show_damage);
        let verdict = if damaged { "DAMAGED" } else { "whole" };
        let chunks = counted(verified.chunks, "chunk");
        println!("{name} is {verdict}: {chunks}, {}", bytes(verified.bytes));
        if damaged {
            let of_layers = |damage: &Damage| damage.object.is(ObjectKind::Derived);
            if verified.damage.iter().all(of_layers) {
                println!(
                    "its data is in the layers of an OCI image: `burgeon rm {name}`, `burgeon \
                     gc`, and mount that again, by its oci://… or oci-layout:… name"
                );
            } else {
                // While the damaged objects exist, a build takes their chunks for stored.
                println!(
                    "restore the damaged objects in {}, or remove them there and build the image \
                     again",
                    context.store_location()
                );
            }
        }
    }
    Ok(if damaged { ExitCode::from(4) } else { ExitCode::SUCCESS })
}

fn damage_json(damage: &Damage) -> serde_json::Value {
    let files: Vec<_> = damage.files.iter().map(|file| file.escape_ascii().to_string()).collect();
    json!({
        "object": damage.object.as_str(), "what": damage.what, "chunks": damage.chunks,
        "files": files,
    })
}

fn show_damage(damage: &Damage) {
    let chunks = counted(damage.chunks, "unreadable chunk");
    println!("{}: {}; {chunks}", damage.object, damage.what);
    for file in damage.files.iter().take(FILES_MAX) {
        println!("  damaged: {}", file.escape_ascii());
    }
    if damage.files.len() > FILES_MAX {
        println!("  and {} more files (--json lists all)", damage.files.len() - FILES_MAX);
    }
}

pub(super) fn remove(context: &Context, typed: &str) -> Result<ExitCode> {
    let store = context.open_store()?;
    store.check_writable()?;
    let host = roots::known_host(&context.state)?.unwrap_or_default();
    let removal = named::to_remove(context, &store, typed)?;
    let mut removed = None;
    for name in &removal.names {
        removed = removed.or(catalog::remove(&store, name, &host)?);
    }
    let provenance = context.provenance();
    for (image, reference) in &removal.references {
        provenance.update(image, |known| {
            known.references.remove(reference);
        })?;
    }
    if context.json {
        output::print_json(&json!({
            "name": typed, "names": removal.names, "removed": removed,
        }))?;
    } else {
        println!("removed {typed}; `burgeon gc` frees the data that nothing else needs");
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn collect(context: &Context, dry_run: bool) -> Result<ExitCode> {
    let location = context.store_location();
    let store = context.open_store()?;
    let needed = roots::refresh(&context.state, &location, &store)?;
    let collected = catalog::gc(&store, &needed, dry_run)?;
    if !dry_run && collected.builds == 0 {
        let has = |image: &Digest| Ok(store.len(&catalog::manifest_object(image)?)?.is_some());
        context.provenance().prune(has)?;
    }
    let mut keep: Vec<Digest> = needed;
    for (_, record) in catalog::list(&store)? {
        keep.push(record?.digest()?);
    }
    let (prepared, prepared_bytes) = sweep(&context.state, &location, &keep, dry_run)?;
    if !dry_run {
        prune_tags(context)?;
    }
    if context.json {
        output::print_json(&json!({
            "dry_run": dry_run, "manifests": collected.manifests, "packs": collected.packs,
            "bytes": collected.bytes, "stale_bytes": collected.stale_bytes,
            "builds_at_work": collected.builds, "missing": collected.missing,
            "prepared_images": prepared, "prepared_bytes": prepared_bytes,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let verb = if dry_run { "would remove" } else { "removed" };
    println!(
        "{verb} {} and {} ({}), {} of killed builds, {} ({})",
        counted(collected.manifests, "manifest"),
        counted(collected.packs, "pack"),
        bytes(collected.bytes),
        bytes(collected.stale_bytes),
        counted(prepared, "prepared image"),
        bytes(prepared_bytes)
    );
    if collected.builds > 0 {
        println!(
            "{} in progress, so data was left: run `burgeon gc` again afterwards",
            counted(collected.builds as u64, "build")
        );
    }
    for who in &collected.missing {
        println!("warning: the manifest of {who} is missing; `burgeon verify` says more");
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes records of tags, and of names in stores, and kept documents, whose images are gone.
fn prune_tags(context: &Context) -> Result<()> {
    let known = context.provenance().all()?;
    let names = known.iter().flat_map(|(_, known)| &known.stands_for);
    // An image has several reserved names, such as `sha256:…/index`.
    let digest = |name| ReservedName::oci(name).map_or(name, |name| name.digest);
    let here: HashSet<&str> = names.map(|name| digest(name)).collect();
    let (folder, pull) = (context.state.tags(), Pull::default());
    let is_prepared = |manifest: Digest| context.state.image(&manifest).is_dir();
    let is_here = |known: &str| here.contains(known) || known.parse().is_ok_and(is_prepared);
    Tags { folder: &folder, pull }.prune(is_here)?;
    Ok(context.documents().prune(here.iter().copied())?)
}
