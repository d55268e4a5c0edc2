/// A small, fast, seeded generator (SplitMix64): the same seed gives the same numbers for ever.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that starts at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// One of `choices`.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// `bytes`, and up to four places in them changed, as if somebody meddled with a JSON document.
    pub fn meddle(&mut self, bytes: &[u8]) -> Vec<u8> {
        const LETTERS: &[u8] = b"0129\"{}[],:-/.";
        let mut bytes = bytes.to_vec();
        for _ in 0..1 + self.below(4) {
            let at = self.below(bytes.len().max(1) as u64) as usize;
            match self.below(5) {
                _ if bytes.is_empty() => {}
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = *self.pick(LETTERS),
                2 => bytes.truncate(at.max(1)),
                3 => drop(bytes.remove(at)),
                _ => bytes.insert(at, *self.pick(LETTERS)),
            }
        }
        bytes
    }

    /// Fills `buf` with random bytes.
    pub fn fill(&mut self, buf: &mut [u8]) {
        for part in buf.chunks_mut(8) {
            part.copy_from_slice(&self.bits().to_le_bytes()[..part.len()]);
        }
    }

    /// `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        assert_eq!(Rng::new(0).bits(), 0xe220_a839_7b1d_cdaf);
        let mut rng = Rng::new(7);
        assert!((0..1000).all(|_| rng.below(3) < 3));
        assert_eq!(Rng::new(7).bytes(11).len(), 11);
    }
}
