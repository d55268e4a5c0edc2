use burgeon_block::BLOCK_SIZE;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_SIZE as usize]);

/// Zeroed memory for whole blocks, aligned to 4 KiB as direct I/O wants it. Its pages are
/// touched when it is made, so using it later faults nothing in.
pub struct AlignedBuffer(Vec<Block>);

impl AlignedBuffer {
    /// Room for `len` bytes, rounded up to whole blocks. `None` if there is no memory.
    pub fn new(len: usize) -> Option<Self> {
        Block::new_vec_zeroed(len.div_ceil(BLOCK_SIZE as usize)).ok().map(Self)
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// All of it, to fill.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::AlignedBuffer;

    #[test]
    fn is_aligned_and_holds_whole_blocks() {
        let mut buffer = AlignedBuffer::new(5000).unwrap();
        assert_eq!(buffer.bytes().len(), 8192);
        assert_eq!(buffer.bytes_mut().as_ptr() as usize % 4096, 0);
    }
}
