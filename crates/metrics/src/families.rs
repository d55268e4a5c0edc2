//! All metrics: a row has a name, a meaning, and the values. `docs/metrics.md` describes the same,
//! and a test compares the two.
//!
//! Names end in their unit; counters in `_total`. A mount has at most 12 counters, whose label is
//! its identity alone: `burgeon_mount_info` has the rest. Two hundred mounts give at most 5,000
//! series.

use crate::{
    DiskNow, MetricsSnapshot, MountNow, ReadTier, Values,
    disks::DISKS_MAX,
    format::{Exported, Family, FamilyKind, Samples},
    values::BOUNDS,
};

/// Calls `show` with the snapshot.
fn daemon(source: &Exported<'_>, mut show: impl FnMut(&MetricsSnapshot)) {
    source.snapshot.into_iter().for_each(&mut show);
}

fn stores(source: &Exported<'_>, mut show: impl FnMut(&str, &Values)) {
    daemon(source, |it| it.stores.iter().for_each(|(store, values)| show(store, values)));
}

fn mounts(source: &Exported<'_>, mut show: impl FnMut(&str, &Values)) {
    daemon(source, |it| it.mounts.iter().for_each(|(id, values)| show(id, values)));
}

fn mounts_now(source: &Exported<'_>, mut show: impl FnMut(&MountNow)) {
    daemon(source, |it| it.mounts_now.iter().for_each(&mut show));
}

fn disks(source: &Exported<'_>, mut show: impl FnMut(&[&str], &DiskNow)) {
    let shown = source.disks.disks.iter().take(DISKS_MAX);
    shown.for_each(|disk| show(&[&disk.name, &disk.model, &disk.serial, &disk.wwn], disk));
}

/// Each tier of the values of a mount or store.
fn tiers(samples: &mut Samples<'_>, of: &str, value: impl Fn(ReadTier) -> u64) {
    ReadTier::ALL.into_iter().for_each(|tier| samples.count(&[of, tier.name()], value(tier)));
}

fn cache(source: &Exported<'_>, samples: &mut Samples<'_>, of: fn(&crate::CacheNow) -> u64) {
    daemon(source, |it| it.cache_now.iter().for_each(|now| samples.count(&[], of(now))));
}

fn cache_total(
    source: &Exported<'_>,
    samples: &mut Samples<'_>,
    of: fn(&crate::CacheValues) -> u64,
) {
    daemon(source, |it| samples.count(&[], of(&it.cache)));
}

const DISK: &[&str] = &["disk", "model", "serial", "wwn"];

macro_rules! family {
    ($name:literal, $kind:ident, $labels:expr, $help:literal, $samples:expr) => {
        Family {
            name: $name,
            kind: FamilyKind::$kind,
            labels: $labels,
            help: $help,
            samples: $samples,
        }
    };
}

/// All metrics, in the order of the text.
pub const FAMILIES: &[Family] = &[
    family!("burgeon_up", Gauge, &[], "1 if the daemon answers, 0 if not.", |it, out| {
        out.count(&[], it.snapshot.is_some().into());
    }),
    family!(
        "burgeon_build_info",
        Gauge,
        &["version"],
        "1, with the daemon's version.",
        |it, out| {
            daemon(it, |it| out.count(&[&it.version], 1));
        }
    ),
    family!(
        "burgeon_server_up",
        Gauge,
        &[],
        "1 if a server runs and answers, which mounts need.",
        |it, out| {
            daemon(it, |it| out.count(&[], it.has_server.into()));
        }
    ),
    family!("burgeon_server_starts_total", Counter, &[], "Servers started.", |it, out| {
        daemon(it, |it| out.count(&[], it.server_starts));
    }),
    family!("burgeon_mounts", Gauge, &[], "Mounts.", |it, out| {
        daemon(it, |it| out.count(&[], it.mount_count));
    }),
    family!(
        "burgeon_totals_since_timestamp_seconds",
        Gauge,
        &[],
        "Time from which totals count.",
        |it, out| {
            daemon(it, |it| out.count(&[], it.since_unix_seconds));
        }
    ),
    family!(
        "burgeon_totals_written_timestamp_seconds",
        Gauge,
        &[],
        "Time at which the totals shown here were written.",
        |it, out| {
            daemon(it, |it| out.count(&[], it.written_unix_seconds));
        }
    ),
    family!(
        "burgeon_differing_layers",
        Gauge,
        &[],
        "Layers that unpack to another digest than an image states, or hold other files than their table of contents lists.",
        |it, out| {
            daemon(it, |it| out.count(&[], it.differing_layers));
        }
    ),
    // By store.
    family!(
        "burgeon_read_seconds",
        Histogram,
        &["store", "tier"],
        "Time of reads of lazy data; in the tier source, a fetch is waited for.",
        |it, out| {
            stores(it, |store, values| {
                ReadTier::ALL.into_iter().for_each(|tier| {
                    let below = BOUNDS.iter().copied().zip(values.below(tier).iter().copied());
                    let whole = (values.reads(tier), values.nanoseconds(tier));
                    out.histogram(&[store, tier.name()], below, whole);
                })
            });
        }
    ),
    family!(
        "burgeon_read_bytes_total",
        Counter,
        &["store", "tier"],
        "Bytes of these reads.",
        |it, out| {
            stores(it, |store, values| tiers(out, store, |tier| values.bytes(tier)));
        }
    ),
    family!(
        "burgeon_failed_reads_total",
        Counter,
        &["store"],
        "Reads answered with an error.",
        |it, out| {
            stores(it, |store, values| out.count(&[store], values.failed_reads()));
        }
    ),
    family!(
        "burgeon_stalled_reads_total",
        Counter,
        &["store"],
        "Reads that took 1.07 seconds or more.",
        |it, out| {
            stores(it, |store, values| out.count(&[store], values.stalled()));
        }
    ),
    family!(
        "burgeon_fetches_total",
        Counter,
        &["store"],
        "Chunks fetched for readers.",
        |it, out| {
            stores(it, |store, values| out.count(&[store], values.fetches()));
        }
    ),
    family!(
        "burgeon_fetched_bytes_total",
        Counter,
        &["store", "for"],
        "Bytes fetched, as stored: for readers, or in the background.",
        |it, out| {
            stores(it, |store, values| {
                out.count(&[store, "reader"], values.fetched_bytes());
                out.count(&[store, "background"], values.background_bytes());
            });
        }
    ),
    family!(
        "burgeon_source_errors_total",
        Counter,
        &["store"],
        "Attempts to fetch that failed.",
        |it, out| {
            stores(it, |store, values| out.count(&[store], values.source_errors()));
        }
    ),
    family!(
        "burgeon_corrupt_total",
        Counter,
        &["store", "tier"],
        "Blocks of the cache, and chunks from the source, with wrong contents; none was served.",
        |it, out| {
            stores(it, |store, values| {
                out.count(&[store, "cache"], values.corrupt_in_cache());
                out.count(&[store, "source"], values.corrupt_at_source());
            });
        }
    ),
    family!(
        "burgeon_replayed_requests_total",
        Counter,
        &["store"],
        "Requests that a new server took over from the one before.",
        |it, out| {
            stores(it, |store, values| out.count(&[store], values.replayed()));
        }
    ),
    family!(
        "burgeon_stores_in_other",
        Gauge,
        &[],
        "Stores of present mounts whose values are those of store=\"other\".",
        |it, out| {
            daemon(it, |it| out.count(&[], it.stores_in_other()));
        }
    ),
    // The cache.
    family!("burgeon_cache_used_bytes", Gauge, &[], "Bytes that the cache takes.", |it, out| {
        cache(it, out, |now| now.used);
    }),
    family!("burgeon_cache_limit_bytes", Gauge, &[], "Most that it may take now.", |it, out| {
        cache(it, out, |now| now.limit);
    }),
    family!(
        "burgeon_cache_keep_free_bytes",
        Gauge,
        &[],
        "Bytes of its disk that it leaves free.",
        |it, out| {
            cache(it, out, |now| now.floor);
        }
    ),
    family!(
        "burgeon_cache_disk_free_bytes",
        Gauge,
        &[],
        "Bytes of its disk that are free.",
        |it, out| {
            cache(it, out, |now| now.free);
        }
    ),
    family!("burgeon_cache_pinned_bytes", Gauge, &[], "Bytes of it that pins keep.", |it, out| {
        cache(it, out, |now| now.held);
    }),
    family!(
        "burgeon_cache_lent_bytes",
        Gauge,
        &[],
        "Bytes of chunks that share their space with plain files (let-go), beside the bytes that it takes.",
        |it, out| {
            cache(it, out, |now| now.lent);
        }
    ),
    family!("burgeon_cache_chunks", Gauge, &[], "Chunks in it.", |it, out| {
        cache(it, out, |now| now.chunks);
    }),
    family!(
        "burgeon_cache_hit_ratio",
        Gauge,
        &[],
        "Share of the bytes read in the last hour that were local, 0 to 1.",
        |it, out| {
            daemon(it, |it| {
                it.cache_now.iter().for_each(|now| {
                    out.share(
                        &[],
                        now.hit_in_an_hour,
                        now.hit_in_an_hour.saturating_add(now.miss_in_an_hour),
                    );
                })
            });
        }
    ),
    family!(
        "burgeon_cache_admitted_bytes_total",
        Counter,
        &[],
        "Bytes of chunks that came.",
        |it, out| {
            cache_total(it, out, |all| all.admitted);
        }
    ),
    family!(
        "burgeon_cache_refused_bytes_total",
        Counter,
        &[],
        "Bytes of chunks that it did not take.",
        |it, out| {
            cache_total(it, out, |all| all.refused);
        }
    ),
    family!(
        "burgeon_cache_evicted_bytes_total",
        Counter,
        &[],
        "Bytes of chunks that went.",
        |it, out| {
            cache_total(it, out, |all| all.evicted);
        }
    ),
    family!(
        "burgeon_cache_written_bytes_total",
        Counter,
        &[],
        "Bytes that it wrote to its disk.",
        |it, out| {
            cache_total(it, out, |all| all.written);
        }
    ),
    family!(
        "burgeon_cache_damaged_chunks_total",
        Counter,
        &[],
        "Chunks in it that were wrong, and were fetched again.",
        |it, out| {
            cache_total(it, out, |all| all.doubted);
        }
    ),
    family!(
        "burgeon_cache_read_errors_total",
        Counter,
        &[],
        "Reads of its disk that failed.",
        |it, out| {
            cache_total(it, out, |all| all.read_errors);
        }
    ),
    family!(
        "burgeon_cache_write_errors_total",
        Counter,
        &[],
        "Writes to its disk that failed.",
        |it, out| {
            cache_total(it, out, |all| all.write_errors);
        }
    ),
    // By mount: gauges, then 12 counters.
    family!(
        "burgeon_mount_info",
        Gauge,
        &["mount", "image", "target", "store", "transport"],
        "1, with what the mount is.",
        |it, out| {
            mounts_now(it, |now| {
                let MountNow { id, image, target, store, transport, .. } = now;
                out.count(&[id, image, target, store, transport], 1);
            });
        }
    ),
    family!(
        "burgeon_mount_serving",
        Gauge,
        &["mount"],
        "1 if the mount is served, 0 if not.",
        |it, out| {
            mounts_now(it, |now| out.count(&[&now.id], now.is_serving.into()));
        }
    ),
    family!(
        "burgeon_mount_data_bytes",
        Gauge,
        &["mount"],
        "Bytes of data in the image.",
        |it, out| {
            mounts_now(it, |now| out.count(&[&now.id], now.data_bytes));
        }
    ),
    family!(
        "burgeon_mount_local_bytes",
        Gauge,
        &["mount"],
        "Bytes of these that are local.",
        |it, out| {
            mounts_now(it, |now| {
                now.local_bytes.into_iter().for_each(|n| out.count(&[&now.id], n))
            });
        }
    ),
    family!(
        "burgeon_mount_waiting_readers",
        Gauge,
        &["mount"],
        "Reads that wait for a chunk, over all mounts of the image.",
        |it, out| {
            mounts_now(it, |now| {
                now.waiting_readers.into_iter().for_each(|n| out.count(&[&now.id], n))
            });
        }
    ),
    family!(
        "burgeon_mount_fetches_in_flight",
        Gauge,
        &["mount"],
        "Chunks in flight, over all mounts of the image.",
        |it, out| {
            mounts_now(it, |now| now.in_flight.into_iter().for_each(|n| out.count(&[&now.id], n)));
        }
    ),
    family!(
        "burgeon_mount_reserved_bytes",
        Gauge,
        &["mount"],
        "Bytes reserved for its writes.",
        |it, out| {
            mounts_now(it, |now| out.count(&[&now.id], now.reserved_bytes));
        }
    ),
    family!(
        "burgeon_mount_reads_total",
        Counter,
        &["mount", "tier"],
        "Reads of lazy data.",
        |it, out| {
            mounts(it, |id, values| tiers(out, id, |tier| values.reads(tier)));
        }
    ),
    family!(
        "burgeon_mount_read_bytes_total",
        Counter,
        &["mount", "tier"],
        "Bytes of these reads.",
        |it, out| {
            mounts(it, |id, values| tiers(out, id, |tier| values.bytes(tier)));
        }
    ),
    family!(
        "burgeon_mount_read_seconds_total",
        Counter,
        &["mount", "tier"],
        "Time of these reads.",
        |it, out| {
            mounts(it, |id, values| {
                ReadTier::ALL.into_iter().for_each(|tier| {
                    out.seconds(&[id, tier.name()], values.nanoseconds(tier));
                })
            });
        }
    ),
    family!(
        "burgeon_mount_fetched_bytes_total",
        Counter,
        &["mount", "for"],
        "Bytes fetched, as stored: for readers, or in the background.",
        |it, out| {
            mounts(it, |id, values| {
                out.count(&[id, "reader"], values.fetched_bytes());
                out.count(&[id, "background"], values.background_bytes());
            });
        }
    ),
    family!(
        "burgeon_mount_failed_reads_total",
        Counter,
        &["mount"],
        "Reads answered with an error.",
        |it, out| {
            mounts(it, |id, values| out.count(&[id], values.failed_reads()));
        }
    ),
    family!(
        "burgeon_mount_stalled_reads_total",
        Counter,
        &["mount"],
        "Reads that took 1.07 seconds or more.",
        |it, out| {
            mounts(it, |id, values| out.count(&[id], values.stalled()));
        }
    ),
    family!(
        "burgeon_mount_source_errors_total",
        Counter,
        &["mount"],
        "Attempts to fetch that failed.",
        |it, out| {
            mounts(it, |id, values| out.count(&[id], values.source_errors()));
        }
    ),
    family!(
        "burgeon_mount_corrupt_total",
        Counter,
        &["mount"],
        "Blocks and chunks with wrong contents; none was served.",
        |it, out| {
            mounts(it, |id, values| {
                out.count(
                    &[id],
                    values.corrupt_in_cache().saturating_add(values.corrupt_at_source()),
                );
            });
        }
    ),
    // Disks.
    family!(
        "burgeon_disks_timestamp_seconds",
        Gauge,
        &[],
        "Time of the last `burgeon disks`.",
        |it, out| {
            if it.disks.seen_unix_seconds > 0 {
                out.count(&[], it.disks.seen_unix_seconds);
            }
        }
    ),
    family!(
        "burgeon_disk_read_bytes_total",
        Counter,
        DISK,
        "Bytes that this host has read.",
        |it, out| {
            disks(it, |labels, disk| out.count(labels, disk.read_bytes));
        }
    ),
    family!(
        "burgeon_disk_written_bytes_total",
        Counter,
        DISK,
        "Bytes that this host has written.",
        |it, out| {
            disks(it, |labels, disk| out.count(labels, disk.written_bytes));
        }
    ),
    family!(
        "burgeon_disk_life_read_bytes_total",
        Counter,
        DISK,
        "Bytes read over the drive's life; missing unless certain.",
        |it, out| {
            disks(it, |labels, disk| {
                disk.life_read_bytes.into_iter().for_each(|n| out.count(labels, n))
            });
        }
    ),
    family!(
        "burgeon_disk_life_written_bytes_total",
        Counter,
        DISK,
        "Bytes written over the drive's life; missing unless certain.",
        |it, out| {
            disks(it, |labels, disk| {
                disk.life_written_bytes.into_iter().for_each(|n| out.count(labels, n))
            });
        }
    ),
    family!(
        "burgeon_disk_endurance_used_ratio",
        Gauge,
        DISK,
        "Endurance used; 1 is all of it, and it may pass 1.",
        |it, out| {
            disks(it, |labels, disk| {
                disk.endurance_used_percent.into_iter().for_each(|n| out.share(labels, n, 100));
            });
        }
    ),
    family!(
        "burgeon_disk_endurance_left_seconds",
        Gauge,
        DISK,
        "Time until the endurance is used at the present rate; missing unless certain.",
        |it, out| {
            disks(it, |labels, disk| {
                disk.endurance_left_seconds.into_iter().for_each(|n| out.count(labels, n))
            });
        }
    ),
];
