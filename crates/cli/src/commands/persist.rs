//! `mount --persist` and `umount --forget`: a unit of systemd that mounts an image at each boot.
//!
//! ```text
//!   mount --persist ─► /etc/systemd/system/mnt-a.mount ─► systemctl enable
//!   boot            ─► systemd: mount -t burgeon … ─► mount.burgeon (crate::helper)
//!     failed        ─► OnFailure: burgeon-retry@mnt-a.timer ─► the same after 30 s
//!   umount --forget ─► systemctl disable ─► the file removed
//! ```
//! Invariants (`tests/systemd.rs`, `tests/reboot.rs`): a unit that this command has not written is
//! never changed; no target waits for the mount, so a store that is away delays no boot.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{Client, StateDir};
use burgeon_source::{Form, Location};
use clap::ValueEnum;

use super::{Context, mount_point::Opened, named, resume::already};
use crate::{args, exit::Busy};

const FOLDER: &str = "/etc/systemd/system";

/// The helper that mount(8) runs.
const HELPER: &str = "/sbin/mount.burgeon";

/// First line of each unit that this command writes.
const MARK: &str = "# Written by `burgeon mount --persist`; `burgeon umount --forget` removes it.";

/// The template of the timers that start a unit again when it has failed.
const RETRY: &str = "burgeon-retry";

/// Longest name of a unit, as of a file.
const NAME_MAX: usize = 255;

/// A mount that is to last over boots.
pub(super) struct Plan {
    unit: Unit,
    text: String,
    /// The mount point, without symlinks.
    pub(super) target: PathBuf,
    /// The same is mounted and served there already.
    pub(super) is_mounted: bool,
    /// The text of our unit that is there already.
    before: Option<String>,
}

impl Plan {
    /// Decides everything before the mount is made.
    pub(super) fn new(context: &Context, args: &args::Mount) -> Result<Self> {
        let opened = Opened::new(&args.path, None)?;
        let target = opened.path()?;
        let unit = Unit::find(&target)?;
        if !Path::new(HELPER).exists() {
            let what = format!(
                "no unit for {}: it would need {HELPER}, a symlink to the program, which is missing; \
                 the package and `make install` make it",
                target.display()
            );
            return Err(Error::new(ErrorKind::NotFound, what).into());
        }
        let text = unit_text(context, args, &target)?;
        let is_in_place = already(context, args, &opened)?.is_some();
        let is_mounted = is_in_place && Client::connect(&context.state)?.is_some();
        if !is_in_place {
            // Before the unit names it: another file system may be mounted there.
            opened.check()?;
        }
        let before = unit.text()?.filter(|text| text.starts_with(MARK));
        Ok(Self { unit, text, target, is_mounted, before })
    }

    /// Writes and enables the unit, unless that was done before.
    pub(super) fn install(&self) -> Result<()> {
        self.unit.install(&self.text)
    }

    /// Puts back the unit that was there before, or none; the mount failed. Stops nothing, because
    /// that would unmount whatever is at the mount point.
    pub(super) fn undo(&self) {
        let undone = match &self.before {
            Some(text) => self.unit.install(text),
            None => self.unit.remove(false).map(drop),
        };
        if let Err(e) = undone {
            eprintln!("note: the unit {} stays: {e:#}", self.unit.name);
        }
    }

    pub(super) fn unit_name(&self) -> &str {
        &self.unit.name
    }
}

/// The unit of one mount point.
pub(super) struct Unit {
    name: String,
    path: PathBuf,
}

impl Unit {
    /// The unit of the mount point `target`, an absolute path without symlinks. Refused if another
    /// program has made it, or without systemd.
    fn find(target: &Path) -> Result<Self> {
        if !systemd_runs() {
            let what = format!(
                "no unit for {}: systemd does not run here; a line of /etc/fstab with the type \
                 burgeon and the option _netdev mounts it at boot",
                target.display()
            );
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        Self::find_to_forget(target)
    }

    /// The same, to remove it; without systemd a unit may be there for the next boot.
    pub(super) fn find_to_forget(target: &Path) -> Result<Self> {
        let name = unit_name(target)?;
        let unit = Self { path: Path::new(FOLDER).join(&name), name };
        if !unit.is_ours()? && unit.path.symlink_metadata().is_ok() {
            return Err(unit.is_foreign(&unit.path.to_string_lossy()));
        }
        if !systemd_runs() {
            return Ok(unit);
        }
        let fragment = systemctl(&["show", "--property=FragmentPath", "--value", &unit.name])?;
        match fragment.trim() {
            "" => {}
            other if Path::new(other) == unit.path => {}
            other if other.starts_with("/run/systemd/generator") => {
                return Err(unit.is_foreign("a line of /etc/fstab"));
            }
            other => return Err(unit.is_foreign(other)),
        }
        Ok(unit)
    }

    /// The unit's name, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The timer that runs while the mount has failed.
    fn retry_timer(&self) -> String {
        format!("{RETRY}@{}.timer", self.name.trim_end_matches(".mount"))
    }

    /// Writes the unit and enables it.
    fn install(&self, text: &str) -> Result<()> {
        if fs::read_to_string(&self.path).ok().as_deref() != Some(text) {
            self.write(text)?;
            systemctl(&["daemon-reload"])?;
        }
        // systemd reads all of its units again when one is enabled.
        match systemctl(&["is-enabled", "--quiet", &self.name]) {
            Ok(_) => Ok(()),
            Err(_) => systemctl(&["enable", "--quiet", &self.name]).map(drop),
        }
    }

    /// Disables and removes the unit, and stops it on request; false if there is none.
    pub(super) fn remove(&self, stop: bool) -> Result<bool> {
        if !self.is_ours()? {
            return Ok(false);
        }
        if !systemd_runs() {
            remove_links(Path::new(FOLDER), &self.name);
            fs::remove_file(&self.path)
                .map_err(|e| Error::io(format!("cannot remove {}", self.path.display()), e))?;
            return Ok(true);
        }
        systemctl(&["disable", "--quiet", &self.name])?;
        // A timer that is not loaded needs no stop.
        let _ = systemctl(&["stop", &self.retry_timer()]);
        if stop {
            // It may be mounting at this moment.
            systemctl(&["stop", &self.name])?;
        }
        fs::remove_file(&self.path)
            .map_err(|e| Error::io(format!("cannot remove {}", self.path.display()), e))?;
        systemctl(&["daemon-reload"])?;
        // A unit that never failed is unknown by now.
        let _ = systemctl(&["reset-failed", &self.name]);
        Ok(true)
    }

    fn is_ours(&self) -> Result<bool> {
        Ok(self.text()?.is_some_and(|text| text.starts_with(MARK)))
    }

    fn text(&self) -> Result<Option<String>> {
        match fs::read(&self.path) {
            Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(format!("cannot read {}", self.path.display()), e).into()),
        }
    }

    fn is_foreign(&self, origin: &str) -> anyhow::Error {
        let what = format!(
            "the unit {} comes from {origin}, which `burgeon mount --persist` has not written: \
             change that instead",
            self.name
        );
        Busy(what).into()
    }

    fn write(&self, text: &str) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", self.path.display()), e);
        let new = self.path.with_extension(format!("mount.new-{}", process::id()));
        let write = || {
            let mut file = File::options().write(true).create_new(true).mode(0o644).open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &self.path)
        };
        write().map_err(|e| {
            let _ = fs::remove_file(&new);
            failed(e).into()
        })
    }
}

/// Removes the links by which targets want a unit of `folder`, as `systemctl disable` does.
fn remove_links(folder: &Path, unit: &str) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let wants = entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "wants"));
    for link in wants.map(|wants| wants.path().join(unit)).filter(|link| link.is_symlink()) {
        let _ = fs::remove_file(link);
    }
}

fn systemd_runs() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// The unit's text for a mount at `target`.
fn unit_text(context: &Context, args: &args::Mount, target: &Path) -> Result<String> {
    let what = image(&args.name)?;
    let (is_remote, options) = (is_remote(context, &what), options(context, args)?);
    let mut needed = vec![context.state.root().display().to_string()];
    needed
        .extend(context.store.as_ref().and_then(Location::folder).map(|f| f.display().to_string()));
    if let Form::Layout(layout) = Form::of(&what) {
        needed.push(layout.split(':').next().unwrap_or_default().to_owned());
    }
    let needed: Vec<_> = needed.iter().map(|path| quoted(path)).collect();
    let daemon = if has_default_state(context) { " burgeon.service" } else { "" };
    let network = if is_remote { " network-online.target" } else { "" };
    let wants = format!("{daemon}{network}");
    let wants = if wants.is_empty() { String::new() } else { format!("Wants={}\n", wants.trim()) };
    let (netdev, wanted_by) =
        if is_remote { ("_netdev,", "remote-fs.target") } else { ("", "multi-user.target") };
    let line = |value: &str| -> Result<String> {
        match value.contains(['\n', '\r']) || value.trim() != value || value.ends_with('\\') {
            true => {
                let what = format!("a unit of systemd cannot hold {value:?}");
                Err(Error::new(ErrorKind::Invalid, what).into())
            }
            false => Ok(value.replace('%', "%%")),
        }
    };
    let (what, options) = (line(&what)?, line(&format!("{netdev}nofail{options}"))?);
    let at = line(&target.to_string_lossy())?;
    Ok(format!(
        "{MARK}
[Unit]
Description=Burgeon: {what} at {at}
# No target waits for it: a store that is away delays no boot.
DefaultDependencies=no
Conflicts=umount.target
Before=umount.target
After=local-fs.target{daemon}{network}
{wants}RequiresMountsFor={}
# Mounts again after a while.
OnFailure={RETRY}@%N.timer

[Mount]
What={what}
Where={at}
Type=burgeon
Options={options}
TimeoutSec=90s

[Install]
WantedBy={wanted_by}
",
        needed.join(" ")
    ))
}

/// The image, as any process names it.
fn image(typed: &str) -> Result<String> {
    let form = Form::of(typed);
    let problem = if form == Form::Web && typed.contains('?') {
        "the query of its URL may hold a secret, and systemd shows units to all users"
    } else if typed.starts_with('-') {
        "it begins with a dash"
    } else if matches!(form, Form::Layout(_)) {
        return Ok(named::canonical(typed));
    } else {
        return Ok(typed.to_owned());
    };
    let what = format!("no unit can be written for {}: {problem}", named::public(typed));
    Err(Error::new(ErrorKind::Invalid, what).into())
}

fn is_remote(context: &Context, image: &str) -> bool {
    let store = context.store.as_ref();
    Form::of(image).is_url()
        || context.repository.is_some()
        || store.is_some_and(|store| store.folder().is_none())
}

fn has_default_state(context: &Context) -> bool {
    StateDir::default_path().is_ok_and(|path| path == context.state.root())
}

/// The options of `mount.burgeon` for the same mount, each after a comma.
fn options(context: &Context, args: &args::Mount) -> Result<String> {
    let mut options = args.attributes.texts();
    let mut set = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            options.push(format!("{name}={value}"));
        }
    };
    let absolute = |path: &Path| {
        Ok::<_, Error>(
            std::path::absolute(path)
                .map_err(|e| Error::io(format!("cannot find {}", path.display()), e))?
                .display()
                .to_string(),
        )
    };
    let config = &context.config;
    set("config", config.place.as_ref().map(|place| place.to_string_lossy().into_owned()));
    // A later configuration may have another store and state directory.
    let store = context.store.as_ref().map(ToString::to_string);
    set("store", store.or_else(|| context.repository.clone()).or(Some(String::new())));
    set("state-dir", Some(context.state.root().display().to_string()));
    set("index", args.index.clone());
    set("pull", args.pull.and_then(name_of));
    set("writes", args.writes.clone());
    set("write-limit", args.write_limit.map(|limit| limit.to_string()));
    set("writes-device", args.writes_device.as_deref().map(absolute).transpose()?);
    set("virtual", args.virtual_size.map(|size| size.to_string()));
    set("fetch-limit", args.fetch_limit.map(|limit| limit.to_string()));
    set(
        "profile",
        match args.profile.as_deref() {
            None => None,
            Some(word @ ("auto" | "none")) => Some(word.to_owned()),
            Some(file) => Some(absolute(Path::new(file))?),
        },
    );
    set("transport", args.transport.and_then(name_of));
    set("reserve", args.reserve.map(|on| on.to_string()));
    set("fill", args.fill.map(|on| on.to_string()));
    let switches = [(args.read_only, "ro"), (args.fast, "fast")];
    let on = switches.into_iter().filter(|(is_on, _)| *is_on);
    options.extend(on.map(|(_, name)| name.to_owned()));
    let mut text = String::new();
    for option in options {
        if option.contains('"') {
            let what =
                format!("the option {option} cannot stand in a unit: it holds a quotation mark");
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        match (option.contains(','), option.split_once('=')) {
            (true, Some((name, value))) => text.push_str(&format!(",{name}=\"{value}\"")),
            _ => text.push_str(&format!(",{option}")),
        }
    }
    Ok(text)
}

/// The value of an option as it is typed.
fn name_of(value: impl ValueEnum) -> Option<String> {
    Some(value.to_possible_value()?.get_name().to_owned())
}

/// A word of a unit's list.
fn quoted(word: &str) -> String {
    let escaped = word.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%");
    format!("\"{escaped}\"")
}

/// The name of the unit that mounts at `target`, as `systemd-escape --path --suffix=mount` makes
/// it.
fn unit_name(target: &Path) -> Result<String> {
    use std::os::unix::ffi::OsStrExt;
    let mut name = String::new();
    let path = target.as_os_str().as_bytes();
    let path = path.strip_prefix(b"/").unwrap_or(path);
    for (at, byte) in path.iter().enumerate() {
        match byte {
            b'/' => name.push('-'),
            b'.' if at == 0 => name.push_str("\\x2e"),
            b':' | b'_' | b'.' => name.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => name.push(char::from(*byte)),
            byte => name.push_str(&format!("\\x{byte:02x}")),
        }
    }
    if name.is_empty() {
        name.push('-');
    }
    name.push_str(".mount");
    if name.len() > NAME_MAX {
        let what = format!("{} is too long for a unit of systemd", target.display());
        return Err(Error::new(ErrorKind::Invalid, what).into());
    }
    Ok(name)
}

/// Runs systemctl; returns its output.
fn systemctl(arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("systemctl");
    let output = command.args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|e| Error::io("cannot run systemctl", e))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let what = format!("`systemctl {}` failed: {said}", arguments.join(" "));
    Err(Error::new(ErrorKind::Unavailable, what).into())
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command};

    use burgeon_daemon::StateDir;
    use clap::Parser;

    use super::{image, options, remove_links, unit_name};
    use crate::{
        args::{Args, Command as Verb},
        commands::{Context, mount_defaults},
        config::Config,
    };

    #[test]
    fn units_are_named_as_systemd_names_them() {
        for (path, name) in [
            ("/", "-.mount"),
            ("/mnt/a", "mnt-a.mount"),
            ("/mnt/a-b c", "mnt-a\\x2db\\x20c.mount"),
            ("/.hidden/.x", "\\x2ehidden-.x.mount"),
            ("/srv/ä:1_2", "srv-\\xc3\\xa4:1_2.mount"),
        ] {
            assert_eq!(unit_name(Path::new(path)).unwrap(), name);
            let mut escape = Command::new("systemd-escape");
            if let Ok(output) = escape.args(["--path", "--suffix=mount", path]).output() {
                assert_eq!(String::from_utf8(output.stdout).unwrap().trim_end(), name);
            }
        }
        assert!(unit_name(Path::new(&format!("/{}", "x".repeat(300)))).is_err());
    }

    #[test]
    fn without_systemd_the_links_of_a_unit_go_as_well() {
        let folder = tempfile::tempdir().unwrap();
        let wants = folder.path().join("remote-fs.target.wants");
        std::fs::create_dir(&wants).unwrap();
        for name in ["mnt-a.mount", "mnt-b.mount"] {
            std::os::unix::fs::symlink(folder.path().join(name), wants.join(name)).unwrap();
        }
        remove_links(folder.path(), "mnt-a.mount");
        let left: Vec<_> =
            std::fs::read_dir(&wants).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["mnt-b.mount"]);
    }

    /// A unit mounts the same at each boot, whatever the configuration says then.
    #[test]
    fn a_unit_holds_the_settings_of_the_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.toml");
        let text = "state-dir = '/srv/x'\n[store]\ndefault = '/srv/s'\n\
                    [mount]\nfill = true\nreserve = true\npull = 'never'\ntransport = 'fuse'\n";
        std::fs::write(&file, text).unwrap();
        let config = Config::load(Some(file.as_os_str())).unwrap();
        let context = Context {
            state: StateDir::looked_at("/var/lib/burgeon".into()),
            store: None,
            repository: None,
            config,
            json: false,
        };
        let line = ["burgeon", "mount", "app", "/b", "--fill=false", "--transport", "auto"];
        let Verb::Mount(mut mount) = Args::try_parse_from(line).unwrap().command else { panic!() };
        mount_defaults::apply(&context, &mut mount);
        let expected = format!(
            ",config={},store=,state-dir=/var/lib/burgeon,pull=never,transport=auto,reserve=true,\
             fill=false",
            file.display()
        );
        assert_eq!(options(&context, &mount).unwrap(), expected);
    }

    #[test]
    fn a_unit_holds_no_secret() {
        assert!(image("https://host/a.tar?token=x").is_err());
        assert_eq!(image("https://host/a.tar").unwrap(), "https://host/a.tar");
        assert_eq!(image("oci-layout:/a/b:1").unwrap(), "oci-layout:/a/b:1");
    }
}
