//! The floor of the cache on a node of Kubernetes.
//!
//! ```text
//!   0 %                               80 %  85 %            100 % of the image file system in use
//!   ├── pods, images, cache ────────────┼─────┼───────────────┤
//!              the cache ends here ─────┘     └─ kubelet removes images down to 80 %, and evicts pods
//!                                                (imagefs.available < 15 %)
//! ```
//!
//! The cache makes room for everything else, but only until the floor. With less than [`LEAST`]
//! free, kubelet would remove images and pods that the cache could have spared. The default floor
//! is enough; so `setup` has a file only for a host whose configuration lowers it. That file stays
//! until an administrator removes it.

use std::path::Path;

use anyhow::Result;
use burgeon_block::Error;
use burgeon_daemon::{StateDir, protocol::CacheAmount};

use crate::config::CacheBounds;

/// The file, below the root of the host. It replaces the setting of `config.toml`.
pub(super) const FILE: &str = "etc/burgeon/config.d/kubelet.toml";
/// Per cent of the file system: kubelet's images go until so much is free.
const LEAST: u64 = 20;
const TEXT: &str = "\
# kubelet removes images when 85 % of their file system are used, until 80 % are, and evicts pods when less than
# 15 % are free: the cache ends before.
[cache]
keep-free = \"25%\"
";

/// The contents of the file, if this host needs or has it.
pub(super) fn file(state: &StateDir, cache: &CacheBounds, prefix: &Path) -> Result<Option<String>> {
    let floor = cache.keep_free.as_ref().map(|setting| setting.value);
    // On a disk of its own, the cache takes nothing from images.
    let is_low = cache.dir.is_none() && is_low(floor, size_of(state.root())?);
    let is_needed = is_low || prefix.join(FILE).exists();
    Ok(is_needed.then(|| TEXT.to_owned()))
}

/// Why the file has no effect, if it has none.
pub(super) fn problem(state: &StateDir) -> Result<Option<String>> {
    let is_low = is_low(burgeon_daemon::changed_floor(state)?, size_of(state.root())?);
    Ok(is_low.then(|| {
        format!(
            "`burgeon cache resize` has set a floor below {LEAST} % of the disk, so kubelet may remove images and \
             evict pods for the sake of the cache: `burgeon cache resize --keep-free 25%`"
        )
    }))
}

fn is_low(floor: Option<CacheAmount>, size: u64) -> bool {
    match floor {
        None => false,
        Some(CacheAmount::Percent(percent)) => u64::from(percent) < LEAST,
        Some(CacheAmount::Bytes(bytes)) => bytes < size / 100 * LEAST,
    }
}

/// The size of the file system on which the folder lies or will lie.
fn size_of(folder: &Path) -> Result<u64> {
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let found = rustix::fs::statvfs(there)
        .map_err(|e| Error::io(format!("cannot look at {}", there.display()), e.into()))?;
    Ok(found.f_blocks.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::{CacheAmount, is_low};

    #[test]
    fn only_a_floor_that_kubelet_would_notice_is_low() {
        let size = 1000 << 30;
        for (floor, expected) in [
            (None, false),
            (Some(CacheAmount::Percent(25)), false),
            (Some(CacheAmount::Percent(20)), false),
            (Some(CacheAmount::Percent(19)), true),
            (Some(CacheAmount::Bytes(200 << 30)), false),
            (Some(CacheAmount::Bytes(50 << 30)), true),
        ] {
            assert_eq!(is_low(floor, size), expected, "{floor:?}");
        }
    }
}
