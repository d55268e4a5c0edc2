//! Properties of this machine: its mounts, backing devices, namespaces, cgroups and signals.
//!
//! Nothing here knows of images, Burgeon mounts or messages.

pub(crate) mod abandoned;
pub(crate) mod backing_devices;
pub(crate) mod cgroup;
pub(crate) mod fork;
pub(crate) mod harden;
pub mod mount_namespaces;
pub mod mountinfo;
pub(crate) mod namespace;
pub(crate) mod own_root;
pub(crate) mod peer;
pub(crate) mod program;
pub(crate) mod signals;
pub(crate) mod system;
