//! `burgeon trace` and `burgeon top` on a real mount of a slow and failing store. Needs root, and
//! tmux.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use testkit::{Burgeon, Fault, Mounted, PATIENCE, Proxy, Rng, S3, Space, drop_caches, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 6;
const LEN: usize = 1 << 20;

struct Rig {
    burgeon: Burgeon,
    proxy: Proxy,
    _s3: S3,
    at: PathBuf,
}

/// A name that would colour a terminal, and be two lines.
const FORGED: &str = "a\u{1b}[31mb\nc";

/// A mount of an image in a bucket behind a proxy.
fn rig(space: &Space) -> (Rig, Mounted) {
    let s3 = S3::start().unwrap();
    let proxy = Proxy::new(s3.address(), 1).unwrap();
    let burgeon = Burgeon::new(PROGRAM, space).option("--store").option("s3://bucket");
    let burgeon = burgeon.envs(S3::environment(proxy.address()));
    let tree = space.make_folder("tree/data");
    for number in 0..FILES {
        fs::write(tree.join(number.to_string()), Rng::new(number).bytes(LEN)).unwrap();
    }
    fs::write(tree.join(FORGED), Rng::new(FILES).bytes(LEN)).unwrap();
    burgeon.build(tree.parent().unwrap(), "image");
    let at = space.path("at");
    let mounted = burgeon.mount("image", &at, &["--read-only", "--profile", "none"]);
    (Rig { burgeon, proxy, _s3: s3, at }, mounted)
}

fn read_file(at: &Path, number: u64) {
    drop_caches();
    let bytes = fs::read(at.join("data").join(number.to_string())).unwrap();
    assert!(bytes == Rng::new(number).bytes(LEN));
}

impl Rig {
    fn trace(&self, more: &[&str]) -> Value {
        let arguments = [&["trace", self.at.to_str().unwrap(), "--json"], more].concat();
        serde_json::from_str(&self.burgeon.ok(&arguments)).unwrap()
    }

    /// Reads a file whose fetch fails first.
    fn read_with_failures(&self, number: u64) {
        self.proxy.spoil(1000, &[Fault::Status(503)]);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_file(&self.at, number));
            let errors = || {
                let status = self.burgeon.status();
                status["mounts"][0]["last_source_error"].is_string()
            };
            assert!(wait_until(PATIENCE, errors));
            self.proxy.spoil(0, &[]);
            reader.join().unwrap();
        });
    }
}

#[test]
fn a_wait_has_its_file_its_object_and_its_tries() {
    let space = Space::new("trace");
    let (rig, mounted) = rig(&space);
    rig.read_with_failures(2);
    let traced = rig.trace(&["--threshold", "1"]);
    let waits = traced["waits"].as_array().unwrap();
    let failed = waits.iter().find(|wait| wait["failed_tries"].as_u64() > Some(0));
    let failed = failed.unwrap_or_else(|| panic!("{traced:#}"));
    assert_eq!((&failed["tier"], &failed["error"]), (&"source".into(), &Value::Null), "{failed}");
    assert!(failed["object"].as_str().unwrap().starts_with("packs/"), "{failed}");
    assert!(failed["took_us"].as_u64().unwrap() >= 1000 && failed["process"].is_null());
    let of_file = |file: &str| {
        let waits = traced["waits"].as_array().unwrap().iter();
        waits.filter(|wait| wait["file"].as_str().is_some_and(|it| it.ends_with(file))).count()
    };
    assert!(of_file("data/2") > 0, "{traced:#}");
    let offset = failed["offset"].as_u64().unwrap();
    assert!(offset < LEN as u64 && offset % 4096 == 0, "{failed}");
    assert!(traced["summary"]["failed_tries"].as_u64().unwrap() > 0);
    let first = traced["files"][0]["file"].as_str().unwrap();
    assert!(first.contains("data/"), "{traced:#}");

    // A hit waits for nobody; a threshold leaves out shorter waits.
    let last =
        |traced: &Value| traced["waits"].as_array().unwrap().last().unwrap()["number"].clone();
    read_file(&rig.at, 2);
    assert_eq!(last(&rig.trace(&["--threshold", "1"])), last(&traced));
    let none = rig.trace(&["--threshold", "3600000"]);
    assert_eq!(none["waits"], Value::Array(Vec::new()));

    let path = rig.at.to_str().unwrap();
    let lines = rig.burgeon.ok(&["trace", path, "--threshold", "1"]);
    assert!(lines.contains("failed tries: ") && lines.contains("data/2 +"), "{lines}");
    let top = rig.burgeon.ok(&["trace", path, "--top", "files", "--threshold", "1"]);
    assert!(top.starts_with("TIME") && top.contains("data/2"), "{top}");
    let summary = rig.burgeon.ok(&["trace", path, "--summary", "--threshold", "1"]);
    assert!(summary.contains("the longest") && summary.contains("errors: 0"), "{summary}");
    rig.burgeon.fails(&["trace", "/proc"], 3, "is in no mount");
    drop_caches();
    fs::read(rig.at.join("data").join(FORGED)).unwrap();
    for more in [&["--top", "files"][..], &[]] {
        let said = rig.burgeon.ok(&[&["trace", path, "--threshold", "0"], more].concat());
        assert!(said.contains("data/a\\u{1b}[31mb\\nc"), "{said}");
    }
    let traced = rig.trace(&["--threshold", "0"]);
    let is_forged = |wait: &Value| wait["file"].as_str().is_some_and(|it| it.ends_with(FORGED));
    assert!(traced["waits"].as_array().unwrap().iter().any(is_forged), "{traced:#}");

    // Waits of the next seconds only, as they end.
    let arguments = ["trace", path, "--follow", "4", "--threshold", "1"];
    let following = rig.burgeon.command(&arguments).stdout(Stdio::piped()).spawn().unwrap();
    rig.read_with_failures(4);
    let output = following.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("data/4 +") && !said.contains("data/2 +"), "{said}");
    rig.burgeon.umount(mounted);
}

/// A session of tmux with a server of its own, which ends with the test.
struct Terminal(String);

impl Terminal {
    fn run(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux").args(["-L", &self.0]).args(arguments).output();
        let output = output.expect("tmux is installed");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn screen(&self) -> String {
        self.run(&["capture-pane", "-p", "-t", "top"])
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.run(&["kill-server"]);
    }
}

#[test]
fn top_fits_a_real_terminal_and_follows_the_mounts() {
    let space = Space::new("top");
    let (rig, mounted) = rig(&space);
    let terminal = Terminal(format!("burgeon-test-{}", std::process::id()));
    let state = rig.burgeon.state().display();
    let line = format!(
        "BURGEON_CONFIG=none exec {PROGRAM} --state-dir {state} top --interval 1 2>&1; sleep 60"
    );
    terminal.run(&[
        "-f",
        "/dev/null",
        "new-session",
        "-d",
        "-s",
        "top",
        "-x",
        "80",
        "-y",
        "24",
        &line,
    ]);
    let shows = |what: &str| wait_until(PATIENCE, || terminal.screen().contains(what));
    assert!(shows("MISSES/S") && shows("image"), "{}", terminal.screen());
    let mut number = 0;
    let has_file = || {
        rig.read_with_failures(number % FILES);
        number += 1;
        terminal.screen().contains("data/")
    };
    assert!(wait_until(PATIENCE, has_file), "{}", terminal.screen());
    let told = rig.burgeon.ok(&["top", "--count", "1", "--json"]);
    let told: Value = serde_json::from_str(&told).unwrap();
    assert!(told["slowest_files"][0]["waited_us"].as_u64() > Some(0), "{told:#}");
    assert!(told["mounts"][0]["p99_us"].as_f64() > Some(0.0), "{told:#}");
    assert!(told["cache"]["limit_bytes"].as_u64() > Some(0), "{told:#}");
    let screen = terminal.screen();
    assert!(screen.lines().count() <= 24, "{screen}");
    assert!(
        screen.lines().next().unwrap().starts_with("burgeon "),
        "the first line is there: {screen}"
    );
    rig.burgeon.umount(mounted);
    assert!(shows("nothing is mounted"), "{}", terminal.screen());
    drop(terminal);
    // For scripts: a number of screens, without control characters.
    let once = rig.burgeon.ok(&["top", "--count", "1"]);
    assert!(once.contains("nothing is mounted") && !once.contains('\u{1b}'), "{once:?}");
    rig.burgeon.ok(&["shutdown"]);
    let none: Value =
        serde_json::from_str(&rig.burgeon.ok(&["top", "--count", "1", "--json"])).unwrap();
    assert!(none["version"].is_null() && none["hit_ratio"].is_null(), "{none}");
    assert_eq!(none["mounts"], serde_json::json!([]));
}
