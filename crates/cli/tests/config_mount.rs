//! The configuration's effect on mounts and on the daemon: defaults of mounts, level and format of
//! the log. `config.rs` tests the files themselves.

#![allow(clippy::unwrap_used)]

use std::{
    borrow::Cow,
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use testkit::{Burgeon, Mounted, PATIENCE, Space, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const MIB: u64 = 1 << 20;

/// An installation with the image `app:1`, whose configuration is the file `file`.
struct Host<'a> {
    burgeon: Burgeon,
    space: &'a Space,
    file: PathBuf,
}

impl<'a> Host<'a> {
    fn new(space: &'a Space, text: &str) -> Self {
        let file = space.path("config.toml");
        fs::write(&file, text).unwrap();
        let burgeon = Burgeon::new(PROGRAM, space).env("BURGEON_CONFIG", &file);
        let tree = space.make_folder("tree");
        fs::write(tree.join("file"), vec![7; 3_000_000]).unwrap();
        burgeon.build(&tree, "app:1");
        Self { burgeon, space, file }
    }

    fn write(&self, text: &str) {
        fs::write(&self.file, text).unwrap();
    }

    fn mount(&self, name: &str, options: &[&str]) -> Mounted {
        self.burgeon.mount("app:1", &self.space.path(name), options)
    }

    /// The status of the mount `name`.
    fn status(&self, name: &str) -> Value {
        let status = self.burgeon.status();
        let at = self.space.path(name);
        let mounts = status["mounts"].as_array().unwrap();
        mounts.iter().find(|mount| mount["target"] == at.to_str().unwrap()).unwrap().clone()
    }

    fn limit(&self, name: &str) -> u64 {
        let status = self.status(name);
        find(&status, "limit").unwrap_or_else(|| panic!("no limit in {status:#}"))
    }
}

/// The first number of this name in the document.
fn find(value: &Value, name: &str) -> Option<u64> {
    match value {
        Value::Object(map) => map
            .get(name)
            .and_then(Value::as_u64)
            .or_else(|| map.values().find_map(|value| find(value, name))),
        Value::Array(values) => values.iter().find_map(|value| find(value, name)),
        _ => None,
    }
}

#[test]
fn the_command_line_wins_over_the_defaults_of_mounts() {
    let space = Space::new("config-mount");
    let host = Host::new(
        &space,
        "[mount]\nwrite-limit = '300M'\nfill = true\ntransport = 'fuse'\nprofile = 'none'\n",
    );
    let a = host.mount("a", &[]);
    assert_eq!(host.limit("a"), 300 * MIB);
    assert_eq!(host.status("a")["transport"], "FUSE file + loop");
    assert!(wait_until(PATIENCE, || host.status("a")["fill"]["state"] == "done"));

    let b = host.mount("b", &["--write-limit", "256M", "--fill=false"]);
    assert_eq!(host.limit("b"), 256 * MIB);
    assert!(host.status("b")["fill"].is_null(), "{:#}", host.status("b"));
    // A default never contradicts an option.
    let c = host.mount("c", &["--read-only"]);
    assert!(fs::write(c.path().join("new"), "").is_err());

    // The limit is for new writes: existing ones keep theirs, and nobody is told.
    let kept = host.mount("d", &["--writes", "kept", "--write-limit", "256M"]);
    host.burgeon.umount(kept);
    let (kept, said) =
        host.burgeon.mount_and_listen("app:1", &space.path("d"), &["--writes", "kept"]);
    assert!(!said.contains("note:"), "{said}");
    assert_eq!(host.limit("d"), 256 * MIB);
    [a, b, c, kept].into_iter().for_each(|mounted| host.burgeon.umount(mounted));
}

#[test]
fn a_changed_default_holds_from_the_next_mount_on_and_for_lines_of_fstab() {
    let space = Space::new("config-change");
    let host = Host::new(&space, "[mount]\nwrite-limit = '256M'\n");
    let a = host.mount("a", &[]);
    host.write("[mount]\nwrite-limit = '320M'\n");
    let b = host.mount("b", &[]);
    assert_eq!([host.limit("a"), host.limit("b")], [256 * MIB, 320 * MIB]);

    let program = space.make_folder("sbin").join("mount.burgeon");
    symlink(PROGRAM, &program).unwrap();
    let helper = |name: &str, more: &str| {
        let at = space.make_folder(name);
        let (state, file) = (host.burgeon.state().display(), host.file.display());
        let options = format!("state-dir={state},config={file}{more}");
        let done =
            Command::new(&program).args(["-o", &options, "app:1"]).arg(&at).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Mounted::at(&at)
    };
    let (c, d) = (helper("c", ""), helper("d", ",write-limit=256M,fill=false"));
    assert_eq!([host.limit("c"), host.limit("d")], [320 * MIB, 256 * MIB]);
    [a, b, c, d].into_iter().for_each(|mounted| host.burgeon.umount(mounted));
}

#[test]
fn an_image_of_a_named_store_is_mounted() {
    let space = Space::new("config-store");
    let store = space.make_folder("elsewhere");
    let text =
        format!("[mount]\nwrite-limit = '256M'\n[store.models]\nurl = '{}'\n", store.display());
    let host = Host::new(&space, &text);
    let tree = space.make_folder("other");
    fs::write(tree.join("name"), "of the named store").unwrap();
    host.burgeon.ok(&["build", tree.to_str().unwrap(), "app:2", "--store", "models"]);
    let mounted = host.burgeon.mount("app:2", &space.path("at"), &["--store", "models"]);
    assert_eq!(fs::read_to_string(mounted.path().join("name")).unwrap(), "of the named store");
    assert_eq!(host.status("at")["store"], store.to_str().unwrap());
    host.burgeon.umount(mounted);
}

/// The level in the environment of the daemon's process `which`.
fn level_of(burgeon: &Burgeon, which: &str) -> String {
    variable_of(burgeon, which, "BURGEON_LOG")
}

/// The value of a variable in the environment of the daemon's process `which`.
fn variable_of(burgeon: &Burgeon, which: &str, name: &str) -> String {
    let pid = burgeon.status()[which].as_u64().unwrap();
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let value = |it: Cow<str>| Some(it.strip_prefix(name)?.strip_prefix('=')?.to_owned());
    variables.filter_map(value).next().unwrap_or_default()
}

#[test]
fn the_daemon_takes_its_level_at_its_start_and_at_an_upgrade() {
    let space = Space::new("config-level");
    let host = Host::new(&space, "log.level = 'error'\nmount.write-limit = '256M'\n");
    let log = || fs::read_to_string(host.burgeon.state().join("run/daemon.log")).unwrap();
    let mounted = host.mount("a", &[]);
    assert_eq!(level_of(&host.burgeon, "server_pid"), "error");
    assert!(!log().contains("info:"), "{}", log());

    host.write("log.level = 'info'\n");
    host.burgeon.ok(&["upgrade"]);
    assert_eq!(level_of(&host.burgeon, "server_pid"), "info");
    assert!(log().contains("info: the daemon is ready"), "{}", log());

    // The environment and the option win.
    let upgrade = |level: &str| {
        let output = host.burgeon.command(&["upgrade"]).env("BURGEON_LOG", level).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    upgrade("warn");
    assert_eq!(level_of(&host.burgeon, "server_pid"), "warn");
    host.burgeon.ok(&["upgrade", "--log-level", "debug"]);
    assert_eq!(level_of(&host.burgeon, "server_pid"), "debug");

    // A daemon gets the place that a command was given, wherever that was typed.
    fs::write(space.path("other.toml"), "log.level = 'error'\n").unwrap();
    let mut upgrade = host.burgeon.command(&["upgrade", "--config", "other.toml"]);
    let output = upgrade.current_dir(space.folder()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(level_of(&host.burgeon, "server_pid"), "error");
    host.burgeon.umount(mounted);
}

#[test]
fn the_daemon_takes_the_format_of_its_log_at_its_start_and_at_an_upgrade() {
    let space = Space::new("config-format");
    let host = Host::new(&space, "mount.write-limit = '256M'\n");
    let mounted = host.mount("a", &[]);
    let log = || fs::read_to_string(host.burgeon.state().join("run/daemon.log")).unwrap();
    let format = || variable_of(&host.burgeon, "server_pid", "BURGEON_LOG_FORMAT");
    assert_eq!((format().as_str(), log().contains("{\"")), ("", false));

    host.write("log.format = 'json'\n");
    let before = log().len();
    host.burgeon.ok(&["upgrade"]);
    assert_eq!(format(), "json");
    assert_eq!(host.burgeon.ok(&["log"]), "level info, format json\n");
    let ready =
        |line: &str| serde_json::from_str::<Value>(line).is_ok_and(|it| it["level"] == "info");
    assert!(log()[before..].lines().any(ready), "{}", log());

    // The environment wins.
    let mut upgrade = host.burgeon.command(&["upgrade"]);
    let output = upgrade.env("BURGEON_LOG_FORMAT", "text").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        (format().as_str(), &*host.burgeon.ok(&["log"])),
        ("text", "level info, format text\n")
    );
    host.burgeon.umount(mounted);
}

/// Mounts wait for a daemon, so it starts; commands refuse the same file.
#[test]
fn a_daemon_starts_with_a_broken_configuration_and_says_so() {
    let space = Space::new("config-broken");
    let host = Host::new(&space, "");
    host.write("[log]\nlevel = 'warn'\nlevle = 1\n");
    host.burgeon.fails(&["list"], 1, "did you mean log.level?");
    let log = fs::File::create(space.path("log")).unwrap();
    let mut daemon = Command::new(PROGRAM)
        .arg("__supervise")
        .arg(host.burgeon.state())
        .env("BURGEON_CONFIG", &host.file)
        .env_remove("BURGEON_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut said).unwrap();
    let log = fs::read_to_string(space.path("log")).unwrap();
    assert_eq!(said, "ready\n", "{log}");
    assert!(log.contains("warn: the configuration has a problem: "), "{log}");
    assert!(log.contains("did you mean log.level?"), "{log}");
    assert!(!log.contains("info:"), "the valid setting holds: {log}");
    host.write("");
    host.burgeon.ok(&["shutdown"]);
    daemon.wait().unwrap();
}

#[test]
fn the_cache_has_the_configured_size_until_a_user_changes_it() {
    let space = Space::new("config-cache");
    let host = Host::new(&space, "[cache]\nsize = '64M'\nkeep-free = '3M'\n");
    // Other tests have no floor, because their disk may be nearly full.
    fs::write(host.burgeon.state().join("cache.json"), "{}").unwrap();
    let of_cache = |name: &str| {
        let shown = host.burgeon.ok(&["cache", "status", "--json"]);
        serde_json::from_str::<Value>(&shown).unwrap()["cache"][name].as_u64().unwrap()
    };
    let limit = || of_cache("limit");
    let mounted = host.mount("at", &["--read-only"]);
    assert_eq!((limit(), of_cache("floor")), (64 * MIB, 3 * MIB));
    // The server that serves now takes it over.
    host.write("[cache]\nsize = '32M'\nkeep-free = '5M'\n");
    host.burgeon.ok(&["upgrade"]);
    assert!(wait_until(PATIENCE, || limit() == 32 * MIB), "{}", limit());
    assert_eq!(of_cache("floor"), 5 * MIB);
    host.burgeon.ok(&["cache", "resize", "48M"]);
    assert_eq!(limit(), 48 * MIB);
    host.burgeon.umount(mounted);
    host.burgeon.ok(&["shutdown"]);
    let mounted = host.mount("at", &["--read-only"]);
    assert_eq!(limit(), 48 * MIB);
    host.burgeon.umount(mounted);
}

/// Doctor is asked before the first mount.
#[test]
fn a_cache_that_would_keep_nothing_is_named_before_there_is_a_daemon() {
    let space = Space::new("config-full");
    let host = Host::new(&space, "[cache]\nkeep-free = '1000T'\n");
    fs::write(host.burgeon.state().join("cache.json"), "{}").unwrap();
    let found = host.burgeon.run(&["doctor"]).stdout;
    assert!(found.contains("it will keep nothing in") && found.contains("keep-free"), "{found}");
    host.write("[cache]\nkeep-free = '0'\n");
    let found = host.burgeon.run(&["doctor"]).stdout;
    assert!(!found.contains("keep nothing"), "{found}");
}

#[test]
fn metrics_are_those_of_the_configured_state_directory() {
    let space = Space::new("config-state");
    let host = Host::new(&space, "");
    let mounted = host.mount("at", &["--read-only"]);
    let config = space.path("state.toml");
    fs::write(&config, format!("state-dir = {:?}\n", host.burgeon.state())).unwrap();
    let told = |config: &Path| {
        let mut command = Command::new(PROGRAM);
        command.args(["metrics", "--config"]).arg(config).env_remove("BURGEON_STATE_DIR");
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    assert!(told(&config).contains("\nburgeon_mounts 1\n"), "{}", told(&config));
    host.burgeon.umount(mounted);
}
