//! The switches. One bug at most is on, and only on the thread that has turned it on.

use std::cell::Cell;

thread_local! {
    static ON: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Keeps a bug on until it is dropped.
pub struct TurnedOn(());

impl Drop for TurnedOn {
    fn drop(&mut self) {
        ON.set(None);
    }
}

/// Turns the bug `name` on, for this thread.
pub fn turn_on(name: &'static str) -> TurnedOn {
    ON.set(Some(name));
    TurnedOn(())
}

pub(crate) fn is_on(name: &str) -> bool {
    ON.get() == Some(name)
}
