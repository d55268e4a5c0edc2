//! The power fails at each write of a short scenario, and again at each write of the recovery.

use std::sync::Arc;

use burgeon_volume::VolumeLimits;
use testkit::Rng;

use crate::{
    Crash, Disk, Model,
    disk::Faults,
    world::{World, runtime},
};

/// Share of unsynced writes that survives, of 256.
const SURVIVAL: [u8; 5] = [0, 64, 128, 192, 255];

/// Counts of the cases tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exhausted {
    /// Writes of the scenario without a crash.
    pub writes: u64,
    /// Machines that crashed and were started again.
    pub crashes: u64,
}

/// Reads an image of `chunks` chunks, syncing half-way, while the power fails at write `k`, for
/// each `k`; then starts again and reads with the power failing at write `j`, for each `j`; then
/// proves that all is well. The image is `verified` by its source, or by its map. Each with
/// several shares of surviving sectors.
pub fn crash_at_every_write(seed: u64, chunks: usize, verified: bool) -> Result<Exhausted, String> {
    let model = Arc::new(Model::new(seed, seed, chunks, verified));
    let scenario = Scenario { model, seed };
    let writes = scenario.writes()?;
    let mut crashes = 0;
    for first in 0..writes {
        for second in 0..=writes {
            for survival in SURVIVAL {
                crashes += scenario.crash_twice(first, second, survival).map_err(|error| {
                    format!("seed {seed}, power off at write {first}, then {second}, {survival} of 256 sectors kept: {error}")
                })?;
            }
        }
    }
    Ok(Exhausted { writes, crashes })
}

struct Scenario {
    model: Arc<Model>,
    seed: u64,
}

impl Scenario {
    fn writes(&self) -> Result<u64, String> {
        let disk = self.disk(0);
        self.life(&disk, None, false)?;
        Ok(disk.log().writes)
    }

    fn disk(&self, salt: u64) -> Disk {
        Disk::new(self.seed ^ salt << 32, 64 << 20)
    }

    fn crash_twice(&self, first: u64, second: u64, survival: u8) -> Result<u64, String> {
        let disk = self.disk(first << 16 | second << 8 | u64::from(survival));
        let mut crashes = 0;
        for at in [first, second] {
            self.life(&disk, Some(at), false)?;
            crashes += u64::from(disk.is_off());
            disk.restart(Crash::Power(survival));
        }
        self.life(&disk, None, true)?;
        Ok(crashes)
    }

    fn life(&self, disk: &Disk, off_at_write: Option<u64>, prove: bool) -> Result<(), String> {
        runtime()?.block_on(async {
            let limits =
                VolumeLimits { cpu_threads: 0, write_threads: 0, ..VolumeLimits::default() };
            let mut rng = Rng::new(self.seed);
            let mut world = World::boot(&self.model, disk, &limits, &mut rng);
            disk.set_faults(Faults { off_at_write, ..Faults::default() });
            let map = &self.model.map;
            for index in 0..map.chunk_count() {
                world.read(map.chunk(index).range, None);
                world.settle().await?;
                if index == map.chunk_count() / 2 {
                    world.sync();
                }
                if disk.is_off() {
                    return Ok(());
                }
            }
            if prove { world.prove().await } else { Ok(()) }
        })
    }
}
