//! `burgeon snapshotter verify`: reads the layers of remote chains to their end, and compares them
//! with what their images state, and with the tables of contents by which they are mounted.
//!
//! The snapshotter finds the result in the records of unpacked layers, whether or not it runs.

use std::{collections::BTreeMap, path::Path, process::ExitCode};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_oci::{DiffIdCheck, OciImage, Source};
use serde_json::json;

use super::{
    super::{Context, reading},
    chain_source::ChainSource,
};
use crate::output;

pub(super) fn verify(context: &Context, root: &Path) -> Result<ExitCode> {
    let loaded = burgeon_snapshotter::read(root)?;
    let sources = loaded.snapshots.iter().filter_map(|one| one.remote.as_ref());
    // True if any chain of the image is mounted by tables of contents.
    let mut images = BTreeMap::new();
    for source in sources.flat_map(|remote| &remote.sources) {
        let source = ChainSource::parse(source);
        *images.entry(source.image).or_insert(false) |= !source.is_verified;
    }
    let mut shown = Vec::new();
    for (text, by_tocs) in images {
        let (result, why) = match verify_one(context, text, by_tocs) {
            Ok(DiffIdCheck::Verified) => ("verified", None),
            Ok(DiffIdCheck::Differs(why)) => ("differs", Some(why)),
            Ok(DiffIdCheck::Unread(layer)) => ("unread", Some(format!("{layer} has no diff ID"))),
            Err(error) => ("unread", Some(error.to_string())),
        };
        if !context.json {
            match &why {
                Some(why) => println!("{text}: {result}: {why}"),
                None => println!("{text}: {result}"),
            }
        }
        shown.push(json!({ "image": text, "result": result, "why": why }));
    }
    let all_verified = shown.iter().all(|one| one["result"] == "verified");
    if context.json {
        output::print_json(&json!({ "images": shown }))?;
    }
    Ok(if all_verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads the layers of an image, unless all of them were read before, and none is to be compared
/// with its table of contents.
fn verify_one(context: &Context, text: &str, by_tocs: bool) -> burgeon_block::Result<DiffIdCheck> {
    let invalid =
        || Error::new(ErrorKind::Invalid, format!("{text} is not an image by its digest"));
    let source = Source::parse(text).ok_or_else(invalid)??;
    let digest = source.pinned().ok_or_else(invalid)?;
    if context.documents().image(digest).is_none() {
        reading::documents(context, text, &source)?;
    }
    let lost = || Error::new(ErrorKind::LocalIo, format!("the documents of {text} are lost"));
    let image = context.documents().image(digest).ok_or_else(lost)?;
    let judge = |image: &OciImage| context.unpackings().judge(image, image.layers.len());
    match judge(&image) {
        DiffIdCheck::Unread(_) => {}
        DiffIdCheck::Verified if by_tocs && image.layers.iter().any(|layer| layer.has_toc) => {}
        known => return Ok(known),
    }
    match reading::unpack(context, text, &source) {
        Err(error) if error.kind() != ErrorKind::Corrupt => Err(error),
        // The record tells which layer differs; other damage is the error.
        read => match (judge(&image), read) {
            (DiffIdCheck::Unread(_) | DiffIdCheck::Verified, Err(error)) => Err(error),
            (verdict, _) => Ok(verdict),
        },
    }
}
