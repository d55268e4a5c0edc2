//! The processes of a cache: they serve slow devices through it to the kernel.
//!
//! ```text
//!   supervise the supervisor: claims, descriptors, starts servers; parses only what root says
//!   serve     the server: burgeon-accelerate behind the request engine, over FUSE or ublk
//!   control   their sockets           folder   the cache's folder in the state directory
//!   disk      devices and files       probe    what a device holds already
//!   front     the kernel's side of a device: FUSE or ublk     looped   attaches the loop device
//!   harden    staying alive when memory is short     limits   those of the slow device, passed on
//!   attached  the devices, as the next supervisor finds them
//!   device    a cached device for the engine         shared   counters that outlive a server
//!   durable   files that are replaced as a whole
//!   lasting   distributions that outlive both processes
//!   plan      what the supervisor tells the server
//!   replace   another device under a cache           growth   more of its device
//!   adopt     a cache that another host has made
//!   offline   writing back what is not attached
//!   writing_back   the thread for dirty blocks       dirty    whose they are, in the state directory
//!   status    all figures                            times    distributions of durations and sizes
//!   announced the link to a device, and the mark that keeps others off the slow device
//! ```

pub mod adopt;
mod announced;
mod attached;
mod child;
pub mod control;
mod device;
pub mod dirty;
pub mod disk;
mod durable;
pub mod folder;
mod front;
pub mod growth;
mod harden;
mod lasting;
mod limits;
mod looped;
pub mod offline;
mod plan;
pub mod probe;
pub mod replace;
mod serve;
mod shared;
mod status;
mod supervise;
mod times;
mod writing_back;

pub use front::ublk_process;
pub use looped::loop_process;
pub use serve::serve_process;
pub use supervise::supervise_process;
