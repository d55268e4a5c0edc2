//! The file of lifetime totals, `totals`: written by the supervisor alone.

use std::{
    fs::{self, OpenOptions},
    io::Read,
    time::{SystemTime, UNIX_EPOCH},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_metrics::{TOTALS_MAX, Totals};

use super::{files, paths::StateDir};

/// Reads the totals. Without a file, or with a damaged one, which is kept as `totals.damaged`, they
/// begin now. `UnsupportedFormat` if a later version has written them.
pub(crate) fn read(state: &StateDir) -> Result<Totals> {
    let path = state.totals();
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let mut bytes = Vec::new();
    let read = files::open(&path, OpenOptions::new().read(true))
        .and_then(|file| file.take(TOTALS_MAX as u64 + 1).read_to_end(&mut bytes))
        .map_err(failed);
    let error = match read.and_then(|_| Totals::from_file(&bytes)) {
        Ok(totals) => return Ok(totals),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::NotFound => {}
        ErrorKind::Corrupt => {
            let kept = path.with_extension("damaged");
            fs::rename(&path, &kept).map_err(failed)?;
            tracing::error!(%error, kept = %kept.display(), "the lifetime totals of metrics begin anew");
        }
        _ => return Err(error),
    }
    Ok(Totals::from(now()))
}

/// Makes the totals durable.
pub(crate) fn publish(state: &StateDir, totals: &Totals) -> Result<()> {
    files::publish(&state.totals(), &totals.encode()?)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{now, publish, read};
    use crate::state::paths::StateDir;

    #[test]
    fn damaged_totals_are_kept_aside_and_later_versions_are_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let mut totals = read(&state).unwrap();
        assert!(now() - totals.since_unix_seconds < 60);
        totals.server_starts = 7;
        publish(&state, &totals).unwrap();
        assert_eq!(read(&state).unwrap(), totals);
        let sound = fs::read(state.totals()).unwrap();
        fs::write(state.totals(), &sound[..sound.len() - 1]).unwrap();
        assert_eq!(read(&state).unwrap().server_starts, 0);
        assert!(temp.path().join("totals.damaged").is_file());
        let later = "burgeon totals 9 x\n{}";
        fs::write(state.totals(), later).unwrap();
        assert!(read(&state).unwrap_err().to_string().contains("upgrade"));
        assert_eq!(fs::read_to_string(state.totals()).unwrap(), later);
    }
}
