//! Everything that is done to the daemon, its files, its disk and its source.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::Duration,
};

use rustix::fs::{FallocateFlags, fallocate, syncfs};
use testkit::{Fault, Rng, kill, mounts_of};

use crate::{load::read_through, world::World};

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Deed {
    KillServer,
    KillSupervisor,
    KillBoth,
    KillAll,
    KillCommand,
    DamageCache,
    DamageImage,
    FillDisk,
    SpoilSource,
    Remount,
    Upgrade,
}

/// Weight of each among the others.
const WEIGHTS: [(Deed, u64); 11] = [
    (Deed::KillServer, 24),
    (Deed::KillSupervisor, 14),
    (Deed::KillBoth, 14),
    (Deed::KillAll, 5),
    (Deed::KillCommand, 16),
    (Deed::DamageCache, 10),
    (Deed::DamageImage, 4),
    (Deed::FillDisk, 5),
    (Deed::SpoilSource, 6),
    (Deed::Remount, 6),
    (Deed::Upgrade, 3),
];

/// The files of a prepared image that can be made again from the store.
const PREPARED: [&str; 5] = ["map", "seed.info", "seed", "manifest", "ready.json"];

impl Deed {
    pub(crate) fn pick(rng: &mut Rng) -> Self {
        let mut left = rng.below(WEIGHTS.iter().map(|(_, weight)| weight).sum());
        for (deed, weight) in WEIGHTS {
            match left.checked_sub(weight) {
                Some(rest) => left = rest,
                None => return deed,
            }
        }
        Self::KillServer
    }

    /// Does it, brings things in order again as a user would, and waits until every reader has read
    /// something.
    pub(crate) fn perform(self, world: &mut World, rng: &mut Rng) {
        world.ledger.count(&format!("times {self:?}"));
        world.ledger.event(format!("{self:?} began"));
        thread::sleep(Duration::from_millis(rng.below(150)));
        match self {
            Self::KillServer => kill_process(world, "server_pid"),
            Self::KillSupervisor => {
                kill_process(world, "supervisor_pid");
                world.ok(&["doctor", "--repair"]);
            }
            Self::KillBoth => kill_both(world, rng),
            Self::KillAll => kill_all(world, rng),
            Self::KillCommand => kill_command(world, rng),
            Self::DamageCache => damage_cache(world, rng),
            Self::DamageImage => damage_image(world, rng),
            Self::FillDisk => fill_disk(world, rng),
            Self::SpoilSource => spoil_source(world, rng),
            Self::Remount => {
                let place = &world.places[rng.below(world.places.len() as u64) as usize];
                world.remount(place);
            }
            Self::Upgrade => {
                world.ok(&["upgrade"]);
            }
        }
        world.ledger.event(format!("{self:?} done, awaiting reads"));
        world.await_reads(&format!("{self:?}"));
        world.ledger.event(format!("{self:?} ended"));
    }
}

/// Errors have a reason from now on.
fn excuse(world: &World) {
    world.ledger.event("excuse began".into());
    world.places.iter().for_each(|place| place.excuse());
}

/// They have none any more.
fn end_excuse(world: &World) {
    world.places.iter().for_each(|place| place.end_excuse(&world.ledger));
    world.ledger.event("excuse ended".into());
}

fn kill_process(world: &World, which: &str) {
    if let Some(id) = world.process(which) {
        world.ledger.event(format!("{which} {id} killed"));
        kill(id);
    }
}

/// No reader gets an error: the holder keeps their connection.
fn kill_both(world: &World, rng: &mut Rng) {
    let ids = [world.process("supervisor_pid"), world.process("server_pid")];
    world.ledger.event(format!("supervisor and server {ids:?} killed"));
    ids.into_iter().flatten().for_each(kill);
    thread::sleep(Duration::from_millis(rng.below(200)));
    world.ok(&["doctor", "--repair"]);
}

/// Errors are excused from the first death until the mounts are served again.
fn kill_all(world: &World, rng: &mut Rng) {
    let ids = [world.process("supervisor_pid"), world.process("server_pid")];
    let holder = world.burgeon.holder();
    excuse(world);
    world.ledger.event(format!("supervisor, server {ids:?} and holder {holder:?} killed"));
    ids.into_iter().flatten().chain(holder).for_each(kill);
    thread::sleep(Duration::from_millis(rng.below(200)));
    if world.ok(&["doctor", "--repair"]) {
        // It says so when the mounts are served again: from here on there is no excuse.
        end_excuse(world);
    }
}

/// A command of a user's is killed; another one finds everything in order.
fn kill_command(world: &World, rng: &mut Rng) {
    let extra = world.space.make_folder("extra");
    let extra = extra.display().to_string();
    let place = world.places[0].at.display().to_string();
    let commands: [&[&str]; 7] = [
        &["mount", "little", &extra, "--read-only"],
        &["mount", "large", &extra, "--write-limit", "256M"],
        &["status"],
        &["pin", &place],
        &["prefetch", &place],
        &["doctor", "--repair"],
        &["pull", "little"],
    ];
    let chosen = *rng.pick(&commands);
    let mut command = world.burgeon.command(chosen);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    thread::sleep(Duration::from_millis(rng.below(120)));
    world.ledger.event(format!("command {chosen:?} killed"));
    let _ = child.kill();
    let _ = child.wait();
    world.ledger.count("killed commands");
    let mounted = |path: &str| {
        let mounts = mounts_of("thread-self").unwrap_or_default();
        mounts.iter().any(|mount| mount.at == Path::new(path))
    };
    if mounted(&extra) {
        world.ok(&["umount", &extra]);
    }
    // 3: nothing is pinned.
    world.ends_with(&[0, 3], &["pin", "--remove", &place]);
    world.ok(&["status"]);
}

/// Bytes of caches change or go; each is noticed, and fetched again.
fn damage_cache(world: &World, rng: &mut Rng) {
    for path in world.burgeon.arenas() {
        let Ok(file) = File::options().write(true).open(&path) else { continue };
        let len = file.metadata().map(|m| m.len()).unwrap_or_default();
        if len == 0 {
            continue;
        }
        for _ in 0..rng.below(64) {
            let at = rng.below(len);
            match rng.below(3) {
                0 => drop(file.write_at(&rng.bytes(64), at)),
                _ => {
                    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    let _ = fallocate(&file, hole, at, rng.below(1 << 20) + 1);
                }
            }
        }
    }
}

/// A file that an image was prepared as is damaged while it is mounted, and the server has to read
/// it again. Reads may fail; nothing may hang; a umount and mount make everything anew.
fn damage_image(world: &World, rng: &mut Rng) {
    let folders = image_folders(world);
    if folders.is_empty() {
        return;
    }
    let path = rng.pick(&folders).join(rng.pick(&PREPARED));
    excuse(world);
    world.ledger.event(format!("{} damaged", path.display()));
    damage(&path, rng);
    kill_process(world, "server_pid");
    world.process("server_pid");
    for place in &world.places {
        world.remount(place);
    }
    replace_kept(world);
    end_excuse(world);
}

/// Does what `doctor` says of files of kept writes that are damaged where a mount does not look:
/// they are links to those of the prepared image.
fn replace_kept(world: &World) {
    let said = world.run(&["doctor"]).map(|doctor| doctor.stdout).unwrap_or_default();
    let damaged = said.lines().filter_map(|line| {
        let (_, found) = line.strip_prefix("PROBLEM  writes ")?.split_once(": ")?;
        found.strip_suffix(" is damaged").map(PathBuf::from)
    });
    let damaged: Vec<_> = damaged.collect();
    if damaged.is_empty() {
        return;
    }
    world.ledger.count("repaired kept writes");
    for place in world.places.iter().filter(|place| place.options.contains(&"--writes")) {
        world.remount_after(place, || damaged.iter().for_each(|path| drop(fs::remove_file(path))));
    }
}

/// Changes, cuts, empties or removes the file `path`.
fn damage(path: &Path, rng: &mut Rng) {
    let Ok(file) = File::options().write(true).open(path) else { return };
    let len = file.metadata().map(|m| m.len()).unwrap_or_default().max(1);
    match rng.below(4) {
        0 => drop(file.write_at(&rng.bytes(32), rng.below(len))),
        1 => drop(file.set_len(rng.below(len))),
        2 => drop(file.set_len(0)),
        _ => drop(fs::remove_file(path)),
    }
}

/// The disk of the state directory has no free byte for a while, in which the server may die.
fn fill_disk(world: &World, rng: &mut Rng) {
    let path = world.disk.path().join("filler");
    let file = File::create(&path).unwrap();
    let mut at = 0;
    for step in [64 << 20, 1 << 20, 4096] {
        while fallocate(&file, FallocateFlags::empty(), at, step).is_ok() {
            at += step;
        }
    }
    if rng.below(2) == 0 {
        kill_process(world, "server_pid");
    }
    world.await_reads("a full disk");
    drop(file);
    fs::remove_file(path).unwrap();
    // ext4 gives the blocks of a removed file out again after its next commit.
    syncfs(File::open(world.disk.path()).unwrap()).unwrap();
}

/// The source answers wrongly or not at all, and the caches are gone.
fn spoil_source(world: &World, rng: &mut Rng) {
    excuse(world);
    let faults =
        [Fault::Reset, Fault::Truncate, Fault::Status(503), Fault::FlipBit, Fault::OtherBytes];
    let share = if rng.below(2) == 0 { 300 } else { 1000 };
    world.ledger.event(format!("source spoilt, {share} of 1000"));
    world.proxy.spoil(share, &faults);
    damage_cache(world, rng);
    thread::sleep(Duration::from_millis(rng.below(1000)));
    world.proxy.spoil(0, &[]);
    world.ledger.event("source good again".into());
    // A spoilt answer may still be on its way, and a reader that begins later may join the fetch
    // that it was for: two wrong answers in a row are an error to all its readers
    // (`volume/src/limits.rs`).
    if !world.proxy.settle() {
        world.ledger.violation("an answer of the source has no end".into());
    }
    world.places.iter().for_each(|place| read_through(place));
    world.await_reads("a source that failed");
    end_excuse(world);
}

/// The folders of prepared images.
fn image_folders(world: &World) -> Vec<PathBuf> {
    let entries = fs::read_dir(world.state().join("images")).into_iter().flatten().flatten();
    let mut folders: Vec<_> =
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}
