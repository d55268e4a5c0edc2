//! The bounds of the host's cache.
//!
//! ```text
//!   burgeon cache resize ──────────────► cache.json      ─┐
//!   configuration ─► supervisor's start ► run/cache.json ─┴► Bounds::read, field by field
//! ```
//!
//! Invariant: what a user has changed wins over the configuration, and that over the defaults
//! (`tests::changed_bounds_win_over_configured_ones`).

use std::{fs, path::Path, sync::OnceLock};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_cache::{Amount, CacheSettings};
use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use super::{files, layers::LayerShare, paths::StateDir};
use crate::id::DigestText;

/// An amount of space for the host's cache.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum CacheAmount {
    /// Bytes.
    Bytes(u64),
    /// A share of the file system's size, at most 100.
    Percent(u8),
}

/// A part of the host's cache.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum CachePart {
    /// The chunks of an image.
    Image(DigestText),
    /// The chunks of all images of a store.
    Store(Location),
}

/// A limit of a part of the cache.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct PartLimit {
    /// The part.
    pub part: CachePart,
    /// Most that its chunks take, in bytes; `None` for no limit of its own.
    pub bytes: Option<u64>,
}

/// The changed settings.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Bounds {
    /// Most that the cache takes; `None` for all that is free above the floor.
    #[serde(default)]
    pub(crate) limit: Option<CacheAmount>,
    /// The floor; `None` for the default.
    #[serde(default)]
    pub(crate) keep_free: Option<CacheAmount>,
    /// All mounts find all chunks, whatever credentials they were read with; only the configuration
    /// says so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_shared: bool,
    /// Limits of single images and stores.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) parts: Vec<PartLimit>,
    /// The part of the limit that stored layers leave; the supervisor tells it.
    #[serde(skip)]
    pub(crate) left_by_layers: Option<u64>,
}

/// Most limits of single images and stores.
const PARTS_MAX: usize = 1000;

/// Those of the configuration that this process has read.
static CONFIGURED: OnceLock<Bounds> = OnceLock::new();

/// Takes the bounds of the configuration; only the first call in a process has an effect.
pub fn configure(limit: Option<CacheAmount>, keep_free: Option<CacheAmount>, is_shared: bool) {
    let _ = CONFIGURED.set(Bounds { limit, keep_free, is_shared, ..Bounds::default() });
}

/// The floor that `burgeon cache resize` has set, if it has.
pub fn changed_floor(state: &StateDir) -> Result<Option<CacheAmount>> {
    Ok(Bounds::changed(state)?.keep_free)
}

/// Bytes that the host's cache leaves free on the disk of `folder`.
pub fn floor_of(state: &StateDir, folder: &Path) -> Result<u64> {
    let failed = |error: rustix::io::Errno| {
        Error::io(format!("cannot ask {} for its size", folder.display()), error.into())
    };
    let disk = rustix::fs::statvfs(folder).map_err(failed)?;
    let size = disk.f_blocks.saturating_mul(disk.f_frsize);
    Ok(Bounds::read(state)?.without_layers().1.of(size))
}

impl Bounds {
    /// The bounds of the host's cache: those that the user has set, or the configured ones.
    pub(crate) fn read(state: &StateDir) -> Result<Self> {
        // The daemon publishes them for its server, which has no configuration.
        let published = || {
            Self::read_from(&state.configured_cache()).unwrap_or_else(|error| {
                tracing::warn!(%error, "the configured bounds of the cache are not used");
                Self::default()
            })
        };
        let configured = CONFIGURED.get().cloned().unwrap_or_else(published);
        let changed = Self::changed(state)?;
        Ok(Self {
            limit: changed.limit.or(configured.limit),
            keep_free: changed.keep_free.or(configured.keep_free),
            is_shared: configured.is_shared,
            parts: changed.parts,
            left_by_layers: LayerShare::read(state).left,
        })
    }

    /// Those that the user has set.
    pub(crate) fn changed(state: &StateDir) -> Result<Self> {
        Self::read_from(&state.cache_settings())
    }

    fn read_from(path: &Path) -> Result<Self> {
        match files::read_json::<Self>(path) {
            Ok(bounds) => bounds.check().map(|()| bounds),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    /// Tells servers the bounds of the configuration that this process has read.
    pub(crate) fn publish_configured(state: &StateDir) -> Result<()> {
        let configured = CONFIGURED.get().cloned().unwrap_or_default();
        configured.check()?;
        files::publish_json(&state.configured_cache(), &configured)
    }

    /// Keeps them for later servers.
    pub(crate) fn write(&self, state: &StateDir) -> Result<()> {
        self.check()?;
        files::publish_json(&state.cache_settings(), self)
    }

    /// The same with these limits of parts changed.
    pub(crate) fn with_parts(mut self, changed: Vec<PartLimit>) -> Self {
        for limit in changed {
            self.parts.retain(|known| known.part != limit.part);
            self.parts.extend(limit.bytes.is_some().then_some(limit));
        }
        self
    }

    fn check(&self) -> Result<()> {
        if self.parts.len() > PARTS_MAX {
            let what = format!("the cache has {PARTS_MAX} limits of images and stores at most");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let is_sound = |amount: &CacheAmount| match amount {
            CacheAmount::Bytes(_) => true,
            CacheAmount::Percent(percent) => *percent <= 100,
        };
        if self.limit.iter().chain(&self.keep_free).all(is_sound) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Invalid, "the cache cannot have more than 100 % of a disk"))
    }

    /// The limit of chunks and the floor.
    pub(crate) fn amounts(&self) -> (Option<Amount>, Amount) {
        let (limit, keep_free) = self.without_layers();
        let left = self.left_by_layers.map(Amount::Bytes);
        (limit.map(|limit| left.unwrap_or(limit)), keep_free)
    }

    /// The limit of chunks and layers, and the floor.
    pub(crate) fn without_layers(&self) -> (Option<Amount>, Amount) {
        let amount = |amount| match amount {
            CacheAmount::Bytes(bytes) => Amount::Bytes(bytes),
            CacheAmount::Percent(percent) => Amount::Percent(percent),
        };
        let keep_free = self.keep_free.map_or(CacheSettings::default().keep_free, amount);
        (self.limit.map(amount), keep_free)
    }

    /// The settings of a cache with these bounds.
    pub(crate) fn settings(&self) -> CacheSettings {
        let (limit, keep_free) = self.amounts();
        CacheSettings { limit, keep_free, ..CacheSettings::default() }
    }
}

/// Removes the caches that earlier versions had for each image: they would keep the host's small.
/// Not done by the server, which may not write to the folders of images.
pub(crate) fn remove_earlier(state: &StateDir) {
    for folder in fs::read_dir(state.images()).into_iter().flatten().flatten() {
        if let Err(error) = files::remove_file(&folder.path().join("cache")) {
            tracing::warn!(%error, "the cache of an earlier version stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use burgeon_cache::{Amount, CacheSettings};

    use super::{Bounds, CacheAmount, CachePart, PartLimit};
    use crate::state::paths::StateDir;

    #[test]
    fn settings_are_kept_and_impossible_ones_refused() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        assert_eq!(Bounds::read(&state).unwrap().settings(), CacheSettings::default());
        let limit = Some(CacheAmount::Percent(10));
        let keep_free = Some(CacheAmount::Bytes(1 << 30));
        let image = |byte: u8| CachePart::Image(burgeon_block::Digest::of(&[byte]).into());
        let part = |byte, bytes| PartLimit { part: image(byte), bytes };
        let bounds = Bounds { limit, keep_free, ..Bounds::default() };
        let bounds = bounds.with_parts(vec![part(1, Some(7)), part(2, Some(8))]);
        let bounds = bounds.with_parts(vec![part(1, Some(9)), part(2, None), part(3, None)]);
        assert_eq!(bounds.parts, [part(1, Some(9))]);
        bounds.write(&state).unwrap();
        let read = Bounds::read(&state).unwrap();
        assert_eq!(read, bounds);
        assert_eq!(read.amounts(), (Some(Amount::Percent(10)), Amount::Bytes(1 << 30)));
        let impossible = Bounds { limit: Some(CacheAmount::Percent(101)), ..bounds.clone() };
        impossible.write(&state).unwrap_err();
        let many = (0..=u8::MAX).flat_map(|n| (0..4).map(move |m| [n, m]));
        let many = many.map(|bytes| PartLimit {
            part: CachePart::Image(burgeon_block::Digest::of(&bytes).into()),
            bytes: Some(1),
        });
        bounds.with_parts(many.collect()).write(&state).unwrap_err();
        std::fs::write(state.cache_settings(), r#"{"limit":{"percent":101}}"#).unwrap();
        Bounds::read(&state).unwrap_err();
    }

    #[test]
    fn changed_bounds_win_over_configured_ones() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        let [small, large] = [1 << 20, 1 << 30].map(|bytes| Some(CacheAmount::Bytes(bytes)));
        let configured =
            Bounds { limit: small, keep_free: small, is_shared: true, ..Bounds::default() };
        super::files::publish_json(&state.configured_cache(), &configured).unwrap();
        assert_eq!(Bounds::read(&state).unwrap(), configured);
        Bounds { limit: large, ..Bounds::default() }.write(&state).unwrap();
        let both = Bounds { limit: large, ..configured };
        assert_eq!(Bounds::read(&state).unwrap(), both, "sharing is not the user's to change");
        assert_eq!(Bounds::changed(&state).unwrap().keep_free, None);
        // A damaged file of the configuration is no reason to serve nothing.
        std::fs::write(state.configured_cache(), "{").unwrap();
        assert_eq!(Bounds::read(&state).unwrap().keep_free, None);
    }
}
