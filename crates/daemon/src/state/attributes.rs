//! The attributes of a mount itself, as `mount -o` names them.

use std::fmt;

use burgeon_frontend::btrfs_mount::MountAttrFlags;
use serde::{Deserialize, Serialize};

/// The attributes that are wanted. The default is the kernel's, except that the daemon decides on what
/// is `None`, by where the image comes from.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(default)]
pub struct AttributesRequest {
    /// Whether programs run with the rights that their files give.
    pub suid: Option<bool>,
    /// Whether device nodes can be opened.
    pub dev: Option<bool>,
    /// The others.
    #[serde(flatten)]
    pub others: OtherAttributes,
}

/// The attributes that do not depend on where an image comes from.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(default)]
pub struct OtherAttributes {
    /// This mount allows no writes, whatever its file system does.
    pub read_only: bool,
    /// No program can be executed.
    pub noexec: bool,
    /// Symbolic links are not followed.
    pub nosymfollow: bool,
    /// When access times are written.
    pub atime: AccessTimes,
    /// Access times of directories are not written.
    pub nodiratime: bool,
}

/// When access times are written.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "kebab-case")]
pub enum AccessTimes {
    /// Where they are older than the modification, or than a day.
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
    /// Whether programs run with the rights that their files give.
    pub suid: bool,
    /// Whether device nodes can be opened.
    pub dev: bool,
    /// The others.
    #[serde(flatten)]
    pub others: OtherAttributes,
}

impl MountAttributes {
    /// What mounts had before there was a choice.
    pub(crate) fn unrestricted() -> Self {
        Self { suid: true, dev: true, others: OtherAttributes::default() }
    }

    /// As the kernel wants them.
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
