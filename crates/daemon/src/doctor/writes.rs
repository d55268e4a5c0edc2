//! Checks that the files on which named writes are based are unchanged.

use std::path::Path;

use super::{Finding, Level, area};
use crate::state::{paths::StateDir, prepared, writes};

/// Checks all named writes.
pub(super) fn examine(state: &StateDir) -> Vec<Finding> {
    if !state.exists() {
        return Vec::new();
    }
    let names = match writes::names(state) {
        Ok(names) => names,
        Err(e) => {
            return vec![Finding::bad(
                Level::Problem,
                "writes",
                e.to_string(),
                "no named writes can be mounted",
                "mend that first",
            )];
        }
    };
    let of = |name: &String| [Some(check(state, name)), area::examine(state, name)];
    names.iter().flat_map(of).flatten().collect()
}

/// Checks the files on which the writes `name` are based.
fn check(state: &StateDir, name: &str) -> Finding {
    let subject = format!("writes {name}");
    let problem = |found: String| {
        Finding::bad(
            Level::Problem,
            &subject,
            found,
            "these writes cannot be mounted",
            "restore the folder from a backup: Burgeon never removes it by itself",
        )
    };
    // Both files can be derived from the image; what was written is in the sprout.
    let derived = |found: String| {
        Finding::bad(
            Level::Problem,
            &subject,
            found,
            "nothing that was written is lost, but a mount may fail until the file is made again",
            "mount them, which makes damaged files from the image again; if that fails, unmount \
             them, remove `seed`, `seed.info` and `map`, and mount them once more",
        )
    };
    let record = match writes::find(state, name) {
        Ok(Some(record)) => record,
        Ok(None) => return Finding::fine(&subject, "removed meanwhile"),
        Err(e) => return problem(e.to_string()),
    };
    if !record.sprouted {
        // Its mount was killed before it handed anything out; the next mount may also have been
        // killed while it removed the rest.
        return Finding::fine(&subject, "they are empty: the next mount makes them again");
    }
    let folder = writes::folder(state, name);
    let files = [
        ("seed", record.template_digest, record.template_len),
        ("map", record.map_digest, record.map_len),
    ];
    for (file, digest, len) in files {
        let path = folder.join(file);
        // A damaged file may have become too long to be read. Early records have no length.
        if len > 0 && prepared::len_of(&path) > len {
            return derived(format!("{} is damaged", path.display()));
        }
        match prepared::digest_file(&path) {
            Ok((found, _)) if found == digest.0 => {}
            Ok(_) => return derived(format!("{} is damaged", path.display())),
            Err(e) => return derived(e.to_string()),
        }
    }
    let sprout = record.device.clone().unwrap_or_else(|| folder.join("sprout"));
    if !Path::new(&sprout).exists() {
        return problem(format!("{} is missing", sprout.display()));
    }
    if let Err(e) = writes::check_sprout(&record, &sprout) {
        return problem(e.to_string());
    }
    Finding::fine(&subject, format!("whole, on {}", record.image))
}
