//! The configuration of this host: files that only an administrator writes.
//!
//! ```text
//!   /etc/burgeon/config.toml ─┐  file.rs: bounded, and written by root alone
//!   /etc/burgeon/config.d/*  ─┴► document.rs: each key is known, each value valid, each line kept
//!                                   │ a later file replaces an earlier one, key by key
//!   flag ► environment ► ───────► Config ──► commands::Context      state directory, store
//!                                        ──► commands::mount        defaults of mounts
//!                                        ──► begin_daemon           its log, the cache's bounds
//! ```
//! `BURGEON_CONFIG` and `--config` name another file or folder, or `none`.
//!
//! Invariants:
//! - No command writes these files, but for `snapshotter setup`, which adds one.
//! - No value in them is a secret: a store's URL with a password or a query is refused
//!   (`document.rs`).
//! - All problems of all files are found in one pass (`crates/cli/tests/config.rs`).
//! - A command that uses the configuration does nothing while it has a problem. A daemon starts all
//!   the same, with the valid settings: mounts wait for it.

mod document;
mod file;
mod keys;

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fmt,
    path::PathBuf,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_daemon::{
    log::{self, LevelFilter},
    protocol::CacheAmount,
};
use burgeon_source::registry::{Name, Providers};
use clap::ValueEnum;
use serde::Serialize;

use crate::{global, pull::Pull, transport::Transport};

pub(crate) use keys::{KEYS, nearest};

/// All settings of all files, a field for each section. A setting that no file has is `None`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Config {
    /// `state-dir`; only from files of the user who reads them.
    pub(crate) state_dir: Option<Setting<PathBuf>>,
    /// `[log]`
    pub(crate) log: Log,
    /// `[cache]`
    pub(crate) cache: CacheBounds,
    /// `[mount]`
    pub(crate) mount: MountDefaults,
    /// `[registry]`
    pub(crate) registry: Registry,
    /// `[snapshotter]`
    pub(crate) snapshotter: SnapshotterConfig,
    /// `[store]` and `[store.NAME]`
    pub(crate) stores: Stores,
    // A new section gets its field here, its keys in `keys.rs`, and its values in `document.rs`.
    /// The files that were read, in order.
    pub(crate) files: Vec<PathBuf>,
    /// The place that the user has named: an absolute path, or `none`.
    pub(crate) place: Option<OsString>,
}

/// `[log]`
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    /// The level of daemons.
    pub(crate) level: Option<Setting<LevelFilter>>,
    /// The format of their lines.
    pub(crate) format: Option<Setting<Format>>,
}

/// Formats of the log.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Format {
    /// Words, then fields
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

/// `[cache]`: bounds of the host's cache, unless `burgeon cache resize` has set others.
#[derive(Clone, Debug, Default)]
pub(crate) struct CacheBounds {
    /// Only from files of the user who reads them.
    pub(crate) dir: Option<Setting<PathBuf>>,
    pub(crate) size: Option<Setting<CacheAmount>>,
    pub(crate) keep_free: Option<Setting<CacheAmount>>,
    pub(crate) sharing: Option<Setting<Sharing>>,
}

impl CacheBounds {
    /// Makes this process use them, but for the folder.
    pub(crate) fn configure(&self) {
        let is_shared = self.sharing.as_ref().is_some_and(|it| it.value == Sharing::Host);
        let [size, keep_free] =
            [&self.size, &self.keep_free].map(|amount| amount.as_ref().map(|it| it.value));
        burgeon_daemon::configure_cache(size, keep_free, is_shared);
    }
}

/// The mounts that find a chunk in the cache.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Those with the credentials with which it was fetched; all, if none were needed.
    #[default]
    Credentials,
    /// All of the host.
    Host,
}

/// `[mount]`: values of options that a command line leaves out.
#[derive(Clone, Debug, Default)]
pub(crate) struct MountDefaults {
    /// Bytes; for writes that are made by the mount.
    pub(crate) write_limit: Option<Setting<u64>>,
    pub(crate) reserve: Option<Setting<bool>>,
    /// Bytes.
    pub(crate) fetch_limit: Option<Setting<u64>>,
    pub(crate) fill: Option<Setting<bool>>,
    /// `auto` or `none`: a file is a profile of one image.
    pub(crate) profile: Option<Setting<String>>,
    pub(crate) pull: Option<Setting<Pull>>,
    pub(crate) transport: Option<Setting<Transport>>,
}

/// `[registry]`
#[derive(Clone, Debug, Default)]
pub(crate) struct Registry {
    /// The folder of `HOST/hosts.toml`, as containerd reads it.
    pub(crate) hosts_dir: Option<Setting<PathBuf>>,
    /// The file of kubelet's `--image-credential-provider-config`.
    pub(crate) kubelet_providers: Option<Setting<PathBuf>>,
    /// The folder of the plugins that it names.
    pub(crate) kubelet_provider_dir: Option<Setting<PathBuf>>,
}

impl Registry {
    /// The credential provider plugins: those of the environment, or else of the files.
    pub(crate) fn providers(&self) -> Option<Providers> {
        Providers::of_environment().or_else(|| {
            let value = |setting: &Option<Setting<PathBuf>>| Some(setting.as_ref()?.value.clone());
            let (file, folder) = (&self.kubelet_providers, &self.kubelet_provider_dir);
            Some(Providers { file: value(file)?, folder: value(folder)? })
        })
    }

    /// Faults that no single line has.
    fn problems(&self) -> Vec<Problem> {
        let key = |name: &str| format!("registry.{name}");
        let (alone, missing, origin) = match (&self.kubelet_providers, &self.kubelet_provider_dir) {
            (Some(file), None) => ("kubelet-providers", "kubelet-provider-dir", &file.origin),
            (None, Some(folder)) => ("kubelet-provider-dir", "kubelet-providers", &folder.origin),
            _ => return Vec::new(),
        };
        vec![Problem {
            file: origin.file.clone(),
            line: Some(origin.line),
            key: Some(key(alone)),
            message: format!("it has no effect alone: add {}", key(missing)),
        }]
    }
}

impl SnapshotterConfig {
    /// Faults that no single line has.
    fn problems(&self) -> Vec<Problem> {
        let min = self.index_min.as_ref().map_or(Self::INDEX_MIN, |min| min.value);
        let max = self.index_max.as_ref().map_or(Self::INDEX_MAX, |max| max.value);
        let given = self.index_min.as_ref().or(self.index_max.as_ref()).filter(|_| min > max);
        let problem = given.map(|setting| Problem {
            file: setting.origin.file.clone(),
            line: Some(setting.origin.line),
            key: Some("snapshotter.index-min".to_owned()),
            message: format!(
                "no image gets an index: index-min is {min} bytes, and index-max {max}; index = \
                 false turns them off"
            ),
        });
        problem.into_iter().collect()
    }
}

/// `[snapshotter]`
#[derive(Clone, Debug, Default)]
pub(crate) struct SnapshotterConfig {
    /// Patterns of repositories; only from files of the user who reads them.
    pub(crate) trust: Option<Setting<Vec<String>>>,
    /// Indexes of images that were unpacked are made in the background.
    pub(crate) index: Option<Setting<bool>>,
    /// Bytes of the layers of the smallest such image.
    pub(crate) index_min: Option<Setting<u64>>,
    /// Bytes of the layers of the largest such image.
    pub(crate) index_max: Option<Setting<u64>>,
    /// Bytes of indexes of images that containerd no longer has.
    pub(crate) index_kept: Option<Setting<u64>>,
}

impl SnapshotterConfig {
    /// An image of fewer bytes is unpacked in less time than its mount takes.
    pub(crate) const INDEX_MIN: u64 = 16 << 20;
    pub(crate) const INDEX_MAX: u64 = 16 << 30;
    pub(crate) const INDEX_KEPT: u64 = 1 << 30;
}

/// A pattern of repositories, such as `registry.example/team/*`; the reason why it is none.
pub(crate) fn check_pattern(pattern: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-:*".contains(c);
    match !pattern.is_empty() && pattern.chars().all(is_plain) {
        true => Ok(()),
        false => Err(format!("{pattern:?} has characters that no repository has")),
    }
}

/// `[store]` and `[store.NAME]`
#[derive(Clone, Debug, Default)]
pub(crate) struct Stores {
    /// The store without `--store`: a name, a URL or an absolute path.
    pub(crate) default: Option<Setting<String>>,
    /// URLs and absolute paths by name.
    pub(crate) named: BTreeMap<String, Setting<String>>,
    /// Each section, whether it has a URL or not.
    sections: BTreeMap<String, Origin>,
}

/// A value, and its place in a file.
#[derive(Clone, Debug)]
pub(crate) struct Setting<T> {
    pub(crate) value: T,
    pub(crate) origin: Origin,
}

/// A line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) file: PathBuf,
    pub(crate) line: usize,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A fault of a file; the message names the remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    pub(crate) file: PathBuf,
    pub(crate) line: Option<usize>,
    pub(crate) key: Option<String>,
    pub(crate) message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        self.line.iter().try_for_each(|line| write!(f, ":{line}"))?;
        self.key.iter().try_for_each(|key| write!(f, ": {key}"))?;
        write!(f, ": {}", self.message)
    }
}

impl Config {
    /// Reads the files at the place `given`, or in `/etc/burgeon`. `Invalid`, with the first
    /// problem, if there is one.
    pub(crate) fn load(given: Option<&OsStr>) -> Result<Self> {
        let (config, problems) = Self::examine(given);
        let Some(first) = problems.first() else { return Ok(config) };
        let rest = match problems.len() - 1 {
            0 => String::new(),
            more => format!(" ({more} more: `burgeon config check`)"),
        };
        let what = format!("{first}{rest}; `--config none` does without the configuration");
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Reads the same files; returns all valid settings, and all problems.
    pub(crate) fn examine(given: Option<&OsStr>) -> (Self, Vec<Problem>) {
        let mut config = Self::default();
        let (place, mut problems) = file::ConfigPath::new(given);
        config.place = place.named();
        let (documents, unread) = place.read();
        problems.extend(unread);
        for document in &documents {
            document::apply(document, &mut config, &mut problems);
            config.files.push(document.path.clone());
        }
        problems.extend(config.registry.problems());
        problems.extend(config.stores.problems());
        problems.extend(config.snapshotter.problems());
        (config, problems)
    }
}

impl Stores {
    /// The store to use if the command line or the environment gives `given`: its text without a
    /// name, and its origin for messages; `None` is the state directory's own.
    pub(crate) fn choose(&self, given: Option<&str>) -> Option<(String, String)> {
        let (text, origin) = match (given, &self.default) {
            // It overrides a default.
            (Some(""), _) | (None, None) => return None,
            (Some(text), _) => (text, "--store or BURGEON_STORE".to_owned()),
            (None, Some(set)) => (set.value.as_str(), set.origin.to_string()),
        };
        match self.named.get(text) {
            Some(named) => Some((named.value.clone(), named.origin.to_string())),
            None => Some((text.to_owned(), origin)),
        }
    }

    /// Faults that no single line has.
    fn problems(&self) -> Vec<Problem> {
        let fault = |origin: &Origin, key: String, message: String| Problem {
            file: origin.file.clone(),
            line: Some(origin.line),
            key: Some(key),
            message,
        };
        let has_url = |name: &String| self.named.contains_key(name);
        let empty = self.sections.iter().filter(|(name, _)| !has_url(name));
        let mut problems: Vec<_> = empty
            .map(|(name, origin)| {
                let what =
                    "the store has no valid url: add url = \"s3://BUCKET/PREFIX\" or another";
                fault(origin, format!("store.{name}"), what.to_owned())
            })
            .collect();
        let is_unknown = |setting: &&Setting<String>| {
            is_store_name(&setting.value) && !self.sections.contains_key(&setting.value)
        };
        if let Some(Setting { value, origin }) = self.default.as_ref().filter(is_unknown) {
            let near = keys::nearest(value, self.sections.keys().map(String::as_str));
            let hint = match near {
                Some(near) => format!("did you mean {near:?}?"),
                None => format!("add [store.{value}]; a folder needs an absolute path"),
            };
            let what = format!("no section names the store {value:?}: {hint}");
            problems.push(fault(origin, "store.default".to_owned(), what));
        }
        if let (Some(Setting { origin, .. }), Some((text, _))) = (&self.default, self.choose(None))
            && Name::parse(&text).is_some_and(|name| name.is_ok_and(|it| it.digest().is_none()))
        {
            let what = "a repository is not a default, because only build, mount and pull read one: \
                        name it with --store";
            problems.push(fault(origin, "store.default".to_owned(), what.to_owned()));
        }
        problems
    }
}

/// True if `text` may name a store: it is neither a path nor a URL.
pub(crate) fn is_store_name(text: &str) -> bool {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    begins && text.len() <= STORE_NAME_MAX && text.chars().all(is_inner)
}

/// Longest name of a store, as of an image.
const STORE_NAME_MAX: usize = 80;

/// Begins a supervisor: it logs events at the level and in the format of the environment, or else
/// of the configuration, and its children inherit both; it tells its servers the cache's bounds.
pub(crate) fn begin_daemon() {
    let (config, problems) = Config::examine(env::var_os(global::CONFIG).as_deref());
    if let (None, Some(format)) = (log::format_of_environment(), &config.log.format) {
        log::set_json(format.value == Format::Json);
    }
    match log::is_set() {
        true => log::begin(log::LogOwner::Daemon),
        false => {
            let level = config.log.level.map_or(LevelFilter::INFO, |level| level.value);
            log::begin_at(level, log::LogOwner::Daemon);
        }
    }
    config.cache.configure();
    let dir = config.cache.dir;
    let given = env::var_os(burgeon_daemon::CACHE_DIR).filter(|dir| !dir.is_empty());
    if let Some(dir) = given.map(PathBuf::from).or(dir.map(|dir| dir.value)) {
        burgeon_daemon::configure_cache_dir(dir);
    }
    if let Some(providers) = config.registry.providers() {
        providers.use_for_logins();
    }
    for problem in problems {
        log::warn(&format!("the configuration has a problem: {problem}"));
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, fs};

    use super::{Config, is_store_name};

    #[test]
    fn later_files_replace_earlier_ones_key_by_key() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("config.d")).unwrap();
        fs::write(at("config.toml"), "[mount]\nfill = true\nwrite-limit = \"1G\"\n").unwrap();
        fs::write(at("config.d/20.toml"), "mount.write-limit = \"3G\"\n").unwrap();
        fs::write(at("config.d/10.toml"), "[mount]\nwrite-limit = \"2G\"\npull = 'never'").unwrap();
        fs::write(at("config.d/30.toml.dpkg-old"), "broken").unwrap();
        fs::write(at("config.d/.hidden.toml"), "broken").unwrap();
        let config = Config::load(Some(folder.path().as_os_str())).unwrap();
        assert_eq!(config.files.len(), 3);
        let limit = config.mount.write_limit.unwrap();
        assert_eq!((limit.value, limit.origin.line), (3 << 30, 1));
        assert_eq!(limit.origin.file, at("config.d/20.toml"));
        assert!(config.mount.fill.unwrap().value && config.mount.pull.is_some());
    }

    #[test]
    fn a_repository_is_no_default_store() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.toml");
        for text in [
            "store.default = 'oci://r.example/team'",
            "store.default = 'a'\nstore.a.url = 'oci://r.example/team'",
        ] {
            fs::write(&file, text).unwrap();
            let refused = Config::load(Some(file.as_os_str())).unwrap_err().to_string();
            assert!(refused.contains("a repository is not a default"), "{refused}");
        }
    }

    #[test]
    fn a_store_is_chosen_by_flag_then_default_and_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.toml");
        let text = "[store]\ndefault = 'a'\n[store.a]\nurl = '/srv/a'\n[store.b]\nurl = 's3://b/p'";
        fs::write(&file, text).unwrap();
        let stores = Config::load(Some(file.as_os_str())).unwrap().stores;
        let chosen = |given| stores.choose(given).map(|(text, _)| text);
        assert_eq!(chosen(None).as_deref(), Some("/srv/a"));
        assert_eq!(chosen(Some("b")).as_deref(), Some("s3://b/p"));
        assert_eq!(chosen(Some("./b")).as_deref(), Some("./b"));
        assert_eq!(chosen(Some("")), None);
    }

    #[test]
    fn faults_across_lines_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.toml");
        fs::write(&file, "[store]\ndefault = 'modle'\n[store.models]\n").unwrap();
        let (_, problems) = Config::examine(Some(file.as_os_str()));
        let said: Vec<_> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("c.toml:3: store.models: the store has no valid url"), "{said:?}");
        assert!(said[1].contains("c.toml:2: store.default") && said[1].contains("\"models\""));
    }

    #[test]
    fn none_and_empty_read_nothing_and_a_missing_file_is_an_error() {
        for none in ["", "none"] {
            let (config, problems) = Config::examine(Some(OsStr::new(none)));
            assert!(config.files.is_empty() && problems.is_empty());
        }
        let error = Config::load(Some(OsStr::new("/nonexistent/burgeon.toml"))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/burgeon.toml"), "{error}");
    }

    #[test]
    fn paths_and_urls_are_no_names_of_stores() {
        assert!(is_store_name("models") && is_store_name("a.b_c-1"));
        for other in ["", "./a", "/a", "a/b", "s3://b", "s3:b", ".a", "-a"] {
            assert!(!is_store_name(other), "{other}");
        }
    }
}
