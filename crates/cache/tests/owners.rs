//! Bytes by owner, and limits of owners' chunks.

#![allow(clippy::unwrap_used)]

mod common;

use std::{path::Path, sync::Arc};

use burgeon_cache::{
    Cache, ChunkOwner, ChunkStore, Place, Scope, Why, disk::DiskFolder, policy::Clock,
};
use common::{BLOCK, key, settings};

const LEN: u64 = 16 * BLOCK;

fn open(path: &Path) -> Arc<Cache> {
    let disk = Arc::new(DiskFolder::new(path).unwrap());
    Arc::new(Cache::over(disk, settings(64 << 20), Box::<Clock>::default()))
}

fn owner(image: &str, store: &str) -> ChunkOwner {
    ChunkOwner { image: image.to_owned(), store: store.to_owned() }
}

fn admit(store: &dyn ChunkStore, n: u64, why: Why) -> Option<Place> {
    store.admit(key(n), &[(n % 255) as u8 + 1; LEN as usize], why)
}

/// Chunks of each owner.
fn owned(cache: &Cache) -> Vec<(String, u64)> {
    let bytes = cache.owned_bytes();
    let all = bytes.owners.into_iter().map(|(owner, bytes)| (owner.image, bytes));
    all.chain([("nobody".to_owned(), bytes.unclaimed)])
        .map(|(image, bytes)| (image, bytes / LEN))
        .collect()
}

fn expect(cache: &Cache, chunks: &[(&str, u64)]) {
    let chunks: Vec<_> = chunks.iter().map(|(image, n)| ((*image).to_owned(), *n)).collect();
    assert_eq!(owned(cache), chunks);
}

fn here(cache: &Cache, chunks: std::ops::Range<u64>) -> u64 {
    chunks.filter(|n| cache.find(&key(*n)).is_some()).count() as u64
}

#[test]
fn a_chunk_counts_for_the_first_that_admits_it() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let [a, b] = ["a", "b"].map(|image| cache.for_owner(&owner(image, "s")));
    (0..10).for_each(|n| assert!(admit(&*a, n, Why::Read).is_some()));
    (5..20).for_each(|n| assert!(admit(&*b, n, Why::Read).is_some()));
    admit(&*cache, 20, Why::Read).unwrap();
    expect(&cache, &[("a", 10), ("b", 10), ("nobody", 1)]);
    cache.drop_keys(&[key(0), key(19), key(20)]);
    expect(&cache, &[("a", 9), ("b", 9), ("nobody", 0)]);
    // The slots of those are used again.
    (30..40).for_each(|n| assert!(admit(&*b, n, Why::Read).is_some()));
    expect(&cache, &[("a", 9), ("b", 19), ("nobody", 0)]);
    assert_eq!(cache.report().chunks, 28);
}

#[test]
fn an_owner_stays_within_the_limits_of_its_image_and_its_store() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let [a, b, c] = [("a", "s"), ("b", "s"), ("c", "t")].map(|(image, store)| owner(image, store));
    let [to_a, to_b, to_c] = [&a, &b, &c].map(|owner| cache.for_owner(owner));
    let limits =
        || vec![(Scope::Image("a".to_owned()), 10 * LEN), (Scope::Store("s".to_owned()), 16 * LEN)];
    cache.limit_owners(limits());
    for n in 0..100 {
        assert!(admit(&*to_a, n, Why::Read).is_some(), "its older chunks make room");
        assert!(cache.owned_bytes().owners[0].1 <= 10 * LEN);
        assert!(admit(&*to_c, 1000 + n, Why::Read).is_some());
    }
    expect(&cache, &[("a", 10), ("b", 0), ("c", 100), ("nobody", 0)]);
    assert_eq!(here(&cache, 90..100), 10, "the newest ones are here");
    for n in 200..230 {
        assert!(admit(&*to_b, n, Why::Read).is_some());
        let owned = owned(&cache);
        assert!(owned[0].1 + owned[1].1 <= 16, "{owned:?}");
    }
    expect(&cache, &[("a", 0), ("b", 16), ("c", 100), ("nobody", 0)]);
    // Filling pushes nothing out, and is refused before the bytes are fetched.
    assert!(!to_a.may_admit(&key(300), LEN as u32, Why::Fill));
    assert!(admit(&*to_a, 300, Why::Fill).is_none());
    assert!(to_c.may_admit(&key(301), LEN as u32, Why::Fill));
    // The same again changes nothing.
    cache.limit_owners(limits());
    expect(&cache, &[("a", 0), ("b", 16), ("c", 100), ("nobody", 0)]);
    cache.limit_owners(vec![(Scope::Image("c".to_owned()), 3 * LEN)]);
    expect(&cache, &[("a", 0), ("b", 16), ("c", 3), ("nobody", 0)]);
    cache.limit_owners(Vec::new());
    (400..500).for_each(|n| assert!(admit(&*to_a, n, Why::Read).is_some()));
    expect(&cache, &[("a", 100), ("b", 16), ("c", 3), ("nobody", 0)]);
}

#[test]
fn within_a_limit_chunks_that_are_read_stay_and_held_ones_are_never_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let store = cache.for_owner(&owner("a", "s"));
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), 8 * LEN)]);
    let places: Vec<_> = (0..8).map(|n| admit(&*store, n, Why::Read).unwrap()).collect();
    for n in 8..40 {
        places[..3].iter().for_each(|place| store.touch(*place));
        admit(&*store, n, Why::Read).unwrap();
    }
    assert_eq!((here(&cache, 0..3), here(&cache, 3..40)), (3, 5));
    let keys: Vec<_> = (0..40).filter(|n| here(&cache, *n..*n + 1) == 1).map(key).collect();
    let hold = cache.hold(&keys).unwrap();
    assert!(admit(&*store, 50, Why::Read).is_none(), "all are held, and nothing else may come");
    cache.upkeep();
    assert_eq!(cache.report().used, 8 * LEN, "the refused one left nothing");
    drop(hold);
    assert!(admit(&*store, 51, Why::Read).is_some());
    expect(&cache, &[("a", 8), ("nobody", 0)]);
}

#[test]
fn a_limit_whose_chunks_are_held_keeps_no_other_from_being_kept() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let [a, b] = ["a", "b"].map(|image| cache.for_owner(&owner(image, "s")));
    // More than are looked at for one victim, and those that are not held come last.
    let small = |n: u64| [(n % 255) as u8 + 1; BLOCK as usize];
    (0..5000).for_each(|n| assert!(a.admit(key(n), &small(n), Why::Read).is_some()));
    (5000..5100).for_each(|n| assert!(b.admit(key(n), &small(n), Why::Read).is_some()));
    let held: Vec<_> = (0..4990).map(key).collect();
    let _hold = cache.hold(&held).unwrap();
    let limit = |image: &str| (Scope::Image(image.to_owned()), 10 * BLOCK);
    cache.limit_owners(vec![limit("a"), limit("b")]);
    assert_eq!(here(&cache, 0..5000), 4990, "what is held stays, and nothing else");
    assert_eq!(here(&cache, 5000..5100), 10);
}

#[test]
fn a_chunk_that_a_limit_of_held_chunks_refuses_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let a = cache.for_owner(&owner("a", "s"));
    (0..8).for_each(|n| assert!(admit(&*a, n, Why::Read).is_some()));
    let held: Vec<_> = (0..8).map(key).collect();
    let _hold = cache.hold(&held).unwrap();
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), 8 * LEN)]);
    let before = cache.report().address_space;
    for n in 8..40 {
        admit(&*a, n, Why::Read);
    }
    expect(&cache, &[("a", 8), ("nobody", 0)]);
    assert_eq!(cache.report().address_space, before, "places were given");
}

#[test]
fn chunks_of_an_earlier_server_are_claimed_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let a = owner("a", "s");
    let store = cache.for_owner(&a);
    (0..50).for_each(|n| assert!(admit(&*store, n, Why::Read).is_some()));
    cache.sync().unwrap();
    drop((store, cache));

    let cache = open(dir.path());
    expect(&cache, &[("nobody", 50)]);
    let b = cache.for_owner(&owner("b", "s"));
    (50..60).for_each(|n| assert!(admit(&*b, n, Why::Read).is_some()));
    let keys: Vec<_> = (0..55).map(key).collect();
    cache.claim(&a, &keys);
    expect(&cache, &[("a", 50), ("b", 10), ("nobody", 0)]);
    cache.claim(&owner("b", "s"), &keys);
    expect(&cache, &[("a", 50), ("b", 10), ("nobody", 0)]);
    drop((b, cache));

    let cache = open(dir.path());
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), 20 * LEN)]);
    cache.claim(&a, &keys);
    assert_eq!(owned(&cache)[0], ("a".to_owned(), 20));
    assert_eq!(here(&cache, 0..50), 20);
}

#[test]
fn the_number_of_an_owner_without_chunks_is_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let kept = cache.for_owner(&owner("kept", "s"));
    admit(&*kept, 0, Why::Read).unwrap();
    drop(kept);
    // More than there are numbers at a time.
    for n in 0..40_000 {
        drop(cache.for_owner(&owner(&format!("image-{n}"), "s")));
    }
    let [a, b] = ["a", "b"].map(|image| cache.for_owner(&owner(image, "s")));
    admit(&*a, 1, Why::Read).unwrap();
    admit(&*b, 2, Why::Read).unwrap();
    expect(&cache, &[("a", 1), ("b", 1), ("kept", 1), ("nobody", 0)]);
    drop(b);
    expect(&cache, &[("a", 1), ("b", 1), ("kept", 1), ("nobody", 0)]);
    cache.drop_keys(&[key(1), key(2)]);
    expect(&cache, &[("a", 0), ("kept", 1), ("nobody", 0)]);
    // One that had a limit leaves none to the next one with its number.
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), LEN)]);
    drop(a);
    let c = cache.for_owner(&owner("c", "s"));
    (3..6).for_each(|n| assert!(admit(&*c, n, Why::Read).is_some()));
    expect(&cache, &[("c", 3), ("kept", 1), ("nobody", 0)]);
}

#[test]
fn a_prefetch_pushes_out_no_chunk_of_an_owner_that_was_read() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let a = cache.for_owner(&owner("a", "s"));
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), 10 * LEN)]);
    for n in 0..10 {
        let place = admit(&*a, n, Why::Read).unwrap();
        a.touch(place);
    }
    cache.upkeep();
    for n in 100..150 {
        let _ = admit(&*a, n, Why::Prefetch);
    }
    cache.upkeep();
    assert_eq!((here(&cache, 0..10), owned(&cache)[0].1), (10, 10));
    // So a profile stops before it fetches them.
    assert!(!a.may_admit(&key(500), LEN as u32, Why::Prefetch));
    assert!(a.may_admit(&key(500), LEN as u32, Why::Read));
    // Reads do, the oldest first.
    assert!(admit(&*a, 200, Why::Read).is_some());
    assert_eq!(owned(&cache)[0].1, 10);
}

#[test]
fn chunks_that_another_owner_has_brought_count_as_shared() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let [a, b] = ["a", "b"].map(|image| cache.for_owner(&owner(image, "s")));
    (0..10).for_each(|n| assert!(admit(&*a, n, Why::Read).is_some()));
    assert!((0..10).all(|n| a.find(&key(n)).is_some()));
    assert_eq!(cache.report().shared, 0, "they are its own");
    assert!((5..15).map(|n| b.find(&key(n))).filter(Option::is_some).count() == 5);
    assert_eq!(cache.report().shared, 5 * LEN);
}
