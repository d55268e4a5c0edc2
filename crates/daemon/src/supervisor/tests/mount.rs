use std::thread;

use burgeon_block::ErrorKind;

use super::{FakeServer, Supervised, names, request};
use crate::{
    id::MountId,
    ipc::{
        link::{FromServer, ToServer},
        protocol::{SproutRequest, WritesRequest},
    },
    state::{record::Transport, space::LIMIT_MIN, writes},
};

#[test]
fn a_mount_of_an_unknown_image_fails_and_leaves_nothing() {
    let supervised = Supervised::new();
    let sprout = SproutRequest {
        name: Some("w".to_owned()),
        limit: Some(LIMIT_MIN),
        ..SproutRequest::default()
    };
    for writes in [WritesRequest::ReadOnly, WritesRequest::Kept(sprout)] {
        let failed = supervised.supervisor.mount(request("image", writes)).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::NotFound, "{failed}");
        assert!(failed.to_string().contains("there is no image"), "{failed}");
        assert_eq!(names(&supervised.state().mounts()), [""; 0]);
        assert_eq!(names(&supervised.state().grants()), [""; 0]);
        assert!(supervised.supervisor.table().mounts.is_empty());
    }
    drop(writes::take(supervised.state(), "w").unwrap());
}

#[test]
fn no_mount_is_made_by_a_daemon_that_ends() {
    let supervised = Supervised::new();
    supervised.supervisor.table().end_when_idle = true;
    let refused = supervised.supervisor.mount(request("image", WritesRequest::ReadOnly));
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("the daemon is ending"), "{refused}");
    assert_eq!(names(&supervised.state().mounts()), [""; 0]);
}

#[test]
fn a_mount_waits_for_the_answer_of_its_server() {
    let supervised = Supervised::new();
    let supervisor = &supervised.supervisor;
    let server = supervised.connect();
    assert!(supervised.comes(|table| table.link.is_some()));
    let new = |number| {
        let id = supervised.add(number, |entry| entry.handed_out = false);
        let (attach, refuse) = server.told_to_attach(id);
        assert!(!refuse, "an unfinished mount fails instead");
        (id, attach)
    };
    let (served, number) = new(1);
    thread::scope(|scope| {
        let waits = scope.spawn(|| supervisor.await_serving(served));
        server.serves(served, number);
        waits.join().unwrap().unwrap();
    });
    let (damaged, number) = new(2);
    server.cannot_serve(damaged, number, true);
    let failed = supervisor.await_serving(damaged).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Corrupt);
    assert!(failed.to_string().contains("the map is damaged"), "{failed}");
    supervisor.await_taken_on(damaged).unwrap();
    let (ended, _) = new(3);
    supervisor.abandon(ended);
    let failed = supervisor.await_serving(ended).unwrap_err();
    assert!(failed.to_string().contains("ended while it was made"), "{failed}");
}

/// Takes the question whether the server of `id` lives; returns its number.
fn asked(server: &FakeServer, id: MountId) -> u64 {
    match server.receive() {
        ToServer::Refresh { number, id: of } if of == id => number,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_new_device_is_read_only_while_its_first_server_lives() {
    let supervised = Supervised::new();
    let supervisor = &supervised.supervisor;
    let server = supervised.connect();
    assert!(supervised.comes(|table| table.link.is_some()));
    let id = supervised.add(1, |entry| {
        entry.handed_out = false;
        entry.record.attach.transport = Transport::Ublk { number: 0 };
    });
    let (attach, _) = server.told_to_attach(id);
    server.serves(id, attach);
    supervisor.await_serving(id).unwrap();
    thread::scope(|scope| {
        let heard = scope.spawn(|| supervisor.hear_from_server(id, attach));
        let number = asked(&server, id);
        server.say(&FromServer::Refreshed { id, number, error: None });
        heard.join().unwrap().unwrap();
    });
    assert!(!supervisor.has_lost_first_server(id));

    // It dies, and does not answer.
    let died = thread::scope(|scope| {
        let heard = scope.spawn(|| supervisor.hear_from_server(id, attach));
        asked(&server, id);
        drop(server);
        heard.join().unwrap().unwrap_err()
    });
    assert_eq!(died.kind(), ErrorKind::Unavailable);
    assert!(supervised.comes(|table| table.link.is_none()));
    assert!(supervisor.has_lost_first_server(id));

    // Another one's answer says nothing of the first.
    let next = supervised.connect();
    let (second, _) = next.told_to_attach(id);
    next.serves(id, second);
    assert!(supervised.comes(|table| table.mounts[&id].attach_answered == second));
    assert_eq!(supervisor.hear_from_server(id, attach).unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(supervisor.has_lost_first_server(id));
}
