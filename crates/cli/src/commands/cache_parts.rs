//! Images and stores in the host's cache: the parts that a user names, and their figures.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind};
use burgeon_daemon::{
    Client,
    protocol::{CacheAnswer, CachePart, PartLimit, PartOfCache, Reply, Request},
};
use burgeon_source::{Form, Location, registry::Name};

use super::{
    Context,
    named::{self, DIGITS_SHOWN, Images},
};
use crate::{
    output::{self, bytes},
    quantities::parse_size,
};

/// A limit as it is typed: `STORE=SIZE`, `IMAGE=SIZE`, or `none` for the size.
#[derive(Clone, Debug)]
pub(crate) struct TypedLimit {
    part: String,
    bytes: Option<u64>,
}

/// Parses a limit of an image or a store.
pub(crate) fn parse_limit(text: &str) -> Result<TypedLimit, String> {
    // A name may have an equals sign, a size has none.
    let Some((part, size)) = text.rsplit_once('=').filter(|(part, _)| !part.is_empty()) else {
        return Err("write IMAGE=SIZE or STORE=SIZE, such as debian:12=10G".to_owned());
    };
    let bytes = match size {
        "none" => None,
        size => Some(parse_size(size)?),
    };
    Ok(TypedLimit { part: part.to_owned(), bytes })
}

/// The part of the cache that the user means.
pub(super) fn resolve(context: &Context, typed: &TypedLimit) -> Result<PartLimit> {
    let part = match store(context, &typed.part)? {
        Some(store) => CachePart::Store(store),
        None => {
            let store = context.open_store()?;
            CachePart::Image(named::resolve(context, &store, &typed.part)?.digest()?.into())
        }
    };
    Ok(PartLimit { part, bytes: typed.bytes })
}

/// The store that is meant, if it is one: a path, a URL, or a name from the configuration.
fn store(context: &Context, text: &str) -> Result<Option<Location>> {
    if let Some(named) = context.config.stores.named.get(text) {
        return Ok(Some(Location::parse(&named.value)?));
    }
    // With a digest, the name of a repository is that of an image's store; without, of an image.
    let is_pinned = |name: burgeon_block::Result<Name>| name.is_ok_and(|it| it.digest().is_some());
    let is_store = match Name::parse(text) {
        Some(name) => is_pinned(name),
        None => Path::new(text).is_absolute() || Form::of(text).is_url(),
    };
    Ok(is_store.then(|| Location::parse(text)).transpose()?)
}

/// Fails if the daemon or its server is of a version without these limits.
pub(super) fn check(changed: &[PartLimit], answer: &CacheAnswer) -> Result<()> {
    let is_kept = |changed: &PartLimit| {
        let limit = answer.parts.iter().find(|it| it.part == changed.part).and_then(|it| it.limit);
        answer.unclaimed.is_some() && limit == changed.bytes
    };
    if changed.iter().all(is_kept) {
        return Ok(());
    }
    let what = "the running daemon is of an earlier version, which has no limits of images and \
                stores: run `burgeon upgrade`, and the same again";
    Err(Error::new(ErrorKind::Unavailable, what).into())
}

/// An image of this host, beside what the server knows of it.
#[derive(Default)]
pub(super) struct Known {
    name: String,
    /// Bytes of the stored layers that it is read from.
    layers: u64,
}

/// The images of mounts, by the names as they were typed, and those of the state directory's own
/// store, which has the stored layers of both.
pub(super) fn known(context: &Context, client: &Client) -> HashMap<Digest, Known> {
    let mut known = HashMap::<_, Known>::new();
    let mut add = |digest, name| known.entry(digest).or_default().name = name;
    // A name is worth no failure.
    let own = if context.store.is_none() { context.open_store().ok() } else { None };
    if let Some(store) = &own
        && let Ok(images) = Images::read(store, &context.provenance())
    {
        images.iter().for_each(|(digest, image)| add(*digest, image.title()));
    }
    if let Ok((Reply::Status(status), _)) = client.call(&Request::Status) {
        status.mounts.into_iter().for_each(|mount| add(mount.digest.0, mount.image));
    }
    if let Some(store) = &own {
        for (digest, image) in &mut known {
            image.layers = burgeon_oci::layer_bytes(store, digest).unwrap_or_default();
        }
    }
    known
}

/// Adds the images of which nothing but layers is here.
pub(super) fn add_layers(answer: &mut CacheAnswer, known: &HashMap<Digest, Known>) {
    let mut layered: HashSet<_> =
        known.iter().filter(|(_, image)| image.layers > 0).map(|(digest, _)| *digest).collect();
    for part in &answer.parts {
        if let CachePart::Image(digest) = &part.part {
            layered.remove(&digest.0);
        }
    }
    let mut layered: Vec<_> = layered.into_iter().collect();
    layered.sort_by_key(|digest| std::cmp::Reverse(known[digest].layers));
    let part = |digest: Digest| CachePart::Image(digest.into());
    let parts = layered.into_iter().map(part);
    answer.parts.extend(parts.map(|part| PartOfCache { part, bytes: 0, limit: None }));
}

/// The answer as JSON, with the names of images and the bytes of their layers.
pub(super) fn to_json(
    answer: &CacheAnswer,
    known: &HashMap<Digest, Known>,
) -> Result<serde_json::Value> {
    let mut json = serde_json::to_value(answer)?;
    // The daemon leaves an empty list out.
    if json.get("parts").is_none() {
        json["parts"] = serde_json::Value::Array(Vec::new());
    }
    let parts = json["parts"].as_array_mut().into_iter().flatten();
    for (part, shown) in answer.parts.iter().zip(parts) {
        if let CachePart::Image(digest) = &part.part
            && let Some(image) = known.get(&digest.0)
        {
            shown["name"] = image.name.as_str().into();
            shown["layers"] = image.layers.into();
        }
    }
    Ok(json)
}

/// Prints the bytes of images and stores, and their limits.
pub(super) fn show(answer: &CacheAnswer, known: &HashMap<Digest, Known>) {
    let limit = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), bytes);
    let (mut images, mut stores) = (Vec::new(), Vec::new());
    for it in &answer.parts {
        let (taken, limit) = (bytes(it.bytes), limit(it.limit));
        match &it.part {
            CachePart::Store(store) => stores.push(vec![store.to_string(), taken, limit]),
            CachePart::Image(digest) => {
                let image = known.get(&digest.0);
                let name = match image {
                    Some(image) => named::public(&image.name).to_owned(),
                    None => digest.0.to_string().chars().take(DIGITS_SHOWN).collect(),
                };
                let layers = bytes(image.map_or(0, |image| image.layers));
                images.push(vec![name, taken, layers, limit]);
            }
        }
    }
    let headings: [&[_]; 2] =
        [&["IMAGE", "BYTES", "LAYERS", "LIMIT"], &["STORE", "BYTES", "LIMIT"]];
    for (heading, mut rows) in headings.into_iter().zip([images, stores]) {
        if !rows.is_empty() {
            println!();
            rows.insert(0, heading.iter().map(|it| (*it).to_owned()).collect());
            output::table(&rows);
        }
    }
    if let Some(bytes_left) = answer.unclaimed.filter(|bytes| *bytes > 0) {
        println!();
        println!(
            "{} were read before this server, by images that are not mounted",
            bytes(bytes_left)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::parse_limit;

    #[test]
    fn a_limit_has_a_part_and_a_size() {
        for (text, part, bytes) in [
            ("debian:12=10G", "debian:12", Some(10 << 30)),
            ("s3://bucket/a=b=4096", "s3://bucket/a=b", Some(4096)),
            ("/srv/store=none", "/srv/store", None),
            ("a=0", "a", Some(0)),
        ] {
            let limit = parse_limit(text).unwrap();
            assert_eq!((limit.part.as_str(), limit.bytes), (part, bytes), "{text}");
        }
        for bad in ["10G", "=10G", "a=", "a=ten", "a=10%"] {
            assert!(parse_limit(bad).is_err(), "{bad}");
        }
    }
}
