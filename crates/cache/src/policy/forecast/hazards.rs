//! The learnt chance of a use, and the value of keeping a chunk that follows from it.
//!
//! ```text
//!   cell (uses, age) ── uses in it, exposure to it ──► hazard ──► index: what eviction compares
//! ```
//!
//! The table is a period life table: a cell's hazard is the bytes used in it, divided by the bytes
//! that were in it and by the time. Its counts fade, so it follows a changing load.

use super::AGE_UNIT;

/// Classes by the number of uses: 0 (prefetched only) to 7 or more.
pub(super) const CLASSES: usize = 8;

/// Buckets of ages: one below [`YOUNG`], then [`PER_OCTAVE`] for each doubling.
pub(super) const AGES: usize = 1 + (15 - YOUNG.ilog2() as usize) * PER_OCTAVE;

/// Ages below it, a 32nd of a turn, are not told apart: whatever is evicted stays that long.
const YOUNG: u32 = AGE_UNIT / 32;

const PER_OCTAVE: usize = 4;

/// Counts lose half of their weight in this many turns of the cache.
const HALF_LIFE: f64 = 8.0;

/// Weight of what is assumed before anything is known of a cell: as much as the passage of a 64th
/// of the cache through it.
const PRIOR: f64 = 1.0 / 64.0;

type Cells = [[f64; AGES]; CLASSES];

/// The bucket of an age in ticks.
pub(super) fn bucket(age: u16) -> usize {
    let age = u32::from(age).min(0x7fff);
    if age < YOUNG {
        return 0;
    }
    let octave = age.ilog2();
    let part = (age >> (octave - PER_OCTAVE.ilog2())) as usize % PER_OCTAVE;
    1 + (octave - YOUNG.ilog2()) as usize * PER_OCTAVE + part
}

/// The first age of a bucket, in ticks.
fn start(bucket: usize) -> f64 {
    if bucket == 0 {
        return 0.0;
    }
    let (octave, part) = ((bucket - 1) / PER_OCTAVE, (bucket - 1) % PER_OCTAVE);
    f64::from(YOUNG << octave) * (1.0 + part as f64 / PER_OCTAVE as f64)
}

pub(super) struct Hazards {
    /// Bytes used, by the cell that they were in.
    used: Cells,
    /// Bytes in each cell, times the ticks that they were there.
    exposed: Cells,
    index: [[f32; AGES]; CLASSES],
}

impl Hazards {
    pub(super) fn new() -> Self {
        let none = [[0.0; AGES]; CLASSES];
        let mut hazards = Self { used: none, exposed: none, index: [[0.0; AGES]; CLASSES] };
        hazards.learn(&none, 0.0, 1.0);
        hazards
    }

    pub(super) fn count_use(&mut self, uses: usize, age: u16, bytes: f64) {
        self.used[uses][bucket(age)] += bytes;
    }

    /// The chance of a use for each tick of residence, at the best moment to give up.
    pub(super) fn index(&self, uses: usize, age: u16) -> f32 {
        self.index[uses][bucket(age)]
    }

    /// Learns from a census: `population` bytes in each cell, for `ticks` since the last one. A
    /// tick lasts for `tick_bytes` of uses.
    pub(super) fn learn(&mut self, population: &Cells, ticks: f64, tick_bytes: f64) {
        let fade = 0.5f64.powf(ticks / (HALF_LIFE * f64::from(AGE_UNIT)));
        self.used.iter_mut().flatten().for_each(|used| *used *= fade);
        let exposed = self.exposed.iter_mut().flatten();
        for (exposed, population) in exposed.zip(population.iter().flatten()) {
            *exposed = *exposed * fade + population * ticks;
        }
        // A class that was seldom seen gets the hazards of all classes. Where these are unknown,
        // too, a use before the age has doubled is as likely as none: then younger chunks are worth
        // more, as in LRU.
        let sum = |cells: &Cells, age: usize| -> f64 { cells.iter().map(|row| row[age]).sum() };
        let mut common = [0.0; AGES];
        for (age, hazard) in common.iter_mut().enumerate() {
            let weight = prior_weight(age, tick_bytes);
            let assumed = 0.7 / (start(age) + f64::from(YOUNG));
            *hazard =
                (sum(&self.used, age) + weight * assumed) / (sum(&self.exposed, age) + weight);
        }
        for class in 0..CLASSES {
            let mut hazards = [0.0; AGES];
            for (age, hazard) in hazards.iter_mut().enumerate() {
                let weight = prior_weight(age, tick_bytes);
                *hazard = (self.used[class][age] + weight * common[age])
                    / (self.exposed[class][age] + weight);
            }
            self.index[class] = gittins(&hazards);
        }
    }
}

fn width(age: usize) -> f64 {
    start(age + 1) - start(age)
}

fn prior_weight(age: usize, tick_bytes: f64) -> f64 {
    PRIOR * f64::from(AGE_UNIT) * tick_bytes * width(age)
}

/// For each age the greatest ratio, over all times to give up, of the chance of a use until then
/// to the expected residence until then.
fn gittins(hazards: &[f64; AGES]) -> [f32; AGES] {
    let mut passing = [(0.0, 0.0); AGES];
    for (age, hazard) in hazards.iter().enumerate() {
        let used = -(-hazard * width(age)).exp_m1();
        passing[age] = (used, used / hazard);
    }
    let mut index = [0.0; AGES];
    for (from, best) in index.iter_mut().enumerate() {
        let (mut survives, mut chance, mut residence) = (1.0, 0.0, 0.0);
        for (used, stays) in &passing[from..] {
            chance += survives * used;
            residence += survives * stays;
            survives *= 1.0 - used;
            *best = f64::max(*best, chance / residence);
        }
    }
    index.map(|best| best as f32)
}

#[cfg(test)]
mod tests {
    use super::{AGE_UNIT, AGES, CLASSES, Hazards, bucket, start};

    const TURN: u16 = AGE_UNIT as u16;

    #[test]
    fn buckets_adjoin_and_grow() {
        for age in 0..0x8000u16 {
            let found = bucket(age);
            assert!(start(found) <= f64::from(age) && f64::from(age) < start(found + 1), "{age}");
        }
        assert_eq!(bucket(u16::MAX), AGES - 1);
    }

    #[test]
    fn without_knowledge_the_younger_is_worth_more() {
        let hazards = Hazards::new();
        let values: Vec<f32> = (0..6).map(|octave| hazards.index(1, TURN << octave)).collect();
        assert!(values.is_sorted_by(|a, b| a > b), "{values:?}");
    }

    #[test]
    fn a_loop_makes_the_older_worth_more_and_the_overdue_little() {
        let mut hazards = Hazards::new();
        // Every chunk is used 1.7 turns after its last use; as many bytes have each age below it.
        let mut population = [[0.0; AGES]; CLASSES];
        (0..TURN * 17 / 10).for_each(|age| population[2][bucket(age)] += 1e6);
        for _ in 0..100 {
            (0..16).for_each(|_| hazards.count_use(2, TURN * 17 / 10, 1e6));
            hazards.learn(&population, 16.0, 1e6);
        }
        let at = |tenths: u16| hazards.index(2, TURN / 10 * tenths);
        assert!(at(1) < at(8) && at(8) < at(15), "{} {} {}", at(1), at(8), at(15));
        assert!(at(30) < at(1), "{} {}", at(30), at(1));
    }
}
