//! Stores behind a network, on loopback: real servers, a proxy that spoils what they say, and a
//! link that is as slow as a real one.

mod certificate;
mod front;
mod head;
mod link;
mod lists;
mod proxy;
mod s3;
mod servers;
mod token;

pub use certificate::Certificate;
pub use link::Link;
pub use lists::ReferrerLists;
pub use proxy::{Fault, Proxy, Shape};
pub use s3::S3;
pub use servers::{Registry, RegistryOptions, WebServer};
pub use token::TokenGate;
