//! The running system: mounts, the processes that keep them alive, and the API that commands use.
//!
//! ```text
//!   burgeon mount … ──► client ══ api.sock ══► supervisor ── socketpair ──► server
//!        │                                       │ holds /dev/fuse, slots     │ answers reads
//!        └── move_mount in the caller's  ◄── a detached mount (SCM_RIGHTS)    └─► store, cache
//!            namespace
//! ```
//!
//! The rooms; `tests/rooms.rs` holds the arrows:
//!
//! ```text
//!   doctor, orphan, upgrade, let_go         commands' actions on the daemon, or without it
//!   read_only, rehearsal                    parts of these: writes without a daemon, a trial upgrade
//!   supervisor              server          the two long-lived processes
//!   holder                    │             outlives both: systemd's store, or a process
//!   prepare, reader, start    │             processes that prepare and read; starting the daemon
//!   opener  ◄─────────────────┤             opens files of the host for the server
//!   roles, transport ◄────────┘             privilege reduction; the kernel's way to the lazy data
//!   ipc                                     messages between processes, and their wire format
//!   state                                   contents of the state directory, in its own formats
//!   host, sync, id, log                     this machine; locks; identities; events
//! ```
//!
//! Invariants, and the tests that hold them (`crates/cli/tests`):
//! - Killing the server costs no I/O error; killing the supervisor has no effect at all; killing
//!   both makes readers wait for the next supervisor (`kill_held.rs`); killing the holder, too,
//!   costs EIO on data that is not in memory until then (`kill.rs`).
//! - A plain `umount` releases everything (`lifecycle.rs`).
//! - Only `writes rm` removes named writes (`writes.rs`).

pub mod doctor;
pub mod holder;
mod host;
mod id;
mod ipc;
pub mod let_go;
pub mod log;
mod opener;
pub mod orphan;
mod prepare;
pub mod read_only;
mod reader;
mod rehearsal;
pub mod roles;
mod server;
mod start;
mod state;
mod supervisor;
mod sync;
mod transport;
mod upgrade;

pub use burgeon_frontend::{btrfs_mount::attach, extents, reflink};
pub use burgeon_image::builder::Honours;
pub use holder::hold;
pub use host::{
    backing_devices::{
        btrfs_fsid, is_burgeon_mount, refuse_accelerated, refuse_burgeon, refuse_burgeon_file,
    },
    harden::{forbid_core_dumps, report_file_limit},
    mount_namespaces, mountinfo,
    program::give_way,
    signals::{TerminationSignals, block_termination},
};
pub use id::{Fsid, MountId};
pub use ipc::{client::Client, protocol, status_socket};
pub use opener::open_files;
pub use prepare::{make_ready, prepare_process};
pub use reader::{ReaderParent, read_elsewhere, read_process};
pub use roles::Reach;
pub use server::serve_forever;
pub use start::{UNIT_PROPERTIES, notify_systemd, pass_on};
pub use state::{
    built::{honoured, remember_built},
    cache::{changed_floor, configure as configure_cache, floor_of},
    cache_dir::{
        CACHE_DIR, check as check_cache_dir, configure as configure_cache_dir,
        current_and_next as cache_dirs,
    },
    directory_identity::DirectoryIdentity,
    gc::{sweep, sweep_one},
    layers::keep_layers,
    paths::StateDir,
    prepared::is_prepared,
    profile::{
        forget_profile, keep_profile, kept_profile, kept_profiles, note_recorded, read_profile,
        was_recorded,
    },
    roots,
    space::LIMIT_MIN as WRITE_LIMIT_MIN,
    writes,
};
pub use supervisor::{helper::process::help, supervise};
pub use upgrade::{Upgraded, check as check_upgrade, upgrade};
