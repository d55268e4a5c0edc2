//! Checks the folder of the host's cache, and looks for those of earlier caches.

use super::{Finding, Level};
use crate::state::{
    cache_dir::{self, CacheDir},
    paths::StateDir,
};

/// The folder of the running server, or that of the next one, and earlier ones.
pub(super) fn examine(state: &StateDir, is_served: bool) -> Vec<Finding> {
    let record = CacheDir::read(state);
    let (folder, problem) = match is_served {
        true => (record.folder(state), record.problem.clone()),
        false => cache_dir::next(state),
    };
    // A server that runs has told of it itself.
    let is_there = folder.exists();
    let place = if is_there { folder.as_path() } else { state.root() };
    let lack = || cache_dir::lack_of_space(state, place).ok().flatten();
    let full = if is_served || problem.is_some() { None } else { lack() };
    let mut findings = vec![match (problem, full) {
        (None, Some(full)) => Finding::bad(
            Level::Warning,
            "cache",
            format!("it will keep nothing in {}: {full}", folder.display()),
            "data is fetched again and again",
            "free some space on that disk, or leave less of it free",
        ),
        (None, None) if is_served && !is_there => Finding::bad(
            Level::Problem,
            "cache",
            format!("{} was removed while the daemon uses it", folder.display()),
            "cached data takes space that no file shows, and is lost when the daemon ends",
            &format!(
                "make it (`install -d -m 700 {}`), and run `burgeon upgrade`",
                folder.display()
            ),
        ),
        (None, None) => Finding::fine("cache", format!("in {}", folder.display())),
        (Some(problem), _) => Finding::bad(
            Level::Problem,
            "cache",
            problem,
            "data is fetched again and again",
            "remove the cause; then run `burgeon upgrade`, if a daemon runs",
        ),
    }];
    findings.extend(record.earlier().iter().map(|earlier| {
        let (shown, bytes) = (earlier.display(), cache_dir::allocated(earlier));
        Finding::bad(
            Level::Warning,
            "earlier cache",
            format!("{shown} has {} MiB, which nobody uses", bytes.div_ceil(1 << 20)),
            "its space",
            "remove its files, or have the cache there again",
        )
    }));
    findings
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Level, examine};
    use crate::state::paths::StateDir;

    #[test]
    fn a_folder_that_was_removed_below_a_daemon_is_a_problem() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDir::open(root.path()).unwrap();
        let _ = fs::remove_dir_all(state.cache());
        let found = &examine(&state, true)[0];
        assert_eq!(found.level, Level::Problem);
        assert!(found.remedy.as_ref().unwrap().contains("install -d -m 700"), "{found:?}");
        fs::create_dir(state.cache()).unwrap();
        assert_eq!(examine(&state, true)[0].level, Level::Fine);
    }
}
