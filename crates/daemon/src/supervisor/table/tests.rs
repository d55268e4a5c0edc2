use std::{collections::BTreeSet, os::unix::net::UnixStream};

use burgeon_block::{Error, ErrorKind};
use burgeon_frontend::Slots;
use serde_json::json;
use testkit::Rng;

use super::{HELPERS_MAX, MountEntry, MountRecord, Question, Recording, Serving, Table, ToDo};
use crate::{
    id::MountId,
    ipc::{
        link::{FromServer, ToServer, Understands},
        wire,
    },
};

/// A mount over ublk, handed out, whose server has not answered yet.
pub(in crate::supervisor) fn entry(id: MountId) -> MountEntry {
    let record = json!({
        "format": 1, "image": "image", "digest": "00".repeat(32), "target": "/at",
        "writes": { "kind": "read-only" }, "fsid": null, "data_device": null, "loops": [],
        "data_bytes": 0, "growth": null,
        "attach": {
            "id": id.to_string(), "seed": "/s", "cache": "/c", "store": "/store", "references": true,
            "fsid": "00000000-0000-0000-0000-000000000001", "fill": false,
            "transport": { "kind": "ublk", "number": 7 },
        },
    });
    let record = serde_json::from_value::<MountRecord>(record).unwrap();
    let entry = MountEntry::new(record, None, Slots::create().unwrap());
    MountEntry { handed_out: true, ..entry }
}

/// A table with one mount, and the server's end of its link.
fn set_up(refreshes: bool) -> (Table, UnixStream, MountId) {
    let mut table = Table::default();
    let (link, server) = UnixStream::pair().unwrap();
    let id = "0a1b2c3d".parse().unwrap();
    table.mounts.insert(id, entry(id));
    table.connect(
        link,
        None,
        Understands { refreshes, opener: false, cache: false, places: false },
    );
    (table, server, id)
}

/// The numbers in an `Attach` and in a `Refresh` that the server has received.
fn told(server: &UnixStream) -> (Option<u64>, Option<u64>) {
    match wire::receive::<ToServer>(server).unwrap().unwrap().0 {
        ToServer::Attach { number, .. } => (number, None),
        ToServer::Refresh { number, .. } => (None, Some(number)),
        other => panic!("{other:?}"),
    }
}

fn answer(id: MountId, number: Option<u64>, error: Option<&str>, served: bool) -> FromServer {
    let error = error.map(|what| Error::new(ErrorKind::Corrupt, what).into());
    FromServer::Attached { id, number, error, served, refused: false, opener: None }
}

fn refreshed(id: MountId, number: u64, error: Option<&str>) -> FromServer {
    let error = error.map(|what| Error::new(ErrorKind::Corrupt, what).into());
    FromServer::Refreshed { id, number, error }
}

#[test]
fn an_answer_settles_its_own_refresh() {
    let (mut table, server, id) = set_up(true);
    let attached = told(&server).0;
    table.handle_message(answer(id, attached, None, true));
    let [first, second] = [table.refresh(id).unwrap(), table.refresh(id).unwrap()];
    assert_eq!([told(&server).1, told(&server).1], [Some(first), Some(second)]);
    // The second succeeds and is answered first.
    table.handle_message(refreshed(id, second, None));
    assert!(table.mounts[&id].refreshes[&first].is_none(), "it is not answered yet");
    table.handle_message(refreshed(id, first, Some("the map")));
    assert!(table.mounts[&id].refreshes[&first].as_ref().unwrap().is_err());
    assert!(table.mounts[&id].refreshes[&second].as_ref().unwrap().is_ok());
    assert!(matches!(table.mounts[&id].serving, Serving::Yes), "it is served all the while");
}

/// Has the table take a question for a helper; `None` if it refuses.
fn ask_helper(table: &mut Table, number: u64) -> Option<Question> {
    let (helper, registry) = ("pass".to_owned(), "r.example".to_owned());
    match table.handle_message(FromServer::AskHelper { number, helper, registry })? {
        ToDo::AskHelper { question, helper, registry } => {
            assert_eq!((&*helper, &*registry), ("pass", "r.example"));
            Some(question)
        }
        other => panic!("{other:?}"),
    }
}

/// The next answer of a helper that the server receives.
fn helper_said(server: &UnixStream) -> (u64, Result<String, String>) {
    loop {
        match wire::receive::<ToServer>(server).unwrap().unwrap().0 {
            ToServer::HelperSaid { number, said } => return (number, said),
            ToServer::Attach { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_helper_answers_the_server_that_has_asked_and_no_other() {
    let (mut table, server, _) = set_up(true);
    let said = |password: &str| Ok(password.to_owned());
    let [first, second] = [4, 5].map(|number| ask_helper(&mut table, number).unwrap());
    table.helper_said(second, said("b"));
    table.helper_said(first, said("a"));
    assert_eq!([helper_said(&server), helper_said(&server)], [(5, said("b")), (4, said("a"))]);
    // The next server counts from the beginning, and gets no answer of the last one's.
    let late = ask_helper(&mut table, 1).unwrap();
    let (link, next) = UnixStream::pair().unwrap();
    table.connect(link, None, Understands::ALL);
    let own = ask_helper(&mut table, 1).unwrap();
    table.helper_said(late, said("of another registry"));
    table.helper_said(own, said("c"));
    assert_eq!(helper_said(&next), (1, said("c")));
}

#[test]
fn helpers_that_run_at_once_are_bounded() {
    let (mut table, server, _) = set_up(true);
    let run: Vec<_> = (0..HELPERS_MAX as u64).map(|it| ask_helper(&mut table, it)).collect();
    assert_eq!(ask_helper(&mut table, 100), None);
    let (number, refusal) = helper_said(&server);
    assert!(number == 100 && refusal.unwrap_err().contains("too many"));
    table.helper_said(run[0].unwrap(), Ok(String::new()));
    assert!(ask_helper(&mut table, 101).is_some());
    assert_eq!(ask_helper(&mut table, 102), None);
}

#[test]
fn an_answer_to_an_earlier_attach_says_nothing() {
    let (mut table, server, id) = set_up(true);
    let first = told(&server).0;
    table.attach(id);
    let second = told(&server).0;
    assert_eq!(table.handle_message(answer(id, first, None, true)), None);
    assert!(matches!(table.mounts[&id].serving, Serving::Awaited));
    let last = table.handle_message(answer(id, second, Some("no map"), false));
    assert_eq!(last, Some(ToDo::Mend(id)));
    assert!(matches!(table.mounts[&id].serving, Serving::No(_)));
}

#[test]
fn the_next_server_settles_refreshes_of_a_dead_one() {
    let (mut table, server, id) = set_up(true);
    told(&server);
    let refresh = table.refresh(id).unwrap();
    drop(server);
    let (link, server) = UnixStream::pair().unwrap();
    table.connect(
        link,
        None,
        Understands { refreshes: true, opener: false, cache: false, places: false },
    );
    let number = told(&server).0;
    assert!(table.mounts[&id].refreshes[&refresh].is_none());
    table.handle_message(answer(id, number, None, true));
    assert!(matches!(table.mounts[&id].refreshes[&refresh], Some(Ok(()))));
}

#[test]
fn a_server_of_the_previous_version_gets_another_attach() {
    let (mut table, server, id) = set_up(false);
    told(&server);
    table.handle_message(answer(id, None, None, true));
    let refresh = table.refresh(id).unwrap();
    assert!(told(&server).0.is_some(), "it knows nothing but Attach");
    table.handle_message(answer(id, None, Some("the map"), true));
    assert!(matches!(table.mounts[&id].refreshes[&refresh], Some(Err(_))));
    assert!(matches!(table.mounts[&id].serving, Serving::Yes));
}

#[test]
fn recording_ends_with_its_result_or_its_error() {
    let (mut table, server, id) = set_up(true);
    told(&server);
    let recorded = |on, cut_short, error: Option<&str>| FromServer::Recorded {
        id,
        on,
        cut_short,
        error: error.map(|what| Error::new(ErrorKind::Corrupt, what).into()),
    };
    table.handle_message(recorded(true, false, None));
    assert!(matches!(table.mounts[&id].recording, Recording::On));
    table.handle_message(recorded(false, true, None));
    assert!(matches!(table.mounts[&id].recording, Recording::Done(true)));
    table.handle_message(recorded(true, false, Some("no memory")));
    assert!(matches!(table.mounts[&id].recording, Recording::Failed(_)));
    // A new server records nothing.
    let (link, _server) = UnixStream::pair().unwrap();
    table.connect(link, None, Understands::ALL);
    assert!(matches!(table.mounts[&id].recording, Recording::Off));
}

#[test]
fn the_end_of_a_mount_and_reports_leave_the_mounts_alone() {
    let (mut table, server, id) = set_up(true);
    told(&server);
    let ended = table.handle_message(FromServer::Ended { id, is_damaged: true });
    assert_eq!(ended, Some(ToDo::Release { id, is_damaged: true }));
    let report = json!({
        "message": "report",
        "mounts": [{
            "id": id.to_string(), "materialised_bytes": 7, "last_source_error": null,
            "cache": {
                "state": "writing", "reason": null, "read_errors": 0, "write_errors": 0,
                "uncached_chunks": 0, "in_flight": 0, "waiting_readers": 0,
            },
            "fill": null, "profile": null, "pinned": null, "area": null, "over_limit_reads": 0,
        }],
    });
    for count in 1..3 {
        let report = serde_json::from_value(report.clone()).unwrap();
        assert_eq!(table.handle_message(report), None);
        assert_eq!((table.reports[&id].materialised_bytes, table.report_count), (7, count));
    }
    for message in [FromServer::Adopted { refreshes: true, version: 9 }, FromServer::Unknown] {
        assert_eq!(table.handle_message(message), None);
    }
    assert!(table.mounts.contains_key(&id), "its folder is removed first");
    let stranger = "0000000a".parse().unwrap();
    assert_eq!(table.handle_message(answer(stranger, None, None, true)), None);
}

/// A server that answers its messages in the order that the test tells it to, also after it has
/// died for the table, which then has another one.
struct FakeServer {
    stream: UnixStream,
    /// It numbers its answers, and understands `Refresh`.
    is_numbered: bool,
    told: Vec<(MountId, Told)>,
}

enum Told {
    Attach(Option<u64>),
    Refresh(u64),
}

impl FakeServer {
    /// Connects a new server to the table, in place of the previous one.
    fn start(table: &mut Table, is_numbered: bool) -> Self {
        let (link, stream) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        table.connect(
            link,
            None,
            Understands { refreshes: is_numbered, opener: false, cache: false, places: false },
        );
        Self { stream, is_numbered, told: Vec::new() }
    }

    /// Receives messages, but does not answer.
    fn listen(&mut self) {
        while let Ok(Some((message, _))) = wire::receive::<ToServer>(&self.stream) {
            self.told.push(match message {
                ToServer::Attach { number, attach, .. } => (attach.id, Told::Attach(number)),
                ToServer::Refresh { number, id } if self.is_numbered => (id, Told::Refresh(number)),
                other => panic!("{other:?}"),
            });
        }
    }

    /// Answers the received message at `place`, if there is one. Returns the mount if the table
    /// takes it for the answer to the mount's last `Attach`.
    fn answer(&mut self, table: &mut Table, place: usize, how: How) -> Option<MountId> {
        let (id, told) = self.told.remove(place);
        let error = (how != How::Well).then(|| Error::new(ErrorKind::Corrupt, "no map").into());
        match told {
            Told::Attach(number) => {
                let mount = table.mounts.get(&id);
                let is_last = mount.is_some_and(|mount| number == Some(mount.attach_number));
                let number = number.filter(|_| self.is_numbered);
                let refused = how == How::Refused;
                let to_do = table.handle_message(FromServer::Attached {
                    id,
                    number,
                    error,
                    served: false,
                    refused,
                    opener: None,
                });
                let taken = to_do == Some(ToDo::Mend(id));
                assert_eq!(taken, is_last || (number.is_none() && table.mounts.contains_key(&id)));
                taken.then_some(id)
            }
            Told::Refresh(number) => {
                table.handle_message(FromServer::Refreshed { id, number, error });
                None
            }
        }
    }

    /// Answers everything well, in order.
    fn answer_all(&mut self, table: &mut Table) {
        self.listen();
        while !self.told.is_empty() {
            self.answer(table, 0, How::Well);
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Well,
    Not,
    Refused,
}

#[test]
fn a_table_settles_after_any_behaviour_of_servers() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let mut table = Table::default();
        let mut server = FakeServer::start(&mut table, true);
        // Their last answers come late.
        let mut dead: Vec<FakeServer> = Vec::new();
        let ids: Vec<MountId> = (1..=4).map(|n| format!("{n:08x}").parse().unwrap()).collect();
        let mut asked = Vec::new();
        // The mounts that the present server says it serves.
        let mut served = BTreeSet::new();
        for _ in 0..80 {
            let id = *rng.pick(&ids);
            let is_here = table.mounts.contains_key(&id);
            let how = *rng.pick(&[How::Well, How::Well, How::Not, How::Refused]);
            match rng.below(14) {
                0..=2 if !is_here => table.add(entry(id)),
                0 if is_here => {
                    table.mounts.remove(&id);
                    served.remove(&id);
                }
                1..=2 => table.attach(id),
                3..=5 => asked.extend(table.refresh(id).map(|number| (id, number))),
                6 => {
                    let next = FakeServer::start(&mut table, rng.below(4) > 0);
                    let mut last = std::mem::replace(&mut server, next);
                    last.listen();
                    // Nothing tells answers without a number from those of the next server.
                    dead.extend(Some(last).filter(|last| last.is_numbered));
                    served.clear();
                }
                7..=8 => {
                    let late = dead.iter_mut().rfind(|server| !server.told.is_empty());
                    if let Some(late) = late {
                        let place = rng.below(late.told.len() as u64) as usize;
                        assert_eq!(late.answer(&mut table, place, how), None, "seed {seed}");
                    }
                }
                _ => {
                    server.listen();
                    if !server.told.is_empty() {
                        let last = if server.is_numbered { server.told.len() } else { 1 };
                        let place = rng.below(last as u64) as usize;
                        let taken = server.answer(&mut table, place, how);
                        taken.map(|id| match how {
                            How::Well => served.insert(id),
                            _ => served.remove(&id),
                        });
                    }
                }
            }
            for (id, mount) in &table.mounts {
                assert!(mount.attach_answered <= mount.attach_number, "seed {seed}");
                let is_served = matches!(mount.serving, Serving::Yes);
                assert!(!is_served || served.contains(id), "seed {seed}: {id} is not served");
            }
        }
        server.answer_all(&mut table);
        let awaited =
            table.mounts.values().filter(|mount| matches!(mount.serving, Serving::Awaited));
        assert_eq!(awaited.count(), 0, "seed {seed}");
        // A refused mount is served as soon as the server can.
        ids.iter().for_each(|id| table.attach(*id));
        server.answer_all(&mut table);
        for (id, mount) in &table.mounts {
            assert!(matches!(mount.serving, Serving::Yes), "seed {seed}: {id} is not served");
            assert_eq!(mount.attach_answered, mount.attach_number, "seed {seed}: {id}");
        }
        for (id, number) in asked {
            // A mount that ended and came back has no earlier waiters.
            let Some(mount) = table.mounts.get(&id) else { continue };
            let result = mount.refreshes.get(&number);
            assert!(!matches!(result, Some(None)), "seed {seed}: {number} of {id} waits for ever");
        }
    }
}
