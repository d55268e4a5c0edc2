//! The running system: mounts, the processes that keep them alive, and the API that commands use.
//!
//! ```text
//!   burgeon mount … ──► client ══ api.sock ══► supervisor ── socketpair ──► server
//!        │                                       │ holds /dev/fuse, slots     │ answers reads
//!        └── move_mount in the caller's  ◄── a detached mount (SCM_RIGHTS)    └─► store, cache
//!            namespace
//! ```
//!
//! Invariants, and the tests that hold them (`crates/cli/tests`):
//! - Killing the server costs no I/O error; killing the supervisor costs nothing at all; killing
//!   both costs EIO on data that is not local until the next supervisor (`kill.rs`).
//! - A plain `umount` releases everything (`lifecycle.rs`).
//! - Named writes are removed by `writes rm` and by nothing else (`writes.rs`).

#[macro_use]
mod log;
mod access;
mod built;
mod cgroup;
mod chain;
mod client;
pub mod doctor;
mod exchange;
mod files;
mod harden;
mod helper;
mod id;
mod images;
mod link;
pub mod mountinfo;
mod namespace;
pub mod orphan;
mod paths;
mod pins;
mod plumbing;
mod prepared;
mod profile;
pub mod protocol;
pub mod read_only;
pub mod roles;
pub mod roots;
mod seen;
mod server;
mod signals;
mod space;
mod spare;
mod sprout;
mod start;
mod supervisor;
mod sync;
mod system;
mod transport;
mod upgrade;
mod wire;
pub mod writes;

pub use built::{honoured, remember_built};
pub use burgeon_frontend::{btrfs_mount::attach, extents, reflink};
pub use burgeon_image::build::Honours;
pub use chain::{btrfs_fsid, is_burgeon_mount, refuse_burgeon, refuse_burgeon_file};
pub use client::Client;
pub use helper::help;
pub use id::{Fsid, MountId};
pub(crate) use log::log_line;
pub use paths::StateDir;
pub use prepared::{make_ready, prepare_process, sweep};
pub use profile::{forget_profile, keep_profile, kept_profile, kept_profiles, read_profile};
pub use seen::Seen;
pub use server::serve_forever;
pub use signals::{TerminationSignals, block_termination};
pub use start::UNIT_PROPERTIES;
pub use supervisor::supervise;
pub use upgrade::{Upgraded, upgrade};
