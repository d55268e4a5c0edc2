//! A local disk that is full or read-only: the free space and the remedies.

use std::path::Path;

use burgeon_block::{Error, ErrorKind};
use rustix::{fs::statvfs, io::Errno};

use super::Context;
use crate::output::bytes;

/// Adds the free space and the remedies to the error, if a local disk is full or read-only.
/// `stores_images` is true for a command that may put an image into the store.
pub(super) fn explain(
    context: &Context,
    error: anyhow::Error,
    stores_images: bool,
) -> anyhow::Error {
    let text = format!("{error:#}");
    let Some(kind) = error.downcast_ref().map(Error::kind) else { return error };
    let root = context.state.root();
    let location = context.store_location();
    let names = |place: &Path| text.contains(&format!("{}/", place.display()));
    let is_ours = names(root) || location.folder().is_some_and(names);
    let is_of = |all: &[Errno]| all.iter().any(|errno| text.contains(&errno.to_string()));
    if is_ours && is_of(&[Errno::ROFS]) {
        let what = format!(
            "{text}: mount that file system writable (`dmesg` tells whether the kernel made it \
             read-only after an error), or name another directory with --state-dir or --store"
        );
        return Error::new(kind, what).into();
    }
    // Other errors of this kind, such as a registry without room, name their own remedy; and
    // another disk, such as that of an export, its own place.
    let is_full = kind == ErrorKind::NoSpace && is_of(&[Errno::NOSPC, Errno::DQUOT]);
    if !is_full || !(is_ours || stores_images) {
        return error;
    }
    let is_store = stores_images && (location.folder().is_some_and(names) || !names(root));
    let store = location.folder().filter(|_| is_store);
    let mut free: Vec<_> = [store, Some(root)]
        .into_iter()
        .flatten()
        .filter_map(|place| Some((free_in(place)?, place)))
        .collect();
    free.dedup_by_key(|(free, _)| *free);
    let free: Vec<_> = free
        .iter()
        .map(|(free, place)| format!("{} in {}", bytes(*free), place.display()))
        .collect();
    let remedy = match is_store {
        true => {
            "an image needs about as much as its compressed data: free some space (`burgeon gc` \
             removes unneeded data), or name a folder on another disk with --store or --state-dir"
        }
        false => {
            "free some space on that disk: `burgeon gc` removes unneeded data, and `burgeon cache \
             evict SIZE` data that can be fetched again"
        }
    };
    let what = format!("{text}; free now: {}; {remedy}", free.join(", "));
    Error::new(ErrorKind::NoSpace, what).into()
}

/// Bytes that this process could still allocate in the file system of `folder`.
pub(super) fn free_in(folder: &Path) -> Option<u64> {
    let stat = statvfs(folder).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}
