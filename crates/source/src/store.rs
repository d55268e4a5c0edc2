use std::path::Path;

use burgeon_block::{BlockSource, ByteRange, Collecting, Lease, ObjectId, ObjectStore, Result};
use bytes::Bytes;

use crate::{Access, Directory, Location, RemoteStore, registry::Artifact};

/// A store of any kind. Cheap to clone.
#[derive(Clone, Debug)]
pub enum Store {
    /// A local folder.
    Directory(Directory),
    /// A bucket or a web server.
    Remote(RemoteStore),
    /// One image in a registry.
    Artifact(Artifact),
}

impl Store {
    /// Opens the store at `location`; a folder has to exist. Sends nothing to a remote one.
    pub fn open(location: &Location, access: &Access) -> Result<Self> {
        match location {
            Location::Folder(path) => Directory::open(path).map(Self::Directory),
            Location::Remote(url) => RemoteStore::open(url, access).map(Self::Remote),
            Location::Registry(name) => Artifact::open(name, access).map(Self::Artifact),
        }
    }

    /// Opens the store at `location`; makes a missing folder.
    pub fn create(location: &Location, access: &Access) -> Result<Self> {
        match location {
            Location::Folder(path) => Directory::create(path).map(Self::Directory),
            Location::Remote(_) | Location::Registry(_) => Self::open(location, access),
        }
    }

    /// `Invalid` for web servers and images, which can never be written to.
    pub fn check_writable(&self) -> Result<()> {
        match self {
            Self::Directory(_) => Ok(()),
            Self::Remote(remote) => remote.check_writable(),
            Self::Artifact(artifact) => Err(artifact.read_only()),
        }
    }

    /// Blocking [`BlockSource::read`].
    pub fn read_blocking(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        match self {
            Self::Directory(directory) => directory.read_now(object, range),
            Self::Remote(remote) => remote.read_blocking(object, range),
            Self::Artifact(artifact) => artifact.read_blocking(object, range),
        }
    }
}

impl From<Directory> for Store {
    fn from(directory: Directory) -> Self {
        Self::Directory(directory)
    }
}

impl BlockSource for Store {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        match self {
            Self::Directory(directory) => directory.read(object, range).await,
            Self::Remote(remote) => remote.read(object, range).await,
            Self::Artifact(artifact) => artifact.read(object, range).await,
        }
    }
}

/// Calls the same method of the variant's store.
macro_rules! either {
    ($self:ident, $store:ident => $call:expr) => {
        match $self {
            Store::Directory($store) => $call,
            Store::Remote($store) => $call,
            Store::Artifact($store) => $call,
        }
    };
}

impl ObjectStore for Store {
    fn publish_file(&self, object: &ObjectId, from: &Path) -> Result<()> {
        either!(self, store => store.publish_file(object, from))
    }

    fn publish(&self, object: &ObjectId, bytes: &[u8]) -> Result<()> {
        either!(self, store => store.publish(object, bytes))
    }

    fn get(&self, object: &ObjectId, len_max: u64) -> Result<Bytes> {
        either!(self, store => store.get(object, len_max))
    }

    fn len(&self, object: &ObjectId) -> Result<Option<u64>> {
        either!(self, store => store.len(object))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectId>> {
        either!(self, store => store.list(prefix))
    }

    fn remove(&self, object: &ObjectId) -> Result<()> {
        either!(self, store => store.remove(object))
    }

    fn begin_write(&self) -> Result<Lease> {
        either!(self, store => store.begin_write())
    }

    fn begin_collect(&self) -> Result<Collecting> {
        either!(self, store => store.begin_collect())
    }

    fn begin_count(&self) -> Result<Collecting> {
        either!(self, store => store.begin_count())
    }
}
