//! The process dies before each step that changes the disk, and the next one finds all calls that
//! were answered, and the unanswered one as a whole or not at all.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use burgeon_snapshotter::{
    CallError, Snapshotter,
    filter::Filter,
    model::{Labels, Refusal, SnapshotKind},
};

type Call = fn(&Snapshotter) -> Result<(), CallError>;

fn labels(value: &str) -> Labels {
    Labels::from([("l".to_owned(), value.to_owned())])
}

/// A life of a few layers and containers.
const CALLS: &[Call] = &[
    |all| all.create(SnapshotKind::Active, "k1", None, labels("1")).map(drop),
    |all| all.commit("k1", "layer1", None, labels("1")),
    |all| all.create(SnapshotKind::Active, "k2", Some("layer1"), labels("2")).map(drop),
    |all| all.update("k2", &labels("3"), &[]).map(drop),
    |all| all.commit("k2", "layer2", None, labels("2")),
    |all| all.create(SnapshotKind::Active, "c", Some("layer2"), labels("c")).map(drop),
    |all| all.create(SnapshotKind::View, "v", Some("layer2"), labels("v")).map(drop),
    |all| all.remove("v"),
    |all| all.remove("c"),
    |all| all.remove("layer2"),
    |all| Ok(all.empty_trash()?),
    |all| all.remove("layer1"),
];

/// Name to kind, parent and labels.
type Seen = BTreeMap<String, (SnapshotKind, Option<String>, Labels)>;

fn seen(all: &Snapshotter) -> Seen {
    let found = all.list(&Filter::default());
    found.into_iter().map(|one| (one.name, (one.kind, one.parent, one.labels))).collect()
}

/// Each record has its folder, and each folder its record.
fn check_folders(root: &Path, all: &Snapshotter) {
    let mut expected: Vec<_> =
        all.list(&Filter::default()).iter().map(|one| one.id.to_string()).collect();
    let entries = root.join("snapshots").read_dir().unwrap();
    let mut found: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
    for id in found {
        assert!(root.join("snapshots").join(id).join("fs").is_dir());
    }
}

#[test]
fn a_death_at_any_step_leaves_whole_calls() {
    // The states before and after each call, without deaths.
    let folder = tempfile::tempdir().unwrap();
    let all = Snapshotter::open(&folder.path().join("root")).unwrap();
    let mut states = vec![seen(&all)];
    for call in CALLS {
        call(&all).unwrap();
        states.push(seen(&all));
    }
    drop(all);
    let mut deaths = 0;
    for steps in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let all = Snapshotter::open(&root).unwrap();
        all.die_after(steps);
        let Some(died) = CALLS.iter().position(|call| call(&all).is_err()) else {
            assert_eq!(seen(&all), states[CALLS.len()]);
            break;
        };
        deaths += 1;
        drop(all);
        let all = Snapshotter::open(&root).unwrap();
        let found = seen(&all);
        assert!(
            found == states[died] || found == states[died + 1],
            "step {steps}, call {died}: {found:?}"
        );
        check_folders(&root, &all);
        // The rest of the life goes on.
        let from = if found == states[died] { died } else { died + 1 };
        for (at, call) in CALLS.iter().enumerate().skip(from) {
            call(&all).unwrap_or_else(|e| panic!("step {steps}, call {at}: {e}"));
        }
        assert_eq!(seen(&all), states[CALLS.len()]);
        all.empty_trash().unwrap();
        for part in ["records", "snapshots", "trash"] {
            let left: Vec<_> = root.join(part).read_dir().unwrap().collect();
            assert!(left.is_empty(), "step {steps}, {part}: {left:?}");
        }
    }
    assert!(deaths > 60, "{deaths} steps are too few to be all");
}

#[test]
fn a_damaged_record_is_named_and_keeps_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let all = Snapshotter::open(&root).unwrap();
    all.create(SnapshotKind::Active, "k", None, Labels::new()).unwrap();
    all.commit("k", "below", None, Labels::new()).unwrap();
    all.create(SnapshotKind::Active, "c", Some("below"), Labels::new()).unwrap();
    let below = all.stat("below").unwrap().id;
    drop(all);
    let record = root.join("records").join(below.to_string());
    let mut bytes = fs::read(&record).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&record, bytes).unwrap();
    // Found by the first start, and known to later ones and to a reader.
    for _ in 0..2 {
        let all = Snapshotter::open(&root).unwrap();
        assert_eq!(burgeon_snapshotter::read(&root).unwrap().damaged.len(), 1);
        let refused = all.mounts("c").unwrap_err();
        assert!(matches!(&refused, CallError::Refused(Refusal::Precondition(_))), "{refused}");
        assert!(refused.to_string().contains("below"), "{refused}");
        assert!(root.join("snapshots").join(below.to_string()).join("fs").is_dir());
        let other = all.create(SnapshotKind::Active, "other", None, Labels::new());
        assert!(other.is_ok(), "other snapshots go on");
        assert_ne!(all.stat("other").unwrap().id, below);
        all.remove("other").unwrap();
    }
}

#[test]
fn a_root_is_private_and_has_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let all = Snapshotter::open(&root).unwrap();
    all.create(SnapshotKind::Active, "k", None, Labels::new()).unwrap();
    let error = Snapshotter::open(&root).unwrap_err();
    assert!(error.to_string().contains("another snapshotter"), "{error}");
    drop(all);
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
    let _all = Snapshotter::open(&root).unwrap();
    for private in ["", "records", "snapshots", "trash", "snapshots/1"] {
        let mode = root.join(private).metadata().unwrap().mode() & 0o7777;
        assert_eq!(mode, 0o700, "{private:?}");
    }
    let error = Snapshotter::open(&folder.path().join("a:b")).unwrap_err();
    assert!(error.to_string().contains("overlayfs"), "{error}");
    std::os::unix::fs::symlink(&root, folder.path().join("link")).unwrap();
    assert!(Snapshotter::open(&folder.path().join("link")).is_err());
}

#[test]
fn a_container_has_the_owner_and_mode_of_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let all = Snapshotter::open(&root).unwrap();
    let source =
        all.create(SnapshotKind::Active, "k", None, Labels::new()).unwrap().remove(0).source;
    fs::set_permissions(&source, fs::Permissions::from_mode(0o1770)).unwrap();
    fs::write(Path::new(&source).join("f"), vec![1; 100_000]).unwrap();
    all.commit("k", "below", None, Labels::new()).unwrap();
    let stored = all.usage("below").unwrap();
    assert_eq!(stored.inodes, 2);
    assert!((100_000..200_000).contains(&stored.bytes), "{stored:?}");
    // Not measured again.
    fs::remove_file(Path::new(&source).join("f")).unwrap();
    assert_eq!(all.usage("below").unwrap(), stored);
    all.create(SnapshotKind::Active, "c", Some("below"), Labels::new()).unwrap();
    let id = all.stat("c").unwrap().id;
    let layer = root.join("snapshots").join(id.to_string()).join("fs");
    assert_eq!(layer.metadata().unwrap().mode() & 0o7777, 0o1770);
    assert_eq!(all.usage("c").unwrap().inodes, 1);
}
