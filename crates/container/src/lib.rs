//! Containers on a mounted image: an OCI runtime bundle, or a program in namespaces of its own.
//!
//! ```text
//!   settings of the image + command of the user + /etc/passwd of the root ──► ContainerProcess
//!     bundle:  Process ──► config.json, for runc, crun and others
//!     run:     Process ──► burgeon __contain ──► burgeon __init, process 1 ──► the program
//! ```
//!
//! Invariants: the image's settings and files are hostile; a path of the image is resolved within
//! its root, or after the process has no other root; both kinds of containers have the same file
//! systems, masked paths and capabilities, except for `CAP_MKNOD`, which only a runtime with a
//! device filter may give.

mod defaults;
mod process;
pub mod run;
mod spec;
mod users;

pub use self::{
    process::ContainerProcess,
    spec::{ContainerOptions, Network, config},
    users::User,
};
