//! Messages between Burgeon's processes, and their transport.
//!
//! ```text
//!   command ── client ══ api.sock (protocol) ══► supervisor ══ socketpair (link) ══► server
//!                    both carry JSON behind its length, and descriptors (wire)
//! ```

pub(crate) mod client;
pub(crate) mod link;
pub mod protocol;
pub(crate) mod wire;
