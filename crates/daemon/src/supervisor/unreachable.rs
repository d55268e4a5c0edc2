//! Ends an idle daemon whose state directory no command can reach any more, because it was removed,
//! renamed or unmounted, or because its mount namespace has ended. Otherwise the daemon would stay
//! until the machine stops, and keep the file system. A daemon whose socket alone was removed makes
//! it again: no command could reach it, and no other daemon could begin.

use std::{fs, io, sync::Arc, thread, time::Duration};

use super::{Supervisor, bind};
use crate::{host::abandoned, ipc::client::API};

/// Interval of looks. Two in a row have to find the same.
const INTERVAL: Duration = Duration::from_secs(5);

impl Supervisor {
    /// Looks for ever. `is_copied`: this process has a mount namespace of its own.
    pub(super) fn end_when_unreachable(self: &Arc<Self>, is_copied: bool) -> ! {
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
            if !now {
                self.keep_socket();
            }
        }
    }

    /// Listens at a new socket if there is none.
    fn keep_socket(self: &Arc<Self>) {
        let path = self.state.run().join(API);
        let looked = path.symlink_metadata();
        let is_gone = looked.is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if !is_gone || !self.lock.is_at(&self.state.lock_file()) {
            return;
        }
        match bind(&self.state) {
            Ok(socket) => {
                tracing::warn!("the daemon's socket was removed, and has been made again");
                let supervisor = Arc::clone(self);
                thread::spawn(move || supervisor.accept(&socket));
            }
            Err(error) => tracing::error!(%error, "the daemon's socket was removed"),
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
