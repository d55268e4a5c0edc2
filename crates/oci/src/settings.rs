//! The settings of an image for its programs, from its configuration.
//!
//! Invariants: no text has a NUL, so that each can be passed to the kernel; the number of entries
//! of each list is bounded. Null and absent values mean the same, as in configurations of Docker.

use std::collections::BTreeMap;

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Most arguments, variables or volumes.
const ENTRIES_MAX: usize = 4096;

/// Settings of an image: each is empty if the image has none.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct ImageSettings {
    /// The first arguments of the program.
    pub entrypoint: Vec<String>,
    /// The other arguments; the default for those of the user.
    pub cmd: Vec<String>,
    /// `NAME=VALUE`.
    pub env: Vec<String>,
    /// `USER[:GROUP]`, each a name or a number.
    pub user: String,
    /// The directory to start in.
    pub working_dir: String,
    /// Paths for data that is not to be part of the container.
    pub volumes: Vec<String>,
    /// The name or number of the signal that ends the program.
    pub stop_signal: String,
}

/// The names are those of the OCI image specification.
#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Config {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    volumes: Option<BTreeMap<String, Value>>,
    stop_signal: Option<String>,
}

impl ImageSettings {
    /// The settings in the configuration `document`.
    pub(crate) fn of(document: &Value) -> Result<Self> {
        let invalid = |why: String| {
            Error::new(ErrorKind::Corrupt, format!("the image's configuration is invalid: {why}"))
        };
        let config = match &document["config"] {
            Value::Null => Config::default(),
            // A list would be read as the fields in their order.
            Value::Array(_) => return Err(invalid("it is a list".to_owned())),
            config => Config::deserialize(config).map_err(|error| {
                // The error may quote the document.
                invalid(error.to_string().chars().take(200).collect())
            })?,
        };
        let Config { entrypoint, cmd, env, user, working_dir, volumes, stop_signal } = config;
        let settings = Self {
            entrypoint: entrypoint.unwrap_or_default(),
            cmd: cmd.unwrap_or_default(),
            env: env.unwrap_or_default(),
            user: user.unwrap_or_default(),
            working_dir: working_dir.unwrap_or_default(),
            volumes: volumes.unwrap_or_default().into_keys().collect(),
            stop_signal: stop_signal.unwrap_or_default(),
        };
        let Self { entrypoint, cmd, env, volumes, .. } = &settings;
        if [entrypoint, cmd, env, volumes].iter().any(|list| list.len() > ENTRIES_MAX) {
            return Err(invalid(format!("a list has more than {ENTRIES_MAX} entries")));
        }
        let single = [&settings.user, &settings.working_dir, &settings.stop_signal];
        let all = entrypoint.iter().chain(cmd).chain(env).chain(volumes).chain(single);
        if all.into_iter().any(|text| text.contains('\0')) {
            return Err(invalid("a setting has a NUL character".to_owned()));
        }
        if let Some(wrong) = env.iter().find(|entry| entry.find('=').is_none_or(|at| at == 0)) {
            let shown: String = wrong.escape_default().take(100).collect();
            return Err(invalid(format!("the variable \"{shown}\" is not of the form NAME=VALUE")));
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{ENTRIES_MAX, ImageSettings};

    #[test]
    fn settings_are_read_and_null_is_absent() {
        let none = [json!({}), json!({ "config": null }), json!({ "config": { "Cmd": null } })];
        for config in none {
            assert_eq!(ImageSettings::of(&config).unwrap(), ImageSettings::default());
        }
        let config = json!({ "config": {
            "Entrypoint": ["/entry"], "Cmd": ["a"], "Env": ["A=", "B=x=y"], "User": "www:users",
            "WorkingDir": "/srv", "Volumes": { "/data": {}, "/more": null },
            "StopSignal": "SIGQUIT", "Labels": { "x": "y" },
        }});
        let settings = ImageSettings::of(&config).unwrap();
        assert_eq!((&*settings.user, &*settings.stop_signal), ("www:users", "SIGQUIT"));
        assert_eq!((settings.env, settings.volumes.len()), (vec!["A=".into(), "B=x=y".into()], 2));
    }

    #[test]
    fn settings_that_no_program_can_have_are_refused() {
        let refused = |config: Value| ImageSettings::of(&json!({ "config": config })).unwrap_err();
        for (config, said) in [
            (json!([]), "invalid"),
            (json!({ "Cmd": "sh" }), "invalid"),
            (json!({ "Cmd": ["a\0b"] }), "NUL"),
            (json!({ "Env": ["X"] }), "NAME=VALUE"),
            (json!({ "Env": ["=X"] }), "NAME=VALUE"),
            (json!({ "Cmd": vec!["x"; ENTRIES_MAX + 1] }), "more than"),
        ] {
            let error = refused(config).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
