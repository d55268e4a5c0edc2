//! The processes of a cache: they serve slow devices through it to the kernel.
//!
//! ```text
//!   keep      the supervisor: claims, descriptors, starts servers; parses only what root says
//!   serve     the server: burgeon-accelerate behind the request engine, over FUSE and a loop device
//!   control   their sockets           folder   the cache's folder in the state directory
//!   disk      devices and files       probe    what a device holds already
//!   harden    staying alive when memory is short
//!   device    a cached device for the engine         shared   counters that outlive a server
//! ```

pub mod control;
mod device;
pub mod disk;
pub mod folder;
mod harden;
pub mod probe;
mod serve;
mod shared;
mod supervise;

pub use serve::serve_process;
pub use supervise::{loop_process, supervise_process};
