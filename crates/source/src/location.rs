use std::{
    fmt,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use url::Url;

use crate::registry::Name;

/// The place of a store: a local folder, or a URL. Holds no secret, so it may be printed and
/// stored; [`Location::parse`] reads its text form.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Location {
    /// An absolute path.
    Folder(PathBuf),
    /// A bucket or a web server.
    Remote(RemoteUrl),
    /// One image in a registry, with its digest.
    Registry(Box<Name>),
}

/// The checked URL of a remote store: nothing but scheme, host and path.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RemoteUrl {
    pub(crate) scheme: Scheme,
    /// Without a trailing slash, so that equal stores have equal URLs.
    url: Url,
}

/// The protocol of a remote store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Scheme {
    /// `s3://BUCKET/PREFIX`
    S3,
    /// `gs://BUCKET/PREFIX`
    Gcs,
    /// `az://CONTAINER/PREFIX`
    Azure,
    /// `http://` and `https://`: any server that answers range requests.
    Http,
}

const SCHEMES: &str = "a folder, file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, \
    az://CONTAINER/PREFIX or https://HOST/PATH";

impl Scheme {
    fn of(name: &str) -> Option<Self> {
        Some(match name {
            "s3" => Self::S3,
            "gs" => Self::Gcs,
            "az" => Self::Azure,
            "http" | "https" => Self::Http,
            _ => return None,
        })
    }
}

impl Location {
    /// True for stores whose readers may have credentials of the machine itself.
    pub fn has_ambient_credentials(&self) -> bool {
        matches!(self, Self::Remote(url) if url.scheme != Scheme::Http)
    }

    /// Parses a path, relative to the working directory, or a URL.
    pub fn parse(text: &str) -> Result<Self> {
        if let Some(name) = Name::parse(text) {
            let name = name?;
            if name.digest().is_none() {
                return Err(invalid(format!(
                    "the store {name} has no digest: `burgeon mount {name}` and `burgeon pull {name}` \
                     resolve its tag, `burgeon push NAME {name}` writes there"
                )));
            }
            return Ok(Self::Registry(Box::new(name)));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            // `s3:/bucket` and `https:host` are typos, not folders.
            let scheme = text.split(':').next().unwrap_or_default();
            if text.contains(':') && (scheme == "file" || Scheme::of(scheme).is_some()) {
                return Err(invalid(format!("write {scheme}://… with two slashes")));
            }
            let path = std::path::absolute(text)
                .map_err(|e| Error::io(format!("cannot find the store {text:?}"), e))?;
            return Ok(Self::Folder(path));
        };
        if scheme == "file" {
            return file_url(rest).map(Self::Folder);
        }
        let Some(scheme) = Scheme::of(scheme) else {
            return Err(invalid(format!("unsupported store URL {scheme}://: use {SCHEMES}")));
        };
        RemoteUrl::parse(scheme, text).map(Self::Remote)
    }

    /// True for a bucket of Google's, whose library reads files of its own.
    pub fn is_google(&self) -> bool {
        matches!(self, Self::Remote(url) if url.scheme == Scheme::Gcs)
    }

    /// The folder, if the store is local.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Folder(path) => Some(path),
            Self::Remote(_) | Self::Registry(_) => None,
        }
    }
}

fn file_url(rest: &str) -> Result<PathBuf> {
    let url = Url::parse(&format!("file://{rest}")).ok().filter(|_| rest.starts_with('/'));
    url.filter(|url| url.query().is_none() && url.fragment().is_none())
        .and_then(|url| url.to_file_path().ok())
        .ok_or_else(|| {
            invalid(format!(
                "a file: URL has three slashes, an absolute path, and %23 for # and %3F for ?, as \
                 file:///srv/store; file://{rest} has not"
            ))
        })
}

impl RemoteUrl {
    /// Its host and, if it is not the usual one, its port.
    pub(crate) fn address(&self) -> &str {
        self.url.authority()
    }

    /// True if it is read without TLS.
    pub(crate) fn is_plain_http(&self) -> bool {
        self.url.scheme() == "http"
    }

    /// Errors never show the URL: it may hold a password or a token.
    fn parse(scheme: Scheme, text: &str) -> Result<Self> {
        let mut url = Url::parse(text)
            .map_err(|e| Error::with_source(ErrorKind::Invalid, "the store's URL is invalid", e))?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(invalid(
                "a store's URL holds no user or password, because URLs are shown and written down: \
                 leave out what is before the @",
            ));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(invalid(
                "a store's URL ends with its path, because a query may hold a token: leave out what \
                 comes after ? and #",
            ));
        }
        if url.host_str().is_none_or(str::is_empty) {
            return Err(invalid(format!(
                "the store {url} has no bucket or host after the slashes"
            )));
        }
        if scheme != Scheme::Http && url.port().is_some() {
            return Err(invalid(format!(
                "{url} has a bucket where it has a port: name the server with its variable, such as \
                 AWS_ENDPOINT_URL=http://HOST:PORT, and the bucket here"
            )));
        }
        let path = url.path().trim_matches('/').to_owned();
        if path.split('/').any(|part| matches!(part, "." | ".."))
            || (!path.is_empty() && path.split('/').any(str::is_empty))
        {
            return Err(invalid(format!("{url} has an empty part, . or .. in its path")));
        }
        url.set_path(&path);
        Ok(Self { scheme, url })
    }

    pub(crate) fn bucket(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    /// The decoded path, without slashes at its ends.
    pub(crate) fn prefix(&self) -> Result<object_store::path::Path> {
        object_store::path::Path::from_url_path(self.url.path()).map_err(|e| {
            Error::with_source(ErrorKind::Invalid, format!("{self} is not the URL of a store"), e)
        })
    }
}

impl fmt::Display for RemoteUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.url.as_str().trim_end_matches('/'))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => write!(f, "{}", path.display()),
            Self::Remote(url) => write!(f, "{url}"),
            Self::Registry(name) => write!(f, "{name}"),
        }
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        Self::Folder(path)
    }
}

/// As one string. A path is an absolute one, as in records older than this type.
impl Serialize for Location {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Folder(path) => path.serialize(serializer),
            Self::Remote(url) => serializer.collect_str(url),
            Self::Registry(name) => serializer.collect_str(name),
        }
    }
}

impl<'de> Deserialize<'de> for Location {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.starts_with('/') {
            return Ok(Self::Folder(text.into()));
        }
        Self::parse(&text).map_err(de::Error::custom)
    }
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests {
    use burgeon_block::ErrorKind;

    use super::Location;

    #[test]
    fn locations_parse_and_display() {
        for (text, shown) in [
            ("/srv/store", "/srv/store"),
            ("/srv/a:b", "/srv/a:b"),
            ("file:///srv/a%20b", "/srv/a b"),
            ("s3://bucket", "s3://bucket"),
            ("s3://Bucket_1/a/b/", "s3://Bucket_1/a/b"),
            ("gs://b/p", "gs://b/p"),
            ("az://c/p", "az://c/p"),
            ("https://Host:8443/x/", "https://host:8443/x"),
            ("http://[::1]:80/", "http://[::1]"),
        ] {
            let location = Location::parse(text).unwrap();
            assert_eq!(location.to_string(), shown, "{text}");
            let again: Location = serde_json::from_value(serde_json::json!(shown)).unwrap();
            assert_eq!(again, location, "{text}");
            assert_eq!(serde_json::to_value(&location).unwrap(), shown, "{text}");
        }
        let here = std::env::current_dir().unwrap().join("store");
        assert_eq!(Location::parse("store").unwrap().folder(), Some(&*here));
    }

    #[test]
    fn typos_are_refused_with_a_hint() {
        for (text, hint) in [
            ("s3:/bucket/x", "s3://"),
            ("https:host", "https://"),
            ("file:/x", "file://"),
            ("file://srv/store", "file:///srv/store"),
            ("s4://bucket", "s3://BUCKET"),
            ("S3://bucket", "s3://BUCKET"),
            ("ftp://host/x", "https://HOST"),
            ("s3://", "no bucket"),
            ("s3:///x", "no bucket"),
            ("https://", "invalid"),
            ("s3://host:9000/bucket", "AWS_ENDPOINT_URL"),
            ("s3://bucket/a//b", "empty part"),
        ] {
            let error = Location::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(error.to_string().contains(hint), "{text}: {error}");
        }
    }

    #[test]
    fn secrets_in_a_url_are_refused_and_not_repeated() {
        for text in [
            "https://me:hunter2@host/x",
            "s3://hunter2@bucket/x",
            "https://host/x?sig=hunter2",
            "https://host/x#hunter2",
            "https://me:hunter2@[bad/x",
        ] {
            let error = Location::parse(text).unwrap_err();
            assert!(!error.to_string().contains("hunter2"), "{text}: {error}");
        }
    }
}
