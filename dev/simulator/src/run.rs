//! Random lives of a machine, by seed.

use std::{fmt::Write, sync::Arc, time::Duration};

use burgeon_volume::VolumeLimits;
use testkit::Rng;
use tokio::time::sleep;

use crate::{
    Crash, Disk, Model, Mood,
    disk::Faults,
    world::{World, runtime},
};

/// The actions of a run, as evidence that it did something.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Operations, all lives together.
    pub operations: u64,
    /// Lives that ended in a power failure.
    pub power_failures: u64,
    /// Lives that ended in a kill.
    pub kills: u64,
    /// Lives that began with another image's cache.
    pub swaps: u64,
}

/// Runs the simulation of `seed`. The error names the promise that was
/// broken and by which operations.
pub fn simulate(seed: u64) -> Result<Report, String> {
    let mut run = Run::new(seed);
    run.all()
        .map(|()| run.report)
        .map_err(|error| format!("seed {seed}: {error}\nafter these operations:\n{}", run.trace))
}

/// Bytes of the disk: two images many times.
const DISK_LEN: u64 = 64 << 20;

struct Run {
    rng: Rng,
    models: [Arc<Model>; 2],
    which: usize,
    disk: Disk,
    limits: VolumeLimits,
    report: Report,
    trace: String,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let (shape, chunks) = (rng.bits(), 3 + rng.below(6) as usize);
        let verified = rng.below(4) == 0;
        let slanders = rng.below(2) == 0;
        let model = |content, slanders| {
            Arc::new(Model::slandering(shape, content, chunks, verified, slanders))
        };
        let models = [false, slanders].map(|slanders| model(rng.bits(), slanders));
        let disk = Disk::new(rng.bits(), DISK_LEN);
        let limits = VolumeLimits {
            fetches_max: *rng.pick(&[1, 2, 4, 32]),
            fetches_per_read: *rng.pick(&[1, 2, 4]),
            background_fetches: *rng.pick(&[1, 2, 4]),
            cpu_threads: 0,
            write_threads: 0,
            ..VolumeLimits::default()
        };
        let (report, trace) = (Report::default(), String::new());
        Self { rng, models, which: 0, disk, limits, report, trace }
    }

    fn note(&mut self, what: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.trace, "  {what}");
    }

    fn all(&mut self) -> Result<(), String> {
        for _ in 0..1 + self.rng.below(5) {
            self.life(false)?;
            self.end_life();
        }
        self.life(true)
    }

    /// A life in a runtime of its own: tasks that still run at its end are ended with it.
    fn life(&mut self, last: bool) -> Result<(), String> {
        runtime()?.block_on(async {
            let (model, disk) = (&self.models[self.which], &self.disk);
            let mut world = World::boot(model, disk, &self.limits, &mut self.rng);
            for _ in 0..self.rng.below(40) {
                self.report.operations += 1;
                self.operation(&mut world).await?;
                if self.disk.is_off() {
                    return Ok(());
                }
            }
            if last {
                self.note(format_args!("the faults stop"));
                return world.prove().await;
            }
            if self.rng.below(2) == 0 { world.settle().await } else { Ok(()) }
        })
    }

    async fn operation(&mut self, world: &mut World) -> Result<(), String> {
        match self.rng.below(100) {
            0..46 => {
                let range = world.some_range(&mut self.rng);
                let impatient = self.rng.below(5) == 0;
                let patience = impatient.then(|| Duration::from_micros(self.rng.below(40_000)));
                self.note(format_args!("read {range}, patience {patience:?}"));
                world.read(range, patience);
            }
            46..49 => {
                let ranges = 1 + self.rng.below(5);
                let ranges = (0..ranges).map(|_| world.some_range(&mut self.rng)).collect();
                self.note(format_args!("start to prefetch the profile {ranges:?}"));
                world.start_profile(ranges);
            }
            49..50 => {
                self.note(format_args!("stop the profile prefetch"));
                world.stop_profile();
            }
            50..52 => {
                let bytes = self.rng.below(1 << 20);
                self.note(format_args!("evict {bytes} bytes"));
                world.evict(bytes);
            }
            52..55 => {
                self.note(format_args!("the cache's thread takes its turn"));
                world.upkeep();
            }
            55..60 => {
                let ms = [0, 1, 10, 1000, 20_000][self.rng.below(5) as usize];
                self.note(format_args!("wait {ms} ms"));
                sleep(Duration::from_millis(ms)).await;
            }
            60..66 => {
                self.note(format_args!("wait for all readers"));
                world.join().await?;
            }
            66..70 => {
                let range = world.some_range(&mut self.rng);
                self.note(format_args!("prefetch {range}"));
                world.prefetch(range);
            }
            70..74 => {
                self.note(format_args!("start to fill"));
                world.start_fill();
            }
            74..76 => {
                self.note(format_args!("stop filling"));
                world.stop_fill();
            }
            76..82 => {
                let rotten = self.disk.rot(&mut self.rng);
                self.note(format_args!("a bit rots: {rotten}"));
            }
            82..89 => self.break_disk(),
            89..97 => self.change_mood(world).await?,
            _ => {
                self.note(format_args!("sync"));
                world.sync();
            }
        }
        Ok(())
    }

    fn break_disk(&mut self) {
        let mut faults = Faults::default();
        match self.rng.below(8) {
            0..3 => faults.space_left = Some(self.rng.below(4)),
            3 => faults.write_eio = 200,
            4 => faults.read_eio = 100,
            5 => faults.off_at_write = Some(self.rng.below(6)),
            _ => {}
        }
        // A power failure that is under way comes.
        faults.off_at_write = faults.off_at_write.or(self.disk.faults().off_at_write);
        self.note(format_args!("the disk: {faults:?}"));
        self.disk.set_faults(faults);
    }

    async fn change_mood(&mut self, world: &mut World) -> Result<(), String> {
        let mood =
            *self.rng.pick(&[Mood::Calm, Mood::Flaky, Mood::Flaky, Mood::Hostile, Mood::Dead]);
        // Reads that began under a hostile source may still fail: let them end first.
        if matches!(world.source.mood(), Mood::Hostile | Mood::Dead) {
            world.settle().await?;
            // Abandoned fetches fail at once for a while.
            sleep(VolumeLimits::default().given_up_for).await;
        }
        self.note(format_args!("the source: {mood:?}"));
        world.source.set_mood(mood);
        Ok(())
    }

    fn end_life(&mut self) {
        let power = self.disk.is_off() || self.rng.below(2) == 0;
        let crash = if power {
            self.report.power_failures += 1;
            Crash::Power(*self.rng.pick(&[0, 20, 128, 230, 255]))
        } else {
            self.report.kills += 1;
            Crash::Kill
        };
        self.note(format_args!("the end: {crash:?}"));
        self.disk.restart(crash);
        if self.rng.below(6) == 0 {
            self.report.swaps += 1;
            self.which = 1 - self.which;
            self.note(format_args!("another image over the same cache"));
        }
    }
}
