//! Bugs that the simulation must find. A volume is generic over its [`Sabotage`]; the product
//! uses [`Sound`], for which every question below is the constant `false`.

/// A defect that can be put into a volume on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Bug {
    /// Cached blocks are served without their checksum being looked at.
    SkipCachedChecksum,
    /// Only the first block of a cached read is checked.
    CheckFirstBlockOnly,
    /// Blocks found in the cache file at open are believed.
    TrustReopenedCache,
    /// A bad cached block keeps its presence bit.
    KeepBadBlock,
    /// Presence bits are set before the bytes are written.
    PresenceBeforeWrite,
    /// Presence bits are set although the write failed.
    PresenceAfterFailedWrite,
    /// Fetched chunks are not checked at all.
    SkipDigest,
    /// A chunk whose digest is wrong twice is served.
    ServeAfterDigestMismatch,
    /// A wrong answer is not asked for again.
    NoRefetch,
    /// Every reader fetches for itself.
    TwoFlights,
    /// A failed flight does not wake those who wait for it.
    LostWaiter,
    /// The bytes and the seat of a failed flight are never given back.
    LeakSeat,
    /// The flight ends when the reader who started it goes away.
    DroppedReaderKillsFlight,
    /// A source is waited for without end.
    NoTimeout,
    /// A failed cache write is the reader's error.
    CacheErrorFailsRead,
    /// Cache writes go on after the file has failed.
    WriteAfterLocalIo,
    /// Cache writes never start again after the file system was full.
    NoSpaceForever,
    /// Blocks are written to the cache one block too far.
    WriteOneBlockOff,
    /// Chunks that came together in one answer are not checked.
    SkipRowDigest,
    /// The chunks of a row whose request failed are forgotten.
    LoseFailedRow,
    /// The chunks of a row are cut out of the answer one byte too early.
    CutRowOneByteOff,
    /// A mapped file is read although it is another one now.
    AcceptOtherIdentity,
    /// What was first read of a mapped file is not compared with what is read later.
    SkipFirstSeen,
    /// Of the first block of a mapped file's chunk alone the checksum is kept.
    KeepFirstChecksumOnly,
}

impl Bug {
    /// Those of the cache of an image.
    pub const ALL: [Self; 21] = [
        Self::SkipCachedChecksum,
        Self::CheckFirstBlockOnly,
        Self::TrustReopenedCache,
        Self::KeepBadBlock,
        Self::PresenceBeforeWrite,
        Self::PresenceAfterFailedWrite,
        Self::SkipDigest,
        Self::ServeAfterDigestMismatch,
        Self::NoRefetch,
        Self::TwoFlights,
        Self::LostWaiter,
        Self::LeakSeat,
        Self::DroppedReaderKillsFlight,
        Self::NoTimeout,
        Self::CacheErrorFailsRead,
        Self::WriteAfterLocalIo,
        Self::NoSpaceForever,
        Self::WriteOneBlockOff,
        Self::SkipRowDigest,
        Self::LoseFailedRow,
        Self::CutRowOneByteOff,
    ];

    /// Those of a virtual area.
    pub const AREA: [Self; 3] =
        [Self::AcceptOtherIdentity, Self::SkipFirstSeen, Self::KeepFirstChecksumOnly];
}

/// Says which bug a volume has.
pub trait Sabotage: Send + Sync + 'static {
    /// Whether `bug` is in.
    fn has(&self, bug: Bug) -> bool;
}

/// No bug on purpose.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sound;

impl Sabotage for Sound {
    #[inline(always)]
    fn has(&self, _bug: Bug) -> bool {
        false
    }
}

impl Sabotage for Option<Bug> {
    fn has(&self, bug: Bug) -> bool {
        *self == Some(bug)
    }
}
