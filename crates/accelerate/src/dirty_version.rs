//! A version of a dirty block: where the log has it.

/// The place of a version that cannot be read any more.
const LOST: u32 = u32::MAX;

/// A dirty version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DirtyVersion {
    /// Its record.
    pub(crate) number: u64,
    /// Its block of the log.
    pub(crate) place: u32,
    pub(crate) check: u32,
}

impl DirtyVersion {
    /// A version that is lost.
    pub(crate) fn lost(number: u64) -> Self {
        Self { number, place: LOST, check: 0 }
    }

    pub(crate) fn is_lost(self) -> bool {
        self.place == LOST
    }
}
