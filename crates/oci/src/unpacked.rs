//! Digests of unpacked layers, as this host has computed them.
//!
//! ```text
//!   a layer read to its end ─► Unpacked ─► <state directory>/unpacked/<hex of the layer>          its diff ID
//!                                    ├──► <state directory>/unpacked/<hex of the layer>.differs  an image that
//!                                    │    states another one
//!                                    └──► …/<hex of the layer>.listed.differs                    a table of
//!                                         contents (TOC) that lists what the layer does not hold
//! ```
//!
//! A configuration states the diff IDs of its layers, and containerd shares layers by chain IDs,
//! which are made of them. A mount by TOC does not compare it with them, so such a statement is
//! worth something only after the layer was read. That a TOC is right is not recorded: another
//! image may name another TOC of the same layer.
//!
//! Invariants: a fact about a digest never changes, and is durable when it is recorded; a damaged
//! record counts as missing; at most [`RECORDS_MAX`] are kept.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_image::{builder, open_own};
use burgeon_source::registry::{Digesting, OciDigest};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::{
    Source, Work,
    kept::{OciImage, OciLayer},
    no_layers,
    toc::Toc,
};

/// Most records. Images of a host have some thousand layers.
const RECORDS_MAX: usize = 100_000;
/// The longest record: a few digests.
const RECORD_LEN: u64 = 4096;
/// The end of the name of a record that an image states another diff ID.
const DIFFERS: &str = ".differs";
/// The end of the name of a record that a TOC does not list what the layer holds.
const LISTED: &str = ".listed.differs";
/// Longest text about a difference, in characters.
const TEXT_MAX: usize = 500;

/// A layer that was read to its end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Unpacked {
    /// Digest of the compressed layer.
    pub layer: String,
    /// Digest of the unpacked layer.
    pub diff_id: String,
    /// The diff ID that the image states.
    pub stated: Option<String>,
    /// The first difference between the layer and its TOC, if they were compared and differ.
    #[serde(default)]
    pub mislisted: Option<String>,
}

impl Unpacked {
    /// True if the image states another diff ID.
    pub fn differs(&self) -> bool {
        self.stated.as_ref().is_some_and(|stated| *stated != self.diff_id)
    }
}

/// Collects the layers that are read to their end, from any thread.
#[derive(Default, Debug)]
pub struct ReadLayers(Mutex<Vec<Unpacked>>);

impl ReadLayers {
    pub(crate) fn add(&self, one: Unpacked) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.contains(&one) {
            all.push(one);
        }
    }

    /// The layers, in the order in which they ended.
    pub fn into_inner(self) -> Vec<Unpacked> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads all layers of the image `source` to their end, into `work.read`, and keeps nothing of
/// them. Layers that have a usable TOC are compared with it.
pub fn unpack(source: &Source, work: &Work<'_>) -> Result<()> {
    let (blobs, selector) = source.blobs(work.access)?.ok_or_else(|| no_layers(source))?;
    let mut resolved = blobs.resolve(&selector)?;
    blobs.take_part(&mut resolved, &source.1)?;
    blobs.unpack(&resolved, work)
}

/// The digest of an unpacked archive of at most `limit` bytes, at the beginning of which `look`
/// looks.
pub(crate) fn digest_of<T>(
    archive: impl Read,
    limit: u64,
    look: impl FnOnce(&mut dyn Read) -> T,
) -> Result<(OciDigest, T)> {
    let mut archive = Digesting::new(archive.take(limit + 1));
    let seen = look(&mut archive);
    let cannot = |e| Error::with_source(ErrorKind::Corrupt, "it cannot be unpacked", e);
    io::copy(&mut archive, &mut io::sink()).map_err(cannot)?;
    if archive.inner().limit() == 0 {
        let what = format!("it has more than {limit} bytes");
        return Err(Error::new(ErrorKind::OverLimit, what));
    }
    Ok((archive.digest(), seen))
}

/// The first difference between the unpacked archive of a layer and its TOC. The archive is read
/// up to there.
pub(crate) fn mislisted(archive: &mut dyn Read, toc: &Toc) -> Option<String> {
    let sha256 = |data: &mut dyn Read| {
        let mut data = Digesting::new(data);
        io::copy(&mut data, &mut io::sink())?;
        Ok(data.digest().bytes())
    };
    // A layer that is not a tar archive cannot be compared: the reason is the difference.
    builder::first_difference(archive, &toc.files, &sha256).unwrap_or_else(|e| Some(e.to_string()))
}

/// This host's knowledge of the diff IDs of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DiffIdCheck {
    /// All layers were read here, and have the diff IDs that the image states.
    Verified,
    /// The first layer that was not read here.
    Unread(String),
    /// A layer has another diff ID than the image states, or its TOC lists other files; a sentence.
    Differs(String),
}

/// The records in a folder.
#[derive(Clone, Debug)]
pub struct Unpackings {
    folder: PathBuf,
}

impl Unpackings {
    /// The records in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Records layers durably.
    pub fn record(&self, layers: &[Unpacked]) -> Result<()> {
        let failed =
            |error| Error::io(format!("cannot record a layer in {}", self.folder.display()), error);
        for one in layers {
            let name = name_of(&one.layer)?;
            match self.read(&name) {
                // A digest has one content: one of the two readers is broken, or told a lie.
                Some(known) if known.diff_id != one.diff_id => {
                    let what = format!(
                        "the layer {} was read here before as {}, and now as {}: nothing was recorded; remove {} \
                         if the earlier one is wrong",
                        one.layer,
                        known.diff_id,
                        one.diff_id,
                        self.folder.join(&name).display()
                    );
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
                Some(_) => {}
                None => {
                    let fact = Unpacked { stated: None, mislisted: None, ..one.clone() };
                    self.write(&name, &fact).map_err(failed)?;
                }
            }
            if let Some(text) = &one.mislisted {
                // The text comes from a process that has read the image.
                let text = text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect();
                let fact = Unpacked { stated: None, mislisted: Some(text), ..one.clone() };
                self.write(&format!("{name}{LISTED}"), &fact).map_err(failed)?;
            }
            if one.differs() {
                self.write(&(name + DIFFERS), one).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, one: &Unpacked) -> io::Result<()> {
        match fs::DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if fs::read_dir(&self.folder)?.take(RECORDS_MAX).count() >= RECORDS_MAX {
            return Err(io::Error::other("there are too many records: remove the folder"));
        }
        let body = serde_json::to_string(one)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        write!(file, "{} {body}", OciDigest::of(body.as_bytes()))?;
        file.as_file().sync_all()?;
        file.persist(self.folder.join(name)).map_err(|error| error.error)?;
        File::open(&self.folder)?.sync_all()
    }

    fn read(&self, name: &str) -> Option<Unpacked> {
        let mut options = fs::OpenOptions::new();
        let path = self.folder.join(name);
        let file = open_own(&path, options.read(true), OFlags::NONBLOCK).ok()?;
        let mut text = String::new();
        file.take(RECORD_LEN).read_to_string(&mut text).ok()?;
        let (digest, body) = text.split_once(' ')?;
        let found: Unpacked = serde_json::from_str(body).ok()?;
        let layer = name.strip_suffix(LISTED).or(name.strip_suffix(DIFFERS)).unwrap_or(name);
        let is_own = name_of(&found.layer).is_ok_and(|own| layer == own);
        (is_own && OciDigest::of(body.as_bytes()).to_string() == digest).then_some(found)
    }

    /// The diff ID of a layer that was read here.
    pub fn diff_id(&self, layer: &str) -> Option<String> {
        Some(self.read(&name_of(layer).ok()?)?.diff_id)
    }

    /// The first difference between a layer and its TOC, if one was found.
    fn mislisted(&self, layer: &str) -> Option<String> {
        self.read(&(name_of(layer).ok()? + LISTED))?.mislisted
    }

    /// True if a layer is known that is not what an image or a TOC states.
    pub fn has_differing(&self) -> bool {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().take(2 * RECORDS_MAX);
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().ends_with(DIFFERS))
    }

    /// Judges the first `count` layers of an image.
    pub fn judge(&self, image: &OciImage, count: usize) -> DiffIdCheck {
        let layers: Vec<&OciLayer> = image.layers.iter().take(count).collect();
        let mut unread = None;
        for layer in layers {
            match (self.diff_id(&layer.digest), &layer.diff_id) {
                (Some(found), Some(stated)) if found != *stated => {
                    return DiffIdCheck::Differs(format!(
                        "the layer {} unpacks to {found}, and the image {} states {stated}",
                        layer.digest, image.digest
                    ));
                }
                (Some(_), Some(_)) => {
                    if let Some(what) = self.mislisted(&layer.digest) {
                        return DiffIdCheck::Differs(format!(
                            "the table of contents of the layer {} is not that of its files: {what}",
                            layer.digest
                        ));
                    }
                }
                _ => unread = unread.or_else(|| Some(layer.digest.clone())),
            }
        }
        unread.map_or(DiffIdCheck::Verified, DiffIdCheck::Unread)
    }
}

fn name_of(layer: &str) -> Result<String> {
    Ok(layer.parse::<OciDigest>()?.hex().to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use burgeon_source::registry::OciDigest;

    use super::{DIFFERS, DiffIdCheck, Unpacked, Unpackings};
    use crate::kept::{OciImage, OciLayer};

    fn id(text: &str) -> String {
        OciDigest::of(text.as_bytes()).to_string()
    }

    fn image(layers: &[(&str, &str)]) -> OciImage {
        let layer = |(layer, diff_id): &(&str, &str)| OciLayer {
            digest: id(layer),
            size: 1,
            has_toc: true,
            diff_id: Some(id(diff_id)),
            chain_id: None,
        };
        let layers = layers.iter().map(layer).collect();
        OciImage { digest: id("image"), config_digest: id("c"), layers, config: "{}".into() }
    }

    #[test]
    fn an_image_is_verified_if_all_layers_unpack_to_what_it_states() {
        let folder = tempfile::tempdir().unwrap();
        let all = Unpackings::new(folder.path().join("unpacked"));
        let unpacked = |layer: &str, diff_id: &str, stated: &str| Unpacked {
            layer: id(layer),
            diff_id: id(diff_id),
            stated: Some(id(stated)),
            mislisted: None,
        };
        let good = image(&[("l1", "d1"), ("l2", "d2")]);
        assert_eq!(all.judge(&good, 2), DiffIdCheck::Unread(id("l1")));
        all.record(&[unpacked("l1", "d1", "d1")]).unwrap();
        assert_eq!(all.judge(&good, 1), DiffIdCheck::Verified);
        assert_eq!(all.judge(&good, 2), DiffIdCheck::Unread(id("l2")));
        // An image that states the same of other bytes.
        let forged = image(&[("l9", "d1"), ("l2", "d2")]);
        let differing = || {
            let names = fs::read_dir(&all.folder).unwrap().flatten().map(|entry| entry.file_name());
            names.filter(|name| name.to_string_lossy().ends_with(DIFFERS)).count()
        };
        assert_eq!(differing(), 0);
        assert!(!all.has_differing());
        all.record(&[unpacked("l9", "d9", "d1")]).unwrap();
        let DiffIdCheck::Differs(why) = all.judge(&forged, 2) else { panic!() };
        assert!(
            why.contains(&id("l9")) && why.contains(&id("d9")) && why.contains(&id("d1")),
            "{why}"
        );
        assert_eq!(differing(), 1, "the daemon counts them");
        assert!(all.has_differing());
        // A table of contents that lists other files condemns its layer, and no other.
        let other = image(&[("l1", "d1"), ("l3", "d3")]);
        let long = format!("a\n{}", "é".repeat(3000));
        let lying = Unpacked { mislisted: Some(long), ..unpacked("l3", "d3", "d3") };
        all.record(&[lying]).unwrap();
        let DiffIdCheck::Differs(why) = all.judge(&other, 2) else { panic!() };
        assert!(why.contains(&id("l3")) && why.contains("aéé") && why.len() < 2500, "{why}");
        assert_eq!(all.judge(&other, 1), DiffIdCheck::Verified);
        assert_eq!(differing(), 2);
        // A digest has one content: a reader that tells of another one changes no fact.
        let error = all.record(&[unpacked("l1", "junk", "junk")]).unwrap_err();
        assert!(error.to_string().contains(&id("junk")), "{error}");
        assert_eq!(all.diff_id(&id("l1")), Some(id("d1")));
        assert_eq!(all.judge(&good, 1), DiffIdCheck::Verified, "others are none the worse");
        // A damaged record, and one under another's name, count as missing.
        let path = |layer: &str| all.folder.join(id(layer).strip_prefix("sha256:").unwrap());
        fs::copy(path("l1"), path("l2")).unwrap();
        assert_eq!(all.judge(&good, 2), DiffIdCheck::Unread(id("l2")));
        let text = fs::read_to_string(path("l1")).unwrap();
        fs::write(path("l1"), text.replace(&id("d1"), &id("d9"))).unwrap();
        assert_eq!(all.judge(&good, 1), DiffIdCheck::Unread(id("l1")));
        all.record(&[unpacked("l1", "d1", "d1")]).unwrap();
        assert_eq!(all.judge(&good, 1), DiffIdCheck::Verified);
    }

    #[test]
    fn an_archive_beyond_its_limit_is_refused() {
        let digest_of = |text: &[u8]| super::digest_of(text, 3, |_| ());
        assert_eq!(digest_of(b"abc").unwrap(), (OciDigest::of(b"abc"), ()));
        assert!(digest_of(b"abcd").is_err());
    }
}
