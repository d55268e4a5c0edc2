//! The FUSE protocol (`linux/fuse.h`, 7.31 and later) as far as a file system that is one regular
//! file needs it. Pure: bytes in, bytes out.
//!
//! ```text
//!   request   InHeader 40 B │ arguments of the opcode
//!   reply     OutHeader 16 B │ payload, or nothing after an error
//! ```
//!
//! Numbers are in the machine's byte order, as the kernel's.

use burgeon_block::{BLOCK_SIZE, Erase, Shape, WriteCache};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::engine::{LEN_MAX, Request as DeviceRequest};

/// A read buffer may not be shorter, or `/dev/fuse` refuses (the kernel's FUSE_MIN_READ_BUFFER).
pub(crate) const READ_BUFFER_MIN: usize = 8192;
/// Bytes of a request that tell all: its header and the longest arguments that matter here.
pub(crate) const RING_REQUEST_LEN: usize = size_of::<InHeader>() + size_of::<ReadIn>();
/// Requests that the kernel has in flight at once. A loop device queues 128.
const BACKGROUND_MAX: u16 = 256;
/// The same for a file that is written to: the bytes of its writes take at most 32 MiB at once.
const BACKGROUND_WRITABLE_MAX: u16 = 128;
/// The code of a notification that makes the kernel send unanswered requests again (Linux 6.9).
const NOTIFY_RESEND: i32 = 7;

const FLAG_ASYNC_READ: u64 = 1 << 0;
/// Several direct reads of one file at once: without it a loop at depth 64 is four times slower.
const FLAG_ASYNC_DIO: u64 = 1 << 15;
/// Writes of more than a page.
const FLAG_BIG_WRITES: u64 = 1 << 5;
const FLAG_MAX_PAGES: u64 = 1 << 22;
const FLAG_INIT_EXT: u64 = 1 << 30;
/// Requests over io_uring; offered where the module parameter `enable_uring` is set.
const FLAG_OVER_IO_URING: u64 = 1 << 41;
const FLAG_HAS_RESEND: u64 = 1 << 39;
const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// Closing the file asks nothing: it works while no server runs.
const FOPEN_NOFLUSH: u32 = 1 << 5;
/// Validity of the attributes in the kernel: they never change.
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

/// Length of a WRITE before its payload.
pub(crate) const WRITE_HEAD_LEN: usize = size_of::<InHeader>() + size_of::<WriteIn>();

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct WriteIn {
    file: u64,
    offset: u64,
    size: u32,
    write_flags: u32,
    lock_owner: u64,
    flags: u32,
    padding: u32,
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FallocateIn {
    file: u64,
    offset: u64,
    length: u64,
    mode: u32,
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

/// Mode of the one file: regular, readable. The mount option `rootmode` has to agree in its kind.
pub(crate) const FILE_MODE: u32 = libc::S_IFREG | 0o444;
const WRITABLE_MODE: u32 = libc::S_IFREG | 0o644;

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    /// The device's bytes, to be read or changed.
    Device(DeviceRequest),
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
    /// Something that the file has not: this errno.
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
                Operation::Device(DeviceRequest::Read { at: read.offset, len: read.size as usize })
            }
            16 => {
                let (write, _) = WriteIn::read_from_prefix(arguments).ok()?;
                let fua = write.flags & libc::O_DSYNC as u32 != 0;
                let len = write.size as usize;
                Operation::Device(DeviceRequest::Write { at: write.offset, len, fua })
            }
            20 => Operation::Device(DeviceRequest::Flush),
            43 => {
                let (range, _) = FallocateIn::read_from_prefix(arguments).ok()?;
                match erasure(range.mode) {
                    Some(how) => Operation::Device(DeviceRequest::Erase {
                        at: range.offset,
                        len: range.length,
                        how,
                    }),
                    None => Operation::Refuse(libc::EOPNOTSUPP),
                }
            }
            3 => Operation::Attributes,
            14 => Operation::Open,
            17 => Operation::StatFs,
            // RELEASE, FLUSH, ACCESS, DESTROY
            18 | 25 | 34 | 38 => Operation::Agree,
            // FORGET, BATCH_FORGET
            2 | 42 => Operation::Silence,
            // SETATTR, SETXATTR, REMOVEXATTR, COPY_FILE_RANGE
            4 | 21 | 24 | 47 => Operation::Refuse(libc::EROFS),
            // Among the rest is INTERRUPT: ENOSYS tells the kernel to send no more of them. A
            // reader that is killed need not wait for the answer in any case.
            _ => Operation::Refuse(libc::ENOSYS),
        };
        Some(Self { unique: header.unique, operation })
    }
}

/// The erasure of a FALLOCATE with this mode; `None` if it allocates. A loop device punches holes
/// both to discard and to write zeros, so a punched range has to read as zeros.
fn erasure(mode: u32) -> Option<Erase> {
    const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
    const PUNCH: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32;
    const ZERO: u32 = libc::FALLOC_FL_ZERO_RANGE as u32;
    match mode & !KEEP_SIZE {
        PUNCH => Some(Erase::Zeroes { unmap: true }),
        ZERO => Some(Erase::Zeroes { unmap: false }),
        _ => None,
    }
}

impl InitIn {
    /// True if `flags2` means anything.
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

/// The message that makes the kernel send all requests again that are read and not answered.
pub(crate) fn resend() -> OutHeader {
    OutHeader { len: size_of::<OutHeader>() as u32, error: NOTIFY_RESEND, unique: 0 }
}

/// The payload of the reply to a write of `len` bytes.
pub(crate) fn written(len: usize) -> [u8; 8] {
    (len as u64 & u64::from(u32::MAX)).to_ne_bytes()
}

/// The payload of a small reply about the file of a device. Empty for the rest.
pub(crate) fn small_payload<'a>(
    operation: Operation,
    shape: &Shape,
    out: &'a mut [u8; 104],
) -> &'a [u8] {
    let size = shape.size;
    match operation {
        Operation::Attributes => put(
            out,
            AttrOut {
                valid_s: ATTRIBUTES_VALID_S,
                inode: 1,
                size,
                sectors: size / 512,
                mode: if shape.cache == WriteCache::ReadOnly { FILE_MODE } else { WRITABLE_MODE },
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

/// The outcome of INIT, the kernel's first request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Init {
    /// Send this reply; whether requests will then come over io_uring, and whether those of a dead
    /// server are sent again.
    Reply { bytes: [u8; 80], rings: bool, resends: bool },
    /// Not an INIT, or of another major protocol version than 7, or without a feature needed.
    Unusable,
}

/// The abilities that a connection is made for.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Features {
    /// Requests over io_uring, if the kernel offers that.
    pub(crate) rings: bool,
    /// Writes.
    pub(crate) writes: bool,
}

/// The answer to INIT: direct, parallel reads and writes of up to [`LEN_MAX`] bytes.
pub(crate) fn answer_init(request: &[u8], features: Features) -> Init {
    let Ok((header, arguments)) = InHeader::read_from_prefix(request) else {
        return Init::Unusable;
    };
    let Ok((init, _)) = InitIn::read_from_prefix(arguments) else { return Init::Unusable };
    let writes = if features.writes { FLAG_BIG_WRITES } else { 0 };
    let wanted = FLAG_ASYNC_READ | FLAG_ASYNC_DIO | FLAG_MAX_PAGES | writes;
    if header.opcode != 26 || init.major != 7 || u64::from(init.flags) & wanted != wanted {
        return Init::Unusable;
    }
    let offered = u64::from(init.flags2) << 32;
    let offered = if init.flags_are_extended() { offered } else { 0 };
    let rings = features.rings && offered & FLAG_OVER_IO_URING != 0;
    let more = if rings { FLAG_OVER_IO_URING } else { 0 };
    let resends = features.writes && offered & FLAG_HAS_RESEND != 0;
    let more = more | if resends { FLAG_HAS_RESEND } else { 0 };
    let background = if features.writes { BACKGROUND_WRITABLE_MAX } else { BACKGROUND_MAX };
    let flags = wanted | more | (u64::from(init.flags) & FLAG_INIT_EXT);
    let payload = InitOut {
        major: 7,
        minor: init.minor.min(45),
        readahead_max: init.readahead_max,
        flags: flags as u32,
        flags2: (flags >> 32) as u32,
        background_max: background,
        congestion: background / 4 * 3,
        write_max: if features.writes { LEN_MAX as u32 } else { BLOCK_SIZE as u32 },
        time_granularity_ns: 1,
        pages_max: (LEN_MAX / BLOCK_SIZE as usize) as u16,
        ..InitOut::new_zeroed()
    };
    let mut bytes = [0; 80];
    let header = OutHeader::answer(header.unique, size_of::<InitOut>());
    bytes[..16].copy_from_slice(header.as_bytes());
    bytes[16..].copy_from_slice(payload.as_bytes());
    Init::Reply { bytes, rings, resends }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RINGS: Features = Features { rings: true, writes: false };

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
        assert_eq!((size_of::<ReadIn>(), size_of::<WriteIn>()), (40, 40));
        assert_eq!(size_of::<FallocateIn>(), 32);
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
        let read = Operation::Device(DeviceRequest::Read { at: 1 << 40, len: 4096 });
        let bytes = request(15, &arguments);
        assert_eq!(Request::parse(&bytes), Some(Request { unique: 7, operation: read }));
        assert_eq!(Request::parse(&bytes[..79]), None);
    }

    #[test]
    fn changes_are_understood() {
        let parsed = |opcode, arguments: &[u64]| {
            let bytes: Vec<_> = arguments.iter().flat_map(|word| word.to_ne_bytes()).collect();
            Request::parse(&request(opcode, &bytes)).map(|request| request.operation)
        };
        let write = |fua| Operation::Device(DeviceRequest::Write { at: 8192, len: 4096, fua });
        assert_eq!(parsed(16, &[0, 8192, 4096, 0, 0]), Some(write(false)));
        assert_eq!(parsed(16, &[0, 8192, 4096, 0, libc::O_DSYNC as u64]), Some(write(true)));
        assert_eq!(parsed(16, &[0, 8192, 4096]), None);
        assert_eq!(parsed(20, &[0, 0]), Some(Operation::Device(DeviceRequest::Flush)));
        let erase = |unmap| {
            let how = Erase::Zeroes { unmap };
            Operation::Device(DeviceRequest::Erase { at: 4096, len: 1 << 30, how })
        };
        for (mode, operation) in [
            (0x3, erase(true)),
            (0x11, erase(false)),
            (0x0, Operation::Refuse(libc::EOPNOTSUPP)),
            (0x8, Operation::Refuse(libc::EOPNOTSUPP)),
        ] {
            assert_eq!(parsed(43, &[0, 4096, 1 << 30, mode]), Some(operation), "{mode:#x}");
        }
        assert_eq!(written(4096), [4096u32.to_ne_bytes(), [0; 4]].concat()[..]);
    }

    #[test]
    fn other_changes_are_refused_and_unknown_requests_named_so() {
        for (opcode, errno) in [(4, libc::EROFS), (36, libc::ENOSYS)] {
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
        let Init::Reply { bytes, rings: false, resends: false } =
            answer_init(&request(26, &arguments(7, all)), RINGS)
        else {
            panic!("refused a good INIT");
        };
        assert_eq!(bytes[..4], 80u32.to_ne_bytes());
        assert_eq!(bytes[8..16], 7u64.to_ne_bytes());
        let unusable =
            |bytes: &[u8]| assert_eq!(answer_init(bytes, Features::default()), Init::Unusable);
        unusable(&request(26, &arguments(8, all)));
        unusable(&request(26, &arguments(7, all & !FLAG_ASYNC_DIO)));
        unusable(&request(15, &arguments(7, all)));
        unusable(&request(26, &[])[..40]);
    }

    #[test]
    fn rings_are_taken_when_wanted_and_offered() {
        let all = FLAG_ASYNC_READ | FLAG_ASYNC_DIO | FLAG_MAX_PAGES | FLAG_INIT_EXT;
        let taken = |flags: u64, rings: bool| {
            let words = [7, 45, 131_072, flags as u32, (flags >> 32) as u32];
            let request = request(26, &words.map(u32::to_ne_bytes).concat());
            let features = Features { rings, writes: false };
            let Init::Reply { bytes, rings, .. } = answer_init(&request, features) else {
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

    /// A version of the kernel does not tell it: distributions add and leave out what they want.
    #[test]
    fn requests_are_sent_again_where_the_kernel_offers_that() {
        let all =
            FLAG_ASYNC_READ | FLAG_ASYNC_DIO | FLAG_MAX_PAGES | FLAG_BIG_WRITES | FLAG_INIT_EXT;
        let resends = |flags: u64, minor: u32, writes: bool| {
            let words = [7, minor, 131_072, flags as u32, (flags >> 32) as u32];
            let request = request(26, &words.map(u32::to_ne_bytes).concat());
            let answer = answer_init(&request, Features { rings: false, writes });
            let Init::Reply { bytes, resends, .. } = answer else { panic!("refused a good INIT") };
            let said = u32::from_ne_bytes([bytes[48], bytes[49], bytes[50], bytes[51]]);
            assert_eq!(u64::from(said) << 32 & FLAG_HAS_RESEND != 0, resends);
            resends
        };
        assert!(resends(all | FLAG_HAS_RESEND, 36, true));
        assert!(!resends(all, 45, true));
        assert!(!resends(all | FLAG_HAS_RESEND, 45, false));
        assert!(!resends((all | FLAG_HAS_RESEND) & !FLAG_INIT_EXT, 45, true));
    }
}
