//! The names that only Burgeon gives to images.
//!
//! ```text
//!   sha256:<digest>               an OCI image, all of it
//!   sha256:<digest>/<count>       its first layers
//!   sha256:<digest>/<arch>        the image that an image index holds for an architecture
//!   …/index                       the same, read by an index
//!   …/contents   …/<part>/toc     the same, described by its layers' tables of contents
//!   url:<digest>                  an archive on a web server
//!   burgeon-empty                 the image without files
//! ```
//!
//! Invariants: these names are parsed and printed here only, because they decide about trust; a
//! name that no version gives, but that looks like one of these, is reserved as well.

use std::fmt;

/// The name of the image without files that `create-empty` mounts.
pub const EMPTY_IMAGE: &str = "burgeon-empty";

const SHA256: &str = "sha256:";
const ARCHIVE: &str = "url:";
const INDEX: &str = "index";
const CONTENTS: &str = "contents";
/// For a part, whose name would be too long with [`CONTENTS`]: names in a store are short.
const TOC: &str = "toc";

/// A name that only Burgeon gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReservedName<'a> {
    /// The image without files.
    Empty,
    /// An archive.
    Archive {
        /// The digest that identifies its URL and version.
        hex: &'a str,
    },
    /// An OCI image.
    Oci(OciName<'a>),
    /// A name that no version gives.
    Other(&'a str),
}

impl<'a> ReservedName<'a> {
    /// Parses the name of an image; `None` for a name that a user may give.
    pub fn parse(name: &'a str) -> Option<Self> {
        if name == EMPTY_IMAGE {
            return Some(Self::Empty);
        }
        if let Some(hex) = name.strip_prefix(ARCHIVE) {
            return Some(Self::Archive { hex });
        }
        if let Some(oci) = OciName::parse(name) {
            return Some(Self::Oci(oci));
        }
        let end = name.rsplit_once('/').map(|(_, end)| end);
        let is_other = name.starts_with("sha512:") || matches!(end, Some(INDEX | CONTENTS));
        is_other.then_some(Self::Other(name))
    }

    /// The parsed `name`, if it is one of an OCI image.
    pub fn oci(name: &'a str) -> Option<OciName<'a>> {
        match Self::parse(name)? {
            Self::Oci(name) => Some(name),
            Self::Empty | Self::Archive { .. } | Self::Other(_) => None,
        }
    }
}

impl fmt::Display for ReservedName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str(EMPTY_IMAGE),
            Self::Archive { hex } => write!(f, "{ARCHIVE}{hex}"),
            Self::Oci(name) => name.fmt(f),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// The name of an OCI image. It has several, one for each form that can be in a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OciName<'a> {
    /// The digest of the image, or of an image index, with its algorithm. Not checked.
    pub digest: &'a str,
    /// The part of the image.
    pub part: NamedPart<'a>,
    /// The way in which its data is read.
    pub form: NameForm,
}

/// The part of an OCI image that a name means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamedPart<'a> {
    /// All of it.
    All,
    /// The tree of its first layers, by their number.
    Layers(usize),
    /// The image for an architecture, if the digest is that of an image index.
    Architecture(&'a str),
}

/// The way in which the data of an OCI image is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameForm {
    /// As its record says: from the store, or from whole layers.
    Whole,
    /// From layers that an index describes.
    Index,
    /// From layers that their tables of contents describe, without checksums of the data.
    Tocs,
}

impl<'a> OciName<'a> {
    /// The name of all of the image `digest`, written with its algorithm.
    pub fn of(digest: &'a str) -> Self {
        Self { digest, part: NamedPart::All, form: NameForm::Whole }
    }

    /// The name of a part of the same image.
    pub fn part(self, part: NamedPart<'a>) -> Self {
        Self { part, ..self }
    }

    /// The name of the same image in another form.
    pub fn form(self, form: NameForm) -> Self {
        Self { form, ..self }
    }

    /// The digest's hexadecimal digits.
    pub fn hex(&self) -> &'a str {
        &self.digest[SHA256.len()..]
    }

    fn parse(name: &'a str) -> Option<Self> {
        if !name.starts_with(SHA256) {
            return None;
        }
        let Some((digest, rest)) = name.split_once('/') else { return Some(Self::of(name)) };
        let (part, form) = match rest.rsplit_once('/') {
            None if rest == INDEX => return Some(Self::of(digest).form(NameForm::Index)),
            None if rest == CONTENTS => return Some(Self::of(digest).form(NameForm::Tocs)),
            Some((part, INDEX)) => (part, NameForm::Index),
            Some((part, TOC)) => (part, NameForm::Tocs),
            _ => (rest, NameForm::Whole),
        };
        // Another spelling of a number is not the name of that part.
        let count = part.parse::<usize>().ok().filter(|count| count.to_string() == part);
        let part = count.map_or(NamedPart::Architecture(part), NamedPart::Layers);
        Some(Self { digest, part, form })
    }
}

impl fmt::Display for OciName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.digest)?;
        match self.part {
            NamedPart::All => {}
            NamedPart::Layers(count) => write!(f, "/{count}")?,
            NamedPart::Architecture(name) => write!(f, "/{name}")?,
        }
        match self.form {
            NameForm::Whole => Ok(()),
            NameForm::Index => write!(f, "/{INDEX}"),
            NameForm::Tocs if self.part == NamedPart::All => write!(f, "/{CONTENTS}"),
            NameForm::Tocs => write!(f, "/{TOC}"),
        }
    }
}

/// True for names that only Burgeon gives: to an OCI image or an archive, whose content it has
/// checked, or to the image without files.
pub fn is_reserved(name: &str) -> bool {
    ReservedName::parse(name).is_some()
}

#[cfg(test)]
mod tests {
    use super::{EMPTY_IMAGE, NameForm, NamedPart, OciName, ReservedName, is_reserved};

    const DIGEST: &str = "sha256:00ff";

    #[test]
    fn each_name_of_an_oci_image_is_printed_as_it_is_parsed() {
        let whole = OciName::of(DIGEST);
        let three = whole.part(NamedPart::Layers(3));
        let of = |text| whole.part(NamedPart::Architecture(text));
        for (name, parsed) in [
            ("sha256:00ff", whole),
            ("sha256:00ff/index", whole.form(NameForm::Index)),
            ("sha256:00ff/contents", whole.form(NameForm::Tocs)),
            ("sha256:00ff/3", three),
            ("sha256:00ff/3/index", three.form(NameForm::Index)),
            ("sha256:00ff/3/toc", three.form(NameForm::Tocs)),
            ("sha256:00ff/amd64", of("amd64")),
            ("sha256:00ff/amd64/toc", of("amd64").form(NameForm::Tocs)),
            // No version gives these.
            ("sha256:00ff/", of("")),
            ("sha256:00ff/toc", of("toc")),
            ("sha256:00ff/03", of("03")),
            ("sha256:00ff/+3", of("+3")),
            ("sha256:00ff/3/contents", of("3/contents")),
        ] {
            assert_eq!(ReservedName::parse(name), Some(ReservedName::Oci(parsed)), "{name}");
            assert_eq!(parsed.to_string(), name);
            assert_eq!((parsed.digest, parsed.hex()), (DIGEST, "00ff"));
        }
    }

    #[test]
    fn every_other_reserved_name_is_printed_as_it_is_parsed() {
        for (name, parsed) in [
            ("url:00ff", ReservedName::Archive { hex: "00ff" }),
            (EMPTY_IMAGE, ReservedName::Empty),
            ("sha512:00ff", ReservedName::Other("sha512:00ff")),
            ("debian/index", ReservedName::Other("debian/index")),
            ("a/b/contents", ReservedName::Other("a/b/contents")),
            ("/index", ReservedName::Other("/index")),
        ] {
            assert_eq!(ReservedName::parse(name), Some(parsed));
            assert_eq!(parsed.to_string(), name);
            assert!(ReservedName::oci(name).is_none() && is_reserved(name));
        }
    }

    #[test]
    fn names_that_users_give_are_not_reserved() {
        for name in ["debian:12", "index", "contents", "a/toc", "sha256", "burgeon-empty2", "xurl:"]
        {
            assert!(!is_reserved(name), "{name}");
        }
    }
}
