//! The options of every command, and their environment variables.

use std::{ffi::OsString, path::PathBuf};

use burgeon_daemon::{
    CACHE_DIR,
    log::{self, LevelFilter},
};
use clap::{
    Args as ClapArgs,
    builder::{PossibleValuesParser, TypedValueParser},
};

/// Options of every command, before or after its name.
#[derive(ClapArgs, Debug, Clone)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The store of images and their data: a folder, a URL or the name of a configured store;
    /// '' is store/ in the state directory [default: that of the configuration, or '']; for build,
    /// mount and pull also oci://REGISTRY/REPOSITORY, whose tags are the names
    #[arg(long, global = true, value_name = "PATH|URL|NAME", env = STORE)]
    pub(crate) store: Option<String>,
    /// Directory of caches, writes and the daemon's socket
    /// [default: that of the configuration, or /var/lib/burgeon, or ~/.local/state/burgeon without
    /// root]
    #[arg(long, global = true, value_name = "DIR", env = STATE_DIR)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Directory of the cache of a daemon that this command starts, on another disk [default: that
    /// of the configuration, or cache/ in the state directory]
    #[arg(long, global = true, value_name = "DIR", env = CACHE_DIR)]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Log the events of this command on standard error, and of a daemon that it starts: error,
    /// warn, info, debug or off [default: for the daemon that of the configuration, or info]
    #[arg(long, global = true, value_name = "LEVEL", env = log::VARIABLE)]
    #[arg(value_parser = levels(), hide_possible_values = true)]
    pub(crate) log_level: Option<LevelFilter>,
    /// The configuration: a file; a folder with config.toml and config.d/*.toml; or none [default:
    /// /etc/burgeon]
    #[arg(long, global = true, value_name = "PATH|none", env = CONFIG)]
    pub(crate) config: Option<OsString>,
    /// Print exactly one JSON document on standard output
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Names of the fields above whose values come from environment variables.
    #[arg(skip)]
    pub(crate) from_environment: Vec<&'static str>,
}

/// The variables of `--store`, `--state-dir` and `--config`.
pub(crate) const STORE: &str = "BURGEON_STORE";
pub(crate) const STATE_DIR: &str = "BURGEON_STATE_DIR";
pub(crate) const CONFIG: &str = "BURGEON_CONFIG";

/// The command line, for which an empty variable is one that is not set, as for most programs. An
/// empty store and an empty configuration have a meaning of their own.
pub(crate) fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |name: &str| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let variables =
        [("state_dir", STATE_DIR), ("cache_dir", CACHE_DIR), ("log_level", log::VARIABLE)];
    variables.into_iter().filter(|(_, name)| is_empty(name)).fold(command, |command, (id, _)| {
        command.mut_arg(id, |argument| argument.env(None::<&'static str>))
    })
}

/// The option that the error is about, and the environment variable that gives its value.
pub(crate) fn blamed_variable(
    error: &clap::Error,
    arguments: &[OsString],
) -> Option<(&'static str, &'static str)> {
    let text = error.to_string();
    let options = [
        ("--store", STORE),
        ("--state-dir", STATE_DIR),
        ("--cache-dir", CACHE_DIR),
        ("--log-level", log::VARIABLE),
        ("--config", CONFIG),
    ];
    let is_typed =
        |option: &str| arguments.iter().any(|it| it.to_string_lossy().starts_with(option));
    options.into_iter().find(|(option, variable)| {
        text.contains(&format!("'{option} "))
            && std::env::var_os(variable).is_some()
            && !is_typed(option)
    })
}

/// The documented levels: the type of the log knows others.
pub(crate) const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "off"];

fn levels() -> impl TypedValueParser<Value = LevelFilter> {
    PossibleValuesParser::new(LEVELS).try_map(|level| level.parse::<LevelFilter>())
}
