//! Attaching and detaching devices, and finding those of a supervisor that has died.
//!
//! ```text
//!   attach   claim on the slow device ─► front ─► server ─► device in front appears ─► recorded
//!   detach   last flush ─► device in front goes ─► dirty blocks written back ─► server without it
//!   resume   recorded ─► a ublk device that waits ─► claim ─► server, which takes it over
//! ```

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use burgeon_accelerate::{Mode, policy::PolicyKind};
use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::{Connection, LoopDevice, Slots, ublk};
use serde_json::{Value, json};

use super::{Device, Supervisor};
use crate::{
    announced::Announced,
    attached::{Attached, AttachedDevice},
    child::{Passed, first_answer},
    control::{Attach, ControlRequest},
    dirty::refuse_elsewhere,
    disk::Disk,
    folder::{CacheFolder, serving},
    front::{Front, NewFront, known_device, owner_of},
    serve::{NO_RESEND, named},
    shared::memory,
};

/// Limit for the device in front to appear or to go.
const SHOW_MAX: Duration = Duration::from_secs(20);
/// Time between two looks whether the server still runs.
const LOOK: Duration = Duration::from_millis(5);
/// Said of a device that goes on.
const RESUMED: &str =
    "the processes of the cache had died: the device goes on as it was attached then";

/// The flush before the last close of a device, which waits for the server.
pub(super) struct LastFlush {
    receiver: mpsc::Receiver<io::Result<()>>,
    result: Option<io::Result<()>>,
}

impl LastFlush {
    /// Flushes and closes `file`.
    fn begin(file: File) -> Self {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let flushed = file.sync_all();
            drop(file);
            let _ = sender.send(flushed);
        });
        Self { receiver, result: None }
    }

    /// True if it has ended.
    fn wait(&mut self, limit: Duration) -> bool {
        if self.result.is_none() {
            self.result = self.receiver.recv_timeout(limit).ok();
        }
        self.result.is_some()
    }

    /// Its error, or that of one that has not ended.
    pub(super) fn failed(&mut self) -> Option<io::Error> {
        self.wait(Duration::ZERO);
        match self.result.take() {
            Some(flushed) => flushed.err(),
            None => Some(io::Error::other("the last flush did not end")),
        }
    }
}

impl Supervisor {
    pub(super) fn attach(&mut self, mut options: Attach) -> Result<Value> {
        let mode = named(&options.mode, Mode::parse, "mode")?;
        let policy = options.policy.as_deref();
        policy.map(|name| named(name, PolicyKind::parse, "policy")).transpose()?;
        let name = options.name.clone();
        if let Some(document) = self.resumed(&options)? {
            return Ok(document);
        }
        let slow = Disk::open(&options.slow)?;
        refuse_elsewhere(&self.folder, &name, &slow)?;
        let new = Front::make(options.transport, &self.folder, &name, &slow)?;
        let NewFront { front, connection, note } = new;
        let (mode, other) = served(mode, front.resends());
        let note = note.into_iter().chain(other).reduce(|one, other| format!("{one}; {other}"));
        options.mode = mode.name().to_owned();
        let warm = options.trust_clean;
        // Of a first device the word of the user is that of the cache, too.
        self.warm |= warm && self.devices.is_empty();
        let policy = options.policy.clone();
        let former = policy.map(|policy| std::mem::replace(&mut self.policy, policy));
        self.devices.push(Device::new(options, slow, front, warm)?);
        let begun = self.restart_server().and_then(|()| self.show(connection.as_ref(), &name));
        match begun {
            Ok((file, path)) => {
                let mut document = json!({ "note": note });
                if let Some(device) = self.devices.last_mut() {
                    device.link_to(&path);
                    device.shown = Some((Some(file), path));
                    device.describe(&mut document);
                }
                Ok(document)
            }
            Err(error) => {
                former.into_iter().for_each(|policy| self.policy = policy);
                self.give_up_new(connection);
                Err(error)
            }
        }
    }

    /// Forgets a device whose attachment failed.
    fn give_up_new(&mut self, connection: Option<Connection>) {
        let front = self.devices.pop().map(|device| device.front);
        drop(connection);
        // A FUSE file goes at once, with the requests that its server waits for; a ublk device when
        // its server has left it.
        let left = front.filter(|front| matches!(front, Front::Ublk { .. }));
        if let Err(error) = self.restart_server() {
            self.tell_no_server(&error);
        }
        if let Some(Err(error)) = left.map(|front| front.remove()) {
            tracing::warn!(%error, "a ublk device is left, and is removed by the next attachment");
        }
    }

    /// Has the device in front appear, by a process that may wait for the server.
    fn show(&mut self, connection: Option<&Connection>, name: &str) -> Result<(File, PathBuf)> {
        if let Some(connection) = connection {
            let block = self.devices.last().map_or(512, |device| device.slow.logical_block());
            let mount: BorrowedFd<'_> = connection.mount();
            let _passed = Passed::new([mount])?;
            let mut helper = serving("__accelerate-loop");
            helper.args([mount.as_raw_fd().to_string(), name.to_owned(), block.to_string()]);
            return shown_by(helper);
        }
        let number = self.devices.last().and_then(Device::ublk);
        let opener = self.server.as_ref().map(Child::id);
        let (Some(number), Some(opener)) = (number, opener) else { return Err(died()) };
        let mut helper = serving("__accelerate-ublk");
        helper.args([number, opener].map(|number| number.to_string()));
        let shown = shown_by(helper)?;
        // The kernel starts the device of a server that dies at this moment, and a reader of it
        // would wait for ever.
        self.hear_from_server()?;
        Ok(shown)
    }

    /// `Unavailable` if the server has died.
    fn hear_from_server(&mut self) -> Result<()> {
        let (sender, answers) = mpsc::channel();
        let folder = CacheFolder::at(self.folder.path());
        thread::spawn(move || sender.send(folder.ask_server(&ControlRequest::Status)));
        loop {
            match answers.recv_timeout(LOOK) {
                Ok(answer) => return answer.map(drop),
                Err(RecvTimeoutError::Timeout) if self.is_running() => {}
                Err(_) => return Err(died()),
            }
        }
    }

    /// Detaches, or tells how many dirty bytes are left: then the device has no users any more, and
    /// is detached by a later request.
    pub(super) fn detach(&mut self, name: &str, leave_dirty: bool) -> Result<Value> {
        let found = self.devices.iter().position(|device| device.options.name == name);
        let missing = || Error::new(ErrorKind::NotFound, format!("no device {name} is attached"));
        let at = found.ok_or_else(missing)?;
        self.devices[at].hide()?;
        match if leave_dirty { Ok(0) } else { self.write_back(name) } {
            Ok(0) => {}
            Ok(left) => {
                return Ok(json!({ "name": name, "is_detached": false, "dirty_bytes": left }));
            }
            Err(error) => {
                let what = format!(
                    "{name} stays attached, because not all of it can be written back: {error}; \
                     `detach --leave-dirty` detaches it, and the cache keeps the rest"
                );
                return Err(Error::with_source(error.kind(), what, error));
            }
        }
        // The server ends in order, with this device, and only then its claim.
        self.stop_server();
        let mut device = self.devices.remove(at);
        let started = if self.devices.is_empty() { Ok(None) } else { self.start_server() };
        // A failed start is tried again; a loss is told once, so it comes first.
        let is_dirty = self.folder.dirty().iter().any(|(dirty, _)| dirty == name);
        if is_dirty {
            device.announced.stay_marked();
        }
        device.tell_loss()?;
        started.map(|_| json!({ "name": name, "is_detached": true, "is_dirty": is_dirty }))
    }

    /// Records the devices for the next supervisor.
    pub(super) fn record_attached(&self) {
        let recorded = |device: &Device| {
            let (_, path) = device.shown.as_ref()?;
            let (options, path) = (device.options.clone(), path.clone());
            Some(AttachedDevice { options, path, ublk: device.ublk() })
        };
        let devices: Vec<_> = self.devices.iter().filter_map(recorded).collect();
        if devices.is_empty() {
            return Attached::forget(&self.folder);
        }
        let known = Attached::new(&self.policy, self.writing_back, devices);
        if let Err(error) = known.record(&self.folder) {
            let cache = self.folder.name();
            tracing::warn!(%cache, %error, "after the death of all processes, its devices wait for ever");
        }
    }

    /// Takes over the devices of a supervisor that has died: their users wait in the kernel. The
    /// claims on the slow devices were interrupted, so no clean content is kept.
    pub(super) fn resume(&mut self) -> Result<()> {
        let Some(known) = Attached::read(&self.folder) else { return Ok(()) };
        for AttachedDevice { options, path, ublk } in known.devices {
            let name = options.name.clone();
            let Some(number) = ublk else { continue };
            if !known_device(number, owner_of(&self.folder, &name))? {
                tracing::warn!(
                    device = name,
                    number,
                    "the ublk device of an earlier supervisor is gone"
                );
                continue;
            }
            let slow = Disk::open(&options.slow)?;
            let mut device = Device::new(options, slow, Front::Ublk { number }, false)?;
            device.link_to(&path);
            device.shown = Some((None, path));
            (device.has_begun, device.is_resumed) = (true, true);
            self.devices.push(device);
            tracing::info!(device = name, number, "the device of an earlier supervisor goes on");
        }
        (self.policy, self.writing_back) = (known.policy, known.writing_back);
        Ok(())
    }

    /// The document of a device that goes on, if that is the one that is asked for. `Invalid` if
    /// another one has its name.
    fn resumed(&mut self, asked: &Attach) -> Result<Option<Value>> {
        let named = self.devices.iter_mut().find(|device| device.options.name == asked.name);
        let Some(device) = named else { return Ok(None) };
        if !device.is_resumed || device.options.slow != asked.slow {
            let what = format!("a device {} is attached already", asked.name);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        device.is_resumed = false;
        let mut document = json!({ "note": RESUMED });
        device.describe(&mut document);
        Ok(Some(document))
    }
}

impl Device {
    fn new(options: Attach, slow: Disk, front: Front, warm: bool) -> Result<Self> {
        let (slots, counters) = (Slots::create()?, memory()?);
        let announced = Announced::begin(&options.name, &slow);
        Ok(Self {
            options,
            announced,
            slow,
            front,
            slots,
            counters,
            warm,
            shown: None,
            is_resumed: false,
            has_begun: false,
            flushed: None,
        })
    }

    fn link_to(&self, path: &Path) {
        if let Err(error) = self.announced.link_to(path) {
            let (device, link) = (&self.options.name, self.announced.link().display());
            tracing::warn!(device, %link, %error, "cannot make the link to the device");
        }
    }

    fn describe(&self, document: &mut Value) {
        document["name"] = json!(self.options.name);
        document["device"] = json!(self.shown.as_ref().map(|(_, path)| path));
        document["link"] = json!(self.announced.link());
        document["mode"] = json!(self.options.mode);
        document["transport"] = json!(self.front.transport());
    }

    /// The number of its ublk device.
    fn ublk(&self) -> Option<u32> {
        match self.front {
            Front::Ublk { number } => Some(number),
            Front::Fuse { .. } => None,
        }
    }

    /// Opens the device in front of an earlier supervisor, once it is served again: for the last
    /// flush.
    pub(super) fn open_resumed(&mut self) {
        if let (true, Some((file @ None, path))) = (self.is_resumed, &mut self.shown) {
            *file = File::open(path).ok();
        }
    }

    /// Takes the device in front away, which must have no users.
    fn hide(&mut self) -> Result<()> {
        let Some((file, path)) = &mut self.shown else { return Ok(()) };
        match self.front {
            Front::Fuse { .. } => {
                let number = path.to_string_lossy().trim_start_matches("/dev/loop").parse();
                let number = number.unwrap_or(0);
                // After an attempt that failed, it may have gone, and its number be another's.
                let own = (number, format!("burgeon/{}", self.options.name));
                if file.is_some() || LoopDevice::names()?.contains(&own) {
                    LoopDevice::is_unused(path)?;
                    self.flushed = file.take().map(LastFlush::begin).or(self.flushed.take());
                    // Both the flush and the last close wait for the server.
                    LoopDevice::wait_until_free(number, SHOW_MAX)?;
                }
            }
            Front::Ublk { number } if ublk::block_path(number).exists() => {
                LoopDevice::is_unused(path)?;
                self.flushed = file.take().map(LastFlush::begin).or(self.flushed.take());
                if self.flushed.as_mut().is_some_and(|flushed| !flushed.wait(SHOW_MAX)) {
                    let what = format!(
                        "the last flush of {} has not ended: its slow device does not answer; detach it \
                         again later",
                        path.display()
                    );
                    return Err(Error::new(ErrorKind::Unavailable, what));
                }
                self.front.remove()?;
            }
            Front::Ublk { .. } => {}
        }
        self.shown = None;
        self.announced.unlink();
        drop(burgeon_frontend::remove_unused_loops());
        Ok(())
    }
}

fn died() -> Error {
    let what = "the server of the cache died while the device in front was started: try again";
    Error::new(ErrorKind::Unavailable, what)
}

/// The path that a helper prints, opened.
fn shown_by(mut helper: Command) -> Result<(File, PathBuf)> {
    let helper = helper.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut helper = helper.spawn().map_err(|e| Error::io("cannot start a helper", e))?;
    let answered = first_answer(&mut helper, SHOW_MAX).and_then(|answer| {
        let path: PathBuf = serde_json::from_value(answer).map_err(|e| {
            let what = "the helper that makes the device in front gave no path";
            Error::with_source(ErrorKind::Unavailable, what, e)
        })?;
        let file = File::open(&path)
            .map_err(|e| Error::io(format!("cannot open {}", path.display()), e))?;
        Ok((file, path))
    });
    if answered.is_err() {
        let _ = helper.kill();
    }
    // It waits for the end of its input, so that the device lives until it is open here.
    drop(helper.stdin.take());
    if answered.is_ok() {
        let _ = helper.wait();
    }
    answered
}

/// The mode that is served for one that is asked for, and why it is another.
fn served(mode: Mode, resends: bool) -> (Mode, Option<String>) {
    match mode {
        Mode::WriteBack if !resends => {
            let note =
                format!("{NO_RESEND}; the device is served in {}", Mode::WriteThrough.name());
            (Mode::WriteThrough, Some(note))
        }
        mode => (mode, None),
    }
}

#[cfg(test)]
mod tests {
    use burgeon_accelerate::Mode;

    use super::served;

    #[test]
    fn without_requests_that_are_sent_again_there_is_no_write_back() {
        for (mode, _) in Mode::ALL {
            assert_eq!(served(mode, true), (mode, None));
            let (without, note) = served(mode, false);
            assert_ne!(without, Mode::WriteBack);
            assert_eq!(note.is_some(), mode == Mode::WriteBack);
        }
    }
}
