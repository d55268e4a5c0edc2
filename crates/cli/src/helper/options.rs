//! The options of mount(8), as arguments of `burgeon mount`.
//!
//! ```text
//!   "ro,_netdev,writes=w,user" ─► ignored: _netdev
//!                              ─► attributes: ro,noexec,nosuid,nodev     burgeon mount -o …
//!                              ─► settings: --writes=w                   burgeon mount --writes=…
//! ```
//! The parser of `burgeon mount` checks the values.
//!
//! Invariant (held by the tests below): no string makes the parser panic.

use std::collections::BTreeMap;

use crate::{attributes, config::nearest};

/// Options of `burgeon mount` that take a value.
const SETTINGS: [&str; 15] = [
    "config",
    "fetch-limit",
    "fill",
    "index",
    "log-level",
    "profile",
    "pull",
    "reserve",
    "state-dir",
    "store",
    "transport",
    "virtual",
    "write-limit",
    "writes",
    "writes-device",
];

/// Options of `burgeon mount` that may stand without a value.
const SWITCHES: [&str; 4] = ["fast", "fill", "reserve", "virtual"];

/// Options that mount(8) and systemd act on, or that ask for the kernel's defaults.
const IGNORED: [&str; 16] = [
    "_netdev",
    "async",
    "auto",
    "comment",
    "defaults",
    "loud",
    "noauto",
    "nofail",
    "nogroup",
    "noowner",
    "nouser",
    "nousers",
    "nolazytime",
    "nomand",
    "noiversion",
    "silent",
];

/// Options that imply others, as in mount(8). Later options override these.
const IMPLYING: [(&str, &[&str]); 4] = [
    ("user", &["noexec", "nosuid", "nodev"]),
    ("users", &["noexec", "nosuid", "nodev"]),
    ("owner", &["nosuid", "nodev"]),
    ("group", &["nosuid", "nodev"]),
];

/// The options of one call.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// Attributes of the mount, in order: if two contradict, the last wins.
    pub(super) attributes: Vec<String>,
    /// Settings of `burgeon mount` and their values; the last of two with one name holds.
    pub(super) settings: BTreeMap<String, Option<String>>,
    /// `remount` was among the options.
    pub(super) remount: bool,
    /// Options that nothing here knows.
    pub(super) unknown: Vec<String>,
    /// A quotation mark has no partner, so commas behind it separate options.
    pub(super) has_open_quote: bool,
}

impl Options {
    /// Parses the texts of all `-o`, in order.
    pub(super) fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut options = Self::default();
        for text in texts {
            options.has_open_quote |= !has_closed_quotes(text);
            split(text).iter().for_each(|option| options.add(option));
        }
        options
    }

    fn add(&mut self, option: &str) {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        let implied = IMPLYING.iter().find(|(implying, _)| *implying == name);
        let is_foreign = ["x-", "X-"].iter().any(|prefix| name.starts_with(prefix));
        if is_foreign || IGNORED.contains(&name) || option.is_empty() {
            return;
        }
        if let Some((_, implied)) = implied {
            // mount(8) adds the user's name as a value.
            self.attributes.extend(implied.iter().map(ToString::to_string));
            return;
        }
        match value {
            None if name == "remount" => self.remount = true,
            None if attributes::is_known(name) => self.attributes.push(name.to_owned()),
            None if SWITCHES.contains(&name) => {
                self.settings.insert(name.to_owned(), None);
            }
            Some(value) if SETTINGS.contains(&name) => {
                self.settings.insert(name.to_owned(), Some(value.to_owned()));
            }
            // A setting without its value, or a switch with one.
            _ => self.unknown.push(option.to_owned()),
        }
    }

    /// The arguments of `burgeon` for all but the image and the mount point.
    pub(super) fn arguments(&self) -> Vec<String> {
        let setting = |(name, value): (&String, &Option<String>)| match value {
            Some(value) => format!("--{name}={value}"),
            None => format!("--{name}"),
        };
        let mut arguments: Vec<_> = self.settings.iter().map(setting).collect();
        if !self.attributes.is_empty() {
            arguments.push(format!("-o{}", self.attributes.join(",")));
        }
        arguments
    }
}

/// The reason why an option of several is unknown, and the nearest known one.
pub(super) fn explain(options: &Options, option: &str) -> String {
    let why = explain_unknown(option);
    match options.has_open_quote {
        true => format!("{why}; a quotation mark is not closed: a value with commas needs two"),
        false => why,
    }
}

fn explain_unknown(option: &str) -> String {
    let name = option.split('=').next().unwrap_or_default();
    if option.contains('=') && SWITCHES.contains(&name) && !SETTINGS.contains(&name) {
        return format!("the option {name} takes no value");
    }
    if SETTINGS.contains(&name) {
        return format!("the option {name} needs a value: {name}=…");
    }
    let attributes = attributes::names();
    let known = attributes.iter().map(String::as_str);
    let known = known.chain(SETTINGS).chain(SWITCHES).chain(IGNORED).chain(["remount"]);
    if let Some(near) = nearest(name, known) {
        return format!("unknown option {option:?}: did you mean {near}? -s ignores unknown ones");
    }
    format!(
        "unknown option {option:?}: there are the attributes of mount(8), such as ro or nosuid, and {}; \
         -s ignores unknown ones",
        SETTINGS.map(|name| format!("{name}=")).join(", ")
    )
}

fn has_closed_quotes(text: &str) -> bool {
    text.bytes().filter(|byte| *byte == b'"').count() % 2 == 0
}

/// Splits at commas outside double quotes, as mount(8) does, and removes the quotes around a value.
fn split(text: &str) -> Vec<String> {
    let (mut options, mut quoted) = (vec![String::new()], false);
    let is_quoted = has_closed_quotes(text);
    for c in text.chars() {
        match c {
            // A single quote mark is part of a value.
            '"' if is_quoted => quoted = !quoted,
            ',' if !quoted => options.push(String::new()),
            c => options.last_mut().into_iter().for_each(|option| option.push(c)),
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Options, explain, explain_unknown};

    fn parse(text: &str) -> Options {
        Options::parse([text])
    }

    fn store(text: &str) -> Option<String> {
        parse(text).settings.remove("store").flatten()
    }

    #[test]
    fn options_of_others_are_ignored() {
        let text = "_netdev,nofail,auto,noauto,nouser,defaults,x-systemd.automount,X-mount.mkdir=0700,\
                    comment=a b,x-systemd.requires=/mnt/a,,";
        assert_eq!(parse(text), Options::default());
    }

    #[test]
    fn attributes_keep_their_order_and_settings_their_last_value() {
        let options = Options::parse(["ro,noatime,writes=a,rw", "writes=b,fill,virtual=1P"]);
        assert_eq!(options.attributes, ["ro", "noatime", "rw"]);
        let arguments = ["--fill", "--virtual=1P", "--writes=b", "-oro,noatime,rw"];
        assert_eq!(options.arguments(), arguments);
        assert!(options.unknown.is_empty() && !options.remount);
        assert_eq!(parse("virtual").arguments(), ["--virtual"]);
    }

    #[test]
    fn a_users_mount_is_restricted_unless_a_later_option_says_otherwise() {
        assert_eq!(parse("user=alice,exec").attributes, ["noexec", "nosuid", "nodev", "exec"]);
        assert_eq!(parse("owner").attributes, ["nosuid", "nodev"]);
    }

    #[test]
    fn a_quoted_value_may_hold_commas() {
        let options = parse("store=\"/a,b\",profile=none");
        assert_eq!(options.arguments(), ["--profile=none", "--store=/a,b"]);
        assert_eq!(store("store=/a\"b,ro").as_deref(), Some("/a\"b"));
        let open = parse("store=\"/a,b");
        assert!(explain(&open, &open.unknown[0]).contains("is not closed"));
        // A value may hold anything else.
        let url = "https://host/a?b=c";
        assert_eq!(store(&format!("store={url}")).as_deref(), Some(url));
    }

    #[test]
    fn unknown_options_are_explained() {
        let options = parse("remount,subvol=a,writes,fast=1,nosiud,Writes=w");
        assert!(options.remount);
        assert_eq!(options.unknown, ["subvol=a", "writes", "fast=1", "nosiud", "Writes=w"]);
        for (option, why) in [
            ("subvol=a", "unknown option"),
            ("writes", "writes=…"),
            ("fast=1", "takes no value"),
            ("noatiem", "did you mean noatime?"),
            ("state_dir=/x", "did you mean state-dir?"),
        ] {
            assert!(explain_unknown(option).contains(why), "{option}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(texts in proptest::collection::vec(".*", 0..4)) {
            let options = Options::parse(texts.iter().map(String::as_str));
            let _ = options.arguments();
            options.unknown.iter().for_each(|option| drop(explain_unknown(option)));
        }

        #[test]
        fn no_list_of_options_panics(text in "[a-z\"=,_-]{0,40}(,(ro|writes=|remount|user|\"))*") {
            let options = Options::parse([text.as_str()]);
            // Each option has one place at most.
            let counted = options.settings.len() + options.unknown.len();
            prop_assert!(counted <= text.split(',').count());
        }
    }
}
