//! Has the descriptors that readers depend on held by a holder that outlives this process and the
//! server.
//!
//! ```text
//!   mount is made ─► hold ──────────────┐
//!   mount is over ─► let go ────────────┼─► Holder: systemd's store, or the process (`holder.rs`)
//!   that process has died ─► another, ──┘
//!                            hold all again
//! ```
//!
//! A mount works without a holder, too; a failure to hold it is logged.

use std::{
    os::fd::OwnedFd,
    process::Child,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::Slots;

use super::{Supervisor, table::MountEntry};
use crate::{
    holder::{Held, Line, Store},
    id::MountId,
    state::{
        paths::StateDir,
        record::{Transport, read_record},
    },
};

/// The pause before a dead holder process is replaced.
const PAUSE: Duration = Duration::from_millis(100);

/// The holder of this supervisor's mounts.
pub(super) struct Holder {
    /// systemd's descriptor store, if available; no process is used then.
    store: Option<Store>,
    /// Locked to look at it or to replace it, never while the process is asked.
    process: Mutex<Option<Process>>,
}

struct Process {
    line: Arc<Line>,
    /// `None` if an earlier supervisor has started it.
    child: Option<Child>,
}

impl Holder {
    /// Returns the holder, and the mounts held for an earlier supervisor; `inherited` is from
    /// systemd.
    pub(super) fn find(state: &StateDir, inherited: Vec<Held>) -> (Self, Vec<Held>) {
        let mut held = inherited;
        let line = match Line::connect(state) {
            Ok(line) => line,
            Err(e) => {
                tracing::warn!(error = %e, "cannot reach the holder process");
                None
            }
        };
        let line = line.filter(|line| match line.list() {
            Ok(all) => {
                held.extend(all);
                true
            }
            Err(e) => {
                tracing::warn!(error = %e, "the holder process does not return the descriptors");
                false
            }
        });
        let process = line.map(|line| Process { line: Arc::new(line), child: None });
        (Self { store: Store::find(), process: Mutex::new(process) }, held)
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection to the process, if there is one.
    fn line(&self) -> Option<Arc<Line>> {
        self.process().as_ref().map(|process| Arc::clone(&process.line))
    }

    fn hold(&self, id: MountId, fuse: OwnedFd, slots: OwnedFd) -> Result<()> {
        if let Some(store) = &self.store {
            return store.hold(id, fuse, slots);
        }
        let absent = || Error::new(ErrorKind::Unavailable, "no holder process runs");
        self.line().ok_or_else(absent)?.hold(id, fuse, slots)
    }

    fn let_go(&self, id: MountId) -> Result<()> {
        let in_store = self.store.as_ref().map_or(Ok(()), |store| store.let_go(id));
        let in_process = self.line().map_or(Ok(()), |line| line.let_go(id));
        in_store.and(in_process)
    }

    /// Releases everything, and waits for the process to end. systemd releases its descriptors when
    /// the unit has stopped.
    pub(super) fn end(&self) {
        let Some(Process { line, child }) = self.process().take() else { return };
        if let Err(e) = line.let_all_go() {
            tracing::warn!(error = %e, "the holder process keeps descriptors of ended mounts");
        }
        line.end();
        if let Some(mut child) = child {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

impl Supervisor {
    /// Takes over the mounts that were held while no server ran. An adopted server has some of them
    /// already.
    pub(super) fn take_over(self: &Arc<Self>, held: Vec<Held>) {
        let mut count = 0;
        for one in held {
            let id = one.id;
            if let Some(entry) = self.table().mounts.get_mut(&id) {
                entry.held = self.holder.store.is_none();
                continue;
            }
            match self.held_entry(one) {
                Ok(entry) => {
                    if entry.record.frozen {
                        let (supervisor, record) = (Arc::clone(self), entry.record.clone());
                        thread::spawn(move || supervisor.thaw(&record));
                    }
                    self.table().add(entry);
                    count += 1;
                }
                Err(e) => {
                    tracing::warn!(mount = %id, error = %e, "cannot use the descriptors of the holder process");
                    let _ = self.holder.let_go(id);
                }
            }
        }
        if count > 0 {
            tracing::info!(count, "took over mounts whose readers wait for a server");
        }
        if self.holder.process().is_some() {
            self.watch_holder();
        }
    }

    fn held_entry(&self, held: Held) -> Result<MountEntry> {
        let record = read_record(&self.state, held.id)?;
        if held.is_over() || !record.is_alive() || record.attach.transport != Transport::Fuse {
            return Err(Error::new(ErrorKind::NotFound, "the mount or its connection is gone"));
        }
        let entry = self.entry(record, Some(held.fuse), Slots::from_fd(held.slots)?)?;
        Ok(MountEntry { held: self.holder.store.is_none(), ..entry })
    }

    /// Has all mounts held that are not yet, such as those of an adopted server. systemd ignores
    /// duplicates.
    pub(super) fn hold_the_rest(self: &Arc<Self>) {
        let ids: Vec<_> = {
            let table = self.table();
            let rest = table.mounts.values();
            let rest = rest.filter(|entry| entry.handed_out && !entry.lost && !entry.held);
            rest.filter(|entry| entry.fuse.is_some()).map(|entry| entry.record.attach.id).collect()
        };
        ids.into_iter().for_each(|id| self.hold(id));
        if self.holder.store.is_some() {
            // The process belonged to an earlier supervisor.
            self.holder.end();
        }
    }

    /// Starts the holder process early, unless it runs or systemd is the holder, so that a new
    /// mount need not wait for it.
    pub(super) fn prepare_to_hold(self: &Arc<Self>) {
        {
            let mut process = self.holder.process();
            if self.holder.store.is_some() || process.is_some() {
                return;
            }
            match Line::start(&self.state) {
                Ok((line, child)) => {
                    *process = Some(Process { line: Arc::new(line), child: Some(child) });
                }
                Err(e) => {
                    tracing::warn!(error = %e, "readers will not wait when both processes are killed");
                    return;
                }
            }
        }
        self.watch_holder();
    }

    /// Has the descriptors of mount `id` held, if its kind of mount can be.
    pub(super) fn hold(self: &Arc<Self>, id: MountId) {
        let copies = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return };
            let Some(fuse) = &entry.fuse else { return };
            if entry.record.attach.transport != Transport::Fuse {
                return;
            }
            entry.held = true;
            fuse.try_clone().and_then(|fuse| Ok((fuse, entry.slots.fd().try_clone_to_owned()?)))
        };
        self.prepare_to_hold();
        let copies = copies.map_err(|e| Error::io("cannot copy a descriptor", e));
        if let Err(e) = copies.and_then(|(fuse, slots)| self.holder.hold(id, fuse, slots)) {
            tracing::warn!(mount = %id, error = %e, "readers will not wait when both processes are killed");
        }
    }

    /// The mount is over.
    pub(super) fn let_go(&self, id: MountId) {
        let held = {
            let mut table = self.table();
            let entry = table.mounts.get_mut(&id);
            entry.is_some_and(|entry| std::mem::take(&mut entry.held))
        };
        if held && let Err(e) = self.holder.let_go(id) {
            tracing::warn!(mount = %id, error = %e, "the holder process keeps the descriptors of an ended mount");
        }
    }

    /// Has all mounts held by the process, in a thread that replaces it when it dies.
    fn watch_holder(self: &Arc<Self>) {
        let supervisor = Arc::clone(self);
        thread::spawn(move || {
            supervisor.hold_again();
            let Some(line) = supervisor.holder.line() else { return };
            line.wait_for_end();
            let dead = supervisor.holder.process().take();
            let Some(dead) = dead.filter(|_| !supervisor.table().stopping) else { return };
            tracing::warn!("the holder process has ended: starting another");
            if let Some(mut child) = dead.child {
                // A process that does not answer is still alive.
                let _ = child.kill().and_then(|()| child.wait());
            }
            thread::sleep(PAUSE);
            supervisor.prepare_to_hold();
        });
    }

    fn hold_again(self: &Arc<Self>) {
        let held: Vec<_> = {
            let table = self.table();
            let held = table.mounts.iter().filter(|(_, entry)| entry.held);
            held.map(|(id, _)| *id).collect()
        };
        held.into_iter().for_each(|id| self.hold(id));
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::OwnedFd, os::unix::net::UnixStream, sync::Arc, thread};

    use super::{Holder, Process};
    use crate::{holder::Line, id::MountId};

    /// Others look at the process, or replace it, while it lets somebody wait for its answer.
    #[test]
    fn the_process_is_not_locked_while_it_is_asked() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let line = Arc::new(Line::new(ours).unwrap());
        let process = Some(Process { line: Arc::clone(&line), child: None });
        let holder = Holder { store: None, process: process.into() };
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        thread::scope(|scope| {
            let asks = scope.spawn(|| holder.hold(MountId::from_number(1), null(), null()));
            // Its message has come: it waits for the answer.
            crate::ipc::wire::receive_bytes::<8>(&theirs).unwrap().unwrap();
            let is_free = holder.process.try_lock().is_ok();
            drop(theirs);
            asks.join().unwrap().unwrap_err();
            assert!(is_free);
        });
    }
}
