//! Copies `crates/cache/src` and puts the bugs of `bugs.rs` into the copy.

// The tests read the rest of it.
#[allow(dead_code)]
#[path = "bugs.rs"]
mod bugs;
#[path = "../buggy-volume/copy.rs"]
mod copy;

use bugs::{BUGS, SWITCH};

fn main() -> std::io::Result<()> {
    copy::copy_with_bugs("cache", SWITCH, BUGS.iter().map(|bug| (bug.name, bug.patches)))
}
