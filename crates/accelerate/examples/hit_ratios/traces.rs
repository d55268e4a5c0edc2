//! The requests: block numbers, the same for a seed.

use std::collections::HashMap;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }
}

/// A zipf distribution as fio draws it (Gray and others, 1994), spread over the blocks.
struct Zipf {
    blocks: u64,
    zetan: f64,
    alpha: f64,
    eta: f64,
    half: f64,
    offset: u64,
    rng: Rng,
}

impl Zipf {
    fn new(blocks: u64, theta: f64, seed: u64) -> Self {
        let terms = blocks.min(10_000_000);
        let zetan: f64 = (1..=terms).map(|rank| (rank as f64).powf(-theta)).sum();
        let half = 1.0 + 0.5f64.powf(theta);
        let eta = (1.0 - (2.0 / blocks as f64).powf(1.0 - theta)) / (1.0 - half / zetan);
        let mut rng = Rng(seed);
        let offset = rng.bits() & 0xffff_ffff;
        Self { blocks, zetan, alpha: 1.0 / (1.0 - theta), eta, half, offset, rng }
    }

    fn draw(&mut self) -> u64 {
        let uniform = (self.rng.bits() >> 32) as f64 / f64::from(u32::MAX);
        let rank = match uniform * self.zetan {
            z if z < 1.0 => 0,
            z if z < self.half => 1,
            _ => {
                let power = (self.eta * uniform - self.eta + 1.0).powf(self.alpha);
                ((self.blocks as f64 * power) as u64).min(self.blocks - 1)
            }
        };
        rank.wrapping_mul(0x61c8_8646_80b5_83eb).wrapping_add(self.offset) % self.blocks
    }
}

/// Two files of half the blocks, read in turn.
pub(super) fn zipf(blocks: u64, count: usize, seed: u64) -> Vec<u32> {
    let half = blocks / 2;
    let mut files = [Zipf::new(half, 1.2, seed * 2 + 11), Zipf::new(half, 1.2, seed * 2 + 12)];
    (0..count).map(|at| (half * (at as u64 & 1) + files[at & 1].draw()) as u32).collect()
}

/// A server's day: a hot set that drifts, scans of some length, loops, and blocks that come once.
pub(super) fn drift(count: usize, blocks: u64, seed: u64) -> Vec<u32> {
    let mut rng = Rng(seed);
    let mut hot = Zipf::new(blocks / 4, 0.9, seed + 1);
    let (mut requests, mut base) = (Vec::with_capacity(count), 0);
    while requests.len() < count {
        match rng.below(100) {
            0 => {
                let (start, len) = (rng.below(blocks), 64 + rng.below(8192));
                requests.extend((start..start + len).map(|block| (block % blocks) as u32));
            }
            1 => {
                let (start, len) = (rng.below(blocks), 64 + rng.below(2048));
                for _ in 0..1 + rng.below(4) {
                    requests.extend((start..start + len).map(|block| (block % blocks) as u32));
                }
            }
            2..=7 => requests.extend((0..32).map(|_| rng.below(blocks) as u32)),
            _ => requests.extend((0..128).map(|_| ((base + hot.draw()) % blocks) as u32)),
        }
        base += rng.below(64);
    }
    requests.truncate(count);
    requests
}

/// The same requests with dense block numbers.
pub(super) fn dense(requests: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut numbers = HashMap::new();
    let mut number = |block| {
        let next = numbers.len() as u32;
        *numbers.entry(block).or_insert(next)
    };
    requests.map(&mut number).collect()
}
