//! The kept facts about the OCI image that a command names: layers, chain IDs, and configuration.

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_image::catalog::{ImageRecord, NamedPart, OciName, ReservedName};
use burgeon_oci::{ImageSettings, OciImage, Pull, Source, Tags};
use serde_json::{Value, json};

use super::{Context, reading};

/// The OCI images that `record`, an image of the store, was made from: the one that `typed` means
/// if it is a reference, else all that this host vouches for.
pub(super) fn known(context: &Context, typed: &str, record: &ImageRecord) -> Result<Vec<OciImage>> {
    let (documents, folder) = (context.documents(), context.state.tags());
    let tags = Tags { folder: &folder, pull: Pull::default() };
    if let Some(Ok(source)) = Source::parse(typed)
        && let Some(image) = tags.digest_of(&source).and_then(|digest| documents.image(&digest))
    {
        return Ok(vec![image]);
    }
    let names = context.provenance().of(&record.digest()?).stands_for;
    let digests = names.iter().filter_map(|name| ReservedName::oci(name)?.digest.parse().ok());
    let mut images: Vec<OciImage> = digests.filter_map(|digest| documents.image(&digest)).collect();
    images.sort_by(|a, b| a.digest.cmp(&b.digest));
    images.dedup_by(|a, b| a.digest == b.digest);
    Ok(images)
}

/// The settings of the OCI image `text`, a reference. Its documents are read from its location if
/// they are not kept, and `pull` allows it.
pub(super) fn settings(context: &Context, text: &str, pull: Pull) -> Result<ImageSettings> {
    let what = || Error::new(ErrorKind::Invalid, format!("{text} is not an OCI image"));
    let source = Source::parse(text).unwrap_or_else(|| Err(what()))?;
    let (documents, folder) = (context.documents(), context.state.tags());
    let known = Tags { folder: &folder, pull }.digest_of(&source);
    if let Some(image) = known.and_then(|digest| documents.image(&digest)) {
        return Ok(image.settings()?);
    }
    if pull == Pull::Never {
        return Err(burgeon_oci::never(&format!("the configuration of {text}")).into());
    }
    let digest = reading::documents(context, text, &source)?;
    let image = documents.image(&digest).ok_or_else(|| {
        let what = format!("the configuration of {text} was not kept: try again");
        Error::new(ErrorKind::LocalIo, what)
    })?;
    Ok(image.settings()?)
}

/// The facts for programs. `record` tells which part of the image it is.
pub(super) fn to_json(images: &[OciImage], record: &ImageRecord) -> Value {
    let all = images.iter().map(|image| {
        let count = count(image, record);
        let mut document = json!(image);
        document["layers_used"] = json!(count);
        document["chain_id"] = json!(chain_id(image, count));
        document
    });
    all.collect()
}

/// Number of layers of `image` that make up `record`.
fn count(image: &OciImage, record: &ImageRecord) -> usize {
    match ReservedName::oci(&record.name) {
        Some(OciName { digest, part: NamedPart::Layers(count), .. }) if digest == image.digest => {
            count
        }
        _ => image.layers.len(),
    }
}

fn chain_id(image: &OciImage, count: usize) -> Option<&str> {
    image.layers.get(count.checked_sub(1)?)?.chain_id.as_deref()
}

/// Prints the facts for people.
pub(super) fn print(image: &OciImage, record: &ImageRecord) {
    let (count, all) = (count(image, record), image.layers.len());
    let layers = match count == all {
        true => crate::output::counted(all as u64, "layer"),
        false => format!("the first {count} of {all} layers"),
    };
    println!("oci image   {}, {layers}", image.digest);
    if let Some(chain) = chain_id(image, count) {
        println!("chain       {chain}");
    }
    println!("config      {}", image.config_digest);
    let settings = match image.settings() {
        Ok(settings) => settings,
        Err(e) => return println!("settings    {e}"),
    };
    // Control characters of the image must not reach the terminal.
    let shown = |text: &str| text.escape_debug().to_string();
    let words = |words: &[String]| words.iter().map(|it| format!("{it:?}")).collect::<Vec<_>>();
    let lists = [
        ("entrypoint", &settings.entrypoint),
        ("command", &settings.cmd),
        ("volumes", &settings.volumes),
    ];
    for (title, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
        println!("{title:<11} {}", words(list).join(" "));
    }
    let singles = [
        ("user", &settings.user),
        ("directory", &settings.working_dir),
        ("stop signal", &settings.stop_signal),
    ];
    for (title, text) in singles.into_iter().filter(|(_, text)| !text.is_empty()) {
        println!("{title:<11} {}", shown(text));
    }
    for variable in &settings.env {
        println!("variable    {}", shown(variable));
    }
}
