//! What each process of ours gives up before it parses what others made.
//!
//! `docs/architecture.md` has the same as a table ("What each process may do"). The supervisor, and
//! the commands themselves, keep what the user gave them: they mount, and they parse records of
//! this host alone.

use std::path::Path;

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_sandbox::{Sandbox, attempts};
use burgeon_source::{
    Location,
    registry::{NOT_FOUND, ask_helpers_by},
};

use crate::{
    host::{harden, system},
    state::{paths::StateDir, record::Transport},
    transport,
};

/// It fetches a manifest from `store`, decodes it, and writes what a mount needs into `folder`.
pub(crate) fn preparing(store: &Location, folder: &Path) -> Sandbox {
    from_store(Sandbox::computing().write(folder), store)
}

/// In a sandbox nothing can be executed: this process has the credentials that it was given.
pub(crate) fn do_without_helpers() {
    ask_helpers_by(Box::new(|_, _| Ok(NOT_FOUND.to_owned())));
}

/// A command reads an archive from a descriptor that is open, from `layout` or from the network, and
/// makes an image of it in the folder `store`; what it notes about that lies in `state`.
pub fn reading(state: &StateDir, store: &Path, layout: Option<&Path>, network: bool) -> Sandbox {
    let sandbox = Sandbox::computing().write(state.root()).write(store);
    let sandbox = if network { sandbox.network() } else { sandbox };
    match layout {
        Some(folder) => sandbox.read(folder),
        None => sandbox,
    }
}

/// It answers reads of every mount, from caches and profiles in `state`, from stores, and from files
/// of this host that images refer to by their paths.
pub(crate) fn serving(state: &StateDir, io: ServingIo) -> Sandbox {
    // The directory, because users remove folders in it, and others take their place; and each folder,
    // because it may be a link to another disk.
    let folders = [
        state.root().to_owned(),
        state.images(),
        state.profiles(),
        state.writes(),
        state.mounts(),
        state.run(),
    ];
    let sandbox = Sandbox::computing().read_everything().network();
    let sandbox = folders.iter().fold(sandbox, |sandbox, folder| sandbox.write(folder));
    let sandbox = match harden::can_lock_without_capability() {
        true => sandbox,
        false => sandbox.lock_memory(),
    };
    let sandbox = if io.rings { sandbox.rings() } else { sandbox };
    match io.ublk {
        true => sandbox.administer_ublk().device(Path::new("/dev")),
        false => sandbox,
    }
}

/// What of the kernel's interfaces a server may be asked to use while it lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ServingIo {
    /// Whether mounts can go over ublk.
    pub(crate) ublk: bool,
    /// Whether mounts can go over io_uring in any way.
    pub(crate) rings: bool,
}

impl ServingIo {
    /// Decided when a server starts: which mounts will come is unknown, but not what this kernel
    /// offers them.
    pub(crate) fn of_this_kernel() -> Self {
        let ublk = transport::has_ublk();
        Self { ublk, rings: ublk || system::fuse_rings().is_ok() }
    }

    /// Whether a mount over `transport` can be served.
    pub(crate) fn serves(self, transport: Transport) -> bool {
        match transport {
            Transport::Fuse => true,
            Transport::Rings { .. } => self.rings,
            Transport::Ublk { .. } => self.ublk,
        }
    }
}

/// Reads objects of `store`.
fn from_store(sandbox: Sandbox, store: &Location) -> Sandbox {
    match store.folder() {
        Some(path) => sandbox.read(path),
        None => sandbox.network(),
    }
}

/// Enters the sandbox of `role`, with `folder` for all that it is given, and returns the names of
/// what it can still do of what no role should. For tests; harmless everywhere.
///
/// `Invalid` for a role that is not there. `nothing` is no sandbox: it shows that the attempts work.
pub fn probe(role: &str, folder: &Path) -> Result<Vec<&'static str>> {
    let here = Location::from(folder.to_owned());
    let remote = || Location::parse("https://store.example/images");
    let sandbox = match role {
        "nothing" => None,
        "preparing" => Some(preparing(&here, folder)),
        "preparing-remote" => Some(preparing(&remote()?, folder)),
        "reading" => Some(reading(&StateDir::open(folder)?, folder, Some(folder), false)),
        "reading-remote" => Some(reading(&StateDir::open(folder)?, folder, None, true)),
        "serving" => {
            let io = ServingIo { ublk: false, rings: false };
            Some(serving(&StateDir::open(folder)?, io))
        }
        "serving-rings" => {
            let io = ServingIo { ublk: false, rings: true };
            Some(serving(&StateDir::open(folder)?, io))
        }
        _ => return Err(Error::new(ErrorKind::Invalid, format!("there is no role {role:?}"))),
    };
    let guarded = match sandbox {
        Some(sandbox) => sandbox.enter()?,
        None => false,
    };
    let done = attempts().iter().filter(|(_, attempt)| attempt()).map(|(name, _)| *name);
    Ok(guarded.then_some("landlock").into_iter().chain(done).collect())
}
