//! The folder of a cache in the state directory.
//!
//! ```text
//!   accelerate/NAME/  device      path of the cache device, and its id, a line each
//!                     supervise.sock   the supervisor, while it runs
//!                     serve.sock  the server
//!                     distrust    the content must not be used, but for dirty blocks
//!                     dirty/      the slow devices that it may have newer content of
//!                     histograms/ distributions of the requests of each slow device
//!                     attached    the attached devices, for the next supervisor
//!                     replacing   a cache device that takes the place of the former one
//!                     log         of both
//! ```

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io,
    os::unix::{fs::DirBuilderExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use serde_json::Value;

use crate::{
    control::{ControlRequest, ask},
    durable::put_durably,
};

/// `argv[0]` of the processes of a cache.
const SERVING: &str = "@burgeon";
/// Limit for a supervisor to listen.
const START_MAX: Duration = Duration::from_secs(20);
/// The longest name of a cache.
const NAME_MAX: usize = 32;

/// The folder of one cache.
pub struct CacheFolder(PathBuf);

impl CacheFolder {
    /// A folder that exists.
    pub(crate) fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// The folder of the cache `name` in the state directory `state`. `Invalid` for a name that is
    /// none.
    pub fn of(state: &Path, name: &str) -> Result<Self> {
        check_name(name)?;
        Ok(Self(state.join("accelerate").join(name)))
    }

    /// All caches of the state directory.
    pub fn all(state: &Path) -> Vec<Self> {
        let entries = fs::read_dir(state.join("accelerate")).into_iter().flatten().flatten();
        let mut folders: Vec<_> =
            entries.map(|entry| Self(entry.path())).filter(Self::exists).collect();
        folders.sort_by(|a, b| a.0.cmp(&b.0));
        folders
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// All caches of its state directory.
    pub(crate) fn siblings(&self) -> Vec<Self> {
        let state = self.0.parent().and_then(Path::parent);
        state.map_or(Vec::new(), Self::all)
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// True if there is such a cache.
    pub fn exists(&self) -> bool {
        self.0.join("device").exists()
    }

    /// Path of the cache device. `NotFound` if there is no such cache.
    pub fn cache(&self) -> Result<PathBuf> {
        match fs::read_to_string(self.0.join("device")) {
            Ok(text) => Ok(text.lines().next().unwrap_or_default().into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let what = format!(
                    "there is no cache {}: `burgeon accelerate status` lists those that there are, and \
                     `burgeon accelerate create` makes one",
                    self.name()
                );
                Err(Error::new(ErrorKind::NotFound, what))
            }
            Err(error) => {
                let what = format!("cannot read the record of the cache {}", self.name());
                Err(Error::io(what, error))
            }
        }
    }

    /// False if `id` is that of another cache device than the recorded one, whose path it may have
    /// got since. Folders of earlier versions know no id.
    pub fn is_its_cache(&self, id: [u8; 16]) -> bool {
        let text = fs::read_to_string(self.0.join("device")).unwrap_or_default();
        text.lines().nth(1).is_none_or(|known| known == hex(id))
    }

    /// Makes the folder, for root alone.
    pub(crate) fn make(&self) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", self.0.display()), e);
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0).map_err(failed)
    }

    /// Records a new cache.
    pub fn record(&self, cache: &Path, id: [u8; 16]) -> Result<()> {
        self.make()?;
        let _ = fs::remove_file(self.distrust());
        let _ = fs::remove_dir_all(self.histograms());
        self.put_device(cache, &hex(id))
    }

    /// Names the cache device, durably. After an error, the former one may be named durably while
    /// the new one is read.
    pub(crate) fn put_device(&self, cache: &Path, id: &str) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", self.0.display()), e);
        let text = format!("{}\n{id}\n", cache.display());
        put_durably(&self.0.join("device"), text.as_bytes()).map_err(failed)
    }

    /// The id of the recorded cache device; empty if an earlier version has recorded it.
    pub(crate) fn recorded_id(&self) -> Result<String> {
        let failed = |e| Error::io(format!("cannot read the record of {}", self.name()), e);
        let text = fs::read_to_string(self.0.join("device")).map_err(failed)?;
        Ok(text.lines().nth(1).unwrap_or_default().to_owned())
    }

    /// Forgets the cache.
    pub fn remove(&self) -> Result<()> {
        fs::remove_dir_all(&self.0)
            .map_err(|e| Error::io(format!("cannot remove {}", self.0.display()), e))
    }

    pub(crate) fn supervise_socket(&self) -> PathBuf {
        self.0.join("supervise.sock")
    }

    pub(crate) fn serve_socket(&self) -> PathBuf {
        self.0.join("serve.sock")
    }

    pub(crate) fn histograms(&self) -> PathBuf {
        self.0.join("histograms")
    }

    pub(crate) fn attached(&self) -> PathBuf {
        self.0.join("attached")
    }

    pub(crate) fn distrust(&self) -> PathBuf {
        self.0.join("distrust")
    }

    /// True if a supervisor runs, or its server does without it. The supervisor listens before that
    /// is true.
    pub fn is_served(&self) -> bool {
        std::os::unix::net::UnixStream::connect(self.serve_socket()).is_ok()
    }

    /// Asks the server. `NotFound` if nothing is attached.
    pub fn ask_server(&self, question: &ControlRequest) -> Result<Value> {
        ask(&self.serve_socket(), question)
    }

    /// Asks the supervisor. `NotFound` if nothing is attached, `Unavailable` if it is dead, and its
    /// server is not.
    pub fn ask_supervisor(&self, question: &ControlRequest) -> Result<Value> {
        match ask(&self.supervise_socket(), question) {
            Err(error) if error.kind() == ErrorKind::NotFound && self.is_served() => {
                let what = format!(
                    "the supervisor of the cache {} is dead: its server goes on until its devices are \
                     unmounted; unmount them, and attach them again",
                    self.name()
                );
                Err(Error::new(ErrorKind::Unavailable, what))
            }
            answer => answer,
        }
    }

    /// Starts a supervisor, and returns when it listens.
    pub fn start_supervisor(&self) -> Result<()> {
        if self.is_served() {
            return Ok(());
        }
        // An error that stops a supervisor is reported here, where the user sees it.
        drop(crate::disk::Disk::open(&self.cache()?)?);
        let path = self.0.join("log");
        let mut starter = match Path::new("/run/systemd/system").is_dir() {
            true => self.start_unit(&path)?,
            false => self.start_process(&path)?,
        };
        let deadline = Instant::now() + START_MAX;
        while !self.is_served() {
            let failed = matches!(starter.try_wait(), Ok(Some(status)) if !status.success());
            if failed || Instant::now() > deadline {
                let what = format!(
                    "the supervisor of the cache {} does not start; see {}",
                    self.name(),
                    path.display()
                );
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn start_process(&self, log: &Path) -> Result<Child> {
        let file = OpenOptions::new().create(true).append(true).open(log);
        let file = file.map_err(|e| Error::io(format!("cannot write {}", log.display()), e))?;
        serving("__accelerate-supervise")
            .arg(&self.0)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .map_err(|e| Error::io("cannot start the supervisor of a cache", e))
    }

    /// In a unit of its own, so that the end of a session ends nothing. systemd does not stop it at
    /// shutdown (`DefaultDependencies`), and its last kill spares it by its name: a file system in
    /// front of the cache is unmounted before.
    fn start_unit(&self, log: &Path) -> Result<Child> {
        let program =
            std::env::current_exe().map_err(|e| Error::io("cannot find the burgeon program", e))?;
        let digest = Digest::of(self.0.as_os_str().as_encoded_bytes()).to_string();
        let unit = format!("burgeon-accelerate-{}-{}.service", self.name(), &digest[..8]);
        let log = log.display().to_string().replace('%', "%%");
        Command::new("systemd-run")
            .args(["--quiet", "--collect", "--no-ask-password"])
            .arg(format!("--unit={unit}"))
            .arg(format!("--description=Burgeon: the cache {}", self.name()))
            .args(UNIT_PROPERTIES.map(|property| format!("--property={property}")))
            .arg(format!("--property=StandardError=append:{log}"))
            .arg("--")
            .arg(program)
            .arg("__accelerate-supervise")
            .arg(&self.0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| Error::io("cannot run systemd-run to start the supervisor of a cache", e))
    }
}

/// Properties of the unit.
const UNIT_PROPERTIES: [&str; 5] = [
    "Type=exec",
    "DefaultDependencies=no",
    // A server outlives its supervisor until its devices are unmounted.
    "KillMode=process",
    "OOMScoreAdjust=-1000",
    "LimitMEMLOCK=infinity",
];

/// A command that runs this very program as `verb`, under the name by which systemd knows processes
/// that file systems depend on (its document `ROOT_STORAGE_DAEMONS`).
pub(crate) fn serving(verb: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    // A failed allocation must end the process: with a backtrace it may hang instead.
    command.arg0(SERVING).arg(verb).env_remove("RUST_BACKTRACE");
    command
}

/// Executes the supervisor's program anew under that name, unless it has it: `systemd-run` cannot
/// choose one. The process stays the same.
pub(crate) fn take_serving_name(folder: &Path) {
    if std::env::args_os().next().is_some_and(|name| name == SERVING) {
        return;
    }
    let error = serving("__accelerate-supervise").arg(folder).exec();
    tracing::warn!(%error, "cannot take the name {SERVING}: systemd will kill this process early at shutdown");
}

/// The id of a cache device as text.
pub(crate) fn hex(id: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}

/// `Invalid` unless a name can be part of a path, and of a device's record.
pub fn check_name(name: &str) -> Result<()> {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > NAME_MAX || name.starts_with('.') || !name.chars().all(known)
    {
        let what = format!(
            "{name:?} is not a name: 1 to {NAME_MAX} letters, digits, and -, _ or ., not first a dot"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check_name;

    #[test]
    fn names_are_parts_of_paths() {
        for name in ["data", "a-b_c.d", "7"] {
            check_name(name).unwrap();
        }
        for name in ["", ".", "..", ".a", "a/b", "a b", "ä", &"a".repeat(33)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
