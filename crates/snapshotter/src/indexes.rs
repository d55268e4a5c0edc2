//! Indexes of images that containerd has unpacked: made in the background, for the next pull.
//!
//! ```text
//!   topmost layer of an image committed ─► thread `indexer` ─► ROOT/indexes/HEX: begun ─► Layers::make_index
//!      ─► made ──── containerd removes the image ─► kept as far as there is room ─► Layers::remove_index ─► record gone
//!      ─► failed: tried again, later and later     ─► record gone
//!      ─► left out: too small, or too large        ─► record gone
//! ```
//!
//! The records of snapshots are the queue: a committed local layer has the labels of its image. So
//! nothing is forgotten by a death, and an image that is removed meanwhile is not indexed.
//!
//! Invariants, held by `tests/indexes.rs`, which stops at every step: one index is made at a time;
//! its record is durable before it is begun, so that no index is left without one; the index of an
//! image that any snapshot has is not removed, nor one that was there before; a start asks no
//! registry; one that cannot be removed holds up no other.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    thread,
    time::{Duration, SystemTime},
};

use burgeon_block::Result;

use crate::{
    chains::Chains,
    image_index::{INDEXES_MAX, ImageIndex, IndexMade, IndexPolicy, IndexState},
    model::{Snapshot, Snapshots},
    remote,
    snapshotter::Snapshotter,
};

/// Most tries of one image.
const TRIES_MAX: u32 = 4;
/// The pause after the first try that failed; after each further one it is six times as long.
const FIRST_PAUSE: Duration = Duration::from_secs(10 * 60);
/// The longest time until images are looked at again without a change.
const LOOK: Duration = Duration::from_secs(10 * 60);
/// The same after a failure, such as a configuration that cannot be read.
const RETRY: Duration = Duration::from_secs(60);

/// True if it may be tried now, for an image that was unpacked at `unpacked`.
fn is_due(index: &ImageIndex, unpacked: SystemTime, now: SystemTime) -> bool {
    // A pull that could have used it did not: perhaps a user has removed it.
    if let IndexState::Made { .. } = index.state {
        return unpacked > index.changed;
    }
    // A clock that was set back delays nothing for long.
    let is_over = |pause| now.duration_since(index.changed).map_or(true, |passed| passed >= pause);
    index.pause().is_some_and(is_over)
}

impl ImageIndex {
    /// The pause before the next try, after it has changed; `None` if there is none.
    fn pause(&self) -> Option<Duration> {
        let pause = match self.state {
            IndexState::Begun => Duration::ZERO,
            IndexState::Failed(_) => {
                FIRST_PAUSE * 6u32.saturating_pow(self.tries.saturating_sub(1))
            }
            IndexState::Made { .. } | IndexState::LeftOut(_) => return None,
        };
        (self.tries < TRIES_MAX).then_some(pause)
    }

    /// When an index that failed is tried again; `None` if it is not.
    pub fn next_try(&self) -> Option<SystemTime> {
        matches!(self.state, IndexState::Failed(_))
            .then(|| self.pause())
            .flatten()
            .map(|pause| self.changed + pause)
    }
}

/// The next thing to do.
#[derive(PartialEq, Eq, Debug)]
enum Step {
    /// Make the index; its record as it is while that lasts.
    Make(ImageIndex),
    /// Remove the index.
    Remove(ImageIndex),
    /// Remove the record: no index was made.
    Forget(ImageIndex),
    /// Only the record changes.
    Note(ImageIndex),
}

/// Decides. `None`: nothing is to be done now.
fn next(
    all: &Snapshots,
    known: &BTreeMap<String, ImageIndex>,
    policy: IndexPolicy,
    now: SystemTime,
) -> Option<Step> {
    let used: HashSet<&str> = all.iter().flat_map(remote::manifests).collect();
    // One that could not be removed is left alone for a while.
    let is_stuck = |index: &&ImageIndex| index.stuck_until.is_some_and(|until| now < until);
    for index in known.values().filter(|index| !is_stuck(index)) {
        let one = || index.clone();
        let is_used = used.contains(index.manifest.as_str());
        let step = match (is_used, index.unused_since, &index.state) {
            (true, Some(_), _) => Step::Note(ImageIndex { unused_since: None, ..one() }),
            (false, None, IndexState::Made { .. }) => {
                Step::Note(ImageIndex { unused_since: Some(now), ..one() })
            }
            // The process died, perhaps when the index was finished.
            (false, _, IndexState::Begun) => Step::Remove(one()),
            (false, _, IndexState::Failed(_) | IndexState::LeftOut(_)) => Step::Forget(one()),
            // It may be the image that ends the process.
            (true, None, IndexState::Begun) if index.tries >= TRIES_MAX => {
                let why = "the snapshotter ended each time while it was made".to_owned();
                Step::Note(ImageIndex { state: IndexState::Failed(why), changed: now, ..one() })
            }
            _ => continue,
        };
        return Some(step);
    }
    let unused = || known.values().filter(|index| index.unused_since.is_some());
    let is_crowded =
        unused().map(ImageIndex::bytes).sum::<u64>() > policy.kept || known.len() >= INDEXES_MAX;
    let removable = unused().filter(|index| !is_stuck(index));
    if is_crowded && let Some(oldest) = removable.min_by_key(|index| index.unused_since) {
        return Some(Step::Remove(oldest.clone()));
    }
    if !policy.is_on || known.len() >= INDEXES_MAX {
        return None;
    }
    let mut images: Vec<&Snapshot> =
        all.iter().filter(|one| remote::completed_image(one).is_some()).collect();
    images.sort_by_key(|snapshot| snapshot.id);
    images.into_iter().find_map(|snapshot| {
        let (image, manifest) = remote::completed_image(snapshot)?;
        let tries = match known.get(manifest) {
            None => 0,
            Some(known) if !is_due(known, snapshot.created, now) => return None,
            Some(ImageIndex { state: IndexState::Made { .. }, .. }) => 0,
            Some(known) => known.tries,
        };
        Some(Step::Make(ImageIndex {
            image: image.to_owned(),
            manifest: manifest.to_owned(),
            state: IndexState::Begun,
            tries: tries + 1,
            // A clock that was set back makes no index older than its image.
            changed: now.max(snapshot.created),
            unused_since: None,
            stuck_until: None,
        }))
    })
}

fn there_before() -> IndexState {
    IndexState::LeftOut("`burgeon index` has made it before".to_owned())
}

impl Snapshotter {
    /// Starts the thread that makes and removes indexes. It ends after [`Self::end`].
    pub fn start_indexer(self: &Arc<Self>) -> std::io::Result<thread::JoinHandle<()>> {
        let this = Arc::clone(self);
        thread::Builder::new().name("indexer".into()).spawn(move || {
            // It waits first: a start asks no registry.
            let mut pause = LOOK;
            while this.images.wait(Some(pause)) {
                pause = LOOK;
                loop {
                    match this.index_next(&SystemTime::now) {
                        Ok(true) if !this.images.is_over() => {}
                        Ok(_) => break,
                        Err(error) => {
                            tracing::warn!(%error, "the work on indexes is put off");
                            pause = RETRY;
                            break;
                        }
                    }
                }
            }
        })
    }

    /// Makes or removes one index, or notes a change; false if nothing is to be done.
    #[doc(hidden)]
    pub fn index_next(&self, now: &dyn Fn() -> SystemTime) -> Result<bool> {
        let Some(chains) = &self.chains else { return Ok(false) };
        let policy = chains.index_policy()?;
        let step = next(&self.lock(), &self.known_indexes(), policy, now());
        match step {
            None => Ok(false),
            Some(Step::Note(index)) => self.note_index(index).map(|()| true),
            Some(Step::Remove(index)) => self.remove_index(chains, index, now()).map(|()| true),
            Some(Step::Forget(index)) => self.forget_index(&index).map(|()| true),
            Some(Step::Make(index)) => self.make_index(chains, index, now).map(|()| true),
        }
    }

    fn remove_index(&self, chains: &Chains, index: ImageIndex, now: SystemTime) -> Result<()> {
        let image = &index.image;
        if let Err(error) = chains.remove_index(&index) {
            let minutes = FIRST_PAUSE.as_secs() / 60;
            tracing::warn!(image, %error, minutes, "an index stays for now; it is tried again");
            // Of this process alone: the next one tries it at once.
            let index = ImageIndex { stuck_until: Some(now + FIRST_PAUSE), ..index };
            self.known_indexes().insert(index.manifest.clone(), index);
            return Ok(());
        }
        tracing::info!(image, "removed the index of an image");
        self.forget_index(&index)
    }

    fn make_index(
        &self,
        chains: &Chains,
        begun: ImageIndex,
        now: &dyn Fn() -> SystemTime,
    ) -> Result<()> {
        let former = self.known_indexes().get(&begun.manifest).map(|index| index.state.clone());
        let was_ours = matches!(former, Some(IndexState::Begun | IndexState::Made { .. }));
        if !was_ours && chains.has_index(&begun) {
            return self.note_index(ImageIndex { state: there_before(), changed: now(), ..begun });
        }
        // An index that is there from now on is known to be this process's.
        self.note_index(begun.clone())?;
        let image = &begun.image;
        let state = match chains.make_index(&begun) {
            Ok(IndexMade::Made { bytes }) => {
                tracing::info!(image, bytes, "made the index of an image");
                IndexState::Made { bytes }
            }
            // By an earlier try, which died before it could tell.
            Ok(IndexMade::WasThere { bytes }) if was_ours => IndexState::Made { bytes },
            Ok(IndexMade::WasThere { .. }) => there_before(),
            Ok(IndexMade::LeftOut(why)) => IndexState::LeftOut(why),
            Err(error) => {
                tracing::warn!(image, %error, "an image has no index");
                IndexState::Failed(error.to_string())
            }
        };
        // A pause begins when the try has ended.
        let changed = match state {
            IndexState::Made { .. } => now().max(begun.changed),
            _ => now(),
        };
        self.note_index(ImageIndex { state, changed, ..begun })
    }

    fn forget_index(&self, index: &ImageIndex) -> Result<()> {
        self.disk.remove_index(index)?;
        self.known_indexes().remove(&index.manifest);
        Ok(())
    }

    fn note_index(&self, index: ImageIndex) -> Result<()> {
        self.disk.write_index(&index)?;
        self.known_indexes().insert(index.manifest.clone(), index);
        Ok(())
    }
}
