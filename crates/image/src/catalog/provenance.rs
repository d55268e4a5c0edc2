//! Provenance: this host's own records about each image.
//!
//! ```text
//!   <state directory>/provenance/<manifest digest>     one JSON document an image
//!       made_here     this host stored the chunks that the manifest names
//!       built_as      the names that its builds here have given it
//!       verified      this host has read every chunk, and found it right
//!       stands_for    reserved names (sha256:…) whose content this host has checked
//!       references    references typed by the user
//! ```
//!
//! A store may be a shared folder or a bucket, and anybody may have put an image there: a name or
//! a chunk table in it proves nothing. These records lie outside every store.
//!
//! Invariants: only this host writes the records, after checking the facts; a missing or damaged
//! record states nothing, so its loss costs work and never trust. Manifests are named by their
//! content, so a fact about a manifest remains true.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use burgeon_block::{Digest, Error, Result};
use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};

use super::ImageRecord;
use crate::open_own;

const FORMAT: u32 = 1;
/// Longest record that is read: a thousand references.
const RECORD_MAX: u64 = 1 << 20;
/// References kept per image; the first in text order is dropped.
const REFERENCES_MAX: usize = 100;

/// The records of this host, for one store.
#[derive(Clone, Debug)]
pub struct Provenance {
    folder: PathBuf,
    store: String,
    /// Changes noted by a sandboxed process instead of written.
    notes: Option<Arc<Mutex<BTreeMap<Digest, ImageProvenance>>>>,
}

/// The record about one image.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ImageProvenance {
    format: u32,
    /// This host has stored the image's chunks, or described them where they are.
    #[serde(default)]
    pub made_here: bool,
    /// Names that this host's builds have given it.
    #[serde(default)]
    pub built_as: BTreeSet<String>,
    /// This host has compared every chunk with its digest.
    #[serde(default)]
    pub verified: bool,
    /// Reserved names that this host has verified for the image.
    #[serde(default)]
    pub stands_for: BTreeSet<String>,
    /// References typed by the user that last resolved to this image.
    #[serde(default)]
    pub references: BTreeSet<String>,
    /// Stores in which the image was used.
    #[serde(default)]
    stores: BTreeSet<String>,
}

impl ImageProvenance {
    /// True if the chunks are where the manifest says.
    pub fn has_sound_chunks(&self) -> bool {
        self.made_here || self.verified
    }
}

impl Provenance {
    /// The records in `folder`, which need not exist yet, for the store `store`.
    pub fn new(folder: PathBuf, store: impl Into<String>) -> Self {
        Self { folder, store: store.into(), notes: None }
    }

    /// The same records for a process that may not write them: it notes its changes, and another
    /// process applies them with [`Self::adopt`].
    pub fn noting(self) -> Self {
        Self { notes: Some(Arc::default()), ..self }
    }

    /// The changes noted for `manifest`.
    pub fn noted(&self, manifest: &Digest) -> Option<ImageProvenance> {
        let notes = self.notes.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        notes.get(manifest).cloned()
    }

    /// Writes the changes that a sandboxed process has `noted` about the image `manifest`, which
    /// it built: that it was made here, the name `built_as`, and the reserved names that `may_be`
    /// allows. All else in `noted` is ignored.
    pub fn adopt(
        &self,
        manifest: &Digest,
        noted: ImageProvenance,
        built_as: Option<&str>,
        may_be: impl Fn(&str) -> bool,
    ) -> Result<()> {
        self.update(manifest, |known| {
            known.made_here |= noted.made_here;
            known.built_as.extend(noted.built_as.into_iter().filter(|n| built_as == Some(n)));
            known.stands_for.extend(noted.stands_for.into_iter().filter(|name| may_be(name)));
        })
    }

    /// The record about `manifest`.
    pub fn of(&self, manifest: &Digest) -> ImageProvenance {
        if let Some(noted) = self.noted(manifest) {
            return noted;
        }
        let read = || -> Option<ImageProvenance> {
            let path = self.folder.join(manifest.to_string());
            let mut text = Vec::new();
            let file = open_own(&path, File::options().read(true), OFlags::NONBLOCK).ok()?;
            file.take(RECORD_MAX).read_to_end(&mut text).ok()?;
            serde_json::from_slice(&text).ok()
        };
        read().filter(|known| known.format == FORMAT).unwrap_or_default()
    }

    /// True if this host has checked that `record` is the image of its reserved name.
    pub fn vouches_for(&self, record: &ImageRecord) -> bool {
        let known = record.digest().map(|digest| self.of(&digest));
        known.is_ok_and(|known| known.stands_for.contains(&record.name))
    }

    /// Records that `record` is the image of its reserved name.
    pub fn vouch(&self, record: &ImageRecord) -> Result<()> {
        if self.vouches_for(record) {
            return Ok(());
        }
        self.update(&record.digest()?, |known| {
            known.stands_for.insert(record.name.clone());
        })
    }

    /// Records that `reference` resolves to `manifest`, and to no other image.
    pub fn refer(&self, reference: &str, manifest: &Digest) -> Result<()> {
        for (other, known) in self.all()? {
            if other != *manifest && known.references.contains(reference) {
                self.update(&other, |known| {
                    known.references.remove(reference);
                })?;
            }
        }
        if self.of(manifest).references.contains(reference) {
            return Ok(());
        }
        self.update(manifest, |known| {
            if known.references.len() >= REFERENCES_MAX {
                known.references.pop_first();
            }
            known.references.insert(reference.to_owned());
        })
    }

    /// Changes the record about `manifest`, durably.
    pub fn update(
        &self,
        manifest: &Digest,
        change: impl FnOnce(&mut ImageProvenance),
    ) -> Result<()> {
        if let Some(notes) = &self.notes {
            let mut known = self.of(manifest);
            change(&mut known);
            notes.lock().unwrap_or_else(PoisonError::into_inner).insert(*manifest, known);
            return Ok(());
        }
        let store = self.store.clone();
        self.write(manifest, |known| {
            known.stores.insert(store);
            change(known);
        })
    }

    fn write(&self, manifest: &Digest, change: impl FnOnce(&mut ImageProvenance)) -> Result<()> {
        let path = self.folder.join(manifest.to_string());
        let failed = |error| Error::io(format!("cannot write {}", path.display()), error);
        let _lock = self.lock().map_err(failed)?;
        let mut known = self.of(manifest);
        known.format = FORMAT;
        change(&mut known);
        let mut line = serde_json::to_vec(&known).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        let write = || -> io::Result<()> {
            // The lock makes this the only writer: an existing file is the leftover of a killed
            // one.
            let new = self.folder.join("new");
            match fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
            file.write_all(&line)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(failed)
    }

    /// Locks out other writers until the result is dropped; creates the folder.
    fn lock(&self) -> io::Result<File> {
        match fs::DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // Of another type, it could block.
        let flags = OFlags::DIRECTORY.bits() as i32;
        let folder = File::options().read(true).custom_flags(flags).open(&self.folder)?;
        flock(&folder, FlockOperation::LockExclusive)?;
        Ok(folder)
    }

    /// All records, by manifest.
    pub fn all(&self) -> Result<Vec<(Digest, ImageProvenance)>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| {
                Error::io(format!("cannot list {}", self.folder.display()), error)
            })?,
        };
        let digest = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let digests = entries.flatten().filter_map(digest);
        let mut all: Vec<_> = digests.map(|digest| (digest, self.of(&digest))).collect();
        all.sort_by_key(|(digest, _)| *digest);
        Ok(all)
    }

    /// Removes the records of images that the store no longer has, unless they were used in
    /// another.
    pub fn prune(&self, has: impl Fn(&Digest) -> Result<bool>) -> Result<()> {
        for (manifest, known) in self.all()? {
            if known.stores.contains(&self.store) && !has(&manifest)? {
                self.remove(&manifest, &known)?;
            }
        }
        Ok(())
    }

    /// Removes the record of an image that the store no longer has, unless it was used in another.
    pub fn forget(&self, manifest: &Digest) -> Result<()> {
        let known = self.of(manifest);
        match known.stores.contains(&self.store) {
            true => self.remove(manifest, &known),
            false => Ok(()),
        }
    }

    fn remove(&self, manifest: &Digest, known: &ImageProvenance) -> Result<()> {
        if known.stores.len() > 1 {
            return self.write(manifest, |known| {
                known.stores.remove(&self.store);
            });
        }
        let path = self.folder.join(manifest.to_string());
        let failed = |error| Error::io(format!("cannot remove {}", path.display()), error);
        let _lock = self.lock().map_err(failed)?;
        fs::remove_file(&path).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use burgeon_block::Digest;

    use super::{ImageProvenance, Provenance};

    #[test]
    fn a_damaged_record_states_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let provenance = Provenance::new(folder.path().join("provenance"), "/store");
        let image = Digest::of(b"image");
        assert_eq!(provenance.of(&image), ImageProvenance::default());
        provenance.update(&image, |known| known.made_here = true).unwrap();
        assert!(provenance.of(&image).has_sound_chunks());
        let path = folder.path().join("provenance").join(image.to_string());
        let sound = fs::read(&path).unwrap();
        for damaged in [&b""[..], &sound[..sound.len() / 2], b"{}", b"\0\0\0"] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(provenance.of(&image), ImageProvenance::default());
        }
        // The next writer replaces it, even after an earlier writer was killed.
        fs::write(folder.path().join("provenance/new"), "x").unwrap();
        provenance.update(&image, |known| known.verified = true).unwrap();
        assert!(provenance.of(&image).verified && !provenance.of(&image).made_here);
    }

    /// The process may be under an attacker's control by then.
    #[test]
    fn a_process_in_a_sandbox_writes_nothing_and_vouches_only_for_what_it_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let provenance = Provenance::new(folder.path().join("provenance"), "/store");
        let noting = provenance.clone().noting();
        let image = Digest::of(b"image");
        let note = |known: &mut ImageProvenance| {
            known.made_here = true;
            known.verified = true;
            known.built_as.extend(["app".to_owned(), "other".to_owned()]);
            known.stands_for.extend(["sha256:app".to_owned(), "sha256:other".to_owned()]);
            known.references.insert("oci://r.example/other:1".to_owned());
        };
        noting.update(&image, note).unwrap();
        assert!(noting.of(&image).made_here, "what was noted is known there");
        assert_eq!(provenance.all().unwrap().len(), 0);
        let noted = noting.noted(&image).unwrap();
        provenance.adopt(&image, noted, Some("app"), |name| name == "sha256:app").unwrap();
        let known = provenance.of(&image);
        assert!(known.made_here && !known.verified && known.references.is_empty());
        assert_eq!(Vec::from_iter(known.built_as), ["app"]);
        assert_eq!(Vec::from_iter(known.stands_for), ["sha256:app"]);
    }

    #[test]
    fn a_reference_resolves_to_one_image_and_is_removed_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let provenance = Provenance::new(folder.path().join("provenance"), "/store");
        let (old, new) = (Digest::of(b"old"), Digest::of(b"new"));
        provenance.refer("oci://r.example/app:1", &old).unwrap();
        provenance.refer("oci://r.example/app:1", &new).unwrap();
        let of = |digest| provenance.of(digest).references.len();
        assert_eq!((of(&old), of(&new)), (0, 1));
        // An image of two stores is forgotten with the second one.
        let other = Provenance::new(folder.path().join("provenance"), "/other");
        other.update(&new, |_| ()).unwrap();
        provenance.prune(|_| Ok(false)).unwrap();
        assert_eq!((provenance.all().unwrap().len(), of(&new)), (1, 1));
        provenance.forget(&new).unwrap();
        assert_eq!(provenance.all().unwrap().len(), 1, "it is the other store's");
        other.prune(|digest| Ok(*digest == new)).unwrap();
        assert_eq!(provenance.all().unwrap().len(), 1);
        provenance.update(&old, |_| ()).unwrap();
        provenance.forget(&old).unwrap();
        assert_eq!(provenance.all().unwrap().len(), 1);
        other.prune(|_| Ok(false)).unwrap();
        assert_eq!(provenance.all().unwrap().len(), 0);
    }
}
