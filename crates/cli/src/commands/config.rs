//! `burgeon config check` and `burgeon config show`.
//!
//! ```text
//!   check ─► every problem of every file                       exit code 1 if there is one
//!   show  ─► option ► environment ► file ► default, a line each
//! ```
//! Neither makes or needs a state directory.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use burgeon_daemon::{StateDir, log::LevelFilter, protocol::CacheAmount};
use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};

use super::parse_store;
use crate::{
    config::{self, Format, KEYS, Setting, Sharing, SnapshotterConfig},
    global::{self, Global},
    output::{self, counted},
    pull::Pull,
    transport::Transport,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon config check               name each problem of the files, with its line
  burgeon config show --origin       show each setting, and the option, variable or line of a file
                                     that it comes from";

#[derive(ClapArgs, Debug)]
pub(crate) struct Config {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ConfigCommand {
    /// Name each problem of the configuration; the exit code is 1 if there is one
    Check,
    /// Show each setting as commands use it
    Show {
        /// Also show its origin: an option, an environment variable, the line of a file, or the
        /// default
        #[arg(long)]
        origin: bool,
    },
}

pub(super) fn config(global: &Global, command: ConfigCommand) -> Result<ExitCode> {
    match command {
        ConfigCommand::Check => check(global),
        ConfigCommand::Show { origin } => show(global, origin),
    }
}

fn check(global: &Global) -> Result<ExitCode> {
    let (config, problems) = config::Config::examine(global.config.as_deref());
    if global.json {
        output::print_json(&json!({ "files": config.files, "problems": problems }))?;
    } else {
        problems.iter().for_each(|problem| println!("{problem}"));
        let files = counted(config.files.len() as u64, "file");
        match problems.len() as u64 {
            0 => println!("the configuration is valid: {files}"),
            count => println!("{} in the configuration", counted(count, "problem")),
        }
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A setting in use.
#[derive(Serialize)]
struct Shown {
    key: String,
    value: Value,
    origin: Origin,
}

/// The origin of a setting.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Origin {
    Option { name: &'static str },
    Environment { variable: &'static str },
    File { file: PathBuf, line: usize },
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Option { name } => f.write_str(name),
            Self::Environment { variable } => f.write_str(variable),
            Self::File { file, line } => write!(f, "{}:{line}", file.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

fn show(global: &Global, with_origin: bool) -> Result<ExitCode> {
    let config = config::Config::load(global.config.as_deref())?;
    let settings = settings(global, &config)?;
    if global.json {
        output::print_json(&json!({ "files": config.files, "settings": settings }))?;
        return Ok(ExitCode::SUCCESS);
    }
    // As TOML writes them; a value without a default is a comment.
    let lines = settings.iter().map(|Shown { key, value, .. }| match value {
        Value::Null => format!("# {key} is not set"),
        value => format!("{key} = {value}"),
    });
    let lines: Vec<_> = lines.collect();
    let width = lines.iter().map(|line| line.chars().count()).max().unwrap_or_default();
    for (line, Shown { origin, .. }) in lines.iter().zip(&settings) {
        match with_origin {
            true => println!("{line:width$}  # {origin}"),
            false => println!("{line}"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// All settings, in the order of [`KEYS`].
fn settings(global: &Global, config: &config::Config) -> Result<Vec<Shown>> {
    let mount = &config.mount;
    let mut settings = Vec::new();
    for key in KEYS {
        if key == "store.NAME.url" {
            let named = config.stores.named.iter();
            settings.extend(named.map(|(name, url)| Shown {
                key: format!("store.{name}.url"),
                value: json!(url.value),
                origin: file(url),
            }));
            continue;
        }
        let (value, origin) = match key {
            "state-dir" => state_dir(global, config)?,
            "log.level" => level(global, config),
            "log.format" => format(config),
            "store.default" => store(global, config)?,
            "cache.dir" => cache_dir(global, config)?,
            "cache.size" => amount(&config.cache.size, Value::Null),
            "cache.keep-free" => amount(&config.cache.keep_free, json!("25%")),
            "cache.sharing" => choice(&config.cache.sharing, Sharing::default()),
            "mount.write-limit" => of_file(&mount.write_limit, Value::Null),
            "registry.hosts-dir" => of_file(&config.registry.hosts_dir, Value::Null),
            "registry.kubelet-providers" => {
                of_file(&config.registry.kubelet_providers, Value::Null)
            }
            "registry.kubelet-provider-dir" => {
                of_file(&config.registry.kubelet_provider_dir, Value::Null)
            }
            "snapshotter.trust" => of_file(&config.snapshotter.trust, json!([])),
            "snapshotter.index" => of_file(&config.snapshotter.index, json!(true)),
            "snapshotter.index-min" => {
                of_file(&config.snapshotter.index_min, json!(SnapshotterConfig::INDEX_MIN))
            }
            "snapshotter.index-max" => {
                of_file(&config.snapshotter.index_max, json!(SnapshotterConfig::INDEX_MAX))
            }
            "snapshotter.index-kept" => {
                of_file(&config.snapshotter.index_kept, json!(SnapshotterConfig::INDEX_KEPT))
            }
            "mount.reserve" => of_file(&mount.reserve, json!(false)),
            "mount.fetch-limit" => of_file(&mount.fetch_limit, Value::Null),
            "mount.fill" => of_file(&mount.fill, json!(false)),
            "mount.profile" => of_file(&mount.profile, json!("auto")),
            "mount.pull" => choice(&mount.pull, Pull::default()),
            "mount.transport" => choice(&mount.transport, Transport::Auto),
            _ => continue,
        };
        settings.push(Shown { key: key.to_owned(), value, origin });
    }
    Ok(settings)
}

fn file<T>(setting: &Setting<T>) -> Origin {
    Origin::File { file: setting.origin.file.clone(), line: setting.origin.line }
}

fn of_file<T: Serialize>(setting: &Option<Setting<T>>, default: Value) -> (Value, Origin) {
    match setting {
        Some(setting) => (json!(setting.value), file(setting)),
        None => (default, Origin::Default),
    }
}

fn amount(setting: &Option<Setting<CacheAmount>>, default: Value) -> (Value, Origin) {
    let shown = |amount: CacheAmount| match amount {
        CacheAmount::Bytes(bytes) => json!(bytes),
        CacheAmount::Percent(percent) => json!(format!("{percent}%")),
    };
    match setting {
        Some(setting) => (shown(setting.value), file(setting)),
        None => (default, Origin::Default),
    }
}

fn choice<T: ValueEnum>(setting: &Option<Setting<T>>, default: T) -> (Value, Origin) {
    let name = |value: &T| json!(value.to_possible_value().map(|it| it.get_name().to_owned()));
    match setting {
        Some(setting) => (name(&setting.value), file(setting)),
        None => (name(&default), Origin::Default),
    }
}

/// The origin of a global option that has a value.
fn given(global: &Global, id: &str, name: &'static str, variable: &'static str) -> Origin {
    match global.from_environment.contains(&id) {
        true => Origin::Environment { variable },
        false => Origin::Option { name },
    }
}

fn state_dir(global: &Global, config: &config::Config) -> Result<(Value, Origin)> {
    if let Some(path) = &global.state_dir {
        let origin = given(global, "state_dir", "--state-dir", global::STATE_DIR);
        return Ok((json!(std::path::absolute(path)?), origin));
    }
    Ok(match &config.state_dir {
        Some(setting) => (json!(setting.value), file(setting)),
        None => (json!(StateDir::default_path()?), Origin::Default),
    })
}

/// The cache's folder of a daemon that is started now.
fn cache_dir(global: &Global, config: &config::Config) -> Result<(Value, Origin)> {
    Ok(match &global.cache_dir {
        Some(path) => {
            let origin = given(global, "cache_dir", "--cache-dir", burgeon_daemon::CACHE_DIR);
            (json!(std::path::absolute(path)?), origin)
        }
        None => of_file(&config.cache.dir, Value::Null),
    })
}

/// The level of a daemon that is started now.
fn level(global: &Global, config: &config::Config) -> (Value, Origin) {
    let shown = |level: LevelFilter| json!(level.to_string());
    match (global.log_level, &config.log.level) {
        (Some(level), _) => {
            let variable = burgeon_daemon::log::VARIABLE;
            (shown(level), given(global, "log_level", "--log-level", variable))
        }
        (None, Some(setting)) => (shown(setting.value), file(setting)),
        (None, None) => (shown(LevelFilter::INFO), Origin::Default),
    }
}

/// The format of a daemon that is started now.
fn format(config: &config::Config) -> (Value, Origin) {
    match burgeon_daemon::log::format_of_environment() {
        Some(format) => {
            let variable = burgeon_daemon::log::FORMAT;
            // Any other word is text.
            let format = if format == "json" { Format::Json } else { Format::Text };
            (choice(&None, format).0, Origin::Environment { variable })
        }
        None => choice(&config.log.format, Format::default()),
    }
}

/// The store of commands, as it is named; an empty name is the state directory's own.
fn store(global: &Global, config: &config::Config) -> Result<(Value, Origin)> {
    let given_text = global.store.as_deref();
    if let Some((url, origin)) = config.stores.choose(given_text) {
        // A URL with a secret is refused here, and not printed.
        if burgeon_source::registry::Name::parse(&url).is_none_or(|name| name.is_err()) {
            parse_store(&url, &origin)?;
        }
    }
    Ok(match (given_text, &config.stores.default) {
        (Some(text), _) => (json!(text), given(global, "store", "--store", global::STORE)),
        (None, Some(setting)) => (json!(setting.value), file(setting)),
        (None, None) => (json!(""), Origin::Default),
    })
}
