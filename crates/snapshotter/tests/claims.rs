//! Claims of remote chains, with layers that a test decides about. Mounting them takes root: the
//! command's test `containerd` does that.

#![allow(clippy::unwrap_used)]

use std::{path::PathBuf, sync::Arc};

use burgeon_snapshotter::{
    CallError, CallResult, Snapshotter, api,
    filter::Filter,
    model::{Labels, Refusal, SnapshotKind},
};
use fake::{Fake, labels_of};

mod fake;

fn open(root: PathBuf) -> Snapshotter {
    Snapshotter::open(&root).unwrap().with_layers(Arc::new(Fake::default()))
}

fn prepare(
    all: &Snapshotter,
    key: &str,
    parent: Option<&str>,
    chain: &str,
    image: &str,
) -> CallResult<Vec<api::Mount>> {
    all.create(SnapshotKind::Active, key, parent, labels_of(chain, image, "sha256:m", false))
}

fn exists<T: std::fmt::Debug>(answer: CallResult<T>) -> bool {
    matches!(answer, Err(CallError::Refused(Refusal::Exists(_))))
}

#[test]
fn a_claimed_chain_exists_and_is_found_by_its_label() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let all = open(root.clone());
    assert!(exists(prepare(&all, "k1", None, "c1", "r/app")));
    assert!(exists(prepare(&all, "k2", Some("c1"), "c2", "r/app")));
    // As containerd looks for it.
    let filter = ["labels.\"containerd.io/snapshot.ref\"==c2,parent==c1".to_owned()];
    let found = all.list(&Filter::parse(&filter).unwrap());
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].name.as_str(), found[0].kind), ("c2", SnapshotKind::Committed));
    assert_eq!(all.usage("c2").unwrap().bytes, 0);
    // Another image with that chain is another source; the same one is not.
    for image in ["r/other", "r/app"] {
        assert!(exists(prepare(&all, "k3", Some("c1"), "c2", image)));
    }
    drop(all);
    let all = open(root.clone());
    assert_eq!(all.stat("c2").unwrap().remote.unwrap().sources, ["r/app#c2", "r/other#c2"]);
    // Its mount fails: the container is refused with the source, and nothing of it stays.
    let refused =
        all.create(SnapshotKind::Active, "container", Some("c2"), Labels::new()).unwrap_err();
    assert!(refused.to_string().contains("r/other#c2 is away"), "{refused}");
    assert!(all.stat("container").is_err());
    for name in ["c2", "c1"] {
        all.remove(name).unwrap();
    }
    all.empty_trash().unwrap();
    for part in ["chains", "records", "snapshots"] {
        assert_eq!(root.join(part).read_dir().unwrap().count(), 0, "{part}");
    }
}

#[test]
fn an_id_whose_mount_may_be_left_is_not_given_again() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let all = open(root.clone());
    assert!(exists(prepare(&all, "k", None, "c1", "r/app")));
    let first = all.stat("c1").unwrap().id;
    // The attempt to mount it makes its mount point, which the cleaner would remove.
    assert!(all.create(SnapshotKind::Active, "container", Some("c1"), Labels::new()).is_err());
    all.remove("c1").unwrap();
    assert!(root.join(format!("chains/{first}")).exists());
    drop(all);
    let all = open(root.clone());
    assert!(exists(prepare(&all, "k", None, "c2", "r/app")));
    let second = all.stat("c2").unwrap().id;
    assert!(second > first);
    // Nor is that of a damaged record.
    drop(all);
    std::fs::rename(
        root.join(format!("records/{second}")),
        root.join(format!("records/{}.damaged", second + 9)),
    )
    .unwrap();
    let all = open(root);
    assert!(exists(prepare(&all, "k", None, "c3", "r/app")));
    assert!(all.stat("c3").unwrap().id > second + 9);
}

#[test]
fn any_failure_to_claim_makes_a_local_layer() {
    let folder = tempfile::tempdir().unwrap();
    let all = open(folder.path().join("root"));
    let why = |key: &str| all.stat(key).unwrap().why_local.unwrap();
    prepare(&all, "a", None, "c1", "local/app").unwrap();
    assert_eq!(why("a"), "it is local");
    // The reason stays with the committed layer.
    all.commit("a", "layer", None, Labels::new()).unwrap();
    assert_eq!(why("layer"), "it is local");
    prepare(&all, "b", None, "c1", "panic").unwrap();
    let unlabelled = Labels::from([("containerd.io/snapshot.ref".to_owned(), "c1".to_owned())]);
    all.create(SnapshotKind::Active, "c", None, unlabelled).unwrap();
    assert!(why("c").contains("annotations"), "{}", why("c"));
    // A chain that exists above another parent cannot be claimed again: containerd would not find
    // it.
    assert!(exists(prepare(&all, "d", None, "c2", "r/app")));
    prepare(&all, "d", Some("layer"), "c2", "r/app").unwrap();
    assert!(why("d").contains("another parent"), "{}", why("d"));
    // A parent that is missing is an error, and no claim.
    assert!(prepare(&all, "e", Some("none"), "c3", "r/app").is_err());
    assert!(all.stat("c3").is_err());
    assert!(exists(prepare(&all, "a2", None, "c4", "r/app")));
    assert!(exists(prepare(&all, "d", None, "c5", "r/app")), "the key is taken");
    assert!(all.stat("c5").is_err());
}

#[test]
fn a_death_at_any_step_of_a_claim_leaves_it_whole_or_not_made() {
    for steps in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let all = open(root.clone());
        all.die_after(steps);
        let claimed = exists(prepare(&all, "k", None, "c1", "r/app"));
        drop(all);
        let all = open(root);
        if claimed {
            assert!(steps > 3);
            assert!(all.stat("c1").unwrap().remote.is_some());
            break;
        }
        // Perhaps it was written, and the answer was lost.
        assert!(all.stat("c1").map_or(true, |found| found.remote.is_some()));
        assert!(exists(prepare(&all, "k", None, "c1", "r/app")), "step {steps}");
    }
}

#[test]
fn a_source_that_is_not_what_it_states_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let all = open(folder.path().join("root"));
    assert!(exists(prepare(&all, "k", None, "c1", "forged/app")));
    let container = |key: &str| {
        let refused = all.create(SnapshotKind::Active, key, Some("c1"), Labels::new()).unwrap_err();
        assert!(all.stat(key).is_err(), "nothing of it stays");
        refused
    };
    let refused = container("container");
    assert!(matches!(refused, CallError::Refused(Refusal::Precondition(_))), "{refused}");
    assert!(refused.to_string().contains("forged/app#c1 is forged"), "{refused}");
    // Another source of the chain is asked instead of it.
    assert!(exists(prepare(&all, "k", None, "c1", "r/app")));
    let refused = container("container");
    assert!(refused.to_string().contains("r/app#c1 is away"), "{refused}");
}

/// They are all that is left of it.
#[test]
fn the_writes_of_a_snapshot_whose_record_is_damaged_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    drop(open(root.clone()));
    for id in [12, 13] {
        std::fs::create_dir(root.join(format!("chains/{id}"))).unwrap();
    }
    std::fs::write(root.join("records/12"), "damaged").unwrap();
    let fake = Arc::new(Fake::default());
    let all = Snapshotter::open(&root).unwrap().with_layers(fake.clone());
    all.empty_trash().unwrap();
    assert_eq!(*fake.removed.lock().unwrap(), [13]);
    assert!(root.join("chains/12").is_dir() && !root.join("chains/13").exists());
}

/// Somebody may have removed the root, and left the state directory with its writes.
#[test]
fn a_new_native_container_finds_no_writes_of_an_earlier_one() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Arc::new(Fake::default());
    let all = Snapshotter::open(&folder.path().join("root")).unwrap().with_layers(fake.clone());
    assert!(exists(prepare(&all, "k", None, "c1", "r/app")));
    let chain = all.stat("c1").unwrap().id;
    let native =
        Labels::from([("containerd.io/snapshot/burgeon.containers".into(), "native".into())]);
    // Its mount fails, and then that of the chain, below an overlay.
    let refused = all.create(SnapshotKind::Active, "c", Some("c1"), native).unwrap_err();
    assert!(refused.to_string().contains("is away"), "{refused}");
    assert_eq!(*fake.removed.lock().unwrap(), [chain + 1]);
}
