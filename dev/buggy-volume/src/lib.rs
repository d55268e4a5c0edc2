//! A copy of `burgeon-volume` with every bug of `bugs.rs` in it, each behind a switch.
//!
//! ```text
//!   crates/volume/src ──► build.rs: bugs.rs, textually ──► OUT_DIR/volume ──► this crate
//!                                                              └── bugs::is_on("…")
//! ```
//!
//! The production crate has no place for bugs; this copy exists so that the simulator can show
//! that it finds each of them. All bugs share one build.

// The copy follows the lints of the original, and the bugs need not.
#![allow(warnings, clippy::all)]

#[path = "../bugs.rs"]
pub mod list;

/// The switches. One bug at most is on, and only on the thread that has turned it on.
pub mod bugs {
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
}

include!(concat!(env!("OUT_DIR"), "/volume/lib.rs"));
