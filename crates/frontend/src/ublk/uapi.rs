//! The kernel's interface to block devices in user space, as far as it is used here: structures
//! and numbers of `linux/ublk_cmd.h`.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// `struct ublksrv_ctrl_cmd`: content of a control command's submission entry.
#[derive(IntoBytes, Immutable, Default)]
#[repr(C)]
pub(super) struct ControlCommand {
    pub(super) device: u32,
    pub(super) queue: u16,
    pub(super) len: u16,
    pub(super) address: u64,
    pub(super) data: u64,
    pub(super) path_len: u16,
    pub(super) padding: [u8; 6],
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(FromBytes, IntoBytes, Immutable, Default, Clone, Debug)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) padding0: u16,
    pub(super) max_io_len: u32,
    pub(super) device: u32,
    pub(super) server_pid: i32,
    pub(super) padding1: u32,
    pub(super) flags: u64,
    /// The driver keeps these 64 bits for the maker of the device.
    pub(super) owner: u64,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) reserved: [u64; 2],
}

/// `struct ublk_params` with the parts of basics and of discards.
#[derive(FromBytes, IntoBytes, Immutable, Default, Clone, Debug)]
#[repr(C)]
pub(super) struct Params {
    pub(super) len: u32,
    pub(super) types: u32,
    pub(super) attributes: u32,
    pub(super) logical_block_shift: u8,
    pub(super) physical_block_shift: u8,
    pub(super) io_opt_shift: u8,
    pub(super) io_min_shift: u8,
    pub(super) max_sectors: u32,
    pub(super) chunk_sectors: u32,
    pub(super) sectors: u64,
    pub(super) virt_boundary_mask: u64,
    pub(super) discard_alignment: u32,
    pub(super) discard_granularity: u32,
    pub(super) discard_max_sectors: u32,
    pub(super) write_zeroes_max_sectors: u32,
    pub(super) discard_max_segments: u16,
    pub(super) discard_reserved: u16,
    /// The first field of the part on device numbers, which is not ours to set.
    pub(super) char_major: u32,
}

/// `struct ublksrv_io_desc`: a request, in memory that the driver shares with the server.
#[derive(FromBytes, Immutable, Clone, Copy)]
#[repr(C)]
pub(super) struct Descriptor {
    pub(super) op_flags: u32,
    pub(super) sectors: u32,
    pub(super) start_sector: u64,
    pub(super) address: u64,
}

/// `struct ublksrv_io_cmd`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    pub(super) result: i32,
    pub(super) address: u64,
}

const _: () = assert!(size_of::<ControlCommand>() == 32);
const _: () = assert!(size_of::<DeviceInfo>() == 64);
const _: () = assert!(size_of::<Params>() == 64);
const _: () = assert!(size_of::<Descriptor>() == 24);
const _: () = assert!(size_of::<IoCommand>() == 16);

/// `_IOR('u', number, …)` (2) or `_IOWR('u', number, …)` (3).
const fn encode(direction: u32, number: u32, len: usize) -> u32 {
    direction << 30 | (len as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control(direction: u32, number: u32) -> u32 {
    encode(direction, number, size_of::<ControlCommand>())
}

pub(super) const GET_DEV_INFO: u32 = control(2, 0x02);
pub(super) const ADD_DEV: u32 = control(3, 0x04);
pub(super) const START_DEV: u32 = control(3, 0x06);
pub(super) const STOP_DEV: u32 = control(3, 0x07);
pub(super) const SET_PARAMS: u32 = control(3, 0x08);
pub(super) const GET_PARAMS: u32 = control(2, 0x09);
pub(super) const START_USER_RECOVERY: u32 = control(3, 0x10);
pub(super) const END_USER_RECOVERY: u32 = control(3, 0x11);
pub(super) const GET_FEATURES: u32 = control(2, 0x13);
pub(super) const DEL_DEV_ASYNC: u32 = control(2, 0x14);

pub(super) const FETCH_REQ: u32 = encode(3, 0x20, size_of::<IoCommand>());
pub(super) const COMMIT_AND_FETCH_REQ: u32 = encode(3, 0x21, size_of::<IoCommand>());

/// A device outlives its server; requests in its hands are issued again to the next one.
pub(super) const FLAG_USER_RECOVERY: u64 = 1 << 3;
pub(super) const FLAG_USER_RECOVERY_REISSUE: u64 = 1 << 4;
pub(super) const FLAG_IOCTL_ENCODE: u64 = 1 << 6;
/// The server puts the bytes into a request with `pwrite`.
pub(super) const FLAG_USER_COPY: u64 = 1 << 7;

pub(super) const PARAM_BASIC: u32 = 1;
pub(super) const PARAM_DISCARD: u32 = 2;
pub(super) const ATTRIBUTE_READ_ONLY: u32 = 1;
pub(super) const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;
pub(super) const ATTRIBUTE_FUA: u32 = 1 << 3;

/// Not started yet, or stopped.
pub(super) const STATE_DEAD: u16 = 0;
/// Its server is dead; it waits for another.
pub(super) const STATE_QUIESCED: u16 = 2;

pub(super) const OP_READ: u32 = 0;
pub(super) const OP_WRITE: u32 = 1;
pub(super) const OP_FLUSH: u32 = 2;
pub(super) const OP_DISCARD: u32 = 3;
pub(super) const OP_WRITE_ZEROES: u32 = 5;
pub(super) const OP_MASK: u32 = 0xff;
/// The write is durable when it is answered.
pub(super) const OP_FUA: u32 = 1 << 13;
/// Zeros are written without giving space back.
pub(super) const OP_NO_UNMAP: u32 = 1 << 15;
pub(super) const SECTOR_SHIFT: u32 = 9;

/// Offset in `/dev/ublkcN` at which a queue's descriptors are mapped.
pub(super) const fn descriptors_offset(queue: u16) -> u64 {
    const DEPTH_MAX: u64 = 4096;
    queue as u64 * DEPTH_MAX * size_of::<Descriptor>() as u64
}

/// Offset in `/dev/ublkcN` of a request's bytes.
pub(super) const fn data_offset(queue: u16, tag: u16) -> u64 {
    const BASE: u64 = 0x8000_0000;
    BASE + ((queue as u64) << 41 | (tag as u64) << 25)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        assert_eq!(ADD_DEV, 0xc020_7504);
        assert_eq!(GET_FEATURES, 0x8020_7513);
        assert_eq!(FETCH_REQ, 0xc010_7520);
        assert_eq!(data_offset(1, 2), 0x8000_0000 + (1 << 41) + (2 << 25));
        assert_eq!(descriptors_offset(2), 2 * 4096 * 24);
    }
}
