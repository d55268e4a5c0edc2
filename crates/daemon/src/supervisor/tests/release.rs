use std::{fs, thread};

use burgeon_block::ErrorKind;

use super::{PATIENCE, Supervised, names};
use crate::{
    id::MountId,
    ipc::link::FromServer,
    state::{
        files,
        grants::{self, Grants},
        record::{SproutState, WritesState},
        writes,
    },
};

/// Makes the files of a mount that is served.
fn make_files(supervised: &Supervised, id: MountId) {
    let state = supervised.state();
    fs::write(state.mount(id).join("seed"), "a copy of the seed").unwrap();
    fs::write(state.recorded_reads(id), "reads").unwrap();
    grants::publish(state, id, &Grants::default()).unwrap();
}

#[test]
fn a_mount_that_the_kernel_has_closed_is_cleaned_up_and_its_waiters_are_told() {
    let supervised = Supervised::new();
    let (state, supervisor) = (supervised.state(), &supervised.supervisor);
    let writes = WritesState::Sprout(SproutState {
        name: Some("w".to_owned()),
        path: writes::folder(state, "w").join("sprout"),
        limit: 1 << 30,
        reserved: 1 << 30,
        thin: false,
    });
    fs::create_dir(writes::folder(state, "w")).unwrap();
    writes::publish(state, &writes::tests::record("w")).unwrap();
    let lock = writes::take(state, "w").unwrap();
    let id = supervised.add(1, |entry| {
        entry.record.writes = writes;
        entry._writes_lock = Some(lock);
    });
    let other = supervised.add(2, |_| ());
    make_files(&supervised, id);
    make_files(&supervised, other);
    let server = supervised.connect();
    server.told_to_attach(id);
    assert!(writes::take(state, "w").is_err(), "they are mounted");
    thread::scope(|scope| {
        let waits = scope.spawn(|| supervisor.await_release(id, PATIENCE));
        server.say(&FromServer::Ended { id, is_damaged: false });
        waits.join().unwrap().unwrap();
    });
    assert!(!supervised.has(id) && supervised.has(other));
    assert_eq!(names(&state.mounts()), [other.to_string()]);
    assert!(grants::find(state, id).is_err() && grants::find(state, other).is_ok());
    assert!(!state.recorded_reads(id).exists() && state.recorded_reads(other).exists());
    drop(writes::take(state, "w").unwrap());
    let recycled = fs::read_to_string(writes::folder(state, "w").join("recycled-seed")).unwrap();
    assert_eq!(recycled, "a copy of the seed");
}

#[test]
fn a_mount_that_is_not_handed_out_is_left_to_the_thread_that_makes_it() {
    let supervised = Supervised::new();
    let supervisor = &supervised.supervisor;
    let id = supervised.add(1, |entry| entry.handed_out = false);
    make_files(&supervised, id);
    supervisor.release(id);
    assert!(supervised.has(id) && supervised.state().mount(id).exists());
    assert!(supervisor.table().mounts[&id].ended);
    // It was handed out nevertheless: now its end counts.
    supervisor.handed_out(id);
    assert!(!supervised.has(id) && !supervised.state().mount(id).exists());
}

#[test]
fn a_mount_is_released_once_and_a_lost_one_never() {
    let supervised = Supervised::new();
    let supervisor = &supervised.supervisor;
    let lost = supervised.add(1, |entry| entry.lost = true);
    let releasing = supervised.add(2, |entry| entry.releasing = true);
    for id in [lost, releasing] {
        supervisor.release(id);
        assert!(supervised.has(id) && supervised.state().mount(id).exists());
    }
    let refused = supervisor.await_release(lost, std::time::Duration::ZERO).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("still holds it"), "{refused}");
    assert_eq!(supervisor.table().release_waiters, 0);
}

/// Nothing reports that the kernel has released a file system.
#[test]
fn a_shutdown_waits_for_mounts_that_have_ended() {
    let supervised = Supervised::new();
    let supervisor = &supervised.supervisor;
    let ended = supervised.add(1, |_| ());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(supervised.comes(|table| table.release_waiters == 1), "it waits");
            supervisor.release(ended);
        });
        supervisor.await_unmounted(testkit::PATIENCE);
    });
    assert!(!supervised.has(ended));
    supervisor.try_stop(false).unwrap();
}

#[test]
fn an_abandoned_mount_leaves_nothing_and_gives_its_writes_back() {
    let supervised = Supervised::new();
    let state = supervised.state();
    let lock = writes::take(state, "w").unwrap();
    let id = supervised.add(1, |entry| {
        entry.handed_out = false;
        entry._writes_lock = Some(lock);
    });
    make_files(&supervised, id);
    supervised.supervisor.abandon(id);
    assert!(!supervised.has(id));
    assert_eq!((names(&state.mounts()), names(&state.grants())), (Vec::new(), Vec::new()));
    drop(writes::take(state, "w").unwrap());
}

#[test]
fn a_damaged_map_is_doubted_by_the_next_mount() {
    let supervised = Supervised::new();
    let seed = supervised.state().root().join("image");
    files::make_folder(&seed).unwrap();
    let id = supervised.add(1, |entry| entry.record.attach.seed = seed.clone());
    let server = supervised.connect();
    server.told_to_attach(id);
    server.say(&FromServer::Ended { id, is_damaged: true });
    assert!(supervised.comes(|table| !table.mounts.contains_key(&id)));
    assert_eq!(names(&seed), ["doubted"]);
}
