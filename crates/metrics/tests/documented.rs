//! The metrics are those of `docs/metrics.md`, and not too many.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use burgeon_metrics::{
    CacheNow, DISKS_MAX, DiskNow, Disks, FAMILIES, MetricsSnapshot, MountNow, STORES_MAX,
    TOTALS_MAX, Totals, Values, render,
};

/// The rows of the tables: name, type, labels, meaning.
fn documented() -> Vec<[String; 4]> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let text = fs::read_to_string(path).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `burgeon_"));
    rows.map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, help] = cells.try_into().unwrap_or_else(|_| panic!("{row}"));
        [name.trim_matches('`'), kind, labels, help].map(str::to_owned)
    })
    .collect()
}

#[test]
fn the_document_has_each_metric() {
    let exported: Vec<_> = FAMILIES
        .iter()
        .map(|family| {
            let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let help = family.help.trim_end_matches('.').to_owned();
            [family.name.to_owned(), family.kind.name().to_owned(), labels.join(", "), help]
        })
        .collect();
    for [name, kind, labels, help] in &exported {
        println!("| `{name}` | {kind} | {labels} | {help} |");
    }
    assert_eq!(documented(), exported);
}

/// Everything at once: `mounts` mounts of as many stores, and more disks than are exported.
fn full(mounts: usize) -> String {
    let mut totals = Totals::default();
    let mut now = Vec::new();
    for number in 0..mounts {
        let (id, store) = (format!("{number:08x}"), format!("s3://bucket-{number}"));
        totals.look(&id, &store, Values::default());
        now.push(MountNow {
            id,
            store,
            image: "debian:12".to_owned(),
            local_bytes: Some(1),
            waiting_readers: Some(0),
            in_flight: Some(0),
            ..MountNow::default()
        });
    }
    let snapshot = MetricsSnapshot {
        mounts_now: now,
        cache_now: Some(CacheNow { hit_in_an_hour: 1, ..CacheNow::default() }),
        ..MetricsSnapshot::default()
    };
    let disk = |number: usize| DiskNow {
        name: format!("sd{number}"),
        life_read_bytes: Some(1),
        life_written_bytes: Some(1),
        endurance_used_percent: Some(1),
        endurance_left_seconds: Some(1),
        ..DiskNow::default()
    };
    let disks = Disks { seen_unix_seconds: 1, disks: (0..DISKS_MAX + 9).map(disk).collect() };
    render(Some(&snapshot.with_totals(&totals)), &disks)
}

#[test]
fn two_hundred_mounts_give_at_most_five_thousand_series() {
    let text = full(200);
    let series: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    println!("200 mounts of {STORES_MAX} stores and more: {} series", series.len());
    assert!(series.len() <= 5000, "{}", series.len());
    let others = format!("\nburgeon_stores_in_other {}\n", 200 - STORES_MAX);
    assert!(text.contains(&others) && full(STORES_MAX).contains("\nburgeon_stores_in_other 0\n"));
    let mut counters: BTreeMap<&str, usize> = BTreeMap::new();
    for line in series.iter().filter(|line| line.starts_with("burgeon_mount_")) {
        let (name, rest) = line.split_once('{').unwrap();
        if name.ends_with("_total") {
            *counters.entry(rest.split('"').nth(1).unwrap()).or_default() += 1;
        }
    }
    assert_eq!(counters.len(), 200);
    assert!(counters.values().all(|count| *count == 12), "{counters:?}");
    for family in FAMILIES {
        assert!(text.contains(&format!("# TYPE {} {}\n", family.name, family.kind.name())));
        let is_total = family.name.ends_with("_total");
        assert_eq!(is_total, family.kind.name() == "counter", "{}", family.name);
    }
}

/// Readers refuse a text in which two series have the same labels.
#[test]
fn no_two_series_have_the_same_labels() {
    let long = format!("/srv/{}", "x".repeat(250));
    let stores = [format!("{long}/a"), format!("{long}/b"), "/a\u{1}".into(), "/a\u{2}".into()];
    let mut totals = Totals::default();
    let mut mounts_now = Vec::new();
    for (number, store) in stores.iter().enumerate() {
        totals.look(&number.to_string(), store, Values::default());
        let [image, store] = [&long, store].map(Clone::clone);
        let mount = MountNow { id: number.to_string(), image, store, ..MountNow::default() };
        mounts_now.push(mount.shortened());
    }
    let snapshot =
        MetricsSnapshot { mounts_now, ..MetricsSnapshot::default() }.with_totals(&totals);
    assert_eq!(snapshot.stores_in_other(), 0);
    let text = render(Some(&snapshot), &Disks::default());
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let mut seen = BTreeSet::new();
    for line in lines {
        let series = line.rsplit_once(' ').unwrap().0;
        assert!(seen.insert(series), "twice: {series}");
    }
    let of_stores = seen.iter().filter(|series| series.contains("burgeon_failed_reads_total"));
    assert_eq!(of_stores.count(), stores.len());
}

/// A file that could not be read again would end all totals.
#[test]
fn totals_that_cannot_be_read_again_are_not_written() {
    let mut totals = Totals::default();
    let store = "x".repeat(4096);
    for number in 0..2000 {
        totals.look(&format!("{number:08x}"), &store, Values::default());
    }
    let bytes = totals.encode().unwrap();
    assert_eq!(Totals::from_file(&bytes).unwrap().mounts().len(), 2000);
    totals.look("more", &"x".repeat(TOTALS_MAX), Values::default());
    assert_eq!(totals.encode().unwrap_err().kind(), burgeon_block::ErrorKind::OverLimit);
}
