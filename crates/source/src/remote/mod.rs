//! A remote store: a bucket, or a web server, which is read-only.
//!
//! ```text
//!   fetches of a mount ──► Hedge ──► client, tries once ─────────┐
//!                          (the volume retries)                  ├──► Looking ──► network
//!   commands: get, list, publish ──► client, tries for 30 s ─────┘   checks ranges, counts
//! ```
//!
//! Invariants: a read returns exactly the requested range and never holds more bytes than that in
//! memory; an object appears whole (one PUT); no message contains a secret; every wait has a
//! bound. Objects of a web server are found by name, because it need not list them.

mod connect;
mod errors;
mod hedge;
mod key_files;
mod lease;
mod wire;

use std::{
    fmt, fs, io,
    path::Path as FilePath,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use burgeon_block::{
    BlockSource, ByteRange, Collecting, Error, ErrorKind, Lease, ObjectId, ObjectStore, Result,
};
use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt, stream::BoxStream};
use object_store::{
    GetOptions, GetRange, ObjectStore as Client, ObjectStoreExt, PutPayload, path::Path,
};
use tokio::{sync::Semaphore, time::timeout};

pub use self::key_files::default_file_of_google;
pub use self::wire::Traffic;
use self::{connect::Retries, lease::Leases};
pub(crate) use self::{hedge::Hedge, key_files::named as key_file, wire::check_range};
use crate::{
    Access, check_len,
    location::{RemoteUrl, Scheme},
    waiting,
};

/// Most in-flight reads of one store, hedges apart: twice the in-flight fetches of a volume, so
/// that two busy images share a store without waiting for each other.
pub(crate) const REQUESTS_MAX: usize = 64;

/// Most names read from one listing: a hundred thousand packs hold 3 TiB.
const LIST_MAX: usize = 1_000_000;

/// Most requests without another name: a list can have endless pages without any.
const EMPTY_MAX: u64 = 1000;
/// Interval at which they are counted.
const EMPTY_TICK: Duration = Duration::from_secs(1);

/// A remote store. Cheap to clone.
#[derive(Clone)]
pub struct RemoteStore(Arc<Inner>);

struct Inner {
    url: RemoteUrl,
    /// Prefix of the object names; empty for a web server, whose URL includes it.
    prefix: Path,
    /// Tries once: for fetches of a mount.
    fetching: Arc<dyn Client>,
    /// Retries: for commands.
    calling: Arc<dyn Client>,
    requests: Semaphore,
    hedge: Hedge,
    leases: Leases,
    traffic: Arc<Traffic>,
}

impl RemoteStore {
    /// Opens the store at `url` with the settings in `access`. Sends nothing.
    pub(crate) fn open(url: &RemoteUrl, access: &Access) -> Result<Self> {
        let traffic = Arc::default();
        let prefix = match url.scheme {
            Scheme::Http => Path::default(),
            Scheme::S3 | Scheme::Gcs | Scheme::Azure => url.prefix()?,
        };
        Ok(Self(Arc::new(Inner {
            fetching: connect::client(url, access, Retries::Caller, &traffic)?,
            calling: connect::client(url, access, Retries::Library, &traffic)?,
            url: url.clone(),
            prefix,
            requests: Semaphore::new(REQUESTS_MAX),
            hedge: Hedge::new(),
            leases: Leases::default(),
            traffic,
        })))
    }

    /// Counters of the requests so far.
    pub fn traffic(&self) -> &Traffic {
        &self.0.traffic
    }

    /// `Invalid` for a web server, which cannot be written to.
    pub(crate) fn check_writable(&self) -> Result<()> {
        match self.0.url.scheme {
            Scheme::Http => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the store {} can only be read: write to the folder or bucket behind it",
                    self.0.url
                ),
            )),
            Scheme::S3 | Scheme::Gcs | Scheme::Azure => Ok(()),
        }
    }

    /// Blocking [`BlockSource::read`].
    pub fn read_blocking(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        waiting(self.read(object, range))
    }

    fn path(&self, name: &str) -> Result<Path> {
        let prefix = &self.0.prefix;
        let full = if prefix.is_root() { name.to_owned() } else { format!("{prefix}/{name}") };
        Path::parse(full).map_err(|e| {
            Error::with_source(
                ErrorKind::Invalid,
                format!("{name} is not a valid name of an object in a store"),
                e,
            )
        })
    }

    /// Converts an error of the library: "cannot `verb` `object` of `store`".
    fn failed<'a>(
        &'a self,
        verb: &'a str,
        object: impl std::fmt::Display + 'a,
    ) -> impl Fn(object_store::Error) -> Error + 'a {
        move |error| errors::ours(&self.0.url, &format!("{verb} {object}"), &error)
    }

    async fn fetch(&self, object: &ObjectId, path: &Path, range: ByteRange) -> Result<Bytes> {
        let asked = GetRange::Bounded(range.start()..range.end());
        let options = GetOptions { range: Some(asked), ..GetOptions::default() };
        let answer = self.0.fetching.get_opts(path, options).await;
        let answer = answer.map_err(self.failed("read", object))?;
        let bytes = self.gather(object, answer.into_stream(), range.len()).await?;
        if bytes.len() as u64 == range.len() {
            return Ok(bytes);
        }
        let what = format!(
            "cannot read {object} of {}: the answer broke off after {} of {} bytes",
            self.0.url,
            bytes.len(),
            range.len()
        );
        self.0.traffic.broken.fetch_add(1, Relaxed);
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    /// Reads all of `stream`; an error if it is longer than `len_max` bytes.
    async fn gather(
        &self,
        object: &ObjectId,
        mut stream: BoxStream<'static, object_store::Result<Bytes>>,
        len_max: u64,
    ) -> Result<Bytes> {
        let mut gathered = BytesMut::new();
        while let Some(part) = stream.next().await {
            let part = part.map_err(|e| {
                self.0.traffic.broken.fetch_add(1, Relaxed);
                self.failed("read", object)(e)
            })?;
            if (gathered.len() + part.len()) as u64 > len_max {
                self.0.traffic.lies.fetch_add(1, Relaxed);
                let what = format!("{object} of {} gave more than {len_max} bytes", self.0.url);
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
            gathered.extend_from_slice(&part);
        }
        Ok(gathered.freeze())
    }

    async fn put(&self, object: &ObjectId, bytes: Bytes) -> Result<()> {
        let path = self.path(object.as_str())?;
        let put = self.0.calling.put(&path, PutPayload::from_bytes(bytes)).await;
        put.map(drop).map_err(self.failed("write", object))
    }

    async fn delete(&self, object: &ObjectId) -> Result<()> {
        let path = self.path(object.as_str())?;
        match self.0.calling.delete(&path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("remove", object)(error)),
        }
    }

    /// The next object of a list of `folder`. `Invalid` after many pages without one.
    async fn next_of<T>(
        &self,
        folder: &str,
        listed: &mut (impl Stream<Item = T> + Unpin),
    ) -> Result<Option<T>> {
        let requests = || self.0.traffic.requests.load(Relaxed);
        let before = requests();
        loop {
            match timeout(EMPTY_TICK, listed.next()).await {
                Ok(next) => return Ok(next),
                Err(_) if requests() - before <= EMPTY_MAX => {}
                Err(_) => {
                    let what = format!(
                        "cannot list {folder} of {}: the server gives pages without end, and no \
                         names: check its address",
                        self.0.url
                    );
                    return Err(Error::new(ErrorKind::Invalid, what));
                }
            }
        }
    }

    async fn names(&self, folder: &str) -> Result<Vec<ObjectId>> {
        let path = self.path(folder)?;
        let failed = self.failed("list", folder);
        let objects = match self.0.url.scheme {
            // Web servers that list at all list only one level.
            Scheme::Http => match self.0.calling.list_with_delimiter(Some(&path)).await {
                Ok(listed) => listed.objects,
                Err(object_store::Error::NotFound { .. }) => Vec::new(),
                Err(error) => return Err(failed(error)),
            },
            Scheme::S3 | Scheme::Gcs | Scheme::Azure => {
                let mut listed = self.0.calling.list(Some(&path)).take(LIST_MAX + 1);
                let mut objects = Vec::new();
                while let Some(object) = self.next_of(folder, &mut listed).await? {
                    objects.push(object.map_err(&failed)?);
                }
                objects
            }
        };
        if objects.len() > LIST_MAX {
            let what = format!("{folder} of {} has more than {LIST_MAX} objects", self.0.url);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let mut names = Vec::new();
        for object in objects {
            let full = object.location.as_ref();
            let name = full.strip_prefix(self.0.prefix.as_ref()).unwrap_or(full);
            names.push(ObjectId::new(name.trim_start_matches('/'))?);
        }
        names.sort();
        Ok(names)
    }
}

impl BlockSource for RemoteStore {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        if check_len(object, range)? == 0 {
            return Ok(Bytes::new());
        }
        let path = self.path(object.as_str())?;
        let _place = self.0.requests.acquire().await.map_err(|_| {
            Error::new(ErrorKind::Unavailable, format!("{} is being closed", self.0.url))
        })?;
        let hedged = || {
            self.0.traffic.hedges.fetch_add(1, Relaxed);
        };
        self.0.hedge.ask(|| self.fetch(object, &path, range), hedged).await
    }
}

impl ObjectStore for RemoteStore {
    fn publish_file(&self, object: &ObjectId, from: &FilePath) -> Result<()> {
        let failed = |verb: &'static str| {
            move |e: io::Error| Error::io(format!("cannot {verb} {}", from.display()), e)
        };
        let bytes = fs::read(from).map_err(failed("read"))?;
        self.publish_bytes(object, bytes.into())?;
        fs::remove_file(from).map_err(failed("remove"))
    }

    fn publish(&self, object: &ObjectId, bytes: &[u8]) -> Result<()> {
        self.publish_bytes(object, Bytes::copy_from_slice(bytes))
    }

    fn get(&self, object: &ObjectId, len_max: u64) -> Result<Bytes> {
        waiting(async {
            let path = self.path(object.as_str())?;
            let mut options = GetOptions::default();
            options.extensions.insert(wire::LenMax(len_max));
            let answer = self.0.calling.get_opts(&path, options).await;
            let answer = answer.map_err(self.failed("read", object))?;
            let len = answer.meta.size;
            if len > len_max {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!(
                        "{object} of {} has {len} bytes, more than the {len_max} allowed",
                        self.0.url
                    ),
                ));
            }
            let bytes = self.gather(object, answer.into_stream(), len).await?;
            if bytes.len() as u64 == len {
                return Ok(bytes);
            }
            let what = format!("{object} of {} ended after {} bytes", self.0.url, bytes.len());
            Err(Error::new(ErrorKind::Unavailable, format!("{what}, {len} were promised")))
        })
    }

    fn len(&self, object: &ObjectId) -> Result<Option<u64>> {
        waiting(async {
            let path = self.path(object.as_str())?;
            match self.0.calling.head(&path).await {
                Ok(meta) => Ok(Some(meta.size)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(self.failed("look at", object)(error)),
            }
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectId>> {
        waiting(self.names(prefix.trim_end_matches('/')))
    }

    fn remove(&self, object: &ObjectId) -> Result<()> {
        self.check_writable()?;
        self.0.leases.check(&self.0.url)?;
        waiting(self.delete(object))
    }

    fn begin_write(&self) -> Result<Lease> {
        self.check_writable()?;
        lease::begin_write(self)
    }

    fn begin_collect(&self) -> Result<Collecting> {
        self.check_writable()?;
        lease::begin_collect(self)
    }
}

impl RemoteStore {
    fn publish_bytes(&self, object: &ObjectId, bytes: Bytes) -> Result<()> {
        self.check_writable()?;
        self.0.leases.check(&self.0.url)?;
        waiting(self.put(object, bytes))
    }
}

/// Not derived: the library's clients would show credentials.
impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RemoteStore").field(&self.0.url).finish()
    }
}
