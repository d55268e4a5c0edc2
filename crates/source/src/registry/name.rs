use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use burgeon_block::{Error, ErrorKind, Result};
use reqwest::Url;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::OciDigest;

/// Longest repository name and longest tag, in bytes.
const REPOSITORY_MAX: usize = 255;
const TAG_MAX: usize = 128;

/// An image in a registry: `oci://REGISTRY/REPOSITORY[:TAG][@DIGEST]`, or `oci+http://…` for an
/// unencrypted connection. Holds no secret; [`Name::parse`] reads its text form.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Name {
    registry: String,
    repository: String,
    /// `None` if only the digest identifies the image.
    tag: Option<String>,
    digest: Option<OciDigest>,
    plain: bool,
}

impl Name {
    /// Parses `text`; `None` if it has neither scheme.
    pub fn parse(text: &str) -> Option<Result<Self>> {
        if let Some(rest) = text.strip_prefix("oci://") {
            Some(parse(rest, false))
        } else {
            text.strip_prefix("oci+http://").map(|rest| parse(rest, true))
        }
    }

    /// The digest, if the name has one.
    pub fn digest(&self) -> Option<&OciDigest> {
        self.digest.as_ref()
    }

    /// The document `digest` in this repository.
    pub fn at(&self, digest: OciDigest) -> Self {
        Self { tag: None, digest: Some(digest), ..self.clone() }
    }

    /// The image `tag` in the repository `text`; `None` if `text` has neither scheme. `Invalid` if
    /// `text` is more than a repository, or `tag` is not a valid tag.
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
        &self.repository
    }

    /// The registry, as credential stores key it.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The tag, which identifies the image if there is no digest.
    pub fn tag(&self) -> &str {
        self.tag.as_deref().unwrap_or("latest")
    }

    /// The tag; `None` if only the digest identifies the image.
    pub fn tag_if_any(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// True if the connection is unencrypted.
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    /// True if the registry is on this machine.
    pub(super) fn is_local(&self) -> bool {
        is_local(&self.registry)
    }

    /// The same image at another registry, `host`, which may have a port.
    pub(super) fn served_by(&self, host: &str, plain: bool) -> Option<Self> {
        let host = match host {
            "docker.io" | "index.docker.io" | "registry-1.docker.io" => "docker.io",
            host => host,
        };
        is_host(host).then(|| Self { registry: host.to_owned(), plain, ..self.clone() })
    }

    /// The repository's URL, with a trailing slash.
    pub(super) fn base(&self) -> Result<Url> {
        let host = match &*self.registry {
            "docker.io" => "index.docker.io",
            registry => registry,
        };
        let scheme = if self.plain { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2/{}/", self.repository);
        Url::parse(&base).map_err(|error| {
            Error::with_source(ErrorKind::Invalid, format!("{host} is not a registry"), error)
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
        // Not quoted: it could be a password.
        return Err(invalid("an image's name holds no credentials: use docker login".to_owned()));
    }
    if !host.contains(['.', ':']) && host != "localhost" {
        return Err(bad(format!("{host:?} is not a registry, such as docker.io")));
    }
    if text.contains(['?', '#']) {
        // Not quoted: it could be a token.
        return Err(invalid(
            "an image's name in a registry has no ? and no #: oci://REGISTRY/REPOSITORY:TAG"
                .to_owned(),
        ));
    }
    let (name, digest) = match text.split_once('@') {
        Some((name, digest)) => (name, Some(digest.parse::<OciDigest>()?)),
        None => (text, None),
    };
    let Some((_, path)) = name.split_once('/') else {
        return Err(bad("there is no repository".to_owned()));
    };
    let (path, tag) = match path.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (path, None),
    };
    if !is_host(host) {
        return Err(bad(format!("{host:?} is not the name of a host")));
    }
    if !is_repository(path) {
        return Err(bad(format!(
            "{path:?} is not a repository: those have lower-case letters and digits, with ., _, \
             __ or - between them"
        )));
    }
    if let Some(tag) = tag.filter(|tag| !is_tag(tag)) {
        return Err(bad(format!("{tag:?} is not a tag: those have letters, digits, _, . and -")));
    }
    // Short names on Docker Hub omit `library/`.
    let (host, path) = match host {
        "docker.io" | "index.docker.io" if path.contains('/') => ("docker.io", path.to_owned()),
        "docker.io" | "index.docker.io" => ("docker.io", format!("library/{path}")),
        _ => (host, path.to_owned()),
    };
    if path.len() > REPOSITORY_MAX {
        return Err(bad(format!("the repository's name is longer than {REPOSITORY_MAX}")));
    }
    let latest = digest.is_none().then_some("latest");
    Ok(Name {
        plain: plain || is_local(host),
        registry: host.to_owned(),
        repository: path,
        tag: tag.or(latest).map(str::to_owned),
        digest,
    })
}

// Grammar: the OCI distribution specification. A regular expression for it would take tens of
// milliseconds and megabytes to compile, in the command and again in the server.

/// True if `host` is an address or labels separated by dots, with an optional port.
fn is_host(host: &str) -> bool {
    let (name, port) = split_port(host);
    let port = port.unwrap_or("0");
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if name.starts_with('[') {
        return is_port && bracketed(name).is_some();
    }
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = |label: &str| {
        label.bytes().all(is_inner)
            && !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.split('.').all(is_label) && is_port
}

/// Splits `host` into its name or address and its port.
fn split_port(host: &str) -> (&str, Option<&str>) {
    let name_len = host.find(']').map_or(0, |end| end + 1);
    match host[name_len..].find(':') {
        Some(colon) => (&host[..name_len + colon], Some(&host[name_len + colon + 1..])),
        None => (host, None),
    }
}

/// The IPv6 address in `[…]`.
fn bracketed(name: &str) -> Option<Ipv6Addr> {
    name.strip_prefix('[')?.strip_suffix(']')?.parse().ok()
}

fn is_repository(path: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_part = |part: &str| {
        let between = part.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        let ends = [part.bytes().next(), part.bytes().last()];
        ends.into_iter().all(|end| end.is_some_and(is_word))
            && between.into_iter().all(|separator| {
                matches!(separator, "" | "." | "_" | "__")
                    || separator.bytes().all(|byte| byte == b'-')
            })
    };
    path.split('/').all(is_part)
}

fn is_tag(tag: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut bytes = tag.bytes();
    tag.len() <= TAG_MAX
        && bytes.next().is_some_and(is_word)
        && bytes.all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
}

/// True if `host`, with its port, is this machine: traffic that stays on it needs no encryption.
fn is_local(host: &str) -> bool {
    is_loopback(split_port(host).0)
}

/// True if `name`, without a port, is `localhost` or a loopback address. A name that only begins
/// like an address, such as `127.example.org`, is not.
pub(super) fn is_loopback(name: &str) -> bool {
    name == "localhost"
        || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
        || bracketed(name).is_some_and(|address| address.is_loopback())
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.plain && !self.is_local() { "oci+http://" } else { "oci://" })?;
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
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
        let name =
            Self::parse(&text).unwrap_or_else(|| Err(invalid(format!("{text} is not a name"))));
        name.map_err(de::Error::custom)
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests {
    use oci_spec::distribution::Reference;

    use super::{Name, OciDigest, REPOSITORY_MAX, TAG_MAX};

    #[test]
    fn names_parse_and_round_trip() {
        let digest = OciDigest::of(b"x");
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
            let at = name.at(OciDigest::of(b"y"));
            assert_eq!((at.repository(), at.is_plain()), (repository, plain), "{text}");
            for name in [name, at] {
                let again = serde_json::to_value(&name).unwrap();
                assert_eq!(serde_json::from_value::<Name>(again).unwrap(), name, "{text}");
            }
        }
        assert!(Name::parse("s3://x/y").is_none() && Name::parse("a:1").is_none());
    }

    #[test]
    fn only_an_address_of_the_loopback_device_is_local() {
        for (host, local) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("127.0.0.1", true),
            ("127.255.0.9:5000", true),
            ("[::1]:5000", true),
            ("127.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("127.1", false),
            ("localhost.evil.example", false),
            ("evil.localhost", false),
            ("128.0.0.1", false),
            ("[::2]:5000", false),
            ("r.example", false),
        ] {
            let text = format!("oci://{host}/a");
            let name = Name::parse(&text).unwrap().unwrap();
            assert_eq!((name.is_plain(), name.is_local()), (local, local), "{text}");
            assert_eq!(name.base().unwrap().scheme() == "http", local, "{text}");
            let again = serde_json::to_value(&name).unwrap();
            assert_eq!(serde_json::from_value::<Name>(again).unwrap(), name, "{text}");
        }
        for none in ["[::1", "::1", "[::1]x", "[x]", "[::1]:", "[::1]:x"] {
            assert!(Name::parse(&format!("oci://{none}/a")).unwrap().is_err(), "{none}");
        }
    }

    /// Compares this parser with the one of `oci-spec`.
    #[test]
    fn names_parse_as_in_oci_spec() {
        const WORDS: [&str; 24] = [
            "a",
            "B",
            "0",
            ".",
            "..",
            "_",
            "__",
            "___",
            "-",
            "--",
            "/",
            "/",
            "/",
            ":",
            ":",
            "@",
            "é",
            "5000",
            "docker.io",
            "index.docker.io",
            "r.example",
            "r-x.example",
            "latest",
            "sha256:",
        ];
        let digest = OciDigest::of(b"x").to_string();
        let mut rng = testkit::Rng::new(1);
        let (mut names, mut others) = (0, 0);
        for _ in 0..100_000 {
            let mut text = ["r.example/", "r.example:5000/", "docker.io/", "localhost/", ""]
                [rng.below(5) as usize]
                .to_owned();
            for _ in 0..rng.below(7) {
                text.push_str(WORDS[rng.below(WORDS.len() as u64) as usize]);
            }
            if rng.below(4) == 0 {
                text.extend(["@", &digest]);
            }
            // This parser refuses more than the library: names without a host, hosts such as
            // r_x.example, and tags in other scripts.
            let host = text.split('/').next().unwrap_or_default();
            let has_host = text.contains('/')
                && (host.contains(['.', ':']) || host == "localhost")
                && super::is_host(host);
            if !has_host || text.contains('é') {
                assert!(super::parse(&text, false).is_err(), "{text}");
                continue;
            }
            let theirs: Option<Reference> = text.parse().ok();
            let theirs = theirs.map(|theirs| theirs.to_string());
            let ours = super::parse(&text, false).ok().map(|name| name.to_string());
            let ours = ours.as_deref().and_then(|ours| ours.strip_prefix("oci://"));
            assert_eq!(ours, theirs.as_deref(), "{text}");
            *if ours.is_some() { &mut names } else { &mut others } += 1;
        }
        assert!(names > 5_000 && others > 10_000, "{names}, {others}");
        for (len, is_name) in [(TAG_MAX, true), (TAG_MAX + 1, false)] {
            let text = format!("r.example/a:{}", "x".repeat(len));
            assert_eq!(super::parse(&text, false).is_ok(), is_name);
            assert_eq!(text.parse::<Reference>().is_ok(), is_name);
        }
        for (len, is_name) in [(REPOSITORY_MAX, true), (REPOSITORY_MAX + 1, false)] {
            let text = format!("r.example/{}", "x".repeat(len));
            assert_eq!(super::parse(&text, false).is_ok(), is_name);
            assert_eq!(text.parse::<Reference>().is_ok(), is_name);
        }
    }

    #[test]
    fn tagged_accepts_only_a_repository_and_a_tag() {
        for repository in ["oci://r.example/a/b", "oci://localhost:5000/a/"] {
            let name = Name::tagged(repository, "v1.2_3").unwrap().unwrap();
            assert_eq!(name.tag(), "v1.2_3");
            assert!(repository.contains(name.repository()), "{name}");
        }
        let pinned = format!("oci://r.example/a@{}", OciDigest::of(b"x"));
        for (repository, tag) in [
            ("oci://r.example/a:1", "2"),
            (&pinned, "2"),
            ("oci://r.example/a", "debian:12"),
            ("oci://r.example/a", "b/c"),
            ("oci://r.example/a", ""),
            ("oci://r.example/a", &format!("1@{}", OciDigest::of(b"x"))),
        ] {
            let error = Name::tagged(repository, tag).unwrap().unwrap_err();
            assert!(error.to_string().contains("cannot be a tag"), "{repository}, {tag}: {error}");
        }
        assert!(Name::tagged("s3://x/y", "1").is_none());
    }
}
