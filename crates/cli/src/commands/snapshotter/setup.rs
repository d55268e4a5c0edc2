//! `burgeon snapshotter setup`: the configuration of containerd and of our unit, for the containerd
//! that is installed.
//!
//! ```text
//!   containerd --version ─► conf.d/burgeon.toml                  a file of ours, which config.toml imports
//!   --trust, --root, …   ─► burgeon-snapshotter.service.d/trust.conf, also without --trust: that takes it back
//!   cache.keep-free      ─► burgeon/config.d/kubelet.toml, if kubelet would notice the cache (floor.rs)
//!   config.toml          ─► read only: is the file imported, and does it configure CRI?
//!                           somebody else's, never changed
//! ```
//!
//! Nothing is written without `--write`, and then by rename.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use serde_json::json;

use super::{super::Context, floor};
use crate::{config::check_pattern, exit::Usage, output};

const DROP_IN: &str = "etc/containerd/conf.d/burgeon.toml";
const CONFIG: &str = "etc/containerd/config.toml";
const UNIT: &str = "etc/systemd/system/burgeon-snapshotter.service.d/trust.conf";
/// The CRI plugin of containerd 1.x.
const CRI: &str = "io.containerd.grpc.v1.cri";
/// The list of containerd's differs, which images are committed by.
const DIFFERS: &str = "io.containerd.service.v1.diff-service";
/// Our differ in that list.
const DIFFER: &str = "burgeon-diff";
/// The longest `config.toml` that is read.
const CONFIG_MAX: u64 = 1 << 20;

/// Options of `setup`.
#[derive(clap::Args, Debug)]
pub(super) struct Setup {
    /// Write the files; without it, they are only shown
    #[arg(long)]
    write: bool,
    /// The folder below which `etc` lies
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    prefix: PathBuf,
}

/// A version of containerd: major, minor.
type Version = (u32, u32);

pub(super) fn setup(
    context: &Context,
    root: &Path,
    (socket, containerd): (&Path, &Path),
    trust: &[String],
    args: &Setup,
) -> Result<ExitCode> {
    let state = &context.state;
    let version = installed()?;
    let cri = if version.0 == 1 { own_cri(&args.prefix) } else { None };
    let differs = own_differs(&args.prefix);
    let own = Own { cri: cri.is_some(), differs: differs.is_some() };
    let mut files = vec![
        (args.prefix.join(DROP_IN), drop_in(version, root, socket, own)?),
        (args.prefix.join(UNIT), unit(state.root(), root, (socket, containerd), trust)?),
    ];
    if let Some(text) = floor::file(state, &context.config.cache, &args.prefix)? {
        files.push((args.prefix.join(floor::FILE), text));
    }
    let mut problems = problems(&args.prefix, version)?;
    if cri == Some(false) {
        problems.push(format!(
            "{} configures {CRI:?}, which an imported file would replace as a whole: add there, \
             below [plugins.{CRI:?}.containerd], the lines: snapshotter = \"burgeon\"; \
             disable_snapshot_annotations = false",
            args.prefix.join(CONFIG).display()
        ));
    }
    if differs == Some(false) && has_differs(version) {
        problems.push(format!(
            "{} configures {DIFFERS:?}, which an imported file would replace as a whole: put \
             {DIFFER:?} at the head of its list `default`",
            args.prefix.join(CONFIG).display()
        ));
    }
    problems.extend(floor::problem(state)?);
    if args.write {
        for (path, text) in &files {
            write(path, text)?;
        }
    }
    if context.json {
        let shown = files.iter().map(|(path, text)| json!({ "path": path, "text": text }));
        output::print_json(&json!({
            "containerd": format!("{}.{}", version.0, version.1),
            "files": shown.collect::<Vec<_>>(),
            "written": args.write,
            "problems": problems,
        }))?;
    } else {
        for (path, text) in &files {
            let verb = if args.write { "written" } else { "to be written, with --write" };
            println!("# {} ({verb})\n{text}", path.display());
        }
        problems.iter().for_each(|problem| println!("problem: {problem}"));
        // The daemon reads the configuration when it starts, and then.
        let upgrade = if files.len() > 2 { " && burgeon upgrade" } else { "" };
        println!(
            "then: systemctl daemon-reload && systemctl enable burgeon-snapshotter && \
             systemctl restart burgeon-snapshotter containerd{upgrade}"
        );
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The version of the installed containerd.
fn installed() -> Result<Version> {
    let output = Command::new("containerd").arg("--version").output().map_err(|e| {
        let what = "cannot run `containerd --version`: install containerd, or add it to PATH";
        Error::with_source(ErrorKind::NotFound, what, e)
    })?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // `containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b7…`, `… 1.6.20~ds1 …`
    let version = said.split_whitespace().find_map(version_of);
    let version = version.filter(|version| (1, 6) <= *version && version.0 <= 2);
    let unknown = || {
        let what = format!("containerd 1.6, 1.7 or 2.x is needed, and not {:?}", said.trim());
        Error::new(ErrorKind::UnsupportedFormat, what)
    };
    Ok(version.ok_or_else(unknown)?)
}

fn version_of(word: &str) -> Option<Version> {
    let mut parts = word.strip_prefix('v').unwrap_or(word).split('.');
    let version = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().map(|_| version)
}

/// A path as it stands in TOML and in a unit: nothing in it has a meaning there.
fn plain(path: &Path) -> Result<&str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    let plain = path.to_str().filter(|path| path.starts_with('/') && path.chars().all(is_plain));
    let what =
        || format!("{} is not an absolute path of letters, digits and /._-+@", path.display());
    plain.ok_or_else(|| Usage(what()).into())
}

/// True if `config.toml` makes Burgeon the snapshotter of CRI; `None` if it does not configure CRI
/// at all. containerd 1.x merges no section of a plugin with an imported one.
fn own_cri(prefix: &Path) -> Option<bool> {
    own_section(prefix, CRI, |cri| {
        let containerd = cri.get("containerd").and_then(|it| it.get_ref().as_table());
        containerd.is_some_and(|containerd| {
            let get = |key: &str| containerd.get(key).map(|value| value.get_ref());
            get("snapshotter").and_then(|value| value.as_str()) == Some("burgeon")
                && get("disable_snapshot_annotations").and_then(|value| value.as_bool())
                    == Some(false)
        })
    })
}

/// True if the list of differs in `config.toml` begins with ours; `None` if it has no such list.
fn own_differs(prefix: &Path) -> Option<bool> {
    own_section(prefix, DIFFERS, |section| {
        let list = section.get("default").and_then(|list| list.get_ref().as_array());
        list.and_then(|list| list.first()?.get_ref().as_str()) == Some(DIFFER)
    })
}

/// The judgement about the section of a plugin in `config.toml`, if it has one.
fn own_section(
    prefix: &Path,
    plugin: &str,
    judge: impl Fn(&toml::de::DeTable<'_>) -> bool,
) -> Option<bool> {
    let config = prefix.join(CONFIG);
    if fs::metadata(&config).ok()?.len() > CONFIG_MAX {
        return None;
    }
    let text = fs::read_to_string(&config).ok()?;
    let table = toml::de::DeTable::parse(&text).ok()?;
    let section = table.get_ref().get("plugins")?.get_ref().as_table()?.get(plugin)?.get_ref();
    Some(section.as_table().is_some_and(judge))
}

/// containerd 1.6 knows no differs over a socket.
fn has_differs(version: Version) -> bool {
    version >= (1, 7)
}

/// Sections that `config.toml` has itself, and that an imported file would replace as a whole.
#[derive(Clone, Copy, Default)]
struct Own {
    cri: bool,
    differs: bool,
}

/// The file that containerd imports, without sections that `config.toml` has itself.
fn drop_in(version: Version, root: &Path, socket: &Path, own: Own) -> Result<String> {
    let (root, socket) = (plain(root)?, plain(socket)?);
    let format = if version.0 >= 2 { 3 } else { 2 };
    let mut text = format!(
        "version = {format}\n\
         [proxy_plugins.burgeon]\n  type = \"snapshot\"\n  address = \"{socket}\"\n"
    );
    if version >= (2, 0) {
        text += "  capabilities = [\"remap-ids\"]\n";
    }
    if version >= (1, 7) {
        text += &format!("  [proxy_plugins.burgeon.exports]\n    root = \"{root}\"\n");
    }
    if version >= (2, 1) {
        text += "    enable_remote_snapshot_annotations = \"true\"\n";
    }
    text += &differs(version, socket, own);
    if !own.cri {
        let images = match version.0 {
            1 => format!("{CRI:?}.containerd"),
            _ => "\"io.containerd.cri.v1.images\"".to_owned(),
        };
        text += &format!("[plugins.{images}]\n  snapshotter = \"burgeon\"\n");
        // From 2.1 on, that line would turn the transfer service off.
        if version < (2, 1) {
            text += "  disable_snapshot_annotations = false\n";
        }
    }
    if version >= (2, 1) {
        // The list replaces containerd's own, which has only its default snapshotter. Without a
        // named differ, ours would be one of several that may apply layers, which it cannot.
        for snapshotter in ["overlayfs", "burgeon"] {
            text += &format!(
                "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n  \
                 platform = \"linux\"\n  snapshotter = \"{snapshotter}\"\n  differ = \"walking\"\n"
            );
        }
    }
    Ok(text)
}

/// The settings of differs. The list of containerd replaces its own, which has `walking` alone.
fn differs(version: Version, socket: &str, own: Own) -> String {
    if !has_differs(version) {
        let why = "# This containerd has no differs over a socket: its own one reads all of an image \
                   to commit a container.\n";
        return why.to_owned();
    }
    let mut text =
        format!("[proxy_plugins.{DIFFER}]\n  type = \"diff\"\n  address = \"{socket}\"\n");
    if !own.differs {
        text += &format!("[plugins.{DIFFERS:?}]\n  default = [{DIFFER:?}, \"walking\"]\n");
    }
    text
}

/// The drop-in of our unit: its command with the trusted repositories.
fn unit(
    state: &Path,
    root: &Path,
    (socket, containerd): (&Path, &Path),
    trust: &[String],
) -> Result<String> {
    let program = std::env::current_exe()?;
    let [program, state, root, socket, containerd] =
        [&*program, state, root, socket, containerd].map(plain);
    let mut command = format!(
        "{} --state-dir {} snapshotter --root {} --socket {} --containerd {}",
        program?, state?, root?, socket?, containerd?
    );
    for pattern in trust {
        check_pattern(pattern).map_err(|why| Usage(format!("--trust: {why}")))?;
        command += &format!(" --trust {pattern}");
    }
    Ok(format!(
        "# The publishers of these repositories decide what layers hold, also those of other images with\n\
         # equal chain IDs.\n[Service]\nExecStart=\nExecStart={command}\n"
    ))
}

/// The obstacles: containerd does not use the file, or containers do not see mounts.
fn problems(prefix: &Path, version: Version) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let config = prefix.join(CONFIG);
    let import =
        format!("imports = [\"/{}/*.toml\"]", DROP_IN.rsplit_once('/').map_or("", |p| p.0));
    match fs::metadata(&config) {
        Ok(found) if found.len() > CONFIG_MAX => {
            problems.push(format!("{} is longer than {CONFIG_MAX} bytes", config.display()));
        }
        Ok(_) => {
            let text = fs::read_to_string(&config)
                .map_err(|e| Error::io(format!("cannot read {}", config.display()), e))?;
            let imports = toml::de::DeTable::parse(&text).ok().and_then(|table| {
                let imports = table.get_ref().get("imports")?.get_ref().as_array()?;
                Some(imports.iter().any(|one| {
                    let one = one.get_ref().as_str();
                    one.is_some_and(|one| one.contains("/etc/containerd/conf.d/"))
                }))
            });
            if imports != Some(true) {
                problems.push(format!("{} has to have the line: {import}", config.display()));
            }
        }
        Err(_) => {
            let format = if version.0 >= 2 { 3 } else { 2 };
            problems.push(format!(
                "{} is missing: make it with the lines: version = {format}; {import}",
                config.display()
            ));
        }
    }
    problems.extend(other_namespace());
    Ok(problems)
}

/// Mounts that are made here are seen by containerd only in its own mount namespace. A containerd
/// within a container, as kind has it, is not the host's: it has a PID namespace of its own.
fn other_namespace() -> Option<String> {
    let namespaces = |process: &Path| {
        let namespace = |kind| fs::read_link(process.join("ns").join(kind)).ok();
        Some((namespace("pid")?, namespace("mnt")?))
    };
    let (own_processes, own_mounts) = namespaces(Path::new("/proc/self"))?;
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let path = process.path();
        fs::read_to_string(path.join("comm")).ok().filter(|name| name == "containerd\n")?;
        let (processes, mounts) = namespaces(&path)?;
        (processes == own_processes && mounts != own_mounts).then(|| {
            format!(
                "containerd (process {}) is in another mount namespace than this command: it would not see \
                 the mounts of layers",
                process.file_name().to_string_lossy()
            )
        })
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(failed)?;
    let new = path.with_extension("new");
    let mut file = fs::File::create(&new).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&new, path).map_err(failed)?;
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Own, drop_in, own_differs, unit, version_of};

    #[test]
    fn versions_are_read_as_packages_print_them() {
        for (word, version) in [
            ("1.6.20~ds1", Some((1, 6))),
            ("v2.1.4", Some((2, 1))),
            ("2.2.0-rc.1", Some((2, 2))),
            ("github.com/containerd/containerd/v2", None),
            ("75cb2b7", None),
        ] {
            assert_eq!(version_of(word), version, "{word}");
        }
    }

    #[test]
    fn each_version_gets_the_settings_that_it_knows() {
        let text = |version| drop_in(version, Path::new("/r"), Path::new("/s"), Own::default());
        let text = |version| text(version).unwrap();
        for (version, annotations, exports, transfer) in [
            ((1, 6), "disable_snapshot_annotations = false", false, false),
            ((1, 7), "disable_snapshot_annotations = false", true, false),
            ((2, 0), "disable_snapshot_annotations = false", true, false),
            ((2, 1), "enable_remote_snapshot_annotations = \"true\"", true, true),
        ] {
            let text = text(version);
            assert!(toml::de::DeTable::parse(&text).is_ok(), "{text}");
            assert!(text.contains(annotations), "{text}");
            assert_eq!(text.contains("exports"), exports, "{text}");
            assert_eq!(text.contains("unpack_config"), transfer, "{text}");
            assert_eq!(text.contains("disable_"), version < (2, 1), "{text}");
            assert_eq!(text.contains("type = \"diff\""), version > (1, 6), "{text}");
            let list = "default = [\"burgeon-diff\", \"walking\"]";
            assert_eq!(text.contains(list), version > (1, 6), "{text}");
        }
    }

    #[test]
    fn a_list_of_differs_is_left_to_its_owner() {
        let prefix = tempfile::tempdir().unwrap();
        let config = prefix.path().join(super::CONFIG);
        assert_eq!(own_differs(prefix.path()), None);
        std::fs::create_dir_all(config.parent().unwrap()).unwrap();
        for (list, judged) in [
            ("[\"walking\"]", Some(false)),
            ("[\"walking\", \"burgeon-diff\"]", Some(false)),
            ("[\"burgeon-diff\", \"walking\"]", Some(true)),
            ("\"burgeon-diff\"", Some(false)),
        ] {
            let section = "[plugins.\"io.containerd.service.v1.diff-service\"]\n";
            std::fs::write(&config, format!("{section}default = {list}\n")).unwrap();
            assert_eq!(own_differs(prefix.path()), judged, "{list}");
        }
        let own = Own { differs: true, ..Own::default() };
        let text = drop_in((2, 1), Path::new("/r"), Path::new("/s"), own).unwrap();
        assert!(text.contains("type = \"diff\"") && !text.contains("diff-service"), "{text}");
    }

    #[test]
    fn nothing_with_a_meaning_gets_into_a_file() {
        let (root, socket) = (Path::new("/r"), Path::new("/s"));
        let own = Own::default();
        assert!(drop_in((1, 6), Path::new("/a\"\nb"), socket, own).is_err());
        assert!(drop_in((1, 6), root, Path::new("relative"), own).is_err());
        for wrong in ["", "a b", "a\nExecStart=/x", "%h", "a;b", "$x"] {
            assert!(unit(root, root, (socket, socket), &[wrong.to_owned()]).is_err(), "{wrong:?}");
        }
        let text =
            unit(root, root, (socket, socket), &["r.example:5000/team/*".to_owned()]).unwrap();
        assert!(text.contains("--trust r.example:5000/team/*\n"), "{text}");
    }
}
