//! Damage of plain files. Nothing of ours reads them: btrfs counts the blocks that it found wrong.
//!
//! ```text
//!   /sys/fs/btrfs/FSID/devinfo/NUMBER/error_stats   "corruption_errs 10\n…", since Linux 5.14
//! ```

use std::{fs::File, io::Read, path::Path};

use super::{Finding, Level};
use crate::ipc::protocol::MountStatus;

/// The counters of blocks whose readers got an error.
const COUNTERS: [&str; 3] = ["read_errs", "corruption_errs", "generation_errs"];
/// Most bytes of the counters of a device.
const STATS_MAX: u64 = 4096;

pub(super) fn damaged(mount: &MountStatus) -> Option<Finding> {
    let fsid = mount.fsid.filter(|_| mount.state == "let go")?.to_string();
    let errors = errors(&Path::new("/sys/fs/btrfs").join(fsid).join("devinfo"));
    (errors > 0).then(|| {
        Finding::bad(
            Level::Problem,
            &format!("mount {}", mount.target.display()),
            format!("btrfs has found {errors} blocks of its plain file damaged or unreadable"),
            "files that hold them give EIO",
            "unmount it and mount it again: data comes from the cache or the image's store then",
        )
    })
}

/// The errors of all devices in a folder of them; none if the kernel does not tell.
fn errors(devices: &Path) -> u64 {
    let all = devices.read_dir().into_iter().flatten().flatten();
    all.map(|device| {
        let mut text = String::new();
        let file = File::open(device.path().join("error_stats"));
        let read = file.and_then(|file| file.take(STATS_MAX).read_to_string(&mut text));
        let counts = text.lines().filter_map(|line| line.split_once(' '));
        let counts = counts.filter(|(name, _)| read.is_ok() && COUNTERS.contains(name));
        counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum::<u64>()
    })
    .sum()
}

#[cfg(test)]
mod tests {
    use super::errors;

    #[test]
    fn errors_of_all_devices_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(errors(folder.path()), 0);
        for (device, text) in [
            (
                "1",
                "write_errs 4\nread_errs 1\nflush_errs 8\ncorruption_errs 10\ngeneration_errs 0\n",
            ),
            ("2", "corruption_errs 2\nread_errs many\n"),
        ] {
            std::fs::create_dir(folder.path().join(device)).unwrap();
            std::fs::write(folder.path().join(device).join("error_stats"), text).unwrap();
        }
        std::fs::create_dir(folder.path().join("3")).unwrap();
        assert_eq!(errors(folder.path()), 13);
    }
}
