//! Serves a mount again whose server could not use its files.
//!
//! ```text
//!   Attached: refused ─► its files are checked, and made again from the image where they are damaged
//!        ▲                    │
//!        └── a pause, up to PAUSE_MAX ◄── attach again ──► served: done
//! ```
//!
//! Meanwhile every read of data that is not in the page cache is `EIO` at once, and the mount can be
//! unmounted: whoever waits for such a mount would hold up everything that scans block devices.

use std::{sync::Arc, thread, time::Duration};

use super::{Supervisor, table::Serving};
use crate::{id::MountId, prepare, state::record::MountRecord};

/// The pause after the first try; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest: what was wrong may be put right by somebody.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long the server may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);

impl Supervisor {
    /// Begins to look after a mount that cannot be served, unless that is done already.
    pub(super) fn mend_if_needed(self: &Arc<Self>, id: MountId) {
        {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return };
            let fails = matches!(entry.serving, Serving::Refusing(_) | Serving::No(_));
            // A mount that is being made fails, and one that has lost its connection is revived.
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
                Ok(true) => tracing::warn!(
                    mount = %id,
                    "the files that it is served from were damaged, and have been made again"
                ),
                Ok(false) => {}
                Err(e) if e.to_string() == said => {}
                Err(e) => {
                    said = e.to_string();
                    tracing::error!(mount = %id, error = %said, "cannot make the files again that it is served from");
                }
            }
            self.attach_again(id);
            let table = self.table();
            let fails = |entry: &super::table::Entry| {
                matches!(entry.serving, Serving::Refusing(_) | Serving::No(_))
            };
            // Somebody else may have been told of it meanwhile, or it may be gone.
            let waited = self
                .changed
                .wait_timeout_while(table, pause, |table| table.mounts.get(&id).is_some_and(fails));
            drop(waited);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// The record of a mount that still is to be mended; its mender is to end if it is not.
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
        // A server that dies meanwhile is followed by one that is told anew, under a greater number.
        let waited = self.changed.wait_timeout_while(self.table(), ANSWER_MAX, |table| {
            table.mounts.get(&id).is_some_and(|entry| Some(entry.attach_answered) < number)
        });
        drop(waited);
    }
}
