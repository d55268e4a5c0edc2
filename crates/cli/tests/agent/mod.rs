//! The OCF resource agent `dist/ocf/accelerate`, called as a cluster calls it.

// Each program uses a part of it.
#![allow(dead_code)]

use std::{path::PathBuf, process::Command};

use testkit::Burgeon;

use crate::slow::PROGRAM;

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const GENERIC: i32 = 1;
pub(crate) const UNIMPLEMENTED: i32 = 3;
pub(crate) const INSTALLED: i32 = 5;
pub(crate) const CONFIGURED: i32 = 6;
pub(crate) const NOT_RUNNING: i32 = 7;

pub(crate) fn agent() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/ocf/accelerate"))
}

/// A resource: the parameters of an agent on one node.
#[derive(Clone)]
pub(crate) struct Resource(Vec<(String, String)>);

impl Resource {
    /// Of the node that `burgeon` is.
    pub(crate) fn on(burgeon: &Burgeon, parameters: &[(&str, &str)]) -> Self {
        let state = burgeon.state().to_str().unwrap();
        let own = [("binary", PROGRAM), ("state_dir", state)];
        let all = own.iter().chain(parameters);
        Self(all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    /// The same with another value.
    pub(crate) fn with(&self, name: &str, value: &str) -> Self {
        let others = self.0.iter().filter(|(other, _)| other != name).cloned();
        Self(others.chain([(name.to_owned(), value.to_owned())]).collect())
    }

    /// An action with more of the environment; returns its exit code and what it says of an error.
    pub(crate) fn act_with(&self, action: &str, more: &[(&str, &str)]) -> (i32, String) {
        let mut command = Command::new(agent());
        command.arg(action).env("BURGEON_CONFIG", "none").env("OCF_ROOT", "/usr/lib/ocf");
        for (name, value) in &self.0 {
            command.env(format!("OCF_RESKEY_{name}"), value);
        }
        let output = command.envs(more.iter().copied()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// An action whose exit code has to be `code`; returns what it says of an error.
    #[track_caller]
    pub(crate) fn act(&self, action: &str, code: i32) -> String {
        let (ended, said) = self.act_with(action, &[]);
        assert_eq!(ended, code, "{action}: {said}");
        said
    }
}
