//! Stores behind a network, on loopback: real servers, and a proxy that spoils what they say.

mod head;
mod proxy;
mod servers;

pub use proxy::{Fault, Proxy, Shape};
pub use servers::{S3, WebServer};
