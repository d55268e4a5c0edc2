//! `mount --pull`: the policy for asking a registry to resolve a tag.

use clap::ValueEnum;

/// As [`burgeon_oci::Pull`].
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pull {
    /// Ask each time; without an answer, use the image that is here
    #[default]
    Newer,
    /// Ask only if the image is not here
    Missing,
    /// Ask each time; fail without an answer
    Always,
    /// Never ask; fail if the image is not here
    Never,
}

impl From<Pull> for burgeon_oci::Pull {
    fn from(pull: Pull) -> Self {
        match pull {
            Pull::Newer => Self::Newer,
            Pull::Missing => Self::Missing,
            Pull::Always => Self::Always,
            Pull::Never => Self::Never,
        }
    }
}
