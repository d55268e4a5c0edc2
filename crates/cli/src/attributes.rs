//! `mount -o`, `--suid`, `--dev`: the attributes of a mount.

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::protocol::{AccessTimes, AttributesRequest};
use clap::{Args as ClapArgs, ValueEnum};

/// The options of a mount's attributes.
#[derive(ClapArgs, Debug, Default)]
pub(crate) struct Attributes {
    /// Attributes of the mount, as of mount(8), separated by commas; if two contradict, the last
    /// wins. An image that this host has not built from its own files is mounted nosuid,nodev
    #[arg(
        short = 'o',
        value_name = "OPTION,…",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    options: Vec<Attribute>,
    /// Allow set-user-ID programs and file capabilities, also of an image that was built elsewhere
    #[arg(long)]
    suid: bool,
    /// Allow device nodes, also of an image that was built elsewhere
    #[arg(long)]
    dev: bool,
}

/// An attribute of mount(8).
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "lower")]
enum Attribute {
    Ro,
    Rw,
    Suid,
    Nosuid,
    Dev,
    Nodev,
    Exec,
    Noexec,
    Atime,
    Noatime,
    Diratime,
    Nodiratime,
    Relatime,
    Norelatime,
    Strictatime,
    Nostrictatime,
    Symfollow,
    Nosymfollow,
    /// Changes nothing: the defaults are those without it.
    Defaults,
}

/// True if `name` is an attribute of mount(8) that mounts of Burgeon have.
pub(crate) fn is_known(name: &str) -> bool {
    Attribute::from_str(name, false).is_ok()
}

/// The names of all attributes.
pub(crate) fn names() -> Vec<String> {
    let values = Attribute::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    values.map(|value| value.get_name().to_owned()).collect()
}

impl Attributes {
    /// The attributes asked for, as options of mount(8).
    pub(crate) fn texts(&self) -> Vec<String> {
        let named = self.options.iter().filter_map(ValueEnum::to_possible_value);
        let mut texts: Vec<_> = named.map(|value| value.get_name().to_owned()).collect();
        let flags = [(self.suid, "suid"), (self.dev, "dev")];
        let on = flags.into_iter().filter(|(is_on, _)| *is_on);
        texts.extend(on.map(|(_, name)| name.to_owned()));
        texts
    }

    /// The attributes asked for; if two contradict, the last on the command line wins.
    pub(crate) fn request(&self) -> Result<AttributesRequest> {
        let mut request = AttributesRequest::default();
        let others = &mut request.others;
        for option in &self.options {
            match option {
                Attribute::Ro => others.read_only = true,
                Attribute::Rw => others.read_only = false,
                Attribute::Suid => request.suid = Some(true),
                Attribute::Nosuid => request.suid = Some(false),
                Attribute::Dev => request.dev = Some(true),
                Attribute::Nodev => request.dev = Some(false),
                Attribute::Exec => others.noexec = false,
                Attribute::Noexec => others.noexec = true,
                Attribute::Noatime => others.atime = AccessTimes::Noatime,
                Attribute::Strictatime | Attribute::Norelatime => {
                    others.atime = AccessTimes::Strictatime;
                }
                Attribute::Atime | Attribute::Relatime | Attribute::Nostrictatime => {
                    others.atime = AccessTimes::Relatime;
                }
                Attribute::Diratime => others.nodiratime = false,
                Attribute::Nodiratime => others.nodiratime = true,
                Attribute::Symfollow => others.nosymfollow = false,
                Attribute::Nosymfollow => others.nosymfollow = true,
                Attribute::Defaults => {}
            }
        }
        for (asked_for, wanted, name) in
            [(self.suid, &mut request.suid, "suid"), (self.dev, &mut request.dev, "dev")]
        {
            if asked_for && wanted.replace(true) == Some(false) {
                let what = format!("--{name} and -o no{name} contradict each other: leave one out");
                return Err(Error::new(ErrorKind::Invalid, what).into());
            }
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use burgeon_daemon::protocol::{AccessTimes, AttributesRequest};
    use clap::Parser;

    use crate::args::{Args, Command};

    fn request(line: &[&str]) -> anyhow::Result<AttributesRequest> {
        let args = Args::try_parse_from([&["burgeon", "mount", "a", "/b"], line].concat())?;
        let Command::Mount(mount) = args.command else { panic!() };
        mount.attributes.request()
    }

    #[test]
    fn the_last_of_two_contradicting_attributes_wins() {
        let wanted = request(&["-o", "nosuid,noexec,noatime", "-o", "suid,nodiratime"]).unwrap();
        assert_eq!((wanted.suid, wanted.dev), (Some(true), None));
        assert!(wanted.others.noexec && wanted.others.nodiratime && !wanted.others.read_only);
        assert_eq!(wanted.others.atime, AccessTimes::Noatime);
        assert_eq!(request(&["-odefaults"]).unwrap(), AttributesRequest::default());
        let asked_for = request(&["--suid", "--dev"]).unwrap();
        assert_eq!((asked_for.suid, asked_for.dev), (Some(true), Some(true)));
    }

    #[test]
    fn an_unknown_option_is_answered_with_the_nearest_one() {
        for (wrong, right) in [("nosiud", "nosuid"), ("no-exec", "noexec"), ("readonly", "ro")] {
            let error = request(&["-o", wrong]).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains(right), "{error}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let error = request(&["--dev", "-o", "nodev"]).unwrap_err().to_string();
        assert!(error.contains("contradict"), "{error}");
    }
}
