//! What this machine is and has: its mounts, backing devices, namespaces, cgroups and signals.
//!
//! Nothing here knows of an image, a mount of ours or a message.

pub(crate) mod cgroup;
pub(crate) mod chain;
pub(crate) mod harden;
pub mod mountinfo;
pub(crate) mod namespace;
pub(crate) mod program;
pub(crate) mod signals;
pub(crate) mod system;
