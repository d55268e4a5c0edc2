//! The store in memory keeps the contract of `ChunkStore`.

#![allow(clippy::unwrap_used)]

use burgeon_block::ErrorKind;
use burgeon_cache::{
    CacheState, ChunkKey, ChunkStore, Domain, KeyKind, Why,
    testing::{Fault, MemoryStore},
};

const LEN: usize = 4096;

fn key(n: u64) -> ChunkKey {
    ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, &n.to_le_bytes())
}

fn chunk(n: u64) -> Vec<u8> {
    vec![n as u8 + 1; LEN]
}

#[test]
fn admitted_chunks_are_found_and_the_bound_holds() {
    let store = MemoryStore::new(8 * LEN as u64);
    for n in 0..100 {
        let place = store.admit(key(n), &chunk(n), Why::Read).unwrap();
        assert!(store.used() <= 8 * LEN as u64);
        assert_eq!(store.find(&key(n)), Some(place));
        let mut buf = [0; 100];
        assert!(store.read(place, 3000, &mut buf));
        assert_eq!(buf[..], chunk(n)[..100]);
        assert!(!store.read(place, LEN as u32 - 99, &mut buf), "beyond the end");
    }
    assert_eq!(store.keys().len(), 8);
    assert_eq!(store.admitted_and_evicted(), (100, 92));
    assert_eq!(store.make_room(3 * LEN as u64), 3 * LEN as u64);
}

#[test]
fn held_chunks_stay_and_holds_have_a_bound() {
    let store = MemoryStore::new(10 * LEN as u64);
    (0..10).for_each(|n| assert!(store.admit(key(n), &chunk(n), Why::Pin).is_some()));
    let keys: Vec<_> = (0..9).map(key).collect();
    assert_eq!(store.hold(&keys).unwrap_err().kind(), ErrorKind::NoSpace);
    let hold = store.hold(&keys[..8]).unwrap();
    (10..100).for_each(|n| assert!(store.admit(key(n), &chunk(n), Why::Read).is_some()));
    assert!(keys[..8].iter().all(|key| store.find(key).is_some()));
    drop(hold);
    (100..200).for_each(|n| assert!(store.admit(key(n), &chunk(n), Why::Read).is_some()));
    assert!(keys.iter().all(|key| store.find(key).is_none()));
}

#[test]
fn it_forgets_corrupts_and_fails_when_told_to() {
    let store = MemoryStore::new(1 << 20);
    let place = store.admit(key(1), &chunk(1), Why::Read).unwrap();
    let mut buf = vec![0; LEN];
    assert!(store.corrupt(&key(1), 7) && store.read(place, 0, &mut buf));
    assert_ne!(buf, chunk(1));
    assert!(store.forget(&key(1)) && !store.read(place, 0, &mut buf));
    let again = store.admit(key(1), &chunk(1), Why::Read).unwrap();
    assert_ne!(again, place, "no place is given twice");
    store.doubt(place, &key(1));
    assert_eq!(store.find(&key(1)), Some(again), "a stale place is no proof");
    store.doubt(again, &key(1));
    assert_eq!(store.find(&key(1)), None);

    store.fail(Some(Fault::NoSpace));
    assert!(!store.may_admit(&key(2), 1, Why::Read));
    assert_eq!(store.admit(key(2), &chunk(2), Why::Read), None);
    assert!(matches!(store.state(), CacheState::NoSpace { .. }));
    store.fail(None);
    let place = store.admit(key(2), &chunk(2), Why::Read).unwrap();
    store.fail(Some(Fault::Read));
    assert!(!store.read(place, 0, &mut buf));
}
