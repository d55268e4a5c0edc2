//! The messages between a command and the child that reads images for it, `burgeon __read`.

use std::path::PathBuf;

use burgeon_block::{Error, ErrorKind};
use burgeon_image::{
    builder::BuildReport,
    catalog::{Copied, ImageProvenance, ImageRecord},
};
use burgeon_oci::{FoundImage, ImageForm, Indexed, Pull, Unpacked};
use burgeon_source::{Location, registry::Name};
use serde::{Deserialize, Serialize};

/// The child's task.
#[derive(Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) state: PathBuf,
    /// `None` means the state directory's own store.
    pub(super) store: Option<Location>,
    pub(super) level: i32,
    pub(super) xxhash64: bool,
    pub(super) task: Task,
}

/// The required form of an image.
#[derive(Serialize, Deserialize)]
pub(super) enum Form {
    Any,
    Checked,
    Whole,
    /// Described by the index with this digest.
    Index(String),
}

impl From<ImageForm<'_>> for Form {
    fn from(want: ImageForm<'_>) -> Self {
        match want {
            ImageForm::Any => Self::Any,
            ImageForm::Checked => Self::Checked,
            ImageForm::Whole => Self::Whole,
            ImageForm::Index(digest) => Self::Index(digest.to_owned()),
        }
    }
}

impl Form {
    pub(super) fn want(&self) -> ImageForm<'_> {
        match self {
            Self::Any => ImageForm::Any,
            Self::Checked => ImageForm::Checked,
            Self::Whole => ImageForm::Whole,
            Self::Index(digest) => ImageForm::Index(digest),
        }
    }
}

#[derive(Serialize, Deserialize)]
pub(super) enum Task {
    Find {
        text: String,
        form: Form,
        pull: Pull,
    },
    Index {
        text: String,
        push: bool,
        /// A folder with blobs that may be among the image's layers.
        content: Option<PathBuf>,
    },
    /// From an OCI image.
    Build {
        text: String,
        name: String,
    },
    /// From the archive that is passed along, with its path and length if they are known.
    BuildArchive {
        path: Option<PathBuf>,
        len: Option<u64>,
        name: String,
    },
    /// The documents of an OCI image.
    Documents {
        text: String,
    },
    /// The digests of an OCI image's unpacked layers.
    Unpack {
        text: String,
    },
    /// A blob of the repository of an OCI image, written to the pipe that is passed along.
    Blob {
        text: String,
        digest: String,
        size: u64,
    },
    /// All objects of an image, except its name, from the store `from`.
    Copy {
        from: Location,
        record: ImageRecord,
    },
}

/// The child's result, and its notes on the image.
#[derive(Serialize, Deserialize)]
pub(super) struct Made {
    pub(super) done: Done,
    pub(super) noted: Option<ImageProvenance>,
    /// Layers that were read to their end.
    #[serde(default)]
    pub(super) read: Vec<Unpacked>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Done {
    Found(Elsewhere),
    /// The digest of an OCI image or index, and its documents.
    Documents(String, Vec<String>),
    Copied(Copied),
    Indexed(Indexed),
    Built(Box<BuildReport>),
    Unpacked,
    Written,
    /// A layer unpacks to another digest than the image states, as `read` tells; the error.
    Differs(String),
}

/// An image that was not in the store.
#[derive(Serialize, Deserialize)]
pub(crate) enum Elsewhere {
    /// Made there meanwhile.
    Made(Box<FoundImage>),
    /// A Burgeon image in a registry, with the record that its author gave it.
    Ours(Name, Box<ImageRecord>),
}

pub(super) fn something_else() -> Error {
    Error::new(ErrorKind::LocalIo, "unexpected answer from the process that reads the image")
}
