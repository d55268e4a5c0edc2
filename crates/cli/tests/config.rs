//! The configuration, as commands read it: precedence, problems, names of stores, who may write it.
//! `config_mount.rs` shows its effect on mounts and on the daemon.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, Permissions},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};
use testkit::copy_program;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// A user without rights; root tests with it.
const NOBODY: u32 = 65534;

/// A folder of configuration, and a state directory.
struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("etc/config.d")).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path("etc").join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A command with this configuration, in the host's folder.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).current_dir(self.folder.path());
        for variable in ["BURGEON_STORE", "BURGEON_LOG"] {
            command.env_remove(variable);
        }
        command.env("BURGEON_CONFIG", self.path("etc"));
        command.env("BURGEON_STATE_DIR", self.path("state"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, arguments: &[&str]) -> String {
        succeeded(self.run(arguments))
    }

    /// Runs a command that fails with `code`; returns its standard error.
    #[track_caller]
    fn fails(&self, arguments: &[&str], code: i32) -> String {
        failed(self.run(arguments), code)
    }

    /// `burgeon config show --json` as a map from keys to values and origins.
    #[track_caller]
    fn shown(&self, arguments: &[&str]) -> impl Fn(&str) -> Value {
        shown(self.run(&[&["config", "show", "--json"], arguments].concat()))
    }
}

#[track_caller]
fn succeeded(output: Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn failed(output: Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[track_caller]
fn shown(output: Output) -> impl Fn(&str) -> Value {
    let document: Value = serde_json::from_str(&succeeded(output)).unwrap();
    move |key| {
        let settings = document["settings"].as_array().unwrap();
        let setting = settings.iter().find(|setting| setting["key"] == key);
        setting.unwrap_or_else(|| panic!("no {key} in {document:#}")).clone()
    }
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("left out: this part needs root");
    }
    is_root
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_files_in_their_order() {
    let host = Host::new();
    let main = host.write(
        "config.toml",
        "state-dir = '/srv/state'\n[log]\nlevel = 'warn'\nformat = 'json'\n[store]\ndefault = '/srv/1'\n\
         [mount]\nfill = true\npull = 'never'\nwrite-limit = '1G'\n",
    );
    let more = host.write("config.d/50-more.toml", "log.level = 'error'\nmount.fill = false\n");
    host.write("config.d/10-early.toml", "log.level = 'debug'\n");

    let show = shown(
        host.command(&["config", "show", "--json"])
            .env_remove("BURGEON_STATE_DIR")
            .output()
            .unwrap(),
    );
    let at = |file: &Path, line: u32| json!({ "kind": "file", "file": file, "line": line });
    for (key, value, origin) in [
        ("state-dir", json!("/srv/state"), at(&main, 1)),
        ("log.level", json!("error"), at(&more, 1)),
        ("log.format", json!("json"), at(&main, 4)),
        ("store.default", json!("/srv/1"), at(&main, 6)),
        ("mount.fill", json!(false), at(&more, 2)),
        ("mount.pull", json!("never"), at(&main, 9)),
        ("mount.write-limit", json!(1 << 30), at(&main, 10)),
        ("mount.transport", json!("auto"), json!({ "kind": "default" })),
    ] {
        let setting = show(key);
        assert_eq!((&setting["value"], &setting["origin"]), (&value, &origin), "{key}");
    }

    let mut command = host.command(&["config", "show", "--json"]);
    command.env("BURGEON_STORE", "/srv/2").env("BURGEON_LOG", "info");
    command.env("BURGEON_LOG_FORMAT", "text");
    let show = shown(command.output().unwrap());
    let variable = |name: &str| json!({ "kind": "environment", "variable": name });
    assert_eq!(show("store.default")["value"], "/srv/2");
    assert_eq!(show("store.default")["origin"], variable("BURGEON_STORE"));
    assert_eq!(show("state-dir")["origin"], variable("BURGEON_STATE_DIR"));
    assert_eq!(show("log.level")["origin"], variable("BURGEON_LOG"));
    assert_eq!(show("log.format")["origin"], variable("BURGEON_LOG_FORMAT"));
    assert_eq!(show("log.format")["value"], "text");

    let mut command = host.command(&["config", "show", "--json", "--store", "/srv/3"]);
    let show = shown(command.env("BURGEON_STORE", "/srv/2").output().unwrap());
    assert_eq!(show("store.default")["value"], "/srv/3");
    assert_eq!(show("store.default")["origin"], json!({ "kind": "option", "name": "--store" }));

    let said = host.ok(&["config", "show", "--origin"]);
    let line = said.lines().find(|line| line.starts_with("log.level")).unwrap();
    assert!(
        line.starts_with("log.level = \"error\" ") && line.ends_with("50-more.toml:1"),
        "{line}"
    );
    assert!(said.contains("mount.fetch-limit is not set"), "{said}");
    assert!(!host.ok(&["config", "show"]).contains("50-more.toml"));
}

#[test]
fn another_place_is_a_file_a_folder_or_none() {
    let host = Host::new();
    host.write("config.toml", "log.level = 'warn'\n");
    let other = host.write("other.toml", "log.level = 'debug'\n");
    let level = |arguments: &[&str]| host.shown(arguments)("log.level")["value"].clone();
    assert_eq!(level(&[]), "warn");
    assert_eq!(level(&["--config", "etc/other.toml"]), "debug");
    assert_eq!(level(&["--config", other.to_str().unwrap()]), "debug");
    assert_eq!(level(&["--config", "none"]), "info");
    assert_eq!(level(&["--config", ""]), "info");
    assert_eq!(level(&["--config", "etc/config.d"]), "info");
    let said = host.fails(&["list", "--config", "etc/missing.toml"], 1);
    assert!(said.contains("etc/missing.toml: cannot read it"), "{said}");
}

#[test]
fn a_check_names_every_problem_and_commands_refuse_to_guess() {
    let host = Host::new();
    let main = host.write("config.toml", "[mount]\nwirte-limit = '1G'\nfill = 'yes'\n");
    let broken = host.write("config.d/broken.toml", "[log]\nlevel = \n");
    let output = host.run(&["config", "check"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stdout).unwrap();
    let [main, broken] = [main, broken].map(|path| path.display().to_string());
    for problem in [
        format!("{main}:2: mount.wirte-limit: unknown key: did you mean mount.write-limit?"),
        format!("{main}:3: mount.fill: it is of the type string: write true or false"),
        format!("{broken}:2: "),
        "3 problems in the configuration".to_owned(),
    ] {
        assert!(said.contains(&problem), "no {problem:?} in {said}");
    }
    let output = host.run(&["config", "check", "--json"]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), said["problems"].as_array().unwrap().len()), (Some(1), 3));
    assert_eq!(said["problems"][0]["line"], 2);
    assert_eq!(said["problems"][0]["key"], "mount.wirte-limit");

    for verb in [&["list"][..], &["config", "show"]] {
        let said = host.fails(verb, 1);
        assert!(said.contains("did you mean mount.write-limit?"), "{said}");
        assert!(said.contains("2 more: `burgeon config check`"), "{said}");
    }
    assert!(!host.path("state").exists(), "nothing was done");
    // Mounts can be looked at and ended all the same.
    for verb in ["status", "shutdown", "upgrade"] {
        let output = host.run(&[verb]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("warning: the configuration has a problem"), "{verb}: {said}");
        assert!(!said.contains("--config none"), "{verb}: {said}");
    }
    host.ok(&["config", "show", "--config", "none"]);
    host.write("config.toml", "");
    host.write("config.d/broken.toml", "");
    assert!(host.ok(&["config", "check"]).contains("the configuration is valid: 2 files"));
}

#[test]
fn a_named_store_is_used_wherever_a_store_is() {
    let host = Host::new();
    for folder in ["tree", "models", "stores/models", "stores/other"] {
        fs::create_dir_all(host.path(folder)).unwrap();
    }
    fs::write(host.path("tree/file"), "content").unwrap();
    let at = |store: &str| host.path("stores").join(store).display().to_string();
    let named = format!(
        "[store.models]\nurl = '{}'\n[store.other]\nurl = '{}'\n",
        at("models"),
        at("other")
    );
    host.write("config.toml", &named);

    let built = host.run(&["build", "tree", "app:1", "--store", "models"]);
    let noted = String::from_utf8_lossy(&built.stderr).into_owned();
    succeeded(built);
    assert!(noted.contains("the folder is ./models"), "{noted}");
    assert!(host.path("stores/models/manifests").exists());
    let names = |arguments: &[&str]| host.ok(&[&["list"], arguments].concat()).contains("app:1");
    assert!(names(&["--store", "models"]));
    assert!(!names(&["--store", "other"]));
    assert!(!names(&["--store", "./models"]), "it is the folder");
    assert!(!names(&[]));
    let by_variable = host.command(&["list"]).env("BURGEON_STORE", "models").output().unwrap();
    assert!(succeeded(by_variable).contains("app:1"));

    host.write("config.toml", &format!("[store]\ndefault = 'models'\n{named}"));
    assert!(names(&[]));
    assert!(!names(&["--store", ""]), "it is the state directory's own");
    assert!(!names(&["--store", "other"]));
}

#[test]
fn the_state_directory_of_the_configuration_is_used_and_not_made_by_a_look() {
    let host = Host::new();
    let state = host.path("srv");
    host.write("config.toml", &format!("state-dir = '{}'\n", state.display()));
    fs::create_dir(host.path("tree")).unwrap();
    let run = |arguments: &[&str]| {
        host.command(arguments).env_remove("BURGEON_STATE_DIR").output().unwrap()
    };
    failed(run(&["list"]), 3);
    assert!(!state.exists());
    succeeded(run(&["build", "tree", "app:1"]));
    assert!(state.join("store").is_dir());
    assert!(succeeded(run(&["list"])).contains("app:1"));
}

#[test]
fn no_secret_is_shown() {
    let host = Host::new();
    for url in
        ["https://me:hunter2@host/x", "https://host/x?sig=hunter2", "oci://me:hunter2@host/x"]
    {
        for verb in [&["config", "show"][..], &["config", "show", "--json"], &["list"]] {
            let output = host.command(verb).env("BURGEON_STORE", url).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{verb:?} {output:?}");
            let said = [output.stdout, output.stderr].concat();
            assert!(!String::from_utf8_lossy(&said).contains("hunter2"), "{verb:?} {url}");
        }
        host.write("config.toml", &format!("[store.a]\nurl = \"{url}\"\n"));
        let output = host.run(&["config", "check"]);
        assert_eq!(output.status.code(), Some(1));
        let said = [output.stdout, output.stderr].concat();
        assert!(!String::from_utf8_lossy(&said).contains("hunter2"), "{url}");
        host.write("config.toml", "");
    }
}

#[test]
fn root_reads_no_file_that_others_can_write() {
    if !is_root() {
        return;
    }
    let host = Host::new();
    let (file, folder) = (host.write("config.toml", "log.level = 'warn'\n"), host.path("etc"));
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    mode(&folder, 0o755);
    mode(&file, 0o644);
    host.ok(&["config", "check"]);
    let refused = |writer: &str, path: &Path| {
        let said = host.fails(&["list"], 1);
        let path = path.display();
        assert!(said.contains(&format!("{writer} can write {path}")), "{said}");
        assert!(said.contains(&format!("chown root {path} && chmod go-w {path}")), "{said}");
    };
    mode(&file, 0o664);
    refused("a group", &file);
    mode(&file, 0o646);
    refused("every user", &file);
    mode(&file, 0o644);
    chown(&file, Some(NOBODY), None).unwrap();
    refused("another user", &file);
    chown(&file, Some(0), None).unwrap();
    mode(&folder, 0o777);
    refused("every user", &folder);
    // As /tmp.
    mode(&folder, 0o1777);
    host.ok(&["config", "check"]);
}

#[test]
fn another_user_reads_the_files_of_root_but_has_a_state_directory_of_their_own() {
    if !is_root() {
        return;
    }
    let host = Host::new();
    let file = host.write("config.toml", "state-dir = '/srv/of-root'\nlog.level = 'warn'\n");
    for path in [host.folder.path(), &host.path("etc"), &host.path("etc/config.d")] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    // A path to the program that this user may walk.
    let program = host.path("burgeon");
    copy_program(Path::new(PROGRAM), &program);
    let show = |verb: &[&str]| {
        let mut command = Command::new(&program);
        command.args(verb).current_dir("/").uid(NOBODY).gid(NOBODY);
        command.env_clear().env("HOME", "/nonexistent").env("BURGEON_CONFIG", host.path("etc"));
        command.output().unwrap()
    };
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    let shown = shown(show(&["config", "show", "--json"]));
    assert_eq!(shown("state-dir")["value"], "/nonexistent/.local/state/burgeon");
    assert_eq!(shown("log.level")["value"], "warn");
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let said = failed(show(&["list"]), 1);
    assert!(said.contains("cannot read it") && said.contains("chmod a+r"), "{said}");
}
