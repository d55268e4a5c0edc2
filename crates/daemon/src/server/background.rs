//! Background work of the server, which no reader waits for: profiles, filling, recording.
//!
//! ```text
//!   map of a mount in progress is ready ─┐
//!   attached, if not warmed before ──────┴─► load the profile in a thread of its own ─► prefetch
//!   attached and the profile prefetched ─► fill
//! ```

use std::{sync::Arc, thread};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::References;
use burgeon_volume::{Fill, FillProgress, FillState, ProfileState};

use super::{
    Serving, lock,
    served::{Mount, Prefetching},
    volumes::{ImageVolume, Origin},
};
use crate::{
    id::MountId,
    ipc::{
        link::Warm,
        protocol::{CACHE_FULL, FillStatus, OVER_LIMIT, ProfileStatus},
    },
    state::{access, profile, record::ProfileSource},
};

/// A mount that is being made and prefetches already.
pub(super) struct Warmed {
    prefetching: Prefetching,
    /// Kept open, so that the mount finds the prefetched data.
    volume: Option<Arc<ImageVolume>>,
}

impl Serving {
    /// Starts the profile prefetch of a mount that is being made.
    pub(super) fn warm(self: &Arc<Self>, warm: Warm) {
        tracing::info!(mount = %warm.id, "prefetching the profile while the mount is made");
        let begun = Warmed { prefetching: Prefetching::Loading, volume: None };
        lock(&self.warmed).insert(warm.id, begun);
        let serving = Arc::clone(self);
        thread::spawn(move || {
            let id = warm.id;
            let references = if warm.references { References::Allow } else { References::Refuse };
            let volume = access::kept(&serving.state.mount(id)).and_then(|access| {
                serving.volume(Origin::of_warm(&warm, &access), &warm.map, references)
            });
            match volume {
                Ok(volume) => {
                    if let Some(warmed) = lock(&serving.warmed).get_mut(&id) {
                        warmed.volume = Some(Arc::clone(&volume));
                    }
                    serving.load(id, &warm.profile, &volume);
                }
                Err(e) => serving.settle(id, |_| Prefetching::Unusable(e.to_string())),
            }
        });
    }

    /// Serves `mount`, and fetches in the background: first the profile's data, then the rest, as
    /// far as requested. A thread of its own loads the profile, because that may be a fetch.
    pub(super) fn start_background(self: &Arc<Self>, id: MountId, mut mount: Mount) {
        let volume = Arc::clone(&mount.volume);
        let profile = mount.attach.profile.clone();
        let begun = {
            let mut warmed = lock(&self.warmed);
            let begun = warmed.remove(&id);
            let is_begun = begun.is_some();
            mount.prefetching = begun.map(|begun| begun.prefetching).unwrap_or(match profile {
                Some(_) => Prefetching::Loading,
                None => Prefetching::None,
            });
            lock(&self.mounts).insert(id, mount);
            is_begun
        };
        match profile {
            Some(source) if !begun => {
                let serving = Arc::clone(self);
                thread::spawn(move || serving.load(id, &source, &volume));
            }
            _ => self.lead(id),
        }
    }

    /// Loads a profile and starts its prefetch, for a mount that is served or being made.
    fn load(self: &Arc<Self>, id: MountId, source: &ProfileSource, volume: &Arc<ImageVolume>) {
        let loaded = profile::load(source, volume.source().store());
        let _runtime = self.runtime.enter();
        self.settle(id, |mount| match (loaded, mount) {
            (Ok(Some(ranges)), Some(mount)) => {
                Prefetching::Begun(mount.device.prefetch_profile(ranges.into_iter()))
            }
            (Ok(Some(ranges)), None) => {
                Prefetching::Begun(volume.prefetch_profile(ranges.into_iter(), None))
            }
            (Ok(None), _) => Prefetching::None,
            (Err(e), _) => {
                tracing::warn!(mount = %id, image = %source.image.0, error = %e, "cannot use the profile");
                Prefetching::Unusable(e.to_string())
            }
        });
    }

    /// Sets the prefetch state of a mount that is served or being made.
    fn settle(
        self: &Arc<Self>,
        id: MountId,
        prefetching: impl FnOnce(Option<&Mount>) -> Prefetching,
    ) {
        {
            let mut warmed = lock(&self.warmed);
            if let Some(begun) = warmed.get_mut(&id) {
                begun.prefetching = prefetching(None);
                return;
            }
            // If it is neither, the mount has ended.
            let mut mounts = lock(&self.mounts);
            let Some(mount) = mounts.get_mut(&id) else { return };
            mount.prefetching = prefetching(Some(mount));
        }
        self.lead(id);
    }

    /// Starts the work that follows the profile prefetch of a served mount.
    fn lead(self: &Arc<Self>, id: MountId) {
        let ended = {
            let mounts = lock(&self.mounts);
            match mounts.get(&id).map(|mount| &mount.prefetching) {
                Some(Prefetching::Begun(prefetch)) => Some(prefetch.ended()),
                // The loading thread calls this again.
                Some(Prefetching::Loading) | None => return,
                Some(Prefetching::None | Prefetching::Unusable(_)) => None,
            }
        };
        let Some(ended) = ended else { return self.fill(id) };
        let serving = Arc::clone(self);
        self.runtime.spawn(async move {
            let end = ended.await;
            tracing::info!(
                mount = %id,
                state = ?end.state,
                bytes = end.fetched_bytes,
                requests = end.requests,
                "the profile has been fetched"
            );
            serving.fill(id);
        });
    }

    /// Starts to fetch everything, if requested.
    fn fill(&self, id: MountId) {
        let _runtime = self.runtime.enter();
        let mut mounts = lock(&self.mounts);
        let Some(mount) = mounts.get_mut(&id).filter(|mount| mount.attach.fill) else { return };
        let fill = mount.device.fill();
        let ended = fill.ended();
        mount.fill = Some(fill);
        self.runtime.spawn(async move {
            let end = ended.await;
            let (done, total) = (end.done_bytes, end.total_bytes);
            match end.state {
                FillState::Done if done == total => {
                    tracing::info!(mount = %id, bytes = total, "the mount is complete: all of its bytes are local");
                }
                state => tracing::info!(mount = %id, ?state, bytes = done, total, "filling ended"),
            }
        });
    }

    /// Starts or stops recording reads.
    pub(super) fn record(&self, id: MountId, on: bool) -> Result<bool> {
        let device = lock(&self.mounts).get(&id).map(|mount| Arc::clone(&mount.device));
        let device = device.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the mount {id} is not served"))
        })?;
        if on {
            device.start_recording();
            return Ok(false);
        }
        let recording = device.finish_recording();
        let words = recording.reads.iter().flat_map(|range| [range.start(), range.end()]);
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let path = self.state.recorded_reads(id);
        std::fs::write(&path, bytes)
            .map_err(|e| Error::io(format!("cannot write {}", path.display()), e))?;
        Ok(recording.cut_short)
    }
}

pub(super) fn profile_status(mount: &Mount) -> ProfileStatus {
    let prefetched = mount.volume.profile_prefetched().unwrap_or_default();
    let progress = match &mount.prefetching {
        Prefetching::Begun(prefetch) => Some(prefetch.progress()),
        _ => None,
    };
    let (state, problem) = match &mount.prefetching {
        Prefetching::Loading => ("loading", None),
        Prefetching::None => ("none", None),
        Prefetching::Unusable(problem) => ("unusable", Some(problem.clone())),
        Prefetching::Begun(prefetch) => match prefetch.progress().state {
            ProfileState::Running => ("running", None),
            ProfileState::Done => ("done", None),
            ProfileState::Stopped => ("stopped", None),
            ProfileState::OverLimit => (OVER_LIMIT, None),
        },
    };
    ProfileStatus {
        state: state.to_owned(),
        problem,
        total_bytes: progress.map_or(0, |now| now.total_bytes),
        done_bytes: progress.map_or(0, |now| now.done_bytes),
        fetched_bytes: progress.map_or(0, |now| now.fetched_bytes),
        requests: progress.map_or(0, |now| now.requests),
        prefetched_bytes: prefetched.prefetched,
        read_bytes: prefetched.read,
    }
}

/// Before a fill has started, everything is still to be done.
pub(super) fn fill_status(mount: &Mount) -> FillStatus {
    let progress = mount.fill.as_ref().map_or(
        FillProgress {
            state: FillState::Running,
            total_bytes: mount.volume.map().data_range().len(),
            done_bytes: 0,
            failed_bytes: 0,
        },
        Fill::progress,
    );
    progress_status(progress)
}

/// Combines the fills of all pins into one status; the least advanced fill counts.
pub(super) fn pinned_status(fills: &[Fill]) -> FillStatus {
    use FillState::{CacheFull, Done, OverLimit, Running, Stopped};
    const ORDER: [FillState; 5] = [Running, Stopped, OverLimit, CacheFull, Done];
    let place = |state: FillState| ORDER.iter().position(|known| *known == state);
    let none =
        FillProgress { state: FillState::Done, total_bytes: 0, done_bytes: 0, failed_bytes: 0 };
    progress_status(fills.iter().map(Fill::progress).fold(none, |a, b| FillProgress {
        state: if place(a.state) <= place(b.state) { a.state } else { b.state },
        total_bytes: a.total_bytes + b.total_bytes,
        done_bytes: a.done_bytes + b.done_bytes,
        failed_bytes: a.failed_bytes + b.failed_bytes,
    }))
}

fn progress_status(progress: FillProgress) -> FillStatus {
    let state = match progress.state {
        FillState::Running => "running",
        FillState::Done => "done",
        FillState::Stopped => "stopped",
        FillState::OverLimit => OVER_LIMIT,
        FillState::CacheFull => CACHE_FULL,
    };
    FillStatus {
        state: state.to_owned(),
        total_bytes: progress.total_bytes,
        done_bytes: progress.done_bytes,
        failed_bytes: progress.failed_bytes,
    }
}
