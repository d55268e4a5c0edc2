//! Chunks whose space another file shares: neither counted nor evicted.

#![allow(clippy::unwrap_used)]

mod common;

use burgeon_cache::{ChunkOwner, ChunkStore, LentRange, Scope, Why};
use common::{
    key,
    loans::{
        FIT, HALF, LEN, LIMIT, admit, bytes, count_elsewhere, half_lent, lent, open, read, stay,
    },
};

#[test]
fn lent_chunks_are_not_counted_and_stay_however_much_comes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    admit(&cache, 0..HALF);
    let used = cache.report().used;
    cache.lend(lent(&cache, dir.path(), 0..HALF));
    let report = cache.report();
    assert_eq!((report.used, report.lent, report.chunks), (0, used, HALF));
    drop(cache);
    stay(tempfile::tempdir().unwrap().path());
}

#[test]
fn a_lent_chunk_that_is_moved_or_forgotten_counts_again() {
    count_elsewhere(tempfile::tempdir().unwrap().path());
}

#[test]
fn holds_keep_no_room_for_lent_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    admit(&cache, 0..HALF);
    let keys: Vec<_> = (0..HALF).map(key).collect();
    let before = cache.hold(&keys[..4]).unwrap();
    cache.lend(lent(&cache, dir.path(), 0..HALF));
    let after = cache.hold(&keys[4..8]).unwrap();
    assert_eq!(cache.report().held, 0);
    cache.lend(Vec::new());
    assert_eq!(cache.report().held, 8 * LEN);
    cache.lend(lent(&cache, dir.path(), 0..2));
    drop(before);
    assert_eq!(cache.report().held, 4 * LEN);
    drop(after);
    assert_eq!(cache.report().held, 0);
}

#[test]
fn a_chunk_that_has_another_owner_after_a_loan_is_not_evicted_for_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    let [a, b] =
        ["a", "b"].map(|image| ChunkOwner { image: image.to_owned(), store: "s".to_owned() });
    let [of_a, _of_b] = [&a, &b].map(|owner| cache.for_owner(owner));
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), 8 * LEN)]);
    (0..8).for_each(|n| assert!(of_a.admit(key(n), &bytes(n), Why::Read).is_some()));
    cache.lend(lent(&cache, dir.path(), 0..8));
    cache.lend(Vec::new());
    cache.claim(&b, &(0..8).map(key).collect::<Vec<_>>());
    (20..36).for_each(|n| assert!(of_a.admit(key(n), &bytes(n), Why::Read).is_some()));
    assert!((0..8).all(|n| read(&cache, n)), "they are b's");
    assert_eq!(cache.owned_bytes().owners.iter().map(|(_, bytes)| *bytes).sum::<u64>(), 16 * LEN);
}

#[test]
fn the_end_of_a_loan_counts_its_chunks_again_and_evicts_those_beyond_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, ranges) = half_lent(dir.path());
    admit(&cache, 1000..1000 + 2 * FIT);
    // A part of it ends.
    let (stay, end) = ranges.split_at(8);
    cache.lend(stay.to_vec());
    let report = cache.report();
    assert_eq!(report.lent, 8 * LEN);
    cache.upkeep();
    let report = cache.report();
    assert!(report.used <= LIMIT, "{report:?}");
    assert!(end.len() > 8 && (0..8).all(|n| read(&cache, n)));
    // The same again changes nothing.
    cache.lend(stay.to_vec());
    assert_eq!(cache.report().lent, 8 * LEN);
    cache.lend(Vec::new());
    cache.evict(u64::MAX / 2);
    let report = cache.report();
    assert_eq!((report.used, report.lent, report.chunks), (0, 0, 0), "{report:?}");
}

#[test]
fn a_new_server_evicts_no_lent_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, ranges) = half_lent(dir.path());
    // Alone both fit, and together they do not.
    admit(&cache, 1000..1000 + 3 * FIT);
    let before = cache.report();
    assert!(before.used + before.lent > LIMIT, "{before:?}");
    cache.sync().unwrap();
    drop(cache);
    let cache = open(dir.path(), ranges);
    let report = cache.report();
    assert_eq!((report.lent, report.chunks), (before.lent, before.chunks), "{report:?}");
    assert!((0..HALF).all(|n| read(&cache, n)));
    drop(cache);
    // Without the loan they count, and are too many.
    let cache = open(dir.path(), Vec::new());
    cache.upkeep();
    let report = cache.report();
    assert!(report.lent == 0 && report.used <= LIMIT && report.chunks < before.chunks);
}

#[test]
fn a_lent_chunk_that_rots_or_is_dropped_leaves_and_its_successor_counts() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    admit(&cache, 0..8);
    cache.lend(lent(&cache, dir.path(), 0..8));
    let place = cache.find(&key(3)).unwrap();
    cache.doubt(place, &key(3));
    cache.drop_keys(&[key(4)]);
    cache.upkeep();
    let report = cache.report();
    assert_eq!((report.lent, report.used, report.chunks), (6 * LEN, 0, 6), "{report:?}");
    admit(&cache, 3..5);
    let report = cache.report();
    assert_eq!((report.lent, report.used), (6 * LEN, 2 * LEN), "{report:?}");
}

#[test]
fn ranges_of_another_cache_lend_nothing() {
    let [one, two] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = [&one, &two].map(|dir| open(dir.path(), Vec::new()));
    admit(&first, 0..8);
    admit(&second, 0..8);
    let ranges = lent(&first, one.path(), 0..8);
    second.lend(ranges.clone());
    assert_eq!(
        (second.report().lent, second.report().used),
        (0, 8 * LEN),
        "the names are the same"
    );
    let cut = |lent: &LentRange| {
        let mut lent = *lent;
        lent.range.blocks -= 1;
        lent
    };
    first.lend(vec![cut(&ranges[2])]);
    assert_eq!(first.report().lent, 0, "a part of a chunk is not lent");
    let unknown = LentRange { identity: 0, ..ranges[0] };
    first.lend(vec![unknown]);
    assert_eq!(first.report().lent, 0);
}

#[test]
fn lent_chunks_are_outside_of_the_limits_of_owners() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    let owner = ChunkOwner { image: "a".to_owned(), store: "s".to_owned() };
    let store = cache.for_owner(&owner);
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), 8 * LEN)]);
    (0..8).for_each(|n| assert!(store.admit(key(n), &bytes(n), Why::Read).is_some()));
    cache.lend(lent(&cache, dir.path(), 0..8));
    assert_eq!(cache.owned_bytes().owners[0].1, 0);
    let keys: Vec<_> = (0..8).map(key).collect();
    cache.claim(&owner, &keys);
    assert_eq!(cache.owned_bytes().owners[0].1, 0, "nobody owns what is lent");
    (20..40).for_each(|n| assert!(store.admit(key(n), &bytes(n), Why::Read).is_some()));
    assert_eq!(cache.owned_bytes().owners[0].1, 8 * LEN);
    assert!((0..8).all(|n| read(&cache, n)));
    cache.lend(Vec::new());
    assert_eq!(cache.owned_bytes().unclaimed, 8 * LEN);
    cache.claim(&owner, &keys);
    let owned = cache.owned_bytes();
    assert!(owned.owners[0].1 <= 8 * LEN && owned.unclaimed == 0, "{owned:?}");
}

#[test]
fn more_may_be_lent_than_the_cache_may_hold() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    let mut ranges = Vec::new();
    for round in 0..12 {
        let chunks = round * 100..round * 100 + HALF;
        admit(&cache, chunks.clone());
        ranges.extend(lent(&cache, dir.path(), chunks));
        cache.lend(ranges.clone());
    }
    let report = cache.report();
    assert_eq!((report.used, report.lent), (0, 6 * LIMIT), "{report:?}");
    admit(&cache, 5000..5000 + 2 * FIT);
    let report = cache.report();
    assert!(report.used > LIMIT / 2, "its address space is not used up: {report:?}");
    assert!((0..12).all(|round| read(&cache, round * 100)));
}
