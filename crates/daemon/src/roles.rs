//! The privileges that each process drops before it parses untrusted data.
//!
//! `docs/architecture.md` has the same as a table ("Privileges of each process"). The supervisor,
//! and the commands themselves, keep the user's privileges: they place mounts, and execute
//! credential helpers.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_sandbox::Sandbox;
use burgeon_source::{
    Location, default_file_of_google,
    registry::{NOT_FOUND, Name, ask_helpers_by},
};
use serde::{Deserialize, Serialize};

use crate::{
    host::{harden, own_root, system},
    state::{cache_dir::CacheDir, paths::StateDir, record::Transport},
    transport,
};

/// It fetches a manifest from `store`, decodes it, and writes the files of a mount into `folder`.
pub(crate) fn preparing(store: &Location, folder: &Path) -> Sandbox {
    from_store(Sandbox::computing().write(folder), store)
}

/// Disables credential helpers: in a sandbox nothing can be executed, and this process has its
/// credentials already.
pub(crate) fn do_without_helpers() {
    ask_helpers_by(Box::new(|_, _| Ok(NOT_FOUND.to_owned())));
}

/// The resources that a command's child may use.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Reach {
    /// The folders of facts about images, of tags, and of documents; all are read.
    pub records: Vec<PathBuf>,
    /// A folder for temporary copies.
    pub scratch: PathBuf,
    /// The store of new images.
    pub store: Location,
    /// An OCI layout, which is read.
    pub layout: Option<PathBuf>,
    /// A folder with blobs, which is read.
    pub content: Option<PathBuf>,
    /// The layout is written to.
    pub writes_layout: bool,
    /// The source is remote.
    pub is_remote: bool,
    /// The registry that it may log in to.
    pub registry: Option<Name>,
}

impl Reach {
    /// The sandbox of a process that makes an image from an open archive, a layout, a registry or
    /// the web. Folders to be written to must exist.
    pub(crate) fn sandbox(&self) -> Sandbox {
        let sandbox = self
            .records
            .iter()
            .fold(Sandbox::computing(), |sandbox, folder| sandbox.read_if_there([folder.clone()]));
        let sandbox = sandbox.write(&self.scratch);
        let sandbox = match (self.store.folder(), self.is_remote) {
            (Some(folder), false) => sandbox.write(folder),
            (Some(folder), true) => sandbox.write(folder).network(),
            (None, _) => with_credentials_of(sandbox.network(), &self.store),
        };
        let sandbox = sandbox.read_if_there(self.content.clone());
        // A missing folder is reported when it is read.
        match self.layout.as_deref().filter(|folder| folder.exists()) {
            Some(folder) if self.writes_layout => sandbox.write(folder),
            Some(folder) => sandbox.read(folder),
            None => sandbox,
        }
    }

    /// For tests: everything in `folder`.
    pub(crate) fn within(folder: &Path, is_remote: bool) -> Self {
        Self {
            records: Vec::new(),
            scratch: folder.to_owned(),
            store: folder.to_owned().into(),
            layout: (!is_remote).then(|| folder.to_owned()),
            content: None,
            writes_layout: false,
            is_remote,
            registry: None,
        }
    }
}

/// Kernel files that a server reads: features, also of modules that are loaded later, and CPUs.
const KERNEL_FILES: [&str; 3] =
    ["/proc/sys/kernel/io_uring_disabled", "/sys/module", "/sys/devices/system/cpu"];

/// The folders of the state directory in which a server writes, beside that of the cache: its
/// socket and recorded reads. Nothing else, because others rely on it: they take the names of files
/// from maps, and credentials and stores from records. The opener opens the checksums that it
/// records.
fn written_by_server(state: &StateDir) -> [PathBuf; 1] {
    [state.run()]
}

/// The folders that change while a server uses them. Another disk may be mounted on each. That of
/// the cache may be elsewhere, and may be one that the server does not get.
pub(crate) fn folders_of_server(state: &StateDir) -> [PathBuf; 5] {
    let cache = CacheDir::read(state).folder(state);
    [state.images(), cache, state.writes(), state.mounts(), state.run()]
}

/// It answers reads of every mount, from caches and profiles in `state`, and from stores. The
/// opener opens all other files for it.
///
/// Moves this process to a root of its own with these files, where that is possible: the sandbox
/// then has a user of its own.
pub(crate) fn serving(state: &StateDir, io: ServingIo) -> Result<Sandbox> {
    // Each folder, because another disk may be mounted on it.
    let read = [state.root().to_owned(), state.profiles(), state.store()];
    let sandbox = Sandbox::computing().network();
    let sandbox = sandbox.read_if_there(KERNEL_FILES.map(PathBuf::from));
    let dir = CacheDir::read(state);
    let elsewhere = dir.elsewhere();
    let cache = dir.folder(state);
    let is_given = dir.problem.is_none();
    let folders = folders_of_server(state).into_iter().filter(|it| is_given || *it != cache);
    let sandbox = sandbox.read_if_there(read.into_iter().chain(folders));
    let written = written_by_server(state).into_iter().chain(is_given.then(|| cache.clone()));
    let sandbox = written.fold(sandbox, |sandbox, folder| sandbox.write(&folder));
    let sandbox = match harden::can_lock_without_capability() {
        true => sandbox,
        false => sandbox.lock_memory(),
    };
    let sandbox = if io.rings { sandbox.rings() } else { sandbox };
    let sandbox = match io.ublk && system::rings_take_an_administrator() {
        true => {
            tracing::warn!(
                "kernel.io_uring_disabled is 1, so only an administrator can serve mounts over \
                 ublk: the server keeps CAP_SYS_ADMIN"
            );
            sandbox.administer()
        }
        false => sandbox,
    };
    let paths = sandbox.paths().filter(|path| Some(*path) != elsewhere);
    let (own, others): (Vec<_>, Vec<_>) = paths.partition(|path| path.starts_with(state.root()));
    let own: Vec<_> = std::iter::once(state.root()).chain(own).collect();
    let contents = own_root::Contents { own: &own, elsewhere, others: &others };
    if let Err(reason) = own_root::attempt(contents) {
        tracing::info!(%reason, "the server stays root, without capabilities");
        return Ok(sandbox);
    }
    own_root::enter(contents)?;
    Ok(sandbox.user(own_root::USER))
}

/// It opens any file of this host for reading, at the server's request; the checksums that the
/// server records, in folders of `state`, and with ublk its devices, whose numbers are unknown now,
/// for writing.
pub(crate) fn opening(state: &StateDir, ublk: bool) -> Sandbox {
    let sandbox = Sandbox::computing().read_everything();
    let recorded = recorded_by_opener(state);
    let sandbox = recorded.iter().fold(sandbox, |sandbox, folder| sandbox.write(folder));
    let sandbox = if ublk { sandbox.device(Path::new("/dev")) } else { sandbox };
    match harden::can_lock_without_capability() {
        true => sandbox,
        false => sandbox.lock_memory(),
    }
}

/// The folders of the state directory with recorded checksums.
pub(crate) fn recorded_by_opener(state: &StateDir) -> [PathBuf; 3] {
    [state.images(), state.writes(), state.mounts()]
}

/// It makes the block devices and mounts of a supervisor, with rings for a mount over ublk.
pub(crate) fn helping(rings: bool) -> Sandbox {
    let sandbox = Sandbox::computing().make_mounts();
    if rings { sandbox.rings() } else { sandbox }
}

/// It holds descriptors, and copies messages of a fixed length.
pub(crate) fn holding() -> Sandbox {
    Sandbox::computing()
}

/// The kernel interfaces that a server can use during its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ServingIo {
    /// It can serve mounts over ublk.
    pub(crate) ublk: bool,
    /// It can serve mounts over io_uring of any kind.
    pub(crate) rings: bool,
}

impl ServingIo {
    /// Decided when a server starts: the future mounts are unknown, but the kernel's features are
    /// not. The supervisor has loaded the ublk driver by then.
    pub(crate) fn of_this_kernel() -> Self {
        let ublk = transport::uses_ublk();
        Self { ublk, rings: ublk || system::fuse_rings().is_ok() }
    }

    /// True if a mount over `transport` can be served.
    pub(crate) fn serves(self, transport: Transport) -> bool {
        match transport {
            Transport::Fuse => true,
            Transport::Rings { .. } => self.rings,
            Transport::Ublk { .. } => self.ublk,
        }
    }
}

/// Allows reading objects of `store`.
fn from_store(sandbox: Sandbox, store: &Location) -> Sandbox {
    match store.folder() {
        Some(path) => sandbox.read(path),
        None => with_credentials_of(sandbox.network(), store),
    }
}

/// Allows the files with credentials for `store`: those that variables name, whoever owns them, and
/// the default ones.
fn with_credentials_of(sandbox: Sandbox, store: &Location) -> Sandbox {
    let sandbox = sandbox.credentials();
    match store.is_google() {
        true => sandbox.read_if_there(default_file_of_google()),
        false => sandbox,
    }
}

/// The role of a process of this program.
pub struct Role {
    /// Its name.
    pub name: &'static str,
    /// The verb by which the program is run as such a process.
    pub process: &'static str,
    /// Its sandbox with a folder for all of its paths; `None` if it has no sandbox.
    sandbox: Option<fn(&Path) -> Result<Sandbox>>,
}

/// All roles. A process has several if its privileges depend on its work.
pub const ROLES: &[Role] = &[
    Role { name: "supervising", process: "__supervise", sandbox: None },
    Role { name: "helping", process: "__help", sandbox: Some(|_| Ok(helping(false))) },
    Role { name: "helping-rings", process: "__help", sandbox: Some(|_| Ok(helping(true))) },
    Role {
        name: "preparing",
        process: "__prepare",
        sandbox: Some(|folder| Ok(preparing(&folder.to_owned().into(), folder))),
    },
    Role {
        name: "preparing-remote",
        process: "__prepare",
        sandbox: Some(|folder| {
            Ok(preparing(&Location::parse("https://store.example/images")?, folder))
        }),
    },
    Role {
        name: "reading",
        process: "__read",
        sandbox: Some(|folder| Ok(Reach::within(folder, false).sandbox())),
    },
    Role {
        name: "reading-remote",
        process: "__read",
        sandbox: Some(|folder| Ok(Reach::within(folder, true).sandbox())),
    },
    Role {
        name: "opening",
        process: "__open",
        sandbox: Some(|folder| Ok(opening(&StateDir::open(folder)?, false))),
    },
    Role {
        name: "opening-ublk",
        process: "__open",
        sandbox: Some(|folder| Ok(opening(&StateDir::open(folder)?, true))),
    },
    Role { name: "supervising-cache", process: "__accelerate-supervise", sandbox: None },
    Role { name: "accelerating", process: "__accelerate-serve", sandbox: None },
    Role { name: "looping", process: "__accelerate-loop", sandbox: None },
    Role { name: "starting-ublk", process: "__accelerate-ublk", sandbox: None },
    Role { name: "holding", process: "__hold", sandbox: Some(|_| Ok(holding())) },
    Role {
        name: "serving",
        process: "__serve",
        sandbox: Some(|folder| {
            serving(&StateDir::open(folder)?, ServingIo { ublk: false, rings: false })
        }),
    },
    Role {
        name: "serving-rings",
        process: "__serve",
        sandbox: Some(|folder| {
            serving(&StateDir::open(folder)?, ServingIo { ublk: false, rings: true })
        }),
    },
    Role {
        name: "serving-ublk",
        process: "__serve",
        sandbox: Some(|folder| {
            serving(&StateDir::open(folder)?, ServingIo { ublk: true, rings: true })
        }),
    },
];

/// Enters the sandbox of the role `name`, with `folder` for all of its paths, and returns the names
/// of forbidden operations that it can still do, and those of `parts` of the folder in which it can
/// make a file. For tests; harmless everywhere.
///
/// `Invalid` for an unknown role. A role without a sandbox shows that the attempts work.
pub fn probe(name: &str, folder: &Path, parts: &[OsString]) -> Result<Vec<String>> {
    let role = ROLES
        .iter()
        .find(|role| role.name == name)
        .ok_or_else(|| Error::new(ErrorKind::Invalid, format!("there is no role {name:?}")))?;
    let guarded = match role.sandbox {
        Some(sandbox) => sandbox(folder)?.enter()?,
        None => false,
    };
    let allowed = burgeon_sandbox::allowed(guarded).into_iter().map(str::to_owned);
    let is_writable = |part: &&OsString| {
        let file = folder.join(part).join("probe");
        File::create_new(&file).and_then(|_| fs::remove_file(&file)).is_ok()
    };
    let written = parts.iter().filter(is_writable);
    Ok(allowed.chain(written.map(|part| part.to_string_lossy().into_owned())).collect())
}
