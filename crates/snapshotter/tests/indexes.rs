//! Indexes of unpacked images: when they are made, kept and removed, with a death at each step.

#![allow(clippy::unwrap_used)]

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, SystemTime},
};

use burgeon_block::{Error, ErrorKind};
use burgeon_snapshotter::{
    CallError, ImageIndex, IndexMade, IndexPolicy, IndexState, Snapshotter,
    model::{Labels, Refusal, SnapshotKind},
};
use fake::{Fake, labels_of};
use tempfile::TempDir;

mod fake;

const HOUR: Duration = Duration::from_secs(3600);

/// A root that is not there yet, in a folder that goes with the value, and its layers.
fn fresh() -> (TempDir, PathBuf, Arc<Fake>) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    (folder, root, Arc::default())
}

fn open(root: &Path, fake: &Arc<Fake>) -> Snapshotter {
    Snapshotter::open(root).unwrap().with_layers(Arc::clone(fake) as _)
}

fn manifest(number: usize) -> String {
    format!("sha256:{number:064x}")
}

/// containerd pulls an image of two layers; true if they are remote.
fn pull(all: &Snapshotter, number: usize) -> bool {
    let (image, manifest) = (format!("local/{number}:1"), manifest(number));
    let mut is_remote = false;
    for layer in 0..2 {
        let name = |layer: usize| format!("{number}-{layer}");
        let labels = labels_of(&name(layer), &image, &manifest, layer == 1);
        let parent = (layer > 0).then(|| name(layer - 1));
        let made = all.create(SnapshotKind::Active, "unpack", parent.as_deref(), labels.clone());
        match made {
            Err(CallError::Refused(Refusal::Exists(_))) => is_remote = true,
            made => {
                made.unwrap();
                all.commit("unpack", &name(layer), None, labels).unwrap();
            }
        }
    }
    is_remote
}

fn remove(all: &Snapshotter, number: usize) {
    for layer in [1, 0] {
        all.remove(&format!("{number}-{layer}")).unwrap();
    }
}

/// Does all that is to be done now.
fn work(all: &Snapshotter, now: SystemTime) {
    for _ in 0..100 {
        if !all.index_next(&|| now).unwrap() {
            return;
        }
    }
    panic!("it does not end");
}

fn indexes(root: &Path) -> Vec<ImageIndex> {
    let mut found = burgeon_snapshotter::read(root).unwrap().indexes;
    found.sort_by(|a, b| a.manifest.cmp(&b.manifest));
    found
}

#[test]
fn an_unpacked_image_gets_an_index_and_its_next_pull_is_remote() {
    let (_folder, root, fake) = fresh();
    let all = open(&root, &fake);
    let now = SystemTime::now();
    // Not before its topmost layer is there.
    let labels = labels_of("1-0", "local/1:1", &manifest(1), false);
    all.create(SnapshotKind::Active, "unpack", None, labels.clone()).unwrap();
    all.commit("unpack", "1-0", None, labels).unwrap();
    assert!(!all.index_next(&|| now).unwrap());
    all.remove("1-0").unwrap();
    assert!(!pull(&all, 1));
    work(&all, now);
    let found = indexes(&root);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].image.as_str(), found[0].tries), ("local/1:1", 1));
    assert_eq!(found[0].state, IndexState::Made { bytes: 10 });
    // It outlives the image, and is used by the next pull, also after a restart.
    remove(&all, 1);
    work(&all, now);
    assert!(indexes(&root)[0].unused_since.is_some());
    drop(all);
    let all = open(&root, &fake);
    assert!(pull(&all, 1));
    work(&all, now);
    assert_eq!(indexes(&root)[0].unused_since, None);
    // While it is used, no lack of room removes it.
    *fake.policy.lock().unwrap() = IndexPolicy { is_on: true, kept: 0 };
    work(&all, now);
    assert_eq!(indexes(&root).len(), 1);
    // Nor if only the source of its chain names it.
    for layer in ["1-0", "1-1"] {
        all.update(layer, &Labels::new(), &[]).unwrap();
    }
    work(&all, now);
    assert_eq!(indexes(&root).len(), 1);
    remove(&all, 1);
    work(&all, now);
    assert_eq!(indexes(&root), []);
    assert!(fake.indexes.lock().unwrap().is_empty());
}

#[test]
fn the_indexes_of_removed_images_have_bounded_room() {
    let (_folder, root, fake) = fresh();
    let all = open(&root, &fake);
    let now = SystemTime::now();
    *fake.policy.lock().unwrap() = IndexPolicy { is_on: true, kept: 25 };
    for number in 1..=4 {
        pull(&all, number);
    }
    work(&all, now);
    assert_eq!(indexes(&root).len(), 4);
    // Image 2 goes first, and so does its index.
    for (place, number) in [2, 1, 3].into_iter().enumerate() {
        remove(&all, number);
        work(&all, now + HOUR * place as u32);
    }
    let left: Vec<_> = indexes(&root).into_iter().map(|index| index.manifest).collect();
    assert_eq!(left, [manifest(1), manifest(3), manifest(4)]);
    assert_eq!(*fake.indexes.lock().unwrap(), left.into_iter().collect());
}

#[test]
fn failures_are_tried_again_and_told() {
    let (_folder, root, fake) = fresh();
    let mut all = open(&root, &fake);
    let mut now = SystemTime::now();
    let asked = |all: &Snapshotter, now: SystemTime| {
        let away = Error::new(ErrorKind::Unavailable, "the registry is away");
        *fake.refusal.lock().unwrap() = Some(Err(away));
        work(all, now);
        fake.refusal.lock().unwrap().take().is_none()
    };
    pull(&all, 1);
    assert!(asked(&all, now));
    let IndexState::Failed(why) = &indexes(&root)[0].state else { panic!() };
    let index = &indexes(&root)[0];
    assert_eq!(index.next_try(), Some(index.changed + HOUR / 6));
    assert_eq!(why, "the registry is away");
    assert!(!asked(&all, now), "at once");
    for pause in [1, 2, 7] {
        assert!(!asked(&all, now + Duration::from_secs(60)));
        now += HOUR * pause;
        assert!(asked(&all, now), "{pause}");
    }
    assert!(!asked(&all, now + HOUR * 1000), "it was tried often enough");
    // The record goes with the image.
    remove(&all, 1);
    work(&all, now);
    assert_eq!(indexes(&root), []);
    // An image that is left out is looked at again by the next process, and never removed.
    for why in ["small", "large"] {
        pull(&all, 2);
        *fake.refusal.lock().unwrap() = Some(Ok(IndexMade::LeftOut(why.to_owned())));
        work(&all, now);
        assert_eq!(indexes(&root)[0].state, IndexState::LeftOut(why.to_owned()));
        drop(all);
        all = open(&root, &fake);
        *fake.refusal.lock().unwrap() = Some(Ok(IndexMade::LeftOut("again".to_owned())));
        work(&all, now);
        assert_eq!(indexes(&root)[0].state, IndexState::LeftOut("again".to_owned()));
        remove(&all, 2);
        work(&all, now);
        assert_eq!(indexes(&root), []);
    }
    // That of a user stays as well.
    fake.indexes.lock().unwrap().insert(manifest(3));
    let (image, manifest) = ("local/3:1", manifest(3));
    let labels = labels_of("3", image, &manifest, true);
    fake.calls_left.store(1, Relaxed);
    all.create(SnapshotKind::Active, "unpack", None, labels.clone()).unwrap();
    all.commit("unpack", "3", None, labels).unwrap();
    work(&all, now);
    assert!(matches!(indexes(&root)[0].state, IndexState::LeftOut(_)));
    all.remove("3").unwrap();
    work(&all, now);
    assert_eq!(indexes(&root), []);
    assert!(fake.indexes.lock().unwrap().contains(&manifest));
    // And nothing is made where the configuration says so.
    *fake.policy.lock().unwrap() = IndexPolicy { is_on: false, kept: 0 };
    pull(&all, 4);
    work(&all, now);
    assert_eq!(indexes(&root), []);
}

#[test]
fn a_pause_begins_when_the_try_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Arc::new(Fake::default());
    let all = open(&folder.path().join("root"), &fake);
    pull(&all, 1);
    *fake.takes.lock().unwrap() = HOUR;
    let fail = || {
        let away = Error::new(ErrorKind::Unavailable, "the registry is away");
        *fake.refusal.lock().unwrap() = Some(Err(away));
    };
    let clock = || *fake.now.lock().unwrap();
    fail();
    assert!(all.index_next(&clock).unwrap());
    fail();
    assert!(!all.index_next(&clock).unwrap(), "it is tried again without a pause");
    *fake.now.lock().unwrap() += Duration::from_secs(601);
    assert!(all.index_next(&clock).unwrap());
}

#[test]
fn an_index_that_cannot_be_removed_holds_up_no_other() {
    let (_folder, root, fake) = fresh();
    let all = open(&root, &fake);
    let now = SystemTime::now();
    *fake.policy.lock().unwrap() = IndexPolicy { is_on: true, kept: 0 };
    *fake.stuck.lock().unwrap() = Some(manifest(1));
    for number in [1, 2] {
        pull(&all, number);
        work(&all, now);
        remove(&all, number);
    }
    work(&all, now);
    pull(&all, 3);
    work(&all, now);
    let made = || fake.indexes.lock().unwrap().clone();
    assert_eq!(made(), [manifest(1), manifest(3)].into());
    // It is tried again after a pause.
    *fake.stuck.lock().unwrap() = None;
    work(&all, now + Duration::from_secs(60));
    assert_eq!(made().len(), 2);
    work(&all, now + HOUR);
    assert_eq!(made(), [manifest(3)].into());
}

#[test]
fn an_index_that_a_user_made_after_a_failure_stays() {
    let (_folder, root, fake) = fresh();
    let all = open(&root, &fake);
    let now = SystemTime::now();
    *fake.policy.lock().unwrap() = IndexPolicy { is_on: true, kept: 0 };
    pull(&all, 1);
    let away = Error::new(ErrorKind::Unavailable, "the registry is away");
    *fake.refusal.lock().unwrap() = Some(Err(away));
    work(&all, now);
    fake.indexes.lock().unwrap().insert(manifest(1));
    work(&all, now + HOUR);
    assert!(matches!(indexes(&root)[0].state, IndexState::LeftOut(_)));
    remove(&all, 1);
    work(&all, now + HOUR);
    assert_eq!(*fake.indexes.lock().unwrap(), [manifest(1)].into());
}

/// As by `burgeon rm`: the record still says that the index was made.
#[test]
fn an_index_that_was_removed_is_made_again_at_the_next_pull() {
    let (_folder, root, fake) = fresh();
    let all = open(&root, &fake);
    pull(&all, 1);
    work(&all, SystemTime::now());
    fake.indexes.lock().unwrap().clear();
    work(&all, SystemTime::now());
    assert!(fake.indexes.lock().unwrap().is_empty(), "nobody has pulled the image");
    remove(&all, 1);
    work(&all, SystemTime::now());
    assert!(!pull(&all, 1), "it has no index");
    work(&all, SystemTime::now());
    assert_eq!(*fake.indexes.lock().unwrap(), [manifest(1)].into());
    assert_eq!((indexes(&root)[0].tries, indexes(&root).len()), (1, 1));
}

#[test]
fn an_image_that_ends_the_process_is_not_tried_for_ever() {
    let (_folder, root, fake) = fresh();
    pull(&open(&root, &fake), 1);
    // Dies at the first step after the record that it was begun.
    let live = |steps: i64| {
        let all = open(&root, &fake);
        all.die_after(steps);
        let died = all.index_next(&SystemTime::now).is_err();
        fake.indexes.lock().unwrap().clear();
        died
    };
    let begun = || indexes(&root).first().map_or(0, |index| index.tries);
    let steps = (0..20).find(|steps| live(*steps) && begun() == 1).unwrap();
    for tries in 2..=4 {
        assert!(live(steps));
        assert_eq!((begun(), &indexes(&root)[0].state), (tries, &IndexState::Begun));
    }
    work(&open(&root, &fake), SystemTime::now() + HOUR * 1000);
    let IndexState::Failed(why) = &indexes(&root)[0].state else { panic!("it is tried again") };
    assert!(why.contains("ended each time"), "{why}");
    assert_eq!(indexes(&root)[0].next_try(), None);
    assert_eq!((begun(), fake.indexes.lock().unwrap().len()), (4, 0));
}

/// Dies before each step of making and of removing an index.
#[test]
fn no_index_is_left_without_a_record() {
    let mut deaths = 0;
    for steps in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let fake = Arc::new(Fake::default());
        *fake.policy.lock().unwrap() = IndexPolicy { is_on: true, kept: 0 };
        let all = open(&root, &fake);
        let now = SystemTime::now();
        pull(&all, 1);
        pull(&all, 2);
        remove(&all, 1);
        all.die_after(steps);
        let life = || -> burgeon_block::Result<()> {
            while all.index_next(&|| now)? {}
            all.remove("2-1").map_err(|_| Error::new(ErrorKind::LocalIo, "dead"))?;
            all.remove("2-0").map_err(|_| Error::new(ErrorKind::LocalIo, "dead"))?;
            while all.index_next(&|| now)? {}
            Ok(())
        };
        let died = life().is_err();
        drop(all);
        let all = open(&root, &fake);
        let known: Vec<_> = indexes(&root).into_iter().map(|index| index.manifest).collect();
        for made in fake.indexes.lock().unwrap().iter() {
            assert!(known.contains(made), "step {steps}: {made} has no record");
        }
        // The next process makes it, unless it was tried too often.
        if all.stat("2-1").is_ok() {
            work(&all, now);
            assert_eq!(indexes(&root)[0].state, IndexState::Made { bytes: 10 }, "step {steps}");
            all.remove("2-1").unwrap();
        }
        _ = all.remove("2-0");
        work(&all, now);
        assert_eq!(indexes(&root), [], "step {steps}");
        assert!(fake.indexes.lock().unwrap().is_empty(), "step {steps}");
        let left: Vec<_> = root.join("indexes").read_dir().unwrap().collect();
        assert!(left.is_empty(), "step {steps}: {left:?}");
        if !died {
            break;
        }
        deaths += 1;
    }
    assert!(deaths > 15, "{deaths} steps are too few to be all");
}
