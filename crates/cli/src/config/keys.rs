//! The keys of the configuration, and the nearest one to a misspelt key.

/// All keys. NAME is a name that the user chooses.
pub(crate) const KEYS: [&str; 24] = [
    "state-dir",
    "log.level",
    "log.format",
    "cache.dir",
    "cache.size",
    "cache.keep-free",
    "cache.sharing",
    "mount.write-limit",
    "mount.reserve",
    "mount.fetch-limit",
    "mount.fill",
    "mount.profile",
    "mount.pull",
    "mount.transport",
    "registry.hosts-dir",
    "registry.kubelet-providers",
    "registry.kubelet-provider-dir",
    "snapshotter.trust",
    "snapshotter.index",
    "snapshotter.index-min",
    "snapshotter.index-max",
    "snapshotter.index-kept",
    "store.default",
    "store.NAME.url",
];

/// The sections.
pub(super) const SECTIONS: [&str; 6] =
    ["log", "cache", "mount", "registry", "snapshotter", "store"];

/// The remedy for the unknown key at `path`.
pub(super) fn explain(path: &[&str]) -> String {
    let typed = path.join(".");
    let known: Vec<String> = match path {
        ["store", name, ..] => KEYS.iter().map(|key| key.replace("NAME", name)).collect(),
        _ => KEYS.iter().map(ToString::to_string).collect(),
    };
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    // A known key in the wrong section.
    let moved = known.iter().find(|key| path.len() < 3 && last(key) == last(&typed));
    let near = nearest(&typed, known.iter().map(String::as_str)).map(str::to_owned);
    match near.or(moved.cloned()) {
        Some(key) => match key.split_once('.') {
            None => format!("unknown key: did you mean {key}, above the first [section]?"),
            Some(_) => format!("unknown key: did you mean {key}?"),
        },
        None => {
            let section = path.first().filter(|first| path.len() > 1 && SECTIONS.contains(first));
            let prefix = section.map(|section| format!("{section}.")).unwrap_or_default();
            let there: Vec<_> =
                KEYS.iter().filter(|key| key.starts_with(&prefix)).copied().collect();
            format!("unknown key: there are {}", there.join(", "))
        }
    }
}

/// The remedy for the unknown section `name`.
pub(super) fn explain_section(name: &str) -> String {
    match nearest(name, SECTIONS) {
        Some(near) => format!("unknown section: did you mean [{near}]?"),
        None => format!("unknown section: there are [{}]", SECTIONS.join("], [")),
    }
}

/// The candidate with the fewest changes from `typed`, if these are few: at most a third of its
/// letters, and four.
pub(crate) fn nearest<'a>(
    typed: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let most = typed.chars().count().div_ceil(3).min(4);
    let distance = |candidate: &&str| strsim::damerau_levenshtein(typed, candidate);
    candidates.into_iter().filter(|c| distance(c) <= most).min_by_key(distance)
}

#[cfg(test)]
mod tests {
    use super::{explain, explain_section};

    #[test]
    fn a_misspelt_key_is_answered_with_the_nearest_one() {
        for (typed, right) in [
            (&["mount", "wirte-limit"][..], "mount.write-limit?"),
            (&["mount", "write_limit"], "mount.write-limit?"),
            (&["mount", "profil"], "mount.profile?"),
            (&["log", "levle"], "log.level?"),
            (&["store", "models", "ulr"], "store.models.url?"),
            (&["write-limit"], "mount.write-limit?"),
            (&["state_dir"], "state-dir, above the first [section]?"),
            (&["mount", "state-dir"], "state-dir, above the first [section]?"),
            (&["mount", "colour"], "there are mount.write-limit"),
        ] {
            let said = explain(typed);
            assert!(said.contains(right), "{typed:?}: {said}");
        }
        assert!(explain_section("mounts").contains("[mount]?"));
        assert!(
            explain_section("network").contains("there are [log], [cache], [mount], [registry]")
        );
    }
}
