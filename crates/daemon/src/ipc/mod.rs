//! Messages between Burgeon's processes, and their transport.
//!
//! ```text
//!   command ── client ══ api.sock (protocol) ══► supervisor ══ socketpair (link) ══► server
//!                    both carry JSON behind its length, and descriptors (wire)
//!   metrics ◄── status.sock (status_socket) ── supervisor: snapshots, and no requests
//! ```

pub(crate) mod client;
pub(crate) mod link;
pub mod protocol;
pub(crate) mod silence;
pub mod status_socket;
pub(crate) mod wire;
