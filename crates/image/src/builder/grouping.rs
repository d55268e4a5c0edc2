//! The rule by which small files share chunks.
//!
//! ```text
//!   pieces    4K  9K  60K  12K  8K │ 20K  6K …
//!                     ║          the group has `min` bytes, and the next digest says "cut"
//!                     ╚═ `alone` bytes or more: a chunk of its own, which the group goes around
//! ```
//!
//! A host that has one version of an image fetches of the next one whole chunks, however little of
//! them has changed: short chunks fetch less. Long ones compress better, and take fewer entries in
//! manifests and caches. `cargo run --release -p burgeon-image --example grouping` measures both.
//!
//! Invariant: after a change, cuts are the same again from one of the next pieces on, because they
//! depend on the pieces' contents and on the length since the last cut alone.

use burgeon_block::Digest;

use crate::CHUNK_MAX;

/// The rule by which small files, and last pieces of big ones, share chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grouping {
    /// Pieces of this length in bytes, and longer ones, are chunks of their own.
    pub alone: u32,
    /// From this length in bytes on, a group ends before a piece whose content determines a cut …
    pub min: u32,
    /// … which one piece in two to this power does, up to seven.
    pub cut_bits: u8,
}

/// Chosen by measurement (docs/performance.md, "Lengths of chunks"): the longest chunks of which a
/// rebuilt tree fetches at most four times its scattered changes, and 1.5 times a changed folder.
impl Default for Grouping {
    fn default() -> Self {
        Self { alone: 32 << 10, min: 16 << 10, cut_bits: 1 }
    }
}

impl Grouping {
    /// True if a piece of `len` bytes is a chunk of its own.
    pub(super) fn is_alone(&self, len: usize) -> bool {
        len >= self.alone.min(CHUNK_MAX) as usize
    }

    /// True if a group of `group` bytes ends before the piece of this length and digest.
    pub(super) fn ends(&self, group: usize, len: usize, digest: &Digest) -> bool {
        let cut = digest.as_bytes()[0].trailing_zeros() >= self.cut_bits.into();
        group >= self.min as usize && cut || group + len > CHUNK_MAX as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use burgeon_block::Digest;
    use testkit::Rng;

    use super::{CHUNK_MAX, Grouping};

    type Piece = (Digest, usize);

    fn pieces(rng: &mut Rng, count: usize) -> Vec<Piece> {
        let piece = |_| (Digest::of(&rng.bytes(32)), 4096 * (1 + rng.below(10)) as usize);
        (0..count).map(piece).collect()
    }

    /// The chunks of a list of pieces, as the assembler makes them.
    fn chunks(pieces: &[Piece]) -> Vec<Vec<Piece>> {
        let (rule, mut all, mut group) = (Grouping::default(), Vec::new(), Vec::<Piece>::new());
        for (digest, len) in pieces {
            let group_len: usize = group.iter().map(|(_, len)| len).sum();
            if rule.is_alone(*len) {
                all.push(vec![(*digest, *len)]);
                continue;
            }
            if rule.ends(group_len, *len, digest) {
                all.push(std::mem::take(&mut group));
            }
            group.push((*digest, *len));
        }
        all.push(group);
        all
    }

    fn bytes(chunk: &[Piece]) -> usize {
        chunk.iter().map(|(_, len)| len).sum()
    }

    #[test]
    fn scattered_changes_make_at_most_four_times_their_bytes_new() {
        let mut rng = Rng::new(3);
        let mut pieces = pieces(&mut rng, 3000);
        let before: HashSet<_> = chunks(&pieces).into_iter().collect();
        let mut changed = 0;
        for piece in pieces.iter_mut().skip(20).step_by(50) {
            piece.0 = Digest::of(&rng.bytes(32));
            changed += piece.1;
        }
        let after = chunks(&pieces);
        let new: usize =
            after.iter().filter(|chunk| !before.contains(*chunk)).map(|new| bytes(new)).sum();
        assert!((changed..=4 * changed).contains(&new), "{new} of {changed}");
        assert!(after.iter().all(|chunk| bytes(chunk) <= CHUNK_MAX as usize));
    }

    #[test]
    fn cuts_are_the_same_again_soon_after_an_inserted_piece() {
        let mut rng = Rng::new(4);
        let mut pieces = pieces(&mut rng, 1000);
        let before: HashSet<_> = chunks(&pieces).into_iter().collect();
        pieces.insert(500, (Digest::of(b"inserted"), 8192));
        let new = chunks(&pieces).iter().filter(|chunk| !before.contains(*chunk)).count();
        assert!((1..10).contains(&new), "{new}");
    }
}
