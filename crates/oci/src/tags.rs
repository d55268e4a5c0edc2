//! This host's records of resolved names, and the policy for resolving them again.
//!
//! ```text
//!   --pull always    resolve                  ──► an answer, or an error
//!   --pull newer     resolve within 10 s      ──► an answer; else the recorded image, if present
//!   --pull missing   the recorded image       ──► else resolve
//!   --pull never     the recorded image       ──► else an error
//! ```
//!
//! A record holds the image that a name resolved to, and when. The name is a registry tag, the URL
//! of an archive, or a name in a remote store. Only this host writes records; of a registry or an
//! image they contain only a digest. Invariants: a refusal (401, 403, 404) is an answer; an
//! invalid record is ignored.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_image::{catalog::ImageRecord, open_own};
use burgeon_source::{
    registry::{Name, OciDigest},
    web::AccessDenied,
};
use reqwest::Url;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::{
    FoundImage,
    archive::shown,
    source::{Kind, Source},
};

/// Time limit for resolving a tag if a recorded image is in the store.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Longest record, in bytes.
const RECORD_MAX: u64 = 4096;

/// When to resolve a tag.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub enum Pull {
    /// Each time; without an answer, use the recorded image.
    #[default]
    Newer,
    /// Only if the recorded image is not in the store.
    Missing,
    /// Each time.
    Always,
    /// Never.
    Never,
}

/// The records of this host.
#[derive(Clone, Copy, Debug)]
pub struct Tags<'a> {
    /// The folder of the records.
    pub folder: &'a Path,
    /// When to resolve a tag.
    pub pull: Pull,
}

/// The image that a name resolved to.
#[derive(Serialize, Deserialize, Debug)]
pub struct TagRecord {
    name: String,
    /// The OCI digest of an image in a registry; else the digest of a Burgeon manifest.
    digest: String,
    /// Time of the resolution, in seconds since 1970.
    asked: u64,
    /// The image's name in the store, if the digest does not determine it.
    #[serde(default)]
    image: Option<String>,
}

impl Source {
    /// The name of an image in a registry, if it has no digest, so that it can change its meaning.
    pub(crate) fn tagged(&self) -> Option<&Name> {
        match &self.0 {
            Kind::Registry(name) if name.digest().is_none() => Some(name),
            _ => None,
        }
    }
}

impl Tags<'_> {
    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(OciDigest::of(key.as_bytes()).hex())
    }

    /// The record of a tag.
    pub(crate) fn recall(&self, name: &Name) -> Option<TagRecord> {
        let name = name.to_string();
        read(&self.path(&name)).filter(|record| record.name == name)
    }

    /// The record of the archive at `url`.
    pub(crate) fn recall_archive(&self, url: &Url) -> Option<TagRecord> {
        let record = read(&self.path(url.as_str()))?;
        (record.name == shown(url) && record.image.is_some()).then_some(record)
    }

    /// The record of `image` in the remote store `store`.
    pub fn recall_in(&self, store: &str, image: &str) -> Option<TagRecord> {
        let (key, name) = in_store(store, image);
        read(&self.path(&key)).filter(|record| record.name == name)
    }

    /// The digest that the reference `source` has, or that its tag resolved to last.
    pub fn digest_of(&self, source: &Source) -> Option<OciDigest> {
        let recalled = || self.recall(source.tagged()?)?.digest().parse().ok();
        source.pinned().cloned().or_else(recalled)
    }

    /// Removes the records whose image is gone, and invalid ones. `is_here` tells whether an image
    /// with that digest or reserved name is on this host.
    pub fn prune(&self, is_here: impl Fn(&str) -> bool) -> Result<()> {
        let failed = |error| Error::io(format!("cannot list {}", self.folder.display()), error);
        let entries = match fs::read_dir(self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed)?,
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if read(&path).is_some_and(|record| is_here(record.known_by())) {
                continue;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(format!("cannot remove {}", path.display()), error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Records the image of the tag or archive `source`, if it has just been resolved.
    pub fn remember_of(&self, source: &Source, found: &FoundImage) -> Result<()> {
        let Some(digest) = &found.tag_digest else { return Ok(()) };
        match (&source.0, source.tagged()) {
            (Kind::Archive(url), _) => self.remember_archive(url, &found.image),
            (_, Some(name)) => self.remember(name, &digest.parse()?),
            (_, None) => Ok(()),
        }
    }

    /// Records that the tag `name` resolves to `digest`.
    fn remember(&self, name: &Name, digest: &OciDigest) -> Result<()> {
        let name = name.to_string();
        self.write(&name, TagRecord { digest: digest.to_string(), ..TagRecord::now(&name) })
    }

    /// Records that the archive at `url` is the image `record`.
    fn remember_archive(&self, url: &Url, record: &ImageRecord) -> Result<()> {
        let (digest, image) = (record.digest()?.to_string(), Some(record.name.clone()));
        self.write(url.as_str(), TagRecord { digest, image, ..TagRecord::now(&shown(url)) })
    }

    /// Records that `image` of the remote store `store` has the manifest `digest`.
    pub fn remember_in(
        &self,
        store: &str,
        image: &str,
        digest: &burgeon_block::Digest,
    ) -> Result<()> {
        let (key, name) = in_store(store, image);
        self.write(&key, TagRecord { digest: digest.to_string(), ..TagRecord::now(&name) })
    }

    fn write(&self, key: &str, record: TagRecord) -> Result<()> {
        let name = &record.name;
        let failed = |error| {
            Error::io(
                format!("cannot record the digest of {name} in {}", self.folder.display()),
                error,
            )
        };
        let text = serde_json::to_vec(&record).map_err(|error| failed(error.into()))?;
        match fs::DirBuilder::new().mode(0o700).create(self.folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let mut file = tempfile::NamedTempFile::new_in(self.folder).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        file.persist(self.path(key)).map_err(|error| failed(error.error))?;
        Ok(())
    }
}

/// The record in the file `path`, if it is valid.
fn read(path: &Path) -> Option<TagRecord> {
    let mut options = fs::OpenOptions::new();
    let file = open_own(path, options.read(true), OFlags::NONBLOCK).ok()?;
    let mut bytes = Vec::new();
    file.take(RECORD_MAX).read_to_end(&mut bytes).ok()?;
    let record: TagRecord = serde_json::from_slice(&bytes).ok()?;
    let is_digest = record.digest.parse::<OciDigest>().is_ok() || record.manifest().is_some();
    is_digest.then_some(record)
}

/// The unique key of a name in a remote store, and its text for users.
fn in_store(store: &str, image: &str) -> (String, String) {
    (format!("{store}\n{image}"), format!("{image} of {store}"))
}

impl TagRecord {
    /// A record of `name` with the current time.
    fn now(name: &str) -> Self {
        let asked = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self { name: name.to_owned(), digest: String::new(), asked, image: None }
    }

    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// The manifest's digest, for an archive or an image in a remote store.
    pub fn manifest(&self) -> Option<burgeon_block::Digest> {
        self.digest.parse().ok()
    }

    /// The image's name in this host's store.
    pub(crate) fn image(&self) -> Option<&str> {
        self.image.as_deref()
    }

    fn known_by(&self) -> &str {
        self.image.as_deref().unwrap_or(&self.digest)
    }

    /// The note for a user who gets the recorded image because of the error `why`.
    pub fn note(&self, why: &Error) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let Self { name, digest, asked, .. } = self;
        let age = age(now.saturating_sub(*asked));
        format!("{why}; using the local image {digest}, to which {name} resolved {age} ago")
    }
}

/// The error for `--pull never` if the image is not on this host.
pub fn never(what: &str) -> Error {
    let what = format!("{what} is not on this host, and --pull never forbids fetching it");
    Error::new(ErrorKind::NotFound, what)
}

/// True if `error` means that the registry or store did not answer, so that a retry may help.
pub fn is_no_answer(error: &Error) -> bool {
    error.kind() == ErrorKind::Unavailable && error.cause::<AccessDenied>().is_none()
}

fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use burgeon_source::registry::{Name, OciDigest};

    use super::{Pull, Tags, age};

    #[test]
    fn records_that_are_damaged_or_of_other_names_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("tags");
        let tags = Tags { folder: &folder, pull: Pull::Newer };
        let name = |text: &str| Name::parse(text).unwrap().unwrap();
        let (one, other) = (name("oci://r.example/a:1"), name("oci://r.example/a:2"));
        assert!(tags.recall(&one).is_none());
        for digest in [OciDigest::of(b"x"), OciDigest::of(b"y")] {
            tags.remember(&one, &digest).unwrap();
            assert_eq!(tags.recall(&one).unwrap().digest(), digest.to_string());
        }
        std::fs::copy(tags.path(&one.to_string()), tags.path(&other.to_string())).unwrap();
        assert!(tags.recall(&other).is_none(), "it is of another name");
        // Unused and damaged records are removed.
        tags.prune(|digest| digest == OciDigest::of(b"y").to_string()).unwrap();
        assert!(tags.recall(&one).is_some());
        tags.remember(&other, &OciDigest::of(b"x")).unwrap();
        std::fs::write(tags.path(&one.to_string()), "{}").unwrap();
        assert!(tags.recall(&one).is_none());
        tags.prune(|digest| digest == OciDigest::of(b"x").to_string()).unwrap();
        assert!(tags.recall(&other).is_some() && !tags.path(&one.to_string()).exists());
        let (manifest, store) = (burgeon_block::Digest::of(b"z"), "s3://bucket/images");
        tags.remember_in(store, "debian:12", &manifest).unwrap();
        tags.prune(|known| known == manifest.to_string()).unwrap();
        let known = tags.recall_in(store, "debian:12").unwrap();
        assert_eq!(known.manifest(), Some(manifest));
        assert!(tags.recall_in(store, "debian:13").is_none());
        tags.prune(|_| false).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        assert_eq!([59, 600, 7300, 200_000].map(age), ["59 s", "10 min", "2 h", "2 days"]);
    }
}
