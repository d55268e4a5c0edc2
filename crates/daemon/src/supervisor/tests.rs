//! The supervisor with a fake server, without root: no kernel mount, no process of Burgeon.
//!
//! A helper is a process of this program, which is the test here: it ends at once, and whoever has
//! asked it gets an error, as when a helper is killed.

mod mend;
mod mount;
mod release;

use std::{
    fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind};
use burgeon_source::Access;

use super::{
    Supervisor, hold::Holder, server_monitor::Running, status_socket::Recent, table,
    table::MountEntry, totals::Counting,
};
use crate::{
    host::cgroup::OwnCgroup,
    id::MountId,
    ipc::{
        link::{FromServer, ToServer, Understands},
        protocol::{MountRequest, Reply, Request, WritesRequest},
        wire,
    },
    state::{files::Lock, paths::StateDir},
};

/// Longest wait for a thread of the supervisor: only a broken one takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A supervisor of its own state directory.
struct Supervised {
    _folder: tempfile::TempDir,
    supervisor: Arc<Supervisor>,
}

impl Supervised {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(&folder.path().join("state")).unwrap();
        let lock = Lock::try_take(&state.lock_file()).unwrap().unwrap();
        let (holder, _) = Holder::find(&state, Vec::new());
        let supervisor = Arc::new(Supervisor {
            counting: Counting::begin(&state),
            recent: Recent::default(),
            state,
            table: Mutex::default(),
            changed: Default::default(),
            cgroup: OwnCgroup::default(),
            holder,
            lock,
            granting: Mutex::default(),
        });
        Self { _folder: folder, supervisor }
    }

    fn state(&self) -> &StateDir {
        &self.supervisor.state
    }

    /// Adds the mount `number`, with a folder, as `change` has it. Its files are those of the named
    /// writes `w`, of which there is no record: they cannot be made again.
    fn add(&self, number: u32, change: impl FnOnce(&mut MountEntry)) -> MountId {
        let id = MountId::from_number(number);
        let mut entry = table::tests::entry(id);
        entry.record.attach.seed = self.state().writes().join("w");
        change(&mut entry);
        fs::create_dir_all(self.state().mount(id)).unwrap();
        self.supervisor.table().add(entry);
        id
    }

    /// Connects a server that says what the test lets it say.
    fn connect(&self) -> FakeServer {
        let (link, stream) = UnixStream::pair().unwrap();
        let understands =
            Understands { refreshes: true, opener: false, cache: false, places: false };
        let running = Running { stream, child: None, pid: None, understands };
        let supervisor = Arc::clone(&self.supervisor);
        thread::spawn(move || supervisor.listen(running));
        link.set_read_timeout(Some(PATIENCE)).unwrap();
        FakeServer(link)
    }

    /// True if `condition` holds within [`PATIENCE`].
    fn comes(&self, mut condition: impl FnMut(&table::Table) -> bool) -> bool {
        testkit::wait_until(PATIENCE, || condition(&self.supervisor.table()))
    }

    fn has(&self, id: MountId) -> bool {
        self.supervisor.table().mounts.contains_key(&id)
    }
}

/// The server's end of its link.
struct FakeServer(UnixStream);

impl FakeServer {
    fn receive(&self) -> ToServer {
        wire::receive(&self.0).unwrap().unwrap().0
    }

    fn say(&self, message: &FromServer) {
        wire::send(&self.0, message, &[]).unwrap();
    }

    /// The number of the next message, which must be an `Attach` of `id`; and whether it tells the
    /// server to refuse the mount's reads if it cannot serve them.
    fn told_to_attach(&self, id: MountId) -> (u64, bool) {
        match self.receive() {
            ToServer::Attach { number: Some(number), refuse, attach, .. } if attach.id == id => {
                (number, refuse)
            }
            other => panic!("{other:?}"),
        }
    }

    fn serves(&self, id: MountId, number: u64) {
        let number = Some(number);
        self.say(&FromServer::Attached {
            id,
            number,
            error: None,
            served: true,
            refused: false,
            opener: None,
        });
    }

    fn cannot_serve(&self, id: MountId, number: u64, refused: bool) {
        let error = Some(Error::new(ErrorKind::Corrupt, "the map is damaged").into());
        let number = Some(number);
        self.say(&FromServer::Attached { id, number, error, served: false, refused, opener: None });
    }
}

/// A request for a mount of `image` of the state directory's store.
pub(super) fn request(image: &str, writes: WritesRequest) -> MountRequest {
    MountRequest {
        image: image.to_owned(),
        digest: None,
        shown: None,
        store: None,
        store_identity: None,
        store_away: false,
        access: Access::default(),
        writes,
        fill: false,
        transport: Default::default(),
        fast: false,
        target: PathBuf::from("/at"),
        virtual_bytes: 0,
        fetch_limit: None,
        profile: Default::default(),
        attributes: Default::default(),
    }
}

/// The names in `folder`, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<_> = entries.filter_map(|it| it.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[test]
fn a_stop_is_refused_while_something_is_mounted_unless_it_is_forced() {
    let supervised = Supervised::new();
    let supervisor = &supervised.supervisor;
    supervised.add(1, |entry| entry.record.target = "/a".into());
    supervised.add(2, |entry| entry.record.target = "/b".into());
    let refused = supervisor.try_stop(false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("still mounted: /a and 1 more;"), "{refused}");
    assert!(!supervisor.table().stopping);
    supervisor.try_stop(true).unwrap();
    assert!(supervisor.table().stopping);
    // A mount that was let go needs no daemon.
    let idle = Supervised::new();
    idle.add(1, |entry| entry.record.plain = true);
    idle.supervisor.try_stop(false).unwrap();
    assert!(idle.supervisor.table().stopping);
}

#[test]
fn a_new_server_is_told_of_every_mount_and_the_end_of_one_is_noticed() {
    let supervised = Supervised::new();
    let ids = [1, 2].map(|number| supervised.add(number, |_| ()));
    let server = supervised.connect();
    let told: Vec<_> = ids.iter().map(|id| server.told_to_attach(*id)).collect();
    assert!(told[0].0 < told[1].0 && told.iter().all(|(_, refuse)| *refuse));
    server.serves(ids[0], told[0].0);
    assert!(supervised.comes(|table| matches!(table.mounts[&ids[0]].serving, table::Serving::Yes)));
    drop(server);
    assert!(supervised.comes(|table| table.link.is_none()));
    // Its successor is told again, under greater numbers.
    let server = supervised.connect();
    let again: Vec<_> = ids.iter().map(|id| server.told_to_attach(*id)).collect();
    assert!(told[1].0 < again[0].0 && again[0].0 < again[1].0);
}

#[test]
fn a_refused_request_is_an_event_with_its_kind_and_cause() {
    let supervised = Supervised::new();
    let (client, stream) = UnixStream::pair().unwrap();
    let events = testkit::Events::gather();
    let request = Request::Mappings { id: MountId::from_number(7) };
    supervised.supervisor.answer(&stream, request, Vec::new()).unwrap();
    let said = events.take();
    let begin = "INFO a request was refused request=\"mappings\" error=";
    assert!(said.len() == 1 && said[0].starts_with(begin), "{said:?}");
    let reply = wire::receive::<Reply>(&client).unwrap().unwrap().0;
    assert!(matches!(reply, Reply::Failed(_)), "{reply:?}");
}

/// A count that a crash could lose is not exported: a total would go down.
#[test]
fn totals_are_exported_once_they_are_durable() {
    let it = Supervised::new();
    let id = it.add(1, |_| {});
    let count = |fetches: u64| {
        it.supervisor.table().mounts[&id].slots.counters().fetches.add(fetches);
        it.supervisor.count();
        it.supervisor.counting.durable().unwrap()
    };
    let (first, second) = (count(3), count(4));
    assert!(!second.is_same(&first), "more fetches are other totals");
    // Nothing replaces a folder.
    let file = it.state().totals();
    fs::remove_file(&file).unwrap();
    fs::create_dir_all(file.join("in the way")).unwrap();
    assert!(count(5).is_same(&second), "they were not written");
    fs::remove_dir_all(&file).unwrap();
    assert!(!count(0).is_same(&second));
}
