//! Shared parts of the tests, foremost of those with real mounts.
//!
//! ```text
//!   torture ── a seeded tree of everything a file system can hold ──┐
//!   debian  ── a debootstrapped root, kept between runs ────────────┼──► burgeon ──► mount
//!   compare ── original ≟ copy, entry by entry ◄────────────────────┘      │
//!   space   ── a private mount namespace a thread, a folder of its own ────┤
//!   fio, pattern ── load with verification                                 │
//!   images, layers, estargz ── OCI images, of umoci and by hand ───────────┤
//!   btrfs   ── what stock tools and the kernel say about a mount ──────────┤
//!   net ── real servers on loopback, a proxy that spoils what they say
//!   Drop    ── unmounts, shuts down, and *fails the test* if anything is left behind
//! ```
//!
//! Invariants: every random choice comes from a seed that a failure prints; whatever a test
//! makes is released when its guards drop, also when the test panics.

mod btrfs;
mod burgeon;
mod compare;
mod debian;
mod ends;
mod estargz;
mod events;
mod fio;
mod golang;
mod images;
mod layers;
mod machine;
mod measure;
mod mountinfo;
mod net;
mod opens;
mod pattern;
mod preload;
mod rings;
mod rng;
mod space;
mod torture;
mod torture_files;

pub use btrfs::{btrfs_check, btrfs_devices, drop_caches, reflink, snapshot};
pub use burgeon::{Burgeon, Finished};
pub use compare::{Comparison, compare};
pub use debian::debian_root;
pub use ends::Ends;
pub use estargz::Estargz;
pub use events::Events;
pub use fio::{Fio, FioResult};
pub use golang::{go_programs, go_tests, tools};
pub use images::{OciLayout, busybox_image, skopeo_copy};
pub use layers::{gzip, gzip_flushed, like_programs};
pub use machine::{
    LoopDevice, PATIENCE, copy_program, kill, loop_devices, processes_with, scaled, ublk_devices,
    ublk_expected, wait_until,
};
pub use measure::{Measured, measure};
pub use mountinfo::{MountLine, mounts_of};
pub use net::{
    Certificate, Fault, Link, Proxy, ReferrerLists, Registry, RegistryOptions, S3, Shape,
    TokenGate, WebServer,
};
pub use opens::{OpensOf, WaitingOpen};
pub use pattern::{AlignedBlock, Pattern};
pub use preload::preload;
pub use rings::FuseRings;
pub use rng::Rng;
pub use space::{Mounted, Space, bind_mount, break_disk, make_read_only_by_an_error, take_room};
pub use torture::{Torture, TortureSize};
