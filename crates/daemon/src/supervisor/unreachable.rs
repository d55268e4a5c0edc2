//! Ends an idle daemon whose state directory no command can reach any more, because it was removed,
//! renamed or unmounted, or because its mount namespace has ended. Otherwise the daemon would stay
//! until the machine stops, and keep the file system.

use std::{fs, thread, time::Duration};

use super::Supervisor;
use crate::host::abandoned;

/// Interval of looks. Two in a row have to find the same.
const INTERVAL: Duration = Duration::from_secs(5);

impl Supervisor {
    /// Looks for ever. `is_copied`: this process has a mount namespace of its own.
    pub(super) fn end_when_unreachable(&self, is_copied: bool) -> ! {
        let mut before = false;
        loop {
            thread::sleep(INTERVAL);
            let is_idle = self.table().mounts.is_empty();
            let now = is_idle && self.is_unreachable(is_copied);
            if before && now && self.try_stop(false).is_ok() {
                let state = self.state.root().display();
                tracing::info!(%state, "ending: the state directory is out of reach");
                self.end();
            }
            before = now;
        }
    }

    fn is_unreachable(&self, is_copied: bool) -> bool {
        if !self.lock.is_at(&self.state.lock_file()) {
            return true;
        }
        let root = fs::canonicalize(self.state.root());
        is_copied && root.is_ok_and(|root| abandoned::is_mounted_here_alone(&root))
    }
}
