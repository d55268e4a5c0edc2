//! Images in a folder in the OCI image layout.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::registry::{DOCUMENT_MAX, OciDigest};
use oci_spec::image::Descriptor;
use serde_json::{Value, json};

use crate::{
    document::{DescriptorExt, Document, is_referrers_tag},
    source::Selector,
};

/// A folder in the OCI image layout.
#[derive(Clone)]
pub(crate) struct Layout {
    folder: PathBuf,
}

impl Layout {
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let layout = Self { folder: folder.to_owned() };
        if layout.folder.join("oci-layout").is_file() {
            return Ok(layout);
        }
        let what = format!("{} is not an OCI layout: it has no file oci-layout", folder.display());
        Err(Error::new(ErrorKind::NotFound, what))
    }

    /// Its path, absolute where that can be told.
    pub(crate) fn folder(&self) -> PathBuf {
        std::path::absolute(&self.folder).unwrap_or_else(|_| self.folder.clone())
    }

    /// Reads an index or manifest and checks its digest.
    pub(crate) fn document(&self, selector: &Selector) -> Result<(Vec<u8>, OciDigest)> {
        let digest = match selector {
            Selector::Digest(digest) => digest.clone(),
            Selector::Tag(tag) => self.tagged(Some(tag))?,
            Selector::Only => self.tagged(None)?,
        };
        let mut bytes = Vec::new();
        let path = self.path(&digest);
        let file = self.open_file(&path)?;
        file.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes).map_err(|e| cannot_read(&path, e))?;
        check_len(&path, &bytes)?;
        if OciDigest::of(&bytes) != digest {
            let what =
                format!("{} does not match its digest: tampered with, or damaged", path.display());
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok((bytes, digest))
    }

    /// The digest of the entry `tag` in `index.json`, or of its only entry.
    fn tagged(&self, tag: Option<&str>) -> Result<OciDigest> {
        let path = self.folder.join("index.json");
        let mut bytes = Vec::new();
        let file = self.open_file(&path)?;
        file.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes).map_err(|e| cannot_read(&path, e))?;
        check_len(&path, &bytes)?;
        let parsed = Document::parse(&bytes).map_err(|error| {
            Error::with_source(error.kind(), format!("cannot use {}", path.display()), error)
        });
        let Document::Index(index) = parsed? else {
            let what = format!("{} is not an index of images", path.display());
            return Err(Error::new(ErrorKind::Corrupt, what));
        };
        let all = index.manifests();
        let found: Vec<&Descriptor> = match tag {
            Some(tag) => all.iter().filter(|one| one.tag() == Some(tag)).collect(),
            // Lists of referrers are no images.
            None => all.iter().filter(|one| !one.tag().is_some_and(is_referrers_tag)).collect(),
        };
        match found[..] {
            [one] => one.sha256(),
            // Several entries with this tag: one for each platform.
            [_, _, ..] if tag.is_some() => crate::document::for_this_machine(&index)?.sha256(),
            _ => {
                let tags: Vec<_> = all.iter().filter_map(DescriptorExt::tag).take(20).collect();
                let (folder, tags) = (self.folder.display(), tags.join(", "));
                let what = match tag {
                    Some(tag) => format!("there is no image {tag:?} in {folder}: it has {tags}"),
                    None if found.is_empty() => format!("{folder} has no image"),
                    None => {
                        format!(
                            "{folder} has several images: name one as \
                            oci-layout:{folder}:TAG, with TAG of {tags}"
                        )
                    }
                };
                Err(Error::new(ErrorKind::NotFound, what))
            }
        }
    }

    /// Opens a blob; its bytes are not checked.
    pub(crate) fn blob(&self, digest: &OciDigest) -> Result<File> {
        self.open_file(&self.path(digest))
    }

    /// Writes a blob atomically.
    pub(crate) fn put(&self, bytes: &[u8]) -> Result<()> {
        let path = self.path(&OciDigest::of(bytes));
        if path.is_file() {
            return Ok(());
        }
        replace(&path, bytes)
    }

    /// Writes the document `bytes` of media type `kind`, and moves the tag `tag` to it.
    pub(crate) fn tag(&self, tag: &str, bytes: &[u8], kind: &str) -> Result<()> {
        self.put(bytes)?;
        let path = self.folder.join("index.json");
        let mut before = Vec::new();
        let file = self.open_file(&path)?;
        file.take(DOCUMENT_MAX + 1).read_to_end(&mut before).map_err(|e| cannot_read(&path, e))?;
        check_len(&path, &before)?;
        let bad = || {
            let what = format!("{} is not an index of images", path.display());
            Error::new(ErrorKind::Corrupt, what)
        };
        let mut index: Value = serde_json::from_slice(&before).map_err(|_| bad())?;
        let all = index["manifests"].as_array_mut().ok_or_else(bad)?;
        all.retain(|one| one["annotations"][NAME] != tag);
        all.push(json!({
            "mediaType": kind, "digest": OciDigest::of(bytes).to_string(), "size": bytes.len(),
            "annotations": { NAME: tag },
        }));
        replace(&path, index.to_string().as_bytes())
    }

    /// Opens a regular file, without blocking on a pipe.
    fn open_file(&self, path: &Path) -> Result<File> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|error| match self.symlink_in(path) {
            // The reading process can open nothing outside of the layout.
            Some(link) if error.kind() == io::ErrorKind::PermissionDenied => {
                let (shown, link, folder) = (path.display(), link.display(), self.folder.display());
                let what = format!(
                    "cannot read {shown}: {link} is a symlink to a place outside of the layout, where \
                     Burgeon opens nothing; make a copy without symlinks, as with `cp -rL {folder} COPY`, \
                     and use oci-layout:COPY"
                );
                Error::new(ErrorKind::Invalid, what)
            }
            _ if error.kind() == io::ErrorKind::NotFound => {
                let shown = path.display();
                let what = format!(
                    "cannot read {shown}: the layout is not complete; copy the image into it again, as with \
                     skopeo copy"
                );
                Error::with_source(ErrorKind::NotFound, what, error)
            }
            _ => cannot_read(path, error),
        })?;
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Ok(file);
        }
        let what = format!("{} is not a regular file: copy the image again", path.display());
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    /// The first symlink below the folder on the way to `path`.
    fn symlink_in(&self, path: &Path) -> Option<PathBuf> {
        let below = path.ancestors().take_while(|part| *part != self.folder);
        let links = below.filter(|part| part.is_symlink());
        links.last().map(Path::to_owned)
    }

    fn path(&self, digest: &OciDigest) -> PathBuf {
        self.folder.join("blobs/sha256").join(digest.hex())
    }
}

/// The annotation that holds an image's tag.
const NAME: &str = "org.opencontainers.image.ref.name";

/// Atomically replaces the file `path`.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let cannot = |error| Error::io(format!("cannot write {}", path.display()), error);
    let mut file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(path.parent().unwrap_or(path))
        .map_err(cannot)?;
    file.write_all(bytes).map_err(cannot)?;
    file.as_file().sync_all().map_err(cannot)?;
    file.persist(path).map_err(|error| cannot(error.error))?;
    Ok(())
}

/// Refuses a document above the limit, whose digest was not computed.
fn check_len(path: &Path, bytes: &[u8]) -> Result<()> {
    if bytes.len() as u64 <= DOCUMENT_MAX {
        return Ok(());
    }
    let what = format!(
        "{} is larger than {} MiB, the limit of an index or manifest: the image cannot be used",
        path.display(),
        DOCUMENT_MAX >> 20
    );
    Err(Error::new(ErrorKind::Corrupt, what))
}

fn cannot_read(path: &Path, error: io::Error) -> Error {
    Error::io(format!("cannot read {}", path.display()), error)
}
