//! A folder of user data through power failures: names and contents become durable separately.
//!
//! ```text
//!   write ─► content, volatile ── sync_file ─► durable          a crash keeps any sectors of the rest
//!   rename, link ─► name, volatile ── sync_folder ─► durable    a crash keeps any first part of the rest
//! ```
//!
//! POSIX leaves this open, and file systems do it. Records of user data are published by
//! writing a new file, syncing it, renaming it and syncing the folder; [`publish_survives`]
//! tries a list of such steps with a power failure after each of them.

use std::collections::BTreeMap;

use testkit::Rng;

const SECTOR: usize = 512;

/// One system call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Makes the file `name`, or empties it, and writes its content.
    Write(&'static str, Vec<u8>),
    /// Makes the content of `name` durable.
    SyncFile(&'static str),
    /// Gives the first name's file the second name, in place of what had it.
    Rename(&'static str, &'static str),
    /// Gives the first name's file a second name.
    Link(&'static str, &'static str),
    /// Makes the names durable.
    SyncFolder,
}

#[derive(Clone, Default)]
struct Content {
    now: Vec<u8>,
    durable: Vec<u8>,
}

type Names = BTreeMap<&'static str, usize>;

/// A simulated folder.
#[derive(Clone, Default)]
pub struct Folder {
    files: Vec<Content>,
    names: Names,
    durable_names: Names,
    /// States of the names since the last sync, oldest first.
    unsynced_names: Vec<Names>,
}

impl Folder {
    /// The content of `name`.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.names.get(name).map(|file| self.files[*file].now.as_slice())
    }

    /// Does one step. A name that is not there is a mistake in the steps.
    pub fn step(&mut self, step: &Step) -> Result<(), String> {
        let find = |names: &Names, name| {
            names.get(name).copied().ok_or_else(|| format!("there is no {name}"))
        };
        match step {
            Step::Write(name, bytes) => {
                let file = match self.names.get(name) {
                    Some(file) => *file,
                    None => {
                        self.files.push(Content::default());
                        self.names.insert(name, self.files.len() - 1);
                        self.unsynced_names.push(self.names.clone());
                        self.files.len() - 1
                    }
                };
                self.files[file].now = bytes.clone();
            }
            Step::SyncFile(name) => {
                let file = &mut self.files[find(&self.names, name)?];
                file.durable = file.now.clone();
            }
            Step::Rename(from, to) => {
                let file = find(&self.names, from)?;
                self.names.remove(from);
                self.names.insert(to, file);
                self.unsynced_names.push(self.names.clone());
            }
            Step::Link(from, to) => {
                let file = find(&self.names, from)?;
                self.names.insert(to, file);
                self.unsynced_names.push(self.names.clone());
            }
            Step::SyncFolder => {
                self.durable_names = self.names.clone();
                self.unsynced_names.clear();
            }
        }
        Ok(())
    }

    /// The power fails.
    pub fn crash(&mut self, rng: &mut Rng) {
        let kept = rng.below(self.unsynced_names.len() as u64 + 1) as usize;
        if let Some(last) = self.unsynced_names[..kept].last() {
            self.durable_names = last.clone();
        }
        self.names = self.durable_names.clone();
        self.unsynced_names.clear();
        for file in &mut self.files {
            file.crash(rng);
        }
    }
}

impl Content {
    fn crash(&mut self, rng: &mut Rng) {
        if self.now == self.durable {
            return;
        }
        let len = *rng.pick(&[self.durable.len(), self.now.len()]);
        self.durable.resize(len, 0);
        for (index, sector) in self.durable.chunks_mut(SECTOR).enumerate() {
            let start = index * SECTOR;
            let end = start + sector.len();
            if rng.below(2) == 0 && end <= self.now.len() {
                sector.copy_from_slice(&self.now[start..end]);
            }
        }
        self.now = self.durable.clone();
    }
}

/// Does `steps` in `folder`, with the power failing after each of them and `tries` times each
/// with another part surviving. `promise` judges what is found then; it is told how many steps
/// were done.
pub fn publish_survives(
    folder: &Folder,
    steps: &[Step],
    tries: u64,
    promise: impl Fn(&Folder, usize) -> Result<(), String>,
) -> Result<(), String> {
    for done in 0..=steps.len() {
        let mut before = folder.clone();
        steps[..done].iter().try_for_each(|step| before.step(step))?;
        for seed in 0..tries {
            let mut after = before.clone();
            after.crash(&mut Rng::new(seed));
            promise(&after, done)
                .map_err(|error| format!("power off after step {done}, seed {seed}: {error}"))?;
        }
    }
    Ok(())
}
