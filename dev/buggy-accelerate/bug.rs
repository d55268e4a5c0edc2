//! A bug of a list: texts of a crate, and their replacements.

/// The text that a replacement has in place of "this bug is on".
pub const SWITCH: &str = "BUG";

/// A defect, and how to make it.
pub struct Bug {
    /// The name that turns it on.
    pub name: &'static str,
    /// Description of the defect.
    pub says: &'static str,
    /// File, text, replacement.
    pub patches: &'static [(&'static str, &'static str, &'static str)],
}

/// The bug of this name.
pub const fn bug(
    name: &'static str,
    says: &'static str,
    patches: &'static [(&'static str, &'static str, &'static str)],
) -> Bug {
    Bug { name, says, patches }
}
