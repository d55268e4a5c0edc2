//! Records the reads of a mount, to make a profile of it.
//!
//! ```text
//!   Record ────► server: records
//!   Recorded ──► server: `run/reads-<id>` ──► client
//! ```
//! The notes of a server that dies are lost: then recording has failed. One client records a mount
//! at a time, and recording ends with its connection.

use std::{fs::File, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};

use super::{Supervisor, table::Recording};
use crate::{id::MountId, ipc::link::ToServer};

/// Time limit for the server to start or stop recording: it writes one file.
const ANSWER_MAX: Duration = Duration::from_secs(60);

impl Supervisor {
    /// Starts to record. `Unavailable` if another client records.
    pub(super) fn start_recording(&self, id: MountId) -> Result<()> {
        match self.tell_to_record(id, true)? {
            Recording::On => Ok(()),
            other => Err(failed(other)),
        }
    }

    /// Stops recording. Returns the recorded reads, and true if there were more than fit.
    pub(super) fn finish_recording(&self, id: MountId) -> Result<(bool, File)> {
        let cut_short = match self.tell_to_record(id, false)? {
            Recording::Done(cut_short) => cut_short,
            other => return Err(failed(other)),
        };
        let mut path = self.state.recorded_reads(id);
        if !path.exists() {
            // Of a server of an earlier version.
            path = self.state.mount(id).join("reads");
        }
        let file = crate::state::files::open(&path, File::options().read(true));
        let file = file.map_err(|e| Error::io(format!("cannot open {}", path.display()), e))?;
        crate::state::files::remove_file(&path)?;
        Ok((cut_short, file))
    }

    /// Stops recording for a client that has disconnected.
    pub(super) fn stop_recording(&self, id: MountId) {
        if self.finish_recording(id).is_ok() {
            tracing::info!(mount = %id, "recording has ended with its client");
        }
    }

    fn tell_to_record(&self, id: MountId, on: bool) -> Result<Recording> {
        let gone = || Error::new(ErrorKind::NotFound, format!("there is no mount {id}"));
        {
            let mut table = self.table();
            let entry = table.mounts.get_mut(&id).ok_or_else(gone)?;
            match (&entry.recording, on) {
                (Recording::Off, true) | (Recording::On, false) => {}
                (_, true) => {
                    let message = format!(
                        "{} is being recorded by another command: wait for it to end",
                        entry.record.target.display()
                    );
                    return Err(Error::new(ErrorKind::Unavailable, message));
                }
                (_, false) => return Err(failed(Recording::Off)),
            }
            entry.recording = Recording::Awaited;
            if !table.send(&ToServer::Record { id, on })
                && let Some(entry) = table.mounts.get_mut(&id)
            {
                entry.recording = Recording::Off;
            }
        }
        let waited = self.changed.wait_timeout_while(self.table(), ANSWER_MAX, |table| {
            let entry = table.mounts.get(&id);
            entry.is_some_and(|entry| matches!(entry.recording, Recording::Awaited))
        });
        let mut table = match waited {
            Ok((table, _)) => table,
            Err(poisoned) => poisoned.into_inner().0,
        };
        let recording = &mut table.mounts.get_mut(&id).ok_or_else(gone)?.recording;
        let next = if matches!(recording, Recording::On) { Recording::On } else { Recording::Off };
        Ok(std::mem::replace(recording, next))
    }
}

fn failed(recording: Recording) -> Error {
    match recording {
        Recording::Failed(error) => error,
        _ => Error::new(
            ErrorKind::Unavailable,
            "the serving process was restarted meanwhile, and the earlier reads are lost: record \
             again",
        ),
    }
}
