//! Chooses the strictness of `adaptive`, by trying all of them on a sample.
//!
//! ```text
//!   each request ── 1 of 32 blocks ──► open, normal, strict: an index of its own each, without data
//!                                         └─ misses, the recent ones more ──► the least wins
//! ```
//!
//! The samples are complete small caches, so what is learnt from them costs no hit and no write.
//! All three see the same requests, so a few thousand are enough to compare them.

use super::{BlockPolicy, Fate, PolicyKind, Strictness};
use crate::{
    keys::{Key, mixed},
    sets::{Sets, WAYS},
};

/// One of so many blocks is in the sample.
const SAMPLE: u32 = 32;
/// The least number of sets of a sample.
const SETS_MIN: u32 = 64;
/// Factors by which the misses of a strictness count. One that writes more has to be better.
const COSTS: [(Strictness, f64); 3] =
    [(Strictness::Strict, 1.0), (Strictness::Normal, 1.0), (Strictness::Open, 1.0)];
/// Another has to have fewer than so many of the current one's misses.
const CLEARLY: f64 = 0.99;

/// One strictness on the sample.
struct Trial {
    strictness: Strictness,
    cost: f64,
    sets: Sets,
    policy: BlockPolicy,
    misses: f64,
}

/// The three trials.
pub(super) struct Judge {
    trials: Vec<Trial>,
    /// One of so many.
    sample: u32,
    /// Share of the counts that remains after a request.
    fading: f64,
    asked: u32,
}

impl Judge {
    /// For an index of so many sets.
    pub(super) fn new(sets: u32) -> Self {
        let sample = (sets / SETS_MIN).clamp(1, SAMPLE);
        let sampled = (sets / sample).max(1);
        let trial = |(strictness, cost)| {
            let sets = Sets::new(sampled);
            let policy = BlockPolicy::fixed(PolicyKind::Adaptive, strictness, &sets);
            Trial { strictness, cost, sets, policy, misses: 0.0 }
        };
        let slots = f64::from(sampled) * WAYS as f64;
        let trials = COSTS.into_iter().map(trial).collect();
        Self { trials, sample, fading: 1.0 - 2.0 / slots, asked: 0 }
    }

    /// True if `key` is in the sample.
    #[inline]
    pub(super) fn samples(&self, key: Key) -> bool {
        // Other bits than those that ghosts and places are made of.
        ((mixed(key) >> 20) as u32).is_multiple_of(self.sample)
    }

    /// Counts a request of the sample, and returns the strictness to go on with.
    pub(super) fn request(&mut self, key: Key, current: Strictness) -> Strictness {
        for trial in &mut self.trials {
            let missed = !trial.read(key);
            trial.misses = trial.misses * self.fading + f64::from(u8::from(missed));
        }
        self.asked += 1;
        if self.asked < 64 {
            return current;
        }
        self.asked = 0;
        let cost = |trial: &Trial| trial.misses * trial.cost;
        let now =
            self.trials.iter().find(|trial| trial.strictness == current).map_or(f64::MAX, cost);
        let best = self.trials.iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
        best.filter(|best| cost(best) < CLEARLY * now).map_or(current, |best| best.strictness)
    }
}

impl Trial {
    /// True if it is a hit.
    fn read(&mut self, key: Key) -> bool {
        if let Some(slot) = self.sets.find(key) {
            self.policy.hit(&self.sets, key, slot);
            return true;
        }
        if self.policy.hit_memory(key) {
            return true;
        }
        let outcome = self.policy.miss(&self.sets, key);
        for (key, fate) in [(key, outcome.fate)].into_iter().chain(outcome.leaves) {
            if let Fate::Slot(slot) = fate {
                self.sets.publish(slot, key, 0);
                self.policy.release(slot);
            }
        }
        false
    }
}
