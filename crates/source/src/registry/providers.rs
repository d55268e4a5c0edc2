//! Which credential provider plugins of kubelet this host has, and what both sides of
//! `kubelet.rs` know of them.

use std::{ffi::OsString, path::PathBuf, sync::OnceLock, time::Duration};

use serde::{Deserialize, Serialize};

/// Stands for the plugins where a helper is named. No helper has such a name.
pub(super) const PLUGINS: &str = "kubelet:";
/// The internal command that runs the plugins.
pub const VERB: &str = "__kubelet-login";

/// Variables that name the file and the folder, for children.
pub const PROVIDERS: &str = "BURGEON_KUBELET_PROVIDERS";
/// See [`PROVIDERS`].
pub const PROVIDER_DIR: &str = "BURGEON_KUBELET_PROVIDER_DIR";

/// The paths of kubelet's file and of the plugins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Providers {
    /// The file, in YAML or JSON.
    pub file: PathBuf,
    /// The folder of the plugins.
    pub folder: PathBuf,
}

static CONFIGURED: OnceLock<Providers> = OnceLock::new();

impl Providers {
    /// Those of this process's environment.
    pub fn of_environment() -> Option<Self> {
        let path = |name| std::env::var_os(name).map(PathBuf::from).filter(|it| it.is_absolute());
        Some(Self { file: path(PROVIDERS)?, folder: path(PROVIDER_DIR)? })
    }

    /// Makes this process and its children find logins by these plugins. Only the first call has an
    /// effect.
    pub fn use_for_logins(self) {
        let _ = CONFIGURED.set(self);
    }

    /// Variables with which a child finds them, too.
    pub fn variables() -> Vec<(&'static str, OsString)> {
        configured().map_or_else(Vec::new, |it| {
            vec![(PROVIDERS, it.file.into()), (PROVIDER_DIR, it.folder.into())]
        })
    }
}

pub(super) fn configured() -> Option<Providers> {
    CONFIGURED.get().cloned().or_else(Providers::of_environment)
}

/// The answer of the process that runs the plugins.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum Answer {
    /// The answers of those that match the image.
    Printed(Vec<Printed>),
    /// Why there is nothing: in words of that process, and without those of a plugin.
    Failed(String),
}

/// The answer of one plugin.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct Printed {
    /// Of the file; for a response without a duration.
    pub(super) default_cache_ms: u64,
    pub(super) api_version: String,
    pub(super) response: String,
}

/// True if a pattern of kubelet's `matchImages` matches `REGISTRY/REPOSITORY`: as many labels in
/// the host, each with `*` for any characters; the same port; the beginning of the path.
pub(super) fn matches(pattern: &str, image: &str) -> bool {
    fn parts(text: &str) -> (&str, Option<&str>, &str) {
        let text = text.split_once("://").map_or(text, |(_, rest)| rest);
        let (host, path) = text.split_once('/').unwrap_or((text, ""));
        match host.rsplit_once(':') {
            Some((host, port)) => (host, Some(port), path),
            None => (host, None, path),
        }
    }
    let ((hosts, port, path), (host, own_port, own_path)) = (parts(pattern), parts(image));
    let labels: (Vec<_>, Vec<_>) = (hosts.split('.').collect(), host.split('.').collect());
    labels.0.len() == labels.1.len()
        && labels.0.iter().zip(&labels.1).all(|(pattern, label)| matches_label(pattern, label))
        && port == own_port
        && own_path.starts_with(path)
}

/// True if the label of a host is the pattern, in which `*` stands for any characters.
fn matches_label(pattern: &str, label: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == label };
    let Some(mut left) = label.strip_prefix(first) else { return false };
    let mut parts: Vec<_> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.ends_with(last)
}

/// A duration as Go writes it, such as `12h` or `1h30m0s`.
pub(super) fn duration(text: &str) -> Option<Duration> {
    const UNITS: [(&str, f64); 4] = [("ms", 0.001), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];
    let (mut left, mut seconds) = (text, 0.0);
    if text == "0" {
        return Some(Duration::ZERO);
    }
    while !left.is_empty() {
        let end = left.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = left[..end].parse().ok()?;
        left = &left[end..];
        let (unit, factor) = UNITS.iter().find(|(unit, _)| left.starts_with(unit))?;
        left = &left[unit.len()..];
        seconds += number * factor;
    }
    match text.is_empty() {
        true => None,
        false => Duration::try_from_secs_f64(seconds).ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{duration, matches};

    #[test]
    fn patterns_match_images_as_kubelet_has_it() {
        for (pattern, image, is_match) in [
            ("123.dkr.ecr.us-east-1.amazonaws.com", "123.dkr.ecr.us-east-1.amazonaws.com/a", true),
            ("*.dkr.ecr.*.amazonaws.com", "123.dkr.ecr.us-east-1.amazonaws.com/team/a", true),
            ("*.amazonaws.com", "123.dkr.amazonaws.com/a", false),
            ("gcr.io", "gcr.io/a/b", true),
            ("*.gcr.io", "gcr.io/a", false),
            ("*.gcr.io", "us.gcr.io/a", true),
            ("*.*.registry.io", "a.b.registry.io/x", true),
            ("https://registry.io:8080/path", "registry.io:8080/path/x", true),
            ("registry.io:8080/path", "registry.io:8080/other", false),
            ("registry.io", "registry.io:8080/a", false),
            ("app*.k8s.io", "app-1.k8s.io/a", true),
            ("*-docker.pkg.dev", "europe-docker.pkg.dev/a", true),
            ("a*b*c.io", "axbxbc.io/a", true),
            ("a*b.io", "ab-c.io/a", false),
        ] {
            assert_eq!(matches(pattern, image), is_match, "{pattern} {image}");
        }
    }

    #[test]
    fn durations_are_those_of_go() {
        for (text, seconds) in [("12h", 43_200), ("1h30m0s", 5400), ("0s", 0), ("0", 0)] {
            assert_eq!(duration(text), Some(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        for wrong in ["", "12", "h", "-1h", "1 h", "1d"] {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
    }
}
