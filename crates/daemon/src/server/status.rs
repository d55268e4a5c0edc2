//! The part of a mount's status that only the server knows.

use std::{collections::HashMap, sync::Arc};

use burgeon_volume::CacheState;

use super::{
    Serving,
    background::{fill_status, pinned_status, profile_status},
    lock,
    volumes::Area,
};
use crate::{
    id::MountId,
    ipc::{
        link::MountReport,
        protocol::{AreaStatus, CacheStatus, HostCache, WaitStatus},
    },
};

impl Serving {
    pub(super) fn report(&self) -> Vec<MountReport> {
        let cache = self.host_cache();
        // A look at a volume may take milliseconds: without the lock, and once for all its mounts.
        let volumes: HashMap<_, _> = lock(&self.mounts)
            .values()
            .map(|mount| (Arc::as_ptr(&mount.volume), Arc::clone(&mount.volume)))
            .collect();
        let statuses: HashMap<_, _> =
            volumes.iter().map(|(address, volume)| (*address, volume.status())).collect();
        let mounts = lock(&self.mounts);
        let reports = mounts.values().map(|mount| {
            let known = statuses.get(&Arc::as_ptr(&mount.volume)).cloned();
            let status = known.unwrap_or_else(|| mount.volume.status());
            let of_area = mount.device.area().and_then(|area| area.status().last_source_error);
            MountReport {
                id: mount.attach.id,
                materialised_bytes: status.materialised_bytes,
                last_source_error: status.last_source_error.clone().or(of_area),
                cache: cache_status(status, &cache),
                fill: mount.attach.fill.then(|| fill_status(mount)),
                profile: mount.attach.profile.is_some().then(|| profile_status(mount)),
                pinned: mount.pinned.as_deref().map(pinned_status),
                area: mount.device.area().map(|area| area_status(area)),
                over_limit_reads: mount.device.over_limit_reads(),
            }
        });
        reports.collect()
    }
}

impl Serving {
    /// The last reads of a mount that had to wait.
    pub(super) fn waits(&self, id: MountId, after: u64) -> Vec<WaitStatus> {
        let device = lock(&self.mounts).get(&id).map(|mount| Arc::clone(&mount.device));
        let Some(device) = device else { return Vec::new() };
        let wait = |wait: burgeon_volume::Wait| WaitStatus {
            number: wait.number,
            ended_unix_us: wait.ended_unix_us,
            took_us: u64::try_from(wait.took.as_micros()).unwrap_or(u64::MAX),
            address: wait.range.start(),
            len: wait.range.len(),
            tier: if wait.fetched { "source" } else { "cache" }.to_owned(),
            object: device.object_at(wait.range.start()),
            failed_tries: wait.failed_tries,
            error: wait.error.map(|kind| kind.name().to_owned()),
        };
        device.waits(after).into_iter().map(wait).collect()
    }
}

fn area_status(area: &Area) -> AreaStatus {
    let status = area.status();
    AreaStatus {
        size: status.size,
        problem: status.problem,
        lost_reads: status.lost_reads,
        unmapped_reads: status.unmapped_reads,
        last_unmapped: status.last_unmapped,
        changed_reads: status.changed_reads,
        last_changed: status.last_changed,
    }
}

fn cache_status(status: burgeon_volume::VolumeStatus, cache: &HostCache) -> CacheStatus {
    let (state, reason) = match status.cache {
        CacheState::Writing => match cache.lacks_space() {
            Some(why) => ("full", Some(why)),
            None => ("writing", None),
        },
        CacheState::NoSpace { reason } => {
            ("full", Some(format!("{reason}: free some space on its disk")))
        }
        CacheState::Stopped { reason } => ("stopped", Some(reason)),
    };
    CacheStatus {
        state: state.to_owned(),
        reason,
        read_errors: cache.read_errors,
        write_errors: cache.write_errors,
        uncached_chunks: status.uncached_chunks,
        in_flight: status.in_flight as u64,
        waiting_readers: status.waiting_readers as u64,
        ahead_bytes: status.read_ahead.prefetched,
        ahead_read_bytes: status.read_ahead.read,
    }
}
