//! The opener opens the files that images refer to and that are mapped: the server may not.

#![allow(clippy::unwrap_used)]

mod asker;

use std::{
    fs::{self, Permissions},
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::{
    Burgeon, Mounted, OciLayout, PATIENCE, Rng, S3, Space, drop_caches, kill, wait_until,
};

use asker::{Asker, FOLDER, IDENTIFIED, NOT_GRANTED, REFERRED, STORED};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const EIO: i32 = 5;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn opener(burgeon: &Burgeon) -> Option<u32> {
    burgeon.status()["opener_pid"].as_u64().map(|id| u32::try_from(id).unwrap())
}

fn signal(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).unwrap();
}

fn errno_of(path: &Path) -> Option<i32> {
    fs::read(path).err().and_then(|error| error.raw_os_error())
}

/// A mount whose image refers to a file that only another user may read, and with such a file
/// mapped. A copy of the image's own data is in the store.
struct Set {
    burgeon: Burgeon,
    mounted: Mounted,
    referred: PathBuf,
    mapped: PathBuf,
}

impl Set {
    fn new(space: &Space) -> Self {
        let burgeon = Burgeon::new(PROGRAM, space);
        let private = space.make_folder("private");
        let [referred, mapped] = ["referred", "mapped"].map(|name| private.join(name));
        for (seed, path) in [&referred, &mapped].into_iter().enumerate() {
            fs::write(path, Rng::new(seed as u64).bytes(1_000_001)).unwrap();
            fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
            chown(path, Some(1234), Some(1234)).unwrap();
        }
        fs::set_permissions(&private, Permissions::from_mode(0o700)).unwrap();
        chown(&private, Some(1234), Some(1234)).unwrap();
        let tree = space.make_folder("tree");
        fs::write(tree.join("stored"), Rng::new(9).bytes(1_000_001)).unwrap();
        burgeon.ok(&["build", "--by-reference", text(&private), "referring"]);
        burgeon.build(&tree, "stored");
        let at = space.path("at");
        let options = ["--virtual", "1T", "--writes", "w", "--write-limit", "256M"];
        let mounted = burgeon.mount("referring", &at, &options);
        burgeon.ok(&["map", text(&at.join("new")), "--from", text(&mapped)]);
        Self { burgeon, mounted, referred, mapped }
    }

    fn check(&self) {
        drop_caches();
        let at = self.mounted.path();
        for (path, source) in [("referred", &self.referred), ("new", &self.mapped)] {
            assert!(fs::read(at.join(path)).unwrap() == fs::read(source).unwrap(), "{path}");
        }
    }
}

/// A store, and the layers of an image in a layout.
#[test]
fn folders_that_only_another_user_may_read_are_read_by_the_opener() {
    let space = Space::new("opener-folders");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    let content = Rng::new(9).bytes(1_000_001);
    fs::write(tree.join("file"), &content).unwrap();
    let private = space.make_folder("private");
    let store = private.join("store");
    burgeon.ok(&["build", text(&tree), "it", "--store", text(&store)]);
    let layout = OciLayout::new(&private.join("layout")).unwrap();
    layout.change(|root| fs::write(root.join("file"), &content).unwrap()).unwrap();
    let layered = format!("oci-layout:{}:latest", layout.folder().display());
    let made = burgeon.ok(&["index", &layered, "--push", "--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    let index = made["index"].as_str().unwrap();
    for folder in [&private, &store, &store.join("packs")] {
        chown(folder, Some(1234), Some(1234)).unwrap();
        fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
    }
    for (image, options) in
        [("it", &["--store", text(&store)][..]), (&*layered, &["--index", index])]
    {
        let mounted =
            burgeon.mount(image, &space.path("at"), &[&["--read-only"], options].concat());
        drop_caches();
        assert!(fs::read(mounted.path().join("file")).unwrap() == content, "{image}");
        burgeon.umount(mounted);
    }
}

/// Gives a bucket's credentials to clients that have the token, as EKS Pod Identity does. Ends when
/// dropped.
struct Credentials {
    address: SocketAddr,
    given: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
}

impl Credentials {
    fn start(token: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (given, ended) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (count, end) = (Arc::clone(&given), Arc::clone(&ended));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if end.load(SeqCst) {
                    return;
                }
                // An error is the client's affair, who is gone.
                let _ = answer(&stream, token, &count);
            }
        });
        Self { address, given, ended }
    }
}

impl Drop for Credentials {
    fn drop(&mut self) {
        self.ended.store(true, SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn answer(mut stream: &TcpStream, token: &str, given: &AtomicU64) -> std::io::Result<()> {
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
    let expected = format!("authorization: {token}");
    let (status, body) = match head.iter().any(|line| line.eq_ignore_ascii_case(&expected)) {
        true => {
            given.fetch_add(1, SeqCst);
            let [_, id, secret, _] = S3::environment(stream.local_addr()?);
            let body = serde_json::json!({
                "AccessKeyId": id.1, "SecretAccessKey": secret.1, "Token": "session",
                "Expiration": "2099-01-01T00:00:00Z",
            });
            ("200 OK", body.to_string())
        }
        false => ("401 Unauthorized", String::new()),
    };
    let len = body.len();
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}")
}

#[test]
fn files_with_credentials_that_only_another_user_may_read_are_used() {
    let space = Space::new("opener-key");
    let (s3, credentials) = (S3::start().unwrap(), Credentials::start("the-token"));
    let tree = space.make_folder("tree");
    let content = Rng::new(9).bytes(1_000_001);
    fs::write(tree.join("file"), &content).unwrap();
    let private = space.make_folder("private");
    let token = private.join("token");
    fs::write(&token, "the-token").unwrap();
    for (path, mode) in [(&token, 0o600), (&private, 0o700)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        chown(path, Some(1234), Some(1234)).unwrap();
    }
    let mut burgeon = Burgeon::new(PROGRAM, &space).option("--store").option("s3://bucket/it");
    for (name, value) in S3::environment(s3.address()) {
        if !name.contains("KEY") {
            burgeon = burgeon.env(name, value);
        }
    }
    let url = format!("http://{}/credentials", credentials.address);
    burgeon = burgeon.env("AWS_CONTAINER_CREDENTIALS_FULL_URI", url);
    burgeon = burgeon.env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", text(&token));
    burgeon.build(&tree, "it");
    let mounted = burgeon.mount("it", &space.path("at"), &["--read-only"]);
    let before = credentials.given.load(SeqCst);
    drop_caches();
    assert!(fs::read(mounted.path().join("file")).unwrap() == content);
    assert!(credentials.given.load(SeqCst) > before, "the server has the bucket's own keys");
    let server = burgeon.status()["server_pid"].as_u64().unwrap();
    let files = fs::read_dir(format!("/proc/{server}/fd")).unwrap().flatten();
    let links: Vec<_> = files.filter_map(|file| fs::read_link(file.path()).ok()).collect();
    let is_copy = |link: &PathBuf| text(link).starts_with("/memfd:burgeon-credentials");
    assert_eq!(links.iter().filter(|link| is_copy(link)).count(), 1, "{links:?}");
    burgeon.umount(mounted);
}

#[test]
fn an_opener_that_is_killed_costs_nothing() {
    let space = Space::new("opener-killed");
    let set = Set::new(&space);
    set.check();
    for _ in 0..3 {
        let before = opener(&set.burgeon);
        kill(before.unwrap());
        set.check();
        let replaced = || opener(&set.burgeon).is_some_and(|now| Some(now) != before);
        assert!(wait_until(PATIENCE, replaced));
    }
    // The next server is connected with it.
    kill(set.burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    set.check();
    // The opener of a supervisor that has died serves on, and the next supervisor brings its own.
    let before = opener(&set.burgeon).unwrap();
    kill(set.burgeon.status()["supervisor_pid"].as_u64().unwrap() as u32);
    set.check();
    set.burgeon.ok(&["doctor", "--repair"]);
    set.check();
    assert_ne!(opener(&set.burgeon), Some(before));
    let is_gone = || !set.burgeon.processes().contains(&before);
    assert!(wait_until(PATIENCE, is_gone), "the earlier opener is still there");
    set.burgeon.umount(set.mounted);
}

#[test]
fn an_opener_that_hangs_costs_its_readers_an_error_by_their_deadline() {
    let space = Space::new("opener-hangs");
    let set = Set::new(&space);
    set.check();
    let other = space.path("other");
    let other = set.burgeon.mount("stored", &other, &["--read-only"]);
    let stopped = opener(&set.burgeon).unwrap();
    signal(stopped, Signal::STOP);
    drop_caches();
    assert_eq!(errno_of(&set.mounted.path().join("new")), Some(EIO));
    // Everything else goes on.
    assert_eq!(opener(&set.burgeon), Some(stopped));
    assert!(fs::read(other.path().join("stored")).unwrap() == Rng::new(9).bytes(1_000_001));
    let more = space.path("more");
    set.burgeon.umount(set.burgeon.mount("stored", &more, &["--read-only"]));
    signal(stopped, Signal::CONT);
    let source = fs::read(&set.mapped).unwrap();
    let is_read = || {
        let read = fs::read(set.mounted.path().join("new"));
        read.is_ok_and(|read| read == source)
    };
    assert!(wait_until(PATIENCE, is_read), "it is not read again");
    set.check();
    set.burgeon.umount(other);
    set.burgeon.umount(set.mounted);
}

/// The one pack of the store in `folder`.
fn pack(folder: &Path) -> PathBuf {
    let entries = fs::read_dir(folder.join("packs")).unwrap().map(Result::unwrap);
    let mut files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    files.next().unwrap().path()
}

/// The answer to a request for `path` in each manner.
fn refusals(asker: &Asker, path: &Path) -> [Option<i32>; 4] {
    [STORED, REFERRED, IDENTIFIED, FOLDER].map(|manner| asker.open(manner, path).err())
}

const REFUSED: [Option<i32>; 4] = [Some(NOT_GRANTED); 4];

#[test]
fn only_files_of_a_living_mount_are_opened() {
    let space = Space::new("opener-granted");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), Rng::new(9).bytes(1_000_001)).unwrap();
    let stores = ["one", "two"].map(|name| space.path(name));
    for store in &stores {
        burgeon.ok(&["build", text(&tree), "it", "--store", text(store)]);
    }
    let secret = space.path("secret");
    fs::write(&secret, "secret").unwrap();
    let [one, two] = &stores;
    symlink("../../secret", one.join("packs/out")).unwrap();
    symlink(pack(one).file_name().unwrap(), one.join("packs/within")).unwrap();
    let mount = |store: &Path, at: &str| {
        let options = ["--read-only", "--transport", "fuse", "--store", text(store)];
        burgeon.mount("it", &space.path(at), &options)
    };
    let asker = Asker::new(PROGRAM, burgeon.state());
    // There is no mount, and then no mount of this store.
    assert_eq!(refusals(&asker, &pack(one)), REFUSED);
    let first = mount(one, "first");
    assert_eq!(refusals(&asker, &pack(two)), REFUSED);
    let second = mount(two, "second");
    for store in &stores {
        for path in
            [pack(store), store.join("manifests/../packs").join(pack(store).file_name().unwrap())]
        {
            assert_eq!(asker.open(STORED, &path).err(), None, "{path:?}");
        }
        assert_eq!(asker.open(FOLDER, store).err(), None);
        assert_eq!(refusals(&asker, &pack(store))[1..3], REFUSED[1..3], "it is no user's file");
    }
    assert_eq!(asker.open(STORED, &one.join("packs/within")).err(), None);
    let record = burgeon.state().join("mounts");
    let record = fs::read_dir(record).unwrap().next().unwrap().unwrap().path().join("mount.json");
    let others = [
        Path::new("/etc/passwd"),
        Path::new("/"),
        &secret,
        &one.join("packs/out"),
        &one.join("../secret"),
        &one.join("packs/../../secret"),
        &one.join("../two/packs/x"),
        &record,
        space.folder(),
    ];
    for path in others {
        assert_eq!(refusals(&asker, path), REFUSED, "{path:?}");
    }
    assert_eq!(asker.device(0), [Some(NOT_GRANTED); 2]);
    burgeon.umount(second);
    assert_eq!(refusals(&asker, &pack(two)), REFUSED, "its mount has ended");
    assert_eq!(asker.open(STORED, &pack(one)).err(), None);
    burgeon.umount(first);
    assert_eq!(refusals(&asker, &pack(one)), REFUSED, "its mount has ended");
    assert_eq!(fs::read_dir(burgeon.state().join("grants")).unwrap().count(), 0);
}

/// The records as a supervisor of an earlier version leaves them.
fn remove_records(burgeon: &Burgeon) {
    for record in fs::read_dir(burgeon.state().join("grants")).unwrap() {
        fs::remove_file(record.unwrap().path()).unwrap();
    }
}

#[test]
fn the_next_supervisor_grants_what_the_one_before_did_or_could_not() {
    let space = Space::new("opener-recovered");
    let set = Set::new(&space);
    let folder = space.make_folder("folder");
    fs::write(folder.join("file"), Rng::new(3).bytes(1_000_001)).unwrap();
    set.burgeon.ok(&["map", text(&set.mounted.path().join("folder")), "--from", text(&folder)]);
    let check = || {
        set.check();
        let asker = Asker::new(PROGRAM, set.burgeon.state());
        assert_eq!(asker.open(REFERRED, &set.referred).err(), None);
        for path in [&set.mapped, &folder.join("file")] {
            assert_eq!(asker.open(IDENTIFIED, path).err(), None, "{path:?}");
        }
        assert_eq!(refusals(&asker, Path::new("/etc/passwd")), REFUSED);
        assert_eq!(refusals(&asker, &space.path("else")), REFUSED);
    };
    let supervisor = || set.burgeon.status()["supervisor_pid"].as_u64().unwrap() as u32;
    check();
    kill(supervisor());
    check();
    set.burgeon.ok(&["doctor", "--repair"]);
    check();
    // Of an earlier version, whose server is adopted.
    kill(supervisor());
    remove_records(&set.burgeon);
    set.burgeon.ok(&["doctor", "--repair"]);
    check();
    remove_records(&set.burgeon);
    drop_caches();
    assert_eq!(errno_of(&set.mounted.path().join("new")), Some(EIO), "it was never granted");
    set.burgeon.ok(&["upgrade"]);
    check();
    // Named writes are granted what was mapped before.
    let Set { burgeon, mounted, referred, mapped } = set;
    let at = mounted.path().to_owned();
    burgeon.umount(mounted);
    let asker = Asker::new(PROGRAM, burgeon.state());
    assert_eq!(refusals(&asker, &mapped), REFUSED);
    drop(asker);
    let mounted = burgeon.mount("referring", &at, &["--writes", "w"]);
    let set = Set { burgeon, mounted, referred, mapped };
    set.check();
    set.burgeon.umount(set.mounted);
}
