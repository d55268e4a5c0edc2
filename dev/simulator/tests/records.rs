//! User data through power failures: a record is the old one or the new one, what it names is
//! there before it is, and what a mount promised is kept. With the ways to get it wrong.

#![allow(clippy::unwrap_used)]

use simulator::{Folder, Step, publish_survives};

const TRIES: u64 = 200;

fn bytes(byte: u8) -> Vec<u8> {
    vec![byte; 3000]
}

/// A folder that holds the old record, durably.
fn with_record() -> Folder {
    let mut folder = Folder::default();
    let steps = [Step::Write("record", bytes(1)), Step::SyncFile("record"), Step::SyncFolder];
    steps.iter().try_for_each(|step| folder.step(step)).unwrap();
    folder
}

fn publish() -> Vec<Step> {
    vec![
        Step::Write("record.new", bytes(2)),
        Step::SyncFile("record.new"),
        Step::Rename("record.new", "record"),
        Step::SyncFolder,
    ]
}

fn old_or_new(steps: &[Step]) -> Result<(), String> {
    publish_survives(&with_record(), steps, TRIES, |folder, done| match folder.get("record") {
        Some(found) if found == bytes(2) => Ok(()),
        Some(found) if found == bytes(1) && done < steps.len() => Ok(()),
        Some(found) if found == bytes(1) => Err("published, but the old one is back".into()),
        Some(_) => Err("neither the old record nor the new one".into()),
        None => Err("no record at all".into()),
    })
}

#[test]
fn a_record_is_the_old_one_or_the_new_one() {
    old_or_new(&publish()).unwrap();
}

#[test]
fn every_way_to_publish_wrongly_is_found() {
    let without = |index: usize| {
        let mut steps = publish();
        steps.remove(index);
        old_or_new(&steps)
    };
    assert!(without(1).is_err(), "the file is not synced");
    assert!(without(3).is_err(), "the folder is not synced");
    let in_place = [Step::Write("record", bytes(2)), Step::SyncFile("record"), Step::SyncFolder];
    assert!(old_or_new(&in_place).is_err(), "the record is overwritten");
}

/// The files that named writes need, in the order in which they are made.
fn make_writes() -> Vec<Step> {
    vec![
        // The image's seed and map, published before.
        Step::Link("image-seed", "seed"),
        Step::Link("image-map", "map"),
        Step::Write("sprout", bytes(0)),
        Step::SyncFile("sprout"),
        Step::SyncFolder,
        Step::Write("record.new", bytes(9)),
        Step::SyncFile("record.new"),
        Step::Rename("record.new", "record"),
        Step::SyncFolder,
        // The user writes and calls fsync.
        Step::Write("sprout", bytes(7)),
        Step::SyncFile("sprout"),
    ]
}

fn writes_are_kept(steps: &[Step]) -> Result<(), String> {
    let mut folder = Folder::default();
    for (name, byte) in [("image-seed", 3), ("image-map", 4)] {
        folder.step(&Step::Write(name, bytes(byte)))?;
        folder.step(&Step::SyncFile(name))?;
    }
    folder.step(&Step::SyncFolder)?;
    publish_survives(&folder, steps, TRIES, |folder, done| {
        let is = |name, byte| folder.get(name) == Some(&bytes(byte)[..]);
        if done == steps.len() && !is("sprout", 7) {
            return Err("what was fsynced is gone".into());
        }
        match folder.get("record") {
            None if done == steps.len() => Err("the record of fsynced writes is gone".into()),
            None => Ok(()),
            Some(record) if record != bytes(9) => Err("the record is damaged".into()),
            Some(_) if !is("seed", 3) || !is("map", 4) => {
                Err("the record names a seed and a map that are not there".into())
            }
            Some(_) if folder.get("sprout").is_none() => Err("there is no sprout".into()),
            Some(_) => Ok(()),
        }
    })
}

#[test]
fn fsynced_writes_of_a_sprout_can_be_mounted_again() {
    writes_are_kept(&make_writes()).unwrap();
}

#[test]
fn every_wrong_order_of_making_writes_is_found() {
    let record_first = {
        let mut steps = make_writes();
        let record: Vec<Step> = steps.drain(5..9).collect();
        steps.splice(0..0, record);
        steps
    };
    assert!(writes_are_kept(&record_first).is_err());
    let no_folder_sync_at_the_end = {
        let mut steps = make_writes();
        steps.remove(8);
        steps
    };
    assert!(writes_are_kept(&no_folder_sync_at_the_end).is_err());
    let record_not_synced = {
        let mut steps = make_writes();
        steps.remove(6);
        steps
    };
    assert!(writes_are_kept(&record_not_synced).is_err());
}
