//! Repairs a mount whose server could not use its files.
//!
//! ```text
//!   Attached: refused ─► its files are checked, and damaged ones recreated from the image
//!        ▲                    │
//!        └── a pause, up to PAUSE_MAX ◄── attach again ──► served: done
//! ```
//!
//! Meanwhile every read of data outside the page cache fails with `EIO` at once, and the mount can
//! be unmounted: readers that waited for such a mount would block everything that scans block
//! devices.

use std::{sync::Arc, thread, time::Duration};

use super::{Supervisor, grants, table::Serving};
use crate::{id::MountId, prepare, state::record::MountRecord};

/// The pause after the first try; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause: the user may repair the cause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Time limit for the server's answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);

impl Supervisor {
    /// Starts to repair a mount that cannot be served, unless a thread does so already.
    pub(super) fn mend_if_needed(self: &Arc<Self>, id: MountId) {
        {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return };
            let fails = matches!(entry.serving, Serving::Refusing(_) | Serving::No(_));
            // An unfinished mount fails instead, and a mount that has lost its connection is
            // reconnected.
            if !fails || !entry.handed_out || entry.mending {
                return;
            }
            entry.mending = true;
        }
        let supervisor = Arc::clone(self);
        thread::spawn(move || supervisor.mend(id));
    }

    fn mend(&self, id: MountId) {
        let (mut pause, mut said) = (PAUSE_MIN, String::new());
        while let Some(record) = self.to_mend(id) {
            match prepare::mend(&self.state, &record) {
                Ok(true) => {
                    tracing::warn!(
                        mount = %id,
                        "the files that it is served from were damaged, and have been made again"
                    );
                    // A damaged map names no files.
                    if let Err(e) = self.grant_living(id, grants::of_record(&self.state, &record)) {
                        tracing::error!(mount = %id, error = %e, "cannot grant its files");
                    }
                }
                Ok(false) => {}
                Err(e) if e.to_string() == said => {}
                Err(e) => {
                    said = e.to_string();
                    tracing::error!(mount = %id, error = %said, "cannot make the files again that it is served from");
                }
            }
            self.attach_again(id);
            let table = self.table();
            let fails = |entry: &super::table::MountEntry| {
                matches!(entry.serving, Serving::Refusing(_) | Serving::No(_))
            };
            // Another thread may have reacted meanwhile, or the mount may have ended.
            let waited = self
                .changed
                .wait_timeout_while(table, pause, |table| table.mounts.get(&id).is_some_and(fails));
            drop(waited);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// The record of a mount that still needs repair; `None` ends its thread.
    fn to_mend(&self, id: MountId) -> Option<MountRecord> {
        let mut table = self.table();
        let entry = table.mounts.get_mut(&id)?;
        entry.mending = matches!(entry.serving, Serving::Refusing(_) | Serving::No(_));
        if !entry.mending {
            tracing::info!(mount = %id, "served again");
        }
        entry.mending.then(|| entry.record.clone())
    }

    fn attach_again(&self, id: MountId) {
        let number = {
            let mut table = self.table();
            table.attach(id);
            table.mounts.get(&id).map(|entry| entry.attach_number)
        };
        // If the server dies meanwhile, its successor is told again, under a greater number.
        let waited = self.changed.wait_timeout_while(self.table(), ANSWER_MAX, |table| {
            table.mounts.get(&id).is_some_and(|entry| Some(entry.attach_answered) < number)
        });
        drop(waited);
    }
}
