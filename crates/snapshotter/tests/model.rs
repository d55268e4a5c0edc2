//! Random calls on the state machine, compared with a naive one.

#![allow(clippy::unwrap_used)]

use std::{collections::BTreeMap, time::SystemTime};

use burgeon_snapshotter::model::{Labels, Refusal, SnapshotKind, Snapshots};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Call {
    Create(SnapshotKind, u8, Option<u8>),
    Commit(u8, u8),
    Remove(u8),
    Label(u8, u8),
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let name = 0_u8..8;
    let kind = prop_oneof![Just(SnapshotKind::Active), Just(SnapshotKind::View)];
    let call = prop_oneof![
        4 => (kind, name.clone(), proptest::option::of(name.clone()))
            .prop_map(|(kind, name, parent)| Call::Create(kind, name, parent)),
        3 => (name.clone(), name.clone()).prop_map(|(key, name)| Call::Commit(key, name)),
        2 => name.clone().prop_map(Call::Remove),
        1 => (name.clone(), name).prop_map(|(name, label)| Call::Label(name, label)),
    ];
    proptest::collection::vec(call, 1..80)
}

/// Name to kind, parent and labels.
type Naive = BTreeMap<String, (SnapshotKind, Option<String>, Labels)>;

/// Applies a call, or says that it is refused.
fn naive(all: &mut Naive, call: &Call) -> bool {
    let has_child = |all: &Naive, name: &str| {
        all.values().any(|(_, parent, _)| parent.as_deref() == Some(name))
    };
    match call {
        Call::Create(kind, name, parent) => {
            let parent = parent.map(|parent| parent.to_string());
            let is_committed = |parent: &String| {
                all.get(parent).is_some_and(|(kind, ..)| *kind == SnapshotKind::Committed)
            };
            let is_fine = parent.as_ref().is_none_or(is_committed);
            if all.contains_key(&name.to_string()) || !is_fine {
                return false;
            }
            all.insert(name.to_string(), (*kind, parent, Labels::new()));
        }
        Call::Commit(key, name) => {
            let found = all.get(&key.to_string()).cloned();
            match found {
                Some((SnapshotKind::Active, parent, _)) if !all.contains_key(&name.to_string()) => {
                    all.remove(&key.to_string());
                    all.insert(name.to_string(), (SnapshotKind::Committed, parent, Labels::new()));
                }
                _ => return false,
            }
        }
        Call::Remove(name) => {
            let name = name.to_string();
            if has_child(all, &name) || all.remove(&name).is_none() {
                return false;
            }
        }
        Call::Label(name, label) => match all.get_mut(&name.to_string()) {
            Some((.., labels)) => {
                labels.insert("l".into(), label.to_string());
            }
            None => return false,
        },
    }
    true
}

fn real(all: &mut Snapshots, call: &Call) -> Result<(), Refusal> {
    let now = SystemTime::now();
    match call {
        Call::Create(kind, name, parent) => {
            let parent = parent.map(|parent| parent.to_string());
            let name = name.to_string();
            let new = all.plan_create(*kind, &name, parent.as_deref(), Labels::new(), now)?;
            all.put(None, new);
        }
        Call::Commit(key, name) => {
            let (key, name) = (key.to_string(), name.to_string());
            let new = all.plan_commit(&key, &name, None, Labels::new(), now)?;
            all.put(Some(&key), new);
        }
        Call::Remove(name) => {
            let old = all.plan_remove(&name.to_string())?;
            all.forget(&old.name);
        }
        Call::Label(name, label) => {
            let labels = Labels::from([("l".to_owned(), label.to_string())]);
            let name = name.to_string();
            let new = all.plan_update(&name, &labels, &["labels.l".to_owned()], now)?;
            all.put(Some(&name), new);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn random_calls_agree_with_a_naive_model(calls in calls()) {
        let mut expected = Naive::new();
        let mut all = Snapshots::default();
        let mut ids = std::collections::HashSet::new();
        for call in &calls {
            let before: Vec<u64> = all.iter().map(|snapshot| snapshot.id).collect();
            prop_assert_eq!(real(&mut all, call).is_ok(), naive(&mut expected, call), "{:?}", call);
            let found: Naive = all
                .iter()
                .map(|one| (one.name.clone(), (one.kind, one.parent.clone(), one.labels.clone())))
                .collect();
            prop_assert_eq!(&found, &expected);
            for snapshot in all.iter().filter(|snapshot| !before.contains(&snapshot.id)) {
                prop_assert!(ids.insert(snapshot.id), "an id was given twice");
            }
            for snapshot in all.iter() {
                let lineage = all.lineage(&snapshot.name).unwrap();
                prop_assert!(lineage[1..].iter().all(|parent| parent.kind == SnapshotKind::Committed));
            }
        }
    }
}

#[test]
fn refusals_have_the_kind_that_containerd_decides_by() {
    let mut all = Snapshots::default();
    let now = SystemTime::now();
    let none = Labels::new;
    let active = all.plan_create(SnapshotKind::Active, "a", None, none(), now).unwrap();
    all.put(None, active);
    let over_active = all.plan_create(SnapshotKind::View, "v", Some("a"), none(), now);
    assert!(matches!(over_active, Err(Refusal::Invalid(_))));
    let over_none = all.plan_create(SnapshotKind::View, "v", Some("x"), none(), now);
    assert!(matches!(over_none, Err(Refusal::NotFound(_))));
    let again = all.plan_create(SnapshotKind::View, "a", None, none(), now);
    assert!(matches!(again, Err(Refusal::Exists(_))));
    assert!(matches!(all.plan_commit("a", "a", None, none(), now), Err(Refusal::Exists(_))));
    assert!(matches!(all.plan_commit("x", "b", None, none(), now), Err(Refusal::NotFound(_))));
    let rebased = all.plan_commit("a", "b", Some("p"), none(), now);
    assert!(matches!(rebased, Err(Refusal::Precondition(_))));
    let committed = all.plan_commit("a", "b", None, none(), now).unwrap();
    all.put(Some("a"), committed);
    assert!(matches!(all.plan_commit("b", "c", None, none(), now), Err(Refusal::Precondition(_))));
    let child = all.plan_create(SnapshotKind::View, "v", Some("b"), none(), now).unwrap();
    all.put(None, child);
    let busy = all.plan_remove("b").unwrap_err();
    assert!(matches!(&busy, Refusal::Precondition(what) if what.contains("remove")), "{busy}");
    let path = ["parent".to_owned()];
    assert!(matches!(all.plan_update("b", &none(), &path, now), Err(Refusal::Invalid(_))));
    assert!(matches!(
        all.plan_create(SnapshotKind::View, "", None, none(), now),
        Err(Refusal::Invalid(_))
    ));
    let big = Labels::from([("k".to_owned(), "v".repeat(1 << 20))]);
    assert!(matches!(
        all.plan_create(SnapshotKind::View, "w", None, big, now),
        Err(Refusal::Invalid(_))
    ));
}

#[test]
fn an_update_changes_the_named_labels_alone() {
    let mut all = Snapshots::default();
    let now = SystemTime::now();
    let labels = |pairs: &[(&str, &str)]| -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let before = labels(&[("a.b", "1"), ("c", "2"), ("d", "3")]);
    let new = all.plan_create(SnapshotKind::Active, "s", None, before, now).unwrap();
    all.put(None, new);
    let wanted = labels(&[("a.b", "9"), ("d", "9")]);
    let paths = ["labels.a.b".to_owned(), "labels.c".to_owned()];
    let changed = all.plan_update("s", &wanted, &paths, now).unwrap();
    assert_eq!(changed.labels, labels(&[("a.b", "9"), ("d", "3")]));
    for paths in [&[][..], &["labels".to_owned()]] {
        assert_eq!(all.plan_update("s", &wanted, paths, now).unwrap().labels, wanted);
    }
}
