//! When a registry is asked for what a tag stands for, and what this host knows of that.
//!
//! ```text
//!   --pull always    ask                      ──► an answer, or an error
//!   --pull newer     ask for up to 10 s       ──► an answer; else the image of the record, if it is here
//!   --pull missing   the image of the record  ──► else ask
//!   --pull never     the image of the record  ──► else an error
//! ```
//!
//! A record says which digest a registry gave for a tag, and when. It is this host's own, and nothing of
//! a registry or an image gets into it but that digest. Invariants: a refusal (401, 403, 404) is an answer;
//! a record that makes no sense is none.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::{
    registry::{Digest, Name},
    web::Refusal,
};
use serde::{Deserialize, Serialize};

use crate::source::{Kind, Source};

/// How long a registry may take to say what a tag stands for, where an image is here that would do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Longest record, in bytes.
const RECORD_MAX: u64 = 4096;

/// When a registry is asked for what a tag stands for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub enum Pull {
    /// Each time; without an answer, what is here will do.
    #[default]
    Newer,
    /// Where nothing is here that it stood for.
    Missing,
    /// Each time.
    Always,
    /// Never.
    Never,
}

/// The records of this host.
#[derive(Clone, Copy, Debug)]
pub struct Tags<'a> {
    /// The folder that they lie in.
    pub folder: &'a Path,
    /// When a registry is asked.
    pub pull: Pull,
}

/// What a tag stood for.
#[derive(Serialize, Deserialize)]
pub(crate) struct Record {
    name: String,
    digest: String,
    /// Seconds since 1970.
    asked: u64,
}

impl Source {
    /// The name of an image in a registry, if the registry can give another one for it tomorrow.
    pub(crate) fn tagged(&self) -> Option<&Name> {
        match &self.0 {
            Kind::Registry(name) if name.digest().is_none() => Some(name),
            _ => None,
        }
    }
}

impl Tags<'_> {
    fn path(&self, name: &Name) -> PathBuf {
        self.folder.join(Digest::of(name.to_string().as_bytes()).hex())
    }

    /// What the tag stood for when a registry was asked last.
    pub(crate) fn recall(&self, name: &Name) -> Option<Record> {
        let mut options = fs::OpenOptions::new();
        let file = options.read(true).custom_flags(libc_nofollow()).open(self.path(name)).ok()?;
        let mut bytes = Vec::new();
        file.take(RECORD_MAX).read_to_end(&mut bytes).ok()?;
        let record: Record = serde_json::from_slice(&bytes).ok()?;
        (record.name == name.to_string() && record.digest.parse::<Digest>().is_ok())
            .then_some(record)
    }

    /// Remembers that the tag of `source` stands for `digest` now; nothing where it has none.
    pub fn remember_of(&self, source: &Source, digest: &str) -> Result<()> {
        match source.tagged() {
            Some(name) => self.remember(name, &digest.parse()?),
            None => Ok(()),
        }
    }

    fn remember(&self, name: &Name, digest: &Digest) -> Result<()> {
        let failed = |error| {
            Error::io(
                format!("cannot keep what {name} stands for in {}", self.folder.display()),
                error,
            )
        };
        let asked = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let record = Record { name: name.to_string(), digest: digest.to_string(), asked };
        let text = serde_json::to_vec(&record).map_err(|error| failed(error.into()))?;
        match fs::DirBuilder::new().mode(0o700).create(self.folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let mut file = tempfile::NamedTempFile::new_in(self.folder).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        file.persist(self.path(name)).map_err(|error| failed(error.error))?;
        Ok(())
    }
}

fn libc_nofollow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits() as i32
}

impl Record {
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// What a user is told whose image is this, because of `why`.
    pub(crate) fn note(&self, why: &Error) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let Self { name, digest, asked } = self;
        let age = age(now.saturating_sub(*asked));
        format!("{why}; using the image that is here: {digest}, which {name} was {age} ago")
    }
}

/// The error where a registry is not to be asked, and nothing is here.
pub(crate) fn never(what: &str) -> Error {
    let what = format!("{what} is not on this host, and --pull never asks no registry for it");
    Error::new(ErrorKind::NotFound, what)
}

/// Whether a registry that gave this error may have another answer later.
pub(crate) fn is_no_answer(error: &Error) -> bool {
    error.kind() == ErrorKind::Unavailable && error.cause::<Refusal>().is_none()
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
    use burgeon_source::registry::{Digest, Name};

    use super::{Pull, Tags, age};

    #[test]
    fn a_record_is_of_one_name_and_makes_sense() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("tags");
        let tags = Tags { folder: &folder, pull: Pull::Newer };
        let name = |text: &str| Name::parse(text).unwrap().unwrap();
        let (one, other) = (name("oci://r.example/a:1"), name("oci://r.example/a:2"));
        assert!(tags.recall(&one).is_none());
        for digest in [Digest::of(b"x"), Digest::of(b"y")] {
            tags.remember(&one, &digest).unwrap();
            assert_eq!(tags.recall(&one).unwrap().digest(), digest.to_string());
        }
        std::fs::copy(tags.path(&one), tags.path(&other)).unwrap();
        assert!(tags.recall(&other).is_none(), "it is of another name");
        std::fs::write(tags.path(&one), "{}").unwrap();
        assert!(tags.recall(&one).is_none());
        assert_eq!([59, 600, 7300, 200_000].map(age), ["59 s", "10 min", "2 h", "2 days"]);
    }
}
