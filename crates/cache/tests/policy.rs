//! The duties of each policy to the store, and the benefit of Forecast.

use std::collections::BTreeSet;

use burgeon_cache::{
    Why,
    policy::{ChunkPolicy, Clock, Forecast, Lirs, Pressure, Random, TinyLfu},
};
use proptest::prelude::*;

const CHUNK: u32 = 256 << 10;

fn policies(chunks: u64) -> [(&'static str, Box<dyn ChunkPolicy>); 5] {
    [
        ("clock", Box::new(Clock::default())),
        ("random", Box::new(Random::new(1))),
        ("tiny-lfu", Box::new(TinyLfu::default())),
        ("lirs", Box::new(Lirs::default())),
        ("forecast", Box::new(Forecast::new(chunks * u64::from(CHUNK), 1))),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Insert(u32, u64, Why),
    Remove(u32),
    Touch(u32),
    Miss(u64),
    Admit(u64, Why),
    /// Asks for victims this many times, and removes the last one.
    Evict(usize),
}

fn event() -> impl Strategy<Value = Event> {
    let why = || prop_oneof![Just(Why::Read), Just(Why::Prefetch), Just(Why::Fill), Just(Why::Pin)];
    prop_oneof![
        4 => (0..40u32, 0..80u64, why()).prop_map(|(slot, key, why)| Event::Insert(slot, key, why)),
        1 => (0..40u32).prop_map(Event::Remove),
        4 => (0..48u32).prop_map(Event::Touch),
        4 => (0..80u64).prop_map(Event::Miss),
        1 => (0..80u64, why()).prop_map(|(key, why)| Event::Admit(key, why)),
        2 => (1..6usize).prop_map(Event::Evict),
    ]
}

fn play(policy: &mut dyn ChunkPolicy, stored: &mut BTreeSet<u32>, event: Event) {
    match event {
        Event::Insert(slot, key, why) => {
            if stored.insert(slot) {
                policy.inserted(slot, key, CHUNK, why);
            }
        }
        Event::Remove(slot) => {
            stored.remove(&slot);
            policy.removed(slot);
        }
        Event::Touch(slot) => policy.touched(slot),
        Event::Miss(key) => policy.missed(key, CHUNK),
        Event::Admit(key, why) => {
            assert!(policy.admit(key, CHUNK, Why::Pin, Pressure::Full));
            policy.admit(key, CHUNK, why, Pressure::Full);
        }
        Event::Evict(times) => {
            let victims: Vec<_> = (0..times).map(|_| policy.victim()).collect();
            for victim in &victims {
                assert_eq!(victim.is_some(), !stored.is_empty(), "{victims:?}");
                assert!(victim.is_none_or(|slot| stored.contains(&slot)), "{victims:?}");
            }
            if let Some(slot) = victims[times - 1] {
                stored.remove(&slot);
                policy.removed(slot);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_victim_is_stored(events in proptest::collection::vec(event(), 1..400)) {
        for (_, mut policy) in policies(20) {
            let mut stored = BTreeSet::new();
            events.iter().for_each(|event| play(&mut *policy, &mut stored, *event));
        }
    }
}

#[test]
fn a_held_slot_is_not_offered_again_before_the_others() {
    let names = ["forecast", "lirs", "tiny-lfu"];
    for stored in [1, 2, 50, 300] {
        let chosen = policies(300).into_iter().filter(|(name, _)| names.contains(name));
        for (name, mut policy) in chosen {
            (0..stored).for_each(|slot| policy.inserted(slot, u64::from(slot), CHUNK, Why::Read));
            (0..stored / 3).for_each(|slot| policy.touched(slot));
            for round in 0..3 {
                let offered: BTreeSet<_> = (0..stored).filter_map(|_| policy.victim()).collect();
                assert_eq!(offered.len(), stored as usize, "{name}, round {round}");
            }
        }
    }
}

/// Reads chunks through a store of `room` chunks, and counts the hits from the read `from` on.
fn hits(policy: &mut dyn ChunkPolicy, room: usize, reads: &[u64], from: usize) -> usize {
    let mut stored: Vec<Option<u64>> = vec![None; room];
    let mut hits = 0;
    for (at, key) in reads.iter().enumerate() {
        if let Some(slot) = stored.iter().position(|it| *it == Some(*key)) {
            hits += usize::from(at >= from);
            policy.touched(slot as u32);
            continue;
        }
        policy.missed(*key, CHUNK);
        let free = stored.iter().position(Option::is_none);
        let pressure = if free.is_some() { Pressure::Room } else { Pressure::Full };
        if !policy.admit(*key, CHUNK, Why::Read, pressure) {
            continue;
        }
        let slot = free.unwrap_or_else(|| {
            let victim = policy.victim().expect("the store is full");
            policy.removed(victim);
            victim as usize
        });
        stored[slot] = Some(*key);
        policy.inserted(slot as u32, *key, CHUNK, Why::Read);
    }
    hits
}

#[test]
fn most_of_a_loop_larger_than_the_store_stays() {
    let reads: Vec<u64> = (0..40).flat_map(|_| 0..340).collect();
    let from = reads.len() / 2;
    // At best 200 of the 340 chunks are hits in each round.
    let best = (reads.len() - from) * 200 / 340;
    let hits = |policy: &mut dyn ChunkPolicy| hits(policy, 200, &reads, from);
    assert_eq!(hits(&mut Clock::default()), 0);
    let forecast = hits(&mut Forecast::new(200 * u64::from(CHUNK), 1));
    assert!(forecast * 10 > best * 9, "{forecast} of {best}");
    let (lirs, tiny_lfu) = (hits(&mut Lirs::default()), hits(&mut TinyLfu::default()));
    assert!(lirs * 10 > best * 9, "{lirs} of {best}");
    assert!(tiny_lfu * 10 > best * 5, "{tiny_lfu} of {best}");
}

#[test]
fn a_scan_takes_the_place_of_few_popular_chunks() {
    const ROUNDS: usize = 40;
    let popular = || (0..ROUNDS).flat_map(|_| 0..190u64);
    let reads: Vec<u64> = popular().chain(1000..1800).chain(popular()).collect();
    let from = reads.len() - ROUNDS * 190;
    let lost = |policy: &mut dyn ChunkPolicy| ROUNDS * 190 - hits(policy, 200, &reads, from);
    assert_eq!(lost(&mut Clock::default()), 190, "a scan empties the clock");
    let forecast = lost(&mut Forecast::new(200 * u64::from(CHUNK), 1));
    assert!(forecast < 76, "{forecast} of {} later hits were lost", ROUNDS * 190);
    let (lirs, tiny_lfu) = (lost(&mut Lirs::default()), lost(&mut TinyLfu::default()));
    assert!(lirs < 10 && tiny_lfu < 10, "{lirs} and {tiny_lfu} chunks of the 190 were lost");
}

#[test]
fn prefetched_chunks_push_out_only_each_other() {
    let mut policy = Forecast::new(100 * u64::from(CHUNK), 1);
    let mut admits = |why| policy.admit(1000, CHUNK, why, Pressure::Full);
    assert!(!admits(Why::Prefetch), "nothing is there that could go");
    (0..100).for_each(|slot| {
        policy.missed(u64::from(slot), CHUNK);
        policy.inserted(slot, u64::from(slot), CHUNK, Why::Read);
    });
    let admits = |policy: &mut Forecast, why| policy.admit(1000, CHUNK, why, Pressure::Full);
    assert!(!admits(&mut policy, Why::Prefetch));
    assert!(!admits(&mut policy, Why::Fill));
    assert!(admits(&mut policy, Why::Pin));
    (0..100).for_each(|slot| policy.removed(slot));
    (0..100).for_each(|slot| policy.inserted(slot, u64::from(slot) + 200, CHUNK, Why::Prefetch));
    assert!(admits(&mut policy, Why::Prefetch));
    assert!(!admits(&mut policy, Why::Fill));
}

#[test]
fn many_prefetched_chunks_push_out_no_chunk_that_was_read() {
    let mut policy = Forecast::new(100 * u64::from(CHUNK), 1);
    let read = 0..95u32;
    for slot in read.clone() {
        policy.missed(u64::from(slot), CHUNK);
        policy.inserted(slot, u64::from(slot), CHUNK, Why::Read);
    }
    (95..100).for_each(|slot| policy.inserted(slot, u64::from(slot), CHUNK, Why::Prefetch));
    // Several come before the first one goes, as in a cache with headroom.
    let (mut next, mut more, mut evicted) = (100, Vec::new(), 0);
    for key in 1000..2000u64 {
        if policy.admit(key, CHUNK, Why::Prefetch, Pressure::Full) {
            policy.inserted(next, key, CHUNK, Why::Prefetch);
            more.push(next);
            next += 1;
        }
        while more.len() > 20 || key == 1999 && !more.is_empty() {
            let victim = policy.victim().unwrap();
            assert!(!read.contains(&victim), "{victim} was read");
            policy.removed(victim);
            more.pop();
            evicted += 1;
        }
    }
    assert!(evicted > 900, "{evicted}");
}

#[test]
fn memory_is_bounded_by_the_chunks_that_are_stored() {
    let chunks = 20_000u32;
    let mut policy = Forecast::new(u64::from(chunks * 4096), 1);
    for key in 0..6 * chunks {
        policy.missed(u64::from(key), 4096);
        let slot = if key < chunks { key } else { policy.victim().expect("it is full") };
        if key >= chunks {
            policy.removed(slot);
        }
        policy.inserted(slot, u64::from(key), 4096, Why::Read);
    }
    let each = policy.memory() as f64 / f64::from(chunks);
    assert!((8.0..13.0).contains(&each), "{each} bytes a chunk");
}
