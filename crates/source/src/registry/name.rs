use std::fmt;

use burgeon_block::{Error, ErrorKind, Result};
use oci_client::Reference;
use reqwest::Url;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Digest;

/// An image in a registry: `oci://REGISTRY/REPOSITORY[:TAG][@DIGEST]`, or `oci+http://…` where
/// nothing is encrypted. Holds no secret; as text it is what [`Name::parse`] reads.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Name {
    reference: Reference,
    digest: Option<Digest>,
    plain: bool,
}

impl Name {
    /// The name that `text` is; `None` if it does not begin as one.
    pub fn parse(text: &str) -> Option<Result<Self>> {
        if let Some(rest) = text.strip_prefix("oci://") {
            Some(parse(rest, false))
        } else {
            text.strip_prefix("oci+http://").map(|rest| parse(rest, true))
        }
    }

    /// The digest, where it is part of the name.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// The very document `digest` of this repository.
    pub fn at(&self, digest: Digest) -> Self {
        let host = self.reference.registry().to_owned();
        let repository = self.reference.repository().to_owned();
        let reference = Reference::with_digest(host, repository, digest.to_string());
        Self { reference, digest: Some(digest), plain: self.plain }
    }

    /// The image `tag` of the repository that `text` names, if `text` begins as one. `Invalid` if
    /// it names more than that, or `tag` is none.
    pub fn tagged(text: &str, tag: &str) -> Option<Result<Self>> {
        let named = Self::parse(&format!("{}:{tag}", text.trim_end_matches('/')))?;
        let named = named.ok().filter(|name| name.digest.is_none() && name.tag() == tag);
        Some(named.ok_or_else(|| {
            invalid(format!(
                "{tag:?} cannot be a tag of {text}: a repository has no tag of its own, as in \
                 oci://REGISTRY/REPOSITORY, and a tag has letters, digits, _, . and -"
            ))
        }))
    }

    /// The repository.
    pub fn repository(&self) -> &str {
        self.reference.repository()
    }

    /// The registry, as credentials are kept for it.
    pub fn registry(&self) -> &str {
        self.reference.registry()
    }

    /// The tag, which without a digest says what is meant.
    pub fn tag(&self) -> &str {
        self.reference.tag().unwrap_or("latest")
    }

    /// Whether nothing is encrypted.
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    pub(super) fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Where the repository is, with a slash at the end.
    pub(super) fn base(&self) -> Result<Url> {
        let host = self.reference.resolve_registry();
        let scheme = if self.plain { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2/{}/", self.reference.repository());
        Url::parse(&base).map_err(|error| {
            Error::with_source(ErrorKind::Invalid, format!("{host} is no registry"), error)
        })
    }
}

fn parse(text: &str, plain: bool) -> Result<Name> {
    let bad = |why: String| {
        invalid(format!("oci://{text} names no image: {why}: oci://REGISTRY/REPOSITORY:TAG"))
    };
    let host = text.split('/').next().unwrap_or_default();
    if host.contains('@') && !text.contains('/') || text.contains("//") {
        return Err(bad("there is no repository".to_owned()));
    }
    if host.contains('@') {
        // Not shown: it could be a password.
        return Err(invalid("credentials are in no name of an image: use docker login".to_owned()));
    }
    if !host.contains(['.', ':']) && host != "localhost" {
        return Err(bad(format!("{host:?} is no registry, such as docker.io")));
    }
    let reference: Reference = text.parse().map_err(|error| bad(format!("{error}")))?;
    let digest = reference.digest().map(str::parse).transpose()?;
    Ok(Name { plain: plain || is_local(host), reference, digest })
}

/// What never leaves the machine needs no encryption.
fn is_local(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost" || name == "[::1]" || name.starts_with("127.")
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = self.plain && !is_local(self.reference.registry());
        f.write_str(if plain { "oci+http://" } else { "oci://" })?;
        write!(f, "{}", self.reference)
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let name = Self::parse(&text).unwrap_or_else(|| Err(invalid(format!("{text} is no name"))));
        name.map_err(de::Error::custom)
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests {
    use super::{Digest, Name};

    #[test]
    fn names_are_what_they_say_and_are_read_again() {
        let digest = Digest::of(b"x");
        for (text, repository, tag, pinned, plain) in [
            ("oci://r.example/a/b:1", "a/b", "1", None, false),
            ("oci://docker.io/debian", "library/debian", "latest", None, false),
            ("oci://localhost:5000/a", "a", "latest", None, true),
            ("oci+http://r.example/a", "a", "latest", None, true),
            (&format!("oci://r.example/a:1@{digest}"), "a", "1", Some(&digest), false),
        ] {
            let name = Name::parse(text).unwrap().unwrap();
            assert_eq!((name.repository(), name.tag()), (repository, tag), "{text}");
            assert_eq!((name.digest(), name.is_plain()), (pinned, plain), "{text}");
            let at = name.at(Digest::of(b"y"));
            assert_eq!((at.repository(), at.is_plain()), (repository, plain), "{text}");
            for name in [name, at] {
                let again = serde_json::to_value(&name).unwrap();
                assert_eq!(serde_json::from_value::<Name>(again).unwrap(), name, "{text}");
            }
        }
        assert!(Name::parse("s3://x/y").is_none() && Name::parse("a:1").is_none());
    }

    #[test]
    fn names_in_a_repository_are_its_tags() {
        for repository in ["oci://r.example/a/b", "oci://localhost:5000/a/"] {
            let name = Name::tagged(repository, "v1.2_3").unwrap().unwrap();
            assert_eq!(name.tag(), "v1.2_3");
            assert!(repository.contains(name.repository()), "{name}");
        }
        let pinned = format!("oci://r.example/a@{}", Digest::of(b"x"));
        for (repository, tag) in [
            ("oci://r.example/a:1", "2"),
            (&pinned, "2"),
            ("oci://r.example/a", "debian:12"),
            ("oci://r.example/a", "b/c"),
            ("oci://r.example/a", ""),
            ("oci://r.example/a", &format!("1@{}", Digest::of(b"x"))),
        ] {
            let error = Name::tagged(repository, tag).unwrap().unwrap_err();
            assert!(error.to_string().contains("cannot be a tag"), "{repository}, {tag}: {error}");
        }
        assert!(Name::tagged("s3://x/y", "1").is_none());
    }
}
