//! A mount whose files cannot be used: every read of its data is `EIO` at once, so that no process
//! waits for it and it can be unmounted, until its files have been made again.

use burgeon_block::{BlockDevice, Error, ErrorKind, Now, Result, Shape};
use burgeon_frontend::ublk::Driver;

use crate::state::record::{Attach, Transport};

/// A device without a single readable block.
pub(super) struct Refusing {
    size: u64,
}

/// Larger than any mount: a read within the device must be an error, and never its end, which a
/// loop device takes for zeros.
const SIZE_MAX: u64 = 1 << 62;

impl Refusing {
    /// Replaces the device of `attach`.
    pub(super) fn instead_of(attach: &Attach, driver: &Driver) -> Result<Self> {
        let size = match attach.transport {
            // Must be the size that the driver was told.
            Transport::Ublk { number } => driver.size(number)?,
            Transport::Fuse | Transport::Rings { .. } => SIZE_MAX,
        };
        Ok(Self { size })
    }
}

fn refused() -> Error {
    Error::new(ErrorKind::Corrupt, "the files that this mount is served from cannot be used")
}

impl BlockDevice for Refusing {
    fn shape(&self) -> Shape {
        Shape::read_only(self.size)
    }

    fn try_read(&self, _offset: u64, _buf: &mut [u8]) -> Result<Now> {
        Err(refused())
    }

    async fn read(&self, _offset: u64, _buf: &mut [u8]) -> Result<()> {
        Err(refused())
    }
}
