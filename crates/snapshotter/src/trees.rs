//! Finds the trees of a difference by the mounts that containerd was given for them.
//!
//! ```text
//!   left    bind or overlay of ROOT/snapshots/ID/fs and ROOT/chains/ID: the layers below
//!   right   the same layers and one more, or a native container's mount
//! ```
//!
//! Paths are taken apart into ids, and made anew from them: nothing outside of the root is read.
//! Anything else is left to containerd's own differ.

use std::{fs::File, path::Path};

use burgeon_block::{Error, Result};

use crate::{
    api::Mount,
    changes::Trees,
    model::{Snapshot, SnapshotKind},
    snapshotter::{CallResult, Snapshotter},
};

/// A folder of the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// `snapshots/ID/fs`.
    Layer(u64),
    /// `chains/ID`.
    Chain(u64),
}

impl Place {
    fn of(root: &Path, path: &str) -> Option<Self> {
        let rest = Path::new(path).strip_prefix(root).ok()?.to_str()?;
        let id = |text: &str| {
            let id: u64 = text.parse().ok()?;
            (id.to_string() == text).then_some(id)
        };
        match rest.split('/').collect::<Vec<_>>()[..] {
            ["snapshots", name, "fs"] => Some(Self::Layer(id(name)?)),
            ["chains", name] => Some(Self::Chain(id(name)?)),
            _ => None,
        }
    }

    fn id(self) -> u64 {
        let (Self::Layer(id) | Self::Chain(id)) = self;
        id
    }
}

/// The folders of a snapshot, the nearest first; `None` if a mount is not one of ours.
fn places(root: &Path, mounts: &[Mount]) -> Option<Vec<Place>> {
    let [mount] = mounts else { return None };
    if !mount.target.is_empty() {
        return None;
    }
    if mount.kind == "bind" {
        let is_known = |option: &String| matches!(option.as_str(), "ro" | "rw" | "rbind");
        let is_ours = mount.options.iter().all(is_known);
        return is_ours.then(|| Some(vec![Place::of(root, &mount.source)?]))?;
    }
    if mount.kind != "overlay" {
        return None;
    }
    let (mut upper, mut lower) = (None, Vec::new());
    for option in &mount.options {
        match option.split_once('=')? {
            ("index", "off") | ("workdir", _) => {}
            ("upperdir", path) if upper.is_none() => upper = Some(Place::of(root, path)?),
            ("lowerdir", paths) if lower.is_empty() => {
                lower =
                    paths.split(':').map(|path| Place::of(root, path)).collect::<Option<_>>()?;
            }
            _ => return None,
        }
    }
    (!lower.is_empty()).then(|| upper.into_iter().chain(lower).collect())
}

/// The trees of a difference.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) trees: Trees,
    /// The snapshots whose folders are read.
    pub(crate) used: Vec<Snapshot>,
}

impl Snapshotter {
    /// The trees behind the mounts; `None` if containerd's own differ has to compare them.
    pub(crate) fn trees(&self, left: &[Mount], right: &[Mount]) -> CallResult<Option<Found>> {
        let root = self.disk.root();
        let (Some(mut before), Some(now)) = (places(root, left), places(root, right)) else {
            return Ok(None);
        };
        if let [Place::Layer(id)] = before[..]
            && self
                .by_id(id)
                .is_some_and(|one| one.kind == SnapshotKind::View && one.parent.is_none())
        {
            // The view of nothing.
            before.clear();
        }
        let used: Option<Vec<_>> =
            now.iter().chain(&before).map(|place| self.by_id(place.id())).collect();
        let Some(used) = used else { return Ok(None) };
        let trees = match (&now[..], &before[..]) {
            ([Place::Chain(_)], [Place::Chain(_)]) => self.native_trees(&used[0], &used[1])?,
            ([Place::Layer(id), below @ ..], before) if below == before => {
                let mut paths = Vec::new();
                for (place, snapshot) in now[1..].iter().zip(&used[1..]) {
                    paths.push(match (place, &snapshot.remote) {
                        (Place::Layer(id), _) => self.disk.layer(*id),
                        (Place::Chain(id), Some(remote)) => self.chains()?.mounted(*id, remote)?,
                        (Place::Chain(_), None) => return Ok(None),
                    });
                }
                let upper = self.disk.layer(*id);
                let failed = |e| Error::io(format!("cannot open the layers of {upper:?}"), e);
                Some(Trees::overlay(&upper, &paths).map_err(failed)?)
            }
            _ => None,
        };
        Ok(trees.map(|trees| Found { trees, used }))
    }

    /// A native container and its chain, if both are mounts of one seed: else their inodes say
    /// nothing about one another.
    fn native_trees(&self, now: &Snapshot, before: &Snapshot) -> CallResult<Option<Trees>> {
        let is_own = now.native.is_some()
            && now.kind == SnapshotKind::Active
            && now.parent.as_ref() == Some(&before.name);
        let (true, Some(remote)) = (is_own, &before.remote) else { return Ok(None) };
        self.native_mounts(now)?;
        let chains = self.chains()?;
        let before = chains.mounted(before.id, remote)?;
        let now = self.disk.chains().join(now.id.to_string());
        if !chains.has_same_seed(&now, &before)? {
            tracing::info!(?now, ?before, "a container and its chain are of two seeds");
            return Ok(None);
        }
        let failed = |e| Error::io(format!("cannot open {}", now.display()), e);
        Ok(Some(Trees::native(&now, &before).map_err(failed)?))
    }

    /// Fails if a snapshot has been removed since, or a native one committed: its files may have
    /// been removed while they were read.
    pub(crate) fn check_used(&self, used: &[Snapshot]) -> Result<()> {
        let is_gone = |one: &&Snapshot| match self.by_id(one.id) {
            Some(now) => now.native.is_some() != one.native.is_some(),
            None => true,
        };
        match used.iter().find(is_gone) {
            None => Ok(()),
            Some(one) => {
                let what = format!("{:?} was removed while it was compared", one.name);
                Err(Error::new(burgeon_block::ErrorKind::NotFound, what))
            }
        }
    }

    /// True if two files of mounts of one seed have the same data for certain.
    pub(crate) fn have_same_extents(&self, one: &File, other: &File) -> bool {
        self.chains.as_ref().is_some_and(|chains| chains.have_same_extents(one, other))
    }

    fn by_id(&self, id: u64) -> Option<Snapshot> {
        self.lock().iter().find(|one| one.id == id).cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{
        Place::{Chain, Layer},
        places,
    };
    use crate::api::Mount;

    fn found(kind: &str, source: &str, options: &[&str]) -> Option<Vec<super::Place>> {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        places(Path::new("/root"), &[Mount::new(kind, source, options)])
    }

    #[test]
    fn mounts_of_ours_are_known_by_their_ids() {
        let bind = |source: &str| found("bind", source, &["rw", "rbind"]);
        assert_eq!(bind("/root/snapshots/7/fs"), Some(vec![Layer(7)]));
        assert_eq!(bind("/root/chains/8"), Some(vec![Chain(8)]));
        for other in [
            "/root/snapshots/7",
            "/root/snapshots/07/fs",
            "/root/snapshots/7/fs/etc",
            "/root/snapshots/../7/fs",
            "/root/chains/+8",
            "/other/chains/8",
            "/root",
            "",
        ] {
            assert_eq!(bind(other), None, "{other}");
        }
        assert_eq!(found("bind", "/root/chains/8", &["ro", "uidmap=0:1:1"]), None);
        assert_eq!(found("btrfs", "/root/chains/8", &[]), None);
        let overlay = |options: &[&str]| found("overlay", "overlay", options);
        let lower = "lowerdir=/root/snapshots/2/fs:/root/chains/1";
        assert_eq!(overlay(&["index=off", lower]), Some(vec![Layer(2), Chain(1)]));
        let upper = ["workdir=/root/snapshots/3/work", "upperdir=/root/snapshots/3/fs", lower];
        assert_eq!(overlay(&upper), Some(vec![Layer(3), Layer(2), Chain(1)]));
        for other in ["lowerdir=/root/chains/1:/etc", "metacopy=on", "lowerdir", "index=on"] {
            assert_eq!(overlay(&[lower, other]), None, "{other}");
        }
        let two = vec![Mount::new("bind", "/root/chains/8", Vec::new()); 2];
        assert_eq!(places(Path::new("/root"), &two), None);
        let mut below = two[..1].to_vec();
        below[0].target = "/etc".to_owned();
        assert_eq!(places(Path::new("/root"), &below), None);
    }
}
