//! The opener monitor: keeps an opener running ([`crate::opener`]).
//!
//! ```text
//!   spawn ──► connect it with the server ──► its stream ends ──► kill it; spawn the next one
//! ```
//!
//! Nobody waits for an opener: it may hang in a file system, and then cannot even be killed.

use std::{
    io::Read,
    os::unix::net::UnixStream,
    process::Child,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, Result};

use super::{Supervisor, server_monitor::pause_after};
use crate::host::program;

/// Time limit for the opener to take a message. Its socket has room for many.
const SEND_MAX: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Runs until the supervisor stops.
    pub(super) fn monitor_opener(self: &Arc<Self>) {
        let mut pause = Duration::ZERO;
        while !self.table().stopping {
            let begun = Instant::now();
            match self.spawn_opener() {
                Ok((child, stream)) => self.watch_opener(child, stream),
                Err(e) => tracing::error!(error = %e, "cannot start the opener"),
            }
            pause = pause_after(begun.elapsed(), pause);
        }
    }

    /// Starts an opener, and connects the server with it. Returns the stream that tells its end.
    fn spawn_opener(&self) -> Result<(Child, UnixStream)> {
        let failed = |e| Error::io("cannot start the opener", e);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        ours.set_write_timeout(Some(SEND_MAX)).map_err(failed)?;
        let stream = ours.try_clone().map_err(failed)?;
        let child = program::start("__open", self.state.root(), theirs).map_err(failed)?;
        let mut table = self.table();
        table.opener = Some((ours, child.id()));
        table.introduce_opener();
        Ok((child, stream))
    }

    fn watch_opener(&self, mut child: Child, mut stream: UnixStream) {
        // It says nothing: this is its end, or somebody has shut the stream down.
        let _ = stream.read(&mut [0]);
        let _ = child.kill();
        let stopping = self.table().stopping;
        let mut reap = move || match child.wait() {
            Ok(status) if !stopping => tracing::warn!(%status, "the opener ended"),
            Ok(_) => {}
            Err(e) => tracing::warn!(error = %e, "cannot wait for the opener"),
        };
        match stopping {
            true => reap(),
            false => drop(thread::spawn(reap)),
        }
        self.table().opener = None;
        self.changed.notify_all();
    }
}
