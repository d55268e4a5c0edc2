//! What the server does that no reader waits for: profiles, filling, recording.
//!
//! ```text
//!   attached ─► the profile is looked for, in a thread of its own ─► followed ─► then fill
//! ```

use std::{sync::Arc, thread};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use burgeon_volume::{Fill, FillProgress, FillState, Follow, FollowState};

use super::{Mount, Serving, lock};
use crate::{
    id::MountId,
    link::ProfileSource,
    profile,
    protocol::{FillStatus, OVER_LIMIT, ProfileStatus},
};

/// How far a mount is with its profile.
pub(super) enum Following {
    /// It has none, or it is being looked for.
    Not(&'static str),
    /// It cannot be used.
    Unusable(String),
    /// Its data is brought, or has been.
    Begun(Follow),
}

impl Serving {
    /// Brings what nobody has asked for yet: what the mount's profile says, then everything, as far
    /// as that is wanted. A profile may have to be fetched: that is waited for elsewhere.
    pub(super) fn bring(self: &Arc<Self>, id: MountId) {
        let source = {
            let mounts = lock(&self.mounts);
            let mount = mounts.get(&id);
            mount.and_then(|mount| {
                Some((mount.attach.profile.clone()?, mount.volume.source().store().clone()))
            })
        };
        let Some((source, store)) = source else { return self.fill(id) };
        let serving = Arc::clone(self);
        thread::spawn(move || {
            let loaded = profile::load(&source, &store);
            serving.follow(id, &source, loaded);
        });
    }

    fn follow(
        self: &Arc<Self>,
        id: MountId,
        source: &ProfileSource,
        loaded: Result<Option<Vec<ByteRange>>>,
    ) {
        let _runtime = self.runtime.enter();
        let ended = {
            let mut mounts = lock(&self.mounts);
            let Some(mount) = mounts.get_mut(&id) else { return };
            let (following, ended) = match loaded {
                Ok(Some(ranges)) => {
                    let follow = mount.device.follow(ranges.into_iter());
                    let ended = follow.ended();
                    (Following::Begun(follow), Some(ended))
                }
                Ok(None) => (Following::Not("none"), None),
                Err(e) => {
                    log!("mount {id} goes without the profile of {}: {e}", source.image.0);
                    (Following::Unusable(e.to_string()), None)
                }
            };
            mount.following = following;
            ended
        };
        let Some(ended) = ended else { return self.fill(id) };
        let serving = Arc::clone(self);
        self.runtime.spawn(async move {
            let end = ended.await;
            log!(
                "mount {id} has brought its profile ({:?}): {} bytes in {} requests",
                end.state,
                end.fetched_bytes,
                end.requests
            );
            serving.fill(id);
        });
    }

    /// Begins to fetch everything, if that is wanted.
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
                    log!("mount {id} is complete: all of its {total} bytes are local");
                }
                state => log!("mount {id} has {done} of {total} bytes local: filling is {state:?}"),
            }
        });
    }

    /// Begins or ends to record what is read.
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
        let path = self.state.mount(id).join("reads");
        std::fs::write(&path, bytes)
            .map_err(|e| Error::io(format!("cannot write {}", path.display()), e))?;
        Ok(recording.cut_short)
    }
}

pub(super) fn profile_status(mount: &Mount) -> ProfileStatus {
    let brought = mount.volume.brought().unwrap_or_default();
    let progress = match &mount.following {
        Following::Begun(follow) => Some(follow.progress()),
        _ => None,
    };
    let (state, problem) = match &mount.following {
        Following::Not(state) => (*state, None),
        Following::Unusable(problem) => ("unusable", Some(problem.clone())),
        Following::Begun(follow) => match follow.progress().state {
            FollowState::Running => ("running", None),
            FollowState::Done => ("done", None),
            FollowState::Stopped => ("stopped", None),
            FollowState::OverLimit => (OVER_LIMIT, None),
        },
    };
    ProfileStatus {
        state: state.to_owned(),
        problem,
        total_bytes: progress.map_or(0, |now| now.total_bytes),
        done_bytes: progress.map_or(0, |now| now.done_bytes),
        fetched_bytes: progress.map_or(0, |now| now.fetched_bytes),
        requests: progress.map_or(0, |now| now.requests),
        brought_bytes: brought.brought,
        read_bytes: brought.read,
    }
}

/// Before it has begun, everything is still to be done.
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

/// All fills of what is pinned as one, which is as far as the one that is least far.
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
        FillState::CacheFull => "cache-full",
    };
    FillStatus {
        state: state.to_owned(),
        total_bytes: progress.total_bytes,
        done_bytes: progress.done_bytes,
        failed_bytes: progress.failed_bytes,
    }
}
