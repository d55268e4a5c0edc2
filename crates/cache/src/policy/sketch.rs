//! A count-min sketch (Cormode and Muthukrishnan, 2005) that ages: how often hashes were seen.

use super::rng::mix;

const ROWS: u64 = 4;
const MOST: u8 = 15;
const WIDTH_MIN: usize = 1024;
/// All counters are halved after this many counts for each stored chunk.
const SAMPLE: usize = 10;

/// Estimates are never too low since the last halving, except beyond 15. It has at most 32
/// counters of a byte for each of the most chunks that it was told of.
pub(super) struct Sketch {
    /// Rows of one width, a power of two, one after the other.
    counters: Vec<u8>,
    width: usize,
    chunks: usize,
    counted: usize,
}

impl Default for Sketch {
    fn default() -> Self {
        let counters = vec![0; WIDTH_MIN * ROWS as usize];
        Self { counters, width: WIDTH_MIN, chunks: 0, counted: 0 }
    }
}

impl Sketch {
    /// Makes it wide enough for `chunks` chunks. A wider row repeats the narrower one, so each
    /// hash keeps its estimate.
    pub(super) fn reserve(&mut self, chunks: usize) {
        self.chunks = self.chunks.max(chunks);
        while self.width < self.chunks * 4 {
            let rows = self.counters.chunks(self.width);
            self.counters = rows.flat_map(|row| [row, row].concat()).collect();
            self.width *= 2;
        }
    }

    fn places(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let width = self.width;
        (0..ROWS).map(move |row| {
            let column = mix(hash ^ (row + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            row as usize * width + (column as usize & (width - 1))
        })
    }

    pub(super) fn count(&mut self, hash: u64) {
        // Only the lowest counters grow: the others already count more hashes than this one.
        let seen = self.estimate(hash);
        for place in self.places(hash) {
            if self.counters[place] == seen {
                self.counters[place] = (seen + 1).min(MOST);
            }
        }
        self.counted += 1;
        if self.counted >= SAMPLE * self.chunks.max(WIDTH_MIN / 4) {
            self.counters.iter_mut().for_each(|counter| *counter /= 2);
            self.counted /= 2;
        }
    }

    pub(super) fn estimate(&self, hash: u64) -> u8 {
        self.places(hash).map(|place| self.counters[place]).min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::Sketch;

    #[test]
    fn estimates_are_not_too_low_and_survive_growth() {
        let mut sketch = Sketch::default();
        for hash in 0..200u64 {
            (0..hash % 8).for_each(|_| sketch.count(hash));
        }
        sketch.reserve(5000);
        assert!((0..200).all(|hash| u64::from(sketch.estimate(hash)) >= hash % 8));
        let exact = (0..200).filter(|hash| u64::from(sketch.estimate(*hash)) == hash % 8).count();
        assert!(exact > 180, "{exact} of 200");
    }

    #[test]
    fn keys_that_are_no_longer_seen_are_forgotten() {
        let mut sketch = Sketch::default();
        (0..100).for_each(|_| sketch.count(1));
        assert_eq!(sketch.estimate(1), 15);
        (0..20_000).for_each(|at| sketch.count(2 + at % 100));
        assert!(sketch.estimate(1) < 3);
    }
}
