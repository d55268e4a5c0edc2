//! All figures of a cache and its devices, as a document.

use std::collections::BTreeMap;

use burgeon_accelerate::{Cached, Count, Store};
use burgeon_block::BLOCK_SIZE;
use serde_json::{Value, json};

use crate::{
    disk::Disk,
    writing_back::{Settings, WritingBack},
};

/// Ranges of lost bytes that are named.
const GONE_MAX: usize = 16;

/// The document.
pub(crate) fn document<'a>(
    store: &Store<Disk>,
    devices: impl Iterator<Item = &'a Cached<Disk, Disk>>,
    writing_back: &WritingBack,
) -> Value {
    let sets = store.sets();
    let gone = store.gone();
    let Settings { percent, seconds, rate } = writing_back.settings();
    let (log_bytes, log_used) = store.log_fill();
    let devices = devices.map(|cached| {
        let counts = Count::ALL.map(|(count, name)| (name, cached.counts().get(count)));
        let counters = counts.into_iter().collect::<BTreeMap<_, _>>();
        json!({
            "name": cached.name(),
            "slow": cached.slow().path(),
            "size": cached.slow().size(),
            "mode": cached.mode().name(),
            "dirty_bytes": cached.dirty() * BLOCK_SIZE,
            "dirty_seconds": cached.dirty_seconds(writing_back.now()),
            "gone": gone.iter().find(|gone| gone.name == cached.name()).map(|gone| {
                let ranges = gone.ranges.iter().take(GONE_MAX);
                json!({
                    "bytes": gone.bytes(),
                    "ranges": ranges.map(|range| [range.start, range.end]).collect::<Vec<_>>(),
                })
            }),
            "sequential_cutoff": cached.cutoff(),
            "marked_regions": cached.marked(),
            "flush_failed": cached.is_broken(),
            "counters": counters,
        })
    });
    json!({
        "cache": store.file().path(),
        "state": if store.has_failed() { "failed" } else { "good" },
        "policy": store.policy().name(),
        "blocks": sets.slots(),
        "used_blocks": sets.used(),
        "memory_blocks": store.in_memory(),
        "log_bytes": log_bytes,
        "log_used_bytes": log_used,
        "dirty_limit": percent,
        "dirty_age": seconds,
        "writeback_rate": rate,
        "write_back_error": writing_back.error(),
        "pid": std::process::id(),
        "devices": devices.collect::<Vec<_>>(),
    })
}
