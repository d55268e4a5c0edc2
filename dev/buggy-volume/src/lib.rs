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

pub mod bugs;

include!(concat!(env!("OUT_DIR"), "/volume/lib.rs"));
