//! How the kernel reaches a [`BlockDevice`](burgeon_block::BlockDevice), and how btrfs is mounted
//! on what it then sees. Everything by system call; no external program.
//!
//! ```text
//!   btrfs (btrfs_mount: scan, mount, sprout, all on detached mounts)
//!     │ bio
//!   /dev/loopN (loopdev: direct I/O, 4 KiB blocks)
//!     │ read
//!   one huge file: a FUSE file system that is one regular file and lies at no path (Connection)
//!     │ /dev/fuse                                   held by the supervisor, survives the server
//!   Server: reader threads ──► request slots (Slots: shared memory, survives the server, too)
//!     │        try_read: a hit is answered at once
//!     └──────► read: a miss becomes a task, its request stays in its slot until answered
//! ```
//!
//! Where the kernel has ublk, [`ublk`] takes the place of all that is between btrfs and the device:
//!
//! ```text
//!   btrfs ── bio ── /dev/ublkbN ── io_uring ── ublk::Server: a thread a queue
//! ```
//!
//! Invariants:
//! - A request that the kernel has handed out lies in a slot until it is answered; whoever serves
//!   the slots next answers it. So killing the server costs no I/O error (`tests/kill.rs`; ublk: `tests/ublk_kill.rs`).
//! - The serving process holds no descriptor of its own FUSE file, loop device or mount.
//! - Nothing is left behind: loop devices detach themselves with their last user, and the FUSE
//!   file system goes with the last descriptor of its file (`tests/transport.rs`).

#[cfg(not(target_os = "linux"))]
compile_error!("Burgeon mounts with Linux system calls; build it for Linux");

pub mod btrfs_mount;
mod connection;
pub mod extents;
mod fuse;
mod loop_range;
mod loopdev;
pub mod reflink;
mod server;
mod slots;
mod sys;
pub mod ublk;

pub use connection::Connection;
pub use loop_range::remove_unused as remove_unused_loops;
pub use loopdev::{LoopDevice, LoopOptions};
pub use server::{End, Helpers, ServeOptions, Server, serve};
pub use slots::Slots;
