//! The pins of a mount: data to be kept in the cache, and fetched again if the cache was lost.
//!
//! ```text
//!   writes/<name>/pins.json, or mounts/<id>/pins.json      paths, and their lazy addresses
//! ```
//!
//! An address means the same bytes for ever, so a pin covers the contents that the files had when
//! they were pinned, wherever these are now. The server holds these chunks in
//! the cache.

use std::path::Path;

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::state::files;

/// The version of [`Pins`] that this program writes and reads.
const FORMAT: u32 = 1;

/// Limits: paths (at most 4 KiB each), and the ranges of all paths together (at most 80 bytes
/// each). That is 800 KiB of JSON; up to 1 MiB is read.
const PATHS_MAX: usize = 100;
const PATH_LEN_MAX: usize = 4096;
const RANGES_MAX: usize = 5000;

/// All pins of a mount, oldest first.
#[derive(Serialize, Deserialize)]
pub(crate) struct Pins {
    format: u32,
    pins: Vec<Pin>,
}

/// One pinned path.
#[derive(Serialize, Deserialize)]
struct Pin {
    path: String,
    /// First address, and length in bytes.
    ranges: Vec<(u64, u64)>,
}

impl Pins {
    /// Reads the pins in the file `path`, which may be missing.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        match files::read_json::<Self>(path) {
            Ok(pins) if pins.format == FORMAT => Ok(pins),
            Ok(pins) => {
                let message = format!("{} has the unknown format {}", path.display(), pins.format);
                Err(Error::new(ErrorKind::UnsupportedFormat, message))
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {
                Ok(Self { format: FORMAT, pins: Vec::new() })
            }
            Err(e) => Err(e),
        }
    }

    /// Durably pins `ranges` under the user's name `path` in the file `file`, in place of its
    /// earlier ranges. Without ranges the path is unpinned.
    pub(crate) fn set(file: &Path, path: &str, ranges: &[(u64, u64)]) -> Result<()> {
        let mut all = Self::read(file)?;
        all.pins.retain(|pin| pin.path != path);
        if !ranges.is_empty() {
            all.pins.push(Pin { path: path.to_owned(), ranges: ranges.to_vec() });
        }
        let ranges: usize = all.pins.iter().map(|pin| pin.ranges.len()).sum();
        if all.pins.len() > PATHS_MAX || ranges > RANGES_MAX || path.len() > PATH_LEN_MAX {
            let message = format!(
                "more than {PATHS_MAX} paths or {RANGES_MAX} pieces cannot be pinned in one mount: pin \
                 folders instead of their files, or remove some with `burgeon pin --remove`"
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        files::publish_json(file, &all)
    }

    /// The paths, oldest first.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.pins.iter().map(|pin| pin.path.clone()).collect()
    }

    /// All addresses.
    pub(crate) fn ranges(&self) -> Vec<ByteRange> {
        let ranges = self.pins.iter().flat_map(|pin| &pin.ranges);
        ranges.filter_map(|(start, len)| ByteRange::at(*start, *len)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Pins, RANGES_MAX};

    #[test]
    fn pins_are_kept_replaced_and_removed() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("pins.json");
        assert!(Pins::read(&file).unwrap().paths().is_empty());
        Pins::set(&file, "/a", &[(4096, 8192)]).unwrap();
        Pins::set(&file, "/b", &[(0, 4096)]).unwrap();
        Pins::set(&file, "/a", &[(8192, 4096)]).unwrap();
        let pins = Pins::read(&file).unwrap();
        assert_eq!(pins.paths(), ["/b", "/a"]);
        assert_eq!(pins.ranges().iter().map(|range| range.start()).collect::<Vec<_>>(), [0, 8192]);
        let error = Pins::set(&file, "/c", &vec![(0, 1); RANGES_MAX]).unwrap_err();
        assert!(error.to_string().contains("--remove"), "{error}");
        Pins::set(&file, "/a", &[]).unwrap();
        assert_eq!(Pins::read(&file).unwrap().paths(), ["/b"]);
    }
}
