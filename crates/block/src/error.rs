use std::{error, fmt, io};

/// Error kinds, by what the caller can do; each maps to one errno.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ErrorKind {
    /// The request or the input is invalid: correct it. `EINVAL`.
    Invalid,
    /// The named object does not exist. `ENOENT`.
    NotFound,
    /// The source cannot be reached now: a retry may help. `EIO` after the deadline.
    Unavailable,
    /// Bytes do not match their digest or checksum: read them from another source. `EIO`.
    Corrupt,
    /// No space: free some, then continue. `ENOSPC`.
    NoSpace,
    /// Made by a version this one does not know: upgrade. `EOPNOTSUPP`.
    UnsupportedFormat,
    /// A local file failed: no further write to it is safe. `EIO`.
    LocalIo,
    /// The address was never mapped: only a read outside the data reaches it. `EIO`.
    Unmapped,
    /// The mount has fetched as much as it may: raise its limit. `EIO`.
    OverLimit,
}

impl ErrorKind {
    /// All of them, with their names in messages to other processes and in JSON.
    pub const ALL: [(Self, &str); 9] = [
        (Self::Invalid, "invalid"),
        (Self::NotFound, "not-found"),
        (Self::Unavailable, "unavailable"),
        (Self::Corrupt, "corrupt"),
        (Self::NoSpace, "no-space"),
        (Self::UnsupportedFormat, "unsupported-format"),
        (Self::LocalIo, "local-io"),
        (Self::Unmapped, "unmapped"),
        (Self::OverLimit, "over-limit"),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("local-io", |(_, name)| name)
    }

    /// The kind of this name; `LocalIo` for one that a later version has added.
    pub fn from_name(name: &str) -> Self {
        Self::ALL.iter().find(|(_, known)| *known == name).map_or(Self::LocalIo, |(kind, _)| *kind)
    }
}

/// The error of every Burgeon crate: its kind, the operation and its object, and the cause.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    source: Option<Box<dyn error::Error + Send + Sync>>,
}

/// A result with Burgeon's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error without a deeper cause. `what` names the object, the cause and the remedy.
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), source: None }
    }

    /// [`Self::new`] with the error that caused it.
    pub fn with_source(
        kind: ErrorKind,
        what: impl Into<String>,
        source: impl Into<Box<dyn error::Error + Send + Sync>>,
    ) -> Self {
        Self { kind, what: what.into(), source: Some(source.into()) }
    }

    /// A local I/O error, whose kind follows from the operating system's; `what` names the
    /// operation and the file.
    pub fn io(what: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            io::ErrorKind::InvalidInput => ErrorKind::Invalid,
            _ => ErrorKind::LocalIo,
        };
        Self::with_source(kind, what, source)
    }

    /// The cause of type `T`, at any depth.
    pub fn cause<T: error::Error + 'static>(&self) -> Option<&T> {
        let mut error = self;
        loop {
            let source = error.source.as_deref()?;
            match source.downcast_ref::<T>() {
                Some(cause) => return Some(cause),
                None => error = source.downcast_ref::<Self>()?,
            }
        }
    }

    /// The kind, which tells the caller what to do.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The positive errno that a reader of the file gets.
    pub fn errno(&self) -> i32 {
        match self.kind {
            ErrorKind::Invalid => libc::EINVAL,
            ErrorKind::NotFound => libc::ENOENT,
            ErrorKind::NoSpace => libc::ENOSPC,
            ErrorKind::UnsupportedFormat => libc::EOPNOTSUPP,
            ErrorKind::Unavailable
            | ErrorKind::Corrupt
            | ErrorKind::LocalIo
            | ErrorKind::Unmapped
            | ErrorKind::OverLimit => libc::EIO,
        }
    }
}

impl fmt::Display for Error {
    /// Prints the whole chain on one line, so that a user sees the cause.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

// `source()` stays `None`: `Display` already prints the chain, and a reporter that walks it
// would print every cause twice.
impl error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::{Error, ErrorKind};

    #[test]
    fn a_kind_comes_back_from_its_name() {
        for (kind, name) in ErrorKind::ALL {
            assert_eq!((kind.name(), ErrorKind::from_name(name)), (name, kind));
        }
        assert_eq!(ErrorKind::from_name("later"), ErrorKind::LocalIo);
    }

    #[test]
    fn a_cause_is_found_however_deep_it_lies() {
        let deep = Error::io("cannot read", std::io::Error::other("x"));
        let outer =
            Error::with_source(ErrorKind::Invalid, "a", Error::new(ErrorKind::Invalid, "b"));
        assert!(outer.cause::<std::io::Error>().is_none());
        let outer = Error::with_source(ErrorKind::Invalid, "a", deep);
        assert!(outer.cause::<std::io::Error>().is_some());
    }

    #[test]
    fn a_full_disk_is_no_space_and_says_where() {
        let full = std::io::Error::from_raw_os_error(libc::ENOSPC);
        let error = Error::io("cannot write /cache", full);
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.errno(), libc::ENOSPC);
        assert!(error.to_string().starts_with("cannot write /cache: No space"));
    }
}
