use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout};

use crate::BLOCK_SIZE;

/// One block in memory, aligned for direct I/O.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; BLOCK_SIZE as usize]);

/// A buffer of whole blocks, aligned to 4 KiB.
pub struct Pages(Vec<Page>);

impl Pages {
    /// A buffer of zeros for `len` bytes, rounded up to whole blocks. `None` if there is no
    /// memory.
    pub fn zeroed(len: u64) -> Option<Self> {
        let count = usize::try_from(len.div_ceil(BLOCK_SIZE)).ok()?;
        Page::new_vec_zeroed(count).ok().map(Self)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::Pages;

    #[test]
    fn whole_aligned_blocks() {
        let mut pages = Pages::zeroed(4097).unwrap();
        assert_eq!(pages.bytes().len(), 8192);
        assert!(pages.bytes_mut().as_ptr().addr().is_multiple_of(4096));
        assert!(Pages::zeroed(0).unwrap().bytes().is_empty());
    }
}
