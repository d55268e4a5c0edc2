//! The `burgeon` command under test, with a state directory of its own.

use std::{
    ffi::{OsStr, OsString},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{
    Mounted, PATIENCE, Space, kill, loop_devices, processes_with, ublk_devices, ublk_expected,
    wait_until,
};

/// One installation: the program, its state directory, its daemon.
///
/// Dropping it shuts the daemon down and panics (unless the test already does) if a process, a
/// block device or a mount of this installation is left.
pub struct Burgeon {
    program: PathBuf,
    state: PathBuf,
    options: Vec<OsString>,
    /// ublk devices that were there before this installation: they name no state directory.
    ublk_before: Vec<String>,
    environment: Vec<(OsString, OsString)>,
}

/// The end of a command.
#[derive(Debug)]
pub struct Finished {
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Burgeon {
    /// The program `program` (a test gives `env!("CARGO_BIN_EXE_burgeon")`) with its state in
    /// the folder `state` of `space`.
    pub fn new(program: &str, space: &Space) -> Self {
        Self::with_state(program, space.path("state"))
    }

    /// The same with its state in `state`, a folder that is made if it is not there.
    pub fn with_state(program: &str, state: PathBuf) -> Self {
        let burgeon = Self::before_state(program, state);
        // The server reads its settings when it starts: they are there before the first command.
        if std::fs::DirBuilder::new().mode(0o700).create(&burgeon.state).is_ok() {
            burgeon.write_settings();
        }
        burgeon
    }

    /// The same, but `state` is left as it is.
    pub fn before_state(program: &str, state: PathBuf) -> Self {
        Self {
            program: program.into(),
            state,
            options: Vec::new(),
            ublk_before: ublk_devices(),
            environment: Vec::new(),
        }
    }

    /// The same with more global options.
    pub fn option(mut self, option: impl Into<OsString>) -> Self {
        self.options.push(option.into());
        self
    }

    /// The same with a variable in the environment of each command.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// The same with several variables.
    pub fn envs<K: Into<OsString>, V: Into<OsString>>(
        self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        variables.into_iter().fold(self, |burgeon, (name, value)| burgeon.env(name, value))
    }

    /// The state directory.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Removes all of the host's cache.
    pub fn lose_cache(&self) {
        let files = std::fs::read_dir(self.state.join("cache")).into_iter().flatten().flatten();
        files.for_each(|file| std::fs::remove_file(file.path()).unwrap_or_default());
        // A running server sees it when it looks at the folder next.
        let chunks = || {
            let shown = self.run(&["cache", "status", "--json"]);
            let shown: Value = serde_json::from_str(&shown.stdout).unwrap_or_default();
            shown["cache"]["chunks"].as_u64().unwrap_or(0)
        };
        assert!(wait_until(PATIENCE, || chunks() == 0), "the server knows removed files");
    }

    /// The files of the host's cache that hold chunks.
    pub fn arenas(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.state.join("cache")).into_iter().flatten().flatten();
        let is_arena = |name: &OsStr| name.to_string_lossy().starts_with("arena-");
        files.filter(|file| is_arena(&file.file_name())).map(|file| file.path()).collect()
    }

    /// Lets the cache fill the disk: the machine that runs the tests may have little free space.
    fn write_settings(&self) {
        let settings = self.state.join("cache.json");
        if !settings.exists() {
            // A test may have made the directory unusable on purpose.
            let _ = std::fs::write(settings, r#"{"keep_free":{"bytes":0}}"#);
        }
    }

    /// A command of this installation, ready to start.
    pub fn command<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Command {
        if self.state.join("run").is_dir() {
            self.write_settings();
        }
        let mut command = Command::new(&self.program);
        command.arg("--state-dir").arg(&self.state).args(&self.options).args(arguments);
        // That of this machine is none of the tests' business.
        command.env("BURGEON_CONFIG", "none");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        let has = |word: &str| arguments.iter().any(|argument| argument.as_ref() == word);
        if has("accelerate") && has("attach") && !has("--transport") && ublk_expected() {
            command.args(["--transport", "ublk"]);
        }
        command
    }

    /// Runs a command to its end.
    pub fn run<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Finished {
        let output = self.command(arguments).output();
        let output =
            output.unwrap_or_else(|error| panic!("cannot run {:?}: {error}", self.program));
        Finished {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Runs a command that must succeed; gives its standard output.
    #[track_caller]
    pub fn ok<A: AsRef<OsStr>>(&self, arguments: &[A]) -> String {
        let finished = self.run(arguments);
        let shown: Vec<_> = arguments.iter().map(AsRef::as_ref).collect();
        assert_eq!(finished.code, Some(0), "burgeon {shown:?}: {finished:#?}");
        finished.stdout
    }

    /// Runs a command that must fail with exit code `code`, saying `message`.
    #[track_caller]
    pub fn fails<A: AsRef<OsStr>>(&self, arguments: &[A], code: i32, message: &str) {
        let finished = self.run(arguments);
        let shown: Vec<_> = arguments.iter().map(AsRef::as_ref).collect();
        let as_expected = finished.code == Some(code) && finished.stderr.contains(message);
        assert!(as_expected, "burgeon {shown:?} gave no {code} and {message:?}: {finished:#?}");
    }

    /// Builds the image `name` from `from`.
    #[track_caller]
    pub fn build(&self, from: &Path, name: &str) {
        self.ok(&[OsStr::new("build"), from.as_os_str(), OsStr::new(name)]);
    }

    /// Mounts `image` at the folder `at`, which is made if missing, with more `options`.
    #[track_caller]
    pub fn mount(&self, image: &str, at: &Path, options: &[&str]) -> Mounted {
        self.mount_and_listen(image, at, options).0
    }

    /// The same, with the command's output.
    #[track_caller]
    pub fn mount_and_listen(&self, image: &str, at: &Path, options: &[&str]) -> (Mounted, String) {
        std::fs::create_dir_all(at).unwrap_or_else(|error| panic!("{at:?}: {error}"));
        let mut arguments = vec![OsStr::new("mount"), OsStr::new(image), at.as_os_str()];
        arguments.extend(options.iter().map(OsStr::new));
        let said = self.ok(&arguments);
        (Mounted(at.to_path_buf()), said)
    }

    /// Unmounts by command.
    #[track_caller]
    pub fn umount(&self, mounted: Mounted) {
        self.ok(&[OsStr::new("umount"), mounted.path().as_os_str()]);
        std::mem::forget(mounted);
    }

    /// `burgeon status --json`.
    #[track_caller]
    pub fn status(&self) -> Value {
        let text = self.ok(&["status", "--json"]);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    /// Ids of this installation's processes.
    pub fn processes(&self) -> Vec<u32> {
        processes_with(&self.state)
    }

    /// Kills every process of the daemon; nobody is left whom readers could wait for.
    #[track_caller]
    pub fn kill_daemon(&self) {
        self.kill_both();
        self.holder().into_iter().for_each(kill);
        assert!(wait_until(PATIENCE, || self.processes().is_empty()), "{:?}", self.processes());
    }

    /// The process that holds descriptors, if there is one.
    pub fn holder(&self) -> Option<u32> {
        let holds = |id: &u32| {
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|word| word == b"__hold")
        };
        self.processes().into_iter().find(holds)
    }

    /// Kills supervisor and server, the supervisor first, or it would start another server.
    #[track_caller]
    pub fn kill_both(&self) {
        let status = self.status();
        for process in ["supervisor_pid", "server_pid"] {
            let id = status[process].as_u64().and_then(|id| u32::try_from(id).ok());
            kill(id.unwrap_or_else(|| panic!("no {process} in {status:#}")));
        }
    }

    /// Loop devices whose file lies in the state directory.
    fn loops(&self) -> Vec<String> {
        let all = loop_devices().into_iter();
        all.filter(|l| l.backing.starts_with(&self.state)).map(|l| l.name).collect()
    }

    /// Leftovers of this installation, after some time for them to go.
    fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        wait_until(PATIENCE, || {
            let processes = self.processes();
            let commands = processes.iter().map(|id| {
                let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
                format!("process {id} ({})", String::from_utf8_lossy(&line).replace('\0', " "))
            });
            let loops = self.loops().into_iter().map(|l| format!("loop device {l}"));
            let devices = ublk_devices().into_iter().filter(|d| !self.ublk_before.contains(d));
            left = commands.chain(loops).chain(devices).collect();
            left.is_empty()
        });
        left
    }
}

impl Drop for Burgeon {
    fn drop(&mut self) {
        let _ = self.run(&["shutdown", "--force"]);
        let left = self.leftovers();
        for id in self.processes() {
            kill(id);
        }
        if !left.is_empty() && !std::thread::panicking() {
            panic!("left behind: {left:?}");
        }
    }
}
