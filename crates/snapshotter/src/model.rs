//! The state machine of snapshots, without disk and network.
//!
//! ```text
//!   Prepare ──► active ── Commit ──► committed ◄── parent of ── active, view
//!      │          │                      │
//!      │          └────── Remove ────────┴── Remove, while it has no children
//!   View ─────► view ──── Remove
//! ```
//!
//! Each change has two halves, because what lies between them is I/O: a `plan_…` checks the change
//! and returns the snapshot as it will be; [`Snapshots::put`] or [`Snapshots::forget`] applies it
//! when the disk has it.
//!
//! Invariants, held by `tests/model.rs`: names are unique over all kinds; a parent is committed and
//! exists as long as a child does; a committed snapshot never becomes another kind; ids are never
//! given twice.

use std::{
    collections::{BTreeMap, HashMap},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

/// The longest name or key, in bytes. Keys of image volumes are paths.
pub const NAME_MAX: usize = 8 << 10;
/// Most labels of a snapshot.
pub const LABELS_MAX: usize = 1024;
/// Most bytes of all labels of a snapshot. containerd bounds each at 4096.
pub const LABEL_BYTES_MAX: usize = 256 << 10;
/// Most snapshots.
pub const SNAPSHOTS_MAX: usize = 200_000;
/// Most snapshots above one another: an image has at most 512 layers.
pub const DEPTH_MAX: usize = 1024;

/// Most sources of a chain that are kept.
pub const SOURCES_MAX: usize = 16;

/// The kind of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// Read-only, with a parent of its own.
    View,
    /// Writable; can be committed.
    Active,
    /// Never changes; can be a parent.
    Committed,
}

impl SnapshotKind {
    /// Its name in filters.
    pub fn name(self) -> &'static str {
        match self {
            Self::View => "view",
            Self::Active => "active",
            Self::Committed => "committed",
        }
    }
}

/// Disk space of a snapshot alone, without its parents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes that are allocated.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

/// The places that a chain can be mounted from, the first one that was claimed first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RemoteLayer {
    /// References as `Layers::mount` of `remote.rs` takes them.
    pub sources: Vec<String>,
}

/// A container with a mount of its own.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Native {
    /// Bytes in use on the mount when it was new.
    pub used_at_first: Option<u64>,
}

/// Labels, by key.
pub type Labels = BTreeMap<String, String>;

/// A snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// Names its folder and its record.
    pub id: u64,
    /// Its key, or its name once it is committed.
    pub name: String,
    /// The name of its parent.
    pub parent: Option<String>,
    /// Its kind.
    pub kind: SnapshotKind,
    /// The labels that containerd gave it.
    pub labels: Labels,
    /// When it was prepared or committed.
    pub created: SystemTime,
    /// When it, or a label, changed last.
    pub updated: SystemTime,
    /// Measured at the commit.
    pub usage: Option<Usage>,
    /// The place of its files, if they were never unpacked here.
    #[serde(default)]
    pub remote: Option<RemoteLayer>,
    /// Why a layer that containerd asked for by its chain ID was unpacked.
    #[serde(default)]
    pub why_local: Option<String>,
    /// Set if it has a mount of its own.
    #[serde(default)]
    pub native: Option<Native>,
    /// Why it has none, if it should have one.
    #[serde(default)]
    pub why_overlay: Option<String>,
}

/// The reason why a change or a question is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// No snapshot has this name.
    NotFound(String),
    /// A snapshot with this name exists.
    Exists(String),
    /// The snapshot has the wrong kind, or children.
    Precondition(String),
    /// The request is wrong by itself.
    Invalid(String),
    /// There are too many snapshots.
    Full(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotFound(what)
            | Self::Exists(what)
            | Self::Precondition(what)
            | Self::Invalid(what)
            | Self::Full(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Refusal {}

/// All snapshots.
#[derive(Debug, Default)]
pub struct Snapshots {
    by_name: BTreeMap<String, Snapshot>,
    /// Number of children, of names that have some.
    children: HashMap<String, usize>,
    last_id: u64,
}

impl Snapshots {
    /// The snapshots that records hold; ids up to `last_id` are taken.
    pub fn new(snapshots: impl IntoIterator<Item = Snapshot>, last_id: u64) -> Self {
        let mut all = Self { last_id, ..Self::default() };
        snapshots.into_iter().for_each(|snapshot| all.put(None, snapshot));
        all
    }

    /// Checks that `name` can become a view or an active snapshot over `parent`.
    pub fn plan_create(
        &mut self,
        kind: SnapshotKind,
        name: &str,
        parent: Option<&str>,
        labels: Labels,
        now: SystemTime,
    ) -> Result<Snapshot, Refusal> {
        self.check_create(name, parent, &labels)?;
        self.last_id += 1;
        Ok(Snapshot {
            id: self.last_id,
            name: name.to_owned(),
            parent: parent.map(str::to_owned),
            kind,
            labels,
            created: now,
            updated: now,
            usage: None,
            remote: None,
            why_local: None,
            native: None,
            why_overlay: None,
        })
    }

    /// The checks of [`Self::plan_create`].
    pub fn check_create(
        &self,
        name: &str,
        parent: Option<&str>,
        labels: &Labels,
    ) -> Result<(), Refusal> {
        self.check_new(name, labels)?;
        if self.by_name.len() >= SNAPSHOTS_MAX {
            let what = format!("there are {SNAPSHOTS_MAX} snapshots: remove some");
            return Err(Refusal::Full(what));
        }
        if let Some(parent) = parent {
            if self.get(parent)?.kind != SnapshotKind::Committed {
                let what = format!("the parent {parent:?} is not committed");
                return Err(Refusal::Invalid(what));
            }
            if self.lineage(parent)?.len() >= DEPTH_MAX {
                let what = format!("{name:?} would have more than {DEPTH_MAX} parents");
                return Err(Refusal::Invalid(what));
            }
        }
        Ok(())
    }

    /// Checks that the active snapshot `key` can be committed as `name`. A `parent` is that of the
    /// request: containerd may name one in order to rebase, which is not supported.
    pub fn plan_commit(
        &self,
        key: &str,
        name: &str,
        parent: Option<&str>,
        labels: Labels,
        now: SystemTime,
    ) -> Result<Snapshot, Refusal> {
        self.check_new(name, &labels)?;
        let old = self.get(key)?;
        if old.kind != SnapshotKind::Active {
            let what = format!("{key:?} is {}, not active", old.kind.name());
            return Err(Refusal::Precondition(what));
        }
        if parent.is_some() && parent != old.parent.as_deref() {
            let what = format!("{key:?} has another parent, and cannot be rebased");
            return Err(Refusal::Precondition(what));
        }
        Ok(Snapshot {
            name: name.to_owned(),
            kind: SnapshotKind::Committed,
            labels,
            created: now,
            updated: now,
            ..old.clone()
        })
    }

    /// Checks that the chain `chain` can be claimed over `parent`, to be mounted from `source`;
    /// gives the committed snapshot, perhaps the existing one with a further source.
    pub fn plan_claim(
        &mut self,
        chain: &str,
        parent: Option<&str>,
        labels: Labels,
        source: String,
        now: SystemTime,
    ) -> Result<Snapshot, Refusal> {
        if let Ok(known) = self.get(chain) {
            let mut known = known.clone();
            let Some(remote) = known.remote.as_mut().filter(|_| known.parent.as_deref() == parent)
            else {
                let what =
                    format!("{chain:?} exists with another parent, or with files of its own");
                return Err(Refusal::Exists(what));
            };
            if !remote.sources.contains(&source) && remote.sources.len() < SOURCES_MAX {
                remote.sources.push(source);
            }
            known.updated = now;
            return Ok(known);
        }
        let planned = self.plan_create(SnapshotKind::View, chain, parent, labels, now)?;
        Ok(Snapshot {
            kind: SnapshotKind::Committed,
            usage: Some(Usage::default()),
            remote: Some(RemoteLayer { sources: vec![source] }),
            ..planned
        })
    }

    /// Checks that a snapshot can be removed.
    pub fn plan_remove(&self, name: &str) -> Result<Snapshot, Refusal> {
        let snapshot = self.get(name)?;
        match self.children.get(name) {
            None => Ok(snapshot.clone()),
            Some(count) => {
                let what = format!("cannot remove {name:?}: it has {count} children");
                Err(Refusal::Precondition(what))
            }
        }
    }

    /// Changes labels. A path is `labels`, which replaces all, or `labels.KEY`; no path means
    /// `labels`.
    pub fn plan_update(
        &self,
        name: &str,
        labels: &Labels,
        paths: &[String],
        now: SystemTime,
    ) -> Result<Snapshot, Refusal> {
        let mut snapshot = self.get(name)?.clone();
        if paths.is_empty() {
            snapshot.labels = labels.clone();
        }
        for path in paths {
            match path.strip_prefix("labels.") {
                Some(key) => match labels.get(key) {
                    Some(value) => drop(snapshot.labels.insert(key.to_owned(), value.clone())),
                    None => drop(snapshot.labels.remove(key)),
                },
                None if path == "labels" => snapshot.labels = labels.clone(),
                None => {
                    let what = format!("{path:?} of {name:?} cannot be changed: only labels can");
                    return Err(Refusal::Invalid(what));
                }
            }
        }
        check_labels(name, &snapshot.labels)?;
        snapshot.updated = now;
        Ok(snapshot)
    }

    /// Applies a planned change; `before` is the name that the snapshot had.
    pub fn put(&mut self, before: Option<&str>, snapshot: Snapshot) {
        if let Some(before) = before {
            self.forget(before);
        }
        if let Some(parent) = &snapshot.parent {
            *self.children.entry(parent.clone()).or_default() += 1;
        }
        self.last_id = self.last_id.max(snapshot.id);
        self.by_name.insert(snapshot.name.clone(), snapshot);
    }

    /// Applies a planned removal.
    pub fn forget(&mut self, name: &str) {
        let removed = self.by_name.remove(name);
        let Some(parent) = removed.and_then(|snapshot| snapshot.parent) else { return };
        if let Some(count) = self.children.get_mut(&parent) {
            *count -= 1;
            if *count == 0 {
                self.children.remove(&parent);
            }
        }
    }

    /// The snapshot with this name.
    pub fn get(&self, name: &str) -> Result<&Snapshot, Refusal> {
        let missing = || Refusal::NotFound(format!("there is no snapshot {name:?}"));
        self.by_name.get(name).ok_or_else(missing)
    }

    /// All snapshots, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Snapshot> {
        self.by_name.values()
    }

    /// The snapshot and its parents, the nearest first. Records of a damaged disk may name a parent
    /// that is missing, or one another.
    pub fn lineage(&self, name: &str) -> Result<Vec<&Snapshot>, Refusal> {
        let mut lineage = vec![self.get(name)?];
        while let Some(parent) = lineage.last().and_then(|snapshot| snapshot.parent.as_ref()) {
            let missing = |_| {
                let what =
                    format!("the parent {parent:?} of {name:?} is missing: its record is lost");
                Refusal::Precondition(what)
            };
            lineage.push(self.get(parent).map_err(missing)?);
            if lineage.len() > DEPTH_MAX + 1 {
                let what = format!("{name:?} has more than {DEPTH_MAX} parents");
                return Err(Refusal::Precondition(what));
            }
        }
        Ok(lineage)
    }

    /// The names of the containers and views that lie on the remote chain `id`.
    pub fn above_chain(&self, id: u64) -> Vec<String> {
        let is_above = |one: &&Snapshot| {
            let lineage = self.lineage(&one.name).unwrap_or_default();
            let remote = lineage.into_iter().find(|below| below.remote.is_some());
            remote.is_some_and(|remote| remote.id == id)
        };
        let users = self.iter().filter(|one| one.kind != SnapshotKind::Committed).filter(is_above);
        users.map(|one| one.name.clone()).collect()
    }

    fn check_new(&self, name: &str, labels: &Labels) -> Result<(), Refusal> {
        if name.is_empty() || name.len() > NAME_MAX {
            let what = format!("a name has 1 to {NAME_MAX} bytes, and this one {}", name.len());
            return Err(Refusal::Invalid(what));
        }
        check_labels(name, labels)?;
        match self.by_name.contains_key(name) {
            true => Err(Refusal::Exists(format!("there is a snapshot {name:?}"))),
            false => Ok(()),
        }
    }
}

fn check_labels(name: &str, labels: &Labels) -> Result<(), Refusal> {
    let bytes: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
    if labels.len() > LABELS_MAX || bytes > LABEL_BYTES_MAX {
        let what = format!(
            "{name:?} has {} labels of {bytes} bytes: at most {LABELS_MAX} of {LABEL_BYTES_MAX} are kept",
            labels.len()
        );
        return Err(Refusal::Invalid(what));
    }
    Ok(())
}
