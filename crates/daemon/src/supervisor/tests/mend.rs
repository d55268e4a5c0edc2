use super::Supervised;
use crate::supervisor::table::Serving;

#[test]
fn a_mount_that_cannot_be_served_is_attached_again_until_it_is() {
    let supervised = Supervised::new();
    let id = supervised.add(1, |_| ());
    let server = supervised.connect();
    let (mut last, _) = server.told_to_attach(id);
    for refused in [true, false] {
        server.cannot_serve(id, last, refused);
        let (next, refuse) = server.told_to_attach(id);
        assert!(next > last && refuse);
        assert!(supervised.supervisor.table().mounts[&id].mending);
        last = next;
    }
    // An answer to an earlier attempt settles nothing.
    server.serves(id, last - 1);
    server.serves(id, last);
    assert!(supervised.comes(|table| !table.mounts[&id].mending), "its thread ends");
    let table = supervised.supervisor.table();
    assert!(matches!(table.mounts[&id].serving, Serving::Yes));
    assert_eq!(table.mounts[&id].attach_answered, last);
}

#[test]
fn only_a_mount_in_use_that_fails_is_mended_and_by_one_thread() {
    let supervised = Supervised::new();
    let supervisor = &supervised.supervisor;
    let corrupt = || burgeon_block::Error::new(burgeon_block::ErrorKind::Corrupt, "the map");
    let unfinished = supervised.add(1, |entry| {
        entry.handed_out = false;
        entry.serving = Serving::Refusing(corrupt());
    });
    let served = supervised.add(2, |entry| entry.serving = Serving::Yes);
    let begun = supervised.add(3, |entry| {
        entry.serving = Serving::No(corrupt());
        entry.mending = true;
    });
    for id in [unfinished, served, begun] {
        supervisor.mend_if_needed(id);
    }
    let mending = |id| supervisor.table().mounts[&id].mending;
    assert_eq!([unfinished, served, begun].map(mending), [false, false, true]);
    // A thread for it would have ended the repair, which nobody does here.
    supervisor.table().mounts.remove(&begun);
    supervisor.mend_if_needed(begun);
}

#[test]
fn the_repair_ends_with_its_mount() {
    let supervised = Supervised::new();
    let id = supervised.add(1, |_| ());
    let server = supervised.connect();
    let (number, _) = server.told_to_attach(id);
    server.cannot_serve(id, number, true);
    server.told_to_attach(id);
    supervised.supervisor.table().mounts.remove(&id);
    supervised.supervisor.changed.notify_all();
    // The thread has the other reference to the supervisor, beside the one that listens.
    let references = || std::sync::Arc::strong_count(&supervised.supervisor);
    assert!(testkit::wait_until(super::PATIENCE, || references() == 2), "{}", references());
}
