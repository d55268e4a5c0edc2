//! The attributes of a mount, as `mount -o` names them.

use std::fmt;

use burgeon_frontend::btrfs_mount::MountAttrFlags;
use serde::{Deserialize, Serialize};

/// The requested attributes. The default is the kernel's; the daemon decides on a `None` by the
/// origin of the image.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(default)]
pub struct AttributesRequest {
    /// Honour set-user-ID and set-group-ID bits and file capabilities.
    pub suid: Option<bool>,
    /// Allow device nodes to be opened.
    pub dev: Option<bool>,
    /// The other attributes.
    #[serde(flatten)]
    pub others: OtherAttributes,
}

/// The attributes that do not depend on the origin of an image.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(default)]
pub struct OtherAttributes {
    /// This mount allows no writes, whatever its file system does.
    pub read_only: bool,
    /// No program can be executed.
    pub noexec: bool,
    /// Symbolic links are not followed.
    pub nosymfollow: bool,
    /// Updates of access times.
    pub atime: AccessTimes,
    /// Access times of directories are not written.
    pub nodiratime: bool,
}

/// Updates of access times.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "kebab-case")]
pub enum AccessTimes {
    /// Updated if older than the modification time, or than a day.
    #[default]
    Relatime,
    /// Never.
    Noatime,
    /// At each access.
    Strictatime,
}

/// The attributes of a mount.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountAttributes {
    /// Honour set-user-ID and set-group-ID bits and file capabilities.
    pub suid: bool,
    /// Allow device nodes to be opened.
    pub dev: bool,
    /// The other attributes.
    #[serde(flatten)]
    pub others: OtherAttributes,
}

impl MountAttributes {
    /// The attributes of mounts made by versions without this choice.
    pub(crate) fn unrestricted() -> Self {
        Self { suid: true, dev: true, others: OtherAttributes::default() }
    }

    /// As flags for the kernel.
    pub(crate) fn flags(&self) -> MountAttrFlags {
        let Self { suid, dev, others } = *self;
        let mut flags = match others.atime {
            AccessTimes::Relatime => MountAttrFlags::MOUNT_ATTR_RELATIME,
            AccessTimes::Noatime => MountAttrFlags::MOUNT_ATTR_NOATIME,
            AccessTimes::Strictatime => MountAttrFlags::MOUNT_ATTR_STRICTATIME,
        };
        flags.set(MountAttrFlags::MOUNT_ATTR_NOSUID, !suid);
        flags.set(MountAttrFlags::MOUNT_ATTR_NODEV, !dev);
        flags.set(MountAttrFlags::MOUNT_ATTR_RDONLY, others.read_only);
        flags.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, others.noexec);
        flags.set(MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW, others.nosymfollow);
        flags.set(MountAttrFlags::MOUNT_ATTR_NODIRATIME, others.nodiratime);
        flags
    }
}

/// In the words and the order of `/proc/self/mountinfo`.
impl fmt::Display for MountAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { suid, dev, others } = *self;
        f.write_str(if others.read_only { "ro" } else { "rw" })?;
        let words = [
            (!suid, ",nosuid"),
            (!dev, ",nodev"),
            (others.noexec, ",noexec"),
            (others.atime == AccessTimes::Noatime, ",noatime"),
            (others.nodiratime, ",nodiratime"),
            (others.atime == AccessTimes::Relatime, ",relatime"),
            (others.nosymfollow, ",nosymfollow"),
        ];
        words.iter().filter(|(is_set, _)| *is_set).try_for_each(|(_, word)| f.write_str(word))
    }
}

#[cfg(test)]
mod tests {
    use super::{AccessTimes, AttributesRequest, MountAttributes, OtherAttributes};

    #[test]
    fn attributes_are_spelled_as_the_kernel_does() {
        let plain = MountAttributes::unrestricted();
        assert_eq!(plain.to_string(), "rw,relatime");
        let atime = AccessTimes::Noatime;
        let others = OtherAttributes { read_only: true, noexec: true, atime, ..plain.others };
        let strict = MountAttributes { suid: false, dev: false, others };
        assert_eq!(strict.to_string(), "ro,nosuid,nodev,noexec,noatime");
    }

    #[test]
    fn a_request_of_an_earlier_version_asks_for_nothing() {
        let request: AttributesRequest = serde_json::from_str("{}").unwrap();
        assert_eq!(request, AttributesRequest::default());
    }
}
