//! Each call fails at each step: the process dies, the disk is full, or what mounts chains fails
//! before or after it had its effect. Records, folders, mounts and writes then agree, the call can
//! be repeated, and nothing is left in the end. Mounts, so it takes root.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
};

use burgeon_block::ErrorKind;
use burgeon_snapshotter::{
    CallError, CallResult, Snapshotter,
    filter::Filter,
    model::{Labels, Refusal, SnapshotKind},
};
use fake::{Fake, labels_of};
use rustix::mount::{UnmountFlags, unmount};

mod fake;

type Call = (&'static str, fn(&Snapshotter) -> CallResult<()>);

fn claim(all: &Snapshotter, chain: &str, parent: Option<&str>) -> CallResult<()> {
    let labels = labels_of(chain, "r/app", "sha256:m", false);
    let made = all.create(SnapshotKind::Active, "unpack", parent, labels);
    match made {
        Err(CallError::Refused(Refusal::Exists(_))) if all.stat(chain).is_ok() => Ok(()),
        Err(error) => Err(error),
        // containerd unpacks the layer.
        Ok(_) => all.commit("unpack", chain, None, Labels::new()),
    }
}

fn active(all: &Snapshotter, key: &str, parent: &str) -> CallResult<()> {
    all.create(SnapshotKind::Active, key, Some(parent), Labels::new()).map(drop)
}

const OVERLAY: &str = "k8s.io/1/overlay";
const NATIVE: &str = "other/2/native";
const OTHER: &str = "other/3/native";

/// A life of an image of two layers, and of containers of each form above it.
const CALLS: &[Call] = &[
    ("claim 1", |all| claim(all, "c1", None)),
    ("claim 2", |all| claim(all, "c2", Some("c1"))),
    ("view", |all| all.create(SnapshotKind::View, "v", Some("c2"), Labels::new()).map(drop)),
    ("overlay", |all| active(all, OVERLAY, "c2")),
    ("native", |all| active(all, NATIVE, "c2")),
    ("other native", |all| active(all, OTHER, "c1")),
    ("mounts of overlay", |all| all.mounts(OVERLAY).map(drop)),
    ("mounts of native", |all| all.mounts(NATIVE).map(drop)),
    ("usage", |all| all.usage(NATIVE).map(drop)),
    ("update", |all| {
        let labels = Labels::from([("l".to_owned(), "1".to_owned())]);
        all.update(NATIVE, &labels, &[]).map(drop)
    }),
    ("commit overlay", |all| all.commit(OVERLAY, "above", None, Labels::new())),
    ("commit native", |all| all.commit(NATIVE, "beside", None, Labels::new())),
    ("cleanup", |all| Ok(all.empty_trash()?)),
    ("above a commit", |all| active(all, "other/4/above", "beside")),
    ("remove above a commit", |all| all.remove("other/4/above")),
    ("remove view", |all| all.remove("v")),
    ("remove native", |all| all.remove(OTHER)),
    ("remove above", |all| all.remove("above")),
    ("remove beside", |all| all.remove("beside")),
    ("remove 2", |all| all.remove("c2")),
    ("cleanup 2", |all| Ok(all.empty_trash()?)),
    ("remove 1", |all| all.remove("c1")),
    ("cleanup 1", |all| Ok(all.empty_trash()?)),
];

/// Name to kind, parent and labels, and whether it is remote, and native.
type Seen = BTreeMap<String, (SnapshotKind, Option<String>, Labels, bool, bool)>;

fn seen(all: &Snapshotter) -> Seen {
    let all = all.list(&Filter::default()).into_iter();
    all.map(|one| {
        let forms = (one.remote.is_some(), one.native.is_some());
        (one.name, (one.kind, one.parent, one.labels, forms.0, forms.1))
    })
    .collect()
}

/// A root, whose mounts end with it.
struct Root(tempfile::TempDir);

impl Root {
    fn path(&self) -> PathBuf {
        self.0.path().join("root")
    }

    fn ids(&self, part: &str) -> BTreeSet<u64> {
        let entries = self.path().join(part).read_dir().unwrap().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().parse().unwrap()).collect()
    }

    fn mounted(&self) -> BTreeSet<u64> {
        let below = format!("{}/", self.path().join("chains").display());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)?.strip_prefix(&below));
        points.map(|id| id.parse().unwrap()).collect()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for id in self.mounted() {
            let _ = unmount(self.path().join("chains").join(id.to_string()), UnmountFlags::DETACH);
        }
    }
}

fn open(root: &Path, fake: &Arc<Fake>) -> Snapshotter {
    Snapshotter::open(root).unwrap().with_layers(Arc::clone(fake) as _)
}

/// Records, folders, mounts and writes agree after the cleaner has been there.
fn check(root: &Root, all: &Snapshotter, fake: &Fake, told: &str) {
    all.empty_trash().unwrap();
    let list = all.list(&Filter::default());
    let ids = |is: fn(&burgeon_snapshotter::model::Snapshot) -> bool| -> BTreeSet<u64> {
        list.iter().filter(|one| is(one)).map(|one| one.id).collect()
    };
    // On the disk as in memory.
    assert_eq!(root.ids("records"), ids(|_| true), "{told}: records");
    let on_disk = burgeon_snapshotter::read(&root.path()).unwrap();
    assert_eq!(on_disk.damaged, [""; 0], "{told}");
    let names: BTreeSet<_> = on_disk.snapshots.iter().map(|one| one.name.clone()).collect();
    assert_eq!(names.len(), list.len(), "{told}: a name has two records");
    let folders = root.ids("snapshots");
    assert!(folders.is_subset(&ids(|one| one.remote.is_none())), "{told}: {folders:?}");
    let needed = ids(|one| one.remote.is_none() && one.native.is_none());
    assert!(needed.is_subset(&folders), "{told}: {folders:?}");
    let may_be_mounted = ids(|one| one.remote.is_some() || one.native.is_some());
    assert!(root.mounted().is_subset(&may_be_mounted), "{told}: mounts");
    assert!(root.ids("chains").is_subset(&may_be_mounted), "{told}: mount points");
    let native = ids(|one| one.native.is_some());
    assert!(fake.writes.lock().unwrap().is_subset(&native), "{told}: writes");
    // Each can be used.
    for one in &list {
        if one.kind != SnapshotKind::Committed {
            for mount in all.mounts(&one.name).unwrap_or_else(|e| panic!("{told}: {e}")) {
                assert!(mount.source == "overlay" || Path::new(&mount.source).is_dir(), "{told}");
            }
        }
    }
}

/// The event at one step.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Death,
    Full,
    MountFails { late: bool },
}

/// Has the fault at each step. Returns the number of steps.
fn at_each_step(fault: Fault) -> usize {
    let states = {
        let root = Root(tempfile::tempdir().unwrap());
        let fake = Arc::new(Fake { mounts: true, ..Fake::default() });
        let all = open(&root.path(), &fake);
        let mut states = vec![seen(&all)];
        for (name, call) in CALLS {
            call(&all).unwrap_or_else(|e| panic!("{name}: {e}"));
            check(&root, &all, &fake, name);
            states.push(seen(&all));
        }
        states
    };
    for step in 1.. {
        let root = Root(tempfile::tempdir().unwrap());
        let fake = Arc::new(Fake { mounts: true, ..Fake::default() });
        let mut all = open(&root.path(), &fake);
        match fault {
            Fault::Death => all.die_after(step - 1),
            Fault::Full => all.be_full_at(step),
            Fault::MountFails { late } => {
                fake.fails_late.store(late, Relaxed);
                fake.calls_left.store(step, Relaxed);
            }
        }
        let mut has_happened = false;
        for (at, (name, call)) in CALLS.iter().enumerate() {
            let told = format!("{fault:?} at step {step}, {name}");
            let Err(error) = call(&all) else { continue };
            assert!(!has_happened, "{told}: once more: {error}");
            has_happened = true;
            match fault {
                Fault::Death => {
                    drop(all);
                    all = open(&root.path(), &fake);
                }
                Fault::Full => assert_eq!(error.kind(), Some(ErrorKind::NoSpace), "{told}"),
                Fault::MountFails { .. } => {}
            }
            check(&root, &all, &fake, &told);
            // As a whole or not at all; containerd asks again.
            if seen(&all) != states[at + 1] {
                assert_eq!(seen(&all), states[at], "{told}");
                call(&all).unwrap_or_else(|e| panic!("{told}: again: {e}"));
            }
            check(&root, &all, &fake, &told);
        }
        let told = format!("{fault:?} at step {step}");
        assert_eq!(seen(&all), Seen::new(), "{told}");
        check(&root, &all, &fake, &told);
        // A fault that no call tells of: the fallback has answered it, or it was the last step.
        if !has_happened && is_over(&all, &fake, fault) {
            return step as usize;
        }
    }
    unreachable!()
}

/// True if the step was not reached.
fn is_over(all: &Snapshotter, fake: &Fake, fault: Fault) -> bool {
    match fault {
        Fault::Death => true,
        Fault::Full => all.steps_until_full() > 0,
        Fault::MountFails { .. } => fake.calls_left.load(Relaxed) > 0,
    }
}

#[test]
fn a_death_at_any_step() {
    let steps = at_each_step(Fault::Death);
    assert!(steps > 100, "{steps} steps are too few to be all");
}

#[test]
fn a_full_disk_at_any_step() {
    let steps = at_each_step(Fault::Full);
    assert!(steps > 60, "{steps} steps are too few to be all");
}

#[test]
fn a_mount_that_fails_at_any_step() {
    for late in [false, true] {
        let steps = at_each_step(Fault::MountFails { late });
        assert!(steps > 15, "{steps} steps are too few to be all");
    }
}
