//! A cache gives space back that others take: MB/s in the first second, and until the floor is free
//! again, beside readers. `make bench-cache` runs it, as root; it ends with 1 if a file system
//! misses the aim.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../tests/common/given_back.rs"]
mod given_back;

use std::process::ExitCode;

use given_back::{DISKS, give_back};
use testkit::Space;

const SIZE: u64 = 4 << 30;
const ROOM: u64 = 2 << 30;
/// Per cent of the room that others take.
const SHARE: u64 = 75;
/// The aim: bytes in the first second, unless fewer are lacking.
const AIM: u64 = 100_000_000;

fn main() -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    println!(
        "{:8} {:>11} {:>20} {:>20}",
        "", "lacking, MB", "MB, first second", "MB/s, to the floor"
    );
    for (name, mkfs) in DISKS {
        let space = Space::new("give-back");
        let given = give_back(&space, mkfs, (SIZE, ROOM), SHARE);
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let speed = mb(given.lacking) / given.took.as_secs_f64();
        let (lacking, first) = (mb(given.lacking), mb(given.in_a_second));
        println!("{name:8} {lacking:11.0} {first:20.0} {speed:20.0}");
        if given.in_a_second < AIM.min(given.lacking) {
            println!("  misses the aim of {} MB in the first second", AIM / 1_000_000);
            code = ExitCode::FAILURE;
        }
    }
    code
}
