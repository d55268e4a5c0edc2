//! The bytes on a cache device.
//!
//! ```text
//!   block 0, 1      superblock, written in turn: the valid one with the higher generation counts.
//!                   Sizes, and a record of each slow device
//!   from 2          bitmaps: a bit for each MiB of a slow device that may have been written
//!   then            log: dirty blocks of write-back (`record`), in segments; none in a small cache
//!   then            with a log: what tells each slow device from others (`identity`), twice
//!   then            index: parts of 31 sets, a word and a check of each slot
//!   then            slots: the cached blocks, 16 a set
//!   each growth     behind all that: more of the log, index, slots
//! ```
//!
//! A growth moves nothing: the superblock lists the extents, and a block that was cached before is
//! found in its old set ([`Sets`](crate::sets::Sets)). Bitmaps and identities stay as they are.
//!
//! Every block but the slots begins with a head: CRC-32C of the rest, kind, number, and the id of
//! the cache. So a block that was torn, or left by another cache, is recognised: a bitmap then
//! counts as full, and a part of the index as empty. An index carries an epoch, too: a new one
//! makes all stored parts invalid at once.
//!
//! Invariants (held by the tests below): decoding never panics, and accepts no geometry that does
//! not fit into its device.

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};
use zerocopy::{
    FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

pub use crate::layout::{DEVICES_MAX, LOG_MIN, Layout, SIZE_MIN};
use crate::{
    layout::EXTENTS_MAX,
    sets::{SETS_A_PART, WAYS},
};

/// The version of a cache that has grown.
pub const VERSION: u32 = 4;
/// The version of one that has not: earlier programs read it, too.
const VERSION_NOT_GROWN: u32 = 3;
/// Bytes of a region, for which the bitmap has a bit.
pub const REGION: u64 = 1 << 20;
/// Counters of a device.
pub const COUNTERS: usize = 16;
/// Bytes of a device's name.
pub const NAME_MAX: usize = 32;

const MAGIC: [u8; 8] = *b"burgaccl";
const BLOCK: usize = BLOCK_SIZE as usize;
const HEAD: usize = size_of::<Head>();
/// Bits of one block of a bitmap.
pub(crate) const REGIONS_A_BLOCK: u32 = ((BLOCK - HEAD) * 8) as u32;
/// Offset of the words in an index part.
const WORDS_AT: usize = BLOCK - SETS_A_PART as usize * WAYS * 8;

/// One block of the device in memory, aligned for direct I/O.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub struct Block(pub(crate) [u8; BLOCK]);

impl Block {
    /// A block of zeros.
    pub fn zeroed() -> Box<Self> {
        // The only failure is a lack of memory, which aborts elsewhere, too.
        Self::new_box_zeroed().unwrap_or_else(|_| Box::new(Self([0; BLOCK])))
    }

    /// Its bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8; BLOCK] {
        &mut self.0
    }
}

/// The kind of a block.
#[derive(Clone, Copy)]
pub(crate) enum BlockKind {
    Super = 1,
    Bitmap = 2,
    Index = 3,
    Record = 4,
    Identity = 5,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    crc: U32,
    kind: U32,
    number: U64,
    epoch: U64,
    id: [u8; 16],
}

/// Writes the head of a block.
pub(crate) fn seal(block: &mut Block, kind: BlockKind, number: u64, epoch: u64, id: [u8; 16]) {
    let mut head = Head {
        crc: 0.into(),
        kind: (kind as u32).into(),
        number: number.into(),
        epoch: epoch.into(),
        id,
    };
    block.0[..HEAD].copy_from_slice(head.as_bytes());
    head.crc = burgeon_block::crc32c(&block.0[4..]).into();
    block.0[..HEAD].copy_from_slice(head.as_bytes());
}

/// True if a block is whole and the wanted one.
pub(crate) fn is_sealed(
    block: &Block,
    kind: BlockKind,
    number: u64,
    epoch: u64,
    id: [u8; 16],
) -> bool {
    let Ok((head, _)) = Head::ref_from_prefix(&block.0) else { return false };
    head.crc.get() == burgeon_block::crc32c(&block.0[4..])
        && head.kind.get() == kind as u32
        && head.number.get() == number
        && head.epoch.get() == epoch
        && head.id == id
}

/// Number and epoch of a whole block of this kind and cache.
pub(crate) fn sealed(block: &[u8], kind: BlockKind, id: [u8; 16]) -> Option<(u64, u64)> {
    let (head, _) = Head::ref_from_prefix(block).ok()?;
    let is_it = head.kind.get() == kind as u32 && head.id == id;
    (is_it && head.crc.get() == burgeon_block::crc32c(&block[4..]))
        .then(|| (head.number.get(), head.epoch.get()))
}

/// Generations of the log that the superblock tells apart.
pub(crate) const STARTS_MAX: usize = 32;
/// No segment is open.
const NONE_OPEN: u32 = u32::MAX;

/// The state of the log, as the superblock has it.
///
/// A record counts if its number is not below `tail`, and lies within the range of its generation:
/// from the generation's own start to that of the next one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LogHead {
    /// The first record that counts.
    pub(crate) tail: u64,
    /// The segment that is being filled.
    pub(crate) open: Option<u32>,
    /// Generations, and the numbers of their first records; both grow. At least one.
    pub(crate) starts: Vec<(u64, u64)>,
}

impl LogHead {
    fn new() -> Self {
        Self { tail: 1, open: None, starts: vec![(1, 1)] }
    }

    /// True if a record counts.
    pub(crate) fn counts(&self, generation: u64, number: u64) -> bool {
        let after = self.starts.iter().position(|(start, _)| *start > generation);
        let after = after.unwrap_or(self.starts.len());
        let Some((_, first)) = after.checked_sub(1).and_then(|at| self.starts.get(at)) else {
            return false;
        };
        let is_newest = self.starts.last().is_some_and(|(newest, _)| *newest >= generation);
        let end = self.starts.get(after).map_or(u64::MAX, |(_, first)| *first);
        is_newest && number >= self.tail.max(*first) && number < end
    }

    /// Begins a generation whose first record is `first`: no earlier generation has it.
    pub(crate) fn begin(&mut self, generation: u64, first: u64) {
        let tail = self.tail;
        while self.starts.get(1).is_some_and(|(_, first)| *first <= tail) {
            self.starts.remove(0);
        }
        if self.starts.len() == STARTS_MAX {
            // The two oldest are not told apart any more.
            self.starts.remove(1);
        }
        self.starts.push((generation, first));
        self.open = None;
    }
}

/// A slow device that the cache knows.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceRecord {
    pub(crate) used: U32,
    pub(crate) bitmap_first: U32,
    pub(crate) bitmap_blocks: U32,
    reserved: U32,
    pub(crate) size: U64,
    /// Records of the log below this number have no dirty blocks of this device.
    pub(crate) tail: U64,
    pub(crate) name: [u8; NAME_MAX],
    pub(crate) counters: [U64; COUNTERS],
}

impl DeviceRecord {
    pub(crate) fn empty() -> Self {
        Self::new_zeroed()
    }

    /// Its name.
    pub fn name(&self) -> String {
        let name = self.name.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).into_owned()
    }
}

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawSuper {
    head: [u8; HEAD],
    magic: [u8; 8],
    version: U32,
    sets: U32,
    id: [u8; 16],
    generation: U64,
    epoch: U64,
    size: U64,
    bitmap_blocks: U32,
    log_blocks: U32,
    devices: [DeviceRecord; DEVICES_MAX],
    log_tail: U64,
    log_open: U32,
    log_starts: U32,
    starts: [[U64; 2]; STARTS_MAX],
    /// Growths, and the extent of each.
    growths: U64,
    grown: [RawExtent; EXTENTS_MAX - 1],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawExtent {
    /// Bytes of the device that are used, with this extent.
    size: U64,
    log_blocks: U32,
    sets: U32,
}

const _: () = assert!(size_of::<RawSuper>() <= BLOCK, "the superblock is one block");

/// The superblock.
#[derive(Clone)]
pub struct Super {
    /// Id of this cache, random.
    pub id: [u8; 16],
    /// Number of this write of the superblock.
    pub generation: u64,
    /// Parts of the index with another epoch are invalid.
    pub epoch: u64,
    /// Places of the parts.
    pub layout: Layout,
    pub(crate) log: LogHead,
    pub(crate) devices: [DeviceRecord; DEVICES_MAX],
}

impl Super {
    /// The superblock of a new cache.
    pub fn new(id: [u8; 16], layout: Layout) -> Self {
        let devices = [DeviceRecord::new_zeroed(); DEVICES_MAX];
        Self { id, generation: 1, epoch: 1, layout, log: LogHead::new(), devices }
    }

    /// As a block.
    pub fn encode(&self) -> Box<Block> {
        let mut starts = [[U64::new(0); 2]; STARTS_MAX];
        for (raw, (generation, first)) in starts.iter_mut().zip(&self.log.starts) {
            *raw = [(*generation).into(), (*first).into()];
        }
        let raw_extent = |(size, log_blocks, sets): (u64, u32, u32)| RawExtent {
            size: size.into(),
            log_blocks: log_blocks.into(),
            sets: sets.into(),
        };
        let extents: Vec<_> = self.layout.extents().map(raw_extent).collect();
        let (first, growths) = (extents[0], &extents[1..]);
        let mut grown = [RawExtent::new_zeroed(); EXTENTS_MAX - 1];
        grown[..growths.len()].copy_from_slice(growths);
        let version = if growths.is_empty() { VERSION_NOT_GROWN } else { VERSION };
        let raw = RawSuper {
            head: [0; HEAD],
            magic: MAGIC,
            version: version.into(),
            sets: first.sets,
            id: self.id,
            generation: self.generation.into(),
            epoch: self.epoch.into(),
            size: first.size,
            bitmap_blocks: self.layout.bitmap_blocks.into(),
            log_blocks: first.log_blocks,
            devices: self.devices,
            log_tail: self.log.tail.into(),
            log_open: self.log.open.unwrap_or(NONE_OPEN).into(),
            log_starts: (self.log.starts.len() as u32).into(),
            starts,
            growths: (growths.len() as u64).into(),
            grown,
        };
        let mut block = Block::zeroed();
        block.0[..size_of::<RawSuper>()].copy_from_slice(raw.as_bytes());
        seal(&mut block, BlockKind::Super, 0, 0, self.id);
        block
    }

    /// The superblock in `block`, of a device of `size` bytes.
    /// `NotFound` if it holds none, `Corrupt` if it is damaged,
    /// `UnsupportedFormat` if another version made it, `Invalid` if the device has shrunk.
    pub fn decode(block: &Block, size: u64) -> Result<Self> {
        let fail = |kind, what: String| Err(Error::new(kind, what));
        let Ok((raw, _)) = RawSuper::read_from_prefix(&block.0) else {
            return fail(ErrorKind::Corrupt, "a superblock is shorter than a block".into());
        };
        if raw.magic != MAGIC {
            return fail(ErrorKind::NotFound, "it holds no cache of Burgeon".into());
        }
        let version = raw.version.get();
        if ![VERSION_NOT_GROWN, VERSION].contains(&version) {
            let remedy = match version < VERSION {
                true => {
                    "make it anew (`burgeon accelerate destroy --accept-loss`, `create`): the slow devices have \
                     everything"
                }
                // It may have data that no slow device has.
                false => "use the version of Burgeon that made it",
            };
            let what = format!(
                "its cache has format {version}, and this program knows format {VERSION}: {remedy}"
            );
            return fail(ErrorKind::UnsupportedFormat, what);
        }
        if !is_sealed(block, BlockKind::Super, 0, 0, raw.id) {
            return fail(ErrorKind::Corrupt, "the superblock of its cache is damaged".into());
        }
        let disagree = || fail(ErrorKind::Corrupt, "the sizes in its superblock disagree".into());
        let mut layout = Layout::with_log(raw.size.get(), raw.log_blocks.get())?;
        if (layout.sets, layout.bitmap_blocks) != (raw.sets.get(), raw.bitmap_blocks.get()) {
            return disagree();
        }
        let growths = if version == VERSION { raw.growths.get() } else { 0 };
        if growths as usize > raw.grown.len() {
            return disagree();
        }
        for extent in raw.grown.iter().take(growths as usize) {
            let before = layout.sets;
            layout = layout.extended(extent.size.get(), extent.log_blocks.get())?;
            if layout.sets - before != extent.sets.get() {
                return disagree();
            }
        }
        if layout.size > size {
            let what = format!("it has {size} bytes, and its cache was made for {}", layout.size);
            return fail(ErrorKind::Invalid, what);
        }
        let fits = |record: &DeviceRecord| {
            let end = record.bitmap_first.get().checked_add(record.bitmap_blocks.get());
            let regions = record.size.get().div_ceil(REGION);
            record.used.get() == 0
                || (end.is_some_and(|end| end <= layout.bitmap_blocks)
                    && regions
                        <= u64::from(record.bitmap_blocks.get()) * u64::from(REGIONS_A_BLOCK))
        };
        if !raw.devices.iter().all(fits) {
            return fail(ErrorKind::Corrupt, "a record of a slow device makes no sense".into());
        }
        let starts = raw.starts.iter().take(raw.log_starts.get() as usize);
        let starts: Vec<_> = starts.map(|[start, first]| (start.get(), first.get())).collect();
        let grow = starts.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1);
        if starts.is_empty() || raw.log_starts.get() as usize > STARTS_MAX || !grow {
            return fail(ErrorKind::Corrupt, "the generations of its log make no sense".into());
        }
        let open = Some(raw.log_open.get()).filter(|open| *open != NONE_OPEN);
        Ok(Self {
            log: LogHead { tail: raw.log_tail.get(), open, starts },
            id: raw.id,
            generation: raw.generation.get(),
            epoch: raw.epoch.get(),
            layout,
            devices: raw.devices,
        })
    }
}

/// Words and checks of a part of the index, as a block.
pub(crate) fn encode_part(
    part: u32,
    words: impl Iterator<Item = (u32, u32)>,
    epoch: u64,
    id: [u8; 16],
) -> Box<Block> {
    let mut block = Block::zeroed();
    for (entry, (word, check)) in block.0[WORDS_AT..].chunks_exact_mut(8).zip(words) {
        entry[..4].copy_from_slice(&word.to_le_bytes());
        entry[4..].copy_from_slice(&check.to_le_bytes());
    }
    seal(&mut block, BlockKind::Index, part.into(), epoch, id);
    block
}

/// The words and checks of a stored part; `None` if it is another's, or damaged.
pub(crate) fn decode_part(
    block: &Block,
    part: u32,
    epoch: u64,
    id: [u8; 16],
) -> Option<impl Iterator<Item = (u32, u32)>> {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    is_sealed(block, BlockKind::Index, part.into(), epoch, id).then(|| {
        let entries = block.0[WORDS_AT..].chunks_exact(8);
        entries.map(move |entry| (number(&entry[..4]), number(&entry[4..])))
    })
}

/// The bits of a block of a bitmap, as a block.
pub(crate) fn encode_bits(bits: &[u8], block: u32, id: [u8; 16]) -> Box<Block> {
    let mut stored = Block::zeroed();
    stored.0[HEAD..HEAD + bits.len()].copy_from_slice(bits);
    seal(&mut stored, BlockKind::Bitmap, block.into(), 0, id);
    stored
}

/// The bits of a stored block of a bitmap: all ones if it is another's, or damaged.
pub(crate) fn decode_bits(stored: &Block, block: u32, id: [u8; 16], bits: &mut [u8]) {
    match is_sealed(stored, BlockKind::Bitmap, block.into(), 0, id) {
        true => bits.copy_from_slice(&stored.0[HEAD..HEAD + bits.len()]),
        false => bits.fill(0xff),
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::ErrorKind;
    use proptest::prelude::*;

    use super::*;

    const ID: [u8; 16] = [7; 16];

    #[test]
    fn a_superblock_comes_back_and_each_damage_has_its_error() {
        let layout = Layout::new(SIZE_MIN).unwrap();
        let mut written = Super::new(ID, layout);
        written.generation = 9;
        let block = written.encode();
        let read = Super::decode(&block, SIZE_MIN).unwrap();
        assert_eq!((read.id, read.generation, read.layout), (ID, 9, layout));
        let kind = |block: &Block, size| Super::decode(block, size).map(drop).unwrap_err().kind();
        assert_eq!(kind(&Block::zeroed(), SIZE_MIN), ErrorKind::NotFound);
        assert_eq!(kind(&block, SIZE_MIN - 4096), ErrorKind::Invalid);
        let mut damaged = Block(block.0);
        damaged.0[200] ^= 1;
        assert_eq!(kind(&damaged, SIZE_MIN), ErrorKind::Corrupt);
        let mut newer = Block(block.0);
        newer.0[HEAD + 8] = 5;
        assert_eq!(kind(&newer, SIZE_MIN), ErrorKind::UnsupportedFormat);
    }

    #[test]
    fn a_cache_has_the_earlier_version_until_it_grows() {
        let layout = Layout::new(8 << 20).unwrap();
        let block = Super::new(ID, layout).encode();
        assert_eq!(block.0[HEAD + 8], 3);
        let grown = layout.grown(20 << 20).unwrap().grown(30 << 20).unwrap();
        let mut head = Super::new(ID, grown);
        head.generation = 3;
        let mut block = head.encode();
        assert_eq!(block.0[HEAD + 8], 4);
        assert_eq!(Super::decode(&block, 30 << 20).unwrap().layout, grown);
        let error = Super::decode(&block, (30 << 20) - 4096).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        // More growths than there can be, and one whose log has no whole segments.
        let at = std::mem::offset_of!(RawSuper, growths);
        for (at, value) in [(at, 8), (at + 16, 1)] {
            let byte = std::mem::replace(&mut block.0[at], value);
            seal(&mut block, BlockKind::Super, 0, 0, ID);
            assert!(Super::decode(&block, 30 << 20).is_err(), "{at}");
            block.0[at] = byte;
        }
        seal(&mut block, BlockKind::Super, 0, 0, ID);
        assert!(Super::decode(&block, 30 << 20).is_ok());
    }

    #[test]
    fn a_damaged_bitmap_is_full_and_a_damaged_part_empty() {
        let mut bits = [0; 4];
        let mut block = encode_bits(&[1, 2, 3, 4], 5, ID);
        decode_bits(&block, 5, ID, &mut bits);
        assert_eq!(bits, [1, 2, 3, 4]);
        decode_bits(&block, 6, ID, &mut bits);
        assert_eq!(bits, [0xff; 4]);
        block.0[100] ^= 1;
        decode_bits(&block, 5, ID, &mut bits);
        assert_eq!(bits, [0xff; 4]);
        let block = encode_part(3, [(1, 2), (3, 4)].into_iter(), 8, ID);
        assert_eq!(decode_part(&block, 3, 8, ID).unwrap().nth(1), Some((3, 4)));
        assert!(decode_part(&block, 3, 9, ID).is_none() && decode_part(&block, 2, 8, ID).is_none());
    }

    proptest! {
        #[test]
        fn hostile_superblocks_do_no_harm(
            at in 0usize..BLOCK,
            bytes in proptest::collection::vec(any::<u8>(), 1..64),
            sealed: bool,
        ) {
            let layout = Layout::new(SIZE_MIN / 4 * 5).unwrap();
            let grown = layout.grown(SIZE_MIN * 2).unwrap().grown(SIZE_MIN * 3).unwrap();
            let mut block = Super::new(ID, grown).encode();
            let end = (at + bytes.len()).min(BLOCK);
            block.0[at..end].copy_from_slice(&bytes[..end - at]);
            if sealed {
                seal(&mut block, BlockKind::Super, 0, 0, ID);
            }
            if let Ok(read) = Super::decode(&block, 3 * SIZE_MIN) {
                prop_assert!(read.layout.size <= 3 * SIZE_MIN);
            }
        }
    }
}
