//! What each process of ours gives up before it parses what others made.
//!
//! `docs/architecture.md` has the same as a table ("What each process may do"). The supervisor, and
//! the commands themselves, keep what the user gave them: they mount, and they parse records of
//! this host alone.

use std::path::Path;

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_sandbox::{Sandbox, attempts};
use burgeon_source::Location;

/// It fetches a manifest from `store`, decodes it, and writes what a mount needs into `folder`.
pub(crate) fn preparing(store: &Location, folder: &Path) -> Sandbox {
    from_store(Sandbox::computing().write(folder), store)
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
        _ => return Err(Error::new(ErrorKind::Invalid, format!("there is no role {role:?}"))),
    };
    let guarded = match sandbox {
        Some(sandbox) => sandbox.enter()?,
        None => false,
    };
    let done = attempts().iter().filter(|(_, attempt)| attempt()).map(|(name, _)| *name);
    Ok(guarded.then_some("landlock").into_iter().chain(done).collect())
}
