//! Releases file systems that only the mount namespaces of this daemon have mounted.
//!
//! The kernel tells a namespace of its own umounts alone, and a descriptor that tells of another
//! namespace's would keep that one, so this thread polls.

use std::{fs, path::PathBuf, thread, time::Duration};

use super::Supervisor;
use crate::host::abandoned::{self, Abandoned};

/// Interval of looks: one reading of two tables of mounts, and of those of all processes only while
/// the daemon has a file system mounted that process 1 does not have.
const INTERVAL: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Runs as long as this process, if `is_copied`, or the server is in a copied namespace.
    pub(super) fn release_abandoned(&self, is_copied: bool) {
        let (mut own, mut others) = (Abandoned::default(), Abandoned::default());
        loop {
            thread::sleep(INTERVAL);
            if is_copied {
                abandoned::release(&mut own, &|| self.needed_paths());
            }
            // An earlier supervisor started this server, so it is in that one's copy of the
            // namespace.
            let server = self.table().server_pid;
            match server.and_then(abandoned::is_elsewhere) {
                Some(true) => server.into_iter().for_each(|server| {
                    abandoned::release_in(server, &mut others, &|| self.needed_paths());
                }),
                Some(false) if !is_copied => return,
                _ => {}
            }
        }
    }

    /// The state directory, its folders, which may be links to other disks, and the mounts' stores.
    fn needed_paths(&self) -> Vec<PathBuf> {
        let state = &self.state;
        let folders = [state.images(), state.profiles(), state.writes(), state.mounts()];
        let own = folders.into_iter().chain([state.root().to_owned(), state.run(), state.store()]);
        let table = self.table();
        let records = table.mounts.values().map(|entry| &entry.record);
        let stores = records.filter_map(|record| record.attach.store.folder().map(PathBuf::from));
        let paths: Vec<_> = own.chain(stores).collect();
        drop(table);
        paths.into_iter().map(|path| fs::canonicalize(&path).unwrap_or(path)).collect()
    }
}
