//! Drops a process's privileges once it has opened what it needs.
//!
//! ```text
//!   open source and output ─► Sandbox::enter ─► parse untrusted bytes
//!                                │
//!                                ├─ Landlock        files: only those named (if the kernel has it)
//!                                ├─ user            another than root, if the role has one
//!                                ├─ capabilities    none, or those that a role cannot do without
//!                                ├─ no_new_privs    an executed file could give nothing back
//!                                └─ seccomp         no execve, ptrace, mount, io_uring, …
//! ```
//!
//! Root without capabilities still owns every file of uid 0, so capabilities alone protect little:
//! Landlock keeps such a process out of `/etc`. seccomp does not see io_uring's operations, so
//! io_uring is refused as a whole unless the process depends on it.
//!
//! Invariants, held by `tests/roles.rs` of the command:
//! - A sandbox is entered while the process has one thread. Every part of it belongs to a thread
//!   and is inherited: an earlier thread would stay outside.
//! - It is entered whole or not at all. Only Landlock may be missing, on kernels without it.
//! - No right can be regained.

mod capabilities;
mod landlock;
mod probe;
mod seccomp;
mod user;

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::thread::CapabilitySet;

use self::landlock::AccessRights;
pub use self::probe::allowed;

/// The rights that a process keeps in its sandbox; everything else is refused.
#[derive(Debug)]
pub struct Sandbox {
    keeps: CapabilitySet,
    network: bool,
    rings: bool,
    /// The effective user to become.
    user: Option<u32>,
    /// Makes mounts: Landlock, which would prevent that, guards no files.
    mounts: bool,
    /// Each must exist.
    files: Vec<(PathBuf, AccessRights)>,
    /// Each may be missing.
    system_files: Vec<(PathBuf, AccessRights)>,
}

/// Files of name resolvers and TLS libraries. Not `/etc` as a whole, because of `shadow` and the
/// keys below `/etc/ssl/private`.
const NETWORK_FILES: &[&str] = &[
    "/etc/ca-certificates",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/nsswitch.conf",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/tls/certs",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs",
    "/gnu/store",
    "/lib",
    "/lib64",
    "/nix/store",
    "/usr",
    "/var/lib/ca-certificates",
];

/// Variables that name files read by a TLS library.
const TLS_VARIABLES: &[&str] = &["SSL_CERT_DIR", "SSL_CERT_FILE"];

/// Variables that name files read by a cloud's library.
const CREDENTIAL_VARIABLES: &[&str] = &[
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
];

/// Files from which the standard library learns how many CPUs this process may use.
const SYSTEM_FILES: &[&str] = &["/proc/self/cgroup", "/proc/self/mountinfo", "/sys/fs/cgroup"];

impl Sandbox {
    /// For a process that only computes: no file, no network, no capability.
    pub fn computing() -> Self {
        let sandbox = Self {
            keeps: CapabilitySet::empty(),
            network: false,
            rings: false,
            user: None,
            mounts: false,
            files: Vec::new(),
            system_files: Vec::new(),
        };
        sandbox.read_if_there(SYSTEM_FILES.iter().map(PathBuf::from))
    }

    /// Allows reading at and below `path`. Keeps the capability needed for another user's folder.
    pub fn read(mut self, path: &Path) -> Self {
        self.keep_for(path, CapabilitySet::DAC_READ_SEARCH);
        self.files.push((path.to_owned(), AccessRights::Read));
        self
    }

    /// Allows reading, writing, making and removing at and below `path`. Keeps the capability
    /// needed for another user's folder.
    pub fn write(mut self, path: &Path) -> Self {
        self.keep_for(path, CapabilitySet::DAC_OVERRIDE);
        self.files.push((path.to_owned(), AccessRights::Write));
        self
    }

    /// Allows reading every file of the host, of any owner.
    pub fn read_everything(mut self) -> Self {
        self.keeps |= CapabilitySet::DAC_READ_SEARCH;
        self.files.push((PathBuf::from("/"), AccessRights::Read));
        self
    }

    /// Allows opening the device `path`, or the devices in that folder, if it exists.
    pub fn device(mut self, path: &Path) -> Self {
        self.system_files.push((path.to_owned(), AccessRights::Device));
        self
    }

    /// Allows connections to servers, by name and with TLS.
    pub fn network(mut self) -> Self {
        self.network = true;
        self.read_if_there(NETWORK_FILES.iter().map(PathBuf::from))
            .read_if_there(named_by(TLS_VARIABLES))
            .read_if_there(named_by(CREDENTIAL_VARIABLES))
    }

    /// Keeps the capability needed for other users' files with credentials that variables name.
    pub fn credentials(mut self) -> Self {
        for path in named_by(CREDENTIAL_VARIABLES) {
            self.keep_for(&path, CapabilitySet::DAC_READ_SEARCH);
        }
        self
    }

    /// Allows reading at and below those of these paths that exist, with the rights of the user.
    pub fn read_if_there(mut self, paths: impl IntoIterator<Item = PathBuf>) -> Self {
        self.system_files.extend(paths.into_iter().map(|path| (path, AccessRights::Read)));
        self
    }

    /// Allows locking memory beyond the limit, for a process whose limit cannot be raised.
    pub fn lock_memory(mut self) -> Self {
        self.keeps |= CapabilitySet::IPC_LOCK;
        self
    }

    /// Keeps the capability of administrators, for a process that cannot do without.
    pub fn administer(mut self) -> Self {
        self.keeps |= CapabilitySet::SYS_ADMIN;
        self
    }

    /// Allows io_uring.
    pub fn rings(mut self) -> Self {
        self.rings = true;
        self
    }

    /// Makes `user` the effective user, who must be able to reach all files of the sandbox.
    pub fn user(mut self, user: u32) -> Self {
        self.user = Some(user);
        self
    }

    /// The files and folders that it allows, whether or not they exist.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().chain(&self.system_files).map(|(path, _)| &**path)
    }

    /// Allows making detached mounts, and block devices for them; attaching a mount to a path, and
    /// unmounting, stay refused. Files are those of the user, because a process whose files
    /// Landlock guards cannot mount.
    pub fn make_mounts(mut self) -> Self {
        self.mounts = true;
        // The root of a mounted image may belong to anybody; device nodes are made where they are
        // missing.
        self.keeps |=
            CapabilitySet::SYS_ADMIN | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::MKNOD;
        self
    }

    /// Drops all other rights, for ever. True if Landlock guards the files.
    ///
    /// With `BURGEON_PROBE` in the environment, the process prints its remaining abilities.
    ///
    /// `Invalid` while the process has more than one thread.
    pub fn enter(self) -> Result<bool> {
        if thread_count()? != 1 {
            let what = "a sandbox is entered while the process has one thread";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        // Opened while that is still allowed.
        let landlock = landlock::Ruleset::new(self.network, !self.mounts)?;
        if let Some(landlock) = landlock.as_ref().filter(|_| !self.mounts) {
            for (path, access) in &self.files {
                landlock.allow(path, *access)?;
            }
            for (path, access) in &self.system_files {
                match landlock.allow(path, *access) {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
        self.user.map_or(Ok(()), user::become_user)?;
        capabilities::keep_only(self.keeps)?;
        rustix::thread::set_no_new_privs(true)
            .map_err(|e| Error::io("cannot set no_new_privs", e.into()))?;
        let guarded = landlock.is_some() && !self.mounts;
        landlock.map_or(Ok(()), landlock::Ruleset::enter)?;
        seccomp::enter(seccomp::Allowed {
            network: self.network,
            rings: self.rings,
            mounts: self.mounts,
        })?;
        probe::report(guarded);
        Ok(guarded)
    }

    /// The owner of a folder needs no capability for it, unless it lies in a private folder of
    /// somebody else's.
    fn keep_for(&mut self, path: &Path, capability: CapabilitySet) {
        let own = rustix::process::geteuid().as_raw();
        let foreign = |path: &Path| std::fs::metadata(path).ok().filter(|it| it.uid() != own);
        let is_closed = |folder| foreign(folder).is_some_and(|it| it.mode() & 0o001 == 0);
        if foreign(path).is_some() {
            self.keeps |= capability;
        }
        if path.ancestors().skip(1).any(is_closed) {
            self.keeps |= CapabilitySet::DAC_READ_SEARCH;
        }
    }
}

/// Removes this process's exemption from the OOM killer, which it inherits from its parent: it can
/// be started again.
pub fn accept_the_oom_killer() -> Result<()> {
    const SCORE: &str = "/proc/self/oom_score_adj";
    let failed = |e| Error::io(format!("cannot set {SCORE}"), e);
    let score = std::fs::read_to_string(SCORE).map_err(failed)?;
    // Without CAP_SYS_RESOURCE only a higher score can be set.
    match score.trim().starts_with('-') {
        true => std::fs::write(SCORE, "0").map_err(failed),
        false => Ok(()),
    }
}

/// The absolute paths among the values of `variables`.
fn named_by(variables: &[&str]) -> impl Iterator<Item = PathBuf> {
    let values = variables.iter().filter_map(std::env::var_os).map(PathBuf::from);
    values.filter(|path| path.is_absolute())
}

fn thread_count() -> Result<usize> {
    let failed = |e| Error::io("cannot count the threads of this process", e);
    Ok(std::fs::read_dir("/proc/self/task").map_err(failed)?.count())
}
