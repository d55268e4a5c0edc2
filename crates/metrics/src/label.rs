//! Values of labels, as they are shown.
//!
//! Invariants: a value is at most [`LABEL_MAX`] characters long; two values that differ stay
//! different, because a second series with the labels of another makes readers refuse the whole
//! text.

use std::borrow::Cow;

use burgeon_block::Digest;

/// Characters of a label's value.
const LABEL_MAX: usize = 200;

/// Digits of the digest that tells shortened values apart.
const DIGITS: usize = 12;

/// `value` as it is shown: a long one, or one with control characters, ends in a part of its
/// digest.
pub(crate) fn label(value: &str) -> Cow<'_, str> {
    if value.chars().count() <= LABEL_MAX && !value.contains(is_replaced) {
        return Cow::Borrowed(value);
    }
    let digest = Digest::of(value.as_bytes()).to_string();
    let replaced = value.chars().map(|c| if is_replaced(c) { '\u{fffd}' } else { c });
    let begin: String = replaced.take(LABEL_MAX - DIGITS - 1).collect();
    Cow::Owned(format!("{begin}…{}", &digest[..DIGITS]))
}

/// True of control characters but the one that the format escapes.
fn is_replaced(c: char) -> bool {
    c.is_control() && c != '\n'
}

#[cfg(test)]
mod tests {
    use super::label;

    #[test]
    fn values_that_differ_stay_different() {
        let long = "x".repeat(300);
        for [a, b] in [
            ["a\u{1}".to_owned(), "a\u{2}".to_owned()],
            [format!("{long}a"), format!("{long}b")],
            ["x".repeat(200), "x".repeat(201)],
        ] {
            assert_ne!(label(&a), label(&b));
            // A text is shown the same way if it was shortened before.
            assert_eq!(label(&label(&a)), label(&a));
        }
    }
}
