//! An engine's access to its device: read-only or writable. A type decides this where the device is
//! served, so the engine of a read-only device has no code for changes.

use burgeon_block::{
    BlockDevice, ByteRange, Erase, Error, ErrorKind, Result, WritableDevice, WriteCache,
};

/// The changes that an engine can make to its device.
pub(crate) trait Changes<D>: Send + Sync + 'static {
    const WRITABLE: bool;

    fn write(
        device: &D,
        offset: u64,
        bytes: &[u8],
        fua: bool,
    ) -> impl Future<Output = Result<()>> + Send;

    fn erase(device: &D, range: ByteRange, how: Erase) -> impl Future<Output = Result<()>> + Send;

    fn flush(device: &D) -> impl Future<Output = Result<()>> + Send;
}

/// No changes: the engine refuses them with EROFS.
pub(crate) enum ReadOnly {}

fn refused() -> Error {
    Error::new(ErrorKind::Invalid, "the device is read-only")
}

impl<D: BlockDevice> Changes<D> for ReadOnly {
    const WRITABLE: bool = false;

    async fn write(_device: &D, _offset: u64, _bytes: &[u8], _fua: bool) -> Result<()> {
        Err(refused())
    }

    async fn erase(_device: &D, _range: ByteRange, _how: Erase) -> Result<()> {
        Err(refused())
    }

    async fn flush(_device: &D) -> Result<()> {
        Ok(())
    }
}

/// All changes of a [`WritableDevice`].
pub(crate) enum Writable {}

impl<D: WritableDevice> Changes<D> for Writable {
    const WRITABLE: bool = true;

    async fn write(device: &D, offset: u64, bytes: &[u8], fua: bool) -> Result<()> {
        device.write(offset, bytes, fua).await
    }

    async fn erase(device: &D, range: ByteRange, how: Erase) -> Result<()> {
        device.erase(range, how).await
    }

    async fn flush(device: &D) -> Result<()> {
        match device.shape().cache {
            WriteCache::Volatile => device.flush().await,
            // A write was durable when it returned.
            WriteCache::ReadOnly | WriteCache::Through => Ok(()),
        }
    }
}
