//! Layers of ordinary images, read from the middle.
//!
//! ```text
//!   once:   layer ──► Recorder ──► what it unpacks to
//!                        └──► Restarts: places where unpacking can begin ──┐
//!                             Stretch: where in which layer data lies ─────┴──► Table ──► bytes
//!   or:     table of contents ──► Piece: what is unpacked by itself, and its SHA-256 ──► Restarts
//!   later:  bytes ──► Table ──► stretches of a range ──► Span ──► unpack(compressed bytes of it)
//! ```
//!
//! Pure: nothing is opened here, and nobody is asked. Whoever publishes an index writes the table,
//! so what [`Table::decode`] reads is hostile, and so are layers. Invariants: a span unpacks to as
//! many bytes as it says, or to none; what that takes has a bound, whatever the bytes are.

mod gunzip;
mod pieces;
mod restart;
mod table;
mod unzstd;

pub use self::{
    pieces::Piece,
    restart::{LayerCodec, Recorder, Restarts, Span},
    table::{Stretch, TABLE_MAX, Table, TableLayer},
};
