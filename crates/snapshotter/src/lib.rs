//! Snapshots for containerd: a proxy plugin over a Unix socket.
//!
//! ```text
//!   containerd ── gRPC ──► server ─► service ─► snapshotter ─┬─► model     which snapshots there are
//!                          socket    messages   calls        ├─► disk      records and folders
//!                                    (api)      (filter)     ├─► overlay   mounts for containerd
//!                                                            ├─► chains    mounts of remote layers
//!                                                            ├─► native    containers with own mounts
//!                                                            ├─► indexes   of images, in the background
//!                                                            └─► remote    `Layers`: who mounts them
//!                    differ ─► trees ─► changes ─► layer, tar      differences for containerd
//!                       └────► content                             its content store
//! ```
//!
//! `model`, `filter`, `overlay` and `record` are pure. The process mounts nothing itself for local
//! snapshots: containerd does, from the answers.

pub mod api;
mod before;
mod chains;
mod changes;
pub mod containers;
mod content;
pub mod content_api;
mod differ;
mod difference;
mod disk;
pub mod filter;
mod image_index;
mod indexes;
mod keys;
mod layer;
pub mod model;
mod native;
mod overlay;
pub mod record;
pub mod remote;
mod server;
mod service;
mod snapshotter;
mod tar;
mod tree;
mod trees;
mod walk;

pub use containers::{Containers, matches, repository};
pub use disk::{Loaded, read};
pub use image_index::{ImageIndex, IndexMade, IndexPolicy, IndexState};
pub use server::{Socket, serve};
pub use snapshotter::{CallError, CallResult, Snapshotter};
