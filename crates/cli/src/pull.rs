//! `mount --pull`: when to ask a registry to resolve a tag.

use clap::ValueEnum;

/// As [`burgeon_oci::Pull`].
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
pub(crate) enum Pull {
    /// Each time; the image that is here if the registry does not answer
    #[default]
    Newer,
    /// Only if the image is not here
    Missing,
    /// Each time; an error if the registry does not answer
    Always,
    /// Never; an error if the image is not here
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
