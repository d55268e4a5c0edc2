//! Abilities that a process keeps in its sandbox, tried by the process itself.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::Value;
use testkit::{Burgeon, OciLayout, Registry, Space, WebServer, skopeo_copy};

/// Everything that `__probe` tries.
const ALL: &[&str] = &[
    "execve",
    "ptrace",
    "mount",
    "connect",
    "read",
    "write",
    "device",
    "administer",
    "root",
    "io_uring",
    "io_uring connect",
    "io_uring read",
];

/// A process, its role, and the actions that `__probe` may find allowed. Docs/architecture.md has
/// the same as a table.
type Row = (&'static str, &'static str, &'static [&'static str]);

/// A role without a sandbox shows that the attempts can succeed. A helper has the files of root,
/// because Landlock would prevent its mounts, but none of its mounts gets a path. Images refer to
/// files of this host by their paths, so an opener reads them; seccomp does not see what comes
/// through a ring, and capabilities and Landlock hold there, too.
const ROWS: &[Row] = &[
    ("__supervise", "supervising", ALL),
    ("__help", "helping", &["read", "write", "device", "administer", "root"]),
    (
        "__help",
        "helping-rings",
        &["read", "write", "device", "administer", "root", "io_uring", "io_uring read"],
    ),
    ("__accelerate-supervise", "supervising-cache", ALL),
    ("__accelerate-serve", "accelerating", ALL),
    ("__accelerate-loop", "looping", ALL),
    ("__accelerate-ublk", "starting-ublk", ALL),
    ("__prepare", "preparing", &["landlock", "root"]),
    ("__prepare", "preparing-remote", &["landlock", "connect", "root"]),
    ("__read", "reading", &["landlock", "root"]),
    ("__read", "reading-remote", &["landlock", "connect", "root"]),
    ("__hold", "holding", &["landlock", "root"]),
    ("__open", "opening", &["landlock", "read", "root"]),
    ("__open", "opening-ublk", &["landlock", "read", "device", "root"]),
    ("__serve", "serving", &["landlock", "connect"]),
    ("__serve", "serving-rings", &["landlock", "connect", "io_uring", "io_uring connect"]),
    ("__serve", "serving-ublk", &["landlock", "connect", "io_uring", "io_uring connect"]),
];

/// Runs plugins of the administrator, with the rights of its parent: a role would be theirs, too.
const WITHOUT_ROLE: &str = "__kubelet-login";

fn row(role: &str) -> (&'static str, BTreeSet<String>) {
    let (process, _, allowed) = ROWS.iter().find(|(_, name, _)| *name == role).unwrap();
    (*process, allowed.iter().map(|name| (*name).to_owned()).collect())
}

/// The output of `__probe`.
fn probe<A: AsRef<std::ffi::OsStr>>(arguments: &[A]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burgeon"));
    let output = command.arg("__probe").args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?} {errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_process_has_a_role_and_every_role_a_row() {
    let mut rows: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (process, role, _) in ROWS {
        rows.entry(process).or_default().insert(role);
    }
    rows.entry(WITHOUT_ROLE).or_default().insert("");
    let printed = probe::<&str>(&[]);
    let roles: BTreeMap<_, BTreeSet<_>> = printed
        .lines()
        .map(|line| line.split_once(": ").unwrap())
        .map(|(process, roles)| (process, roles.split(", ").collect()))
        .collect();
    assert_eq!(roles, rows);
}

#[test]
fn each_role_can_do_what_its_row_says_and_no_more() {
    for (_, role, _) in ROWS {
        let folder = tempfile::tempdir().unwrap();
        let printed = probe(&[role.as_ref(), folder.path().as_os_str()]);
        let allowed: BTreeSet<_> = printed.lines().map(str::to_owned).collect();
        assert_eq!(allowed, row(role).1, "{role}");
    }
}

/// As the server is, and a service that is root with fewer capabilities.
#[test]
fn only_an_administrator_changes_mounts() {
    let space = Space::new("roles-api");
    let burgeon = Burgeon::new(env!("CARGO_BIN_EXE_burgeon"), &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("text"), "text").unwrap();
    burgeon.build(&tree, "tree");
    let options = ["--virtual", "1G", "--writes", "w", "--write-limit", "256M"];
    let mounted = burgeon.mount("tree", &space.path("at"), &options);
    let at = mounted.path().to_str().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_admin", env!("CARGO_BIN_EXE_burgeon")]);
        command.arg("--state-dir").arg(burgeon.state()).args(arguments).output().unwrap()
    };
    assert!(run(&["status"]).status.success());
    // Everybody is an administrator of a user namespace of his own.
    let in_namespace = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_admin", "unshare", "--user", "--map-root-user"]);
        command.arg(env!("CARGO_BIN_EXE_burgeon")).arg("--state-dir").arg(burgeon.state());
        command.args(arguments).output().unwrap()
    };
    let pin = ["pin", at];
    for refused in [run(&pin), run(&["shutdown", "--force"]), in_namespace(&pin)] {
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("CAP_SYS_ADMIN"), "{said}");
    }
    burgeon.ok(&["pin", at]);
    burgeon.umount(mounted);
}

/// Everything else in a state directory is relied upon by others.
#[test]
fn a_server_writes_only_to_its_own_folders_of_the_state_directory() {
    const PARTS: [&str; 11] = [
        ".",
        "built",
        "grants",
        "images",
        "mounts",
        "profiles",
        "provenance",
        "run",
        "store",
        "tags",
        "writes",
    ];
    let written = |role: &str| -> BTreeSet<String> {
        let folder = tempfile::tempdir().unwrap();
        for part in PARTS {
            fs::create_dir_all(folder.path().join(part)).unwrap();
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let arguments = [role.as_ref(), folder.path().as_os_str()];
        let parts = PARTS.map(OsStr::new);
        let printed = probe(&[&arguments[..], &parts].concat());
        printed.lines().filter(|line| PARTS.contains(line)).map(str::to_owned).collect()
    };
    assert_eq!(written("supervising").len(), PARTS.len(), "the attempts can succeed");
    for role in ["serving", "serving-rings", "serving-ublk"] {
        assert_eq!(written(role), BTreeSet::from(["run".to_owned()]), "{role}");
    }
    for role in ["opening", "opening-ublk"] {
        let recorded = ["images", "mounts", "writes"].map(str::to_owned);
        assert_eq!(written(role), BTreeSet::from(recorded), "{role}");
    }
}

/// The processes that have entered a sandbox, by their reports, and their abilities there.
fn reported(text: &str) -> BTreeSet<(String, BTreeSet<String>)> {
    let reports = text.lines().filter_map(|line| line.strip_prefix("probe: "));
    let of_process = |line: &str| {
        let (process, allowed) = line.split_once(": ").unwrap();
        (process.to_owned(), allowed.split(", ").map(str::to_owned).collect())
    };
    reports.map(of_process).collect()
}

/// Mounts `image`; returns the reports of the command's processes and of its daemon's.
fn reports_of_a_mount(space: &Space, image: &str, options: &[&str]) -> [Reports; 2] {
    let state = format!("state-{}", image.len());
    let burgeon = Burgeon::with_state(env!("CARGO_BIN_EXE_burgeon"), space.path(&state));
    let burgeon = burgeon.env("BURGEON_PROBE", "1");
    let at = space.make_folder("at");
    let mut arguments = vec!["mount", image, at.to_str().unwrap(), "--read-only"];
    // Nothing is held for a mount over ublk.
    arguments.extend(["--transport", "fuse"].iter().chain(options));
    let mounted = burgeon.run(&arguments);
    assert_eq!(mounted.code, Some(0), "{image}: {mounted:?}");
    let read_log = || fs::read_to_string(burgeon.state().join("run/daemon.log")).unwrap();
    // Nothing of this mount waits for the opener.
    wait_until("the opener reports", || read_log().contains("probe: __open"));
    let log = read_log();
    burgeon.ok(&["umount", at.to_str().unwrap()]);
    [reported(&mounted.stderr), reported(&log)]
}

type Reports = BTreeSet<(String, BTreeSet<String>)>;

/// Reports of processes in these roles.
fn reports_in(roles: &[&str]) -> Reports {
    let report = |role: &&str| {
        let (process, allowed) = row(role);
        (process.to_owned(), allowed)
    };
    roles.iter().map(report).collect()
}

/// The processes try it themselves, started as for any mount: one that reads layers, by the
/// command; one that prepares, one that serves and one that holds, by the supervisor.
#[test]
fn the_processes_of_a_mount_are_confined_whoever_starts_them() {
    let space = Space::new("roles-mount");
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout.change(|root| fs::write(root.join("text"), "text").unwrap()).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = format!("{}/app:1", registry.address());
    let from = format!("oci:{}:latest", layout.folder().display());
    skopeo_copy(&[], &from, &format!("docker://{name}")).unwrap();
    let tree = space.make_folder("tree");
    fs::write(tree.join("text"), "text").unwrap();
    let (store, builder) =
        (space.path("store"), Burgeon::new(env!("CARGO_BIN_EXE_burgeon"), &space));
    let store = store.to_str().unwrap();
    builder.ok(&["build", tree.to_str().unwrap(), "tree", "--store", store]);
    let web = WebServer::nginx(store.as_ref(), &space.path("nginx")).unwrap();
    let web = format!("http://{}", web.address());
    let layout = format!("oci-layout:{}:latest", layout.folder().display());
    let in_registry = format!("oci://{name}");
    for (image, options, reading, preparing) in [
        (&*layout, &[][..], &["reading"][..], "preparing"),
        (&in_registry, &[], &["reading-remote"], "preparing"),
        ("tree", &["--store", &web], &[], "preparing-remote"),
    ] {
        let [by_command, by_daemon] = reports_of_a_mount(&space, image, options);
        assert_eq!(by_command, reports_in(reading), "{image}");
        // The kernel decides whether they need rings.
        let ublk = Path::new("/dev/ublk-control").exists();
        let (helper, opener) = match ublk {
            true => ("helping-rings", "opening-ublk"),
            false => ("helping", "opening"),
        };
        let servers = ["serving", "serving-rings", "serving-ublk"];
        let expected =
            servers.map(|server| reports_in(&[preparing, helper, opener, "holding", server]));
        assert!(expected.contains(&by_daemon), "{image}: {by_daemon:?}");
    }
}

/// One process asks the registry, and reads the image's record; a second one reads its manifest and
/// copies its packs.
#[test]
fn burgeon_images_of_a_registry_are_pulled_in_sandboxes() {
    let space = Space::new("roles-pull");
    let tree = space.make_folder("tree");
    fs::write(tree.join("text"), "text").unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let at = format!("oci://{}/app:1", registry.address());
    let maker = Burgeon::new(env!("CARGO_BIN_EXE_burgeon"), &space);
    maker.build(&tree, "tree");
    maker.ok(&["push", "tree", &at]);
    let user = Burgeon::with_state(env!("CARGO_BIN_EXE_burgeon"), space.path("user"));
    let user = user.env("BURGEON_PROBE", "1");
    let pulled = user.run(&["pull", "--eager", &at, "--as", "mine"]);
    assert_eq!(pulled.code, Some(0), "{pulled:?}");
    assert_eq!(pulled.stderr.matches("probe: __read").count(), 2, "{pulled:?}");
    assert_eq!(reported(&pulled.stderr), reports_in(&["reading-remote"]));
    user.ok(&["verify", "mine"]);
}

/// The command as a user types it, with an archive that does not come.
#[test]
fn a_command_that_reads_an_archive_does_so_in_a_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let command = start(&["build", "-", "app"], &state);
    let child = Reader::of(&command);
    wait_until("it reads the archive", || child.is_in(libc::SYS_read));
    child.assert_confined(&[]);
    // Twice the 256 MiB that any archive may take, and stacks.
    let limit = child.limit_of_data();
    assert!((512 << 20..1 << 30).contains(&limit), "{limit}");
}

/// A registry or web server that accepts and says nothing.
#[test]
fn input_from_elsewhere_is_read_in_a_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let (image, archive) = ("oci://ADDRESS/app:1", "http://ADDRESS/x.tar");
    let store = folder.path().join("store");
    let store = store.to_str().unwrap();
    for (number, arguments) in [
        &["build", image, "app"][..],
        &["build", archive, "app"],
        &["build", archive, "app", "--store", store],
        &["build", archive, "app", "--store", "oci://ADDRESS/pushed"],
        &["pull", image],
        &["pull", "--eager", archive],
        &["index", image],
    ]
    .into_iter()
    .enumerate()
    {
        // One for each, so that it is this command that connects.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let named: Vec<_> = arguments.iter().map(|it| it.replace("ADDRESS", &address)).collect();
        let named: Vec<_> = named.iter().map(String::as_str).collect();
        let command = start(&named, &folder.path().join(format!("state-{number}")));
        let _connection = accept(&silent);
        let child = Reader::of(&command);
        // It has connected, so it is in its sandbox.
        child.assert_confined(arguments);
        assert!(child.limit_of_data() < 1 << 30, "{arguments:?}");
    }
}

/// An archive is built in a bucket by a process that has its settings, and those of nothing else.
#[test]
fn a_process_that_reads_is_given_the_settings_of_its_store_alone() {
    let folder = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let archive = format!("http://{address}/x.tar");
    let mut command = command(&["build", &archive, "app"], &folder.path().join("state"));
    let secrets = [("DOCKER_AUTH_CONFIG", "{}"), ("AWS_SECRET_ACCESS_KEY", "hunter2")];
    let command = Ended(command.envs(secrets).spawn().unwrap());
    let _connection = accept(&silent);
    let child = Reader::of(&command);
    let has = fs::read(format!("/proc/{}/environ", child.pid)).unwrap();
    let has = String::from_utf8_lossy(&has);
    for (name, _) in secrets {
        assert!(!has.contains(name), "{name}");
    }
}

/// Somebody connects, unless there was an error.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let mut connection = None;
    wait_until("it connects", || {
        connection = listener.accept().ok();
        connection.is_some()
    });
    connection.unwrap().0
}

fn command(arguments: &[&str], state: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burgeon"));
    command.args(arguments).arg("--state-dir").arg(state).stdin(Stdio::piped());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Starts the command as a user types it.
fn start(arguments: &[&str], state: &Path) -> Ended {
    Ended(command(arguments, state).spawn().unwrap())
}

/// The process that reads for a command, and ends with it.
struct Reader {
    pid: u32,
}

impl Reader {
    fn of(command: &Ended) -> Self {
        let parent = command.0.id();
        let mut found = None;
        wait_until("it has a process that reads", || {
            let tasks = fs::read_dir(format!("/proc/{parent}/task")).unwrap();
            let children = tasks
                .flatten()
                .map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
            found = children.flat_map(|text| text.trim().parse().ok()).next();
            found.is_some()
        });
        Self { pid: found.unwrap() }
    }

    /// True if a thread of it sleeps in this system call.
    fn is_in(&self, call: libc::c_long) -> bool {
        let call = call.to_string();
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).unwrap();
        tasks.flatten().any(|task| {
            let now = fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
            now.split(' ').next() == Some(&call)
        })
    }

    fn assert_confined(&self, arguments: &[&str]) {
        assert_eq!(status(self.pid, "Seccomp"), "2", "{arguments:?}");
        assert_eq!(status(self.pid, "NoNewPrivs"), "1", "{arguments:?}");
        assert_eq!(status(self.pid, "CapPrm"), NO_CAPABILITIES, "{arguments:?}");
    }

    /// RLIMIT_DATA.
    fn limit_of_data(&self) -> u64 {
        let limits = fs::read_to_string(format!("/proc/{}/limits", self.pid)).unwrap();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max data size")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap_or(u64::MAX)
    }
}

#[test]
fn the_serving_process_of_a_mount_is_in_its_sandbox() {
    let space = Space::new("roles-serving");
    let tree = space.make_folder("tree");
    fs::write(tree.join("text"), "text").unwrap();
    let burgeon = Burgeon::new(env!("CARGO_BIN_EXE_burgeon"), &space);
    burgeon.build(&tree, "tree");
    let mounted = burgeon.mount("tree", &space.path("at"), &["--read-only", "--transport", "fuse"]);
    assert_eq!(fs::read_to_string(mounted.path().join("text")).unwrap(), "text");
    let server = burgeon.status()["server_pid"].as_u64().unwrap() as u32;
    assert_eq!(status(server, "NoNewPrivs"), "1");
    assert_eq!(status(server, "Seccomp"), "2");
    const IPC_LOCK: u64 = 1 << 14;
    let kept = u64::from_str_radix(&status(server, "CapPrm"), 16).unwrap();
    let limits = fs::read_to_string(format!("/proc/{server}/limits")).unwrap();
    let locks = limits.lines().find(|line| line.starts_with("Max locked memory")).unwrap();
    let locks = if locks.contains("unlimited") { 0 } else { IPC_LOCK };
    assert_eq!(kept, locks, "{kept:x}");
    const READ_SEARCH: u64 = 1 << 2;
    let opener = burgeon.status()["opener_pid"].as_u64().unwrap() as u32;
    wait_until("the opener is in its sandbox", || status(opener, "Seccomp") == "2");
    assert_eq!(status(opener, "NoNewPrivs"), "1");
    let kept = u64::from_str_radix(&status(opener, "CapPrm"), 16).unwrap();
    assert_eq!(kept, READ_SEARCH | locks, "{kept:x}");
    burgeon.umount(mounted);
}

/// Restrictions of the shipped unit, by systemd's names of its checks. The sum of all is not
/// enough: it hardly changes when one of these is lost.
const RESTRICTED: [&str; 9] = [
    "CapabilityBoundingSet_CAP_SYS_PTRACE",
    "CapabilityBoundingSet_CAP_SYS_MODULE",
    "LockPersonality",
    "NoNewPrivileges",
    "RestrictAddressFamilies_AF_PACKET",
    "RestrictRealtime",
    "SystemCallArchitectures",
    "SystemCallFilter_debug",
    "UMask",
];

/// The shipped unit, as systemd judges it: 10.0 is a service without any restriction.
#[test]
fn the_unit_is_judged_to_be_confined() {
    let judged = |options: &[&str]| {
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/burgeon.service");
        let mut command = Command::new("systemd-analyze");
        command.args(["security", "--offline=true", "--no-pager"]).args(options).arg(unit);
        command.output().unwrap()
    };
    // In tenths. CAP_CHOWN, which gives the status socket to its group, is a tenth of it; six are
    // what it takes to make the server another user.
    let summed_up = judged(&["--threshold=57"]);
    let said = String::from_utf8_lossy(&summed_up.stdout);
    assert!(summed_up.status.success(), "{said}");
    let checks: Vec<Value> = serde_json::from_slice(&judged(&["--json=short"]).stdout).unwrap();
    let is_set = |name: &&str| {
        let of_name = |check: &&Value| check["json_field"] == **name;
        checks.iter().find(of_name).is_some_and(|check| check["set"] == true)
    };
    let lost: Vec<_> = RESTRICTED.into_iter().filter(|name| !is_set(name)).collect();
    assert!(lost.is_empty(), "the unit does not restrict {lost:?}");
}

/// A field of `/proc/PID/status`, which must be the same for all threads of the process.
fn status(pid: u32, field: &str) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let values: BTreeSet<String> = tasks
        .map(|task| {
            let text = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            line.unwrap().trim().to_owned()
        })
        .collect();
    assert_eq!(values.len(), 1, "{field} differs from thread to thread: {values:?}");
    values.into_iter().next().unwrap()
}

/// Waits until `good`, which depends on another process.
fn wait_until(what: &str, good: impl FnMut() -> bool) {
    assert!(testkit::wait_until(testkit::PATIENCE, good), "still not so: {what}");
}

/// A process that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const NO_CAPABILITIES: &str = "0000000000000000";

/// The process that the daemon starts, as the daemon starts it. It has no manifest, and nobody
/// reads that from it.
#[test]
fn the_process_that_prepares_an_image_enters_its_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let (store, to) = (folder.path().join("store"), folder.path().join("to"));
    fs::create_dir_all(store.join("manifests")).unwrap();
    fs::create_dir(&to).unwrap();
    let digest = "0".repeat(64);
    let (mut said, stdout) = std::io::pipe().unwrap();
    // A full pipe: the process waits before it ends.
    let len = rustix::pipe::fcntl_getpipe_size(&stdout).unwrap();
    (&stdout).write_all(&vec![b'\n'; len]).unwrap();
    // Exempt from the OOM killer, as the supervisor is whose child it is; where that is allowed.
    let script = "(echo -1000 > /proc/$$/oom_score_adj) 2> /dev/null; exec \"$@\"";
    let child = Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_burgeon"), "__prepare"])
        .args([store.as_os_str(), digest.as_ref(), to.as_os_str(), "0".as_ref()])
        .stdout(stdout)
        .spawn()
        .unwrap();
    let mut child = Ended(child);
    let pid = child.0.id();
    let writes = libc::SYS_write.to_string();
    wait_until("it writes in its sandbox that there is no manifest", || {
        let call = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
        call.split(' ').next() == Some(&writes) && status(pid, "Seccomp") == "2"
    });
    assert_eq!(status(pid, "NoNewPrivs"), "1");
    assert_eq!(status(pid, "CapEff"), NO_CAPABILITIES);
    assert_eq!(status(pid, "CapPrm"), NO_CAPABILITIES);
    assert_eq!(status(pid, "CapBnd"), NO_CAPABILITIES);
    let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    assert!(!score.starts_with('-'), "{score}");
    let mut text = String::new();
    said.read_to_string(&mut text).unwrap();
    assert!(text.contains("manifest"), "{text}");
    assert!(!child.0.wait().unwrap().success());
}
