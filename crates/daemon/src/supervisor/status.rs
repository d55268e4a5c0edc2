//! The answer to `burgeon status`.

use std::{sync::PoisonError, time::Duration};

use burgeon_block::{Counters, HistogramSnapshot};

use super::{
    Supervisor,
    cache::with_layers,
    table::{MountEntry, Serving, Table},
};
use crate::{
    ipc::{
        link::ToServer,
        protocol::{DaemonStatus, Latency, MountStatus, ReadStatus},
    },
    state::{layers::LayerShare, pins::Pins},
    transport::PLAIN,
};

/// Time limit for the server's report. Without it the status is still correct, but has fewer
/// fields.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

impl Supervisor {
    pub(super) fn status(&self) -> DaemonStatus {
        let share = LayerShare::read(&self.state);
        let table = self.fresh_table();
        DaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            supervisor_pid: std::process::id(),
            server_pid: table.server_pid,
            server_answers: !table.server_is_silent,
            server_restarts: table.server_restarts,
            opener_pid: table.opener.as_ref().map(|(_, pid)| *pid),
            mounts: table.mounts.values().map(|entry| describe(entry, &table)).collect(),
            cache: table
                .cache
                .clone()
                .filter(|_| table.link.is_some())
                .map(|cache| with_layers(cache, share)),
        }
    }

    /// Returns the table after the server's next report, or after the time limit.
    pub(super) fn fresh_table(&self) -> std::sync::MutexGuard<'_, Table> {
        let table = self.table();
        let before = table.report_count;
        if table.mounts.is_empty() || !table.send(&ToServer::Report) {
            return table;
        }
        let waited = self.changed.wait_timeout_while(table, REPORT_TIMEOUT, |table| {
            table.report_count == before && table.link.is_some()
        });
        let (mut table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        table.server_is_silent = table.report_count == before && table.link.is_some();
        table
    }
}

fn describe(entry: &MountEntry, table: &Table) -> MountStatus {
    let record = &entry.record;
    let id = record.attach.id;
    let report = table.reports.get(&id);
    let state = match (&entry.serving, entry.handed_out) {
        (_, false) => "preparing",
        _ if record.plain => "let go",
        // A mount that has lost its connection may have a new server before a new connection.
        (Serving::Yes, _) if table.link.is_some() && !entry.lost => "serving",
        (Serving::No(_) | Serving::Refusing(_), _) => "failed",
        _ => "recovering",
    };
    MountStatus {
        id,
        image: record.image.clone(),
        name: record.name.clone(),
        digest: record.digest,
        store: record.attach.store.clone(),
        target: record.target.clone(),
        fsid: record.fsid,
        state: state.to_owned(),
        problem: match &entry.serving {
            Serving::No(error) | Serving::Refusing(error) => Some(error.to_string()),
            _ => None,
        },
        last_source_error: report.and_then(|report| report.last_source_error.clone()),
        device: record.data_device.clone(),
        transport: match record.plain {
            true => PLAIN.to_owned(),
            false => record.attach.transport.name().to_owned(),
        },
        writes: record.writes.clone(),
        forced_read_only: false,
        held_by: None,
        attributes: record.attributes,
        data_bytes: record.data_bytes,
        materialised_bytes: match record.plain {
            true => Some(record.data_bytes),
            false => report.map(|report| report.materialised_bytes),
        },
        cache: report.map(|report| report.cache.clone()),
        fill: report.and_then(|report| report.fill.clone()),
        profile: report.and_then(|report| report.profile.clone()),
        pins: Pins::read(&record.attach.pins).map(|pins| pins.paths()).unwrap_or_default(),
        pinned: report.and_then(|report| report.pinned.clone()),
        reads: read_status(entry.slots.counters()),
        area: report.and_then(|report| report.area.clone()),
        fetch_limit: record.attach.fetch_limit,
        over_limit_reads: report.map_or(0, |report| report.over_limit_reads),
    }
}

fn read_status(counters: &Counters) -> ReadStatus {
    let (hits, misses) = (counters.hits.get(), counters.misses.get());
    let reads = hits + misses;
    ReadStatus {
        hits,
        misses,
        hit_ratio: (reads > 0).then(|| hits as f64 / reads as f64),
        fetches: counters.fetches.get(),
        fetched_bytes: counters.fetched_bytes.get(),
        background_bytes: counters.background_bytes.get(),
        local_latency: latency(&counters.hit_latency.snapshot()),
        source_latency: latency(&counters.miss_latency.snapshot()),
        cache_corrupt_blocks: counters.cache_corrupt_blocks.get(),
        source_corrupt_chunks: counters.source_corrupt_chunks.get(),
        source_errors: counters.source_errors.get(),
        failed_reads: counters.failed_reads.get(),
        replayed: counters.replayed.get(),
    }
}

fn latency(histogram: &HistogramSnapshot) -> Latency {
    let at = |q| histogram.quantile(q).map(|nanoseconds| nanoseconds as f64 / 1000.0);
    Latency { p50_us: at(0.5), p90_us: at(0.9), p99_us: at(0.99) }
}
