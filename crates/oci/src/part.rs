//! The first layers of an image, named by their number or by their chain ID.
//!
//! ```text
//!   oci://…#layers=2     oci://…#chain=sha256:…     ──► sha256:<image>/2 in the store
//! ```
//!
//! A diff ID is the digest of a layer's unpacked archive, and a chain ID identifies the tree of
//! the first layers whatever their compression, as the OCI image specification defines it. A
//! snapshotter of containerd gets chain IDs, and two images with the same first layers share them.
//!
//! Invariant: both are statements of the image's configuration. The content of a layer that is
//! read as a whole is compared with its diff ID; that of a layer which a table of contents
//! describes is not. So a part is named by the manifest that it is taken from, never by its chain.

use std::fmt;

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_image::catalog::{NamedPart, OciName};
use burgeon_source::registry::OciDigest;

use crate::kept::OciImage;

/// The layers of an image that make up the wanted tree.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) enum Part {
    #[default]
    All,
    /// The first ones, by number.
    Layers(usize),
    /// The first ones, by chain ID.
    Chain(OciDigest),
}

/// As in a reference: `#layers=3`, `#chain=sha256:…`, or nothing.
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => Ok(()),
            Self::Layers(count) => write!(f, "#layers={count}"),
            Self::Chain(chain) => write!(f, "#chain={chain}"),
        }
    }
}

impl Part {
    /// Splits the reference `text` into the name of the image and the part.
    pub(crate) fn split(text: &str) -> (&str, Result<Self>) {
        let begins = |mark: &str| text.rfind(mark).map(|at| (at, at + mark.len()));
        if let Some((end, at)) = begins("#chain=") {
            return (&text[..end], text[at..].parse().map(Self::Chain));
        }
        let Some((end, at)) = begins("#layers=") else { return (text, Ok(Self::All)) };
        let count = text[at..].parse().ok().filter(|count| *count > 0);
        let count = count.map(Self::Layers).ok_or_else(|| {
            let what = "the number of layers is invalid: write #layers=N, with N at least 1";
            Error::new(ErrorKind::Invalid, what)
        });
        (&text[..end], count)
    }

    /// The number of layers of `image` in the part.
    pub(crate) fn count(&self, image: &OciImage) -> Result<usize> {
        let all = image.layers.len();
        match self {
            Self::All => Ok(all),
            Self::Layers(count) if *count <= all => Ok(*count),
            Self::Layers(count) => {
                let what = format!("the image {} has {all} layers, not {count}", image.digest);
                Err(Error::new(ErrorKind::NotFound, what))
            }
            Self::Chain(chain) => {
                let chain = chain.to_string();
                let at = image.layers.iter().position(|it| it.chain_id.as_ref() == Some(&chain));
                at.map(|at| at + 1).ok_or_else(|| {
                    let what =
                        format!("no layer of the image {} has the chain ID {chain}", image.digest);
                    Error::new(ErrorKind::NotFound, what)
                })
            }
        }
    }
}

/// The store's name for the first `count` of the `all` layers of the image `digest`.
pub(crate) fn name(digest: &OciDigest, count: usize, all: usize) -> OciName<'_> {
    let whole = OciName::of(digest.as_str());
    if count == all { whole } else { whole.part(NamedPart::Layers(count)) }
}

#[cfg(test)]
mod tests {
    use burgeon_image::catalog::NameForm;
    use burgeon_source::registry::OciDigest;

    use super::{Part, name};

    #[test]
    fn a_part_is_split_from_a_reference() {
        let chain = OciDigest::of(b"x");
        let split = |text: &str| {
            let (name, part) = Part::split(text);
            (name.to_owned(), part.map_err(|error| error.to_string()))
        };
        let name_of = "oci://r.example/a:1".to_owned();
        assert_eq!(split(&name_of), (name_of.clone(), Ok(Part::All)));
        for part in [Part::Layers(3), Part::Chain(chain)] {
            assert_eq!(split(&format!("{name_of}{part}")), (name_of.clone(), Ok(part)));
        }
        for wrong in ["#layers=", "#layers=0", "#layers=-1", "#layers=x", "#chain=", "#chain=3"] {
            assert!(split(&format!("{name_of}{wrong}")).1.is_err(), "{wrong}");
        }
        // Anything else belongs to the name, and is refused there.
        assert_eq!(split("a#b").0, "a#b");
    }

    /// The store allows names of 80 bytes.
    #[test]
    fn the_name_of_each_part_of_each_form_fits() {
        let digest = OciDigest::of(b"x");
        let longest = name(&digest, 512, 513).form(NameForm::Tocs);
        assert!(longest.to_string().len() <= 80, "{longest}");
        assert_eq!(name(&digest, 3, 3).to_string(), digest.to_string());
    }
}
