//! One file of the configuration: TOML to settings.
//!
//! ```text
//!   text ─► toml ─► keys and values with their places ─► known? valid? ─► fields of Config
//!             └ faults of syntax: a line each, and no keys are looked at
//! ```
//! A message never repeats the value of a URL, which may hold a secret by mistake.

use std::path::{Path, PathBuf};

use burgeon_daemon::{log::LevelFilter, protocol::CacheAmount};
use burgeon_source::{Form, Location, registry::Name};
use clap::ValueEnum;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    Config, Origin, Problem, Setting, check_pattern,
    file::Document,
    is_store_name,
    keys::{self, SECTIONS},
};
use crate::{
    global::LEVELS,
    quantities::{parse_amount, parse_size},
};

type Checked<T> = Result<T, String>;

/// Most faults of syntax of one file that are told: one bracket too many makes more of them.
const FAULTS_MAX: usize = 10;

/// Puts the settings of the file into `config`, over those that are there, and appends the file's
/// problems.
pub(super) fn apply(document: &Document, config: &mut Config, problems: &mut Vec<Problem>) {
    let (table, faults) = DeTable::parse_recoverable(&document.text);
    let mut reader = Reader { document, config, problems: Vec::new() };
    for fault in &faults {
        let at = fault.span().map_or(0, |span| span.start);
        let mut message = fault.message().replace('\n', ", ");
        let key = fault.span().and_then(|span| document.text.get(span)).unwrap_or("it");
        if message == "duplicate key" {
            let first = last_before(table.get_ref(), key, at).map(|at| reader.origin(at).line);
            let first = first.or_else(|| same_line_before(&document.text, at));
            message = match first.or_else(|| key_before(&document.text, key, at)) {
                Some(line) => format!("{key} stands in line {line}, too: leave one out"),
                None => format!("{key} stands twice: leave one out"),
            };
        }
        reader.complain(at, &[], message);
        reader.problems.dedup_by(|a, b| (a.line, &a.message) == (b.line, &b.message));
        if reader.problems.len() == FAULTS_MAX {
            break;
        }
    }
    if faults.is_empty() {
        reader.read(&[], table.get_ref());
    }
    // The parser sorts keys by name.
    reader.problems.sort_by_key(|problem| problem.line);
    problems.append(&mut reader.problems);
}

/// The place of the last key `key`, as it is typed, that stands before the byte `end`: a key that
/// the parser calls a duplicate has its twin there.
fn last_before(table: &DeTable<'_>, key: &str, end: usize) -> Option<usize> {
    let key = key.trim_matches(['"', '\'']);
    let places = table.iter().filter_map(|(name, value)| {
        let own = (name.get_ref() == key).then_some(name.span().start);
        let within = value.get_ref().as_table().and_then(|table| last_before(table, key, end));
        own.filter(|at| *at < end).max(within)
    });
    places.max()
}

/// The number of the last line that says the same as the line of the byte `at`, before that: of
/// two headers of a section, the parser knows the last one alone.
fn same_line_before(text: &str, at: usize) -> Option<usize> {
    let number = text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let own = text.lines().nth(number)?.trim();
    text.lines().take(number).position(|line| line.trim() == own).map(|before| before + 1)
}

/// The number of the last line before the byte `at` that gives a value to `key`: a section of that
/// name has replaced it.
fn key_before(text: &str, key: &str, at: usize) -> Option<usize> {
    let number = text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let is_of = |line: &str| {
        line.split_once('=').is_some_and(|(name, _)| name.trim().trim_matches(['"', '\'']) == key)
    };
    text.lines()
        .take(number)
        .collect::<Vec<_>>()
        .iter()
        .rposition(|line| is_of(line))
        .map(|n| n + 1)
}

struct Reader<'a> {
    document: &'a Document,
    config: &'a mut Config,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    /// Reads the table at `path`.
    fn read(&mut self, path: &[&str], table: &DeTable<'_>) {
        for (key, value) in table {
            let (at, key): (_, &str) = (key.span().start, key.get_ref());
            let path = [path, &[key]].concat();
            match (path.as_slice(), value.get_ref()) {
                (["store", "default"], DeValue::Table(_)) => {
                    let what = "`default` names the default store: give the section another name";
                    self.complain(at, &path, what.to_owned());
                }
                (["store", "default"], value) => self.set(&path, at, value),
                (["store", name], DeValue::Table(table)) => {
                    if !is_store_name(name) {
                        let what = "a store's name has 1 to 80 letters, digits, '.', '_' and '-', and \
                                    begins with a letter or digit";
                        self.complain(at, &path, what.to_owned());
                        continue;
                    }
                    let origin = self.origin(at);
                    self.config.stores.sections.insert((*name).to_owned(), origin);
                    self.read(&path, table);
                }
                (["store", name], _) if *name == "url" => {
                    let what = "unknown key: a store has a name: [store.NAME] url = \"…\"";
                    self.complain(at, &path, what.to_owned());
                }
                ([section], DeValue::Table(table)) if SECTIONS.contains(section) => {
                    self.read(&path, table);
                }
                ([section], _) if SECTIONS.contains(section) => {
                    let more = match *section {
                        "store" => "; the default store is `default` in it",
                        _ => "",
                    };
                    let what =
                        format!("it is a section: write [{section}] and its keys below{more}");
                    self.complain(at, &path, what);
                }
                ([section], DeValue::Table(_)) => {
                    let what = keys::explain_section(section);
                    self.complain(at, &path, what);
                }
                (_, value) => self.set(&path, at, value),
            }
        }
    }

    /// Takes the value of a key, or complains about either.
    fn set(&mut self, path: &[&str], at: usize, value: &DeValue<'_>) {
        let origin = self.origin(at);
        let config = &mut *self.config;
        let mount = &mut config.mount;
        let set = match path {
            ["state-dir"] => absolute(value).map(|folder| {
                // A user's own state does not lie in a directory of root.
                if self.document.is_own {
                    config.state_dir = Some(Setting { value: folder, origin });
                }
            }),
            ["log", "level"] => put(&mut config.log.level, level(value), origin),
            ["log", "format"] => put(&mut config.log.format, choice(value), origin),
            ["cache", "dir"] => absolute(value).map(|folder| {
                // The server of another user could not write to it.
                if self.document.is_own {
                    config.cache.dir = Some(Setting { value: folder, origin });
                }
            }),
            ["cache", "size"] => put(&mut config.cache.size, amount(value), origin),
            ["cache", "keep-free"] => put(&mut config.cache.keep_free, amount(value), origin),
            ["cache", "sharing"] => put(&mut config.cache.sharing, choice(value), origin),
            ["mount", "write-limit"] => put(&mut mount.write_limit, write_limit(value), origin),
            ["mount", "reserve"] => put(&mut mount.reserve, boolean(value), origin),
            ["mount", "fetch-limit"] => put(&mut mount.fetch_limit, size(value), origin),
            ["mount", "fill"] => put(&mut mount.fill, boolean(value), origin),
            ["mount", "profile"] => put(&mut mount.profile, profile(value), origin),
            ["mount", "pull"] => put(&mut mount.pull, choice(value), origin),
            ["mount", "transport"] => put(&mut mount.transport, choice(value), origin),
            ["registry", "hosts-dir"] => {
                put(&mut config.registry.hosts_dir, absolute(value), origin)
            }
            ["registry", "kubelet-providers"] => {
                put(&mut config.registry.kubelet_providers, absolute(value), origin)
            }
            ["registry", "kubelet-provider-dir"] => {
                put(&mut config.registry.kubelet_provider_dir, absolute(value), origin)
            }
            ["snapshotter", "trust"] => patterns(value).map(|value| {
                if self.document.is_own {
                    config.snapshotter.trust = Some(Setting { value, origin });
                }
            }),
            ["snapshotter", "index"] => put(&mut config.snapshotter.index, boolean(value), origin),
            ["snapshotter", "index-min"] => {
                put(&mut config.snapshotter.index_min, size(value), origin)
            }
            ["snapshotter", "index-max"] => {
                put(&mut config.snapshotter.index_max, size(value), origin)
            }
            ["snapshotter", "index-kept"] => {
                put(&mut config.snapshotter.index_kept, size(value), origin)
            }
            ["store", "default"] => put(&mut config.stores.default, store(value, true), origin),
            ["store", name, "url"] => store(value, false).map(|value| {
                let setting = Setting { value, origin };
                config.stores.named.insert((*name).to_owned(), setting);
            }),
            _ => Err(keys::explain(path)),
        };
        if let Err(what) = set {
            self.complain(at, path, what);
        }
    }

    fn complain(&mut self, at: usize, path: &[&str], message: String) {
        let Origin { file, line } = self.origin(at);
        let key = (!path.is_empty()).then(|| path.join(".").escape_debug().to_string());
        self.problems.push(Problem { file, line: Some(line), key, message });
    }

    /// The line of the byte `at`.
    fn origin(&self, at: usize) -> Origin {
        let before = self.document.text.bytes().take(at);
        let line = 1 + before.filter(|byte| *byte == b'\n').count();
        Origin { file: self.document.path.clone(), line }
    }
}

fn put<T>(slot: &mut Option<Setting<T>>, value: Checked<T>, origin: Origin) -> Checked<()> {
    *slot = Some(Setting { value: value?, origin });
    Ok(())
}

fn string<'a>(value: &'a DeValue<'_>) -> Checked<&'a str> {
    value
        .as_str()
        .ok_or_else(|| format!("it is of the type {}: write a \"string\"", value.type_str()))
}

fn boolean(value: &DeValue<'_>) -> Checked<bool> {
    value
        .as_bool()
        .ok_or_else(|| format!("it is of the type {}: write true or false", value.type_str()))
}

/// A number of bytes, or a string as on the command line.
fn size(value: &DeValue<'_>) -> Checked<u64> {
    let text = match value {
        DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
        value => string(value).map_err(|_| "write a size, such as \"10G\"".to_owned())?,
    };
    parse_size(text).map_err(|e| format!("it is not a size: {e}"))
}

/// A size, or a share of a file system such as "10%".
fn amount(value: &DeValue<'_>) -> Checked<CacheAmount> {
    match value.as_str() {
        Some(text) if text.trim().ends_with('%') => parse_amount(text),
        _ => size(value).map(CacheAmount::Bytes),
    }
}

fn write_limit(value: &DeValue<'_>) -> Checked<u64> {
    let (size, least) = (size(value)?, burgeon_daemon::WRITE_LIMIT_MIN);
    match size < least {
        true => Err(format!("btrfs needs at least {} MiB: write a larger size", least >> 20)),
        false => Ok(size),
    }
}

fn level(value: &DeValue<'_>) -> Checked<LevelFilter> {
    let text = string(value)?;
    let known = LEVELS.contains(&text).then(|| text.parse().ok()).flatten();
    known.ok_or_else(|| format!("there is no level {text:?}: write one of {}", LEVELS.join(", ")))
}

/// A value of an option of the command line.
fn choice<T: ValueEnum>(value: &DeValue<'_>) -> Checked<T> {
    let text = string(value)?;
    T::from_str(text, false).map_err(|_| {
        let values = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<_> = values.map(|value| value.get_name().to_owned()).collect();
        format!("there is no {text:?}: write one of {}", names.join(", "))
    })
}

fn profile(value: &DeValue<'_>) -> Checked<String> {
    match string(value)? {
        text @ ("auto" | "none") => Ok(text.to_owned()),
        _ => Err(
            "write \"auto\" or \"none\": a file is a profile of one image, so it is given with \
                  `burgeon mount --profile`"
                .to_owned(),
        ),
    }
}

/// Patterns of repositories.
fn patterns(value: &DeValue<'_>) -> Checked<Vec<String>> {
    let Some(list) = value.as_array() else {
        return Err("write a list, such as [\"registry.example/team/*\"]".to_owned());
    };
    let pattern = |value: &Spanned<DeValue<'_>>| {
        let text = string(value.get_ref())?;
        check_pattern(text).map(|()| text.to_owned())
    };
    list.iter().map(pattern).collect()
}

fn absolute(value: &DeValue<'_>) -> Checked<PathBuf> {
    let path = Path::new(string(value)?);
    match path.is_absolute() {
        true => Ok(path.to_owned()),
        false => Err("it is not an absolute path: begin it with /".to_owned()),
    }
}

/// A URL or an absolute path of a store, or with `by_name` the name of one.
fn store(value: &DeValue<'_>, by_name: bool) -> Checked<String> {
    let text = string(value)?;
    if by_name && is_store_name(text) {
        return Ok(text.to_owned());
    }
    let checked = match Name::parse(text) {
        Some(name) => name.map(drop),
        None if text.starts_with('/') || Form::of(text).is_url() => Location::parse(text).map(drop),
        // `user:password@bucket` is no folder. It is not repeated, because it may hold a secret.
        None => {
            return Err("it is neither a URL, such as s3://bucket/path, nor an absolute path, \
                        which begins with /"
                .to_owned());
        }
    };
    checked.map(|()| text.to_owned()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::{super::KEYS, Config, Document, apply};

    fn read(text: &str) -> (Config, Vec<String>) {
        let (mut config, mut problems) = (Config::default(), Vec::new());
        let document =
            Document { path: PathBuf::from("c.toml"), text: text.to_owned(), is_own: true };
        apply(&document, &mut config, &mut problems);
        (config, problems.iter().map(ToString::to_string).collect())
    }

    /// The shipped file explains each key, and nothing else; each of its lines may be used.
    #[test]
    fn the_shipped_file_holds_every_key_commented_out() {
        let shipped = include_str!("../../../../dist/config.toml");
        for line in shipped.lines() {
            assert!(line.is_empty() || line.starts_with('#'), "{line:?} is not commented out");
        }
        let (_, problems) = read(shipped);
        assert!(problems.is_empty());
        // Prose begins with "# ".
        let used: String = shipped
            .lines()
            .filter(|line| !line.starts_with("# ") && *line != "#")
            .map(|line| format!("{}\n", line.trim_start_matches('#')))
            .collect();
        let (config, problems) = read(&used);
        assert_eq!(problems, [""; 0], "{used}");
        let Config { state_dir, log, cache, mount, registry, snapshotter, stores, .. } = config;
        let set = [
            state_dir.is_some(),
            log.level.is_some(),
            log.format.is_some(),
            cache.dir.is_some(),
            cache.size.is_some(),
            cache.keep_free.is_some(),
            cache.sharing.is_some(),
            mount.write_limit.is_some(),
            mount.reserve.is_some(),
            mount.fetch_limit.is_some(),
            mount.fill.is_some(),
            mount.profile.is_some(),
            mount.pull.is_some(),
            mount.transport.is_some(),
            registry.hosts_dir.is_some(),
            registry.kubelet_providers.is_some(),
            registry.kubelet_provider_dir.is_some(),
            snapshotter.trust.is_some(),
            snapshotter.index.is_some(),
            snapshotter.index_min.is_some(),
            snapshotter.index_max.is_some(),
            snapshotter.index_kept.is_some(),
            stores.default.is_some(),
            stores.named.contains_key("models"),
        ];
        assert_eq!(set, [true; KEYS.len()]);
    }

    #[test]
    fn limits_that_leave_no_image_an_index_are_a_fault() {
        for text in ["index-min = '20G'", "index-max = '1M'"] {
            let (config, problems) = read(&format!("[snapshotter]\n{text}\n"));
            assert_eq!(problems, [""; 0]);
            let faults = config.snapshotter.problems();
            assert!(faults.len() == 1 && faults[0].line == Some(2), "{text}: {faults:?}");
        }
        let (config, _) = read("[snapshotter]\nindex-min = '1M'\nindex-max = '1M'\n");
        assert!(config.snapshotter.problems().is_empty());
    }

    #[test]
    fn every_problem_is_named_with_its_line() {
        let (_, problems) = read(
            "state-dir = 'x'\nstroe = 1\n[mount]\nwirte-limit = '1G'\nfill = 'yes'\n\
             transport = 'nbd'\nwrite-limit = '1M'\n[mounts]\nfill = true\n[log]\nlevel = 'loud'\n",
        );
        let begin = [
            "c.toml:1: state-dir: it is not an absolute path",
            "c.toml:2: stroe: unknown key",
            "c.toml:4: mount.wirte-limit: unknown key: did you mean mount.write-limit?",
            "c.toml:5: mount.fill: it is of the type string: write true or false",
            "c.toml:6: mount.transport: there is no \"nbd\": write one of auto, ublk, fuse",
            "c.toml:7: mount.write-limit: btrfs needs at least 256 MiB",
            "c.toml:8: mounts: unknown section: did you mean [mount]?",
            "c.toml:11: log.level: there is no level \"loud\": write one of error, warn",
        ];
        assert_eq!(problems.len(), begin.len(), "{problems:#?}");
        for (problem, begin) in problems.iter().zip(begin) {
            assert!(problem.starts_with(begin), "{problem}");
        }
    }

    #[test]
    fn broken_syntax_is_named_with_its_line() {
        for (text, line) in
            [("a = \n", 1), ("[log]\nlevel = 'info'\nlevel = 'warn'\n", 3), ("\n[", 2)]
        {
            let (_, problems) = read(text);
            assert!(problems[0].starts_with(&format!("c.toml:{line}: ")), "{problems:?}");
        }
    }

    #[test]
    fn a_file_of_brackets_is_told_in_few_lines() {
        let problems = read(&"[".repeat(60_000)).1;
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(read(&"[\n".repeat(20_000)).1.len(), 10);
    }

    #[test]
    fn a_duplicate_is_named_with_both_lines() {
        for (text, says) in [
            ("[log]\nlevel = 'info'\nlevel = 'warn'\n", "c.toml:3: level stands in line 2, too"),
            ("[mount]\nfill = true\n[log]\n\n[mount]\n", "c.toml:5: mount stands in line 1, too"),
            (
                "[store]\ndefault = 'a'\n[store.default]\nurl = '/a'\n",
                "c.toml:3: default stands in line 2, too: leave one out",
            ),
            (
                "[store.a]\nurl = '/a'\n[store.b]\nurl = '/b'\n\"url\" = '/c'\n",
                "c.toml:5: \"url\" stands in line 4, too: leave one out",
            ),
        ] {
            let (_, problems) = read(text);
            assert!(problems[0].starts_with(says), "{text}: {problems:?}");
        }
    }

    #[test]
    fn stores_have_names_and_absolute_places() {
        let (config, problems) = read(
            "[store]\ndefault = 'https://store.example/team'\n[store.a]\nurl = '/srv/a'\n\
             [store.b]\nurl = 's3://bucket/b'\n",
        );
        assert_eq!(problems, [""; 0]);
        assert_eq!(config.stores.named.len(), 2);
        for (text, problem) in [
            ("[store.a]\nurl = 'srv/a'", "absolute path"),
            ("[store.a]\nurl = 'ftp://a/b'", "unsupported store URL ftp://"),
            ("[store.a]\nurl = 7", "write a \"string\""),
            ("[store]\nurl = '/srv/a'", "[store.NAME] url"),
            ("store = '/srv/a'", "`default` in it"),
            ("[store.default]\nurl = '/a'", "another name"),
            ("[store.'a b']\nurl = '/a'", "a store's name has"),
            ("[store.a]\nulr = '/a'", "did you mean store.a.url?"),
        ] {
            let (_, problems) = read(text);
            assert!(problems.iter().any(|it| it.contains(problem)), "{text}: {problems:?}");
        }
    }

    #[test]
    fn a_secret_in_a_url_is_refused_and_not_repeated() {
        for url in [
            "https://me:hunter2@host/x",
            "s3://hunter2@bucket/x",
            "https://host/x?sig=hunter2",
            "oci://me:hunter2@host/x",
            "me:hunter2@bucket/x",
        ] {
            let (config, problems) = read(&format!("[store.a]\nurl = \"{url}\"\n"));
            assert_eq!(problems.len(), 1, "{url}");
            assert!(!problems[0].contains("hunter2"), "{problems:?}");
            assert!(config.stores.named.is_empty());
        }
    }

    #[test]
    fn sizes_are_numbers_or_have_units() {
        let (config, problems) = read("[mount]\nwrite-limit = 1073741824\nfetch-limit = \"5G\"\n");
        assert_eq!(problems, [""; 0]);
        assert_eq!(config.mount.write_limit.unwrap().value, 1 << 30);
        assert_eq!(config.mount.fetch_limit.unwrap().value, 5 << 30);
        for text in ["-1", "1.5", "\"5X\"", "[1]", "0x10"] {
            assert_eq!(read(&format!("[mount]\nfetch-limit = {text}\n")).1.len(), 1, "{text}");
        }
    }

    #[test]
    fn the_state_directory_is_that_of_the_owner() {
        let (mut config, mut problems) = (Config::default(), Vec::new());
        let text = "state-dir = '/srv/burgeon'".to_owned();
        let document = Document { path: PathBuf::from("c.toml"), text, is_own: false };
        apply(&document, &mut config, &mut problems);
        assert!(config.state_dir.is_none() && problems.is_empty());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "((log|mount|store|fill|url|[\\[\\]{}.,='\"0-9 -]|\\PC){0,9}\n){0,6}") {
            let lines = text.lines().count().max(1) + 1;
            let (mut config, mut problems) = (Config::default(), Vec::new());
            let document = Document { path: PathBuf::from("c.toml"), text, is_own: true };
            apply(&document, &mut config, &mut problems);
            prop_assert!(problems.iter().all(|it| it.line.is_some_and(|line| line <= lines)));
        }
    }
}
