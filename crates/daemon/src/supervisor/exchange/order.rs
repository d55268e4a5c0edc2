//! The order of the steps that replace the FUSE file below a mounted file system.
//!
//! ```text
//!   fail the old requests ─► pin ─► freeze ─► LOOP_CHANGE_FD ─► thaw ─► unpin
//! ```
//!
//! `LOOP_CHANGE_FD` locks the loop device, then waits for the superblock's `s_umount`, and no
//! signal ends that wait (v6.18: `loop_change_fd`, `bdev_mark_dead`, `super_lock`). If the holder
//! of `s_umount` never finishes, every later open of the loop device hangs, too. Two holders may
//! take that long:
//!
//! - An umount of the file system, by whomever. A pinned file system has an active reference, so
//!   its umount cannot begin; one whose umount has begun cannot be pinned.
//! - A killed process that waits for a request on the old connection, such as a thaw that reads a
//!   superblock. Those requests are failed first.
//!
//! `tests/exchange.rs` runs these steps against a model of those locks, in many orders.

use burgeon_block::Result;

/// A mounted file system on a loop device.
pub(crate) trait Mounted {
    /// A reference that keeps the file system from being released until it is dropped.
    type Pin;

    /// Fails all requests that wait for the FUSE file that is below the loop device now.
    fn fail_old_requests(&self) -> Result<()>;

    /// Pins the file system; an error if the kernel releases it, or has released it.
    fn pin(&self) -> Result<Self::Pin>;

    /// Writes back all data and accepts no writes, if the file system is writable.
    fn freeze(&self, pin: &Self::Pin) -> Result<()>;

    /// Replaces the file below the loop device.
    fn change_file(&self) -> Result<()>;

    /// Accepts writes again.
    fn thaw(&self, pin: &Self::Pin);
}

/// Replaces the file below the loop device of `mounted`.
pub(crate) fn exchange(mounted: &impl Mounted) -> Result<()> {
    mounted.fail_old_requests()?;
    let pin = mounted.pin()?;
    mounted.freeze(&pin)?;
    let changed = mounted.change_file();
    mounted.thaw(&pin);
    drop(pin);
    changed
}
