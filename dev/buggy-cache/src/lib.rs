//! A copy of `burgeon-cache` with every bug of `bugs.rs` in it, each behind a switch, as
//! `buggy-volume` is one of the volume.

// The copy follows the lints of the original, and the bugs need not.
#![allow(warnings, clippy::all)]

#[path = "../../buggy-volume/src/bugs.rs"]
pub mod bugs;
#[path = "../bugs.rs"]
pub mod list;

include!(concat!(env!("OUT_DIR"), "/cache/lib.rs"));
