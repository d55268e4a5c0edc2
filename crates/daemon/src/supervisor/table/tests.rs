use std::{collections::BTreeMap, os::unix::net::UnixStream};

use burgeon_block::{Error, ErrorKind};
use burgeon_frontend::Slots;
use serde_json::json;

use super::{Attached, Entry, MountRecord, Recording, Serving, Table};
use crate::{
    id::MountId,
    ipc::{link::ToServer, wire},
};

fn entry() -> Entry {
    let record = json!({
        "format": 1, "image": "image", "digest": "00".repeat(32), "target": "/at",
        "writes": { "kind": "read-only" }, "fsid": null, "data_device": null, "loops": [],
        "data_bytes": 0, "growth": null,
        "attach": {
            "id": "0a1b2c3d", "seed": "/s", "cache": "/c", "store": "/store", "references": true,
            "fsid": "00000000-0000-0000-0000-000000000001", "fill": false,
            "transport": { "kind": "ublk", "number": 7 },
        },
    });
    Entry {
        record: serde_json::from_value::<MountRecord>(record).unwrap(),
        fuse: None,
        slots: Slots::create().unwrap(),
        serving: Serving::Awaited,
        attach_number: 0,
        attach_answered: 0,
        refreshes: BTreeMap::new(),
        mending: false,
        handed_out: true,
        ended: false,
        lost: false,
        stopped: None,
        revival: None,
        reviving: false,
        recording: Recording::Off,
        growing: false,
        growth_failed: None,
        growth_ended: false,
        _writes_lock: None,
    }
}

/// A table with one mount, and the server's end of its link.
fn set_up(refreshes: bool) -> (Table, UnixStream, MountId) {
    let mut table = Table::default();
    let (link, server) = UnixStream::pair().unwrap();
    let entry = entry();
    let id = entry.record.attach.id;
    table.mounts.insert(id, entry);
    table.connect(link, None, refreshes);
    (table, server, id)
}

/// What a server is told: the numbers of an `Attach`, of a `Refresh`.
fn told(server: &UnixStream) -> (Option<u64>, Option<u64>) {
    match wire::receive::<ToServer>(server).unwrap().unwrap().0 {
        ToServer::Attach { number, .. } => (number, None),
        ToServer::Refresh { number, .. } => (None, Some(number)),
        other => panic!("{other:?}"),
    }
}

fn answer(id: MountId, number: Option<u64>, error: Option<&str>, served: bool) -> Attached {
    let error = error.map(|what| Error::new(ErrorKind::Corrupt, what).into());
    Attached { id, number, error, served, refused: false }
}

#[test]
fn an_answer_settles_what_it_was_given_to() {
    let (mut table, server, id) = set_up(true);
    let attached = told(&server).0;
    table.attached(answer(id, attached, None, true));
    let [first, second] = [table.refresh(id).unwrap(), table.refresh(id).unwrap()];
    assert_eq!([told(&server).1, told(&server).1], [Some(first), Some(second)]);
    // The second goes well and is answered first.
    table.refreshed(id, second, None);
    assert!(table.mounts[&id].refreshes[&first].is_none(), "it is not answered yet");
    let failure = Error::new(ErrorKind::Corrupt, "the map").into();
    table.refreshed(id, first, Some(failure));
    assert!(table.mounts[&id].refreshes[&first].as_ref().unwrap().is_err());
    assert!(table.mounts[&id].refreshes[&second].as_ref().unwrap().is_ok());
    assert!(matches!(table.mounts[&id].serving, Serving::Yes), "it is served all the while");
}

#[test]
fn an_answer_to_an_earlier_attach_says_nothing() {
    let (mut table, server, id) = set_up(true);
    let first = told(&server).0;
    table.attach(id);
    let second = told(&server).0;
    assert!(!table.attached(answer(id, first, None, true)));
    assert!(matches!(table.mounts[&id].serving, Serving::Awaited));
    assert!(table.attached(answer(id, second, Some("no map"), false)));
    assert!(matches!(table.mounts[&id].serving, Serving::No(_)));
}

#[test]
fn the_next_server_settles_refreshes_that_a_dead_one_was_told_of() {
    let (mut table, server, id) = set_up(true);
    told(&server);
    let refresh = table.refresh(id).unwrap();
    drop(server);
    let (link, server) = UnixStream::pair().unwrap();
    table.connect(link, None, true);
    let number = told(&server).0;
    assert!(table.mounts[&id].refreshes[&refresh].is_none());
    table.attached(answer(id, number, None, true));
    assert!(matches!(table.mounts[&id].refreshes[&refresh], Some(Ok(()))));
}

#[test]
fn a_server_of_the_version_before_is_told_by_another_attach() {
    let (mut table, server, id) = set_up(false);
    told(&server);
    table.attached(answer(id, None, None, true));
    let refresh = table.refresh(id).unwrap();
    assert!(told(&server).0.is_some(), "it knows nothing but Attach");
    table.attached(answer(id, None, Some("the map"), true));
    assert!(matches!(table.mounts[&id].refreshes[&refresh], Some(Err(_))));
    assert!(matches!(table.mounts[&id].serving, Serving::Yes));
}
