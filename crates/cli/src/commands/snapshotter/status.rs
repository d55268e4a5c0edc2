//! `burgeon snapshotter status`: reads the records themselves, so it works while nothing runs.

use std::{path::Path, process::ExitCode, time::SystemTime};

use anyhow::Result;
use burgeon_snapshotter::{
    ImageIndex, IndexState,
    model::{Snapshot, Snapshots},
};
use serde_json::json;

use super::{super::Context, layers};
use crate::output;

/// A chain above which nothing more is made.
struct Refused {
    id: u64,
    why: String,
    /// The containers and views above it, as containerd's keys: NAMESPACE/NUMBER/CONTAINER.
    above: Vec<String>,
}

pub(super) fn status(context: &Context, root: &Path) -> Result<ExitCode> {
    let mut loaded = burgeon_snapshotter::read(root)?;
    loaded.snapshots.sort_by_key(|snapshot| snapshot.id);
    loaded.indexes.sort_by(|a, b| (&a.image, &a.manifest).cmp(&(&b.image, &b.manifest)));
    let snapshots = &loaded.snapshots;
    let refused = refused(context, snapshots, loaded.last_id());
    let of = |one: &Snapshot| refused.iter().find(|refused| refused.id == one.id);
    if context.json {
        let shown: Vec<_> = snapshots
            .iter()
            .map(|one| {
                json!({
                    "id": one.id,
                    "name": one.name,
                    "parent": one.parent,
                    "state": one.kind.name(),
                    "kind": kind(one, snapshots),
                    "sources": one.remote.as_ref().map(|remote| &remote.sources),
                    "why_local": one.why_local,
                    "why_overlay": one.why_overlay,
                    "refused": of(one).map(|refused| &refused.why),
                    "above": of(one).map(|refused| &refused.above),
                    "image": image(one),
                    "bytes": one.usage.map(|usage| usage.bytes),
                })
            })
            .collect();
        output::print_json(&json!({
            "root": root,
            "snapshots": shown,
            "indexes": loaded.indexes.iter().map(index_json).collect::<Vec<_>>(),
            "damaged": loaded.damaged,
        }))?;
    } else {
        print(snapshots);
        for Refused { id, why, above } in &refused {
            let above = if above.is_empty() { "nothing".to_owned() } else { above.join(", ") };
            println!("{id}: refused: {why}; above it: {above}");
        }
        loaded.indexes.iter().for_each(print_index);
        loaded.damaged.iter().for_each(|problem| println!("damaged: {problem}"));
    }
    Ok(match loaded.damaged.is_empty() && refused.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// The state of an index: a word, its size, and the reason.
fn index_state(index: &ImageIndex) -> (&'static str, Option<u64>, Option<&str>) {
    match &index.state {
        IndexState::Begun => ("begun", None, None),
        IndexState::Made { bytes } => ("made", Some(*bytes), None),
        IndexState::Failed(why) => ("failed", None, Some(why)),
        IndexState::LeftOut(why) => ("left-out", None, Some(why)),
    }
}

fn index_json(index: &ImageIndex) -> serde_json::Value {
    let (state, bytes, why) = index_state(index);
    json!({
        "image": index.image, "manifest": index.manifest, "state": state, "bytes": bytes,
        "why": why, "tries": index.tries, "used": index.unused_since.is_none(),
        "next_try": index.next_try().map(seconds),
    })
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn print_index(index: &ImageIndex) {
    let image = &index.image;
    let unused = if index.unused_since.is_some() { ", of an image that is gone" } else { "" };
    match index_state(index) {
        (state, Some(bytes), _) => {
            println!("index of {image}: {state}, {}{unused}", output::bytes(bytes));
        }
        (state @ "failed", None, Some(why)) => {
            let next = match index.next_try().map(|at| at.duration_since(SystemTime::now())) {
                Some(Ok(left)) => format!("tried again in {} min", left.as_secs().div_ceil(60)),
                Some(Err(_)) => "tried again within 10 min".to_owned(),
                None => format!("given up after {} tries", index.tries),
            };
            println!("index of {image}: {state}: {why}; {next}");
        }
        (state, None, Some(why)) => println!("index of {image}: {state}: {why}"),
        (state, None, None) => println!(
            "index of {image}: {state}, attempt {}; after a restart it goes on within 10 minutes",
            index.tries
        ),
    }
}

/// The remote chains of which a layer is not what its image states.
fn refused(context: &Context, snapshots: &[Snapshot], last_id: u64) -> Vec<Refused> {
    let all = Snapshots::new(snapshots.iter().cloned(), last_id);
    let refused = snapshots.iter().filter_map(|one| {
        let sources = &one.remote.as_ref()?.sources;
        let why = sources.iter().find_map(|source| layers::refused(context, source))?;
        Some(Refused { id: one.id, why, above: all.above_chain(one.id) })
    });
    refused.collect()
}

/// `remote`: a layer that is mounted; `native`: a container with a mount of its own; `overlay`: a
/// container above such layers; else `local`.
fn kind(one: &Snapshot, all: &[Snapshot]) -> &'static str {
    if one.remote.is_some() {
        return "remote";
    }
    if one.native.is_some() {
        return "native";
    }
    let mut at = one;
    // Damaged records may name one another.
    for _ in 0..all.len() {
        let Some(parent) = at.parent.as_ref() else { break };
        let Some(parent) = all.iter().find(|snapshot| snapshot.name == *parent) else { break };
        if parent.remote.is_some() {
            return "overlay";
        }
        at = parent;
    }
    "local"
}

/// The image as it was typed, which containerd says of layers if it is configured to.
fn image(snapshot: &Snapshot) -> Option<&String> {
    snapshot.labels.get("containerd.io/snapshot/cri.image-ref")
}

fn print(snapshots: &[Snapshot]) {
    let mut rows =
        vec![["ID", "STATE", "KIND", "SIZE", "NAME", "IMAGE"].map(str::to_owned).to_vec()];
    rows.extend(snapshots.iter().map(|one| {
        let size = one.usage.map_or_else(|| "-".to_owned(), |usage| output::bytes(usage.bytes));
        let image = image(one).map_or("-", String::as_str);
        vec![
            one.id.to_string(),
            one.kind.name().to_owned(),
            kind(one, snapshots).to_owned(),
            size,
            one.name.clone(),
            image.to_owned(),
        ]
    }));
    output::table(&rows);
    for one in snapshots {
        if let Some(why) = &one.why_local {
            println!("{}: not lazy: {why}", one.id);
        }
        if let Some(why) = &one.why_overlay {
            println!("{}: not native: {why}", one.id);
        }
    }
}
