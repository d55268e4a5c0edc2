//! All figures of a cache and its devices, as a document.

use std::collections::BTreeMap;

use burgeon_accelerate::{CacheStore, CachedDevice, Count};
use burgeon_block::{BLOCK_SIZE, Counters, HistogramSnapshot};
use serde_json::{Value, json};

use crate::{
    control::Transport,
    disk::Disk,
    times::{Kind, Times},
    writing_back::{WriteBackSettings, WritingBack},
};

/// Ranges of lost bytes that are named.
const GONE_MAX: usize = 16;

/// The document.
pub(crate) fn document<'a>(
    store: &CacheStore<Disk>,
    devices: impl Iterator<Item = (&'a CachedDevice<Disk, Disk>, Transport)>,
    writing_back: &WritingBack,
) -> Value {
    let sets = store.sets();
    let gone = store.gone();
    let WriteBackSettings { percent, seconds, rate } = writing_back.settings();
    let (log_bytes, log_used) = store.log_fill();
    let devices = devices.map(|(cached, transport)| {
        let counts = Count::ALL.map(|(count, name)| (name, cached.counts().get(count)));
        let counters = counts.into_iter().collect::<BTreeMap<_, _>>();
        json!({
            "name": cached.name(),
            "slow": cached.slow().path(),
            "size": cached.slow().size(),
            "mode": cached.mode().name(),
            "transport": transport,
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

/// The distributions of one device. `engine` has the counters of the request engine.
pub(crate) fn distributions(name: &str, times: &Times, engine: &Counters) -> Value {
    let mut document = json!({ "name": name });
    for (kind, key) in Kind::all() {
        document[key] = distribution(&times.with(engine, kind));
    }
    document
}

/// Its number of values, their sum, percentiles, and the number of values below each power of two.
fn distribution(values: &HistogramSnapshot) -> Value {
    let quantiles = [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99_9"), (1.0, "max")];
    let mut document = json!({ "count": values.count(), "sum": values.sum() });
    for (share, key) in quantiles {
        document[key] = values.quantile(share).into();
    }
    let powers = (0..=u64::BITS).map(|power| (power, values.below(power)));
    // Without those below the smallest value, and those above the largest one.
    let count = values.count();
    let mut buckets = Vec::new();
    for (power, below) in powers.skip_while(|(_, below)| *below == 0) {
        let end = 1u64.checked_shl(power).unwrap_or(u64::MAX);
        buckets.push(json!({ "below": end, "count": below }));
        if below == count {
            break;
        }
    }
    document["buckets"] = buckets.into();
    document
}
