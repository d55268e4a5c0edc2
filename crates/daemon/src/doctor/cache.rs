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
