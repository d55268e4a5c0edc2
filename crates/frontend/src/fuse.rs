//! The FUSE protocol (`linux/fuse.h`, 7.31 and later) as far as a read-only file system that is
//! one regular file needs it. Pure: bytes in, bytes out.
//!
//! ```text
//!   request   InHeader 40 B │ arguments of the opcode
//!   reply     OutHeader 16 B │ payload, or nothing after an error
//! ```
//!
//! Numbers are in the machine's byte order, as the kernel's.

use burgeon_block::BLOCK_SIZE;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The longest read asked for, in bytes: one chunk. The loop's bigger reads are cut to this.
pub(crate) const READ_MAX: usize = 256 << 10;
/// A read buffer may not be shorter, or `/dev/fuse` refuses (the kernel's FUSE_MIN_READ_BUFFER).
pub(crate) const READ_BUFFER_MIN: usize = 8192;
/// Bytes of a request that tell all: its header and the longest arguments that matter here.
pub(crate) const RING_REQUEST_LEN: usize = size_of::<InHeader>() + size_of::<ReadIn>();
/// Reads that the kernel has in flight at once. A loop device queues 128 requests.
const BACKGROUND_MAX: u16 = 256;

const FLAG_ASYNC_READ: u64 = 1 << 0;
/// Several direct reads of one file at once: without it a loop at depth 64 is four times slower.
const FLAG_ASYNC_DIO: u64 = 1 << 15;
const FLAG_MAX_PAGES: u64 = 1 << 22;
const FLAG_INIT_EXT: u64 = 1 << 30;
/// Requests over io_uring; offered where the module parameter `enable_uring` is set.
const FLAG_OVER_IO_URING: u64 = 1 << 41;
const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// Closing the file asks nothing: it works while no server runs.
const FOPEN_NOFLUSH: u32 = 1 << 5;
/// How long the kernel may trust the attributes: they never change.
const ATTRIBUTES_VALID_S: u64 = 1 << 32;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InHeader {
    /// Length of the whole request in bytes; never 0.
    pub(crate) len: u32,
    opcode: u32,
    /// Names the request: the reply carries it.
    pub(crate) unique: u64,
    node: u64,
    uid: u32,
    gid: u32,
    pid: u32,
    extensions: u32,
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ReadIn {
    file: u64,
    offset: u64,
    size: u32,
    read_flags: u32,
    lock_owner: u64,
    flags: u32,
    padding: u32,
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InitIn {
    major: u32,
    minor: u32,
    readahead_max: u32,
    flags: u32,
    flags2: u32,
}

#[derive(IntoBytes, Immutable, FromZeros)]
#[repr(C)]
pub(crate) struct OutHeader {
    len: u32,
    error: i32,
    unique: u64,
}

#[derive(IntoBytes, Immutable, FromZeros)]
#[repr(C)]
struct InitOut {
    major: u32,
    minor: u32,
    readahead_max: u32,
    flags: u32,
    background_max: u16,
    congestion: u16,
    write_max: u32,
    time_granularity_ns: u32,
    pages_max: u16,
    map_alignment: u16,
    flags2: u32,
    unused: [u32; 7],
}

#[derive(IntoBytes, Immutable, FromZeros)]
#[repr(C)]
struct AttrOut {
    valid_s: u64,
    valid_ns: u32,
    dummy: u32,
    inode: u64,
    size: u64,
    sectors: u64,
    times_s: [u64; 3],
    times_ns: [u32; 3],
    mode: u32,
    links: u32,
    uid: u32,
    gid: u32,
    rdev: u32,
    block_size: u32,
    flags: u32,
}

#[derive(IntoBytes, Immutable, FromZeros)]
#[repr(C)]
struct OpenOut {
    file: u64,
    flags: u32,
    backing: u32,
}

#[derive(IntoBytes, Immutable, FromZeros)]
#[repr(C)]
struct StatFsOut {
    blocks: u64,
    free: u64,
    available: u64,
    files: u64,
    files_free: u64,
    block_size: u32,
    name_len: u32,
    fragment_size: u32,
    padding: u32,
    spare: [u32; 6],
}

/// Mode of the one file: regular, readable. The mount option `rootmode` has to agree.
pub(crate) const FILE_MODE: u32 = libc::S_IFREG | 0o444;

/// What a request wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    /// Bytes of the file.
    Read { offset: u64, len: u32 },
    /// Size and mode of the file.
    Attributes,
    /// A handle; it is always 0.
    Open,
    /// Size of the file system.
    StatFs,
    /// Nothing but a yes.
    Agree,
    /// Nothing at all: this kind of request has no reply.
    Silence,
    /// Something that a read-only file has not: this errno.
    Refuse(i32),
}

/// A request as far as serving it needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub(crate) unique: u64,
    pub(crate) operation: Operation,
}

impl Request {
    /// Understands the first bytes of a request; `None` if they are no request. An argument that
    /// matters here always lies in the first 80 bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (header, arguments) = InHeader::read_from_prefix(bytes).ok()?;
        let operation = match header.opcode {
            15 => {
                let (read, _) = ReadIn::read_from_prefix(arguments).ok()?;
                Operation::Read { offset: read.offset, len: read.size }
            }
            3 => Operation::Attributes,
            14 => Operation::Open,
            17 => Operation::StatFs,
            // RELEASE, FSYNC, FLUSH, ACCESS, DESTROY
            18 | 20 | 25 | 34 | 38 => Operation::Agree,
            // FORGET, BATCH_FORGET
            2 | 42 => Operation::Silence,
            // SETATTR, WRITE, SETXATTR, REMOVEXATTR, FALLOCATE, COPY_FILE_RANGE
            4 | 16 | 21 | 24 | 43 | 47 => Operation::Refuse(libc::EROFS),
            // Among the rest is INTERRUPT: ENOSYS tells the kernel to send no more of them. A
            // reader who is killed gets away at once all the same.
            _ => Operation::Refuse(libc::ENOSYS),
        };
        Some(Self { unique: header.unique, operation })
    }
}

impl InitIn {
    /// Whether `flags2` means anything.
    fn flags_are_extended(&self) -> bool {
        u64::from(self.flags) & FLAG_INIT_EXT != 0
    }
}

impl OutHeader {
    /// The header before `payload_len` bytes of payload.
    pub(crate) fn answer(unique: u64, payload_len: usize) -> Self {
        Self { len: (size_of::<Self>() + payload_len) as u32, error: 0, unique }
    }

    /// The whole reply when there is nothing but a positive `errno`.
    pub(crate) fn error(unique: u64, errno: i32) -> Self {
        Self { len: size_of::<Self>() as u32, error: -errno, unique }
    }
}

/// The payload of a small reply about a file of `size` bytes. Empty for the rest.
pub(crate) fn small_payload(operation: Operation, size: u64, out: &mut [u8; 104]) -> &[u8] {
    match operation {
        Operation::Attributes => put(
            out,
            AttrOut {
                valid_s: ATTRIBUTES_VALID_S,
                inode: 1,
                size,
                sectors: size / 512,
                mode: FILE_MODE,
                links: 1,
                block_size: BLOCK_SIZE as u32,
                ..AttrOut::new_zeroed()
            },
        ),
        Operation::Open => {
            put(out, OpenOut { flags: FOPEN_DIRECT_IO | FOPEN_NOFLUSH, ..OpenOut::new_zeroed() })
        }
        Operation::StatFs => put(
            out,
            StatFsOut {
                blocks: size / BLOCK_SIZE,
                files: 1,
                block_size: BLOCK_SIZE as u32,
                fragment_size: BLOCK_SIZE as u32,
                name_len: 255,
                ..StatFsOut::new_zeroed()
            },
        ),
        _ => &[],
    }
}

fn put<T: IntoBytes + Immutable>(out: &mut [u8; 104], value: T) -> &[u8] {
    let bytes = value.as_bytes();
    out[..bytes.len()].copy_from_slice(bytes);
    &out[..bytes.len()]
}

/// What the kernel's first request, INIT, says; and whether it can be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Init {
    /// Send this reply; whether requests will then come over io_uring.
    Reply { bytes: [u8; 80], rings: bool },
    /// Not an INIT, or of another major protocol version than 7, or without a feature needed.
    Unusable,
}

/// The answer to INIT: direct, parallel reads of up to [`READ_MAX`] bytes; over io_uring if
/// `rings` are wanted and offered.
pub(crate) fn answer_init(request: &[u8], rings: bool) -> Init {
    let Ok((header, arguments)) = InHeader::read_from_prefix(request) else {
        return Init::Unusable;
    };
    let Ok((init, _)) = InitIn::read_from_prefix(arguments) else { return Init::Unusable };
    let wanted = FLAG_ASYNC_READ | FLAG_ASYNC_DIO | FLAG_MAX_PAGES;
    if header.opcode != 26 || init.major != 7 || u64::from(init.flags) & wanted != wanted {
        return Init::Unusable;
    }
    let offered = u64::from(init.flags2) << 32;
    let rings = rings && init.flags_are_extended() && offered & FLAG_OVER_IO_URING != 0;
    let more = if rings { FLAG_OVER_IO_URING } else { 0 };
    let flags = wanted | more | (u64::from(init.flags) & FLAG_INIT_EXT);
    let payload = InitOut {
        major: 7,
        minor: init.minor.min(45),
        readahead_max: init.readahead_max,
        flags: flags as u32,
        flags2: (flags >> 32) as u32,
        background_max: BACKGROUND_MAX,
        congestion: BACKGROUND_MAX / 4 * 3,
        write_max: BLOCK_SIZE as u32,
        time_granularity_ns: 1,
        pages_max: (READ_MAX / BLOCK_SIZE as usize) as u16,
        ..InitOut::new_zeroed()
    };
    let mut bytes = [0; 80];
    let header = OutHeader::answer(header.unique, size_of::<InitOut>());
    bytes[..16].copy_from_slice(header.as_bytes());
    bytes[16..].copy_from_slice(payload.as_bytes());
    Init::Reply { bytes, rings }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, arguments: &[u8]) -> Vec<u8> {
        let header = InHeader {
            len: (size_of::<InHeader>() + arguments.len()) as u32,
            opcode,
            unique: 7,
            ..InHeader::new_zeroed()
        };
        [header.as_bytes(), arguments].concat()
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<InHeader>(), 40);
        assert_eq!(size_of::<ReadIn>(), 40);
        assert_eq!(size_of::<OutHeader>(), 16);
        assert_eq!(size_of::<InitOut>(), 64);
        assert_eq!(size_of::<AttrOut>(), 104);
        assert_eq!(size_of::<OpenOut>(), 16);
        assert_eq!(size_of::<StatFsOut>(), 80);
    }

    #[test]
    fn a_read_is_understood() {
        let mut arguments = [0; 40];
        arguments[8..16].copy_from_slice(&(1u64 << 40).to_ne_bytes());
        arguments[16..20].copy_from_slice(&4096u32.to_ne_bytes());
        let read = Operation::Read { offset: 1 << 40, len: 4096 };
        let bytes = request(15, &arguments);
        assert_eq!(Request::parse(&bytes), Some(Request { unique: 7, operation: read }));
        assert_eq!(Request::parse(&bytes[..79]), None);
    }

    #[test]
    fn writes_are_refused_and_unknown_requests_named_so() {
        for (opcode, errno) in [(16, libc::EROFS), (4, libc::EROFS), (36, libc::ENOSYS)] {
            let parsed = Request::parse(&request(opcode, &[])).unwrap();
            assert_eq!(parsed.operation, Operation::Refuse(errno));
        }
        assert_eq!(Request::parse(&request(2, &[])).unwrap().operation, Operation::Silence);
        assert_eq!(Request::parse(&[0; 39]), None);
    }

    #[test]
    fn init_needs_version_7_and_parallel_direct_reads() {
        let arguments = |major: u32, flags: u64| {
            [major, 45, 131_072, flags as u32, (flags >> 32) as u32].map(u32::to_ne_bytes).concat()
        };
        let all = FLAG_ASYNC_READ | FLAG_ASYNC_DIO | FLAG_MAX_PAGES | FLAG_INIT_EXT;
        let Init::Reply { bytes, rings: false } =
            answer_init(&request(26, &arguments(7, all)), true)
        else {
            panic!("refused a good INIT");
        };
        assert_eq!(bytes[..4], 80u32.to_ne_bytes());
        assert_eq!(bytes[8..16], 7u64.to_ne_bytes());
        let unusable = |bytes: &[u8]| assert_eq!(answer_init(bytes, false), Init::Unusable);
        unusable(&request(26, &arguments(8, all)));
        unusable(&request(26, &arguments(7, all & !FLAG_ASYNC_DIO)));
        unusable(&request(15, &arguments(7, all)));
        unusable(&request(26, &[])[..40]);
    }

    #[test]
    fn rings_are_taken_when_wanted_and_offered() {
        let all = FLAG_ASYNC_READ | FLAG_ASYNC_DIO | FLAG_MAX_PAGES | FLAG_INIT_EXT;
        let taken = |flags: u64, wanted: bool| {
            let words = [7, 45, 131_072, flags as u32, (flags >> 32) as u32];
            let request = request(26, &words.map(u32::to_ne_bytes).concat());
            let Init::Reply { bytes, rings } = answer_init(&request, wanted) else {
                panic!("refused a good INIT");
            };
            // `flags2` of the reply: 16 bytes of header, and 32 of the payload.
            let said = u32::from_ne_bytes([bytes[48], bytes[49], bytes[50], bytes[51]]);
            assert_eq!(u64::from(said) << 32 & FLAG_OVER_IO_URING != 0, rings);
            rings
        };
        assert!(taken(all | FLAG_OVER_IO_URING, true));
        assert!(!taken(all | FLAG_OVER_IO_URING, false));
        assert!(!taken(all, true));
        // Without the extension the upper half is not flags at all.
        assert!(!taken((all | FLAG_OVER_IO_URING) & !FLAG_INIT_EXT, true));
    }
}
