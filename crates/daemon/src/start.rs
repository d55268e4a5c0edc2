//! Starts the daemon so that it outlives the process that started it.
//!
//! ```text
//!   systemd runs here? ── yes ─► systemd-run: a unit burgeon-<tag>.service (or the installed
//!            │                   burgeon.service, if the state directory is its own)
//!            └── no ──► burgeon __supervise: a session and a cgroup of its own, stdio on a log
//!                       file; it reports on its standard output that it is ready, then closes it
//! ```

use std::{
    ffi::{OsStr, OsString},
    fs::OpenOptions,
    io::Read,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    host::program::serving_program,
    ipc::{client::Client, protocol::WireError},
    log,
    state::{
        cache_dir::{self, CACHE_DIR},
        files::{self, Lock},
        paths::StateDir,
    },
};

/// The supervisor prints this when its API answers.
pub(crate) const READY: &str = "ready";

/// It prints this if another supervisor has the state directory.
pub(crate) const TAKEN: &str = "taken";

/// A log longer than this is set aside when a daemon starts: 1 MiB, some ten thousand lines.
const LOG_LEN_MAX: u64 = 1 << 20;

/// Time limit for a new daemon to become ready. systemd has one of its own.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Attempts to start a daemon that finds the lock taken for a moment.
const START_TRIES: u32 = 5;

/// The unit of the default state directory, which a package or `make install` puts in place.
const UNIT_INSTALLED: &str = "burgeon.service";

/// Variables for the daemons that this process starts, and their values. An installed unit has
/// variables of its own.
static PASSED_ON: Mutex<Vec<(&str, OsString)>> = Mutex::new(Vec::new());

/// Gives the variable to each daemon that this process starts from now on.
pub fn pass_on(name: &'static str, value: OsString) {
    let mut passed_on = PASSED_ON.lock().unwrap_or_else(PoisonError::into_inner);
    // The first value stays: a process has one configuration.
    if !passed_on.iter().any(|(passed, _)| *passed == name) {
        passed_on.push((name, value));
    }
}

fn passed_on() -> Vec<(&'static str, OsString)> {
    PASSED_ON.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Starts the daemon and returns when its API answers.
pub(crate) fn start(state: &StateDir) -> Result<()> {
    let named = passed_on().into_iter().find(|(name, _)| *name == CACHE_DIR);
    named.map_or(Ok(()), |(_, dir)| cache_dir::check(state, Path::new(&dir)))?;
    start_successor(state)
}

/// The same for the daemon after one that has ended: where the folder of the cache has become
/// unusable since, it keeps nothing, and the mounts are served.
pub(crate) fn start_successor(state: &StateDir) -> Result<()> {
    if Path::new("/run/systemd/system").is_dir() {
        return start_unit(state);
    }
    start_process(state, START_TRIES)
}

/// The same, never as a unit of systemd.
pub(crate) fn start_directly(state: &StateDir) -> Result<()> {
    start_process(state, START_TRIES)
}

impl Client {
    /// Connects, after starting a daemon if none runs.
    pub fn connect_or_start(state: &StateDir) -> Result<Self> {
        if let Some(client) = Self::connect(state)? {
            return Ok(client);
        }
        start(state)?;
        Self::connect(state)?.ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                format!(
                    "the daemon was started and ended at once: see {} or `journalctl -u burgeon`",
                    state.log_file().display()
                ),
            )
        })
    }
}

fn start_process(state: &StateDir, tries: u32) -> Result<()> {
    keep_log_short(state)?;
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    let log = files::open(&state.log_file(), &mut options)
        .map_err(|e| Error::io(format!("cannot open {}", state.log_file().display()), e))?;
    let failed = |e| Error::io("cannot start the daemon", e);
    let mut child = serving_program("__supervise")
        .arg(state.root())
        .envs(passed_on())
        // If a unit runs this command, its notifications are not the daemon's.
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .current_dir("/")
        .spawn()
        .map_err(failed)?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        let heard = listen(stdout, START_TIMEOUT).map_err(failed)?;
        said = heard.ok_or_else(|| {
            let (log, seconds) = (state.log_file(), START_TIMEOUT.as_secs());
            let what = format!(
                "the daemon (process {}) is not ready after {seconds} s: see {}, and try again",
                child.id(),
                log.display()
            );
            Error::new(ErrorKind::Unavailable, what)
        })?;
    }
    match said.trim() {
        READY => Ok(()),
        TAKEN => wait_for_the_other(child, state, tries),
        other => {
            let _ = child.wait();
            match serde_json::from_str::<WireError>(other) {
                Ok(failure) => Err(failure.into()),
                Err(_) => Err(Error::new(
                    ErrorKind::Unavailable,
                    format!("the daemon could not be started: see {}", state.log_file().display()),
                )),
            }
        }
    }
}

/// All that `speaker` says until it closes the stream; `None` if it takes longer than `limit`.
fn listen(
    mut speaker: impl Read + Send + 'static,
    limit: Duration,
) -> std::io::Result<Option<String>> {
    let (tell, told) = mpsc::channel();
    // It ends with the stream.
    thread::spawn(move || {
        let mut said = String::new();
        let _ = tell.send(speaker.read_to_string(&mut said).map(|_| said));
    });
    told.recv_timeout(limit).ok().transpose()
}

/// Starts a new log if the old one is long; one old log is kept.
fn keep_log_short(state: &StateDir) -> Result<()> {
    let log = state.log_file();
    if std::fs::symlink_metadata(&log).is_ok_and(|metadata| metadata.len() > LOG_LEN_MAX) {
        std::fs::rename(&log, log.with_extension("log.old"))
            .map_err(|e| Error::io(format!("cannot rename {}", log.display()), e))?;
    }
    Ok(())
}

/// Waits for a daemon that another command started at the same moment; its socket exists before its
/// message, so a short wait is enough. If the lock was taken only to clear up ([`crate::orphan`]),
/// starts a daemon after all.
fn wait_for_the_other(mut child: std::process::Child, state: &StateDir, tries: u32) -> Result<()> {
    let _ = child.wait();
    let rounds = if tries > 0 { 100 } else { 0 };
    for _ in 0..rounds {
        if Client::connect(state)?.is_some() {
            return Ok(());
        }
        if Lock::try_take(&state.lock_file())?.is_some() {
            return start_process(state, tries - 1);
        }
        thread::sleep(Duration::from_millis(50));
    }
    Err(Error::new(
        ErrorKind::Unavailable,
        format!(
            "another daemon has the state directory {} and does not answer: `burgeon doctor` says more",
            state.root().display()
        ),
    ))
}

fn start_unit(state: &StateDir) -> Result<()> {
    if has_installed_unit(state) {
        if passed_on().iter().any(|(name, _)| *name == CACHE_DIR) {
            let what = format!(
                "{UNIT_INSTALLED} has an environment of its own: write dir = \"…\" in the section [cache] of the \
                 configuration instead of --cache-dir or {CACHE_DIR}"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        return start_existing(UNIT_INSTALLED);
    }
    let exe =
        std::env::current_exe().map_err(|e| Error::io("cannot find the burgeon program", e))?;
    let unit = format!("burgeon-{}.service", state.tag());
    let mut command = Command::new("systemd-run");
    command
        .arg("--quiet")
        .arg("--collect")
        .arg(format!("--unit={unit}"))
        .arg("--description=Burgeon: lazily mounted file trees")
        .args(UNIT_PROPERTIES.iter().map(|property| format!("--property={property}")))
        .args(log::variables().map(|(name, value)| format!("--setenv={name}={value}")))
        .args(passed_on().iter().map(|(name, value)| setenv(name, value)))
        .arg(exe)
        .arg("__supervise")
        .arg(state.root());
    let made = run("systemd-run", &mut command);
    // The unit exists if another command starts it at this moment, or if it is just ending.
    if made.is_ok() || is_loaded(&unit) && start_existing(&unit).is_ok() {
        return Ok(());
    }
    // It ended in between, and its name is free; or this fails for the same reason again.
    run("systemd-run", &mut command)
}

fn has_installed_unit(state: &StateDir) -> bool {
    StateDir::default_path().is_ok_and(|path| path == state.root()) && is_loaded(UNIT_INSTALLED)
}

/// The program that systemd starts when the daemon has died; `None` without a unit for it.
pub(crate) fn program_of_unit(state: &StateDir) -> Option<PathBuf> {
    if !Path::new("/run/systemd/system").is_dir() {
        return None;
    }
    let unit = match has_installed_unit(state) {
        true => UNIT_INSTALLED.to_owned(),
        false => format!("burgeon-{}.service", state.tag()),
    };
    let mut show = Command::new("systemctl");
    show.args(["show", "--property=ExecStart", "--value", &unit]).stdin(Stdio::null());
    program_of(&show.output().ok()?.stdout)
}

/// The program of systemd's `{ path=/usr/bin/burgeon ; argv[]=… }`.
fn program_of(shown: &[u8]) -> Option<PathBuf> {
    let text = std::str::from_utf8(shown).ok()?;
    let (_, rest) = text.split_once("path=")?;
    Some(rest.split_once(" ;")?.0.into())
}

/// The option of systemd-run for a variable.
fn setenv(name: &str, value: &OsStr) -> OsString {
    let mut option = OsString::from(format!("--setenv={name}="));
    option.push(value);
    option
}

fn is_loaded(unit: &str) -> bool {
    let mut show = Command::new("systemctl");
    show.args(["show", "--property=LoadState", "--value", unit]).stdin(Stdio::null());
    show.output().is_ok_and(|output| output.stdout.trim_ascii() == b"loaded")
}

/// Starts a unit that systemd knows, and waits until it has started.
fn start_existing(unit: &str) -> Result<()> {
    run("systemctl", Command::new("systemctl").arg("start").arg(unit))
}

/// The important properties of `dist/burgeon.service`; a test compares the two.
/// - `KillMode=process`: when the supervisor dies, the server must go on serving until the next
///   supervisor adopts it.
/// - `StartLimitIntervalSec=0`: systemd restarts the supervisor however often it dies; by default,
///   five deaths in 10 s fail the unit for good.
/// - `FileDescriptorStoreMax`: two for each held mount ([`crate::holder`]). Stopping the unit
///   closes the descriptors (`FileDescriptorStorePreserve=restart`, the default): this is the way
///   to give up mounts whose server is dead, too.
pub const UNIT_PROPERTIES: [&str; 21] = [
    "StartLimitIntervalSec=0",
    "Type=notify",
    "NotifyAccess=main",
    "ExecStartPre=-+modprobe --quiet ublk_drv",
    "KillMode=process",
    "FileDescriptorStoreMax=4096",
    "Restart=on-failure",
    "RestartSec=100ms",
    "OOMScoreAdjust=-1000",
    "LimitMEMLOCK=infinity",
    "TimeoutStopSec=30s",
    "CapabilityBoundingSet=CAP_SYS_ADMIN CAP_DAC_OVERRIDE \
     CAP_DAC_READ_SEARCH CAP_FOWNER CAP_CHOWN CAP_SETGID CAP_SETUID CAP_SYS_RESOURCE",
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=mnt user",
    "RestrictRealtime=yes",
    "SystemCallArchitectures=native",
    "SystemCallErrorNumber=EPERM",
    "SystemCallFilter=~@clock @cpu-emulation @debug @module @obsolete @raw-io @reboot @swap",
    "UMask=0077",
];

fn run(name: &str, command: &mut Command) -> Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::io(format!("cannot run {name} to start the daemon"), e))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::new(ErrorKind::Unavailable, format!("{name} could not start the daemon: {said}")))
}

/// True if this process is the main process of a unit of systemd.
pub(crate) fn is_unit() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Tells systemd that the daemon is ready, if systemd has asked for it.
pub fn notify_systemd() {
    if let Some(socket) = notification_socket() {
        // Without this message systemd reaches its start timeout.
        let _ = socket.send(b"READY=1");
    }
}

/// A socket to systemd's notifications for this process's unit; `None` if it has none.
pub(crate) fn notification_socket() -> Option<std::os::unix::net::UnixDatagram> {
    let address = std::env::var_os("NOTIFY_SOCKET")?;
    use std::os::{linux::net::SocketAddrExt, unix::ffi::OsStrExt};
    let name = address.as_bytes();
    let address = match name.strip_prefix(b"@") {
        Some(abstract_name) => std::os::unix::net::SocketAddr::from_abstract_name(abstract_name),
        None => std::os::unix::net::SocketAddr::from_pathname(Path::new(&address)),
    };
    let socket = std::os::unix::net::UnixDatagram::unbound().ok()?;
    socket.connect_addr(&address.ok()?).ok()?;
    Some(socket)
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream, time::Duration};

    use super::{UNIT_PROPERTIES, listen, program_of};

    #[test]
    fn the_program_of_a_unit_is_found() {
        let shown = b"{ path=/usr/bin/burgeon ; argv[]=@burgeon __supervise /var ; pid=7 }\n";
        assert_eq!(program_of(shown), Some("/usr/bin/burgeon".into()));
        assert_eq!((program_of(b"\n"), program_of(b"{ path=/x")), (None, None));
    }

    #[test]
    fn a_daemon_that_stays_silent_is_not_waited_for() {
        let (mut daemon, ours) = UnixStream::pair().unwrap();
        daemon.write_all(b"rea").unwrap();
        assert_eq!(listen(ours.try_clone().unwrap(), Duration::ZERO).unwrap(), None);
        drop((daemon, ours));
        let (mut daemon, ours) = UnixStream::pair().unwrap();
        daemon.write_all(b"ready\n").unwrap();
        drop(daemon);
        assert_eq!(listen(ours, Duration::MAX).unwrap().as_deref(), Some("ready\n"));
    }

    #[test]
    fn the_unit_as_shipped_has_the_properties_that_are_tested() {
        let unit = include_str!("../../../dist/burgeon.service");
        let lines: Vec<_> = unit.lines().map(str::trim).collect();
        for property in UNIT_PROPERTIES {
            assert!(lines.contains(&property), "dist/burgeon.service lacks {property}");
        }
        // systemd ignores it, with a warning, in any other section.
        let (head, _) = unit.split_once("[Service]").unwrap();
        assert!(head.lines().any(|line| line == "StartLimitIntervalSec=0"), "not in [Unit]");
        // No ExecStop: only `burgeon shutdown --unmount` unmounts.
        let installed_only = ["Description", "ExecStart", "ExecReload", "WantedBy"];
        for line in lines {
            let Some((name, _)) = line.split_once('=').filter(|_| !line.starts_with('#')) else {
                continue;
            };
            let is_shared = UNIT_PROPERTIES.contains(&line) || installed_only.contains(&name);
            assert!(is_shared, "the transient unit lacks {line}");
        }
    }
}
