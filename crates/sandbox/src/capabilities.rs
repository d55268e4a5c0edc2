//! Drops capabilities, in all of a thread's sets.

use burgeon_block::{Error, Result};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities,
};

/// Keeps only those capabilities of `kept` that this thread has.
pub(crate) fn keep_only(kept: CapabilitySet) -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io("cannot drop capabilities", e.into());
    let now = capabilities(None).map_err(failed)?;
    if now.effective.contains(CapabilitySet::SETPCAP) {
        drop_bounding_set();
    }
    // It fails on kernels without such a set, where there is nothing to clear.
    let _ = clear_ambient_capability_set();
    let sets = CapabilitySets {
        effective: now.effective & kept,
        permitted: now.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(failed)
}

/// Drops the capabilities that executing a file could give back.
fn drop_bounding_set() {
    for capability in 0..64 {
        // SAFETY: PR_CAPBSET_DROP takes a number and touches no memory of this process. It fails
        // beyond the kernel's last capability.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability as libc::c_ulong, 0, 0, 0) };
    }
}
