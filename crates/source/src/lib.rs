//! Where bytes come from.
//!
//! ```text
//!   packs/ab12…, manifests/…   ──► Store       Directory: a folder; can be published to
//!                                              Remote: a bucket (as well), a web server (read)
//!                                              Artifact: an image of ours in a registry (read)
//!   blobs of an image          ──► Registry    by digest, whole or ranges
//!   file/srv/disk.img          ──► Reference   a file or block device, read with O_DIRECT
//!   computed/block-number      ──► Computed    made up on the spot: the floor for measuring
//!   derived/ab12…              ──► Derived     unpacked from the layers of an ordinary image
//! ```
//!
//! A [`Location`] says where a store is, an [`Access`] what it takes to use it; [`Objects`] picks
//! by the object's name and is what a mounted image reads from. Invariants: what comes back is
//! exactly the range asked for or an error; nothing is verified here; a name cannot leave its
//! folder; no object outside the store is opened unless the caller allowed it.

mod access;
pub mod beneath;
mod body;
mod computed;
mod derived;
mod directory;
mod location;
mod partial;
mod reference;
pub mod registry;
mod remote;
mod store;
pub mod web;

use std::{future::Future, sync::OnceLock};

use std::sync::Arc;

use burgeon_block::{
    BlockSource, ByteRange, Error, ErrorKind, FileIdentity, ObjectId, ObjectKind, Result,
};
use bytes::Bytes;
use tokio::runtime::Runtime;

pub use access::Access;
pub use computed::Computed;
pub use derived::{LayersAt, derived_object, held_object, layer_object, origin_object};
pub use directory::Directory;
pub use location::{Location, RemoteUrl};
pub use partial::Partial;
pub use reference::Reference;
pub use remote::{Remote, Traffic, choose_cryptography};
pub use store::Store;

/// Longest range that one read may ask for: 64 MiB. A chunk is at most 256 KiB; this is room for
/// fetching neighbours together, and a limit for what a hostile table can make us allocate.
pub const READ_MAX: u64 = 64 << 20;

/// Whether objects outside the store (`file/…`, `derived/…`) may be opened. A manifest from a store
/// that others can write to could otherwise name any file of this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum References {
    /// Refuse them.
    Refuse,
    /// Open them.
    Allow,
}

/// Everything an image's objects can be in: its store and, if allowed, what lies outside.
#[derive(Clone, Debug)]
pub struct Objects {
    store: Store,
    references: References,
    files: Reference,
    derived: Arc<derived::Derived>,
}

impl Objects {
    /// Objects of `store`, and those outside it as `references` says.
    pub fn new(store: impl Into<Store>, references: References) -> Self {
        let store: Store = store.into();
        let derived = Arc::new(derived::Derived::new(store.clone(), Access::default()));
        Self { store, references, files: Reference::new(), derived }
    }

    /// The same, which reads layers in registries with what `access` holds.
    pub fn with_access(self, access: &Access) -> Self {
        let derived = Arc::new(derived::Derived::new(self.store.clone(), access.clone()));
        Self { derived, ..self }
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What [`BlockSource::read`] gives, waiting in this thread.
    pub fn read_blocking(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        self.check_reference(object)?;
        match object.kind() {
            Some(ObjectKind::Computed) => Computed.bytes(object, range),
            Some(ObjectKind::Derived) => waiting(self.derived.read(object, range)),
            Some(ObjectKind::File) => self.files.read_now(object, range),
            _ => self.store.read_blocking(object, range),
        }
    }

    fn check_reference(&self, object: &ObjectId) -> Result<()> {
        match self.references {
            References::Refuse if object.is_outside_store() => Err(Error::new(
                ErrorKind::Invalid,
                format!("the image refers to {object}, outside its store, which is not allowed"),
            )),
            _ => Ok(()),
        }
    }
}

impl BlockSource for Objects {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        self.check_reference(object)?;
        match object.kind() {
            Some(ObjectKind::Computed) => Computed.read(object, range).await,
            Some(ObjectKind::Derived) => self.derived.read(object, range).await,
            Some(ObjectKind::File) => self.files.read(object, range).await,
            _ => self.store.read(object, range).await,
        }
    }

    async fn read_identified(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<(FileIdentity, Bytes)> {
        // No reference of an image: the user of this machine has named this file.
        self.files.read_identified(object, range).await
    }

    fn read_now(&self, object: &ObjectId, range: ByteRange, buf: &mut [u8]) -> Option<Result<()>> {
        match object.is(ObjectKind::Computed) {
            true => Computed.read_now(object, range, buf),
            false => None,
        }
    }

    fn bytes_to_fetch(&self, object: &ObjectId, range: ByteRange) -> u64 {
        match object.is(ObjectKind::Derived) {
            true => self.derived.bytes_to_fetch(object, range),
            false => range.len(),
        }
    }

    fn refuted(&self, object: &ObjectId, range: ByteRange) {
        self.derived.refuted(object, range);
    }
}

/// Refuses ranges longer than [`READ_MAX`].
fn check_len(object: &ObjectId, range: ByteRange) -> Result<usize> {
    if range.len() > READ_MAX {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{range} of {object} is more than {READ_MAX} bytes at once"),
        ));
    }
    Ok(range.len() as usize)
}

fn too_short(object: &ObjectId, range: ByteRange) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{object} ends before the end of {range}: truncated?"))
}

/// Runs `work`, which waits for a disk, where waiting does not stop other fetches.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(failed) => {
            Err(Error::with_source(ErrorKind::Unavailable, "a read was abandoned", failed))
        }
    }
}

/// Where commands wait for the network: one thread, made when first needed. A mount's server
/// reads chunks on its own runtime; only a profile is fetched here, in a thread of its own.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let builder =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        builder.expect("a thread and an epoll descriptor can be made")
    })
}

/// What `work` gives, waiting for it in this thread.
pub fn waiting<T>(work: impl Future<Output = T>) -> T {
    runtime().block_on(work)
}
