//! Credential helpers: external programs that return a user's password, run as Docker runs them.
//!
//! ```text
//!   registry ──► stdin  docker-credential-NAME get  stdout ──► {"Username", "Secret"}
//! ```
//!
//! Invariants: a helper that takes longer than [`TIME_MAX`] is killed with its process group; at
//! most [`SAID_MAX`] of its output is read; it inherits only `PATH` and `HOME`, so it sees no
//! secret of other stores; its output is never shown, because it may be a secret.

use std::{
    ffi::OsString,
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use docker_credential::DockerCredential;
use serde::Deserialize;

use super::providers::{PLUGINS, Providers, VERB};

/// Longest time a helper may take: it may query a server, or prompt the user.
const TIME_MAX: Duration = Duration::from_secs(30);
/// Longest answer, in bytes; a cloud's token has a few thousand.
const SAID_MAX: u64 = 64 << 10;
/// Polling interval for the exit of a helper that has closed its output.
const PAUSE: Duration = Duration::from_millis(5);

/// The output of a helper, or why there is none.
pub type Said = Result<String, String>;

/// Asks the helper of this name for the credentials of a registry.
pub type AskHelper = Box<dyn Fn(&str, &str) -> Said + Send + Sync>;

static ASK: OnceLock<AskHelper> = OnceLock::new();

/// Makes `ask` call the helpers from now on, in a process that may not execute programs. Only the
/// first call has an effect.
pub fn ask_helpers_by(ask: AskHelper) {
    let _ = ASK.set(ask);
}

/// The message of a helper that has no credentials for a registry.
pub const NOT_FOUND: &str = "credentials not found in native keychain";

/// Asks `helper` for the credentials of `registry`; `None` if it has none.
pub(super) fn credentials(
    helper: &str,
    registry: &str,
) -> Result<Option<DockerCredential>, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Answer {
        username: String,
        secret: String,
    }
    let said = said(helper, registry)?;
    if said.contains("credentials not found") {
        return Ok(None);
    }
    let answer: Answer = serde_json::from_str(&said)
        .map_err(|_| format!("docker-credential-{helper} gives no user and password"))?;
    Ok(Some(match answer.username.as_str() {
        "<token>" => DockerCredential::IdentityToken(answer.secret),
        _ => DockerCredential::UsernamePassword(answer.username, answer.secret),
    }))
}

/// The output of a helper, which another process runs if this one may not.
pub(super) fn said(helper: &str, registry: &str) -> Said {
    match ASK.get() {
        Some(ask) => ask(helper, registry),
        None => ask_helper(helper, registry),
    }
}

/// The variables that programs with credentials get: no secret of other stores.
pub(super) fn inherited() -> impl Iterator<Item = (&'static str, OsString)> {
    ["PATH", "HOME"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)))
}

/// Runs a helper and returns its output, its own error messages included.
pub fn ask_helper(helper: &str, registry: &str) -> Said {
    if helper == PLUGINS {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("burgeon").arg(VERB).env_clear();
        command.envs(inherited()).envs(Providers::variables());
        return run(command, "kubelet's credential providers", registry, TIME_MAX);
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if helper.is_empty() || !helper.chars().all(plain) {
        return Err(format!("{helper:?} is not a name of a credential helper"));
    }
    let name = format!("docker-credential-{helper}");
    let mut command = Command::new(&name);
    command.arg("get").env_clear().envs(inherited());
    run(command, &name, registry, TIME_MAX)
}

/// Runs `command`, called `name`, with `input`, for at most `time_max`.
pub(super) fn run(mut command: Command, name: &str, input: &str, time_max: Duration) -> Said {
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn();
    let mut child = Killed(child.map_err(|e| format!("{name} cannot be run: {e}"))?);
    if let Some(mut stdin) = child.0.stdin.take() {
        // A helper may answer without reading its input.
        let _ = stdin.write_all(input.as_bytes());
    }
    let deadline = Instant::now() + time_max;
    let late = || format!("{name} does not answer within {} s", time_max.as_secs());
    let (send, receive) = mpsc::channel();
    if let Some(stdout) = child.0.stdout.take() {
        // The thread ends with the helper, which is killed below.
        thread::spawn(move || {
            let mut said = String::new();
            let read = stdout.take(SAID_MAX + 1).read_to_string(&mut said);
            send.send(read.map(|_| said))
        });
    }
    let said = receive.recv_timeout(time_max).map_err(|_| late())?;
    let said = said.map_err(|e| format!("the output of {name} cannot be read: {e}"))?;
    if said.len() as u64 > SAID_MAX {
        return Err(format!("{name} printed more than {SAID_MAX} bytes"));
    }
    loop {
        match child.0.try_wait() {
            Ok(Some(status)) if status.success() || said.contains("credentials not found") => {
                return Ok(said);
            }
            Ok(Some(status)) => return Err(format!("{name} failed: {status}")),
            Ok(None) if Instant::now() < deadline => thread::sleep(PAUSE),
            Ok(None) => return Err(late()),
            Err(e) => return Err(format!("{name} cannot be waited for: {e}")),
        }
    }
}

/// The leader of a process group; dropping this kills the group.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            if let Some(group) = rustix::process::Pid::from_raw(self.0.id() as i32) {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
            let _ = self.0.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{process::Command, time::Duration};

    use super::{ask_helper, run};

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_helper_that_says_nothing_too_much_or_nothing_useful_is_ended() {
        let within = Duration::from_secs(60);
        assert_eq!(run(shell("cat"), "cat", "r.example", within).unwrap(), "r.example");
        let error = run(shell("sleep 1000"), "sleep", "x", Duration::from_millis(1)).unwrap_err();
        assert!(error.contains("does not answer"), "{error}");
        let error = run(shell("exec >&-; sleep 1000"), "sleep", "x", Duration::from_secs(1));
        assert!(error.unwrap_err().contains("does not answer"));
        let error = run(shell("yes"), "yes", "x", within).unwrap_err();
        assert!(error.contains("more than 65536 bytes"), "{error}");
        assert!(
            run(shell("echo secret; exit 1"), "x", "x", within).unwrap_err().contains("failed")
        );
        assert!(ask_helper("../../bin/sh", "x").unwrap_err().contains("not a name"));
    }
}
