//! `burgeon snapshotter status`: reads the records themselves, so it works while nothing runs.

use std::{path::Path, process::ExitCode};

use anyhow::Result;
use burgeon_snapshotter::model::Snapshot;
use serde_json::json;

use crate::output;

pub(super) fn status(root: &Path, json: bool) -> Result<ExitCode> {
    let mut loaded = burgeon_snapshotter::read(root)?;
    loaded.snapshots.sort_by_key(|snapshot| snapshot.id);
    let snapshots = &loaded.snapshots;
    if json {
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
                    "image": image(one),
                    "bytes": one.usage.map(|usage| usage.bytes),
                })
            })
            .collect();
        output::print_json(&json!({
            "root": root,
            "snapshots": shown,
            "damaged": loaded.damaged,
        }))?;
    } else {
        print(snapshots);
        loaded.damaged.iter().for_each(|problem| println!("damaged: {problem}"));
    }
    Ok(match loaded.damaged.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// `remote`: a layer that is mounted; `overlay`: a container above such layers; else `local`.
fn kind(one: &Snapshot, all: &[Snapshot]) -> &'static str {
    if one.remote.is_some() {
        return "remote";
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
    }
}
