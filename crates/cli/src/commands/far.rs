//! Burgeon images in remote stores, by name. The store resolves the name; without an answer, this
//! host's last mount does.
//!
//! ```text
//!   mounted before, and prepared here? ─ no ──► the daemon asks the store
//!        └ yes ─► --pull newer: asked for up to 10 s ─► without an answer, the image that is here
//! ```

use std::{sync::mpsc, thread};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind};
use burgeon_daemon::is_prepared;
use burgeon_image::catalog;
use burgeon_oci::{PATIENCE, Pull, Tags, is_no_answer, never};
use burgeon_source::{Access, Store};

use super::Context;

/// Resolves `name` in the remote store. `None` means that the daemon resolves it. The flag says
/// that the store is unreachable or must not be asked.
pub(super) fn find(context: &Context, name: &str, pull: Pull) -> Result<(Option<Digest>, bool)> {
    let location = context.store_location();
    let tags = Tags { folder: &context.state.tags(), pull };
    let record = tags.recall_in(&location.to_string(), name);
    let here = record.and_then(|record| {
        let digest = record.manifest()?;
        is_prepared(&context.state, &location, &digest).then_some((record, digest))
    });
    let Some((record, digest)) = here else {
        return match pull {
            Pull::Never => Err(never(&format!("{name} of {location}")).into()),
            _ => Ok((None, false)),
        };
    };
    match pull {
        Pull::Always => return Ok((None, false)),
        Pull::Missing => return Ok((Some(digest), false)),
        Pull::Never => return Ok((Some(digest), true)),
        Pull::Newer => {}
    }
    let (tell, told) = mpsc::channel();
    let (store, wanted) = (location.clone(), name.to_owned());
    // Without an answer, the thread ends with the process.
    thread::spawn(move || {
        let open = Store::open(&store, &Access::from_env());
        let found = open.and_then(|open| catalog::resolve(&open, &wanted)?.digest());
        let _ = tell.send(found);
    });
    let answer = told.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        let seconds = PATIENCE.as_secs();
        let what = format!("cannot ask {location} for {name}: no answer within {seconds} s");
        Err(Error::new(ErrorKind::Unavailable, what))
    });
    match answer {
        Ok(now) => Ok((Some(now), false)),
        Err(error) if is_no_answer(&error) => {
            eprintln!("note: {}", record.note(&error));
            Ok((Some(digest), true))
        }
        // The command that needs the image reports the existing names.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok((None, false)),
        Err(error) => Err(error.into()),
    }
}

/// Records that `name` of the remote store means `digest`. Best effort: it is used only when the
/// store is unreachable.
pub(super) fn remember(context: &Context, name: &str, digest: &Digest) {
    let location = context.store_location();
    if location.folder().is_none() && !catalog::is_reserved(name) {
        let tags = Tags { folder: &context.state.tags(), pull: Pull::default() };
        let _ = tags.remember_in(&location.to_string(), name, digest);
    }
}
