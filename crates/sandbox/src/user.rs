//! Gives a process another effective user, for ever.
//!
//! Permissions and the credentials of connections go by the effective user. The *real* user stays
//! root, because systemd spares at shutdown only processes that are root's by that. seccomp refuses
//! all calls by which the process could take it back (`seccomp.rs`).

use burgeon_block::{Error, Result};
use rustix::{
    process::{Gid, Uid, getgid, getuid},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

/// Makes `user` the effective user and group of this thread, and the ones to return to. Its
/// capabilities stay.
pub(crate) fn become_user(user: u32) -> Result<()> {
    let failed = |e: rustix::io::Errno| {
        Error::io(format!("cannot become the user {user} (CAP_SETUID, CAP_SETGID)"), e.into())
    };
    let CapabilitySets { effective, permitted, .. } = capabilities(None).map_err(failed)?;
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    set_thread_groups(&[]).map_err(failed)?;
    set_thread_res_gid(getgid(), gid, gid).map_err(failed)?;
    // The kernel clears the effective capabilities; the real user keeps the permitted ones.
    set_thread_res_uid(getuid(), uid, uid).map_err(failed)?;
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective, permitted, inheritable }).map_err(failed)
}
