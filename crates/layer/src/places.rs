//! The places where unpacking can start, as decoders record them while a layer is read.
//!
//! ```text
//!   decoder ──► begin(offsets, state) ──► settle(state): the window is known ──► Place, Place, …
//!                  └─ only if SPAN_LEN bytes were unpacked since the last place
//! ```

use crate::span::SPAN_LEN;

/// A place where unpacking can start, by its offsets in the layer blob and in the unpacked layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RestartPoint {
    pub(crate) compressed: u64,
    pub(crate) unpacked: u64,
    pub(crate) start: Start,
}

/// The decoder state needed to start at a place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Start {
    /// None: a frame or a member begins.
    Fresh,
    /// Of a block inside a gzip member.
    Inside(Inside),
}

/// The state needed to start at a block inside a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Inside {
    /// Number of bits of the preceding byte that belong to the block: 0 to 7.
    pub(crate) bits: u8,
    /// Those bits.
    pub(crate) partial: u8,
    /// The preceding output, at most 32 KiB, as a zstd frame; bytes that are not used are zero.
    pub(crate) window: Vec<u8>,
}

/// The places found so far while a layer is read.
#[derive(Default)]
pub(crate) struct Recording {
    pub(crate) places: Vec<RestartPoint>,
    /// Bytes of all windows.
    windows: u64,
}

impl Recording {
    fn since_last(&self, unpacked: u64) -> u64 {
        self.places.last().map_or(u64::MAX, |last| unpacked - last.unpacked)
    }

    /// True if a place at offset `unpacked` is far enough from the previous one.
    pub(crate) fn is_due(&self, unpacked: u64) -> bool {
        self.since_last(unpacked) >= SPAN_LEN
    }

    pub(crate) fn begin(&mut self, compressed: u64, unpacked: u64, start: Start) {
        self.places.push(RestartPoint { compressed, unpacked, start });
    }

    /// Sets the decoder state of the last place.
    pub(crate) fn settle(&mut self, start: Start) {
        if let Start::Inside(inside) = &start {
            self.windows += inside.window.len() as u64;
        }
        if let Some(last) = self.places.last_mut() {
            last.start = start;
        }
    }

    /// The number of places, and the bytes that they take in memory. A vector that grows takes
    /// twice its content.
    pub(crate) fn held(&self) -> (u64, u64) {
        let places = self.places.len() as u64;
        (places, places * 2 * size_of::<RestartPoint>() as u64 + self.windows)
    }

    /// Records a place that needs no decoder state, if one is due.
    pub(crate) fn may_begin(&mut self, compressed: u64, unpacked: u64) {
        if self.is_due(unpacked) {
            self.begin(compressed, unpacked, Start::Fresh);
        }
    }
}
