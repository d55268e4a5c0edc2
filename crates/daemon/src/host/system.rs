//! Identity of this machine, its kernel, and its folders.

use std::{os::unix::fs::MetadataExt, path::Path};

/// Device and inode.
pub(crate) type Identity = (u64, u64);

/// Those of a folder that is there.
pub(crate) fn identity(folder: &Path) -> Option<Identity> {
    folder.symlink_metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// The effective user of a process.
pub(crate) fn effective_user(process: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().nth(1)?.parse().ok()
}

/// The kernel's release, such as `6.12.94+deb13-amd64`.
pub(crate) fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// This machine's name.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The kernel's version, such as (6, 12); `None` if the release name has none.
pub(crate) fn kernel_version() -> Option<(u32, u32)> {
    parse(&kernel_release())
}

/// The first kernel that may shut a file system down when its device is exchanged.
const SHUTS_DOWN: (u32, u32) = (6, 19);

/// False if a kernel of this version may shut a mounted file system down when the file below its
/// loop device is exchanged. Distributions change kernels: an attempt says more.
pub(crate) fn is_before_shutdowns() -> bool {
    kernel_version().is_some_and(|version| version < SHUTS_DOWN)
}

/// An id of the time since the machine was started; empty if the kernel gives none.
pub(crate) fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Succeeds if the kernel allows FUSE over io_uring for root; the error gives the reason and a
/// remedy.
pub(crate) fn fuse_rings() -> Result<(), String> {
    let switch = "/sys/module/fuse/parameters/enable_uring";
    let rings = std::fs::read_to_string(switch).ok();
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
    judge_rings(rings.as_deref(), disabled.as_deref(), switch)
}

/// True if the kernel makes an io_uring for administrators alone. (It also does for a group, which
/// no process of ours is in.)
pub(crate) fn rings_take_an_administrator() -> bool {
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    disabled.is_ok_and(|value| value.trim() == "1")
}

fn judge_rings(rings: Option<&str>, disabled: Option<&str>, switch: &str) -> Result<(), String> {
    match (rings.map(str::trim), disabled.map(str::trim)) {
        (None, _) => Err("this kernel has no FUSE over io_uring: Linux 6.14 or later may".into()),
        (_, Some("2")) => {
            Err("io_uring is off on this machine: sysctl kernel.io_uring_disabled=0 \
                               turns it on"
                .into())
        }
        // The process that serves has no capabilities.
        (_, Some("1")) => Err("io_uring is for administrators alone on this machine: sysctl \
                               kernel.io_uring_disabled=0 allows it for all"
            .into()),
        (Some("Y"), _) => Ok(()),
        (Some(_), _) => Err(format!(
            "the kernel does not allow FUSE over io_uring: `echo Y > {switch}` does until the next \
             boot, fuse.enable_uring=1 on the kernel's command line for good"
        )),
    }
}

fn parse(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// True if the kernel has the module `name`, loaded or not.
pub(crate) fn module_is_there(name: &str) -> bool {
    let path = format!("/lib/modules/{}/modules.dep", kernel_release());
    let modules = std::fs::read_to_string(path).unwrap_or_default();
    let file = format!("/{name}.ko");
    modules.lines().any(|line| line.split(':').next().is_some_and(|module| module.contains(&file)))
}

#[cfg(test)]
mod tests {
    use super::{judge_rings, parse};

    #[test]
    fn versions_compare_as_numbers() {
        assert_eq!(parse("6.12.94+deb13-amd64"), Some((6, 12)));
        assert_eq!(parse("7.0-rc1"), Some((7, 0)));
        assert_eq!(parse("linux"), None);
        assert!(parse("6.9.1") < parse("6.10.0"));
    }

    #[test]
    fn the_obstacle_to_rings_is_named() {
        let judge = |rings, disabled| judge_rings(rings, disabled, "SWITCH");
        assert_eq!(judge(Some("Y\n"), Some("0\n")), Ok(()));
        assert_eq!(judge(Some("Y\n"), None), Ok(()));
        assert!(judge(Some("N\n"), None).unwrap_err().contains("echo Y > SWITCH"));
        assert!(judge(None, Some("0")).unwrap_err().contains("6.14"));
        for disabled in ["1\n", "2\n"] {
            let why = judge(Some("Y"), Some(disabled)).unwrap_err();
            assert!(why.contains("io_uring_disabled=0"), "{why}");
        }
    }
}
