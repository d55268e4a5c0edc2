//! `burgeon health`, `log` and `doctor --report` on real mounts; and that no secret leaves the
//! daemon by its log, its status, its metrics, its command lines or a core dump. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::{
    Burgeon, Fault, Mounted, PATIENCE, Proxy, Rng, S3, Space, drop_caches, kill, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const LEN: usize = 1 << 20;

fn mounted(space: &Space, burgeon: &Burgeon) -> (Mounted, PathBuf) {
    let tree = space.make_folder("tree");
    for number in 0..4 {
        fs::write(tree.join(number.to_string()), Rng::new(number).bytes(LEN)).unwrap();
    }
    burgeon.build(&tree, "image");
    let at = space.path("at");
    (burgeon.mount("image", &at, &["--read-only", "--profile", "none"]), at)
}

fn is_read(at: &Path, number: u64) -> bool {
    drop_caches();
    fs::read(at.join(number.to_string())).is_ok_and(|bytes| bytes == Rng::new(number).bytes(LEN))
}

/// Exit code and document.
fn health(burgeon: &Burgeon, more: &[&str]) -> (i32, Value) {
    let finished = burgeon.run(&[&["health", "--json"], more].concat());
    (finished.code.unwrap(), serde_json::from_str(&finished.stdout).unwrap())
}

fn pid(burgeon: &Burgeon, process: &str) -> u32 {
    burgeon.status()[process].as_u64().unwrap() as u32
}

fn send(id: u32, signal: Signal) {
    kill_process(Pid::from_raw(id as i32).unwrap(), signal).unwrap();
}

fn log(burgeon: &Burgeon) -> String {
    fs::read_to_string(burgeon.state().join("run/daemon.log")).unwrap()
}

#[test]
fn health_is_an_exit_code_within_a_time_limit() {
    let space = Space::new("health");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (code, nothing) = health(&burgeon, &[]);
    assert_eq!((code, &nothing["healthy"], &nothing["running"]), (0, &true.into(), &false.into()));
    let (mounted, at) = mounted(&space, &burgeon);
    let (code, good) = health(&burgeon, &[at.to_str().unwrap()]);
    assert_eq!((code, &good["mounts"]), (0, &1.into()), "{good}");
    assert!(burgeon.ok(&["health"]).starts_with("healthy: mounted and served: 1"));

    // A daemon that hangs is noticed in time, and each finding says what it costs.
    let supervisor = pid(&burgeon, "supervisor_pid");
    send(supervisor, Signal::STOP);
    let (code, hangs) = health(&burgeon, &["--timeout", "1"]);
    let metrics = burgeon.run(&["metrics"]);
    send(supervisor, Signal::CONT);
    assert!(metrics.stdout.contains("burgeon_up 0") && metrics.code == Some(5), "{metrics:?}");
    assert!(metrics.stderr.contains("does not answer within"), "{metrics:?}");
    assert_eq!(code, 1, "{hangs}");
    let finding = &hangs["findings"][0];
    assert!(finding["found"].as_str().unwrap().contains("does not answer within 1 s"), "{hangs}");
    assert!(finding["cost"].is_string() && finding["remedy"].is_string(), "{hangs}");
    assert!(wait_until(PATIENCE, || health(&burgeon, &[]).0 == 0));

    // So is a server that hangs, by `health`, `doctor` and the metrics.
    let server = pid(&burgeon, "server_pid");
    send(server, Signal::STOP);
    // The daemon waits a second for it.
    let (code, hangs) = health(&burgeon, &["--timeout", "5", at.to_str().unwrap()]);
    let (said, metrics) = (burgeon.run(&["doctor"]), burgeon.ok(&["metrics"]));
    let seen = burgeon.run(&["status"]);
    let cache = burgeon.run(&["cache", "status"]);
    send(server, Signal::CONT);
    let says = format!("process {server}, has the cache and does not answer");
    assert!(cache.code == Some(5) && cache.stderr.contains(&says), "{cache:?}");
    let finding = &hangs["findings"][0];
    assert_eq!((code, &finding["subject"]), (1, &"server".into()), "{hangs}");
    assert!(finding["found"].as_str().unwrap().contains("does not answer"), "{hangs}");
    assert!(said.stdout.contains(&format!("process {server} does not answer")), "{said:#?}");
    assert!(metrics.contains("burgeon_server_up 0"), "{metrics}");
    assert!(seen.stdout.contains("DOES NOT ANSWER"), "{seen:#?}");
    assert!(wait_until(PATIENCE, || health(&burgeon, &[]).0 == 0));

    // A path where nothing is mounted is not healthy, whatever else is.
    for path in [space.path("nothing").as_path(), Path::new("/")] {
        let (code, other) = health(&burgeon, &[path.to_str().unwrap()]);
        assert_eq!((code, &other["mounts"]), (1, &0.into()), "{other}");
        let found = other["findings"][0]["found"].as_str().unwrap();
        assert!(found.contains("not a mount of the daemon of"), "{other}");
    }

    // A server without its supervisor serves, and `doctor` says the same.
    kill(pid(&burgeon, "supervisor_pid"));
    let (code, dead) = health(&burgeon, &[]);
    let finding = &dead["findings"][0];
    assert_eq!((code, &finding["subject"]), (1, &"supervisor".into()), "{dead}");
    let said = burgeon.run(&["doctor"]).stdout;
    assert!(said.contains(finding["found"].as_str().unwrap()), "{said}");
    assert!(is_read(&at, 2), "it is served");
    burgeon.ok(&["doctor", "--repair"]);
    assert!(wait_until(PATIENCE, || health(&burgeon, &[]).0 == 0));

    burgeon.kill_both();
    let (code, dead) = health(&burgeon, &[]);
    assert_eq!((code, &dead["mounts"], &dead["running"]), (1, &1.into(), &false.into()));
    let said = burgeon.run(&["doctor"]);
    assert!(said.stdout.contains("costs: programs that read it wait"), "{said:#?}");
    burgeon.ok(&["doctor", "--repair"]);
    assert!(wait_until(PATIENCE, || health(&burgeon, &[]).0 == 0));
    assert!(is_read(&at, 0));
    let at_path = at.to_str().unwrap().to_owned();
    burgeon.umount(mounted);
    assert_eq!(health(&burgeon, &[&at_path]).0, 1);
    assert_eq!(health(&burgeon, &[]).0, 0);
}

fn is_opener(id: u32) -> bool {
    let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).any(|word| word == b"__open")
}

#[test]
fn level_and_format_of_the_log_change_while_the_daemon_runs() {
    let space = Space::new("log-level");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.fails(&["log"], 5, "no daemon runs");
    let (mounted, _) = mounted(&space, &burgeon);
    assert_eq!(burgeon.ok(&["log"]), "level info, format text\n");
    assert!(log(&burgeon).lines().all(|line| !line.starts_with('{')));
    let said = burgeon.ok(&["log", "--level", "debug", "--format", "json"]);
    assert_eq!(said, "level debug, format json\n");
    // Lines of both processes, from now on; a server that is started later logs the same way.
    let objects = |of: u32| {
        let text = log(&burgeon);
        let objects = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        objects.filter(|object| object["pid"] == of).count()
    };
    let server = pid(&burgeon, "server_pid");
    assert!(objects(pid(&burgeon, "supervisor_pid")) > 0);
    assert!(wait_until(PATIENCE, || objects(server) > 0), "{}", log(&burgeon));
    // The supervisor's other children.
    let opener = *burgeon.processes().iter().find(|id| is_opener(**id)).unwrap();
    assert!(wait_until(PATIENCE, || objects(opener) > 0), "{}", log(&burgeon));
    kill(server);
    let is_another =
        || burgeon.status()["server_pid"].as_u64().is_some_and(|id| id != u64::from(server));
    assert!(wait_until(PATIENCE, is_another));
    let next = pid(&burgeon, "server_pid");
    // At the level debug, a server says that it was told to serve.
    assert!(wait_until(PATIENCE, || objects(next) > 0), "{}", log(&burgeon));
    burgeon.ok(&["log", "--level", "error", "--format", "text"]);
    let before = log(&burgeon).len();
    kill(next);
    assert!(wait_until(PATIENCE, || {
        let now = burgeon.status()["server_pid"].as_u64();
        now.is_some_and(|id| id != u64::from(next))
    }));
    let since = log(&burgeon)[before..].to_owned();
    assert!(!since.contains("the server ended"), "a warning at the level error: {since}");
    burgeon.fails(&["log", "--level", "loud"], 2, "loud");
    burgeon.umount(mounted);
}

/// With it, a process whose memory is at an end may wait for a lock of its own instead of ending.
#[test]
fn no_process_of_a_daemon_prints_backtraces() {
    let space = Space::new("backtrace");
    let burgeon = Burgeon::new(PROGRAM, &space).env("RUST_BACKTRACE", "1");
    let (mounted, _) = mounted(&space, &burgeon);
    let processes = burgeon.processes();
    assert!(processes.len() >= 3, "supervisor, server and opener: {processes:?}");
    for id in processes {
        let environment = fs::read(format!("/proc/{id}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment);
        assert!(!environment.contains("RUST_BACKTRACE"), "{environment}");
    }
    burgeon.umount(mounted);
}

#[test]
fn a_socket_that_was_removed_is_made_again() {
    let space = Space::new("socket");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (mounted, at) = mounted(&space, &burgeon);
    let before = pid(&burgeon, "supervisor_pid");
    fs::remove_file(burgeon.state().join("run/api.sock")).unwrap();
    let is_back = || burgeon.status()["supervisor_pid"].as_u64() == Some(before.into());
    assert!(wait_until(PATIENCE, is_back), "{:#}", burgeon.status());
    assert!(is_read(&at, 0));
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
}

#[test]
fn no_secret_leaves_the_daemon() {
    let space = Space::new("secrets");
    let s3 = S3::start().unwrap();
    let proxy = Proxy::new(s3.address(), 1).unwrap();
    let environment = S3::environment(proxy.address());
    let secret = environment.iter().find(|(name, _)| *name == "AWS_SECRET_ACCESS_KEY").unwrap();
    let secret = secret.1.clone();
    assert!(secret.len() >= 8, "it would be found by chance");
    let burgeon = Burgeon::new(PROGRAM, &space).option("--store").option("s3://bucket");
    let burgeon = burgeon.envs(environment).env("BURGEON_LOG", "debug");
    let (mounted, at) = mounted(&space, &burgeon);
    assert!(is_read(&at, 0));
    // Requests fail, and their errors are logged.
    proxy.spoil(1000, &[Fault::Status(503), Fault::Reset]);
    let reader = std::thread::spawn({
        let at = at.clone();
        move || is_read(&at, 1)
    });
    assert!(wait_until(PATIENCE, || log(&burgeon).contains("s3")), "{}", log(&burgeon));
    let failed = || burgeon.status()["mounts"][0]["last_source_error"].is_string();
    assert!(wait_until(PATIENCE, failed));
    let report = space.path("report.txt");
    let done = burgeon.run(&["doctor", "--report", report.to_str().unwrap()]);
    assert!(done.stdout.contains("read it before you pass it on"), "{done:#?}");
    let texts = [
        ("log", log(&burgeon)),
        ("status", burgeon.ok(&["status", "--json"])),
        ("metrics", burgeon.ok(&["metrics"])),
        ("health", burgeon.run(&["health", "--json"]).stdout),
        ("doctor", done.stdout.clone()),
        ("report", fs::read_to_string(&report).unwrap()),
    ];
    proxy.spoil(0, &[]);
    reader.join().unwrap();
    for (name, text) in &texts {
        assert!(!text.contains(&secret), "{name}: {text}");
    }
    for part in ["findings", "status", "metrics", "kernel", "log"] {
        assert!(texts[5].1.contains(&format!("===== {part} =====\n")), "no {part}");
    }
    assert!(texts[5].1.contains("s3://bucket"), "names of stores are there");
    assert_eq!(fs::metadata(&report).unwrap().permissions().mode() & 0o777, 0o600);
    let again = "a file is there already; name another one, or remove it";
    burgeon.fails(&["doctor", "--report", report.to_str().unwrap()], 1, again);
    let link = space.path("link");
    symlink(space.path("nowhere"), &link).unwrap();
    burgeon.fails(&["doctor", "--report", link.to_str().unwrap()], 1, "cannot write the report");

    let processes = burgeon.processes();
    assert!(processes.len() >= 3, "supervisor, server and opener: {processes:?}");
    for id in processes {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&line).contains(&secret));
        let limits = fs::read_to_string(format!("/proc/{id}/limits")).unwrap_or_default();
        let core = limits.lines().find(|line| line.starts_with("Max core file size"));
        let fields: Vec<_> = core.unwrap_or_default().split_whitespace().skip(4).collect();
        assert_eq!(fields, ["1", "1", "bytes"], "process {id} could dump its memory");
    }
    burgeon.umount(mounted);
}
