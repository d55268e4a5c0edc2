//! Growth of a cache, with its file if that is to become larger.
//!
//! ```text
//!   is it allowed? ─► is there memory for the index? ─► the file gets its space ─► superblocks
//! ```
//!
//! Invariant (held by the test below): a growth that is refused takes no space.

use std::fs;

use burgeon_accelerate::sets::WAYS;
use burgeon_block::{Error, ErrorKind, Result};

use crate::disk::Disk;

/// Bytes of the index in memory for each slot.
const SLOT: u64 = 8;

/// Has the cache on `disk` take all of it; of a file, after it has got `size` bytes. Nobody serves
/// it. Returns its size. `Invalid` if it cannot grow so, `Unavailable` if its index would not fit
/// into memory: then it could not be served any more, and it does not shrink.
pub fn grow(disk: &mut Disk, size: Option<u64>) -> Result<u64> {
    let now = disk.size();
    let layout = burgeon_accelerate::growth(disk, now, size.unwrap_or(now))?;
    let index = u64::from(layout.sets) * WAYS as u64 * SLOT;
    need_memory(index, fs::read_to_string("/proc/meminfo").ok().as_deref())?;
    size.map_or(Ok(()), |size| disk.extend(size))?;
    burgeon_accelerate::grow(disk, disk.size())?;
    Ok(disk.size())
}

/// `info` is the text of `/proc/meminfo`; without it, there is enough.
fn need_memory(index: u64, info: Option<&str>) -> Result<()> {
    let line = info.and_then(|info| info.lines().find_map(|it| it.strip_prefix("MemAvailable:")));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    match kib.map(|kib| kib << 10).filter(|available| *available < index) {
        None => Ok(()),
        Some(available) => {
            let what = format!(
                "the index of so large a cache takes {index} bytes of memory, and {available} are available: \
                 let it grow less, or free memory"
            );
            Err(Error::new(ErrorKind::Unavailable, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use burgeon_accelerate::{create, read_super};
    use burgeon_block::ErrorKind;

    use super::{grow, need_memory};
    use crate::disk::Disk;

    #[test]
    fn a_growth_that_is_refused_takes_no_space() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache");
        fs::write(&path, vec![0; 4 << 20]).unwrap();
        let mut disk = Disk::open(&path).unwrap();
        create(&disk, 4 << 20, [7; 16]).unwrap();
        let len = || fs::metadata(&path).unwrap().len();
        // Too little, and nothing.
        for size in [Some((4 << 20) + 4096), Some(1 << 20), None] {
            assert_eq!(grow(&mut disk, size).unwrap_err().kind(), ErrorKind::Invalid);
            assert_eq!((len(), disk.size()), (4 << 20, 4 << 20), "{size:?}");
        }
        for step in 2..9 {
            assert_eq!(grow(&mut disk, Some(step << 22)).unwrap(), step << 22);
            assert_eq!(read_super(&disk, len()).unwrap().layout.size, step << 22);
        }
        let often = grow(&mut disk, Some(9 << 22)).unwrap_err().to_string();
        assert!(often.contains("grown 7 times"), "{often}");
        assert_eq!(len(), 8 << 22);
    }

    #[test]
    fn an_index_fits_into_memory() {
        let info = "MemTotal: 9000 kB\nMemAvailable:    8 kB\n";
        need_memory(8192, Some(info)).unwrap();
        assert_eq!(need_memory(8193, Some(info)).unwrap_err().kind(), ErrorKind::Unavailable);
        need_memory(u64::MAX, None).unwrap();
        need_memory(u64::MAX, Some("")).unwrap();
    }
}
