//! Random access to the layers of OCI images.
//!
//! ```text
//!   once:   layer ──► Recorder ──► unpacked bytes
//!                        └──► Restarts: places where unpacking can begin ──┐
//!                             Stretch: location of data in a layer ────────┴──► Table ──► bytes
//!   or:     table of contents ──► Piece: unit of unpacking, with its SHA-256 ──► Restarts
//!   later:  bytes ──► Table ──► stretches of a range ──► Span ──► unpack(its compressed bytes)
//! ```
//!
//! The crate performs no I/O. The publisher of an index writes the table, so the input of
//! [`Table::decode`] is hostile, and so are layers. Invariants: a span unpacks to exactly its
//! stated length, or to an error; its time and memory are bounded, whatever the bytes are.

mod gunzip;
mod pieces;
mod places;
mod restart;
mod span;
mod table;
mod unzstd;

pub use self::{
    pieces::Piece,
    restart::{Recorder, Restarts},
    span::{LayerCodec, Span},
    table::{Stretch, TABLE_MAX, Table, TableLayer},
};
