//! `burgeon metrics` on real mounts: its counters never go down, only its group reads the status,
//! and Prometheus itself runs the expressions of `dist/`. Needs root, and the Debian package
//! prometheus.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use burgeon_block::Counters;
use burgeon_metrics::{
    CacheNow, CacheValues, DiskNow, Disks, MetricsSnapshot, MountNow, Totals, Values, render,
};
use serde_json::Value;
use testkit::{Burgeon, Mounted, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 8;
const FILE_LEN: usize = 1 << 20;
/// A user without privileges.
const NOBODY: u32 = 65534;

fn dist(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist").join(name)
}

/// An installation with a mounted image of eight files.
fn installation(space: &Space) -> (Burgeon, Mounted, PathBuf) {
    let burgeon = Burgeon::new(PROGRAM, space);
    let tree = space.make_folder("tree");
    for number in 0..FILES {
        fs::write(tree.join(number.to_string()), Rng::new(number).bytes(FILE_LEN)).unwrap();
    }
    burgeon.build(&tree, "image");
    let at = space.path("at");
    let mounted = burgeon.mount("image", &at, &["--profile", "none", "--write-limit", "256M"]);
    (burgeon, mounted, at)
}

fn read_file(at: &Path, number: u64) {
    drop_caches();
    assert!(fs::read(at.join(number.to_string())).unwrap() == Rng::new(number).bytes(FILE_LEN));
}

/// The text, by series.
fn series(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.map(|line| line.rsplit_once(' ').unwrap());
    pairs.map(|(series, value)| (series.to_owned(), value.to_owned())).collect()
}

fn exported(burgeon: &Burgeon) -> BTreeMap<String, String> {
    series(&burgeon.ok(&["metrics"]))
}

/// The sum of all series of a counter whose labels contain `label`.
fn sum(series: &BTreeMap<String, String>, name: &str, label: &str) -> u128 {
    let is_of = |key: &str| key.starts_with(&format!("{name}{{")) && key.contains(label);
    let values = series.iter().filter(|(key, _)| is_of(key)).map(|(_, value)| value);
    values.map(|value| value.parse::<u128>().unwrap()).sum()
}

/// No counter of a store or of the host is below its value in `before`, and none is missing.
#[track_caller]
fn assert_grown(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) {
    let is_counter = |key: &str| {
        let name = key.split('{').next().unwrap_or(key);
        let of_histogram = ["_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end));
        name.ends_with("_total") || of_histogram
    };
    for (key, value) in before.iter().filter(|(key, _)| is_counter(key)) {
        // The counters of a mount end with it.
        let Some(now) = after.get(key) else {
            assert!(key.starts_with("burgeon_mount_"), "{key} is gone");
            continue;
        };
        let (whole, now_whole): (u128, u128) = (digits(value), digits(now));
        assert!(now_whole >= whole, "{key} went from {value} to {now}");
    }
}

/// A number in billionths, exactly.
fn digits(number: &str) -> u128 {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    format!("{whole}{part:0<9}").parse().unwrap()
}

/// Waits until `holds` of the exported series, at most a few looks of the daemon.
#[track_caller]
fn await_exported(
    burgeon: &Burgeon,
    before: &BTreeMap<String, String>,
    holds: impl Fn(&BTreeMap<String, String>) -> bool,
) -> BTreeMap<String, String> {
    let mut now = BTreeMap::new();
    let reached = wait_until(PATIENCE, || {
        now = exported(burgeon);
        assert_grown(before, &now);
        holds(&now)
    });
    assert!(reached, "{now:#?}");
    now
}

/// Totals of an earlier life: a store with an odd number of bytes beyond 2⁵³.
fn lived_before(state: &Path, store: &str, bytes: u64) {
    let counters = Counters::default();
    counters.miss_bytes.add(bytes);
    let mut totals = Totals::from(1_700_000_000);
    totals.look("01234567", store, Values::of(&counters));
    fs::write(state.join("totals"), totals.encode().unwrap()).unwrap();
}

#[test]
fn no_counter_goes_down_and_no_read_counts_twice() {
    let space = Space::new("metrics-grow");
    let state = space.make_folder("state");
    fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).unwrap();
    let start = (1 << 53) + 1;
    lived_before(&state, "s3://earlier", start);
    let store = state.join("store").display().to_string();
    let (burgeon, mounted, at) = installation(&space);
    let missed = |series: &BTreeMap<String, String>| {
        sum(series, "burgeon_read_bytes_total", &format!("store=\"{store}\",tier=\"source\""))
    };
    let reads = |series: &BTreeMap<String, String>, files: u64| {
        missed(series) >= u128::from(files) * FILE_LEN as u128
    };
    read_file(&at, 0);
    let first = await_exported(&burgeon, &BTreeMap::new(), |now| reads(now, 1));
    let earlier = "burgeon_read_bytes_total{store=\"s3://earlier\",tier=\"source\"}";
    assert_eq!(first[earlier], start.to_string(), "all digits");
    assert_eq!(first["burgeon_totals_since_timestamp_seconds"], "1700000000");

    // The server dies: the next one continues.
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    read_file(&at, 1);
    let second = await_exported(&burgeon, &first, |now| reads(now, 2));
    assert!(wait_until(PATIENCE, || {
        digits(&exported(&burgeon)["burgeon_server_starts_total"])
            > digits(&first["burgeon_server_starts_total"])
    }));

    // Both die: the next command starts a supervisor, which continues with the totals of the file.
    burgeon.kill_both();
    read_file_and_start(&burgeon, &at, 2);
    let third = await_exported(&burgeon, &second, |now| reads(now, 3));

    burgeon.ok(&["upgrade"]);
    read_file(&at, 3);
    let fourth = await_exported(&burgeon, &third, |now| reads(now, 4));

    // A mount that ends right after its last read loses nothing.
    read_file(&at, 4);
    burgeon.umount(mounted);
    let fifth = await_exported(&burgeon, &fourth, |now| reads(now, 5));
    burgeon.ok(&["shutdown"]);
    let down = exported(&burgeon);
    assert_eq!(down["burgeon_up"], "0");
    let again = burgeon.mount("image", &at, &["--read-only", "--profile", "none"]);
    let last = await_exported(&burgeon, &fifth, |now| reads(now, 5));
    burgeon.umount(again);
    // Each byte was read from the store once, and the rest of a chunk never counts.
    let all = missed(&last);
    assert!(all <= 6 * FILE_LEN as u128, "{all} bytes of five files");
}

/// Reads a file while a command starts the daemon that the read waits for.
fn read_file_and_start(burgeon: &Burgeon, at: &Path, number: u64) {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_file(at, number));
        let again = at.with_file_name("again");
        let mounted = burgeon.mount("image", &again, &["--read-only", "--profile", "none"]);
        reader.join().unwrap();
        burgeon.umount(mounted);
    });
}

/// `burgeon metrics` as a user without privileges, in group `gid`.
fn as_nobody(socket: &Path, gid: u32, arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["metrics", "--socket"]).arg(socket).args(arguments);
    command.uid(NOBODY).gid(gid).stdin(Stdio::null());
    command
}

#[test]
fn only_the_group_reads_the_status_and_promtool_accepts_it() {
    let space = Space::new("metrics-group");
    let (burgeon, mounted, at) = installation(&space);
    read_file(&at, 0);
    publish_disks(&space, &burgeon);
    let text = burgeon.ok(&["metrics"]);
    assert!(text.contains("\nburgeon_disk_"), "{text}");
    assert_promtool(&["check", "metrics"], &text);
    let named =
        |line: &str| line.starts_with("burgeon_mount_info{") && line.contains("image=\"image\"");
    assert!(text.lines().any(named), "{text}");
    burgeon.fails(&["metrics", "--listen", "127.0.0.1:0"], 2, "root parses no HTTP");

    // A machine that has the package has the group; here the socket gets another one.
    let socket = burgeon.state().join("run/status.sock");
    let mode = fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o660);
    let group = 4_242;
    chown(&socket, None, Some(group)).unwrap();
    open_folders(&burgeon);
    let refused = as_nobody(&socket, NOBODY, &[]).output().unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("root and the group burgeon"), "{said}");
    let admitted = as_nobody(&socket, group, &[]).output().unwrap();
    assert!(admitted.status.success(), "{}", String::from_utf8_lossy(&admitted.stderr));
    assert!(String::from_utf8_lossy(&admitted.stdout).contains("\nburgeon_up 1\n"));

    // The socket takes no commands: whatever is sent, one snapshot comes back.
    let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let command = br#"{"call":"shutdown","force":true}"#;
    let _ = stream.write_all(&[&(command.len() as u32).to_le_bytes()[..], command].concat());
    let mut answer = Vec::new();
    // Unread bytes reset the connection at its end.
    let _ = stream.read_to_end(&mut answer);
    assert_eq!(burgeon.status()["mounts"].as_array().unwrap().len(), 1);

    // A file for node_exporter is there at once, and is replaced.
    let file = space.path("burgeon.prom");
    let options = ["metrics", "--interval", "1", "--textfile", file.to_str().unwrap()];
    let mut writer = Running(burgeon.command(&options).spawn().unwrap());
    let inode = || fs::metadata(&file).ok().map(|it| std::os::unix::fs::MetadataExt::ino(&it));
    assert!(wait_until(PATIENCE, || inode().is_some()));
    let first = inode();
    assert!(wait_until(PATIENCE, || inode() != first));
    assert!(fs::read_to_string(&file).unwrap().contains("\nburgeon_up 1\n"));
    writer.end();
    burgeon.umount(mounted);
}

/// Lets others reach the socket, as `/run/burgeon` does for the default state directory.
fn open_folders(burgeon: &Burgeon) {
    let run = burgeon.state().join("run");
    for folder in run.ancestors().take_while(|folder| folder.parent().is_some()) {
        let mode = fs::metadata(folder).unwrap().permissions().mode();
        fs::set_permissions(folder, fs::Permissions::from_mode(mode | 0o011)).unwrap();
    }
}

#[track_caller]
fn assert_promtool(arguments: &[&str], input: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(arguments).current_dir(dist("")).stdin(Stdio::piped());
    let child = promtool.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("promtool, of the package prometheus, is installed");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
}

/// A process that ends with the test.
struct Running(Child);

impl Running {
    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// A port that nobody uses now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The body of an answer to GET.
fn get(port: u16, target: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let request = format!("GET {target} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

/// The number of series that Prometheus finds for an expression.
fn found(port: u16, expression: &str) -> usize {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    let encoded: String = expression
        .bytes()
        .map(
            |byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") },
        )
        .collect();
    let Some(body) = get(port, &format!("/api/v1/query?query={encoded}")) else { return 0 };
    let answer: Value = serde_json::from_str(&body).unwrap_or_default();
    assert_ne!(answer["status"], "error", "{expression}: {body}");
    answer["data"]["result"].as_array().map_or(0, Vec::len)
}

/// Each expression of the dashboard.
fn of_dashboard() -> Vec<String> {
    let text = fs::read_to_string(dist("grafana-dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    expressions.map(|it| it.replace("$__rate_interval", "30s")).collect()
}

/// Each metric that an alert names.
fn of_alerts() -> Vec<String> {
    let text = fs::read_to_string(dist("burgeon.rules.yml")).unwrap();
    let rules = text.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = rules.flat_map(|rule| rule.split(|c| !is_name(c)));
    words.filter(|word| word.starts_with("burgeon_")).map(str::to_owned).collect()
}

#[test]
fn a_real_prometheus_finds_each_expression_of_dashboard_and_alerts() {
    assert_promtool(&["check", "rules", "burgeon.rules.yml"], "");
    assert_promtool(&["test", "rules", "burgeon.rules.test.yml"], "");
    let space = Space::new("metrics-prometheus");
    let (burgeon, mounted, at) = installation(&space);
    publish_disks(&space, &burgeon);
    // A rate of writes is one of an hour at least.
    let published = burgeon.state().join("run/disks.json");
    let text = fs::read_to_string(&published).unwrap();
    let years = text.replace("left_seconds\":null", "left_seconds\":315576000");
    assert_ne!(text, years);
    fs::write(&published, years).unwrap();
    read_file(&at, 0);
    read_file(&at, 0);
    open_folders(&burgeon);
    let socket = burgeon.state().join("run/status.sock");
    chown(&socket, None, Some(NOBODY)).unwrap();
    chown(published, None, Some(NOBODY)).unwrap();
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let mut exporter = as_nobody(&socket, NOBODY, &["--listen", &address]);
    let _exporter = Running(exporter.spawn().unwrap());
    let is_up = || get(port, "/metrics").is_some_and(|text| text.contains("\nburgeon_up 1\n"));
    assert!(wait_until(PATIENCE, is_up));
    assert!(get(port, "/").unwrap().contains("/metrics"));

    let (own, _prometheus) = scraped(&space, &address);
    let mut missing: Vec<String> = [of_dashboard(), of_alerts()].concat();
    assert!(missing.len() > 30, "{missing:?}");
    let all = missing.len();
    let mut number = 1;
    wait_until(PATIENCE, || {
        // Reads that wait go on, so that rates of them are numbers.
        read_file(&at, number % FILES);
        number += 1;
        missing.retain(|expression| found(own, expression) == 0);
        missing.is_empty()
    });
    assert!(missing.is_empty(), "no series of {all} for {missing:#?}");
    println!("{all} expressions give series");
    // The whole expression of an alert: no condition holds here.
    for condition in conditions() {
        assert_eq!(found(own, &condition), 0, "{condition}");
    }
    burgeon.umount(mounted);
}

/// A Prometheus that scrapes `address` every second, and its port.
fn scraped(space: &Space, address: &str) -> (u16, Running) {
    let config = space.path("prometheus.yml");
    let text = format!(
        "global:\n  scrape_interval: 1s\nrule_files: ['{}']\nscrape_configs:\n  - job_name: burgeon\n    \
         static_configs:\n      - targets: ['{address}']\n",
        dist("burgeon.rules.yml").display()
    );
    fs::write(&config, text).unwrap();
    let own = free_port();
    let mut prometheus = Command::new("prometheus");
    prometheus.arg(format!("--config.file={}", config.display()));
    prometheus.arg(format!("--storage.tsdb.path={}", space.path("tsdb").display()));
    prometheus.arg(format!("--web.listen-address=127.0.0.1:{own}"));
    let prometheus = prometheus.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    (own, Running(prometheus.expect("the package prometheus is installed")))
}

/// The expression of each alert, whole.
fn conditions() -> Vec<String> {
    let text = fs::read_to_string(dist("burgeon.rules.yml")).unwrap();
    let rules = text.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let conditions: Vec<_> = rules.map(str::to_owned).collect();
    assert_eq!(conditions.len(), text.matches("- alert: ").count(), "an expression is one line");
    conditions
}

/// The text of a daemon for which the condition of each alert holds, after so many seconds.
fn troubled(seconds: u64) -> String {
    // Its daemon dies again and again.
    if seconds % 3 == 2 {
        return render(None, &Disks { seen_unix_seconds: 1, disks: Vec::new() });
    }
    let counters = Counters::default();
    for counter in [&counters.failed_reads, &counters.source_errors, &counters.cache_corrupt_blocks]
    {
        // Rates are over ten minutes, of which the test sees a second.
        counter.add(100 * seconds);
    }
    (0..20 * seconds).for_each(|_| counters.miss_latency.record(2_000_000_000));
    let mut totals = Totals::from(1);
    totals.look("0a", "/store", Values::of(&counters));
    let cache = CacheValues { read_errors: seconds, ..CacheValues::default() };
    let snapshot = MetricsSnapshot {
        mount_count: 1,
        mounts_now: vec![MountNow { id: "0a".to_owned(), ..MountNow::default() }],
        cache_now: Some(CacheNow { limit: 1 << 20, ..CacheNow::default() }),
        ..MetricsSnapshot::default()
    };
    // Its totals are from long ago.
    let snapshot = snapshot.with_totals(&totals);
    let snapshot =
        MetricsSnapshot { cache, server_starts: seconds, written_unix_seconds: 1, ..snapshot };
    let disk = DiskNow {
        endurance_used_percent: Some(95),
        endurance_left_seconds: Some(86_400),
        ..DiskNow::default()
    };
    render(Some(&snapshot), &Disks { seen_unix_seconds: 1, disks: vec![disk] })
}

#[test]
fn a_real_prometheus_finds_each_alert_whose_condition_holds() {
    let space = Space::new("metrics-alerts");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // It answers each request until the test's process ends.
    std::thread::spawn(move || {
        for (number, stream) in (1..).zip(listener.incoming().map_while(Result::ok)) {
            let mut stream = stream;
            let mut request = [0; 1 << 12];
            let _ = stream.read(&mut request);
            let body = troubled(number);
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close";
            let _ = write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    let (own, _prometheus) = scraped(&space, &address);
    let mut missing = conditions();
    wait_until(PATIENCE, || {
        missing.retain(|condition| found(own, condition) == 0);
        missing.is_empty()
    });
    assert!(missing.is_empty(), "no series for {missing:#?}: {}", troubled(9));
}

/// Counters of disks, with a smartctl of ours.
fn publish_disks(space: &Space, burgeon: &Burgeon) {
    let folder = space.make_folder("bin");
    let program = folder.join("smartctl");
    let report = r#"{"smartctl":{},"model_name":"X","serial_number":"S",
        "nvme_smart_health_information_log":
        {"data_units_read":1000,"data_units_written":2000,"percentage_used":7}}"#;
    fs::write(&program, format!("#!/bin/sh\ncat <<'END'\n{report}\nEND\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut disks = burgeon.command(&["disks"]);
    let output = disks.env("PATH", folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
