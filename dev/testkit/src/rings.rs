//! The switch of the whole machine by which the kernel allows FUSE over io_uring.

use std::{fs, path::Path};

use rustix::fs::{FlockOperation, flock};

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The switch in one position, put back when dropped. Tests that need it in different positions
/// wait for each other, also those of other processes.
pub struct FuseRings {
    before: String,
    _lock: fs::File,
}

impl FuseRings {
    /// Allows it, or forbids it. `None` if this kernel has no such switch, so never allows it.
    pub fn set(allowed: bool) -> Option<Self> {
        if !Path::new(SWITCH).exists() {
            println!("this kernel has no FUSE over io_uring: only the fallback can be shown");
            return None;
        }
        let lock = fs::File::open(SWITCH).unwrap_or_else(|e| panic!("{SWITCH}: {e}"));
        flock(&lock, FlockOperation::LockExclusive).unwrap_or_else(|e| panic!("{SWITCH}: {e}"));
        let before = fs::read_to_string(SWITCH).unwrap_or_else(|e| panic!("{SWITCH}: {e}"));
        let text = if allowed { "Y" } else { "N" };
        fs::write(SWITCH, text).unwrap_or_else(|e| panic!("{SWITCH}: {e}"));
        Some(Self { before, _lock: lock })
    }
}

impl Drop for FuseRings {
    fn drop(&mut self) {
        let _ = fs::write(SWITCH, self.before.trim());
    }
}
