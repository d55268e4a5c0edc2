//! Names of images.

use burgeon_block::Result;

use super::reserved::ReservedName;
use crate::invalid;

/// Longest name, in bytes; the escaped form must fit in a file name.
const NAME_MAX: usize = 80;

/// Checks that `name` can name an image: 1 to 80 bytes, no control characters, no blank at
/// either end, not beginning with `-`.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let why = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > NAME_MAX {
        format!("it has {} bytes, above the limit of {NAME_MAX}", name.len())
    } else if name.starts_with('-') {
        "it begins with -".to_owned()
    } else if name.trim() != name {
        "it begins or ends with a blank".to_owned()
    } else if name.chars().any(char::is_control) {
        "it has a control character".to_owned()
    } else {
        return Ok(());
    };
    // A name that is too long would fill the message.
    let shown: String = name.chars().take(NAME_MAX).collect();
    Err(invalid(format!("{shown:?} is not a valid image name, such as debian:12: {why}")))
}

/// Checks a name that a user gives to an image. `Invalid` states the problem.
pub fn check_given_name(name: &str) -> Result<()> {
    check_name(name)?;
    let reserved = ReservedName::parse(name);
    let why = if reserved == Some(ReservedName::Empty) {
        "it is reserved for the image that `burgeon create-empty` mounts"
    } else if reserved.is_some() {
        "names that begin with sha256: or url:, or end with /index or /contents, are reserved for \
         images that Burgeon has checked"
    } else if name.contains("://") || name.starts_with("oci-layout:") {
        "it is a location: name the store with --store, and use `burgeon push` for a registry"
    } else if name.starts_with('/') {
        "it is an absolute path"
    } else if name.split('/').any(|part| matches!(part, "." | "..")) {
        "it is a relative path"
    } else if name.split('/').any(str::is_empty) {
        "a part between slashes is empty"
    } else {
        return Ok(());
    };
    Err(invalid(format!(
        "{name:?} cannot be the name of an image: {why}; take one such as debian:12"
    )))
}

/// A name as the last component of an object's name: letters, digits, `.`, `_`, `-`, and `%xx`
/// for every other byte; a leading `.` is escaped, too.
pub(super) fn escape(name: &str) -> String {
    let mut escaped = String::new();
    for (index, byte) in name.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if plain || (byte == b'.' && index > 0) {
            escaped.push(char::from(byte));
        } else {
            escaped += &format!("%{byte:02x}");
        }
    }
    escaped
}

/// Reverses [`escape`]; `None` for strings that [`escape`] never returns.
pub(super) fn unescape(escaped: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = escaped.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = after;
        } else {
            bytes.push(*byte);
        }
    }
    let name = String::from_utf8(bytes).ok()?;
    (escape(&name) == escaped).then_some(name)
}

/// The text after "there is no image …": similar names, or how to make an image.
pub(super) fn suggest(wanted: &str, names: &[String]) -> String {
    if names.is_empty() {
        return "; the store holds none: make one with burgeon build PATH NAME".to_owned();
    }
    let mut near: Vec<(usize, &String)> = names
        .iter()
        .map(|name| {
            let contained = name.contains(wanted) || wanted.contains(name.as_str());
            (if contained { 0 } else { distance(wanted, name) }, name)
        })
        .collect();
    near.sort();
    let limit = wanted.chars().count().max(3) / 2;
    let like: Vec<_> = near
        .iter()
        .filter(|(distance, _)| *distance <= limit)
        .take(3)
        .map(|(_, name)| name.as_str())
        .collect();
    if !like.is_empty() {
        return format!("; did you mean {}?", like.join(" or "));
    }
    let mut shown: Vec<_> = names.iter().take(8).map(String::as_str).collect();
    if names.len() > shown.len() {
        shown.push("…");
    }
    format!("; there are {}", shown.join(", "))
}

/// Edit distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{super::EMPTY_IMAGE, *};

    #[test]
    fn names_survive_escaping_and_stay_in_their_folder() {
        for name in ["debian:12", "a/b", "../x", ".", "ü %41", "A.b-c_d"] {
            let escaped = escape(name);
            assert!(!escaped.contains('/') && !escaped.starts_with('.'), "{escaped}");
            assert_eq!(unescape(&escaped).as_deref(), Some(name));
        }
        for foreign in ["%4", "%zz", "%41", "a:b", ".x"] {
            assert_eq!(unescape(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn impossible_names_are_refused() {
        let long = "x".repeat(100_000);
        for (name, why) in [
            ("", "empty"),
            ("-x", "begins with -"),
            (" a", "blank"),
            ("a\u{1b}b", "control character"),
            (&*long, "100000 bytes"),
        ] {
            let refused = check_name(name).unwrap_err().to_string();
            assert!(refused.contains(why) && refused.len() < 200, "{refused}");
        }
    }

    #[test]
    fn reserved_names_and_paths_cannot_be_given() {
        for (name, why) in [
            ("sha256:abc", "are reserved for"),
            ("url:abc", "are reserved for"),
            ("x/index", "are reserved for"),
            ("x/contents", "are reserved for"),
            (EMPTY_IMAGE, "create-empty"),
            ("oci://r.example/x", "a location"),
            ("oci-layout:folder:7", "a location"),
            ("/abs", "absolute path"),
            ("..", "relative path"),
            (".", "relative path"),
            ("../x", "relative path"),
            ("a/./b", "relative path"),
            ("a//b", "is empty"),
            ("a/", "is empty"),
            ("", "not a valid image name"),
        ] {
            let error = super::check_given_name(name).unwrap_err().to_string();
            assert!(error.contains(why), "{name}: {error}");
        }
        for name in ["debian:12", "team/app:7", "a..b", ".hidden", "indexed", "sha256"] {
            super::check_given_name(name).unwrap();
        }
    }

    #[test]
    fn suggestions_are_near() {
        let names = ["debian:12".to_owned(), "alpine".to_owned()];
        assert_eq!(suggest("debain:12", &names), "; did you mean debian:12?");
        assert_eq!(suggest("debian", &names), "; did you mean debian:12?");
        assert_eq!(suggest("zzzzzz", &names), "; there are debian:12, alpine");
        assert!(suggest("x", &[]).contains("burgeon build"));
    }
}
