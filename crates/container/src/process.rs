//! The program of a container: arguments, variables, user and directory.

use std::os::fd::BorrowedFd;

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_oci::ImageSettings;
use serde::{Deserialize, Serialize};

use crate::users::{self, User};

/// The search path of an image that sets none.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The program of a container.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ContainerProcess {
    /// The program and its arguments; never empty.
    pub args: Vec<String>,
    /// `NAME=VALUE`.
    pub env: Vec<String>,
    /// Absolute path of the directory to start in.
    pub cwd: String,
    /// The user.
    pub user: User,
}

impl ContainerProcess {
    /// The program that an image with `settings` and the files in `root` runs: its entrypoint with
    /// `command`, or with its own arguments if `command` is empty.
    pub fn new(settings: &ImageSettings, command: &[String], root: BorrowedFd<'_>) -> Result<Self> {
        let rest = if command.is_empty() { &settings.cmd } else { command };
        let args: Vec<String> = settings.entrypoint.iter().chain(rest).cloned().collect();
        if args.first().is_none_or(String::is_empty) {
            let what = "the image has no command: give one after --";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let user = users::find(root, &settings.user)?;
        let mut env = settings.env.clone();
        for default in [PATH.to_owned(), format!("HOME={}", user.home)] {
            let name = default.split_inclusive('=').next().unwrap_or_default();
            if !env.iter().any(|variable| variable.starts_with(name)) {
                env.push(default);
            }
        }
        let cwd = format!("/{}", settings.working_dir.trim_start_matches('/'));
        Ok(Self { args, env, cwd, user })
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd};

    use burgeon_oci::ImageSettings;

    use super::ContainerProcess;

    #[test]
    fn the_users_command_takes_the_place_of_the_images_arguments() {
        let root = tempfile::tempdir().unwrap();
        let root = File::open(root.path()).unwrap();
        let of = |entrypoint: &[&str], cmd: &[&str], command: &[&str]| {
            let owned = |list: &[&str]| list.iter().map(|it| it.to_string()).collect::<Vec<_>>();
            let (entrypoint, cmd) = (owned(entrypoint), owned(cmd));
            let settings = ImageSettings { entrypoint, cmd, ..ImageSettings::default() };
            ContainerProcess::new(&settings, &owned(command), root.as_fd())
                .map(|process| process.args)
        };
        assert_eq!(of(&["e"], &["c"], &[]).unwrap(), ["e", "c"]);
        assert_eq!(of(&["e"], &["c"], &["u", "v"]).unwrap(), ["e", "u", "v"]);
        assert_eq!(of(&[], &["c"], &["u"]).unwrap(), ["u"]);
        assert!(of(&[], &[], &[]).unwrap_err().to_string().contains("no command"));
        let env = vec!["PATH=/x".to_owned(), "HOMER=1".to_owned()];
        let settings = ImageSettings {
            cmd: vec!["c".into()],
            env,
            working_dir: "srv".into(),
            ..ImageSettings::default()
        };
        let process = ContainerProcess::new(&settings, &[], root.as_fd()).unwrap();
        assert_eq!(process.env, ["PATH=/x", "HOMER=1", "HOME=/"]);
        assert_eq!(process.cwd, "/srv");
    }
}
