//! Presents a [`BlockDevice`](burgeon_block::BlockDevice) to the kernel, and mounts btrfs on it.
//! Everything by system call; no external program.
//!
//! ```text
//!   btrfs (btrfs_mount: scan, mount, sprout, all on detached mounts)
//!     │ bio
//!   /dev/loopN (loopdev: direct I/O, 4 KiB blocks)             /dev/ublkbN, where the kernel has it
//!     │ read, write, fsync, fallocate                            │
//!   one huge file: a FUSE file system that is one regular        │ io_uring
//!   file and lies at no path (Connection)                        │
//!     │ /dev/fuse, or io_uring                                   │
//!   Server: reader threads, request slots; or rings            ublk::FuseServer: a thread a queue
//!     └───────────────────────────────┬──────────────────────────┘
//!                                  engine: hit, miss, local file, write; counts, cancels, replies
//!                                     └─► BlockDevice, WritableDevice
//! ```
//!
//! Invariants:
//! - A request over `/dev/fuse` that the kernel has handed out lies in a slot until it is answered,
//!   and the next server of the slots answers it. So killing the server costs no I/O error
//!   (`tests/kill.rs`; ublk, where the kernel keeps the requests: `tests/ublk_kill.rs`).
//! - The serving process holds no descriptor of its own FUSE file, loop device or mount.
//! - Nothing is left behind: loop devices detach themselves with their last user, and the FUSE
//!   file system goes with the last descriptor of its file (`tests/transport.rs`).

#[cfg(not(target_os = "linux"))]
compile_error!("Burgeon mounts with Linux system calls; build it for Linux");

pub mod btrfs_mount;
mod connection;
mod engine;
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
pub use engine::End;
pub use loop_range::remove_unused as remove_unused_loops;
pub use loopdev::{LoopDevice, LoopOptions};
pub use server::{FuseServer, Helpers, ServeOptions, serve, serve_writable};
pub use slots::Slots;
