use std::{fmt, path::PathBuf};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_image::catalog::ReservedName;
use burgeon_source::{
    Form,
    registry::{Name, OciDigest},
};
use reqwest::Url;

use crate::part::Part;

/// The location of an OCI image or archive.
#[derive(Clone, Debug)]
pub struct Source(pub(crate) Kind, pub(crate) Part);

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// `oci-layout:DIR[:TAG|@DIGEST]`
    Layout { folder: PathBuf, selector: Selector },
    /// `oci://REGISTRY/REPOSITORY[:TAG][@DIGEST]`
    Registry(Name),
    /// `https://HOST/PATH` of a tar archive
    Archive(Url),
}

/// The image to select at a location.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Selector {
    /// The only image there.
    Only,
    Tag(String),
    Digest(OciDigest),
}

/// Omits all that could be a secret.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Layout { folder, .. } => write!(f, "oci-layout:{}", folder.display()),
            Kind::Registry(name) => name.fmt(f),
            Kind::Archive(url) => f.write_str(&crate::archive::shown(url)),
        }?;
        self.1.fmt(f)
    }
}

impl Source {
    /// Parses `text`; `None` if it has none of the prefixes of a source.
    pub fn parse(text: &str) -> Option<Result<Self>> {
        // The fragment of a URL belongs to it.
        let is_oci = matches!(Form::of(text), Form::Layout(_) | Form::Registry);
        let (text, part) = if is_oci { Part::split(text) } else { (text, Ok(Part::All)) };
        let kind = match Form::of(text) {
            Form::Layout(rest) => layout(rest),
            Form::Registry => Name::parse(text)?.map(Kind::Registry),
            Form::Web => archive(text),
            Form::Store | Form::Name => return None,
        };
        Some(kind.and_then(|kind| Ok(Self(kind, part?))))
    }

    /// Splits a reference into the image's own and the part of it, such as `#layers=3`.
    pub fn split_part(text: &str) -> (&str, &str) {
        let (name, _) = Part::split(text);
        (name, &text[name.len()..])
    }

    /// The folder of a layout.
    pub fn folder(&self) -> Option<&std::path::Path> {
        match &self.0 {
            Kind::Layout { folder, .. } => Some(folder),
            Kind::Registry(_) | Kind::Archive(_) => None,
        }
    }

    /// True if this is a tar archive on a web server.
    pub fn is_archive(&self) -> bool {
        matches!(self.0, Kind::Archive(_))
    }

    /// The name in a registry, if the source is one.
    pub fn registry_name(&self) -> Option<&Name> {
        match &self.0 {
            Kind::Registry(name) => Some(name),
            Kind::Layout { .. } | Kind::Archive(_) => None,
        }
    }

    /// True if an image of this source can have the reserved name `name`.
    pub fn may_be_named(&self, name: &str) -> bool {
        match (&self.0, ReservedName::parse(name)) {
            (Kind::Archive(_), Some(ReservedName::Archive { .. })) => true,
            (Kind::Layout { .. } | Kind::Registry(_), Some(ReservedName::Oci(name))) => {
                name.digest.parse::<OciDigest>().is_ok()
            }
            _ => false,
        }
    }

    /// The digest in the source, if it has one.
    pub fn pinned(&self) -> Option<&OciDigest> {
        match &self.0 {
            Kind::Layout { selector: Selector::Digest(digest), .. } => Some(digest),
            Kind::Registry(name) => name.digest(),
            _ => None,
        }
    }
}

fn layout(text: &str) -> Result<Kind> {
    let (folder, selector) = if let Some((folder, digest)) = text.rsplit_once('@') {
        (folder, Selector::Digest(digest.parse()?))
    } else {
        match text.rsplit_once(':') {
            Some((folder, tag)) if !tag.contains('/') => (folder, Selector::Tag(tag.to_owned())),
            _ => (text, Selector::Only),
        }
    };
    if folder.is_empty() {
        return Err(invalid(
            "the name oci-layout: lacks its folder: oci-layout:DIR:TAG".to_owned(),
        ));
    }
    Ok(Kind::Layout { folder: folder.into(), selector })
}

fn archive(text: &str) -> Result<Kind> {
    let bad = || invalid("the URL of the archive is invalid: use https://HOST/PATH".to_owned());
    let url = Url::parse(text).map_err(|_| bad())?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(invalid("the URL of an archive may hold no user or password".to_owned()));
    }
    Ok(Kind::Archive(url))
}

/// The error for an archive, which has no index.
pub(crate) fn archive_has_no_index() -> Error {
    invalid("an archive has no index: only images of registries and layouts have one".to_owned())
}

/// The error for a part of an image, which has no index.
pub(crate) fn part_has_no_index() -> Error {
    invalid("an index is one of a whole image: leave out #layers or #chain".to_owned())
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests {
    use super::{Kind, OciDigest, Selector, Source};

    fn kind(text: &str) -> Kind {
        Source::parse(text).unwrap().unwrap().0
    }

    #[test]
    fn sources_are_distinguished_from_names() {
        for name in ["debian:12", "/srv/x", "oci:x", "a/b", "s3://x"] {
            assert!(Source::parse(name).is_none(), "{name}");
        }
        let digest = OciDigest::of(b"x");
        for (text, folder, selector) in [
            ("oci-layout:/a/b", "/a/b", Selector::Only),
            ("oci-layout:a:1.2", "a", Selector::Tag("1.2".into())),
            ("oci-layout:/a:b/c", "/a:b/c", Selector::Only),
            (&format!("oci-layout:a@{digest}"), "a", Selector::Digest(digest.clone())),
        ] {
            let Kind::Layout { folder: f, selector: w } = kind(text) else { panic!("{text}") };
            assert_eq!((f.to_str().unwrap(), w), (folder, selector), "{text}");
        }
        assert!(matches!(kind("oci://r.example/a/b:1"), Kind::Registry(_)));
        assert!(matches!(kind("https://h/x.tar"), Kind::Archive(_)));
    }

    #[test]
    fn typos_are_refused_and_secrets_not_repeated() {
        for text in [
            "oci-layout:",
            "oci-layout::x",
            "oci-layout:x@sha256:12",
            "oci://",
            "oci://python",
            "oci://python/x",
            "oci://r.example/",
            "oci://r.example/A",
            "oci://me:hunter2@r.example/x",
            "https://me:hunter2@h/x",
            "https://",
            "oci://r.example/a@sha256:12",
        ] {
            let error = Source::parse(text).unwrap().unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
